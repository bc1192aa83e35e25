"""Processes that become the ranks of one megatron trainer after another, so that a test need not start any."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from algorithms.grpo import GRPOLoss
from algorithms.ppo import PPOLoss
from asyncrlhf.abc import Engine, EngineHandle, EngineSpec, Place
from asyncrlhf.backends.megatron.cpu import import_quietly
from asyncrlhf.backends.megatron.exchange import put_together, weights_of
from asyncrlhf.backends.megatron.layers import PackedAttention
from asyncrlhf.backends.megatron.options import MegatronOptions
from asyncrlhf.backends.megatron.score import MegatronScorer
from asyncrlhf.backends.megatron.train import MegatronTrainer
from asyncrlhf.backends.torch.away import Away
from asyncrlhf.backends.torch.options import OptimizerOptions
from asyncrlhf.groups.protocols import Protocol, lead, three_d
from asyncrlhf.groups.ranks import Ranks
from asyncrlhf.messages import (
    ArrayColumn,
    EngineEvent,
    Packed,
    ParallelLayout,
    StepResult,
    TrainBatch,
    WeightHandle,
    import_object,
    pack,
)
from asyncrlhf.messages.samples import Message
from asyncrlhf.ops import Loss
from asyncrlhf.runtimes.local import LocalRuntime
from asyncrlhf.weights.collective import CollectiveTransfer
from tests.integration.torch_scene import SequenceRatioLoss, gradients, trainer, weights

__all__ = (
    "EXPERTS",
    "LOSSES",
    "Crew",
    "Reference",
    "gap",
    "reference",
    "Member",
    "MemberOptions",
    "SmallMessages",
    "layout_of",
    "split_experts",
    "spread",
)

parallel_state = import_quietly("megatron.core.parallel_state")
LOSSES = {"ppo": PPOLoss(entropy=0.01), "grpo": GRPOLoss(), "sequence": SequenceRatioLoss()}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
ENGINE = "tests.integration.megatron_crew:Member"


class SmallMessages(CollectiveTransfer):
    """Publishes in messages that some parameters share and others exceed."""

    def __init__(self) -> None:
        super().__init__(bucket_bytes=4096)


class MemberOptions(Message, frozen=True, kw_only=True):
    """Nothing to choose before it becomes a trainer."""


class Member(Engine):
    """A process that holds one trainer at a time, and shows its weights and gradients, whole, on rank 0."""

    Options = MemberOptions

    def __init__(self, options: MemberOptions) -> None:
        torch.set_num_threads(1)
        self._trainer: Any = None

    def become(self, options: MegatronOptions, frozen: bool) -> None:
        """Another trainer, or scorer, with new weights, perhaps in another layout."""
        if self._trainer is not None:
            self._trainer.close()
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        self._trainer = MegatronScorer(options) if frozen else MegatronTrainer(options)

    def weights(self) -> dict[str, Any]:
        return self._whole(weights_of(self._trainer._model))

    def gradients(self, batch: TrainBatch, loss: Packed) -> dict[str, Any]:
        """Whole gradients of one step, caught where the optimizer would take them."""
        trainer, caught = self._trainer, {}

        def keep(train_step: int, norm: float) -> float:
            for chunk in trainer._model.wrapped:
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                    _gather(buffer)
            caught.update(self._whole({n: p.main_grad for n, p in weights_of(trainer._model).items()}))
            return 0.0

        original, trainer._optimizer.step = trainer._optimizer.step, keep
        assert trainer.step(batch, loss).applied
        trainer._optimizer.step = original
        trainer._optimizer.zero_grad()
        trainer._stepped_in = -1
        return caught

    def go_and_come(self) -> int:
        """Give all memory away and take it back, as on a GPU; gives the bytes that were kept of it."""
        held, gradients = list(self._trainer._held()), list(self._trainer._gradients())
        storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in held)}
        kept = sum(storages.values())
        away = Away(held, gradients)
        assert not any(tensor.untyped_storage().nbytes() for tensor in (*held, *gradients))
        away.back()
        return kept

    def offload(self) -> None:
        self._trainer.offload()

    def onload(self) -> None:
        self._trainer.onload()

    def moments(self) -> int:
        """Numbers in the moments that this rank has allocated."""
        states = (state for adamw in self._trainer._optimizer.adamws() for state in adamw.state.values())
        return sum(state["exp_avg"].numel() + state["exp_avg_sq"].numel() for state in states)

    def parameters(self) -> int:
        """Numbers in the parameters of this rank."""
        return sum(weight.numel() for weight in weights_of(self._trainer._model).values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters of this rank."""
        return {name: tuple(weight.shape) for name, weight in weights_of(self._trainer._model).items()}

    def attention_calls(self, batch: TrainBatch, loss: Packed) -> int:
        """How often attention is computed in a step, micro-batches and layers counted apart."""
        count, original = 0, PackedAttention._attend

        def counted(*arguments: Any) -> Tensor:
            nonlocal count
            count += 1
            return original(*arguments)

        PackedAttention._attend = counted
        self._trainer.step(batch, loss)
        PackedAttention._attend = original
        return count

    def damage(self, name: str) -> None:
        """Make one number of a parameter nan, on the ranks that have it."""
        for found, weight in weights_of(self._trainer._model).items():
            if found.endswith(name):
                weight.data.view(-1)[0] = float("nan")

    def read(self, handle: WeightHandle) -> dict[str, Any]:
        """What was published."""
        received = import_object(handle.transport)().receive(handle.payload)
        return {name: weight.clone().numpy() for name, weight in received}

    def _whole(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        trainer = self._trainer
        found = put_together(trainer._catalogue, trainer._standing.world.rank, tensors, lambda _: 0)
        return {name: whole.float().numpy() for name, whole in found}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


same_for_all = Protocol(three_d.distribute, lead.collect)
"""Each data parallel copy gets its rows; rank 0 has the result of all."""
VERBS = {
    "become": "broadcast",
    "weights": "lead",
    "gradients": f"{__name__}:same_for_all",
    "go_and_come": "broadcast",
    "offload": "broadcast",
    "onload": "broadcast",
    "moments": "broadcast",
    "parameters": "broadcast",
    "shapes": "broadcast",
    "attention_calls": "lead",
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
    """Some of its processes at work on a trainer, called from a test without an event loop."""

    def __init__(self, size: int) -> None:
        self._runner = asyncio.Runner()
        self._runtime = LocalRuntime()
        places = [Place(group="policy", rank=rank, engine=ENGINE) for rank in range(size)]
        self._runtime.expect(places)
        self._handles: list[EngineHandle] = self._run(self._spawn(places))
        self.ranks: Ranks | None = None

    async def _spawn(self, places: Sequence[Place]) -> list[EngineHandle]:
        specs = [EngineSpec(group=p.group, rank=p.rank, engine=p.engine, options=MemberOptions()) for p in places]
        return list(await asyncio.gather(*(self._runtime.spawn(spec, _heard) for spec in specs)))

    def become(self, model: str, *, frozen: bool = False, **options: Any) -> Crew:
        """Ranks of a new trainer, or scorer."""
        options.setdefault("optimizer", OptimizerOptions(learning_rate=1e-3, max_grad_norm=1e9))
        options.setdefault("max_response_tokens", 12)
        options.setdefault("micro_batch_tokens", 60)
        full = MegatronOptions(model=model, device="cpu", **options)
        self.ranks = Ranks(self._handles[: full.ranks], layout_of(full), VERBS)
        self.call("become", full, frozen)
        if full.ranks > 1:
            self._run(self.ranks.join(60.0))
        return self

    def call(self, verb: str, *arguments: Any) -> Any:
        assert self.ranks is not None
        return self._run(self.ranks.call(verb, *arguments))

    def step(self, batch: TrainBatch, loss: Loss) -> StepResult:
        return self.call("step", batch, pack(loss))

    def gradients(self, batch: TrainBatch, loss: Loss) -> dict[str, Tensor]:
        return _tensors(self.call("gradients", batch, pack(loss)))

    def weights(self) -> dict[str, Tensor]:
        return _tensors(self.call("weights"))

    def close(self) -> None:
        self._run(self._runtime.close())
        self._runner.close()

    def _run(self, work: Any) -> Any:
        return self._runner.run(work)


def _heard(events: Sequence[EngineEvent]) -> None:
    """Compute times, and the end."""


def _tensors(arrays: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of all experts of a layer, as transformers has them in memory, one by one, as in files."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        before, fused, kind = name.partition(".experts.")
        if not fused:
            found[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            if kind == "down_proj":
                found[f"{before}.experts.{number}.down_proj.weight"] = expert
            else:
                gate, up = expert.chunk(2)
                found[f"{before}.experts.{number}.gate_proj.weight"] = gate
                found[f"{before}.experts.{number}.up_proj.weight"] = up
    return found


def spread(batch: TrainBatch, vocabulary: int) -> TrainBatch:
    """The batch with its tokens all over a larger vocabulary."""
    rows = tuple((ids * 7 % vocabulary).astype(np.int32) for ids in batch.columns["token_ids"].fetch())
    return batch.with_columns(token_ids=ArrayColumn("sequence", rows)).without_origin()


class Reference(NamedTuple):
    """What the torch engine makes of a batch."""

    logprobs: list[np.ndarray]
    gradients: dict[str, dict[str, Tensor]]
    metrics: dict[str, float]
    stepped: dict[str, Tensor]


def reference(model: str, batch: TrainBatch) -> Reference:
    engine = trainer(model)
    found = {name: split_experts(gradients(engine, batch, loss)) for name, loss in LOSSES.items()}
    logprobs = list(engine.logprobs(batch))
    fresh = trainer(model)
    metrics = fresh.step(batch, pack(LOSSES["ppo"])).metrics
    return Reference(logprobs, found, dict(metrics), split_experts(weights(fresh)))


def gap(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True))
