"""Columns by reference: who fetches what, and what becomes of a rollout whose columns are lost."""

from __future__ import annotations

import asyncio
import gc
import io
import math
import pickle
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from algorithms.grpo import GRPO, GRPOExperience
from asyncrlhf.abc import EngineSpec
from asyncrlhf.control.checkpoint import encode_payloads
from asyncrlhf.errors import DataLost, EngineLost
from asyncrlhf.flow.batching import build_batch
from asyncrlhf.groups.answers import token_ids_of
from asyncrlhf.groups.frozen import FrozenEngine
from asyncrlhf.groups.scorers import ModelScorer
from asyncrlhf.messages import (
    Array,
    Experience,
    PerSample,
    PerToken,
    Prompt,
    Rollout,
    Sample,
    Stored,
    StoredColumn,
    StoredRows,
    column_of,
    sequence_column,
    total,
)
from asyncrlhf.observe import EventLog, Settled
from asyncrlhf.ops.rewards import sequence_kl
from asyncrlhf.runtimes.inproc import InprocRuntime
from asyncrlhf.testing import FakeTrainerOptions, Scenario, simulate
from tests.unit.test_model_scorer import rollout


@dataclass(eq=False)
class Box:
    """A lot in this process, which knows how often and by how many bytes it was fetched."""

    arrays: list[Array]
    lost: bool = False
    fetched: ClassVar[list[int]] = []

    @classmethod
    def fetch_all(cls, lots: Sequence[Box]) -> Sequence[Sequence[Array]]:
        if any(lot.lost for lot in lots):
            raise DataLost("the machine that held it is gone")
        cls.fetched += [sum(array.nbytes for array in lot.arrays) for lot in lots]
        return [lot.arrays for lot in lots]


@pytest.fixture(autouse=True)
def nothing_fetched() -> None:
    Box.fetched.clear()


def stored(sample: Sample, *, lost: bool = False) -> Sample:
    box = Box([np.array(sample.token_ids, np.int32), np.array(sample.logprobs, np.float32)], lost)
    ids, logprobs = (Stored(box, part, len(sample.token_ids)) for part in (0, 1))
    logprobs.total = sum(sample.logprobs)
    return replace(sample, token_ids=ids, logprobs=logprobs)


def stored_rollout(found: Rollout, *, lost: bool = False) -> Rollout:
    return replace(found, samples=tuple(stored(sample, lost=lost) for sample in found.samples))


def test_a_stored_sequence_knows_its_length_and_sum_without_being_fetched() -> None:
    found = stored_rollout(rollout(0, (9, 8, 7), (6, 5)))
    assert [len(sample.token_ids) for sample in found.samples] == [3, 2]
    assert [total(s.logprobs) for s in found.samples] == [
        sum(s.logprobs) for s in rollout(0, (9, 8, 7), (6, 5)).samples
    ]
    assert sequence_kl(found, tuple(s.logprobs for s in found.samples)) == (0.0, 0.0)
    assert Box.fetched == []
    assert tuple(found.samples[0].token_ids) == (9, 8, 7)
    assert found.samples[1].token_ids[-1] == 5
    assert found.samples[0].token_ids[1:] == (8, 7)
    assert Box.fetched == [24, 16, 24]


def test_a_part_of_a_batch_fetches_its_own_rows_and_every_answer_once() -> None:
    """What a data-parallel rank asks for, and what it is given: lengths 1 to 8, of which it has two."""
    answers = [stored(sample) for sample in rollout(0, *[tuple(range(9, 9 + n)) for n in range(1, 9)]).samples]
    column = sequence_column([(1, 2)] * 8, [sample.token_ids for sample in answers])
    part = pickle.loads(pickle.dumps(column.take([6, 1])))
    assert isinstance(part, StoredColumn)
    assert Box.fetched == [], "splitting and sending fetch nothing"
    assert [row.tolist() for row in part.fetch()] == [[1, 2, *range(9, 16)], [1, 2, 9, 10]]
    assert sorted(Box.fetched) == [2 * 8, 7 * 8]
    assert all(row.dtype == np.int32 for row in part.fetch())


def test_rows_that_share_a_lot_fetch_it_once_and_may_stand_beside_rows_that_are_here() -> None:
    box = Box([np.arange(10, dtype=np.float32)])
    column = column_of("token", [Stored(box, 0, 4), (5.5,), Stored(box, 0, 6, start=4)])
    assert [row.tolist() for row in column.fetch()] == [[0, 1, 2, 3], [5.5], [4, 5, 6, 7, 8, 9]]
    assert Box.fetched == [40]


class Counting(pickle.Pickler):
    """Knows how many objects it was asked about, as Ray's serializer is."""

    asked = 0

    def reducer_override(self, obj: object) -> Any:
        self.asked += 1
        return NotImplemented


