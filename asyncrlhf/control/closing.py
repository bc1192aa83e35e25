"""What the log says of a train step that has ended. Pure."""

from __future__ import annotations

from msgspec.structs import asdict

from asyncrlhf.flow.ledger import Ledger
from asyncrlhf.observe.events import StepEnded

__all__ = ("step_ended",)


def step_ended(ledger: Ledger, step: int, void: str, publish_count: int, seconds: float) -> StepEnded:
    """`void`: why no optimizer step was applied; empty if one was."""
    account = ledger.account()
    return StepEnded(
        train_step=step,
        void=bool(void),
        reason=void,
        policy_version=ledger.version,
        published_version=ledger.published if ledger.published is not None else -1,
        publish_count=publish_count,
        tokens=asdict(account.tokens),
        leases={**account.counts, **{f"again({name})": count for name, count in account.leased_again.items()}},
        seconds=seconds,
    )
