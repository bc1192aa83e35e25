"""Optimizer steps that are asked for together: the engine has the next one before it is done with the last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from asyncrlhf import ops
from asyncrlhf.abc import EngineSpec, OnEvents
from asyncrlhf.algorithm import gather
from asyncrlhf.errors import EngineLost, GroupError
from asyncrlhf.groups import PolicyGroup
from asyncrlhf.messages import ArrayColumn, StepResult, TrainBatch
from asyncrlhf.observe import Event, EventLog, OptimizerStep
from tests.unit.virtual import settle, virtual

if TYPE_CHECKING:
    from torch import Tensor


class AnyLoss(ops.Loss, frozen=True):
    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> Tensor:
        raise NotImplementedError


class Slow:
    """An engine that takes `seconds` of the virtual clock for a step, one after another."""

    address = "127.0.0.1"

    def __init__(self, spec: EngineSpec, seconds: float) -> None:
        self.spec, self.seconds, self.closed = spec, seconds, asyncio.Event()
        self.received: list[int] = []
        """First row of every batch, as they came."""
        self.done = 0
        self._turn = asyncio.Lock()

    async def spawn(self, spec: EngineSpec, on_events: OnEvents) -> Slow:
        return self

    async def close(self, *, at_once: bool = False) -> None:
        self.closed.set()

    async def call(self, verb: str, batch: TrainBatch, *arguments: Any) -> StepResult:
        self.received.append(batch.rows[0])
        work, end = asyncio.create_task(self._work()), asyncio.create_task(self.closed.wait())
        await asyncio.wait([work, end], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            raise GroupError("the engine has been closed")
        end.cancel()
        return StepResult(applied=True)

    async def _work(self) -> None:
        async with self._turn:
            await asyncio.sleep(self.seconds)
        self.done += 1


@asynccontextmanager
async def started(seconds: float, limit: float) -> AsyncIterator[tuple[PolicyGroup, Slow, list[Event]]]:
    spec = EngineSpec(group="policy", rank=0, engine="none:None", options=msgspec.defstruct("Nothing", [])())
    engine, log, seen = Slow(spec, seconds), EventLog(None, asyncio.get_running_loop().time), list[Event]()
    log.subscribe(type("View", (), {"see": lambda _, event, *, live: seen.append(event)})())
    group = PolicyGroup("policy", log, engine, [spec], call_timeout=limit)
    await group.start()
    serving = asyncio.create_task(group.serve())
    yield group, engine, seen
    group.close()
    await serving


def parts(count: int) -> list[TrainBatch]:
    lengths = (3,) * count
    batch = TrainBatch(
        train_step=0,
        prompt_lengths=lengths,
        response_lengths=lengths,
        unmasked=lengths,
        rollouts=tuple(range(count)),
        columns={"mask": ArrayColumn("token", tuple(np.ones(3, np.float32) for _ in lengths))},
    )
    return [batch.take([row]) for row in range(count)]


@virtual
async def test_the_engine_gets_them_in_order_and_before_it_is_done() -> None:
    async with started(seconds=2.0, limit=100.0) as (group, engine, seen):
        asked = asyncio.create_task(gather(*(group.step(part, AnyLoss()) for part in parts(4))))
        await settle()
        assert (engine.received, engine.done) == ([0, 1], 0)
        assert all(result.applied for result in await asked)
    assert engine.received == [0, 1, 2, 3]
    steps = [event for event in seen if isinstance(event, OptimizerStep)]
    assert [step.optimizer_step for step in steps] == [1, 2, 3, 4]
    assert [step.seconds for step in steps] == pytest.approx([2.0] * 4)


@virtual
async def test_each_has_its_whole_time() -> None:
    async with started(seconds=2.0, limit=3.0) as (group, engine, _):
        await gather(*(group.step(part, AnyLoss()) for part in parts(4)))
        assert (engine.done, engine.closed.is_set()) == (4, False)


@virtual
async def test_one_that_hangs_is_found_in_its_own_time() -> None:
    async with started(seconds=4.0, limit=3.0) as (group, engine, _):
        with pytest.raises(EngineLost, match=r"group 'policy': step has not come back within .* = 3 s"):
            await gather(*(group.step(part, AnyLoss()) for part in parts(3)))
        assert (engine.done, engine.closed.is_set()) == (0, True)
        assert asyncio.get_running_loop().time() == pytest.approx(3.0)
