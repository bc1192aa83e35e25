"""FakeShadow: a critic's copy of four numbers, which gives what FakeTrainer's `apply` gives with the same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from asyncrlhf.abc import ShadowEngine
from asyncrlhf.errors import GroupError
from asyncrlhf.messages import Array, EngineEvent, Packed, TrainBatch, WeightHandle, import_object
from asyncrlhf.testing.trainer import FakeScorer, FakeTrainerOptions, weights_logprobs

__all__ = ("FakeShadow",)


class FakeShadow(FakeScorer, ShadowEngine):
    """Its value of every token is the first weight."""

    Options = FakeTrainerOptions

    def __init__(self, options: FakeTrainerOptions) -> None:
        super().__init__(options)
        self.version = -1
        self._value: float | None = None
        self._checksum = 0
        self._prepared: tuple[int, float, int] | None = None

    def prepare(self, weights: WeightHandle) -> None:
        self._require_loaded("prepare")
        arrived = dict(import_object(weights.transport)().receive(weights.payload))
        self._prepared = weights.version, arrived["w"][0], weights.checksum

    def commit(self, version: int, kv: str) -> Sequence[EngineEvent]:
        self._require_loaded("commit")
        if self._prepared is None or self._prepared[0] != version:
            raise ValueError(f"commit({version}) without prepare({version})")
        (self.version, self._value, self._checksum), self._prepared = self._prepared, None
        return ()

    def probe(self, token_ids: Sequence[int]) -> Sequence[float]:
        """As FakeTrainer's export says, whatever it trains."""
        return weights_logprobs(self._checksum, token_ids)

    def values(self, batch: TrainBatch) -> list[Array]:
        self._require_loaded("values")
        if self._value is None:
            raise GroupError("no weights were committed yet")
        return [np.full(n, self._value, np.float32) for n in batch.response_lengths]

    def apply(self, transform: Packed, batch: TrainBatch) -> Mapping[str, Sequence[Array] | float]:
        values = batch.columns["values"].fetch() if "values" in batch.columns else self.values(batch)
        rewards = batch.columns["rewards"].fetch()
        rows = [np.full(n, row[0], np.float32) for row, n in zip(rewards, batch.response_lengths, strict=True)]
        advantages = [row - value for row, value in zip(rows, values, strict=True)]
        return {"advantages": advantages, "returns": rows, "values": list(values)}
