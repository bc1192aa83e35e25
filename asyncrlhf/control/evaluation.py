"""Evaluation on held-out prompts, outside the ledger: pinned to one version, or labelled as mixed.

Waits for the rollout and reward groups; a publish waits for it at most `max_hold` seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import fmean

from asyncrlhf.errors import SampleError
from asyncrlhf.groups import RewardGroup, RolloutGroup
from asyncrlhf.messages import Prompt, Rollout
from asyncrlhf.observe.events import Evaluated, EvaluationStarted, Warned
from asyncrlhf.observe.log import EventLog

__all__ = ("Evaluator",)


class Evaluator:
    """Runs an evaluation every `every` train steps; a new one starts only when the last has ended."""

    def __init__(
        self,
        rollout: RolloutGroup,
        reward: RewardGroup,
        prompts: Sequence[Prompt],
        log: EventLog,
        *,
        every: int,
        temperature: float,
        max_hold: float,
    ) -> None:
        self._rollout, self._reward, self._prompts = rollout, reward, prompts
        self._emit, self._elapsed = log.emit, log.elapsed
        self._every, self._temperature, self._max_hold = every, temperature, max_hold
        self._running: asyncio.Task[None] | None = None
        self._cut_off = ""

    def start(self, train_step: int, version: int, tasks: asyncio.TaskGroup) -> None:
        """Begin, if `train_step` asks for it, on the published `version`, in the caller's TaskGroup."""
        if self._every and train_step % self._every == 0 and (self._running is None or self._running.done()):
            self._running = tasks.create_task(self._evaluate(train_step, version), name="evaluation")

    def cancel(self, reason: str) -> None:
        """Give up an evaluation under way, and wait for none from now on."""
        self._cut_off, self._max_hold = reason, 0.0
        if self._running is not None:
            self._running.cancel()

    async def hold(self) -> None:
        """Wait for an evaluation under way, at most `max_hold` seconds."""
        if self._running is not None and not self._running.done():
            await asyncio.wait([self._running], timeout=self._max_hold)

    async def finish(self) -> None:
        """At the end of a run: wait as `hold` does, then cancel."""
        await self.hold()
        if self._running is None:
            return
        if not self._running.done():
            self.cancel(self._cut_off or f"after evaluation.max_hold = {self._max_hold:g} s")
            await asyncio.wait([self._running])
        if self._running.cancelled():
            self._emit(Warned(message=f"an evaluation was cut off {self._cut_off}"))

    async def _evaluate(self, train_step: int, version: int) -> None:
        started = self._elapsed()
        self._emit(EvaluationStarted(train_step=train_step, version=version))
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(self._one(prompt)) for prompt in self._prompts]
        results = [answer.result() for answer in answers]
        done = [result for result in results if result is not None]
        if not done:
            self._emit(Warned(message=f"evaluation at train step {train_step}: no prompt could be answered and scored"))
            return
        versions = {s.version for rollout, _ in done for x in rollout.samples for s in x.segments}
        low, high = min(versions), max(versions)
        self._emit(
            Evaluated(
                train_step=train_step,
                label=f"v{low}" if low == high else f"mixed(v{low}..v{high})",
                reward_mean=fmean(reward for _, reward in done),
                count=len(done),
                token_count=sum(len(x.token_ids) for rollout, _ in done for x in rollout.samples),
                seconds=self._elapsed() - started,
            )
        )

    async def _one(self, prompt: Prompt) -> tuple[Rollout, float] | None:
        try:
            rollout = await self._rollout.evaluate(prompt, self._temperature)
            (reward,) = await self._reward.score(rollout)
        except SampleError as error:
            self._emit(Warned(message=f"evaluation prompt {-prompt.uid - 1} left out: {error}"))
            return None
        return rollout, reward
