"""What passes the gate: rows on their way in, leases in somebody's hands, batches on their way out."""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Protocol

from asyncrlhf.flow.ledger import Batch
from asyncrlhf.messages import Experience, Prompt

__all__ = ("Holder", "Popped", "PromptRows", "byte_count")


class PromptRows(Protocol):
    """The data set as the gate reads it: rows by uid, encoded."""

    def has(self, uid: int) -> bool:
        """Whether the stream reaches this far."""
        ...

    def prompt(self, uid: int, attempt: int, version: int) -> Prompt:
        """Raises SampleError for a row that cannot be used."""
        ...

    def release(self, uid: int) -> None:
        """This row will not be asked for again."""
        ...


class Holder:
    """One side of an iterator that holds at most one lease for the worker task it runs in."""

    __slots__ = ("prompt", "task")

    def __init__(self) -> None:
        self.prompt: Prompt | None = None
        self.task: asyncio.Task[object] | None = None


class Popped(NamedTuple):
    """A batch as the ledger counted it, its experiences in pop order, and how long the trainer waited, in seconds."""

    batch: Batch
    experiences: list[Experience]
    waited: float


def byte_count(experience: Experience) -> int:
    """Roughly what an experience occupies as arrays: prompt ids, and per response token id, version and columns."""
    rollout = experience.rollout
    tokens = sum(len(sample.token_ids) for sample in rollout.samples)
    return 4 * len(rollout.prompt.token_ids) * len(rollout.samples) + 24 * tokens
