"""A checksum of all parameter bytes that a trainer and every engine that follows it compute alike, on their device.

A tensor is cut, flat, into words of 8 bytes, and those into blocks. With x_k the word at place k of a block, read as a
number, and w_k an odd number of that place, a block of n words and a tensor of m blocks and c elements have

    block = sum over k of w_k * (x_k + (x_k >> 33))                                                   mod 2^64
    tensor = sum over i of block_i * BASE^(m - 1 - i)  +  c * BASE^m                                  mod 2^64

which is linear in every bit, so that parts add up whoever has them. The upper half of a word is added to the lower one
before: alone, its highest bit times an odd number would be the same wherever it is, and two changes of sign would go
unseen. By 33 and not 32 bits, so that the highest bits of both halves do not cancel either. Where rows are not made of
whole words, and in vectors, every element is a word.

On CPUs the threads of a small pool take blocks in turn, as many as this process may use CPUs: they copy one, and sum it
up while it is in the cache. Who asks works as well, and waits for those that have begun; `Sums` has them work on many
tensors before it waits.

    sums = Sums[str]()
    sums.copy("weight", arrived, place, box, shape)     # and more of them; they are read until `settle`
    sums.settle()["weight"]
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from asyncrlhf.errors import PublishRefused
from asyncrlhf.messages import WeightHandle

__all__ = (
    "Sums",
    "checksum",
    "combine",
    "partial_checksum",
    "require_checksum",
    "tensor_checksum",
)

WORD = 8
"""Bytes."""
BLOCK = 1 << 16
"""Words that are weighted together: where they come from, where they go, and their numbers are in a cache at once."""
BLOCKS_AT_ONCE = 512
"""Blocks per kernel on a GPU, where launches cost more than cache misses."""
SHIFT = 33
THREADS = 4
"""Memory is not faster for more. Those beside the one that asks are not counted by `threads` or OMP_NUM_THREADS."""
AT_ONCE = 64 << 20
"""Bytes that wait for `Sums.settle`, or one tensor: so much is kept beside the model of what has arrived."""
BLOCKS_PER_THREAD = 8
"""Another thread is not asked for less."""
_MASK = (1 << 64) - 1
_BASE = 0xD6E8FEB86659FD93
_own = threading.local()
"""Memory of a block for each thread: to allocate it anew costs more than to use it."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Key = TypeVar("Key")
Words = npt.NDArray[np.int64]


class _Cell(NamedTuple):
    """Words that are weighted at once: rows of one block, or one row of whole blocks."""

    row: int
    rows: int
    begin: int
    end: int
    block: int
    blocks: int
    place: int
    """Of the first word in its block."""


class _Part(NamedTuple):
    """A rectangle to be filled, if there is something to fill it `here`, and summed up."""

    there: Words
    here: Words | None
    cells: list[_Cell]
    pitch: int
    last: int
    """Power of the tensor's first block."""
    total: int
    """What its size adds."""


def checksum(weights: Mapping[str, Tensor]) -> int:
    """63-bit checksum of the bytes of `weights` in name order, whatever order they come in.

    A `tensor_checksum` differs whenever one element of up to 4 bytes does. In these 63 bits of all tensors such a
    change is seen with all but a chance of about 2^-31; so is one of several elements, whatever bits it touches, and
    so are values that have changed places.
    """
    sums = Sums[str]()
    for name, tensor in weights.items():
        shape = tuple(tensor.shape)
        sums.add(name, tensor, tuple((0, length) for length in shape), shape)
    return combine(sums.settle().items())


def combine(parts: Iterable[tuple[str, int]]) -> int:
    """The checksum from the `tensor_checksum` of every tensor, by name."""
    total = 0
    for name, part in sorted(parts):
        total = (total * 0x9E3779B97F4A7C15 + (part ^ zlib.crc32(name.encode()))) & _MASK
    return (total ^ (total >> 32)) & (_MASK >> 1)


