"""ReferenceGroup: a frozen model that reads answers. Rollouts that wait together are read in one forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrlhf.abc import EngineHandle, EngineSpec, Runtime
from asyncrlhf.errors import AsyncRLHFError, GroupError
from asyncrlhf.groups.group import Group, Request, answer, refuse, within
from asyncrlhf.messages import Array, ArrayColumn, EngineEvent, PerToken, Rollout, TrainBatch
from asyncrlhf.observe.log import EventLog

__all__ = ("ReferenceGroup",)


class ReferenceGroup(Group):
    """A frozen policy."""

    def __init__(
        self, name: str, log: EventLog, runtime: Runtime, spec: EngineSpec, *, call_timeout: float | None = None
    ) -> None:
        """`call_timeout`: seconds an engine call may take before the group fails; None: for ever."""
        super().__init__(name, log)
        self._call_timeout = call_timeout
        self.spec = spec
        self._runtime = runtime
        self._engine: EngineHandle | None = None

    async def start(self) -> None:
        """Spawn the engine. Raises GroupError with the original traceback."""
        self._engine = await self._runtime.spawn(self.spec, self._on_events)

    async def logprobs(self, rollout: Rollout) -> PerToken:
        """Log-prob of every response token of every answer at the run's temperature."""
        return await self.ask("logprobs", rollout)

    async def handle(self, requests: list[Request]) -> None:
        if self._engine is None:
            raise GroupError(f"group {self.name!r} has not been started")
        rollouts: list[Rollout] = [request.arguments[0] for request in requests]
        try:
            call = self._engine.call("logprobs", _batch(rollouts))
            rows: Sequence[Array] = await within(self._call_timeout, call, f"group {self.name!r}: logprobs")
        except AsyncRLHFError as error:
            for request in requests:
                refuse(request, error)
            if isinstance(error, GroupError):
                raise  # whoever asked may be gone by now
            return
        start = 0
        for request, rollout in zip(requests, rollouts, strict=True):
            end = start + len(rollout.samples)
            answer(request, tuple(tuple(row.tolist()) for row in rows[start:end]))
            start = end

    def _on_events(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            self.emit_busy(self.spec.rank, event)


def _batch(rollouts: Sequence[Rollout]) -> TrainBatch:
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
