"""An engine that knows nothing but its specification (reference, reward): one that is lost is started again and asked
again. Callers wait for the engine, and while it is down for its restart, which no caller's cancellation stops."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from asyncrlhf.abc import EngineHandle, EngineSpec, Runtime
from asyncrlhf.errors import ConfigError, DataLost, EngineLost, GroupError
from asyncrlhf.groups.group import emit_busy
from asyncrlhf.groups.ranks import Ranks, start_ranks
from asyncrlhf.groups.supervisor import RestartBudget
from asyncrlhf.groups.turn import ALONE, Turn
from asyncrlhf.messages import EngineEvent, ParallelLayout, Rollout, TrainBatch, sequence_column
from asyncrlhf.observe.events import Restarted
from asyncrlhf.observe.log import EventLog

__all__ = ("FrozenEngine", "Incarnation")


@dataclass(slots=True, eq=False)
class Incarnation:
    """One process of the engine."""

    handle: EngineHandle
    lost: str = ""
    """Why it is gone; empty: it serves."""
    charged: float | None = None
    """When its loss was counted against the group."""
    excused: bool = False
    """Its loss is somebody else's fault and does not count."""


class FrozenEngine:
    """One engine, which may have several ranks, and its restarts."""

    def __init__(
        self,
        log: EventLog,
        runtime: Runtime,
        *specs: EngineSpec,
        layout: ParallelLayout | None = None,
        call_timeout: float | None = None,
        max_restarts: int = 3,
    ) -> None:
        """`specs`: of its ranks, mostly one. `layout`: how they share the model; left out: as data parallel ones.
        `call_timeout`: seconds after which an engine that has not answered is given up, half of what it has to start;
        None: it has for ever.
        `max_restarts`: within an hour."""
        self.spec = specs[0]
        self.turn: Turn = ALONE
        self._specs, self._layout = specs, layout or ParallelLayout(data=len(specs))
        self.incarnation = 0
        self.log, self._runtime, self._call_timeout = log, runtime, call_timeout
        self._budget = RestartBudget(limit=max_restarts)
        self._now: Incarnation | None = None
        self._failure = ""
        self._tasks: asyncio.TaskGroup | None = None
        self._restarting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Spawn the engine. Raises GroupError with the original traceback."""
        async with self.turn.taken():
            self._now = Incarnation(await self._spawn())

    @asynccontextmanager
    async def supervised(self) -> AsyncGenerator[None, None]:
        """While it is open restarts have a task of their own, which ends with it. Before that (a group's start) a
        restart is its caller's."""
        async with asyncio.TaskGroup() as self._tasks:
            try:
                yield
            finally:
                if self._restarting is not None:
                    self._restarting.cancel()
                self._tasks = None

    def out_of_service(self, now: float) -> str:
        """When a lost one is started again, in words; "" while it serves. `now`: of the event loop."""
        if self._now is None or not self._now.lost:
            return ""
        if self._failure:
            return "was lost too often"
        if self._tasks is not None and (self._restarting is None or self._restarting.done()):
            return "will be started again when it is asked"
        return self._budget.when(now) or "is being started again"

    async def call(self, verb: str, *arguments: Any) -> Any:
        """The result, of whichever incarnation gives one. Raises GroupError when there will be none, DataLost when
        what it is to read is gone."""
        while True:
            engine = await self.serving()
            try:
                return await self.ask(engine, verb, *arguments)
            except DataLost:
                raise
            except EngineLost:
                if not engine.lost:
                    raise

    async def read(self, verb: str, rollouts: Sequence[Rollout]) -> list[Sequence[Any] | DataLost]:
        """What a verb of a model gives for every answer of each rollout, or that this rollout is lost; one forward
        reads them all."""
        try:
            rows: Sequence[Any] = await self.call(verb, _batch_of(rollouts))
        except DataLost as error:
            if len(rollouts) == 1:
                return [error]
            return [found for rollout in rollouts for found in await self.read(verb, [rollout])]
        ends = list(itertools.accumulate(len(rollout.samples) for rollout in rollouts))
        return [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    async def serving(self) -> Incarnation:
        """The one that serves; waits for a restart. Raises GroupError when there will be none."""
        if self._now is None:
            raise GroupError(f"group {self.spec.group!r} has not been started")
        while self._now.lost:
            if self._failure:
                raise GroupError(self._failure)
            if self._tasks is None:
                await self._restart(self._now)
                continue
            if self._restarting is None or self._restarting.done():
                name = f"{self.spec.group}/{self.spec.rank} restart"
                self._restarting = self._tasks.create_task(self._restart(self._now), name=name)
            await asyncio.shield(self._restarting)
        return self._now

    async def ask(self, engine: Incarnation, verb: str, *arguments: Any) -> Any:
        """The result of one call. Raises EngineLost if this incarnation is lost, or given up for its silence, and
        DataLost if it is what it was to read."""
        async with self.turn.taken():
            return await self._ask(engine, verb, *arguments)

    async def rest(self) -> None:
        """Leave the device to others, also when who asked it has gone; one that is lost has left, and one that cannot
        is given up."""
        await self._move("offload" if self.turn.offload else "finish")

    async def resume(self) -> None:
        """Come back to it."""
        if self.turn.offload:
            await self._move("onload")

    async def _move(self, verb: str) -> None:
        """Whoever asks it next sees that it is lost, and has it started again."""
        if self._now is not None and not self._now.lost:
            try:
                await self._ask(self._now, verb)
            except GroupError as error:
                await self.give_up_on(self._now, str(error))

    async def _ask(self, engine: Incarnation, verb: str, *arguments: Any) -> Any:
        if engine.lost:
            raise EngineLost(engine.lost)
        try:
            async with asyncio.timeout(self._call_timeout):
                return await engine.handle.call(verb, *arguments)
        except TimeoutError:
            await self.give_up_on(
                engine,
                f"group {self.spec.group!r}: {verb} has not come back within {self._call_timeout} s, half of "
                "limits.stall_timeout; its engine hangs, or the limit is too low for this model",
            )
        except DataLost as error:
            if isinstance(engine.handle, Ranks) and engine.handle.closed:  # since not all of them lacked it
                engine.lost = engine.lost or str(error)
            raise
        except EngineLost as error:
            engine.lost = engine.lost or str(error)
        except GroupError:
            if not engine.lost:
                raise
        raise EngineLost(engine.lost)

    async def give_up_on(self, engine: Incarnation, reason: str) -> None:
        """End it as if it were lost: its calls in flight raise EngineLost."""
        if not engine.lost:
            engine.lost = reason
            await engine.handle.close(at_once=True)

    def excuse(self, engine: Incarnation) -> None:
        """Its loss is charged to somebody else (a prompt): it does not count against `max_restarts`."""
        engine.excused = True
        if engine.charged is not None:
            self._budget.forgive(engine.charged)

    async def _restart(self, gone: Incarnation) -> None:
        """Afterwards another incarnation serves, or `_failure` says why none will."""
        loop, reason, delay = asyncio.get_running_loop(), gone.lost, 0.0
        await gone.handle.close()
        if not gone.excused:
            gone.charged = loop.time()
            delay = self._budget.failed(gone.charged)
        while delay is not None:
            await asyncio.sleep(delay)
            try:
                async with self.turn.taken():
                    self._now = Incarnation(await self._spawn())
            except (GroupError, ConfigError) as error:  # the machine may have less than it had at first
                reason, delay = str(error), self._budget.failed(loop.time())
                continue
            self.incarnation += 1
            self._budget.serves(loop.time())
            self.log.emit(Restarted(group=self.spec.group, rank=self.spec.rank, incarnation=self.incarnation))
            return
        self._failure = (
            f"{reason}\n(it failed {len(self._budget.failures)} times within an hour; "
            f"groups.{self.spec.group}.max_restarts = {self._budget.limit})"
        )

    async def _spawn(self) -> EngineHandle:
        patience = None if self._call_timeout is None else 2 * self._call_timeout  # limits.stall_timeout
        return await start_ranks(self._runtime, self._specs, self._layout, self._events, patience)

    def _events(self, rank: int, events: Sequence[EngineEvent]) -> None:
        for event in events:  # that an engine is lost is seen by its calls
            emit_busy(self.log, self.spec.group, rank, event)


def _batch_of(rollouts: Sequence[Rollout]) -> TrainBatch:
    """The rows of some rollouts, to be read by a frozen model."""
    rows = [(g, r.prompt.token_ids, s.token_ids) for g, r in enumerate(rollouts) for s in r.samples]
    lengths = tuple(len(response) for _, _, response in rows)
    return TrainBatch(
        train_step=0,
        prompt_lengths=tuple(len(prompt) for _, prompt, _ in rows),
        response_lengths=lengths,
        unmasked=lengths,
        rollouts=tuple(g for g, _, _ in rows),
        columns={
            "token_ids": sequence_column([prompt for _, prompt, _ in rows], [response for *_, response in rows]),
        },
    )
