"""The proximal policy with a real trainer: the anchor of every part is the policy at the start of the train step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from asyncrlhf import ops
from asyncrlhf.abc import EngineSpec, OnEvents
from asyncrlhf.backends.torch.options import OptimizerOptions
from asyncrlhf.backends.torch.train import TorchTrainer
from asyncrlhf.groups import PolicyGroup
from asyncrlhf.messages import ArrayColumn, TrainBatch
from asyncrlhf.observe import EventLog
from tests.integration.torch_scene import PolicyLoss, make_batch, make_model, trainer, with_behaviour


class Here:
    """Runtime and handle of an engine that is called where it is."""

    def __init__(self, engine: TorchTrainer) -> None:
        self.engine = engine
        self.spec = EngineSpec(group="policy", rank=0, engine="none:None", options=engine.options)
        self.verbs: list[str] = []

    async def spawn(self, spec: EngineSpec, on_events: OnEvents) -> Here:
        return self

    async def close(self) -> None: ...

    async def call(self, verb: str, *arguments: Any) -> Any:
        self.verbs.append(verb)
        return getattr(self.engine, verb)(*arguments)


class Looking(PolicyLoss, frozen=True):
    """Notes, per forward, how far anchor, new policy and weight are from where the train step began."""

    seen: ClassVar[list[dict[str, float]]] = []

    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> torch.Tensor:
        keep = batch.mask > 0
        gaps = {
            "anchor": batch.anchor_logprobs - batch.before,
            "ratio": (new.logprobs.detach() - batch.anchor_logprobs).exp() - 1,
            "weight": batch.weight - 1,
        }
        self.seen.append({name: float(gap[keep].abs().max()) for name, gap in gaps.items()})
        return super().__call__(new, batch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("policy"))


@asynccontextmanager
async def scene(model: str) -> AsyncIterator[tuple[PolicyGroup, Here, TrainBatch]]:
    """A group on a trainer with decoupled correction, and a batch fresh from its weights, which it calls `before`."""
    engine = trainer(
        model, off_policy="decoupled", micro_batch_rows=100, optimizer=OptimizerOptions(learning_rate=3e-2)
    )
    here = Here(engine)
    group = PolicyGroup("policy", EventLog(None), here, [here.spec], needs_proximal=True)
    await group.start()
    serving = asyncio.create_task(group.serve())
    batch = make_batch()
    fresh = engine.logprobs(batch)
    Looking.seen.clear()
    yield group, here, with_behaviour(batch, fresh).with_columns(before=ArrayColumn("token", tuple(fresh)))
    group.close()
    await serving


async def test_with_fresh_data_the_first_part_has_ratio_1_and_later_ones_do_not(model: str) -> None:
    async with scene(model) as (group, here, batch):
        for part in batch.minibatches(3):
            assert (await group.step(part, Looking())).applied
        assert here.verbs == ["logprobs", "step", "step", "step"]
    assert Looking.seen[0] == pytest.approx({"anchor": 0, "ratio": 0, "weight": 0}, abs=1e-4)
    for later in Looking.seen[1:]:
        assert later["ratio"] > 0.05
        assert max(later["anchor"], later["weight"]) < 1e-4


def planned(batch: TrainBatch) -> list[TrainBatch]:
    return batch.minibatches(2, epochs=2)


def by_hand(batch: TrainBatch) -> list[TrainBatch]:
    """New advantages for every epoch, then halves."""
    parts: list[TrainBatch] = []
    for epoch in range(2):
        advantages = tuple(np.full(n, 1.0 - 2 * epoch, np.float32) for n in batch.response_lengths)
        batch = batch.with_columns(advantages=ArrayColumn("token", advantages))
        order = list(range(len(batch)))
        parts += [batch.take(order[epoch::2]), batch.take(order[1 - epoch :: 2])]
    return parts


def whole(batch: TrainBatch) -> list[TrainBatch]:
    return batch.minibatches(1, epochs=3)


@pytest.mark.parametrize("plan", [planned, by_hand, whole])
async def test_the_anchor_of_every_epoch_is_the_policy_before_the_train_step(
    model: str, plan: Callable[[TrainBatch], list[TrainBatch]]
) -> None:
    async with scene(model) as (group, here, batch):
        parts = plan(batch)
        for part in parts:
            assert (await group.step(part, Looking())).applied
        assert here.verbs == ["logprobs"] + ["step"] * len(parts)
        group.closed_step()
        moved = max(
            float(np.abs(now - then).max())
            for now, then in zip((await group.logprobs(batch)).rows, batch.columns["before"].fetch(), strict=True)
        )
        assert moved > 0.1, "else the anchors below would prove nothing"
    assert len(Looking.seen) == len(parts)
    assert max(seen["anchor"] for seen in Looking.seen) < 1e-4
    assert max(seen["weight"] for seen in Looking.seen) < 1e-4
    assert min(seen["ratio"] for seen in Looking.seen[1:]) > 0.05
