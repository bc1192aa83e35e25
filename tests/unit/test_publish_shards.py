"""Weights that ranks put part by part: the checksum of the whole, each part once, and one announcement for all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrlhf.errors import PublishRefused
from asyncrlhf.messages import ParallelLayout, WeightHandle, import_object
from asyncrlhf.weights.checksum import Sums, blocks, checksum, partial_checksum, tensor_checksum, threads
from asyncrlhf.weights.checksum import sums as checksums
from asyncrlhf.weights.inproc import InprocTransfer
from asyncrlhf.weights.layout import Box, Layout, full_box, places, without_replicas
from asyncrlhf.weights.megatron_layout import MegatronParallel, megatron_layout
from asyncrlhf.weights.parts import joined
from asyncrlhf.weights.publish import ShardPublisher
from asyncrlhf.weights.regions import allocate
from asyncrlhf.weights.shapes import ModelShape
from asyncrlhf.weights.torch_layout import fsdp_layout, replicated_layout
from tests.integration.reshard_scene import (
    DENSE,
    MIXTURE,
    PROBE,
    SOURCES,
    MemoryTaken,
    ShardTrainer,
    same_bits,
    weights,
)

INPROC = "asyncrlhf.weights.inproc:InprocTransfer"


@contextmanager
def blocks_of(words: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(blocks, "BLOCK", words)
        patched.setattr(threads, "_own", threading.local())
        blocks.weights_of_places.cache_clear()
        yield
    blocks.weights_of_places.cache_clear()


def reference(tensor: Tensor) -> int:
    """As the module's page defines it, word by word."""
    size = tensor.element_size()
    elements = cast("list[int]", tensor.view(checksums._INTEGERS[size]).view(-1).tolist())
    words = elements
    if tensor.dim() > 1 and not tensor.shape[-1] * size % 8:
        words = [
            int.from_bytes(b"".join(each.to_bytes(size, "little", signed=True) for each in word), "little", signed=True)
            for word in zip(*[iter(elements)] * (8 // size), strict=True)
        ]
        words = [word + (word >> 33) for word in words]
    weights = cast("list[int]", blocks.weights_of_places("cpu").tolist())
    total = 0
    for first in range(0, len(words) // blocks.BLOCK * blocks.BLOCK + 1, blocks.BLOCK):
        block = sum(weight * word for weight, word in zip(weights, words[first : first + blocks.BLOCK], strict=False))
        total = total * blocks.BASE + block
    return (total + len(elements) * blocks.BASE ** (len(words) // blocks.BLOCK + 1)) % (1 << 64)


def copied_sum(source: Tensor, target: Tensor) -> int:
    sums = Sums[str]()
    sums.copy("", source, target, full_box(source.shape), source.shape)
    return sums.settle()[""]


def as_on_a_gpu(tensor: Tensor, box: Box, shape: Sequence[int]) -> int:
    """The partial checksum by the operations that run on GPUs."""

    def on_device(parts: Sequence[threads.Part]) -> list[int]:
        return [checksums._on_device(torch.from_numpy(part.there), part.where, part.last) for part in parts]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checksums, "fill_and_sum", on_device)
        patched.setattr(checksums, "BLOCKS_AT_ONCE", 3)
        return partial_checksum(tensor, box, shape)


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    block=st.sampled_from([4, 7, 16, 1 << 10]),
    compiled_from=st.sampled_from([0, 1 << 30]),
)
@settings(max_examples=300)
def test_a_checksum_is_the_sum_of_those_of_parts(
    shape: list[int], cuts: list[int], dtype: torch.dtype, block: int, compiled_from: int
) -> None:
    """In blocks so small that rows cross their ends, and with cuts through words; compiled, and by NumPy."""
    shape[-1] *= 4
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    boxes = [full_box(shape)]
    for dim, cut in enumerate(cuts[: len(shape)]):
        at = min(cut, shape[dim])
        sides = [side for side in ((0, at), (at, shape[dim])) if side[0] < side[1]]
        boxes = [(*box[:dim], side, *box[dim + 1 :]) for box in boxes for side in sides]
    with blocks_of(block), pytest.MonkeyPatch.context() as patched:
        patched.setattr(threads, "COMPILED_FROM", compiled_from)
        regions = [tuple(slice(*side) for side in box) for box in boxes]
        expected, copy = tensor_checksum(whole), torch.empty_like(whole)
        parts = [partial_checksum(whole[region], box, shape) for region, box in zip(regions, boxes, strict=True)]
        sums = Sums[int]()
        for number, (region, box) in enumerate(zip(regions, boxes, strict=True)):
            sums.copy(number, whole[region], copy[region], box, shape)
        copied = [found for _, found in sorted(sums.settle().items())]
        on_device = [as_on_a_gpu(whole[region], box, shape) for region, box in zip(regions, boxes, strict=True)]
        by_definition = reference(whole)
    assert sum(parts) % (1 << 64) == expected == by_definition
    assert copied == parts == on_device
    assert torch.equal(copy, whole)


def test_checksums_are_the_same_everywhere() -> None:
    """On machines with other processors, and with a block that is whole and a rest."""
    assert tensor_checksum(torch.arange(5.0)) == 5850125558293328863
    large = torch.arange(1_200_000, dtype=torch.float32).to(torch.bfloat16).view(4000, 300)
    assert tensor_checksum(large) == 3111718530347110125


def negate(table: Tensor, columns: slice) -> Tensor:
    changed = table.clone()
    changed[:, columns] *= -1
    return changed


def permuted(table: Tensor, width: int, order: list[int]) -> Tensor:
    """Groups of `width` columns, the first of them in another order."""
    columns = torch.arange(table.shape[1]).view(-1, width)
    columns[: len(order)] = columns[order].clone()
    return table[:, columns.view(-1)]


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "an odd column negated": lambda table: negate(table, slice(5, 6)),
    "two odd columns negated": lambda table: negate(table, slice(5, 9, 2)),
    "every fourth column negated": lambda table: negate(table, slice(3, None, 4)),
    "every column negated": lambda table: negate(table, slice(None)),
    "two heads swapped": lambda table: permuted(table, 64, [1, 0]),
    "groups of 8 columns permuted": lambda table: permuted(table, 8, [2, 0, 1]),
    "pairs swapped": lambda table: permuted(table, 2, [1, 0]),
    "pairs reversed": lambda table: table.view(len(table), -1, 2).flip(1).reshape(table.shape),
    "columns reversed": lambda table: table.flip(1),
    "rows reversed": lambda table: table.flip(0),
    "two rows swapped": lambda table: table[[1, 0, *range(2, len(table))]],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("columns", [128, 256])
def test_a_checksum_sees_signs_and_places(change: str, dtype: torch.dtype, columns: int) -> None:
    table = torch.randn(64, columns, generator=torch.Generator().manual_seed(columns)).to(dtype)
    changed = CHANGES[change](table).contiguous()
    assert tensor_checksum(changed) != tensor_checksum(table)


@given(
    seed=st.integers(0, 1 << 20),
    places=st.sets(st.integers(0, 16 * 24 - 1), min_size=1, max_size=24),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    columns=st.sampled_from([24, 3, 384]),
)
@settings(max_examples=300)
def test_a_checksum_sees_any_signs_that_change_and_any_values_that_change_places(
    seed: int, places: set[int], dtype: torch.dtype, columns: int
) -> None:
    """In rows of whole words, in others, and in a vector."""
    table = torch.randn(16 * 24, generator=torch.Generator().manual_seed(seed)).to(dtype)
    where, shape = torch.tensor(sorted(places)), (-1,) if columns == 384 else (-1, columns)
    flipped, moved = table.clone(), table.clone()
    flipped[where] = -table[where]
    moved[where] = table[where.roll(1)]
    before = tensor_checksum(table.view(shape))
    assert tensor_checksum(flipped.view(shape)) != before
    assert torch.equal(moved, table) or tensor_checksum(moved.view(shape)) != before


@given(places=st.lists(st.integers(0, 127), min_size=2, max_size=2, unique=True), row=st.integers(0, 7))
def test_a_checksum_sees_two_signs_that_change_opposite_ways(places: list[int], row: int) -> None:
    table = torch.zeros(8, 128)
    table[row, places] = torch.tensor([1.5, -1.5])
    changed = table.clone()
    changed[row] *= -1
    assert tensor_checksum(changed) != tensor_checksum(table)


@given(
    signs=st.lists(st.booleans(), min_size=64, max_size=64),
    flips=st.sets(st.integers(0, 63), min_size=1, max_size=12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    columns=st.sampled_from([8, 16, 64, 1]),
)
@settings(max_examples=150)
def test_a_checksum_sees_any_signs_that_change_where_only_signs_differ(
    signs: list[bool], flips: set[int], dtype: torch.dtype, columns: int
) -> None:
    """No lower bit tells anything: of both halves of a word, of words of a row, and of rows."""
    table = torch.where(torch.tensor(signs), 1.0, -1.0).to(dtype)
    changed = table.clone()
    changed[sorted(flips)] *= -1
    assert tensor_checksum(changed.view(-1, columns)) != tensor_checksum(table.view(-1, columns))


@pytest.mark.parametrize("low", [0, 1, 2, 4])
def test_what_is_copied_into_a_part_of_something_wider_is_all_there(low: int) -> None:
    """Also where its memory has gaps that the parameter does not have, and begins within a word."""
    arrived, memory = torch.randn(40, 16, generator=torch.Generator().manual_seed(1)), torch.zeros(48, 24)
    place = memory[4:44, low : low + 16]
    with blocks_of(32):
        assert copied_sum(arrived, place) == tensor_checksum(arrived)
    assert torch.equal(place, arrived)
    assert memory.count_nonzero() == arrived.count_nonzero()


@pytest.mark.parametrize("processors", [{0}, {0, 1, 2, 3, 4, 5}])
def test_a_checksum_does_not_depend_on_how_many_processors_there_are(
    processors: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_processors", lambda: len(processors))
    table = torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
    with blocks_of(64):
        copy = torch.empty_like(table)
        assert copied_sum(table, copy) == reference(table)
    assert torch.equal(copy, table)


@pytest.mark.parametrize("at_once", [1, 3000, 1 << 30])
@pytest.mark.parametrize("processors", [1, 4])
def test_many_tensors_are_copied_and_summed_up_together(
    at_once: int, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps its own sum, however many wait at once; those of one block and of many, of another type, and empty."""
    monkeypatch.setattr(threads, "_processors", lambda: processors)
    monkeypatch.setattr(checksums, "AT_ONCE", at_once)
    random = torch.Generator().manual_seed(1)
    shapes = [(3,), (40, 16), (0, 8), (7, 5), (64, 32), (), (9, 24)]
    arrived = {number: torch.randn(shape, generator=random) for number, shape in enumerate(shapes)}
    places = {number: torch.empty_like(tensor) for number, tensor in arrived.items()}
    places[4] = places[4].to(torch.bfloat16)
    with blocks_of(64):
        sums = Sums[int]()
        for number, tensor in arrived.items():
            sums.copy(number, tensor, places[number], full_box(tensor.shape), tensor.shape)
        assert sums.settle() == {number: tensor_checksum(tensor) for number, tensor in arrived.items()}
    for number, tensor in arrived.items():
        assert torch.equal(places[number], tensor.to(places[number].dtype))


@pytest.mark.parametrize(
    "table",
    [
        torch.arange(8.0).view(8, 1).t(),
        torch.arange(8.0).view(1, 8)[:, ::2],
        torch.arange(6.0).view(1, 6),
        torch.empty(8, 0),
        torch.empty(0, 8),
        torch.arange(24.0).view(4, 6)[1:2],
    ],
)
def test_a_checksum_of_a_single_row_does_not_depend_on_how_far_the_next_would_be(table: Tensor) -> None:
    plain = torch.empty(table.shape).copy_(table)
    assert tensor_checksum(table) == reference(plain)
    copy = torch.zeros_like(table)
    sums = Sums[str]()
    sums.copy("table", table, copy, full_box(table.shape), table.shape)
    assert sums.settle() == {"table": reference(plain)}
    assert torch.equal(copy, table)


def test_a_part_of_one_row_that_lies_in_something_wider_counts() -> None:
    wide = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    part = wide[0:1, 0:4]
    assert partial_checksum(part, ((0, 1), (0, 4)), (1, 4)) == tensor_checksum(part.clone())
    halves = [(((0, 1), (0, 3)), wide[0:1, 0:3]), (((0, 1), (3, 4)), wide[0:1, 3:4])]
    assert sum(partial_checksum(half, box, (1, 4)) for box, half in halves) % (1 << 64) == tensor_checksum(part.clone())


def test_a_checksum_goes_on_alone_when_the_pool_takes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of the interpreter."""
    monkeypatch.setattr(threads, "_processors", lambda: 3)
    closed = ThreadPoolExecutor(1)
    closed.shutdown()
    monkeypatch.setattr(threads, "_pool", lambda: closed)
    table = torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
    with blocks_of(64):
        assert tensor_checksum(table) == reference(table)


@pytest.mark.parametrize("disabled", ["0", "1"])
def test_a_checksum_is_the_same_where_numba_cannot_be_used(disabled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be imported, or is told to compile nothing."""
    monkeypatch.setattr(threads, "COMPILED_FROM", 0)
    monkeypatch.setenv("NUMBA_DISABLE_JIT", disabled)
    if disabled == "0":
        monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "asyncrlhf.weights.checksum.compiled", raising=False)
    table = torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
    threads._inner_loop.cache_clear()
    try:
        with blocks_of(64):
            copy = torch.empty_like(table)
            assert copied_sum(table, copy) == tensor_checksum(table) == reference(table)
        assert torch.equal(copy, table)
        assert threads._inner_loop() is None
        assert threads._inner_loop.cache_info().misses == 1, "it is tried once"
    finally:
        threads._inner_loop.cache_clear()


def received(handle: WeightHandle) -> dict[str, Tensor]:
    return dict(import_object(handle.transport)().receive(handle.payload))


@pytest.mark.parametrize("name", [*SOURCES, "fsdp", "ddp"])
def test_what_ranks_put_is_the_model_with_its_checksum(name: str) -> None:
    shape, parallel = SOURCES.get(name, (MIXTURE if name == "fsdp" else DENSE, None))
    kinds = {"fsdp": lambda: fsdp_layout(shape, places(3)), "ddp": lambda: replicated_layout(shape, places(2))}
    layout = kinds[name]() if parallel is None else megatron_layout(shape, parallel, places(4))
    trainer = ShardTrainer(layout)
    for version in range(3):
        model = weights(shape, min(version, 1))
        handles = trainer.export(version, model)
        handle = joined(handles)
        assert same_bits(received(handle), model)
        assert handle.checksum == checksum(model)
        assert handle.byte_count == sum(tensor.nbytes for tensor in model.values())
        assert {each.changed for each in handles} == {version < 2}
        assert handle.probe == PROBE


def test_every_part_is_sent_once_by_ranks_that_share_the_work() -> None:
    layout = megatron_layout(DENSE, MegatronParallel(tensor=2), places(8))
    sent = [
        sum(bytes_of(layout, piece.parameter, piece.box) for piece in holding.slices)
        for holding in without_replicas(layout).holdings
    ]
    assert sum(sent) == sum(parameter.byte_count for parameter in layout.parameters.values())
    largest = max(bytes_of(layout, piece.parameter, piece.box) for piece in layout.holdings[0].slices)
    assert max(sent) - min(sent) <= 2 * largest


def bytes_of(layout: Layout, parameter: str, box: tuple[tuple[int, int], ...]) -> int:
    count = torch.Size([high - low for low, high in box]).numel()
    whole = layout.parameters[parameter]
    return whole.byte_count * count // torch.Size(whole.shape).numel()


class Fails(InprocTransfer):
    """Has no memory for version 1 on the rank that is made second."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.number, Fails.made = Fails.made, Fails.made + 1

    def send(self, version: int, weights: Mapping[str, Tensor]) -> Mapping[str, Any]:
        if (version, self.number) == (1, 1):
            raise OSError("no space left on device")
        return super().send(version, weights)


def test_a_rank_that_cannot_put_its_part_leaves_the_old_version_readable() -> None:
    Fails.made = 0
    trainer = ShardTrainer(fsdp_layout(DENSE, places(2)), f"{__name__}:Fails")
    first = joined(trainer.export(0, weights(DENSE, 0)))
    with pytest.raises(PublishRefused, match="version 1 could not be put .*rank 1: OSError: no space left on device"):
        trainer.export(1, weights(DENSE, 1))
    assert same_bits(received(first), weights(DENSE, 0))
    again = joined(trainer.export(2, weights(DENSE, 1)))
    assert again.changed
    assert same_bits(received(again), weights(DENSE, 1))


def test_a_number_that_is_not_finite_is_refused_by_all_ranks_whoever_has_it() -> None:
    trainer, model = ShardTrainer(fsdp_layout(DENSE, places(2))), weights(DENSE, 0)
    next(reversed(model.values())).view(-1)[-1] = float("nan")
    with pytest.raises(PublishRefused, match="version 4 has 1 parameters that are not finite"):
        trainer.export(4, model)


def test_parts_of_different_weights_are_not_joined() -> None:
    trainer = ShardTrainer(fsdp_layout(DENSE, places(2)))
    first, second = trainer.export(0, weights(DENSE, 0)), trainer.export(1, weights(DENSE, 1))
    with pytest.raises(PublishRefused, match="rank 0 has put version 0 .* rank 1 version 1"):
        joined([first[0], second[1]])
    assert ParallelLayout(data=2).ranks == len(joined(second).payload["shards"])


def test_a_rank_holds_its_part_and_no_more_whatever_the_model() -> None:
    """Of a model of 60 MB."""
    shape = ModelShape(hidden=512, layers=4, heads=8, kv_heads=2, head_dim=64, ff=1536, vocab=8000, dtype="float32")
    layout = megatron_layout(shape, MegatronParallel(tensor=2), places(2))
    own = allocate(layout.holdings[0])
    path = "asyncrlhf.weights.shared:SharedMemoryTransfer"
    rank = ShardPublisher(path, layout, 0, lambda said: [said])
    with MemoryTaken() as taken:
        handle = rank.export(0, own, lambda: None)
    assert taken.peak <= 2 * max(tensor.nbytes for tensor in own.values())
    assert handle.payload["shards"][0]["size"] < 0.51 * handle.byte_count
