"""RewardGroup: scores rollouts, all at once. Waits only for the scorer, which has its own limits and time-outs."""

from __future__ import annotations

import asyncio

from asyncrlhf.errors import SampleError
from asyncrlhf.groups.frozen import FrozenEngine
from asyncrlhf.groups.group import Group, Request, answer, refuse
from asyncrlhf.groups.scorers import Scorer as Scorer
from asyncrlhf.messages import PerSample, Rollout
from asyncrlhf.observe.events import Scored
from asyncrlhf.observe.log import EventLog

__all__ = ("RewardGroup", "Scorer")


class RewardGroup(Group):
    """Rewards of finished rollouts."""

    def __init__(self, name: str, log: EventLog, scorer: Scorer) -> None:
        super().__init__(name, log, inbox=65536)
        self._scorer = scorer

    @property
    def engine(self) -> FrozenEngine | None:
        """The scorer's, if it computes on devices that it may share."""
        return self._scorer.engine

    async def start(self) -> None:
        """Start the scorer's engine, if it has one. Raises GroupError with the original traceback."""
        await self._scorer.start()

    async def score(self, rollout: Rollout) -> PerSample:
        """One reward per answer. Raises SampleError for a reward that is missing, not a number, or too late."""
        return await self.ask("score", rollout)

    async def serve(self) -> None:
        """Consumes rollouts, produces rewards, any number at a time; cancelling a caller cancels its scoring."""
        async with self._scorer.supervised():
            async with asyncio.TaskGroup() as self._tasks:
                await super().serve()

    async def handle(self, requests: list[Request]) -> None:
        for request in requests:
            self.beside(self._tasks, self._score(request), request)

    async def _score(self, request: Request) -> None:
        rollout: Rollout = request.arguments[0]
        started = self.log.elapsed()
        try:
            rewards = await self._scorer.score(rollout)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if request.reply.cancelled():
                return
            if task is None or task.cancelling():
                raise
            prompt = rollout.prompt
            refuse(request, SampleError(f"uid {prompt.uid}: scoring was cancelled from inside the reward function"))
            return
        except Exception as error:  # a user's function: its error belongs to this sample's caller
            refuse(request, error)
            return
        prompt = rollout.prompt
        seconds = self.log.elapsed() - started
        self.emit(Scored(uid=prompt.uid, attempt=prompt.attempt, rewards=rewards, seconds=seconds))
        answer(request, rewards)
