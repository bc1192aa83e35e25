"""ShadowGroup: copies of a critic that give its values, with the weights it published last.

Whoever asks the critic waits here, for engines that serve: after a loss until one is back. Rows are divided among the
copies; a version changes between two requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrlhf.errors import DataLost, GroupError
from asyncrlhf.groups.answers import Replica
from asyncrlhf.groups.follower import Follower
from asyncrlhf.groups.group import Request, emit_busy, refuse
from asyncrlhf.groups.protocols import shares
from asyncrlhf.messages import Array, EngineEvent, Failed, Packed, TrainBatch, column_of
from asyncrlhf.observe.events import Measured

__all__ = ("ShadowGroup",)


class ShadowGroup(Follower):
    """Stands for the critic that it follows where only values are asked for."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._joined = asyncio.Event()

    async def apply(self, transform: Packed, batch: TrainBatch) -> Mapping[str, Sequence[Array] | float]:
        """What the critic's `apply` gives, with the copies' weights; the oldest version among them is reported."""
        return await self.ask("apply", transform, batch)

    async def serve(self) -> None:
        """Consumes requests, produces columns; waits for engines. Requests are answered side by side."""
        async with asyncio.TaskGroup() as self._tasks:
            await super().serve()

    async def handle(self, requests: list[Request]) -> None:
        for request in requests:
            self.beside(self._tasks, self._apply(request), request)

    def flush(self) -> None:
        self._joined.set()

    async def _apply(self, request: Request) -> None:
        transform, batch = request.arguments
        found = None
        while found is None:
            try:
                async with self.turn.taken():
                    found = await self._attempt(transform, batch)
            except DataLost as error:
                refuse(request, error)
                return
            if found is None:
                self._joined.clear()
                if not any(replica.serving for replica in self.replicas):
                    await self._joined.wait()
        if not request.reply.done():
            request.reply.set_result(found)

    async def _attempt(self, transform: Packed, batch: TrainBatch) -> Mapping[str, Any] | None:
        """None: an engine was lost on the way. Raises DataLost."""
        serving = [replica for replica in self.replicas if replica.serving]
        if not serving:
            return None
        oldest = min(replica.version for replica in serving)
        if len(serving) > 1:
            values = await self._values(serving, batch)
            if values is None:
                return None
            batch = batch.with_columns(values=column_of("token", values))
        found = await self._call(serving[0], serving[0].incarnation, "apply", transform, batch)
        if found is not None:
            self.emit(Measured(group=self.name, train_step=batch.train_step, metrics={"version": float(oldest)}))
        return found

    async def _values(self, serving: Sequence[Replica], batch: TrainBatch) -> list[Array] | None:
        """Of every row, from engines that share the rows; None: one was lost. Raises DataLost."""
        rows = shares(batch, len(serving))
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [
                    tasks.create_task(
                        self._call(replica, replica.incarnation, "values", batch.take(share).without_origin())
                    )
                    for replica, share in zip(serving, rows, strict=True)
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        found: dict[int, Array] = {}
        for share, task in zip(rows, asked, strict=True):
            part: Sequence[Array] | None = task.result()
            if part is None:
                return None
            found |= zip(share, part, strict=True)
        return [found[row] for row in range(len(batch))]

    def _on_events(self, replica: Replica, incarnation: int, events: Sequence[EngineEvent]) -> None:
        for event in events:
            if emit_busy(self.log, self.name, replica.spec.rank, event) or incarnation != replica.incarnation:
                continue
            if isinstance(event, Failed):
                self.on_failure(replica, event.reason)
            else:
                raise GroupError(f"{replica.key} sent {type(event).__name__}, which no shadow may send")