def require_checksum(handle: WeightHandle, parts: Iterable[tuple[str, int]]) -> None:
    """Raises PublishRefused unless what has arrived, as `combine` takes it, is what was announced."""
    if (digest := combine(parts)) != handle.checksum:
        raise PublishRefused(
            f"version {handle.version} was announced with checksum {handle.checksum:#x}, but the bytes that arrived "
            f"have {digest:#x}; they are not used"
        )


def tensor_checksum(tensor: Tensor) -> int:
    """64-bit checksum of one tensor: the sum of its words, each times a number of its place, mod 2^64, and how many
    elements it has."""
    shape = tuple(tensor.shape)
    return partial_checksum(tensor, tuple((0, length) for length in shape), shape)


def partial_checksum(tensor: Tensor, box: Sequence[tuple[int, int]], shape: Sequence[int]) -> int:
    """What `tensor`, the rectangle `box` of a tensor of `shape`, adds to the checksum of the latter: over rectangles
    that cover it once the sum, mod 2^64, is its `tensor_checksum`."""
    sums = Sums[None]()
    sums.add(None, tensor, box, shape)
    return sums.settle()[None]


class Sums(Generic[Key]):
    """Partial checksums of many rectangles, by keys of the caller."""

    def __init__(self) -> None:
        self._found: dict[Key, int] = {}
        self._waiting: list[tuple[Key, _Part]] = []
        self._byte_count = 0

    @torch.no_grad()
    def add(self, key: Key, tensor: Tensor, box: Sequence[tuple[int, int]], shape: Sequence[int]) -> None:
        """As `partial_checksum`. The tensor must not change before the next `settle`."""
        grain, first = _grain(shape, tensor.element_size()), box[-1][0] if box else 0
        words = _words(tensor, grain)
        if words is None or first % grain or not _lies_in_stretches(words, box, shape):
            words = _filled_up(tensor, grain, first)
        self._take(key, words, None, grain, tensor.numel(), box, shape)

    @torch.no_grad()
    def copy(
        self, key: Key, source: Tensor, target: Tensor, box: Sequence[tuple[int, int]], shape: Sequence[int]
    ) -> None:
        """Copy `source` over `target`, which is the rectangle `box` of a tensor of `shape`, until the next `settle`.
        The partial checksum is that of what is in `target` then, or if its type is another of what has arrived on its
        device; bytes that are read from memory once are copied and summed up."""
        if source.dtype != target.dtype:
            arrived = source.to(target.device, copy=True)
            target.copy_(arrived)
            return self.add(key, arrived, box, shape)
        grain = _grain(shape, target.element_size())
        if target.device.type == source.device.type == "cpu" and box and not box[-1][0] % grain:
            here, there = _words(source, grain), _words(target, grain)
            if all(words is not None and _lies_in_stretches(words, box, shape) for words in (here, there)):
                assert there is not None
                return self._take(key, there, here, grain, target.numel(), box, shape)
        target.copy_(source)
        return self.add(key, target, box, shape)

    def settle(self) -> dict[Key, int]:
        """Wait until all is copied and summed up; every checksum so far, mod 2^64."""
        values = _shared([part for _, part in self._waiting])
        for (key, _), value in zip(self._waiting, values, strict=True):
            self._found[key] = value
        self._waiting.clear()
        self._byte_count = 0
        return self._found

    def _take(
        self,
        key: Key,
        words: Tensor,
        source: Tensor | None,
        grain: int,
        count: int,
        box: Sequence[tuple[int, int]],
        shape: Sequence[int],
    ) -> None:
        part = _weighted(words, source, grain, count, box, shape)
        if isinstance(part, int):
            self._found[key] = part
            return
        self._waiting.append((key, part))
        self._byte_count += words.nbytes
        if self._byte_count >= AT_ONCE:
            self.settle()


def _grain(shape: Sequence[int], size: int) -> int:
    """Elements of a word: as many as there is room for, if rows of a matrix are made of whole words; else 1."""
    return WORD // size if len(shape) > 1 and not shape[-1] * size % WORD else 1


