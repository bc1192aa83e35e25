"""The training engine of the torch backend: one model, one optimizer, and micro-batches and ranks that cannot change
the loss. Ranks of one model wait for each other in every verb."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrlhf.abc import TrainEngine
from asyncrlhf.backends.torch.away import give_back
from asyncrlhf.backends.torch.data import Forward, Rows, split_by_row
from asyncrlhf.backends.torch.engine import TorchEngine
from asyncrlhf.backends.torch.measure import Measures
from asyncrlhf.backends.torch.model import Model
from asyncrlhf.backends.torch.objective import Counts, Objective
from asyncrlhf.backends.torch.optimizer import Optimizer
from asyncrlhf.backends.torch.options import OptimizerOptions as OptimizerOptions
from asyncrlhf.backends.torch.options import TrainerOptions
from asyncrlhf.backends.torch.probe import require_all_learn, require_layout_works
from asyncrlhf.backends.torch.score import response_logprobs, response_scores
from asyncrlhf.backends.torch.shards import layout_of, local_parts
from asyncrlhf.backends.torch.state import load_state, save_model, save_state
from asyncrlhf.backends.torch.world import meet, open_store, own_device
from asyncrlhf.errors import PublishRefused
from asyncrlhf.groups.protocols import shares
from asyncrlhf.messages import Array, Packed, Probe, StepResult, TrainBatch, WeightHandle, import_object, unpack
from asyncrlhf.ops import Loss, TokenStats, Transform
from asyncrlhf.weights.checksum import checksum
from asyncrlhf.weights.finite import not_finite
from asyncrlhf.weights.publish import ShardPublisher

__all__ = ("OptimizerOptions", "TorchTrainer", "TrainerOptions")

PROBE = 8
"""Tokens of a probe."""


class TorchTrainer(TorchEngine, TrainEngine):
    """Trains a Hugging Face causal language model, or a critic with a value head, alone or as one of several ranks."""

    Options = TrainerOptions
    _optimizer: Optimizer
    _store: Any = None
    _publisher: ShardPublisher | None = None
    """Where ranks keep parts of the parameters."""

    def __init__(self, options: TrainerOptions) -> None:
        self.options = options
        self._model = Model(
            options.model,
            dtype=options.dtype,
            device=options.device,
            head=options.head,
            new_head=options.new_head,
            packed=options.layout == "packed",
            attention=options.attention,
            trained=True,
            alone=options.data_parallel == 1,
        )
        self._cut = self._model.cut(options)
        self._transport = import_object(options.transport)()
        self._exported: tuple[int, Mapping[str, Any], Probe | None] | None = None
        self._probed: tuple[int, ...] = ()
        self._stepped_in = -1
        if options.data_parallel == 1:
            self._begin()

    def rendezvous(self, host: str, ranks: int) -> int:
        self._store, port = open_store(host, ranks)
        return port

    def join(self, host: str, port: int, rank: int, ranks: int, timeout: float) -> None:
        """Raises ConfigError if ranks have to share a GPU."""
        device = own_device(self._model.device, rank)
        world = meet(self._store, host, port, rank, ranks, device, timeout)
        sharded = self.options.sharding == "full"
        self._model.spread(world, device, sharded=sharded)
        if sharded:
            layout = layout_of(self._model.parameters(), ranks)
            self._publisher = ShardPublisher(self.options.transport, layout, rank, world.everyones)
        self._begin()

    def _begin(self) -> None:
        """Once the parameters are where they will be."""
        require_layout_works(self._model, self.options.layout)
        if self._model.world.size > 1 and self.options.sharding == "none":
            require_all_learn(self._model)
        if self.options.gradient_checkpointing:
            self._model.checkpoint_gradients()
        self._optimizer = Optimizer(self._model.parameters(), self.options.optimizer)

    def close(self) -> None:
        if "_model" in vars(self):
            self._model.world.leave()
        super().close()

    def step(self, batch: TrainBatch, loss: Packed) -> StepResult:
        """One optimizer step; see TrainEngine. Raises ConfigError for reduction "constant" without
        `max_response_tokens`, ValueError for a loss that does not give one value per token."""
        function: Loss = unpack(loss)
        rows = Rows(batch, self._model.device)
        chosen = np.arange(len(batch)) if function.uses_masked_rows else np.flatnonzero(rows.unmasked)
        counts = Counts(*self._model.world.totals(*Counts.of(rows)))
        if not counts.tokens:
            return StepResult(applied=False, reason="empty")
        measures = Measures(first=self._stepped_in != batch.train_step, train_step=batch.train_step)
        objective = Objective(function, rows, counts, self.options, measures)
        self._optimizer.zero_grad()
        for forward in rows.forwards(
            self._cut,
            chosen,
            flash=self._model.uses_flash,
            whole_rollouts=function.level == "rollout",
            after=function.after_token,
            rounds=self._model.rounds,
        ):
            with self._model.last_of_step(forward.last):
                self._backward(objective, forward, entropy="entropy" in function.needs)
        norm = self._optimizer.gradient_norm()
        metrics = measures.result(self._model.world) | {"grad_norm": float(norm)}
        if not math.isfinite(metrics["grad_norm"]):
            self._optimizer.zero_grad()
            return StepResult(applied=False, reason="not_finite", metrics=metrics)
        metrics["learning_rate"] = self._optimizer.step(batch.train_step, norm)
        self._stepped_in = batch.train_step
        return StepResult(applied=True, metrics=metrics)

    def offload(self) -> None:
        """With device = "cpu" weights and moments stay where they are, since they would move there. Replicas on GPUs
        keep the memory in which they share their gradients."""
        self._optimizer.offload()
        self._model.offload()
        give_back()

    def onload(self) -> None:
        self._model.onload()
        self._optimizer.onload()

    def logprobs(self, batch: TrainBatch) -> Sequence[Array]:
        return response_logprobs(self._model, batch, self._cut, self.options.temperature)

    def scores(self, batch: TrainBatch) -> list[float]:
        return response_scores(self._model, batch, self._cut)

    def apply(self, transform: Packed, batch: TrainBatch) -> Mapping[str, Sequence[Array] | float]:
        """New columns and measures; the transform sees all rows at once, and the model's statistics if it needs them,
        to which every rank brings those of its rows. The transform runs on rank 0."""
        function: Transform = unpack(transform)
        rows = Rows(batch, self._model.device)
        with torch.no_grad():
            stats = self._stats_of_all(rows) if function.needs_forward else None
            if self._model.world.rank:
                return {}
            found = function(stats, rows.micro_batch(rows.columns()))
        return {
            name: split_by_row(column.cpu().numpy(), batch.response_lengths) if column.dim() else float(column)
            for name, column in found.items()
        }

    def export(self, version: int) -> WeightHandle:
        world = self._model.world
        if self._publisher is not None:
            return self._publisher.export(version, local_parts(self._model.parameters()), self._probe)
        weights = self._model.whole()
        if bad := world.first([] if world.rank else not_finite(weights)):
            raise PublishRefused(
                f"version {version} has {len(bad)} parameters that are not finite, among them {bad[0]!r}; the weights "
                "published before stay in use. Lower the learning rate or max_grad_norm"
            )
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
            byte_count=sum(parameter.nbytes for parameter in weights.values()),
            transport=self.options.transport,
            payload=self._exported[1],
            probe=self._exported[2],
        )

    def _probe(self) -> Probe | None:
        """What the model says about tokens that it found likely when it was first exported: log-probs of likely tokens
        differ little between precisions, and much between models."""
        if self._model.head != "lm":
            return None
        if not self._probed:
            self._probed = self._model.likely_tokens(PROBE)
        return Probe(token_ids=self._probed, logprobs=self._model.probe(self._probed))

    def save_model(self, directory: Path) -> None:
        save_model(self._model, Path(directory))

    def save_state(self, directory: Path) -> None:
        save_state(self._model, self._optimizer, Path(directory))

    def load_state(self, directory: Path) -> None:
        load_state(self._model, self._optimizer, Path(directory))
        self._stepped_in = -1

    def _backward(self, objective: Objective, forward: Forward, *, entropy: bool) -> None:
        new = self._model.token_stats(**forward.arguments, temperature=self.options.temperature, entropy=entropy)
        if forward.idle:
            (new.logprobs if new.values is None else new.values).sum().backward()
            return
        (objective(forward, new) * self._model.world.size).backward()  # ranks then take the mean of their gradients

    def _stats_of_all(self, rows: Rows) -> TokenStats:
        """Statistics of every response token, rows in their order; each rank computes those of its share."""
        world = self._model.world
        own = np.asarray(shares(rows.batch, world.size)[world.rank], dtype=np.int64)
        parts: list[tuple[Array, Array]] = []
        for forward in rows.forwards(self._cut, own, flash=self._model.uses_flash, rounds=self._model.rounds):
            new = self._model.token_stats(**forward.arguments, temperature=self.options.temperature)
            parts.append((forward.tokens, (new.logprobs if new.values is None else new.values).cpu().numpy()))
        whole = np.zeros(len(rows.mask), dtype=np.float32)
        for tokens, values in itertools.chain.from_iterable(world.everyones(parts)):
            whole[tokens] = values
        found = torch.from_numpy(whole).to(self._model.device)
        if self._model.head == "lm":
            return TokenStats(logprobs=found)
        return TokenStats(logprobs=found.new_empty(0), values=found)
