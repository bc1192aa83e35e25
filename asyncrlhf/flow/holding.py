"""What passes the gate: rows on their way in, leases in somebody's hands, batches on their way out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from asyncrlhf.flow.ledger import Batch, Lease
from asyncrlhf.messages import Experience, Prompt

__all__ = ("Holder", "Popped", "PromptRows", "Unfinished", "byte_count", "oldest", "unfinished")


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


class Unfinished(NamedTuple):
    """A live lease that is not ready: granted `seconds` ago, its answers at `where` ("": at no engine)."""

    uid: int
    attempt: int
    state: str
    seconds: float
    where: str


def unfinished(
    granted: Mapping[int, float], live: Mapping[int, Lease], where: Callable[[int, int], str], now: float
) -> list[Unfinished]:
    """The leases in `granted` (uid -> time), the oldest first."""
    found: list[Unfinished] = []
    for uid, at in sorted(granted.items(), key=lambda item: item[1]):
        attempt = live[uid].attempt
        found.append(Unfinished(uid, attempt, live[uid].state, now - at, where(uid, attempt)))
    return found


def oldest(leases: Sequence[Unfinished]) -> str:
    """The first of them in words, for messages about runs that do not move."""
    if not leases:
        return "no lease is live"
    uid, attempt, state, seconds, where = leases[0]
    whose = f"uid {uid} (attempt {attempt}, {state}{where and ' at '}{where})"
    return f"the oldest lease is {whose}, granted {seconds:.1f} s ago"


def byte_count(experience: Experience) -> int:
    """Roughly what an experience occupies as arrays: prompt ids, and per response token id, version and columns."""
    rollout = experience.rollout
    tokens = sum(len(sample.token_ids) for sample in rollout.samples)
    return 4 * len(rollout.prompt.token_ids) * len(rollout.samples) + 24 * tokens
