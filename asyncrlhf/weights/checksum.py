"""A checksum of all parameter bytes that a trainer and every engine that follows it compute alike, on their device."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

__all__ = ("checksum", "combine", "partial_checksum", "tensor_checksum")

BLOCK = 1 << 17
"""Elements that are summed up together; a block and its int64 copy fit into a CPU's cache."""
BLOCKS_AT_ONCE = 256
"""Blocks per kernel on a GPU, where launches cost more than cache misses."""
_MASK = (1 << 64) - 1
_BASE = 0xD6E8FEB86659FD93
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(weights: Mapping[str, Tensor]) -> int:
    """63-bit checksum of the bytes of `weights` in name order, whatever order they come in.

    It changes with the weights but for a chance of about 2^-63.
    """
    return combine((name, tensor_checksum(tensor)) for name, tensor in weights.items())


def combine(parts: Iterable[tuple[str, int]]) -> int:
    """The checksum from the `tensor_checksum` of every tensor, by name."""
    total = 0
    for name, part in sorted(parts):
        total = (total * 0x9E3779B97F4A7C15 + (part ^ zlib.crc32(name.encode()))) & _MASK
    return (total ^ (total >> 32)) & (_MASK >> 1)


def tensor_checksum(tensor: Tensor) -> int:
    """64-bit checksum of one tensor: the sum of its elements' bits, each times a number of its place, mod 2^64, and
    how many they are."""
    shape = tuple(tensor.shape)
    return partial_checksum(tensor, tuple((0, length) for length in shape), shape)


@torch.no_grad()
def partial_checksum(tensor: Tensor, box: Sequence[tuple[int, int]], shape: Sequence[int]) -> int:
    """What `tensor`, the rectangle `box` of a tensor of `shape`, adds to the checksum of the latter: over rectangles
    that cover it once the sum, mod 2^64, is its `tensor_checksum`."""
    starts, length, pitch, together = _runs(box, shape)
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()]).view(len(starts), length)
    weights = _weights(str(tensor.device))
    step = 1 if tensor.device.type == "cpu" else BLOCKS_AT_ONCE
    sums: list[Tensor] = []
    blocks: list[int] = []

    def add(part: Tensor, factors: Tensor, first: int, count: int = 1) -> None:
        """`count` rows for as many blocks, or all of `part` for the one block."""
        products = part.to(torch.int64, copy=True).mul_(factors)
        sums.append(products.sum(1) if count > 1 else products.sum().view(1))
        blocks.extend(range(first, first + count))

    row = 0
    while row < len(starts):
        block, place = divmod(starts[row], BLOCK)
        if place + length <= BLOCK:
            count = min(together - row % together, (BLOCK - place - length) // max(pitch, 1) + 1)
            add(bits[row : row + count], weights.as_strided((count, length), (pitch, 1), place), block)
            row += count
            continue
        run, row = bits[row], row + 1
        if place:
            add(run[: BLOCK - place], weights[place:], block)
            run, block = run[BLOCK - place :], block + 1
        whole = len(run) // BLOCK
        table = run[: whole * BLOCK].view(whole, BLOCK)
        for first in range(0, whole, step):
            part = table[first : first + step]
            add(part, weights, block + first, len(part))
        if rest := len(run) - whole * BLOCK:
            add(run[whole * BLOCK :], weights[:rest], block + whole)
    last = math.prod(shape) // BLOCK
    found = cast("list[int]", torch.cat(sums).tolist()) if sums else []
    terms = [(last + 1, bits.numel()), *((last - block, value) for block, value in zip(blocks, found, strict=True))]
    return sum(value * pow(_BASE, power, 1 << 64) for power, value in terms) & _MASK


def _runs(box: Sequence[tuple[int, int]], shape: Sequence[int]) -> tuple[list[int], int, int, int]:
    """Where a rectangle lies in a flat tensor of `shape`: (first element of every unbroken run, length of a run, and
    how far apart are the starts of how many runs)."""
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
