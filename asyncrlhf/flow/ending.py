"""The errors by which a ledger ends a run, in words."""

from __future__ import annotations

import traceback

from asyncrlhf.errors import AsyncRLHFError, Diverged, Exhausted, NoSignal, RunEnded
from asyncrlhf.flow.ledger import Ledger

__all__ = ("describe", "end_error")


def describe(error: BaseException) -> str:
    """One line: type, message, and for an error that nobody raised on purpose the place it came from."""
    frames = list(traceback.extract_tb(error.__traceback__))
    known = isinstance(error, AsyncRLHFError) or not frames
    where = "" if known else f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})"
    return f"{type(error).__name__}: {error}{where}"


def end_error(ledger: Ledger, last_error: str, cause: BaseException | None = None) -> RunEnded | None:
    """What to raise; None if the run goes on, or has ended well. `last_error`, `cause`: why the last prompt failed."""
    error = _end_error(ledger, last_error)
    if error is not None and cause is not None:
        error.__cause__ = cause
    return error


def _end_error(ledger: Ledger, last_error: str) -> RunEnded | None:
    rules = ledger.rules
    if ledger.reason == "exhausted":
        last = f"; the last failure was {last_error}" if last_error else ""
        return Exhausted(
            f"{rules.filtered_limit} prompts in a row were filtered, failed or timed out (limits.max_filtered = "
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
