"""The proximal policy is the one at the start of the train step, whatever the train step does with its batch."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from asyncrlhf import ops
from asyncrlhf.abc import EngineSpec, OnEvents
from asyncrlhf.groups import CriticGroup, PolicyGroup, TrainGroup
from asyncrlhf.messages import Array, ArrayColumn, Packed, StepResult, TrainBatch
from asyncrlhf.observe import EventLog, Measured

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from torch import Tensor

ROWS, TRAIN_STEP = 12, 3
MASKED = (1, 7)
"""Rows without an unmasked token."""


class Recorder:
    """An engine whose log-probs say which row they are of and how many steps had been applied: -row - steps / 64."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.steps = 0
        self.forwards: list[int] = []
        """Steps applied before each forward."""
        self.stepped: list[TrainBatch] = []
        self.sizes: list[int] = []
        """Pickled bytes of every batch it was sent."""
        self.outcomes: list[bool] = []
        """Whether the coming steps are applied; all, once it is empty."""

    async def spawn(self, spec: EngineSpec, on_events: OnEvents) -> Recorder:
        return self

    async def close(self) -> None: ...

    async def call(self, verb: str, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        self.sizes += [len(pickle.dumps(a)) for a in arguments if isinstance(a, TrainBatch)]
        return getattr(self, verb)(*arguments)

    def step(self, batch: TrainBatch, loss: Packed) -> StepResult:
        assert batch.origin is None
        self.stepped.append(batch)
        applied = not self.outcomes or self.outcomes.pop(0)
        self.steps += applied
        return StepResult(applied=applied, reason="" if applied else "not_finite")

    def logprobs(self, batch: TrainBatch) -> Sequence[Array]:
        assert batch.origin is None
        self.forwards.append(self.steps)
        first = [int(row[0]) for row in batch.columns["token_ids"].fetch()]
        return [expected(row, n, self.steps) for row, n in zip(first, batch.response_lengths, strict=True)]

    def apply(self, transform: Packed, batch: TrainBatch) -> dict[str, Sequence[Array]]:
        assert batch.origin is None
        return {"advantages": [np.full(n, self.steps, np.float32) for n in batch.response_lengths]}


class AnyLoss(ops.Loss, frozen=True):
    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> Tensor:
        raise NotImplementedError


class PairLoss(AnyLoss, frozen=True):
    uses_masked_rows = True


class WholeLoss(AnyLoss, frozen=True):
    level = "rollout"


class AnyTransform(ops.Transform, frozen=True):
    def __call__(self, stats: ops.TokenStats | None, batch: ops.MicroBatch) -> Any:
        raise NotImplementedError


def expected(row: int, length: int, steps: int = 0) -> Array:
    return np.full(length, -row - steps / 64, np.float32)


def popped_batch(train_step: int = TRAIN_STEP, width: int = 5) -> TrainBatch:
    """Row r has r + 1 response tokens times width, and its number is its first prompt token."""
    lengths = tuple(width * (row + 1) for row in range(ROWS))
    masks = [np.full(n, row not in MASKED, np.float32) for row, n in enumerate(lengths)]
    return TrainBatch(
        train_step=train_step,
        prompt_lengths=(2,) * ROWS,
        response_lengths=lengths,
        unmasked=tuple(int(mask.sum()) for mask in masks),
        rollouts=tuple(range(ROWS)),
        columns={
            "token_ids": ArrayColumn(
                "sequence", tuple(np.array([row, *range(n + 1)], np.int32) for row, n in enumerate(lengths))
            ),
            "behaviour_logprobs": ArrayColumn("token", tuple(np.zeros(n, np.float32) for n in lengths)),
            "mask": ArrayColumn("token", tuple(masks)),
        },
    )


@asynccontextmanager
async def started(kind: type[TrainGroup] = PolicyGroup, **options: Any) -> AsyncIterator[tuple[TrainGroup, Recorder]]:
    spec = EngineSpec(group=kind.__name__, rank=0, engine="none:None", options=msgspec.defstruct("Nothing", [])())
    engine = Recorder(spec)
    group = kind(spec.group, EventLog(None), engine, [spec], **options)
    await group.start()
    serving = asyncio.create_task(group.serve())
    yield group, engine
    group.close()
    await serving


@asynccontextmanager
async def scene() -> AsyncIterator[tuple[TrainGroup, Recorder, TrainGroup]]:
    async with started(needs_proximal=True) as (policy, engine), started(CriticGroup) as (critic, _):
        yield policy, engine, critic


def check(engine: Recorder, steps: int, before: int = 0) -> None:
    """One forward, before the first update, whose values every later step got for its own rows."""
    assert engine.forwards == [before]
    assert len(engine.stepped) == steps
    assert "proximal_logprobs" not in engine.stepped[0].columns, "its own log-probs are those"
    for batch in engine.stepped[1:]:
        column = batch.columns["proximal_logprobs"].fetch()
        assert [int(ids[0]) for ids in batch.columns["token_ids"].fetch()] == list(batch.rows)
        for row, length, found in zip(batch.rows, batch.response_lengths, column, strict=True):
            assert np.array_equal(found, np.zeros(length) if row in MASKED else expected(row, length, before))


# ---- what a train step may do: each gives the number of its optimizer steps
async def minibatches(policy: TrainGroup, critic: TrainGroup, batch: TrainBatch) -> int:
    for part in batch.minibatches(4):
        await policy.step(part, AnyLoss())
    return 4


async def epochs(policy: TrainGroup, critic: TrainGroup, batch: TrainBatch) -> int:
    for part in batch.minibatches(2, epochs=3):
        await policy.step(part, AnyLoss())
    return 6


async def whole_epochs(policy: TrainGroup, critic: TrainGroup, batch: TrainBatch) -> int:
    for part in batch.minibatches(1, epochs=2):
        await policy.step(await critic.apply(AnyTransform(), part), AnyLoss())
    return 2


async def halves(policy: TrainGroup, critic: TrainGroup, batch: TrainBatch) -> int:
    for rows in (range(ROWS // 2), range(ROWS // 2, ROWS)):
        await policy.step(batch.take(rows), AnyLoss())
    return 2


async def advantages_anew(policy: TrainGroup, critic: TrainGroup, batch: TrainBatch) -> int:
    for epoch in range(2):
        batch = await critic.apply(AnyTransform(), batch)
        for part in batch.minibatches(3, seed=epoch):
            await policy.step(part, AnyLoss())
    return 6


async def columns_between(policy: TrainGroup, critic: TrainGroup, batch: TrainBatch) -> int:
    for part in batch.minibatches(2):
        part = part.with_columns(seen=part.columns["mask"])
        for half in part.minibatches(2):
            await policy.step(await critic.apply(AnyTransform(), half.take(range(len(half))[::-1])), AnyLoss())
    whole = batch.with_columns(seen=batch.columns["mask"])
    await policy.step(whole, AnyLoss())
    return 5


async def all_at_once(policy: TrainGroup, critic: TrainGroup, batch: TrainBatch) -> int:
    await asyncio.gather(*(policy.step(part, AnyLoss()) for part in batch.minibatches(3, epochs=2)))
    return 6


PLANS = (minibatches, epochs, whole_epochs, halves, advantages_anew, columns_between, all_at_once)


@pytest.mark.parametrize("plan", PLANS)
async def test_one_forward_before_the_first_update_serves_every_step(
    plan: Callable[[TrainGroup, TrainGroup, TrainBatch], Awaitable[int]],
) -> None:
    async with scene() as (policy, engine, critic):
        steps = await plan(policy, critic, popped_batch())
        check(engine, steps)
        applied, _ = policy.closed_step()
        assert applied == steps
        engine.forwards.clear()
        engine.stepped.clear()
        assert await plan(policy, critic, popped_batch(TRAIN_STEP + 1)) == steps
        check(engine, steps, before=applied)


@pytest.mark.parametrize("cut", [lambda b: b, lambda b: b.minibatches(1)[0], lambda b: b.take(range(ROWS)[::-1])])
async def test_one_step_on_all_rows_needs_no_forward(cut: Callable[[TrainBatch], TrainBatch]) -> None:
    async with scene() as (policy, engine, _):
        for train_step in range(3):
            await policy.step(cut(popped_batch(train_step)), AnyLoss())
            policy.closed_step()
        assert engine.forwards == []
        assert all("proximal_logprobs" not in batch.columns for batch in engine.stepped)


@pytest.mark.parametrize(
    "again",
    [
        lambda b: b,
        lambda b: b.with_columns(seen=b.columns["mask"]),
        lambda b: b.take(range(ROWS)),
        lambda b: b.take([0, 1]),
        lambda b: b.minibatches(2)[0],
    ],
)
async def test_a_step_after_one_on_the_whole_batch_is_refused(again: Callable[[TrainBatch], TrainBatch]) -> None:
    async with scene() as (policy, engine, _):
        batch = popped_batch()
        await policy.step(batch, AnyLoss())
        with pytest.raises(ValueError, match=r"train step 3: .* use batch\.minibatches\(count, epochs=\.\.\.\)"):
            await policy.step(again(batch), AnyLoss())
        assert (engine.steps, engine.forwards) == (1, [])


@pytest.mark.parametrize("other", [popped_batch(TRAIN_STEP + 1), popped_batch(width=6)])
async def test_another_popped_batch_in_the_same_train_step_is_refused(other: TrainBatch) -> None:
    async with scene() as (policy, engine, _):
        await policy.step(popped_batch().take([0]), AnyLoss())
        with pytest.raises(ValueError, match="train step 3 has begun on another batch than this one"):
            await policy.step(other.take([0]), AnyLoss())
        assert engine.steps == 1


async def test_nothing_is_kept_after_the_train_step_even_if_it_was_void() -> None:
    async with scene() as (policy, engine, _):
        engine.outcomes = [False, False, True, True]
        for _ in range(2):  # a void train step is followed by one of the same number
            for part in popped_batch().minibatches(2):
                await policy.step(part, AnyLoss())
            policy.closed_step()
            assert policy._proximal is None  # pyright: ignore[reportPrivateUsage]
            assert policy._begun is None  # pyright: ignore[reportPrivateUsage]
        assert engine.forwards == [0, 0]


async def test_a_loss_that_uses_masked_rows_gets_their_values_too() -> None:
    async with scene() as (policy, engine, _):
        for part in popped_batch().minibatches(2):
            await policy.step(part, PairLoss())
        for batch in engine.stepped[1:]:
            column = batch.columns["proximal_logprobs"].fetch()
            for row, length, found in zip(batch.rows, batch.response_lengths, column, strict=True):
                assert np.array_equal(found, expected(row, length))


async def test_no_forward_where_no_correction_asks_for_it() -> None:
    async with started() as (policy, engine):
        batch = popped_batch()
        for part in (*batch.minibatches(2, epochs=2), batch, batch):
            await policy.step(part, AnyLoss())
        assert engine.forwards == []
        assert engine.steps == 6


async def test_a_minibatch_travels_without_the_batch_it_is_of() -> None:
    async with scene() as (policy, engine, critic):
        batch = popped_batch(width=200)
        whole = len(pickle.dumps(batch))
        parts = batch.minibatches(4)
        for part in parts:
            part = await critic.apply(AnyTransform(), part)
            await policy.step(part, AnyLoss())
        sent = engine.sizes[1:]  # the first is the forward
        assert len(sent) == 4
        columns = (3 + 2) / 3  # proximal log-probs and advantages came on top
        assert sum(sent) < 1.1 * columns * whole
        assert engine.sizes[0] < 1.1 * whole


def test_rows_keep_their_place_in_the_popped_batch() -> None:
    batch = popped_batch()
    assert batch.rows == tuple(range(ROWS))
    assert batch.popped is batch
    assert not batch.several_steps
    part = batch.take([5, 3, 8]).with_columns(seen=ArrayColumn("sample", (np.zeros(1),) * 3)).take([2, 0])
    assert part.rows == (8, 5)
    assert part.popped is batch
    parts = part.minibatches(2, epochs=2)
    assert [sorted(a.rows + b.rows) for a, b in (parts[:2], parts[2:])] == [[5, 8], [5, 8]]
    assert all(p.popped is batch and p.several_steps and p.take([0]).several_steps for p in parts)
    assert not any(p.several_steps for p in batch.take([4]).minibatches(3)), "one part only"
    assert parts[0].without_origin().rows == parts[0].rows
    assert batch.take([]).rows == ()


async def test_what_a_transform_measures_is_reported_and_no_column() -> None:
    async with started(CriticGroup) as (critic, engine):
        events: list[Any] = []
        critic.emit = events.append
        engine.apply = lambda transform, batch: {  # type: ignore[method-assign]
            "advantages": [np.zeros(n, np.float32) for n in batch.response_lengths],
            "explained_variance": 0.5,
        }
        batch = await critic.apply(AnyTransform(), popped_batch())
    assert "explained_variance" not in batch.columns
    assert "advantages" in batch.columns
    measured = [event for event in events if isinstance(event, Measured)]
    assert [(e.group, e.train_step, e.metrics) for e in measured] == [
        ("CriticGroup", TRAIN_STEP, {"explained_variance": 0.5})
    ]


async def test_a_loss_on_whole_rollouts_refuses_parts_of_them() -> None:
    pairs = replace(popped_batch(), rollouts=tuple(row // 2 for row in range(ROWS)))
    async with started() as (policy, engine):
        await policy.step(pairs, WholeLoss())
        for part in pairs.minibatches(1, epochs=2):
            await policy.step(part, WholeLoss())
        await policy.step(pairs.take([4, 0, 5, 1]), WholeLoss())
        assert len(engine.stepped) == 4
        with pytest.raises(ValueError, match="rollout 2 has 2 rows, of which 1 are in this mini-batch"):
            await policy.step(pairs.take([0, 1, 4]), WholeLoss())
