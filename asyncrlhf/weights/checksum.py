"""A checksum of all parameter bytes that a trainer and every engine that follows it compute alike, on their device."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

__all__ = ("checksum", "combine", "tensor_checksum")

BLOCK = 1 << 17
"""Elements that are summed up together; a block and its int64 copy fit into a CPU's cache."""
BLOCKS_AT_ONCE = 256
"""Blocks per kernel on a GPU, where launches cost more than cache misses."""
_MASK = (1 << 64) - 1
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


@torch.no_grad()
def tensor_checksum(tensor: Tensor) -> int:
    """64-bit checksum of one tensor: the sum of its elements' bits, each times an odd number of its place, mod 2^64."""
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    weights = _weights(str(tensor.device))
    whole = len(bits) // BLOCK
    step = 1 if tensor.device.type == "cpu" else BLOCKS_AT_ONCE
    blocks = bits[: whole * BLOCK].view(whole, BLOCK)
    sums = [(blocks[i : i + step].to(torch.int64) * weights).sum(1) for i in range(0, whole, step)]
    rest = bits[whole * BLOCK :].to(torch.int64)
    sums.append((rest * weights[: len(rest)]).sum(0, keepdim=True))
    total = len(bits)
    for value in cast("list[int]", torch.cat(sums).tolist()):
        total = (total * 0xD6E8FEB86659FD93 + value) & _MASK
    return total


@lru_cache(maxsize=8)
def _weights(device: str) -> Tensor:
    """int64 [BLOCK] odd pseudo-random numbers, the same on every machine."""
    places = torch.arange(1, BLOCK + 1, dtype=torch.int64)
    mixed = places * -7046029254386353131
    mixed = (mixed ^ (mixed >> 31)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return (mixed | 1).to(device)
