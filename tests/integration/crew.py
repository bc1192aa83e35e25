"""Processes that become the ranks of one trainer after another, so that a test need not start any."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from asyncrlhf.abc import Engine, EngineHandle, EngineSpec, Place
from asyncrlhf.backends.torch.away import Away
from asyncrlhf.backends.torch.options import OptimizerOptions, TrainerOptions
from asyncrlhf.backends.torch.train import TorchTrainer
from asyncrlhf.backends.torch.world import gathered
from asyncrlhf.groups.ranks import Ranks
from asyncrlhf.messages import (
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

__all__ = ("Crew", "Member", "MemberOptions")


class MemberOptions(Message, frozen=True, kw_only=True):
    """Nothing to choose before it becomes a trainer."""


class Member(Engine):
    """A process that holds one trainer at a time, and shows what is inside it."""

    Options = MemberOptions

    def __init__(self, options: MemberOptions) -> None:
        torch.set_num_threads(1)
        self._trainer: TorchTrainer | None = None

    def become(self, options: TrainerOptions) -> None:
        """Another trainer, with new weights."""
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = TorchTrainer(options)

    def weights(self) -> dict[str, Any]:
        return {name: weight.clone().numpy() for name, weight in self._trainer._model.whole().items()}

    def gradients(self, batch: TrainBatch, loss: Packed) -> dict[str, Any]:
        """Whole gradients of one step, caught where the optimizer would take them."""
        optimizer, caught = self._trainer._optimizer, {}

        def keep(train_step: int, norm: torch.Tensor) -> float:
            for name, parameter in self._trainer._model.parameters().items():
                if parameter.grad is not None:
                    caught[name] = gathered(parameter.grad).clone().numpy()
            return 0.0

        original, optimizer.step = optimizer.step, keep
        assert self._trainer.step(batch, loss).applied
        optimizer.step = original
        optimizer.zero_grad()
        return caught

    def kept_numbers(self) -> int:
        """Numbers of parameters and moments on this rank."""
        optimizer = self._trainer._optimizer._adamw
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        tensors += [tensor for own in optimizer.state.values() for tensor in own.values()]
        return sum(getattr(tensor, "_local_tensor", tensor).numel() for tensor in tensors)

    def go_and_come_back(self) -> int:
        """Have the memory of parameters, buffers and moments taken away and given back; gives its bytes in between."""
        module, optimizer = self._trainer._model.module, self._trainer._optimizer._adamw
        held = [*module.parameters(), *module.buffers()]
        held += [tensor for own in optimizer.state.values() for tensor in own.values()]
        away = Away(tensor.detach() for tensor in held)
        local = [getattr(tensor, "_local_tensor", tensor) for tensor in held]
        left = sum(tensor.untyped_storage().nbytes() for tensor in local)
        away.back()
        return left

    def read(self, handle: WeightHandle) -> dict[str, Any]:
        """What was published."""
        received = import_object(handle.transport)().receive(handle.payload)
        return {name: weight.clone().numpy() for name, weight in received}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


VERBS = {
    "weights": "lead",
    "read": "lead",
    "kept_numbers": "broadcast",
    "go_and_come_back": "broadcast",
    "become": "broadcast",
    "gradients": "data_parallel",
}


class Crew:
    """Some of its processes at work on a trainer, called from a test without an event loop."""

    def __init__(self, size: int) -> None:
        self._runner = asyncio.Runner()
        self._runtime = LocalRuntime()
        places = [Place(group="policy", rank=rank, engine="tests.integration.crew:Member") for rank in range(size)]
        self._runtime.expect(places)
        self._handles: list[EngineHandle] = [self._run(self._runtime.spawn(_spec(place), _heard)) for place in places]
        self.ranks: Ranks | None = None

    def become(self, model: str, ranks: int, **options: Any) -> Crew:
        """Ranks of a new trainer."""
        options.setdefault("optimizer", OptimizerOptions(learning_rate=1e-3, max_grad_norm=1e9))
        options.setdefault("max_response_tokens", 12)
        full = TrainerOptions(model=model, device="cpu", data_parallel=ranks, **options)
        self.ranks = Ranks(self._handles[:ranks], ParallelLayout(data=ranks), VERBS)
        self._run(self.ranks.call("become", full))
        self._run(self.ranks.join(120.0))
        return self

    def call(self, verb: str, *arguments: Any) -> Any:
        assert self.ranks is not None
        return self._run(self.ranks.call(verb, *arguments))

    def each(self, verb: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """A verb with arguments of its own for every rank; gives every result."""

        async def ask() -> list[Any]:
            calls = [handle.call(verb, *own) for handle, own in zip(self._handles, arguments, strict=False)]
            return await asyncio.gather(*calls)

        return self._run(ask())

    def step(self, batch: TrainBatch, loss: Loss) -> StepResult:
        return self.call("step", batch, pack(loss))

    def gradients(self, batch: TrainBatch, loss: Loss) -> dict[str, torch.Tensor]:
        return _tensors(self.call("gradients", batch, pack(loss)))

    def weights(self) -> dict[str, torch.Tensor]:
        return _tensors(self.call("weights"))

    def close(self) -> None:
        self._run(self._runtime.close())
        self._runner.close()

    def _run(self, work: Any) -> Any:
        return self._runner.run(work)


def _spec(place: Place) -> EngineSpec:
    return EngineSpec(group=place.group, rank=place.rank, engine=place.engine, options=MemberOptions())


def _heard(events: Sequence[EngineEvent]) -> None:
    """Compute times, and the end."""


def _tensors(arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