def _words(tensor: Tensor, grain: int) -> Tensor | None:
    """A view of the words, int64 [..., words of a row], or of the elements where they are the words; None where memory
    does not lie so that there is one."""
    bits = tensor.detach().view(_INTEGERS[tensor.element_size()])
    if grain == 1:
        return bits
    *strides, last = tensor.stride()
    lengths = (tensor.shape[-1], tensor.storage_offset(), *strides)
    return bits.view(torch.int64) if last == 1 and not any(length % grain for length in lengths) else None


def _filled_up(tensor: Tensor, grain: int, first: int) -> Tensor:
    """The words of a copy of a tensor whose rows begin with element `first`; what lies outside of it is 0."""
    bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
    if grain == 1:
        return bits
    filled = F.pad(bits, (first % grain, -(first + bits.shape[-1]) % grain))
    # one after the other: of a single row, or of none, the stride may be any number, and view() asks for whole words
    words = filled.reshape(-1).view(torch.int64)
    return words.view(*filled.shape[:-1], filled.shape[-1] // grain)


def _lies_in_stretches(words: Tensor, box: Sequence[tuple[int, int]], shape: Sequence[int]) -> bool:
    """Whether what is unbroken in the whole tensor is unbroken in the memory of this rectangle of it."""
    rows = words.dim() == 2 and words.stride(1) == 1 and box[1] != (0, shape[1])
    return rows or words.is_contiguous()


def _weighted(
    words: Tensor, source: Tensor | None, grain: int, count: int, box: Sequence[tuple[int, int]], shape: Sequence[int]
) -> int | _Part:
    """The partial checksum of the rectangle that these are the words of, which has `count` elements; on a CPU the work
    that gives it, and fills it from `source` before."""
    if grain > 1:
        box = (*box[:-1], (box[-1][0] // grain, -(-box[-1][1] // grain)))
        shape = (*shape[:-1], shape[-1] // grain)
    starts, length, pitch, together = _stretches(box, shape)
    last = math.prod(shape) // BLOCK
    table = words.reshape(len(starts), length)
    total = count * pow(_BASE, last + 1, 1 << 64)
    if words.device.type != "cpu":
        return (
            total + _on_device(table, list(_cells(starts, length, pitch, together, BLOCKS_AT_ONCE)), pitch, last)
        ) & _MASK
    here = None if source is None else source.reshape(len(starts), length).numpy()
    return _Part(table.numpy(), here, list(_cells(starts, length, pitch, together, 1)), pitch, last, total)


def _value(there: Words, here: Words | None, factors: Words, cell: _Cell, pitch: int) -> int:
    """The weighted sum of a cell of one block, after it was copied."""
    part = there[cell.row : cell.row + cell.rows, cell.begin : cell.end]
    if here is not None:
        np.copyto(part, here[cell.row : cell.row + cell.rows, cell.begin : cell.end])
    if not hasattr(_own, "scratch"):
        _own.scratch = np.empty(BLOCK, np.int64)
    mixed: Words = _own.scratch[: part.size].reshape(part.shape)
    if part.dtype == np.int64:
        np.add(np.right_shift(part, SHIFT, out=mixed), part, out=mixed)
    else:
        np.copyto(mixed, part)
    numbers = np.ndarray(part.shape, np.int64, factors, WORD * cell.place, (WORD * pitch, WORD))
    return int(np.einsum("rc,rc->", mixed, numbers))


def _on_device(table: Tensor, cells: Sequence[_Cell], pitch: int, last: int) -> int:
    """The same for all cells, with one wait for the device."""
    factors, sums, powers = _weights(str(table.device)), list[Tensor](), list[int]()
    for cell in cells:
        part = table[cell.row : cell.row + cell.rows, cell.begin : cell.end]
        mixed = (part >> SHIFT).add_(part) if part.dtype == torch.int64 else part.to(torch.int64)
        if cell.blocks > 1:
            sums.append(mixed.view(cell.blocks, BLOCK).mul_(factors).sum(1))
        else:
            sums.append(mixed.mul_(factors.as_strided(part.shape, (pitch, 1), cell.place)).sum().view(1))
        powers.extend(range(last - cell.block, last - cell.block - cell.blocks, -1))
    values = cast("list[int]", torch.cat(sums).tolist() if sums else [])
    return sum(value * pow(_BASE, power, 1 << 64) for value, power in zip(values, powers, strict=True))


def _cells(starts: Sequence[int], length: int, pitch: int, together: int, most: int) -> Iterator[_Cell]:
    """Of stretches as `_stretches` gives them; `most` blocks at once."""
    row = 0
    while row < len(starts):
        block, place = divmod(starts[row], BLOCK)
        if place + length <= BLOCK:
            rows = min(together - row % together, (BLOCK - place - length) // max(pitch, 1) + 1)
            yield _Cell(row, rows, 0, length, block, 1, place)
            row += rows
            continue
        begin = 0
        while begin < length:
            block, place = divmod(starts[row] + begin, BLOCK)
            blocks = 1 if place else max(1, min(most, (length - begin) // BLOCK))
            end = min(begin + blocks * BLOCK - place, length)
            yield _Cell(row, 1, begin, end, block, blocks, place)
            begin = end
        row += 1


def _shared(parts: Sequence[_Part]) -> list[int]:
    """The sum of each part, mod 2^64; this thread and those of the pool take their cells in turn."""
    cells = [(number, cell) for number, part in enumerate(parts) for cell in part.cells]
    todo = iter(cells)  # a list's: next() is one step of the interpreter
    factors = _weights("cpu").numpy()

    def share() -> list[int]:
        sums = [0] * len(parts)
        for number, cell in todo:
            part = parts[number]
            value = _value(part.there, part.here, factors, cell, part.pitch)
            sums[number] += value * pow(_BASE, part.last - cell.block, 1 << 64)
        return sums

    others: list[Future[list[int]]] = []
    blocks = sum(part.there.size for part in parts) // BLOCK
    try:
        for _ in range(min(THREADS, _processors(), blocks // BLOCKS_PER_THREAD) - 1):
            others.append(_pool().submit(share))  # noqa: PERF401 - what came before a refused one counts
    except RuntimeError as refused:
        if "cannot schedule new futures" not in str(refused):
            raise
        # the interpreter ends: this thread goes on alone
    try:
        own = share()
    finally:
        found = [other.result() for other in others if not other.cancel()]
    return [sum(sums, part.total) & _MASK for part, *sums in zip(parts, own, *found, strict=True)]


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS - 1, "checksum")


os.register_at_fork(after_in_child=_pool.cache_clear)


def _stretches(box: Sequence[tuple[int, int]], shape: Sequence[int]) -> tuple[list[int], int, int, int]:
    """Where a rectangle lies in a flat tensor of `shape`: (first element of every unbroken stretch, its length, and how
    far apart are the starts of how many stretches)."""
    cut = max((dim for dim, length in enumerate(shape) if box[dim] != (0, length)), default=-1)
    if cut < 0:
        return [0], math.prod(shape), math.prod(shape), 1
    inner = math.prod(shape[cut + 1 :])
    pitch, (low, high) = shape[cut] * inner, box[cut]
    starts: list[int] = []
    for places in itertools.product(*(range(*side) for side in box[:cut])):
        row = 0
        for place, length in zip(places, shape[:cut], strict=True):
            row = row * length + place
        starts.append(row * pitch + low * inner)
    return starts, (high - low) * inner, pitch, box[cut - 1][1] - box[cut - 1][0] if cut else 1


@lru_cache(maxsize=8)
def _weights(device: str) -> Tensor:
    """int64 [BLOCK] odd pseudo-random numbers, the same on every machine."""
    places = torch.arange(1, BLOCK + 1, dtype=torch.int64)
    mixed = places * -7046029254386353131
    mixed = (mixed ^ (mixed >> 31)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return (mixed | 1).to(device)
