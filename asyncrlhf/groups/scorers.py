"""What scores the answers of a rollout: a reward function on their text, or a model on their tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Protocol

from asyncrlhf.errors import EngineLost, GroupError, SampleError
from asyncrlhf.groups.frozen import FrozenEngine
from asyncrlhf.messages import PerSample, Rollout, ScoreRequest

__all__ = ("ModelScorer", "RuleScorer", "Scorer")


PATIENCE = 5.0
"""Seconds that an engine may take to say that it lives."""


class Scorer(Protocol):
    """Scores the answers of one rollout, in their order. Raises SampleError naming uid and answer."""

    async def start(self) -> None: ...

    async def score(self, rollout: Rollout) -> PerSample: ...


class RuleScorer:
    """Scores with a reward function, in an engine of its own.

    A function that holds the interpreter (or a process that was killed) takes every call in flight down with it. Those
    are asked again one at a time, so that only the prompt at fault fails.
    """

    def __init__(self, engine: FrozenEngine, decode: Callable[[Sequence[int]], str], *, silence: float) -> None:
        """`decode`: response tokens to text. `silence`: seconds after which a call is asked for a sign of life, above
        the function's own time-out; one that gives none within PATIENCE is started again."""
        self._engine, self._decode, self._silence = engine, decode, silence
        self._suspects = asyncio.Lock()

    async def start(self) -> None:
        await self._engine.start()

    async def score(self, rollout: Rollout) -> PerSample:
        prompt = rollout.prompt
        request = ScoreRequest(
            uid=prompt.uid,
            prompt=prompt.text,
            responses=tuple(self._decode(sample.token_ids) for sample in rollout.samples),
            ground_truth=prompt.ground_truth,
            columns=prompt.columns,
        )
        try:
            return await self._attempt(request)
        except EngineLost:
            async with self._suspects:
                try:
                    return await self._attempt(request)
                except EngineLost as error:
                    first = str(error).partition("\n")[0]
                    raise SampleError(f"uid {prompt.uid}: its reward function took its process down: {first}") from None

    async def _attempt(self, request: ScoreRequest) -> PerSample:
        """Waits for the reward; meanwhile looks for signs of life."""
        call = asyncio.ensure_future(self._engine.attempt("score", request))
        try:
            while not call.done():
                await asyncio.wait([call], timeout=self._silence)
                if not call.done():
                    await self._look()
            return call.result()
        finally:
            call.cancel()

    async def _look(self) -> None:
        incarnation = self._engine.incarnation
        try:
            async with asyncio.timeout(PATIENCE):
                await self._engine.attempt("ping")
        except TimeoutError:
            if self._engine.incarnation == incarnation:
                await self._engine.give_up_on(
                    f"group {self._engine.spec.group!r}: no sign of life for {PATIENCE:g} s: a reward function "
                    "holds the interpreter or blocks its event loop"
                )
        except EngineLost:
            return


class ModelScorer:
    """Scores with a reward model. Rollouts that wait for the forward before theirs are read together in the next."""

    def __init__(self, engine: FrozenEngine, calibration: Sequence[Rollout] = ()) -> None:
        """`calibration`: answers whose mean score becomes 0, with a deviation of 1."""
        self._engine, self._calibration = engine, calibration
        self._mean, self._deviation = 0.0, 1.0
        self._waiting: dict[asyncio.Future[PerSample], Rollout] = {}
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Raises GroupError, also when the answers to calibrate with all score the same."""
        await self._engine.start()
        if not self._calibration:
            return
        scores = [score for found in await self._engine.read("scores", self._calibration) for score in found]
        self._mean, self._deviation = fmean(scores), pstdev(scores)
        if not (math.isfinite(self._deviation) and self._deviation > 0):
            raise GroupError(
                f"group {self._engine.spec.group!r}: the {len(scores)} answers to calibrate with have scores of "
                f"deviation {self._deviation}; use a trained reward model, or leave calibrate out"
            )

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
        found = await self._engine.read("scores", list(waiting.values()))
        for reply, scores in zip(waiting, found, strict=True):
            if self._waiting.pop(reply, None) is not None:
                reply.set_result(tuple((score - self._mean) / self._deviation for score in scores))
