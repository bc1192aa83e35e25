"""HybridFlow's grouping: no rank receives what it has, and the volumes of the paper's table, for every layout."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrlhf.errors import ConfigError
from asyncrlhf.weights.layout import Box, Holding, Layout, LocalTensor, Place, Slice, places
from asyncrlhf.weights.megatron_layout import MegatronParallel, megatron_layout
from asyncrlhf.weights.plan import make_plan
from asyncrlhf.weights.shapes import ModelShape, Parameter, Part
from asyncrlhf.weights.vllm_layout import VllmParallel, vllm_layout
from asyncrlhf.weights.zero_redundancy import Regrouping, regrouped_layout
from tests.unit.reshard_scene import full, require_exact

SIZES = [(train, generate) for train in range(1, 9) for generate in range(1, train + 1) if train % generate == 0]


def square(name: str, regrouping: Regrouping, boxes: dict[int, Box]) -> Layout:
    """A model that is one matrix: a row for every training stage, a column for every training tensor rank."""
    shape = (regrouping.pipeline, regrouping.tensor)
    parameter = Parameter(name="model", shape=shape, dtype="float32", part=Part.OUTPUT)
    holdings = [
        Holding(
            Place(rank),
            {"model": LocalTensor(tuple(high - low for low, high in box), "float32")},
            (Slice("model", box, "model", (0, 0)),),
        )
        for rank, box in boxes.items()
    ]
    return Layout(name, {"model": parameter}, tuple(holdings))


def require_no_redundancy(regrouping: Regrouping) -> None:
    stages = regrouping.pipeline // regrouping.generate_pipeline
    width = regrouping.tensor // regrouping.generate_tensor
    trains: dict[int, Box] = {}
    generates: dict[int, Box] = {}
    for rank in range(regrouping.rank_count):
        pp, tp, _ = regrouping.training(rank)
        place = regrouping.generation(rank)
        trains[rank] = ((pp, pp + 1), (tp, tp + 1))
        generates[rank] = (
            (place.pipeline * stages, (place.pipeline + 1) * stages),
            (place.tensor * width, (place.tensor + 1) * width),
        )
    plan = make_plan(square("train", regrouping, trains), square("generate", regrouping, generates), cap=1 << 20)
    model = regrouping.pipeline * regrouping.tensor * 4
    for row in plan.traffic():
        assert row.copied == 4, "a rank's training shard lies inside its generation shard"
        assert row.received == regrouping.received_fraction * model
        assert row.received + row.copied == regrouping.peak_fraction * model


@pytest.mark.parametrize("pipeline", SIZES, ids=lambda pair: f"p{pair[0]}-{pair[1]}")
def test_no_redundancy_for_any_layout_of_one_replica(pipeline: tuple[int, int]) -> None:
    for tensor in SIZES:
        require_no_redundancy(regrouped(pipeline, tensor, 1))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(SIZES), st.sampled_from(SIZES), st.integers(2, 8))
def test_no_redundancy_with_data_parallel_replicas(
    pipeline: tuple[int, int], tensor: tuple[int, int], data: int
) -> None:
    require_no_redundancy(regrouped(pipeline, tensor, data))


def regrouped(pipeline: tuple[int, int], tensor: tuple[int, int], data: int) -> Regrouping:
    return Regrouping(
        pipeline=pipeline[0], tensor=tensor[0], data=data, generate_pipeline=pipeline[1], generate_tensor=tensor[1]
    )


def test_every_rank_generates_with_what_it_trains_for_all_sizes_up_to_eight() -> None:
    for pipeline, tensor, data in itertools.product(SIZES, SIZES, range(1, 9)):
        regrouping = regrouped(pipeline, tensor, data)
        stages, width = pipeline[0] // pipeline[1], tensor[0] // tensor[1]
        own = Fraction(1, pipeline[0] * tensor[0])
        assert regrouping.peak_fraction == stages * width * own
        assert regrouping.received_fraction == regrouping.peak_fraction - own, "all but its own, and nothing twice"
        for rank in range(regrouping.rank_count):
            pp, tp, _ = regrouping.training(rank)
            place = regrouping.generation(rank)
            assert place.pipeline * stages <= pp < (place.pipeline + 1) * stages
            assert place.tensor * width <= tp < (place.tensor + 1) * width


def test_engines_are_whole_and_micro_groups_share_one_part_of_the_model() -> None:
    for pipeline, tensor, data in itertools.product(SIZES, SIZES, (1, 2, 3)):
        regrouping = regrouped(pipeline, tensor, data)
        for engine in regrouping.engines():
            held = [(regrouping.generation(rank).pipeline, regrouping.generation(rank).tensor) for rank in engine]
            assert held == list(itertools.product(range(pipeline[1]), range(tensor[1])))
        groups = regrouping.micro_groups()
        assert {len(group) for group in groups} == {regrouping.micro_data}
        assert sorted(rank for group in groups for rank in group) == list(range(regrouping.rank_count))
        assert len(regrouping.engines()) == data * regrouping.micro_data


def test_the_volumes_of_the_paper() -> None:
    first = Regrouping(pipeline=1, tensor=8, data=2, generate_pipeline=1, generate_tensor=2)
    assert (first.received_fraction, first.peak_fraction) == (Fraction(3, 8), Fraction(1, 2))
    assert first.micro_groups()[:2] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert first.engines()[0] == (0, 4)
    second = Regrouping(pipeline=8, tensor=8, data=2, generate_pipeline=1, generate_tensor=8)
    assert (second.received_fraction, second.peak_fraction) == (Fraction(7, 64), Fraction(1, 8))
    assert second.micro_groups()[0] == (0, 16, 32, 48, 64, 80, 96, 112)


# every part of a layer splits evenly: 8 key/value heads, no norms to speak of, a vocabulary that needs no padding
EVEN = ModelShape(hidden=8, layers=8, heads=8, kv_heads=8, head_dim=4, ff=64, vocab=1024, dtype="float32")


@pytest.mark.parametrize("sizes", [(1, 8, 2, 1, 2), (2, 4, 1, 1, 2), (4, 2, 1, 2, 1), (2, 2, 2, 1, 1), (1, 4, 1, 1, 4)])
def test_the_formula_holds_for_the_matrices_of_a_real_layout(sizes: tuple[int, int, int, int, int]) -> None:
    p, t, d, pg, tg = sizes
    regrouping = Regrouping(pipeline=p, tensor=t, data=d, generate_pipeline=pg, generate_tensor=tg)
    where = places(regrouping.rank_count)
    source = megatron_layout(EVEN, MegatronParallel(tensor=t, pipeline=p), where)
    destination = regrouped_layout(EVEN, regrouping, where)
    plan = make_plan(source, destination, cap=1 << 20)
    require_exact(plan, source, destination, full(EVEN))
    matrices = {q.name: q.byte_count for q in EVEN.parameters() if q.layer >= 0 and len(q.shape) > 1}
    for rank in range(regrouping.rank_count):
        arrived = sum(
            move.byte_count for move in plan.moves if move.target == rank != move.source and move.parameter in matrices
        )
        assert arrived == regrouping.received_fraction * sum(matrices.values())


def test_consecutive_grouping_would_receive_more() -> None:
    where = places(8)
    source = megatron_layout(EVEN, MegatronParallel(tensor=8), where)
    regrouping = Regrouping(pipeline=1, tensor=8, data=1, generate_pipeline=1, generate_tensor=2)
    ours = make_plan(source, regrouped_layout(EVEN, regrouping, where), cap=1 << 20).traffic()
    theirs = make_plan(source, vllm_layout(EVEN, VllmParallel(tensor=2), where), cap=1 << 20).traffic()
    assert max(row.received for row in ours) < max(row.received for row in theirs)
    assert sum(row.received for row in ours) < sum(row.received for row in theirs)


def test_sizes_that_do_not_divide_are_named() -> None:
    with pytest.raises(ConfigError, match="tensor parallelism 3 on the ranks of training with 4"):
        Regrouping(pipeline=1, tensor=4, data=1, generate_pipeline=1, generate_tensor=3)
    regrouping = Regrouping(pipeline=1, tensor=4, data=1, generate_pipeline=1, generate_tensor=2)
    with pytest.raises(ConfigError, match="3 ranks for a layout of 4"):
        regrouped_layout(EVEN, regrouping, places(3))
