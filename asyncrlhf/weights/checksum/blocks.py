"""What a checksum is made of: words, the blocks that they are weighted in, and where a rectangle has them.

See sums.py for the sum. A rectangle of a tensor lies in stretches that are unbroken in the whole tensor; those are
cut into cells of whole blocks, or of rows that are in the same block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ("BASE", "BLOCK", "MASK", "SHIFT", "WORD", "Cell", "Stretches", "cells", "stretches", "weights_of_places")

WORD = 8
"""Bytes."""
BLOCK = 1 << 16
"""Words that are weighted together: where they come from, where they go, and their numbers are in a cache at once."""
SHIFT = 33
BASE = 0xD6E8FEB86659FD93
MASK = (1 << 64) - 1


class Cell(NamedTuple):
    """Words that are weighted at once: rows of one block, or one row of whole blocks."""

    row: int
    rows: int
    begin: int
    end: int
    block: int
    blocks: int
    place: int
    """Of the first word in its block."""


class Stretches(NamedTuple):
    """Where a rectangle lies in a flat tensor."""

    starts: list[int]
    """First word of every stretch."""
    length: int
    pitch: int
    """How far apart the starts are of so many stretches as are `together`."""
    together: int


def stretches(box: Sequence[tuple[int, int]], shape: Sequence[int]) -> Stretches:
    """Of the rectangle `box` of a tensor of `shape`."""
    cut = max((dim for dim, length in enumerate(shape) if box[dim] != (0, length)), default=-1)
    if cut < 0:
        return Stretches([0], math.prod(shape), math.prod(shape), 1)
    inner = math.prod(shape[cut + 1 :])
    pitch, (low, high) = shape[cut] * inner, box[cut]
    starts: list[int] = []
    for places in itertools.product(*(range(*side) for side in box[:cut])):
        row = 0
        for place, length in zip(places, shape[:cut], strict=True):
            row = row * length + place
        starts.append(row * pitch + low * inner)
    return Stretches(starts, (high - low) * inner, pitch, box[cut - 1][1] - box[cut - 1][0] if cut else 1)


def cells(found: Stretches, most: int) -> Iterator[Cell]:
    """Of at most `most` blocks each."""
    starts, length, pitch, together = found
    row = 0
    while row < len(starts):
        block, place = divmod(starts[row], BLOCK)
        if place + length <= BLOCK:
            rows = min(together - row % together, (BLOCK - place - length) // max(pitch, 1) + 1)
            yield Cell(row, rows, 0, length, block, 1, place)
            row += rows
            continue
        begin = 0
        while begin < length:
            block, place = divmod(starts[row] + begin, BLOCK)
            blocks = 1 if place else max(1, min(most, (length - begin) // BLOCK))
            end = min(begin + blocks * BLOCK - place, length)
            yield Cell(row, 1, begin, end, block, blocks, place)
            begin = end
        row += 1


@lru_cache(maxsize=8)
def weights_of_places(device: str) -> Tensor:
    """int64 [BLOCK] odd pseudo-random numbers, the same on every machine."""
    places = torch.arange(1, BLOCK + 1, dtype=torch.int64)
    mixed = places * -7046029254386353131
    mixed = (mixed ^ (mixed >> 31)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return (mixed | 1).to(device)
