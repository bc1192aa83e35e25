"""The training engine of the megatron backend: one rank of a model that is spread over many. All ranks wait for each
other in every verb."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asyncrlhf.abc import TrainEngine
from asyncrlhf.backends.megatron import cpu
from asyncrlhf.backends.megatron.engine import MegatronEngine
from asyncrlhf.backends.megatron.exchange import Catalogue, weights_of
from asyncrlhf.backends.megatron.microbatch import MicroBatch
from asyncrlhf.backends.megatron.optimizer import Optimizer
from asyncrlhf.backends.megatron.options import MegatronOptions
from asyncrlhf.backends.megatron.probe import likely_tokens, probe
from asyncrlhf.backends.megatron.shards import layout_of
from asyncrlhf.backends.megatron.state import load_state, save_model, save_state
from asyncrlhf.backends.torch.data import Rows, split_by_row
from asyncrlhf.backends.torch.measure import Measures
from asyncrlhf.backends.torch.objective import Counts, Objective
from asyncrlhf.backends.torch.world import World
from asyncrlhf.groups.protocols import shares
from asyncrlhf.messages import Array, Packed, Probe, StepResult, TrainBatch, WeightHandle, unpack
from asyncrlhf.ops import Loss, TokenStats, Transform
from asyncrlhf.weights.publish import ShardPublisher

__all__ = ("MegatronTrainer",)

PROBE = 8
"""Tokens of a probe."""


class MegatronTrainer(MegatronEngine, TrainEngine):
    """Trains a Hugging Face causal language model, or a critic with a value head, with megatron-core."""

    _optimizer: Optimizer
    _catalogue: Catalogue
    _publisher: ShardPublisher

    def __init__(self, options: MegatronOptions) -> None:
        self._probed: tuple[int, ...] = ()
        self._stepped_in = -1
        super().__init__(options)

    def _begin(self, world: World, timeout: float) -> None:
        super()._begin(world, timeout)
        with cpu.calling():
            self._model.wrap()
            self._optimizer = Optimizer(self._model, self.options.optimizer)
        self._catalogue = Catalogue(self._model)
        layout = layout_of(self._catalogue, self.options.dtype)
        self._publisher = ShardPublisher(
            self.options.transport, layout, world.rank, world.everyones, replicas=self.options.put_replicas
        )

    def _held(self) -> Iterator[Tensor]:
        yield from super()._held()
        for adamw in self._optimizer.adamws():
            yield from (parameter.detach() for group in adamw.param_groups for parameter in group["params"])
            yield from (kept for own in adamw.state.values() for kept in own.values() if isinstance(kept, Tensor))

    def _gradients(self) -> Iterator[Tensor]:
        for chunk in self._model.wrapped:
            yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))

    def step(self, batch: TrainBatch, loss: Packed) -> StepResult:
        """One optimizer step; see TrainEngine. Raises ConfigError for reduction "constant" without
        `max_response_tokens`, ValueError for a loss that does not give one value per token."""
        function: Loss = unpack(loss)
        world, speaks = self._standing.world, self._standing.speaks
        rows = Rows(batch, self._device)
        chosen = np.arange(len(batch)) if function.uses_masked_rows else np.flatnonzero(rows.unmasked)
        counts = Counts(*world.totals(*(Counts.of(rows) if speaks else (0, 0, 0))))
        if not counts.tokens:
            return StepResult(applied=False, reason="empty")
        first = self._stepped_in != batch.train_step
        measures = Measures(first=first, train_step=batch.train_step)
        self._optimizer.zero_grad()
        objective = Objective(function, rows, counts, self.options, measures)
        entropy = "entropy" in function.needs

        def finish(batch: MicroBatch, output: Tensor) -> Tensor:
            new = self._model.stats(batch, output, self.options.temperature, entropy=entropy)
            return objective(batch.forward, new)

        whole = function.level == "rollout"
        forwards = self._model.forwards(rows, chosen, whole_rollouts=whole, after=function.after_token)
        self._model.run(forwards, finish, backward=True)
        norm = self._optimizer.gradient_norm()
        heard = measures if speaks else Measures(first=first, train_step=batch.train_step)
        metrics = heard.result(world) | {"grad_norm": norm}
        if not math.isfinite(norm):
            self._optimizer.zero_grad()
            return StepResult(applied=False, reason="not_finite", metrics=metrics)
        metrics["learning_rate"] = self._optimizer.step(batch.train_step, norm)
        self._stepped_in = batch.train_step
        return StepResult(applied=True, metrics=metrics)

    def apply(self, transform: Packed, batch: TrainBatch) -> Mapping[str, Sequence[Array] | float]:
        """New columns and measures; the transform sees all rows at once, and the model's statistics if it needs them.
        It runs on rank 0."""
        function: Transform = unpack(transform)
        stats = self._stats_of_all(batch) if function.needs_forward else None
        if self._standing.world.rank:
            return {}
        rows = Rows(batch, self._device)
        with torch.no_grad():
            found = function(stats, rows.micro_batch(rows.columns()))
        return {
            name: split_by_row(column.cpu().numpy(), batch.response_lengths) if column.dim() else float(column)
            for name, column in found.items()
        }

    def _stats_of_all(self, batch: TrainBatch) -> TokenStats:
        """Statistics of every response token; each data parallel copy computes those of its share of the rows."""
        mine = self._standing.data.rank()
        split = shares(batch, self._standing.data.size())
        found = self._model.token_values(
            Rows(batch.take(split[mine]), self._device), temperature=self.options.temperature
        )
        parts = self._standing.world.everyones((mine, found) if self._standing.speaks else None)
        rows: list[Array] = [np.empty(0, np.float32)] * len(batch)
        for number, values in (part for part in parts if part is not None):
            lengths = [batch.response_lengths[row] for row in split[number]]
            for row, own in zip(split[number], split_by_row(values, lengths), strict=True):
                rows[row] = own
        values = torch.from_numpy(np.concatenate(rows) if rows else np.empty(0, np.float32)).to(self._device)
        if self.options.head == "lm":
            return TokenStats(logprobs=values)
        return TokenStats(logprobs=values.new_empty(0), values=values)

    def export(self, version: int) -> WeightHandle:
        """Every rank puts its part where engines read it."""
        return self._publisher.export(version, weights_of(self._model), self._probe)

    def _probe(self) -> Probe | None:
        """What the model says about tokens that it found likely when it was first exported: log-probs of likely tokens
        differ little between precisions, and much between models."""
        if self.options.head != "lm":
            return None
        if not self._probed:
            self._probed = likely_tokens(self._model, PROBE)
        return Probe(token_ids=self._probed, logprobs=probe(self._model, self._probed))

    def save_model(self, directory: Path) -> None:
        save_model(self._model, self._catalogue, Path(directory))

    def save_state(self, directory: Path) -> None:
        save_state(self._model, self._optimizer, Path(directory))

    def load_state(self, directory: Path) -> None:
        load_state(self._model, self._optimizer, Path(directory))
        self._stepped_in = -1
