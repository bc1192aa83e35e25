"""Transfer protocols: every row to the ranks that need it and back in its place, whatever the batch and the layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrlhf import ops
from asyncrlhf.errors import ConfigError, GroupError
from asyncrlhf.groups.protocols import LOPSIDED, PROTOCOLS, Protocol, micro_data_parallel, protocol, shares
from asyncrlhf.messages import ArrayColumn, ParallelLayout, StepResult, TrainBatch, WeightHandle, pack
from asyncrlhf.messages.layout import Coordinates
from asyncrlhf.weights.parts import ASSEMBLED


class TokenLoss(ops.Loss, frozen=True):
    pass


class RolloutLoss(ops.Loss, frozen=True):
    level = "rollout"


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    """Uneven rows, as many answers to a prompt as it happens, maybe no row at all."""
    rollouts: list[int] = []
    for number, count in enumerate(draw(st.lists(st.integers(1, 5), max_size=6))):
        rollouts += [number] * count
    size = len(rollouts)
    answers = draw(st.lists(st.integers(0, 60), min_size=size, max_size=size))
    prompts = draw(st.lists(st.integers(1, 20), min_size=size, max_size=size))
    return TrainBatch(
        train_step=0,
        prompt_lengths=tuple(prompts),
        response_lengths=tuple(answers),
        unmasked=tuple(answers),
        rollouts=tuple(rollouts),
        columns={"row": ArrayColumn("sample", tuple(np.full(1, row, np.float32) for row in range(size)))},
    )


layouts = st.builds(
    ParallelLayout,
    tensor=st.sampled_from([1, 2, 4]),
    context=st.sampled_from([1, 2]),
    data=st.integers(1, 5),
    pipeline=st.sampled_from([1, 2, 4]),
)


def rows_of(batch: TrainBatch) -> list[int]:
    return [int(row[0]) for row in batch.columns["row"].fetch()]


@given(layouts)
def test_ranks_and_places_are_the_same_thing(layout: ParallelLayout) -> None:
    places = [layout.place(rank) for rank in range(layout.ranks)]
    assert [layout.rank(place) for place in places] == list(range(layout.ranks))
    assert len(set(places)) == layout.ranks
    assert places[0] == Coordinates(0, 0, 0, 0)
    sizes = [max(place[axis] for place in places) + 1 for axis in range(4)]
    assert sizes == [layout.tensor, layout.context, layout.data, layout.pipeline]


@given(batches(), st.integers(1, 6), st.booleans())
def test_n12_every_row_goes_to_one_rank_and_loads_are_balanced(batch: TrainBatch, count: int, whole: bool) -> None:
    found = shares(batch, count, whole_rollouts=whole)
    assert len(found) == count
    assert sorted(row for share in found for row in share) == list(range(len(batch)))
    assert all(share == sorted(share) for share in found)
    sizes = [p + r for p, r in zip(batch.prompt_lengths, batch.response_lengths, strict=True)]
    loads = [sum(sizes[row] for row in share) for share in found]
    units = [[row] for row in range(len(batch))]
    if whole:
        units = [[row for row in range(len(batch)) if batch.rollouts[row] == r] for r in set(batch.rollouts)]
        for unit in units:
            assert sum(bool(set(unit) & set(share)) for share in found) == 1
    largest = max((sum(sizes[row] for row in unit) for unit in units), default=0)
    # the longest-first rule is never worse than this (Graham 1969), nor is what we accept instead of it
    assert max(loads) <= max(sum(sizes) / count + largest, LOPSIDED * sum(sizes) / count)


def test_answers_to_one_prompt_stay_together_where_balance_allows() -> None:
    def batch(rollouts: list[int]) -> TrainBatch:
        size = len(rollouts)
        ones = (8,) * size
        return TrainBatch(
            train_step=0,
            prompt_lengths=ones,
            response_lengths=ones,
            unmasked=ones,
            rollouts=tuple(rollouts),
            columns={},
        )

    assert shares(batch([0, 0, 1, 1, 2, 2, 3, 3]), 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert shares(batch([0, 0, 0, 1, 1, 1, 2, 2, 2]), 4) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], []]  # some rank has 3
    assert shares(batch([0, 0, 0, 1, 1, 1]), 4) == [[0, 4], [1, 5], [2], [3]]
    assert shares(batch([0, 0, 0, 1, 1, 1]), 4, whole_rollouts=True) == [[0, 1, 2], [3, 4, 5], [], []]


@given(batches(), layouts)
def test_3d_gives_all_ranks_of_a_copy_the_same_and_takes_the_last_stage(
    batch: TrainBatch, layout: ParallelLayout
) -> None:
    found = PROTOCOLS["3d"]
    given_ = found.distribute(layout, (batch, "loss"))
    assert all(own[1] == "loss" for own in given_)
    seen: dict[int, list[int]] = {}
    for rank, (part, _) in enumerate(given_):
        assert seen.setdefault(layout.place(rank).data, rows_of(part)) == rows_of(part)
        assert part.origin is None
    assert sorted(row for rows in seen.values() for row in rows) == list(range(len(batch)))
    results: list[Any] = []
    for rank, (part, _) in enumerate(given_):
        place = layout.place(rank)
        speaks = place.tensor == place.context == 0 and place.pipeline == layout.pipeline - 1
        results.append([row if speaks else "somebody else's" for row in rows_of(part)])
    assert found.collect(layout, (batch, "loss"), results) == list(range(len(batch)))


@given(batches(), st.integers(1, 5))
def test_columns_and_step_results_come_back_as_one(batch: TrainBatch, ranks: int) -> None:
    layout, found = ParallelLayout(data=ranks), PROTOCOLS["data_parallel"]
    parts = [rows_of(own[0]) for own in found.distribute(layout, (batch,))]
    columns = [{"row": rows, "twice": [2 * row for row in rows], "measure": 0.5} for rows in parts]
    merged = found.collect(layout, (batch,), columns)
    rows = list(range(len(batch)))
    assert merged == {"row": rows, "twice": [2 * row for row in rows], "measure": 0.5}
    result = StepResult(applied=True, metrics={"loss": 1.0})
    assert found.collect(layout, (batch,), [result] * ranks) is result


@given(batches(), st.integers(2, 5))
def test_a_loss_on_rollouts_gets_them_whole(batch: TrainBatch, ranks: int) -> None:
    found = PROTOCOLS["data_parallel"].distribute(ParallelLayout(data=ranks), (batch, pack(RolloutLoss())))
    for number in set(batch.rollouts):
        assert sum(number in part.rollouts for part, _ in found) == 1
    apart = PROTOCOLS["data_parallel"].distribute(ParallelLayout(data=ranks), (batch, pack(TokenLoss())))
    assert [rows_of(part) for part, _ in apart] == shares(batch, ranks)


@st.composite
def regroupings(draw: st.DrawFn) -> tuple[ParallelLayout, int, int]:
    t, p = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4]))
    t_g = draw(st.sampled_from([n for n in (1, 2, 4, 8) if t % n == 0]))
    p_g = draw(st.sampled_from([n for n in (1, 2, 4) if p % n == 0]))
    return ParallelLayout(tensor=t, pipeline=p, data=draw(st.integers(1, 3))), t_g, p_g


@given(batches(), regroupings())
def test_micro_data_parallel_copies_hold_every_generation_place_once(
    batch: TrainBatch, regrouping: tuple[ParallelLayout, int, int]
) -> None:
    layout, t_g, p_g = regrouping
    found = micro_data_parallel(t_g, p_g)
    given_ = found.distribute(layout, (batch,))
    wide, deep = layout.tensor // t_g, layout.pipeline // p_g
    copies: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(layout.ranks):
        place = layout.place(rank)
        copies.setdefault((place.data, place.pipeline % deep, place.tensor % wide), []).append(rank)
    assert len(copies) == layout.ranks // (t_g * p_g)
    rows: list[int] = []
    for ranks in copies.values():
        places = [layout.place(rank) for rank in ranks]
        assert len({(place.pipeline // deep, place.tensor // wide) for place in places}) == t_g * p_g == len(ranks)
        assert len({tuple(rows_of(given_[rank][0])) for rank in ranks}) == 1
        rows += rows_of(given_[ranks[0]][0])
    assert sorted(rows) == list(range(len(batch)))
    results = []
    for rank, (part,) in enumerate(given_):
        place = layout.place(rank)
        speaks = place.tensor // wide == 0 and place.pipeline // deep == p_g - 1
        results.append([row if speaks else "somebody else's" for row in rows_of(part)])
    assert found.collect(layout, (batch,), results) == list(range(len(batch)))


def test_ranks_announce_their_parts_as_one_and_a_rank_that_has_put_all_speaks_for_all() -> None:
    def handle(transport: str, payload: dict[str, Any]) -> WeightHandle:
        return WeightHandle(
            version=3, checksum=7, changed=True, byte_count=8, transport=transport, payload=payload, probe=None
        )

    found, layout = PROTOCOLS["announce"], ParallelLayout(tensor=2)
    assert found.distribute(layout, (3,)) == [(3,), (3,)]
    parts = [handle(ASSEMBLED, {"version": 3, "layout": b"", "shards": (rank,)}) for rank in range(2)]
    assert found.collect(layout, (3,), parts).payload == {"version": 3, "layout": b"", "shards": (0, 1)}
    whole = [handle("a:B", {"version": 3}), handle("a:B", {})]
    assert found.collect(layout, (3,), whole) is whole[0]


def test_micro_data_parallel_refuses_sizes_that_do_not_divide() -> None:
    with pytest.raises(GroupError, match="tensor, pipeline = 3, 1 on training ranks with 8, 1"):
        micro_data_parallel(3, 1).distribute(ParallelLayout(tensor=8), ("anything",))


def test_pipeline_only_gives_one_result_per_stage() -> None:
    layout, found = ParallelLayout(tensor=2, data=2, pipeline=3), PROTOCOLS["pipeline_only"]
    assert found.distribute(layout, ("a",)) == [("a",)] * 12
    assert found.collect(layout, ("a",), list(range(12))) == [0, 4, 8]


def test_broadcast_and_lead_differ_in_what_the_caller_gets() -> None:
    layout = ParallelLayout(data=3)
    for name, expected in (("broadcast", [0, 1, 2]), ("lead", 0)):
        assert PROTOCOLS[name].distribute(layout, (7, "x")) == [(7, "x")] * 3
        assert PROTOCOLS[name].collect(layout, (7, "x"), [0, 1, 2]) == expected


def test_all_to_all_gives_each_rank_its_part_of_every_argument() -> None:
    layout, found = ParallelLayout(data=3), PROTOCOLS["all_to_all"]
    assert found.distribute(layout, ([1, 2, 3], "abc")) == [(1, "a"), (2, "b"), (3, "c")]
    assert found.collect(layout, (), "xyz") == ["x", "y", "z"]
    with pytest.raises(GroupError, match="2 parts for 3 ranks"):
        found.distribute(layout, ([1, 2],))


def test_a_rank_that_loses_rows_is_found_out() -> None:
    batch = TrainBatch(
        train_step=0,
        prompt_lengths=(1, 1),
        response_lengths=(2, 2),
        unmasked=(2, 2),
        rollouts=(0, 1),
        columns={},
    )
    with pytest.raises(GroupError, match="given 1 rows and gave results for 2"):
        PROTOCOLS["3d"].collect(ParallelLayout(data=2), (batch,), [[1.0, 2.0], [1.0]])
    with pytest.raises(GroupError, match="0 of 1 arguments are batches"):
        PROTOCOLS["3d"].distribute(ParallelLayout(data=2), ("no batch",))


def every_other(layout: ParallelLayout, arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return [tuple(argument[rank :: layout.ranks] for argument in arguments) for rank in range(layout.ranks)]


MINE = Protocol(every_other, lambda layout, arguments, results: max(results))


def test_a_pair_of_ones_own_is_found_by_its_import_path() -> None:
    found = protocol("tests.unit.test_protocols:MINE")
    assert found is MINE
    assert protocol("3d") is PROTOCOLS["3d"]
    with pytest.raises(ConfigError, match='no transfer protocol "2d"; use one of broadcast'):
        protocol("2d")
    with pytest.raises(ConfigError, match='"tests.unit.test_protocols:every_other" is a function'):
        protocol("tests.unit.test_protocols:every_other")
