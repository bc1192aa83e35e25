"""The errors by which a ledger ends a run, in words."""

from __future__ import annotations

from asyncrlhf.errors import Diverged, Exhausted, NoSignal, RunEnded
from asyncrlhf.flow.ledger import Ledger

__all__ = ("end_error",)


def end_error(ledger: Ledger, last_error: str) -> RunEnded | None:
    """What to raise; None if the run goes on, or has ended well. `last_error`: why the last prompt failed."""
    rules = ledger.rules
    if ledger.reason == "exhausted":
        last = f"; the last failure was {last_error}" if last_error else ""
        return Exhausted(
            f"{rules.filtered_limit} prompts in a row were filtered or failed (limits.max_filtered = "
            f"{rules.filtered_limit}) without one rollout to train on{last}"
        )
    if ledger.reason == "diverged":
        return Diverged(
            f"{rules.max_void_steps} train steps in a row had no finite optimizer step "
            f"(limits.max_void_steps = {rules.max_void_steps}); lower the learning rate or the staleness"
        )
    if ledger.reason == "no_signal":
        return NoSignal(
            f"{rules.max_void_steps} train steps in a row held no token to train on (limits.max_void_steps = "
            f"{rules.max_void_steps}): every answer to a prompt earned the same reward, or all tokens were masked"
        )
    return None
