"""The reshard plan: exact whatever the two layouts are, no rank above the cap, near copies first, replicas in turn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncrlhf.errors import ConfigError
from asyncrlhf.weights.layout import Holding, Layout, LocalTensor, Place, Slice, places
from asyncrlhf.weights.megatron_layout import MegatronParallel, megatron_layout
from asyncrlhf.weights.plan import LOCAL, SLACK, describe, make_plan
from asyncrlhf.weights.shapes import ModelShape, Parameter, Part
from asyncrlhf.weights.torch_layout import fsdp_layout, replicated_layout
from asyncrlhf.weights.vllm_layout import VllmParallel, vllm_layout
from tests.unit.reshard_scene import DENSE, MIXTURE, full, require_exact
from tests.unit.test_torch_imports import python

CAP = 4096


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    group, kv_heads = draw(st.sampled_from([(1, 4), (2, 2), (4, 2), (2, 4)]))
    return ModelShape(
        hidden=draw(st.sampled_from([8, 20])),
        layers=4,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 3])),
        ff=draw(st.sampled_from([8, 12])),
        vocab=draw(st.integers(50, 140)),
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        experts=draw(st.sampled_from([0, 4])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )


def sized(draw: st.DrawFn, *sizes: int) -> int:
    return draw(st.sampled_from(sizes))


@st.composite
def layouts(draw: st.DrawFn, shape: ModelShape, first: int) -> Layout:
    """Any of the supported ones, on up to 16 ranks."""
    kind = draw(st.sampled_from(["megatron", "vllm", "fsdp", "replicated"]))
    per_node = draw(st.sampled_from([0, 2]))
    if kind == "megatron":
        tensor, pipeline, virtual = sized(draw, 1, 2, 4), sized(draw, 1, 2), sized(draw, 1, 2)
        expert = sized(draw, 1, 2) if shape.experts else 1
        parallel = MegatronParallel(
            tensor=tensor,
            pipeline=pipeline,
            virtual_pipeline=virtual,
            expert=expert,
            expert_tensor=sized(draw, 1, tensor),
            padded_vocab=sized(draw, 0, 144),
        )
        ranks = tensor * pipeline * max(expert, sized(draw, 1, 2))
        return megatron_layout(shape, parallel, places(ranks, first=first, per_node=per_node))
    if kind == "vllm":
        parallel = VllmParallel(tensor=sized(draw, 1, 2, 4), pipeline=sized(draw, 1, 2), expert=draw(st.booleans()))
        ranks = parallel.tensor * parallel.pipeline * sized(draw, 1, 2)
        return vllm_layout(shape, parallel, places(ranks, first=first, per_node=per_node))
    ranks = draw(st.integers(1, 5))
    where = places(ranks, first=first, per_node=per_node)
    return (
        replicated_layout(shape, where)
        if kind == "replicated"
        else fsdp_layout(shape, where, padded=draw(st.booleans()))
    )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[ModelShape, Layout, Layout]:
    """Two layouts of one model, on the same ranks, on others, or partly."""
    shape = draw(shapes())
    return shape, draw(layouts(shape, 0)), draw(layouts(shape, draw(st.integers(0, 8))))


@settings(max_examples=120, deadline=None)
@given(pair=pairs(), cap=st.integers(CAP, 3 * CAP))
def test_every_byte_arrives_once_where_it_belongs_and_no_rank_holds_more_than_the_cap(
    pair: tuple[ModelShape, Layout, Layout], cap: int
) -> None:
    shape, source, destination = pair
    plan = make_plan(source, destination, cap=cap)
    require_exact(plan, source, destination, full(shape))
    held: Counter[tuple[int, int]] = Counter()
    messages = {(move.bucket, move.source, move.target) for move in plan.moves if move.bucket != LOCAL}
    for move in plan.moves:
        assert (move.bucket == LOCAL) == (move.source == move.target)
        if move.bucket != LOCAL:
            held[move.source, move.bucket] += move.byte_count
            held[move.target, move.bucket] += move.byte_count
    for bucket, sender, target in messages:
        held[sender, bucket] += SLACK
        held[target, bucket] += SLACK
    assert max(held.values(), default=0) <= cap
    assert max(row.extra for row in plan.traffic()) <= cap


@settings(max_examples=60, deadline=None)
@given(pair=pairs())
def test_plans_are_equal_everywhere_and_account_for_every_byte(pair: tuple[ModelShape, Layout, Layout]) -> None:
    _, source, destination = pair
    plan = make_plan(source, destination, cap=CAP)
    assert make_plan(source, destination, cap=CAP) == plan
    assert make_plan(source, destination, cap=CAP + 8).fingerprint != plan.fingerprint
    rows = plan.traffic()
    assert sum(row.sent for row in rows) == sum(row.received for row in rows)
    for holding in destination.holdings:
        (row,) = (row for row in rows if row.rank == holding.place.rank)
        wanted = sum(
            replace(destination.parameters[piece.parameter], shape=tuple(b - a for a, b in piece.box)).byte_count
            for piece in holding.slices
        )
        assert row.received + row.copied == wanted


@settings(max_examples=60, deadline=None)
@given(pair=pairs())
def test_what_a_rank_or_its_node_has_comes_from_nowhere_else(pair: tuple[ModelShape, Layout, Layout]) -> None:
    _, source, destination = pair
    plan = make_plan(source, destination, cap=CAP)
    has: dict[str, list[tuple[Place, Slice]]] = {}
    for holding in source.holdings:
        for piece in holding.slices:
            has.setdefault(piece.parameter, []).append((holding.place, piece))

    def inside(box: tuple[tuple[int, int], ...], piece: Slice) -> bool:
        return all(a <= low and high <= b for (low, high), (a, b) in zip(box, piece.box, strict=True))

    for move in plan.moves:
        able = [place for place, piece in has[move.parameter] if inside(move.box, piece)]
        if any(place.rank == move.target for place in able):
            assert move.source == move.target
        elif any(place.node == plan.nodes[move.target] for place in able):
            assert plan.nodes[move.source] == plan.nodes[move.target]


def test_replicas_share_the_sending() -> None:
    parallel = MegatronParallel(tensor=2, pipeline=2)
    source = megatron_layout(DENSE, parallel, places(16))
    plan = make_plan(source, vllm_layout(DENSE, VllmParallel(tensor=2), places(4, first=16)), cap=CAP)
    sent = {row.rank: row.sent for row in plan.traffic()}
    for stage in (0, 1):  # the four replicas of each shard
        for tensor in (0, 1):
            shares = [sent[8 * stage + 2 * replica + tensor] for replica in range(4)]
            assert max(shares) - min(shares) <= CAP // 4


def test_the_same_layout_on_the_same_ranks_moves_nothing() -> None:
    for shape in (DENSE, MIXTURE):
        layout = megatron_layout(shape, MegatronParallel(tensor=2), places(4))
        plan = make_plan(layout, layout, cap=CAP)
        assert plan.bucket_count == 0
        assert all(move.bucket == LOCAL for move in plan.moves)


def test_bytes_travel_in_the_type_of_the_destination() -> None:
    source = replicated_layout(replace(DENSE, dtype="float32"), places(1))
    half = replace(DENSE, dtype="bfloat16")
    plan = make_plan(source, vllm_layout(half, VllmParallel(), places(1, first=1)), cap=CAP)
    assert [row.received for row in plan.traffic()] == [0, half.byte_count]


def test_a_large_embedding_is_cut_by_rows() -> None:
    shape = replace(DENSE, vocab=1000)
    plan = make_plan(replicated_layout(shape, places(1)), replicated_layout(shape, places(1, first=1)), cap=CAP)
    moves = [move for move in plan.moves if move.parameter == "lm_head.weight"]
    assert all(move.box[1] == (0, 16) for move in moves)
    assert Counter(move.byte_count for move in moves) == {CAP // 4: 62, 8 * 16 * 4: 1}


def test_a_row_above_the_cap_is_cut_by_columns() -> None:
    shape = replace(DENSE, hidden=1024, layers=1)
    source, destination = replicated_layout(shape, places(1)), replicated_layout(shape, places(1, first=1))
    plan = make_plan(source, destination, cap=CAP)
    require_exact(plan, source, destination, full(shape))
    assert max(row.extra for row in plan.traffic()) <= CAP


def test_N14_what_is_covered_twice_and_askew_arrives_once() -> None:
    parameter = Parameter(name="w", shape=(6, 6), dtype="float32", part=Part.OUTPUT)

    def holding(rank: int, box: tuple[tuple[int, int], tuple[int, int]]) -> Holding:
        shape = (box[0][1] - box[0][0], box[1][1] - box[1][0])
        return Holding(Place(rank), {"w": LocalTensor(shape, "float32")}, (Slice("w", box, "w", (0, 0)),))

    askew = Layout(
        "askew",
        {"w": parameter},
        (holding(0, ((0, 4), (0, 6))), holding(1, ((2, 6), (1, 6))), holding(2, ((3, 6), (0, 3)))),
    )
    whole = Layout("whole", {"w": parameter}, (holding(1, ((0, 6), (0, 6))), holding(3, ((1, 6), (2, 5)))))
    plan = make_plan(askew, whole, cap=CAP)
    require_exact(plan, askew, whole, {"w": np.arange(36, dtype=np.int64).reshape(6, 6)})
    assert sum(move.byte_count for move in plan.moves if move.target == 1 and move.bucket == LOCAL) == 4 * 5 * 4


def test_what_is_missing_is_named() -> None:
    layout = megatron_layout(DENSE, MegatronParallel(tensor=2), places(2))
    halved = Layout("half a trainer", layout.parameters, layout.holdings[:1])
    with pytest.raises(
        ConfigError, match=r"model.embed_tokens.weight of shape \(131, 16\): rank 5 of vllm tp1.*\[128:131"
    ):
        make_plan(halved, vllm_layout(DENSE, VllmParallel(), places(1, first=5)), cap=CAP)
    wider = vllm_layout(replace(DENSE, vocab=140), VllmParallel(), places(1))
    with pytest.raises(ConfigError, match=r"shape \(131, 16\) in megatron tp2 dp1, \(140, 16\) in vllm tp1"):
        make_plan(layout, wider, cap=CAP)
    tied = vllm_layout(replace(DENSE, tied=True), VllmParallel(), places(1))
    with pytest.raises(ConfigError, match=r"lm_head.weight of shape \(131, 16\) .* not of vllm tp1"):
        make_plan(layout, tied, cap=CAP)
    with pytest.raises(ConfigError, match=r"lm_head.weight .* is a parameter of megatron tp2 dp1"):
        make_plan(tied, layout, cap=CAP)
    with pytest.raises(ConfigError, match="at least 4096"):
        make_plan(layout, layout, cap=100)


def test_the_example_of_the_readme() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (block,) = (part.partition("```")[0] for part in text.split("```python\n") if "make_plan" in part)
    printed = python(block).splitlines()
    assert printed[0].startswith("megatron tp2 pp2 dp1 -> vllm tp2 x 2: 15.0 GiB between ranks, 0 B copied in place")
    assert len(printed) == 2 + 8


def test_the_plan_says_what_it_costs() -> None:
    source = megatron_layout(DENSE, MegatronParallel(tensor=2), places(2, per_node=1))
    text = describe(make_plan(source, vllm_layout(DENSE, VllmParallel(), places(2, per_node=1)), cap=CAP))
    lines = text.splitlines()
    assert lines[0].startswith("megatron tp2 dp1 -> vllm tp1 x 2: ")
    assert lines[1].split() == ["rank", "node", "sent", "received", "on", "node", "copied", "extra"]
    assert [line.split()[0] for line in lines[2:]] == ["0", "1"]
