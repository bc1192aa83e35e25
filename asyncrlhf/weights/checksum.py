"""A checksum of all parameter bytes that a trainer and every engine that follows it compute alike, on their device.

It is a sum, mod 2^64, in which every word of 8 bytes has an odd factor of its place, so that parts add up whoever has
them. The upper half of a word is added to the lower one before: alone, its highest bit times an odd factor would be the
same number wherever it is, and two changes of sign would go unseen. Where rows are not made of whole words, and in
vectors, every element is a word.
"""

from __future__ import annotations

import itertools
import math
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asyncrlhf.errors import PublishRefused
from asyncrlhf.messages import WeightHandle

__all__ = ("checksum", "combine", "copy_and_checksum", "partial_checksum", "require_checksum", "tensor_checksum")

WORD = 8
"""Bytes."""
PIECE = 1 << 20
"""Bytes that are copied, and then summed up while they are in a CPU's cache."""
BLOCK = 1 << 17
"""Words that are weighted together."""
BLOCKS_AT_ONCE = 256
"""Blocks per kernel on a GPU, where launches cost more than cache misses."""
_MASK = (1 << 64) - 1
_BASE = 0xD6E8FEB86659FD93
_own = threading.local()
"""Memory of a block for each thread: to allocate it anew costs more than to use it."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(weights: Mapping[str, Tensor]) -> int:
    """63-bit checksum of the bytes of `weights` in name order, whatever order they come in.

    A change of one element of up to 4 bytes is always seen; one of several with all but a chance of about 2^-32,
    whatever bits it touches, and values that have changed places are told apart.
    """
    return combine((name, tensor_checksum(tensor)) for name, tensor in weights.items())


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


@torch.no_grad()
def partial_checksum(tensor: Tensor, box: Sequence[tuple[int, int]], shape: Sequence[int]) -> int:
    """What `tensor`, the rectangle `box` of a tensor of `shape`, adds to the checksum of the latter: over rectangles
    that cover it once the sum, mod 2^64, is its `tensor_checksum`."""
    grain = _grain(shape, tensor.element_size())
    words = _words_of(tensor.detach(), grain, box[-1][0] if box else 0)
    return _weighted(words, grain, tensor.numel(), box, shape)


@torch.no_grad()
def copy_and_checksum(source: Tensor, target: Tensor, box: Sequence[tuple[int, int]], shape: Sequence[int]) -> int:
    """Copy `source` over `target`, which is the rectangle `box` of a tensor of `shape`. Gives the partial checksum of
    what is in `target` then, or if its type is another of what has arrived on its device; bytes that are read from
    memory once are copied and summed up."""
    if source.dtype != target.dtype:
        arrived = source.to(target.device, copy=True)
        target.copy_(arrived)
        return partial_checksum(arrived, box, shape)
    grain = _grain(shape, target.element_size())
    rows = PIECE * len(target) // target.nbytes if target.dim() == 2 and target.nbytes else 0
    words = _words(target, grain) if 0 < rows < len(target) and not box[-1][0] % grain else None
    if words is None or target.device.type != "cpu" or source.device.type != "cpu":
        target.copy_(source)
        return partial_checksum(target, box, shape)
    integers = _INTEGERS[target.element_size()]
    here, there = (tensor.detach().view(integers).numpy() for tensor in (source, target))
    total, (low, high), columns = 0, box[0], len(there[0])
    for first in range(low, high, rows):
        last = min(first + rows, high)
        piece = slice(first - low, last - low)
        np.copyto(there[piece], here[piece])  # for pieces of this size faster than torch's
        total += _weighted(words[piece], grain, (last - first) * columns, ((first, last), box[1]), shape)
    return total & _MASK


def _grain(shape: Sequence[int], size: int) -> int:
    """Elements of a word: as many as there is room for, if rows of a matrix are made of whole words; else 1."""
    return WORD // size if len(shape) > 1 and not shape[-1] * size % WORD else 1


def _words_of(tensor: Tensor, grain: int, first: int) -> Tensor:
    """The words, int64 [..., words of a row], of a tensor whose rows begin with element `first`, 0 where they lie
    outside of it; its elements where they are the words."""
    bits = tensor.contiguous().view(_INTEGERS[tensor.element_size()])
    if grain == 1:
        return bits
    before, after = first % grain, -(first + bits.shape[-1]) % grain
    words = None if before or after else _words(bits, grain)
    return F.pad(bits, (before, after)).view(torch.int64) if words is None else words


def _words(tensor: Tensor, grain: int) -> Tensor | None:
    """A view of the words, int64 [..., words of a row]; None where memory does not lie so that there is one."""
    size = tensor.element_size()
    aligned = tensor.is_contiguous() and not tensor.shape[-1] % grain and not grain * size % WORD
    return tensor.view(torch.int64) if aligned and not tensor.storage_offset() * size % WORD else None


def _mixed(words: Tensor) -> Tensor:
    """What gets factors, int64, until the next call: elements of less than 8 bytes as they are, of words the halves
    added. BLOCK at most on a CPU."""
    if words.device.type != "cpu":
        return (words >> 32).add_(words) if words.dtype == torch.int64 else words.to(torch.int64)
    if not hasattr(_own, "scratch"):
        _own.scratch = torch.empty(BLOCK, dtype=torch.int64)
    mixed: Tensor = _own.scratch[: words.numel()].view(words.shape)
    if words.dtype != torch.int64:
        return mixed.copy_(words)
    here, there = words.numpy(), mixed.numpy()  # for blocks of this size faster than torch's
    np.add(np.right_shift(here, 32, out=there), here, out=there)
    return mixed


def _weighted(words: Tensor, grain: int, count: int, box: Sequence[tuple[int, int]], shape: Sequence[int]) -> int:
    """The partial checksum of the rectangle that these are the words of; it has `count` elements."""
    if grain > 1:
        box = (*box[:-1], (box[-1][0] // grain, -(-box[-1][1] // grain)))
        shape = (*shape[:-1], shape[-1] // grain)
    weights, last = _weights(str(words.device)), math.prod(shape) // BLOCK
    if words.device.type == "cpu" and words.numel() == math.prod(shape) <= BLOCK:  # all of a tensor, and one block
        value = int(torch.dot(_mixed(words.reshape(-1)), weights[: words.numel()]))
        return (count * pow(_BASE, last + 1, 1 << 64) + value * pow(_BASE, last, 1 << 64)) & _MASK
    starts, length, pitch, together = _stretches(box, shape)
    bits = words.reshape(len(starts), length)
    step = 1 if words.device.type == "cpu" else BLOCKS_AT_ONCE
    sums: list[Tensor] = []
    blocks: list[int] = []

    def add(part: Tensor, factors: Tensor, first: int, rows: int = 1) -> None:
        """`rows` rows for as many blocks, or all of `part` for the one block."""
        if part.dim() == 1 and part.device.type == "cpu":
            sums.append(torch.dot(_mixed(part), factors).view(1))
        else:
            products = _mixed(part).mul_(factors)
            sums.append(products.sum(1) if rows > 1 else products.sum().view(1))
        blocks.extend(range(first, first + rows))

    row = 0
    while row < len(starts):
        block, place = divmod(starts[row], BLOCK)
        if place + length <= BLOCK:
            rows = min(together - row % together, (BLOCK - place - length) // max(pitch, 1) + 1)
            part, factors = bits[row : row + rows], weights.as_strided((rows, length), (pitch, 1), place)
            add(part[0] if rows == 1 else part, factors[0] if rows == 1 else factors, block)
            row += rows
            continue
        run, row = bits[row], row + 1
        if place:
            add(run[: BLOCK - place], weights[place:], block)
            run, block = run[BLOCK - place :], block + 1
        whole = len(run) // BLOCK
        table = run[: whole * BLOCK].view(whole, BLOCK)
        for first in range(0, whole, step):
            part = table[first : first + step]
            add(part[0] if len(part) == 1 else part, weights, block + first, len(part))
        if rest := len(run) - whole * BLOCK:
            add(run[whole * BLOCK :], weights[:rest], block + whole)
    found = cast("list[int]", (torch.cat(sums) if len(sums) > 1 else sums[0]).tolist()) if sums else []
    terms = [(last + 1, count), *((last - block, value) for block, value in zip(blocks, found, strict=True))]
    return sum(value * pow(_BASE, power, 1 << 64) for power, value in terms) & _MASK


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
