"""What scores the answers of a rollout: a reward function on their text, or a model on their tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from statistics import fmean, pstdev
from typing import Protocol

from asyncrlhf.errors import DataLost, EngineLost, GroupError, SampleError
from asyncrlhf.groups.answers import token_ids_of
from asyncrlhf.groups.frozen import FrozenEngine, Incarnation
from asyncrlhf.messages import PerSample, Rollout, ScoreRequest
from asyncrlhf.observe.events import Warned

__all__ = ("ModelScorer", "RuleScorer", "Scorer")


PATIENCE = 5.0
"""Seconds that an engine may take to say that it lives."""


class Scorer(Protocol):
    """Scores the answers of one rollout, in their order. Raises SampleError naming uid and answer."""

    @property
    def engine(self) -> FrozenEngine | None:
        """Its engine, if it computes on devices that it may share."""
        ...

    async def start(self) -> None: ...

    def supervised(self) -> AbstractAsyncContextManager[None]:
        """Open while the group serves: what the scorer does on its own ends with it."""
        ...

    async def score(self, rollout: Rollout) -> PerSample: ...


class RuleScorer:
    """Scores with a reward function, in an engine of its own.

    A function that holds the interpreter (or a process that was killed) takes every call in flight down with it. Those
    are suspects: each is asked again alone, while new calls wait, so that only the prompt at fault fails.
    """

    def __init__(self, engine: FrozenEngine, decode: Callable[[Sequence[int]], str], *, silence: float) -> None:
        """`decode`: response tokens to text. `silence`: seconds after which a call is asked for a sign of life, above
        the function's own time-out; one that gives none within PATIENCE is started again."""
        self._engine, self._decode, self._silence = engine, decode, silence
        self._company = _Company()

    @property
    def engine(self) -> None:
        """Reward functions compute on CPUs."""

    async def start(self) -> None:
        await self._engine.start()

    def supervised(self) -> AbstractAsyncContextManager[None]:
        return self._engine.supervised()

    async def score(self, rollout: Rollout) -> PerSample:
        prompt = rollout.prompt
        request = ScoreRequest(
            uid=prompt.uid,
            prompt=prompt.text,
            responses=tuple(map(self._decode, await token_ids_of(rollout))),
            ground_truth=prompt.ground_truth,
            columns=prompt.columns,
        )
        async with self._company.together():
            first = await self._engine.serving()
            with suppress(EngineLost):
                return await self._attempt(first, request)
        async with self._company.alone():
            second = await self._engine.serving()
            try:
                return await self._attempt(second, request)
            except EngineLost as error:
                self._engine.excuse(first)
                self._engine.excuse(second)
                words = str(error).partition("\n")[0]
                raise SampleError(f"uid {prompt.uid}: its reward function took its process down: {words}") from None

    async def _attempt(self, engine: Incarnation, request: ScoreRequest) -> PerSample:
        """Waits for the reward; meanwhile looks for signs of life."""
        call = asyncio.ensure_future(self._engine.ask(engine, "score", request))
        try:
            while not call.done():
                await asyncio.wait([call], timeout=self._silence)
                if not call.done():
                    await self._look(engine)
            return call.result()
        finally:
            call.cancel()

    async def _look(self, engine: Incarnation) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                await self._engine.ask(engine, "ping")
        except TimeoutError:
            await self._engine.give_up_on(
                engine,
                f"group {self._engine.spec.group!r}: no sign of life for {PATIENCE:g} s: a reward function "
                "holds the interpreter or blocks its event loop",
            )
        except EngineLost:
            return


class _Company:
    """Any number of calls together, or one alone. One that asks to be alone waits for those under way, and new ones
    wait for it."""

    def __init__(self) -> None:
        self._under_way = self._wanting = 0
        self._room, self._empty, self._one = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._room.set()
        self._empty.set()

    @asynccontextmanager
    async def together(self) -> AsyncGenerator[None, None]:
        while self._wanting:
            await self._room.wait()
        self._under_way += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._empty.set()

    @asynccontextmanager
    async def alone(self) -> AsyncGenerator[None, None]:
        self._wanting += 1
        self._room.clear()
        try:
            async with self._one:
                await self._empty.wait()
                yield
        finally:
            self._wanting -= 1
            if not self._wanting:
                self._room.set()


class ModelScorer:
    """Scores with a reward model. Rollouts that wait for the forward before theirs are read together in the next."""

    def __init__(self, engine: FrozenEngine, calibration: Sequence[Rollout] = (), *, warning: str = "") -> None:
        """`calibration`: answers whose mean score becomes 0, with a deviation of 1. `warning`: what the log is to say
        about them."""
        self.engine, self._calibration, self._warning = engine, calibration, warning
        self._mean, self._deviation = 0.0, 1.0
        self._waiting: dict[asyncio.Future[PerSample], Rollout] = {}
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Raises GroupError, also when the answers to calibrate with all score the same."""
        await self.engine.start()
        if self._warning:
            self.engine.log.emit(Warned(message=self._warning))
        if not self._calibration:
            return
        scores: list[float] = []
        for found in await self.engine.read("scores", self._calibration):
            if isinstance(found, DataLost):
                raise found
            scores += map(float, found)
        what = f"group {self.engine.spec.group!r}: of the {len(scores)} answers to calibrate with"
        advice = "use a trained reward model, or leave calibrate out"
        broken = sum(not math.isfinite(score) for score in scores)
        if broken:
            raise GroupError(f"{what} {broken} have a score that is not finite; {advice}")
        self._mean, self._deviation = fmean(scores), pstdev(scores)
        if not self._deviation > 0:
            raise GroupError(f"{what} all have the score {self._mean:g}; {advice}")

    def supervised(self) -> AbstractAsyncContextManager[None]:
        return self.engine.supervised()

    async def score(self, rollout: Rollout) -> PerSample:
        reply: asyncio.Future[PerSample] = asyncio.get_running_loop().create_future()
        self._waiting[reply] = rollout
        try:
            async with self._turn:
                if not reply.done():
                    await self._read()
            scores = reply.result()
        finally:
            self._waiting.pop(reply, None)
        for number, score in enumerate(scores):
            if not math.isfinite(score):
                raise SampleError(f"uid {rollout.prompt.uid}, answer {number}: the reward model gave {score}")
        return scores

    async def _read(self) -> None:
        """All that wait, in one forward. Who is cancelled meanwhile leaves the others waiting for the next turn."""
        waiting = dict(self._waiting)
        found = await self.engine.read("scores", list(waiting.values()))
        for reply, scores in zip(waiting, found, strict=True):
            if self._waiting.pop(reply, None) is None:
                continue
            if isinstance(scores, DataLost):
                reply.set_exception(scores)
            else:
                reply.set_result(tuple((score - self._mean) / self._deviation for score in scores))
