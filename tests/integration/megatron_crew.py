"""Processes that are the ranks of one megatron trainer, and show what is inside it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrlhf.abc import EngineHandle, EngineSpec, Place
from asyncrlhf.backends.megatron.exchange import put_together, weights_of
from asyncrlhf.backends.megatron.options import MegatronOptions
from asyncrlhf.backends.megatron.train import MegatronTrainer
from asyncrlhf.backends.torch.options import OptimizerOptions
from asyncrlhf.groups.protocols import Protocol, lead, three_d
from asyncrlhf.groups.ranks import Ranks
from asyncrlhf.messages import EngineEvent, Packed, ParallelLayout, StepResult, TrainBatch, pack
from asyncrlhf.ops import Loss
from asyncrlhf.runtimes.local import LocalRuntime

__all__ = ("Crew", "Inspected", "layout_of")

ENGINE = "tests.integration.megatron_crew:Inspected"


class Inspected(MegatronTrainer):
    """A trainer that shows its weights and gradients, whole, on rank 0."""

    def weights(self) -> dict[str, Any]:
        return self._whole(weights_of(self._model))

    def gradients(self, batch: TrainBatch, loss: Packed) -> dict[str, Any]:
        """Whole gradients of one step, caught where the optimizer would take them."""
        caught: dict[str, Any] = {}

        def keep(train_step: int, norm: float) -> float:
            for chunk in self._model.wrapped:
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                    _gather(buffer)
            caught.update(self._whole({n: p.main_grad for n, p in weights_of(self._model).items()}))
            return 0.0

        original, self._optimizer.step = self._optimizer.step, keep
        try:
            assert self.step(batch, loss).applied
        finally:
            self._optimizer.step = original
            self._optimizer.zero_grad()
            self._stepped_in = -1
        return caught

    def moments(self) -> int:
        """Numbers in the moments that this rank has allocated."""
        states = (state for adamw in self._optimizer.adamws() for state in adamw.state.values())
        return sum(state["exp_avg"].numel() + state["exp_avg_sq"].numel() for state in states)

    def damage(self, name: str) -> None:
        """Make one number of a parameter nan, on the ranks that have it."""
        for found, weight in weights_of(self._model).items():
            if found.endswith(name):
                weight.data.view(-1)[0] = float("nan")

    def read(self, payload: Any) -> dict[str, Any]:
        """What was published."""
        return {name: weight.clone().numpy() for name, weight in self._transport.receive(payload)}

    def _whole(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        rank = self._standing.world.rank
        return {name: whole.numpy() for name, whole in put_together(self._catalogue, rank, tensors, lambda _: 0)}


same_for_all = Protocol(three_d.distribute, lead.collect)
"""Each data parallel copy gets its rows; rank 0 has the result of all."""
VERBS = {
    "weights": "lead",
    "gradients": f"{__name__}:same_for_all",
    "moments": "broadcast",
    "damage": "broadcast",
    "read": "lead",
}


def _gather(buffer: Any) -> None:
    """All of a gradient buffer, of which the distributed optimizer has each rank reduce a part."""
    group = buffer.data_parallel_group
    if group.size() == 1:
        return
    for bucket in buffer.buckets:
        parts = list(bucket.grad_data.chunk(group.size()))
        dist.all_gather(parts, parts[group.rank()].clone(), group=group)


def layout_of(options: MegatronOptions) -> ParallelLayout:
    return ParallelLayout(
        tensor=options.tensor_parallel,
        context=options.context_parallel,
        data=options.data_parallel,
        pipeline=options.pipeline_parallel,
    )


class Crew:
    """The ranks of one trainer, called from a test without an event loop."""

    def __init__(self, model: str, **options: Any) -> None:
        options.setdefault("optimizer", OptimizerOptions(learning_rate=1e-3, max_grad_norm=1e9))
        options.setdefault("max_response_tokens", 12)
        options.setdefault("device", "cpu")
        full = MegatronOptions(model=model, **options)
        self._runner = asyncio.Runner()
        self._runtime = LocalRuntime()
        places = [Place(group="policy", rank=rank, engine=ENGINE) for rank in range(full.ranks)]
        self._runtime.expect(places)
        try:
            self._handles: list[EngineHandle] = self._run(self._spawn(full, places))
            self.ranks = Ranks(self._handles, layout_of(full), VERBS)
            if full.ranks > 1:
                self._run(self.ranks.join(60.0))
        except BaseException:
            self.close()
            raise

    async def _spawn(self, options: MegatronOptions, places: Sequence[Place]) -> list[EngineHandle]:
        specs = [EngineSpec(group=p.group, rank=p.rank, engine=p.engine, options=options) for p in places]
        return list(await asyncio.gather(*(self._runtime.spawn(spec, _heard) for spec in specs)))

    def call(self, verb: str, *arguments: Any) -> Any:
        return self._run(self.ranks.call(verb, *arguments))

    def step(self, batch: TrainBatch, loss: Loss) -> StepResult:
        return self.call("step", batch, pack(loss))

    def gradients(self, batch: TrainBatch, loss: Loss) -> dict[str, Tensor]:
        return _tensors(self.call("gradients", batch, pack(loss)))

    def weights(self) -> dict[str, Tensor]:
        return _tensors(self.call("weights"))

    def each(self, verb: str, *arguments: Any) -> list[Any]:
        """What every rank gives for the same arguments."""

        async def ask() -> list[Any]:
            return list(await asyncio.gather(*(handle.call(verb, *arguments) for handle in self._handles)))

        return self._run(ask())

    def close(self) -> None:
        self._run(self._runtime.close())
        self._runner.close()

    def _run(self, work: Any) -> Any:
        return self._runner.run(work)


def _heard(events: Sequence[EngineEvent]) -> None:
    """Compute times, and the end."""


def _tensors(arrays: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
