"""What a rollout group keeps: how to sample, the answers under way, the engines they are at."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from asyncrlhf.abc import EngineHandle, EngineSpec
from asyncrlhf.flow.silence import Silence
from asyncrlhf.groups.supervisor import RestartBudget
from asyncrlhf.messages import GenerateRequest, Prompt, Rollout, Sample, Stored, fetch

__all__ = ("LeaseReports", "Outside", "Replica", "Sampling", "Task", "answer_seed", "token_ids_of")


class LeaseReports(Protocol):
    """Whom the group tells what it knows about leases (the gate)."""

    def report(self, uid: int, attempt: int, answer: int, version: int, token_count: int) -> None: ...

    def score(self, prompt: Prompt) -> None: ...

    def sample_more(self, prompt: Prompt) -> int: ...

    def drop(self, uid: int, attempt: int, reason: str, *, counts: bool = False) -> None: ...

    def alive(self) -> None: ...

    def together(self) -> AbstractContextManager[None]: ...

    @property
    def silence(self) -> Silence: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample, from the configuration of the group and the run."""

    answers_per_prompt: int
    min_answers: int
    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int


@dataclass(slots=True, eq=False)
class Task:
    """All answers to one prompt. `answers`: request id -> answer number, of those still outstanding."""

    prompt: Prompt
    lease: bool
    count: int
    temperature: float
    reply: asyncio.Future[Rollout]
    started: float
    first: int = 0
    """Number of its first answer: those of an earlier call under the same lease come before."""
    answers: dict[str, int] = field(default_factory=dict[str, int])
    samples: dict[int, Sample] = field(default_factory=dict[int, Sample])
    rejected: list[str] = field(default_factory=list[str])


@dataclass(slots=True, eq=False)
class Replica:
    """One engine: `key` names it in the membership, `requests` are its answers outstanding."""

    key: str
    spec: EngineSpec
    budget: RestartBudget
    handle: EngineHandle | None = None
    incarnation: int = 0
    serving: bool = False
    version: int = -1
    """Of the weights that it computes with; -1: none have been published to it."""
    prepared: int = -1
    """Of those that it was brought last."""
    asleep: bool = False
    """Its devices are another group's for now."""
    changing: bool = False
    """Told to sleep or to wake, and it has not said that it has."""
    aborting: int = 0
    """Aborts that it has not answered yet."""
    requests: dict[str, GenerateRequest] = field(default_factory=dict[str, GenerateRequest])
    draining: bool = False
    """It is given no new requests, until its group's `release`."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class Outside:
    """Answers that no lease stands for (of evaluations), and how long they may keep others from shared devices."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.max_hold = math.inf
        """Seconds that others wait for those outstanding."""
        self.enough = False
        """They have waited as long as that."""
        self._on_change = on_change
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def must_go_on(self) -> bool:
        """Whether others wait for them."""
        return self._count > 0 and not self.enough

    def begin(self, count: int) -> None:
        self._count += count

    def end(self, count: int) -> None:
        self._count -= count
        if not self._count:
            self._forget()

    def hold_again(self) -> None:
        """Those outstanding have all of that time again."""
        self._forget()
        self._on_change()

    def hold_up(self) -> None:
        """Somebody has begun to wait."""
        if self._count and self._timer is None and self.max_hold < math.inf:
            self._timer = asyncio.get_running_loop().call_later(self.max_hold, self.hold_no_longer)

    def hold_no_longer(self) -> None:
        """Nobody waits for those outstanding any more: they go on when it is their group's turn."""
        self.enough = self._count > 0
        self._on_change()

    def _forget(self) -> None:
        self.enough = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def answer_seed(run: int, uid: int, attempt: int, number: int) -> int:
    """A 63-bit seed for one answer, equal in every run of the same seed and different for every answer of a run."""
    mixed = run
    for part in (uid, attempt, number):
        mixed = (mixed * 6364136223846793005 + part + 1442695040888963407) & (2**64 - 1)
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)  # the finalizer of splitmix64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & (2**64 - 1)
        mixed ^= mixed >> 31
    return mixed >> 1


async def token_ids_of(rollout: Rollout) -> list[Sequence[int]]:
    """Token ids of every answer, here. Waits for stored ones, in a thread. Raises DataLost."""
    columns = [sample.token_ids for sample in rollout.samples]
    stored = [column for column in columns if isinstance(column, Stored)]
    if not stored:
        return columns
    found = iter(await asyncio.to_thread(fetch, stored))
    return [next(found).tolist() if isinstance(column, Stored) else column for column in columns]
