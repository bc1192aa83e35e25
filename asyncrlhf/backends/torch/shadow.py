"""The torch engine that stands for a critic: a frozen model with a value head that takes published weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from asyncrlhf.abc import ShadowEngine
from asyncrlhf.backends.torch.data import Rows, split_by_row
from asyncrlhf.backends.torch.options import ShadowOptions
from asyncrlhf.backends.torch.replica import Replica
from asyncrlhf.backends.torch.score import TorchScorer
from asyncrlhf.messages import Array, EngineEvent, Packed, TrainBatch, WeightHandle, unpack
from asyncrlhf.ops import TokenStats, Transform

__all__ = ("TorchShadow",)


class TorchShadow(TorchScorer, ShadowEngine):
    """A copy of a critic. A version changes between two calls."""

    Options = ShadowOptions
    headless = True

    def __init__(self, options: ShadowOptions) -> None:
        super().__init__(options)
        self._replica = Replica(self._model, options.transport)

    def offload(self) -> None:
        self._replica.drop_spare()
        super().offload()

    def prepare(self, weights: WeightHandle) -> None:
        self._model.require_loaded()
        self._replica.prepare(weights)

    def commit(self, version: int, kv: str) -> Sequence[EngineEvent]:
        self._model.require_loaded()
        self._replica.commit(version)
        return ()

    @torch.no_grad()
    def values(self, batch: TrainBatch) -> Sequence[Array]:
        rows = Rows(batch, self._model.device)
        found = np.zeros(batch.token_count, dtype=np.float32)
        for forward in rows.forwards(self._cut, flash=self._model.uses_flash, rounds=self._model.rounds):
            values = self._model.token_stats(**forward.arguments, temperature=self.options.temperature).values
            assert values is not None
            found[forward.tokens] = values.cpu().numpy()
        return split_by_row(found, batch.response_lengths)

    @torch.no_grad()
    def apply(self, transform: Packed, batch: TrainBatch) -> Mapping[str, Sequence[Array] | float]:
        function: Transform = unpack(transform)
        values = batch.columns["values"].fetch() if "values" in batch.columns else self.values(batch)
        rows = Rows(batch, self._model.device)
        whole = torch.from_numpy(np.concatenate([np.asarray(row, np.float32) for row in values]))
        whole = whole.to(self._model.device)
        found = function(TokenStats(logprobs=whole.new_empty(0), values=whole), rows.micro_batch(rows.columns()))
        return {
            name: split_by_row(column.cpu().numpy(), batch.response_lengths) if column.dim() else float(column)
            for name, column in found.items()
        }
