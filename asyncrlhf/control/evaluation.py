"""Evaluation on held-out prompts, outside the ledger: pinned to one version, or labelled as mixed.

Waits for the rollout and reward groups; a publish waits for it at most `max_hold` seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean

from asyncrlhf.errors import DataLost, SampleError
from asyncrlhf.groups import RewardGroup, RolloutGroup
from asyncrlhf.groups.answers import token_ids_of
from asyncrlhf.messages import PerSample, Prompt, Rollout
from asyncrlhf.observe.events import Answered, Evaluated, EvaluationStarted, Warned
from asyncrlhf.observe.log import EventLog

__all__ = ("Evaluator",)

REWARD = "reward"
"""Name of the score that training sees too."""


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
        judges: Mapping[str, RewardGroup] | None = None,
        decode: Callable[[Sequence[int]], str] = str,
        show: int = 0,
    ) -> None:
        """`judges`: further scorers by name, which training never sees. `decode`: response tokens to text, for the
        first `show` answers."""
        self._rollout, self._prompts = rollout, prompts
        self._scorers = {REWARD: reward, **(judges or {})}
        self._decode, self._show = decode, show
        self._emit, self._elapsed = log.emit, log.elapsed
        self._every, self._temperature, self._max_hold = every, temperature, max_hold
        rollout.outside.max_hold = max_hold
        self._running: asyncio.Task[None] | None = None
        self._cut_off = ""

    def start(self, train_step: int, version: int, tasks: asyncio.TaskGroup) -> None:
        """Begin, if `train_step` asks for it (0 does), on the published `version`, in the caller's TaskGroup."""
        if self._every and train_step % self._every == 0 and (self._running is None or self._running.done()):
            self._running = tasks.create_task(self._evaluate(train_step, version), name="evaluation")

    def cancel(self, reason: str) -> None:
        """Give up an evaluation under way, and wait for none from now on."""
        self._cut_off, self._max_hold = reason, 0.0
        if self._running is not None:
            self._running.cancel()

    async def hold(self) -> None:
        """Wait for an evaluation under way, at most `max_hold` seconds; not for one that has kept others from the
        devices of its engines as long as that."""
        shared = self._rollout.turn.shared
        if self._running is not None and not self._running.done() and not (shared and self._rollout.outside.enough):
            await asyncio.wait([self._running], timeout=self._max_hold)
            self._rollout.outside.hold_no_longer()

    async def finish(self) -> None:
        """At the end of a run: wait as `hold` does, as if nobody had waited yet, then cancel."""
        self._rollout.outside.hold_again()
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
        means = {name: fmean(scores[name] for _, scores in done) for name in self._scorers}
        quoted: list[Answered] = []
        for rollout, scores in done[: self._show]:
            with suppress(DataLost):
                text = self._decode((await token_ids_of(rollout))[0])
                quoted.append(Answered(rollout.prompt.text, text, scores))
        self._emit(
            Evaluated(
                train_step=train_step,
                label=f"v{low}" if low == high else f"mixed(v{low}..v{high})",
                reward_mean=means.pop(REWARD),
                count=len(done),
                token_count=sum(len(x.token_ids) for rollout, _ in done for x in rollout.samples),
                seconds=self._elapsed() - started,
                judges=means,
                samples=tuple(quoted),
            )
        )

    async def _one(self, prompt: Prompt) -> tuple[Rollout, dict[str, float]] | None:
        problem: BaseException | None = None
        scoring: dict[str, asyncio.Task[PerSample]] = {}
        try:
            rollout = await self._rollout.evaluate(prompt, self._temperature)
            async with asyncio.TaskGroup() as tasks:
                for name, scorer in self._scorers.items():
                    scoring[name] = tasks.create_task(scorer.score(rollout))
        except (SampleError, DataLost) as error:
            problem = error
        except ExceptionGroup as errors:
            if not all(isinstance(error, SampleError | DataLost) for error in errors.exceptions):
                raise  # scorers run side by side: beside a bad answer an engine may have failed
            problem = errors.exceptions[0]
        else:
            return rollout, {name: task.result()[0] for name, task in scoring.items()}
        self._emit(Warned(message=f"evaluation prompt {-prompt.uid - 1} left out: {problem}"))
        return None
