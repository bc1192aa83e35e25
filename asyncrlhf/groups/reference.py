"""ReferenceGroup: a frozen model that reads answers. Rollouts that wait together are read in one forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrlhf.errors import AsyncRLHFError, GroupError
from asyncrlhf.groups.frozen import FrozenEngine
from asyncrlhf.groups.group import Group, Request, answer, refuse
from asyncrlhf.messages import Array, ArrayColumn, PerToken, Rollout, TrainBatch
from asyncrlhf.observe.log import EventLog

__all__ = ("ReferenceGroup", "batch_of")


class ReferenceGroup(Group):
    """A frozen policy."""

    def __init__(self, name: str, log: EventLog, engine: FrozenEngine) -> None:
        super().__init__(name, log)
        self._engine = engine

    async def start(self) -> None:
        """Spawn the engine. Raises GroupError with the original traceback."""
        await self._engine.start()

    async def logprobs(self, rollout: Rollout) -> PerToken:
        """Log-prob of every response token of every answer at the run's temperature."""
        return await self.ask("logprobs", rollout)

    async def handle(self, requests: list[Request]) -> None:
        rollouts: list[Rollout] = [request.arguments[0] for request in requests]
        try:
            rows: Sequence[Array] = await self._engine.call("logprobs", batch_of(rollouts))
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


def batch_of(rollouts: Sequence[Rollout]) -> TrainBatch:
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