@pytest.mark.parametrize("beside", [(), (np.array([5.5, 6.5], np.float32),)], ids=["alone", "beside others"])
def test_many_rows_travel_as_few_objects_and_arrive_as_they_were(beside: tuple[Array, ...]) -> None:
    boxes = [Box([np.arange(1000, dtype=np.float32), np.arange(5, dtype=np.float32)]) for _ in range(2)]
    rows = [Stored(boxes[i % 2], 0, 3, 3 * (i // 2), 0.5 * i) for i in range(500)]
    rows.append(Stored(boxes[0], 1, 5, total=10))
    column = StoredColumn("token", tuple((*beside, row) for row in rows))
    pickler = Counting(written := io.BytesIO(), protocol=5)
    pickler.dump(column)
    assert pickler.asked < 30, "not one for each row"
    found = pickle.loads(written.getvalue())
    assert [row.tolist() for row in found.fetch()] == [row.tolist() for row in column.fetch()]
    assert [row[-1].total for row in found.pieces] == [row.total for row in rows]
    assert len({id(row[-1].lot) for row in found.pieces}) == len(boxes)


def test_a_row_that_is_held_keeps_its_lot_and_no_other() -> None:
    boxes = [Box([np.zeros(4, np.float32)]) for _ in range(2)]
    rows = pickle.loads(pickle.dumps(StoredRows([Stored(box, 0, 2, start) for box in boxes for start in (0, 2)])))
    lots = [weakref.ref(rows[number].lot) for number in (0, 2)]
    held = rows[1]
    del rows
    gc.collect()
    assert [lot() is None for lot in lots] == [False, True]
    assert list(held) == [0.0, 0.0]
    del held
    gc.collect()
    assert lots[0]() is None


class TokenExperience(Experience, frozen=True):
    values: PerToken


def test_a_checkpoint_holds_what_is_stored_and_leaves_out_what_is_lost() -> None:
    here = rollout(3, (9, 8, 7), (6, 5))
    values = ((0.5, 0.25, 1.0), (2.0, 4.0))
    box = Box([np.array([0.5, 0.25, 1.0, 2.0, 4.0], np.float32)])
    columns = (Stored(box, 0, 3), Stored(box, 0, 2, start=3))
    items = [
        TokenExperience(rollout=stored_rollout(here), rewards=(1.0, 0.0), values=columns),
        TokenExperience(rollout=stored_rollout(here, lost=True), rewards=(1.0, 0.0), values=values),
    ]
    encoded, problems = encode_payloads(items)
    assert len(encoded) == len(problems) == 1
    assert "prompt 3" in problems[0]
    assert "gone" in problems[0]
    found = msgspec.msgpack.decode(encoded[0], type=TokenExperience)
    assert found.rollout == here
    assert tuple(map(tuple, found.values)) == values


async def test_text_is_made_of_fetched_tokens_off_the_event_loop() -> None:
    mixed = replace(here := rollout(0, (9, 8), (7, 6)), samples=(stored(here.samples[0]), here.samples[1]))
    assert [list(ids) for ids in await token_ids_of(mixed)] == [[9, 8], [7, 6]]
    with pytest.raises(DataLost):
        await token_ids_of(stored_rollout(here, lost=True))


async def test_of_rollouts_read_together_only_the_lost_one_fails() -> None:
    spec = EngineSpec(
        group="reward", rank=0, engine="asyncrlhf.testing.trainer:FakeScorer", options=FakeTrainerOptions()
    )
    runtime = InprocRuntime()
    engine = FrozenEngine(EventLog(None, asyncio.get_running_loop().time), runtime, spec, max_restarts=0)
    scorer = ModelScorer(engine)
    await scorer.start()
    wanted = [rollout(uid, (9 + uid, 8), (7,)) for uid in range(4)]
    given = [stored_rollout(found, lost=uid == 2) for uid, found in enumerate(wanted)]
    expected = await asyncio.gather(*map(scorer.score, wanted))
    found = await asyncio.gather(*map(scorer.score, given), return_exceptions=True)
    assert isinstance(found[2], DataLost)
    assert [found[uid] for uid in (0, 1, 3)] == [expected[uid] for uid in (0, 1, 3)]
    await runtime.close()


# ---- whole runs on fakes ---------------------------------------------------------------------------------------------
class Storing(GRPO):
    """GRPO whose rollouts are stored as soon as they are there."""

    def is_lost(self, prompt: Prompt, trained: bool) -> bool:
        return False

    async def generate(self) -> None:
        async for prompt in self.prompts:
            found = stored_rollout(await self.rollout.sample(prompt), lost=self.is_lost(prompt, trained=False))
            rewards = await self.reward.score(found)
            if self.is_lost(prompt, trained=True):
                found = stored_rollout(found, lost=True)
            item = GRPOExperience(
                rollout=found, rewards=rewards, advantages=self.advantages(rewards), reference_logprobs=None
            )
            await self.experience.put(item)


class Here(Storing):
    """The same without storing anything."""

    async def generate(self) -> None:
        async for prompt in self.prompts:
            found = await self.rollout.sample(prompt)
            rewards = await self.reward.score(found)
            item = GRPOExperience(
                rollout=found, rewards=rewards, advantages=self.advantages(rewards), reference_logprobs=None
            )
            await self.experience.put(item)


class LostOnce(Storing):
    """Of every third prompt the first answers are lost before they are scored."""

    def is_lost(self, prompt: Prompt, trained: bool) -> bool:
        return not trained and prompt.uid % 3 == 0 and prompt.attempt == 1


class LostAlways(Storing):
    def is_lost(self, prompt: Prompt, trained: bool) -> bool:
        return not trained


class LostInTraining(Storing):
    def is_lost(self, prompt: Prompt, trained: bool) -> bool:
        return trained and prompt.uid == 7


def scenario(**others: Any) -> Scenario:
    return Scenario(rows=12, epochs=2, reward_model=True, **others)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_by_reference_trains_the_same_batches_to_the_same_weights(staleness: int) -> None:
    runs = [simulate(kind, scenario(max_staleness=staleness)) for kind in (Here, Storing)]
    assert [run.reason for run in runs] == ["completed", "completed"]
    assert runs[0].batches == runs[1].batches
    assert runs[0].trainer().weights == runs[1].trainer().weights


def test_rollouts_lost_before_the_pop_are_sampled_again_and_trained_once() -> None:
    run = simulate(LostOnce, scenario(max_staleness=2))
    assert run.reason == "completed"
    assert sorted(uid for _, uids in run.batches for uid in uids) == list(range(24))
    lost = [event.uid for event in run.events_of(Settled) if event.state == "dropped(lost)"]
    assert sorted(lost) == list(range(0, 24, 3))
    assert run.ledger.account().leased_again["lost"] == 8


def test_a_run_that_loses_everything_ends_by_name() -> None:
    run = simulate(LostAlways, scenario(max_filtered=10))
    assert run.reason == "Exhausted"
    assert "gone" in str(run.error)


def test_a_train_step_whose_rollout_is_lost_ends_as_a_lost_engine_does() -> None:
    """After which a session goes on from its newest checkpoint."""
    run = simulate(LostInTraining, scenario())
    assert isinstance(run.error, DataLost)
    assert isinstance(run.error, EngineLost)
    assert 7 not in [uid for _, uids in run.batches for uid in uids]


@pytest.mark.parametrize("kind", [tuple, list, np.array], ids=["tuples", "lists", "arrays"])
def test_the_rows_of_a_column_are_what_was_given(kind: Any) -> None:
    """Also where they become parts of one array, and one of them is empty."""
    given = [(0.1, 2.0), (), (3.0,)]
    found = column_of("token", [kind(row) for row in given]).fetch()
    assert [row.dtype for row in found] == [np.float32] * 3
    assert [row.tolist() for row in found] == [np.float32(row).tolist() for row in given]
    ids = sequence_column([(1,), (2, 3), ()], [kind(row) for row in ((4, 5), (6,), (7,))]).fetch()
    assert [row.dtype for row in ids] == [np.int32] * 3
    assert [row.tolist() for row in ids] == [[1, 4, 5], [2, 3, 6], [7]]


class Columns(Experience, frozen=True):
    advantages: PerSample
    values: PerToken


@pytest.mark.parametrize(
    ("name", "column", "said"),
    [
        ("advantages", (1.0, None), "answer 1: column 'advantages' holds None, which is no number"),
        ("advantages", (1.0, "high"), "answer 1: column 'advantages' holds 'high', which is no number"),
        ("values", ((0.5, 1.0), (None, 2.0)), "answer 1: column 'values' holds None, which is no number"),
        ("values", ([0.5, None], [1.0, 2.0]), "answer 0: column 'values' holds None, which is no number"),
        ("values", ((0.5, 1.0), None), "answer 1: column 'values' holds None, not numbers"),
    ],
)
def test_what_is_no_number_is_named_with_its_prompt_and_column(name: str, column: Any, said: str) -> None:
    """Also where numpy would read it as NaN."""
    columns: dict[str, Any] = {"advantages": (1.0, -1.0), "values": ((0.5, math.nan), (1.0, 2.0))}
    items = [Columns(rollout=rollout(uid, (9, 8), (7, 6)), rewards=(1.0, 0.0), **columns) for uid in (4, 5)]
    popped: Any = SimpleNamespace(experiences=items, batch=SimpleNamespace(step=0, trained={0: 8}))
    assert [row.tolist() for row in build_batch(popped, 0).columns["advantages"].fetch()] == [[1.0], [-1.0]] * 2
    items[1] = replace(items[1], **{name: column})
    with pytest.raises(ValueError, match=f"uid 5, {said}"):
        build_batch(popped, 0)
