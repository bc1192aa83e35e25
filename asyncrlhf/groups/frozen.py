"""An engine that knows nothing but its specification (reference, reward): one that is lost is started again and asked
again. Callers wait for the engine, and while it is down for its restart."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncrlhf.abc import EngineHandle, EngineSpec, Runtime
from asyncrlhf.errors import EngineLost, GroupError
from asyncrlhf.groups.group import emit_busy, within
from asyncrlhf.groups.supervisor import RestartBudget
from asyncrlhf.messages import ArrayColumn, EngineEvent, Rollout, TrainBatch
from asyncrlhf.observe.events import Restarted
from asyncrlhf.observe.log import EventLog

__all__ = ("FrozenEngine",)


class FrozenEngine:
    """One engine and its restarts."""

    def __init__(
        self,
        log: EventLog,
        runtime: Runtime,
        spec: EngineSpec,
        *,
        call_timeout: float | None = None,
        max_restarts: int = 3,
    ) -> None:
        """`call_timeout`: seconds a call may take before the group fails; None: for ever. `max_restarts`: in a row,
        without an answer between them."""
        self.spec = spec
        self.incarnation = 0
        self._log, self._runtime, self._call_timeout = log, runtime, call_timeout
        self._budget = RestartBudget(limit=max_restarts)
        self._handle: EngineHandle | None = None
        self._lost: dict[EngineHandle, str] = {}
        self._restarting = asyncio.Lock()

    async def start(self) -> None:
        """Spawn the engine. Raises GroupError with the original traceback."""
        self._handle = await self._runtime.spawn(self.spec, self._events)

    async def call(self, verb: str, *arguments: Any) -> Any:
        """The result, of whichever incarnation gives one. Raises GroupError when there will be none."""
        while True:
            try:
                return await self.attempt(verb, *arguments)
            except EngineLost:
                continue

    async def read(self, verb: str, rollouts: Sequence[Rollout]) -> list[Sequence[Any]]:
        """What a verb of a model gives for every answer of each rollout; one forward reads them all."""
        rows: Sequence[Any] = await self.call(verb, _batch_of(rollouts))
        ends = list(itertools.accumulate(len(rollout.samples) for rollout in rollouts))
        return [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    async def attempt(self, verb: str, *arguments: Any) -> Any:
        """The result of one call to the engine that serves. Raises EngineLost if it is lost meanwhile."""
        handle = await self._serving()
        what = f"group {self.spec.group!r}: {verb}"
        try:
            result = await within(self._call_timeout, handle.call(verb, *arguments), what)
        except EngineLost as error:
            self._lost.setdefault(handle, str(error))
            raise
        except GroupError as error:
            if handle not in self._lost:
                raise
            raise EngineLost(self._lost[handle]) from error
        if handle is self._handle:
            self._budget.worked()
        return result

    async def give_up_on(self, reason: str) -> None:
        """End the engine that serves, as if it were lost: its calls in flight raise EngineLost."""
        handle = self._handle
        if handle is not None and handle not in self._lost:
            self._lost[handle] = reason
            await handle.close(at_once=True)

    async def _serving(self) -> EngineHandle:
        async with self._restarting:
            if self._handle is None:
                raise GroupError(f"group {self.spec.group!r} has not been started")
            while self._handle in self._lost:
                reason = self._lost[self._handle]
                delay = self._budget.failed(asyncio.get_running_loop().time())
                if delay is None:
                    raise GroupError(
                        f"{reason}\n(it failed {len(self._budget.failures)} times in a row; "
                        f"groups.{self.spec.group}.max_restarts = {self._budget.limit})"
                    )
                await self._handle.close()
                await asyncio.sleep(delay)
                try:
                    self._handle, gone = await self._runtime.spawn(self.spec, self._events), self._handle
                    del self._lost[gone]
                except GroupError as error:
                    self._lost[self._handle] = str(error)
                    continue
                self.incarnation += 1
                self._log.emit(Restarted(group=self.spec.group, rank=self.spec.rank, incarnation=self.incarnation))
            return self._handle

    def _events(self, events: Sequence[EngineEvent]) -> None:
        for event in events:  # that an engine is lost is seen by its calls
            emit_busy(self._log, self.spec.group, self.spec.rank, event)


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
            "token_ids": ArrayColumn("sequence", tuple(np.array(p + r, np.int32) for _, p, r in rows)),
        },
    )
