"""FakeRows and FakeReward: where prompts come from and what scores their answers, without files or functions."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from random import Random

from asyncrlhf.errors import SampleError
from asyncrlhf.messages import PerSample, Prompt, Rollout

__all__ = ("FakeReward", "FakeRows")


class FakeRows:
    """The data set as the gate reads it: `rows` rows, passed over `epochs` times; uid = epoch * rows + position.

    Asserts what the gate owes a data set: no row is asked for once it has been released.
    """

    def __init__(self, rows: int | None, *, epochs: int = 1, unusable: float = 0.0, seed: int = 0) -> None:
        """`rows` None: without end. `unusable`: share of rows that cannot be encoded."""
        self.count = None if rows is None else rows * epochs
        self.released: set[int] = set()
        self._rows, self._unusable, self._seed = rows, unusable, seed

    def has(self, uid: int) -> bool:
        return self.count is None or uid < self.count

    def epoch(self, uid: int) -> int:
        return uid // self._rows if self._rows else 0

    def prompt(self, uid: int, attempt: int, version: int) -> Prompt:
        """Raises SampleError for an unusable row."""
        assert self.has(uid), f"row {uid} of {self.count} was asked for"
        assert uid not in self.released, f"row {uid} was asked for after its release"
        if Random(f"{self._seed}/{uid}").random() < self._unusable:
            raise SampleError(f"prompt {uid}: unusable by the fault plan")
        position = uid % self._rows if self._rows else uid
        return Prompt(
            uid=uid,
            epoch=self.epoch(uid),
            attempt=attempt,
            version=version,
            token_ids=(8 + position % 50, 9),
            text=f"{position}>",
            ground_truth=position,
        )

    def release(self, uid: int) -> None:
        self.released.add(uid)


class FakeReward:
    """A Scorer: the reward of an answer is a function of its tokens, a multiple of 1/8, after a random delay."""

    def __init__(
        self,
        *,
        seed: int = 0,
        timing: int = 0,
        seconds: tuple[float, float] = (0.0, 0.0),
        failing: float = 0.0,
        equal: float = 0.0,
        hanging: float = 0.0,
        timeout: float = 60.0,
    ) -> None:
        """`seconds`: shortest and longest delay. Shares of rollouts, by prompt: `failing` raise SampleError, in
        `equal` every answer earns the same, `hanging` run into `timeout` and then raise SampleError."""
        self.running = self.most_running = 0
        self._seed, self._timing = seed, timing
        self._seconds, self._timeout = seconds, timeout
        self._failing, self._equal, self._hanging = failing, equal, hanging

    @property
    def engine(self) -> None:
        """It has none."""

    async def start(self) -> None:
        """It has no engine."""

    def supervised(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def score(self, rollout: Rollout) -> PerSample:
        prompt = rollout.prompt
        draw = Random(f"{self._seed}/{prompt.uid}")
        delay = Random(f"{self._seed}/{self._timing}/{prompt.uid}/{prompt.attempt}").uniform(*self._seconds)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            if draw.random() < self._hanging:
                await asyncio.sleep(self._timeout)
                raise SampleError(f"uid {prompt.uid}: no reward within {self._timeout:g} s")
            await asyncio.sleep(delay)
        finally:
            self.running -= 1
        if draw.random() < self._failing:
            raise SampleError(f"uid {prompt.uid}: no reward by the fault plan")
        if draw.random() < self._equal:
            return (0.5,) * len(rollout.samples)
        return tuple(sum(sample.token_ids) % 9 / 8 for sample in rollout.samples)
