"""The training engine of the megatron backend: one rank of a model that is spread over many. All ranks wait for each
other in every verb."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrlhf.abc import TrainEngine
from asyncrlhf.backends.megatron import cpu
from asyncrlhf.backends.megatron.exchange import Catalogue, load, put_together, stack_experts, weights_of
from asyncrlhf.backends.megatron.microbatch import MicroBatch
from asyncrlhf.backends.megatron.model import Model
from asyncrlhf.backends.megatron.optimizer import Optimizer
from asyncrlhf.backends.megatron.options import MegatronOptions
from asyncrlhf.backends.megatron.parallel import Standing, leave, stand, start_alone
from asyncrlhf.backends.megatron.probe import likely_tokens, probe
from asyncrlhf.backends.megatron.sizes import require_fits
from asyncrlhf.backends.megatron.state import load_state, save_model, save_state
from asyncrlhf.backends.torch.data import Rows, split_by_row
from asyncrlhf.backends.torch.engine import TorchEngine
from asyncrlhf.backends.torch.measure import Measures
from asyncrlhf.backends.torch.model import pick_device, read_config
from asyncrlhf.backends.torch.objective import Counts, Objective
from asyncrlhf.backends.torch.world import World, meet, open_store, own_device
from asyncrlhf.errors import PublishRefused
from asyncrlhf.groups.protocols import shares
from asyncrlhf.messages import Array, Packed, Probe, StepResult, TrainBatch, WeightHandle, import_object, unpack
from asyncrlhf.ops import Loss, TokenStats, Transform
from asyncrlhf.weights.checksum import checksum

__all__ = ("MegatronTrainer",)

PROBE = 8
"""Tokens of a probe."""
FOREVER = 365 * 86400.0


class MegatronTrainer(TorchEngine, TrainEngine):
    """Trains a Hugging Face causal language model, or a critic with a value head, with megatron-core."""

    Options = MegatronOptions
    _model: Model
    _optimizer: Optimizer
    _catalogue: Catalogue
    _store: Any = None

    def __init__(self, options: MegatronOptions) -> None:
        """Raises ConfigError: no such directory or device, an architecture or layout that cannot be built, missing
        weights."""
        self.options = options
        cpu.require_device(options.device)
        self._device = pick_device(options.device)
        if options.device == "cpu":
            cpu.install()
        self._config = read_config(options.model, options.head)
        require_fits(options, self._config)
        self._transport = import_object(options.transport)()
        self._exported: tuple[int, Mapping[str, Any], Probe | None] | None = None
        self._probed: tuple[int, ...] = ()
        self._stepped_in = -1
        if options.ranks == 1:
            self._begin(start_alone(), FOREVER)

    def rendezvous(self, host: str, ranks: int) -> int:
        self._store, port = open_store(host, ranks)
        return port

    def join(self, host: str, port: int, rank: int, ranks: int, timeout: float) -> None:
        """Raises ConfigError if ranks have to share a GPU, or are of another number than the layout takes."""
        self._device = own_device(self._device, rank)
        self._begin(meet(self._store, host, port, rank, ranks, self._device, timeout), timeout)

    def _begin(self, world: World, timeout: float) -> None:
        with cpu.calling():
            standing = stand(self.options, world, timeout)
            self._model = Model(self.options, self._config, self._device, standing)
            load(self._model)
            self._model.wrap()
            self._optimizer = Optimizer(self._model, self.options.optimizer)
        self._catalogue = Catalogue(self._model)

    @property
    def _standing(self) -> Standing:
        return self._model.standing

    def close(self) -> None:
        if "_model" in vars(self):
            leave(self._standing.world)
        super().close()

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

    def logprobs(self, batch: TrainBatch) -> Sequence[Array]:
        if self.options.head != "lm":
            raise ValueError(f"{self.options.model!r} was loaded with a value head, which has no log-probs")
        found = self._model.token_values(Rows(batch, self._device), temperature=self.options.temperature)
        return split_by_row(found, batch.response_lengths)

    def scores(self, batch: TrainBatch) -> list[float]:
        if self.options.head != "value":
            raise ValueError(f"{self.options.model!r} was loaded without a value head, which scores come from")
        found = self._model.token_values(Rows(batch, self._device), temperature=1.0, after=True)
        return [float(row[-1]) if len(row) else math.nan for row in split_by_row(found, batch.response_lengths)]

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
        """The weights are put together on rank 0, in its main memory, which the transport reads them from."""
        world, own = self._standing.world, weights_of(self._model)
        bad = [name for name, weight in own.items() if not bool(weight.isfinite().all())]
        if bad := [name for names in world.everyones(bad) for name in names]:
            raise PublishRefused(
                f"version {version} has {len(bad)} parameters that are not finite, among them {bad[0]!r}; the weights "
                "published before stay in use. Lower the learning rate or max_grad_norm"
            )
        weights = stack_experts(dict(put_together(self._catalogue, world.rank, own, lambda _: 0)))
        digest = world.first(0 if world.rank else checksum(weights))
        changed = self._exported is None or self._exported[0] != digest
        if changed:
            payload = {} if world.rank else self._transport.send(version, weights)
            self._exported = digest, payload, self._probe()
        assert self._exported is not None
        return WeightHandle(
            version=version,
            checksum=digest,
            changed=changed,
            byte_count=sum(weight.nbytes for weight in weights.values()),
            transport=self.options.transport,
            payload=self._exported[1],
            probe=self._exported[2],
        )

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
