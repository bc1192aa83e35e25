"""ReferenceGroup: a frozen model that reads answers. Rollouts that wait together are read in one forward."""

from __future__ import annotations

from asyncrlhf.errors import AsyncRLHFError, DataLost, GroupError
from asyncrlhf.groups.frozen import FrozenEngine
from asyncrlhf.groups.group import Group, Request, answer, refuse
from asyncrlhf.messages import PerToken, Rollout, Stored
from asyncrlhf.observe.log import EventLog

__all__ = ("ReferenceGroup",)


class ReferenceGroup(Group):
    """A frozen policy."""

    def __init__(self, name: str, log: EventLog, engine: FrozenEngine) -> None:
        super().__init__(name, log)
        self.engine = engine

    async def start(self) -> None:
        """Spawn the engine. Raises GroupError with the original traceback."""
        await self.engine.start()

    async def logprobs(self, rollout: Rollout) -> PerToken:
        """Log-prob of every response token of every answer at the run's temperature. Raises DataLost."""
        return await self.ask("logprobs", rollout)

    async def serve(self) -> None:
        """Consumes rollouts, produces log-probs; waits for the engine, and for its restart."""
        async with self.engine.supervised():
            await super().serve()

    async def handle(self, requests: list[Request]) -> None:
        rollouts: list[Rollout] = [request.arguments[0] for request in requests]
        try:
            found = await self.engine.read("logprobs", rollouts)
        except AsyncRLHFError as error:
            for request in requests:
                refuse(request, error)
            if isinstance(error, GroupError):
                raise  # whoever asked may be gone by now
            return
        for request, rows in zip(requests, found, strict=True):
            if isinstance(rows, DataLost):
                refuse(request, rows)
            else:
                answer(request, tuple(row if isinstance(row, Stored) else tuple(row.tolist()) for row in rows))
