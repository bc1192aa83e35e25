"""A checksum of all parameter bytes that a trainer and every engine that follows it compute alike, on their device.

A tensor is cut, flat, into words of 8 bytes, and those into blocks. With x_k the word at place k of a block, read as a
number, and w_k an odd number of that place, a block of n words and a tensor of m blocks and c elements have

    block = sum over k of w_k * (x_k + (x_k >> 33))                                                   mod 2^64
    tensor = sum over i of block_i * BASE^(m - 1 - i)  +  c * BASE^m                                  mod 2^64

which is linear in every bit, so that parts add up whoever has them. The upper half of a word is added to the lower one
before: alone, its highest bit times an odd number would be the same wherever it is, and two changes of sign would go
unseen. By 33 and not 32 bits, so that the highest bits of both halves do not cancel either. Where rows are not made of
whole words, and in vectors, every element is a word.

On CPUs a few threads copy blocks and sum them up (threads.py); `Sums` has them work on many tensors before it waits.

    sums = Sums[str]()
    sums.copy("weight", arrived, place, box, shape)     # and more of them; they are read until `settle`
    sums.settle()["weight"]
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from asyncrlhf.errors import PublishRefused
from asyncrlhf.messages import WeightHandle
from asyncrlhf.weights.checksum import blocks
from asyncrlhf.weights.checksum.blocks import BASE, MASK, SHIFT, WORD, Stretches, cells, stretches, weights_of_places
from asyncrlhf.weights.checksum.threads import Part, fill_and_sum

__all__ = ("Sums", "checksum", "combine", "partial_checksum", "require_checksum", "tensor_checksum")

BLOCKS_AT_ONCE = 512
"""Blocks per kernel on a GPU, where launches cost more than cache misses."""
AT_ONCE = 64 << 20
"""Bytes that wait for `Sums.settle`, or one tensor: so much is kept beside the model of what has arrived."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Key = TypeVar("Key")


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
        total = (total * 0x9E3779B97F4A7C15 + (part ^ zlib.crc32(name.encode()))) & MASK
    return (total ^ (total >> 32)) & (MASK >> 1)


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
        self._waiting: list[tuple[Key, int, Part]] = []
        """With what its size adds."""
        self._byte_count = 0

    def add(self, key: Key, tensor: Tensor, box: Sequence[tuple[int, int]], shape: Sequence[int]) -> None:
        """As `partial_checksum`. The tensor must not change before the next `settle`."""
        tensor = tensor.detach()
        grain, first = _grain(shape, tensor.element_size()), box[-1][0] if box else 0
        words = _words(tensor, grain)
        if words is None or first % grain or not _lies_in_stretches(words, box, shape):
            words = _filled_up(tensor, grain, first)
        self._take(key, words, None, grain, tensor.numel(), box, shape)

    def copy(
        self, key: Key, source: Tensor, target: Tensor, box: Sequence[tuple[int, int]], shape: Sequence[int]
    ) -> None:
        """Copy `source` over `target`, which is the rectangle `box` of a tensor of `shape`, until the next `settle`.
        The partial checksum is that of what is in `target` then, or if its type is another of what has arrived on its
        device; bytes that are read from memory once are copied and summed up."""
        source, target = source.detach(), target.detach()
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
        found = fill_and_sum([part for _, _, part in self._waiting])
        for (key, size, _), value in zip(self._waiting, found, strict=True):
            self._found[key] = (size + value) & MASK
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
        """The words of the rectangle `box`, which has `count` elements, are to be summed up; on a CPU they are filled
        from `source` before."""
        if grain > 1:
            box = (*box[:-1], (box[-1][0] // grain, -(-box[-1][1] // grain)))
            shape = (*shape[:-1], shape[-1] // grain)
        where, last = stretches(box, shape), math.prod(shape) // blocks.BLOCK
        size = count * pow(BASE, last + 1, 1 << 64)
        table = words.reshape(len(where.starts), where.length)
        if words.device.type != "cpu":
            self._found[key] = (size + _on_device(table, where, last)) & MASK
            return
        here = None if source is None else source.reshape(table.shape).numpy()
        self._waiting.append((key, size, Part(table.numpy(), here, where, last)))
        self._byte_count += words.nbytes
        if self._byte_count >= AT_ONCE:
            self.settle()


def _grain(shape: Sequence[int], size: int) -> int:
    """Elements of a word: as many as there is room for, if rows of a matrix are made of whole words; else 1."""
    return WORD // size if len(shape) > 1 and not shape[-1] * size % WORD else 1


def _words(tensor: Tensor, grain: int) -> Tensor | None:
    """A view of the words, int64 [..., words of a row], or of the elements where they are the words; None where memory
    does not lie so that there is one."""
    bits = tensor.view(_INTEGERS[tensor.element_size()])
    if grain == 1:
        return bits
    *strides, last = tensor.stride()
    lengths = (tensor.shape[-1], tensor.storage_offset(), *strides)
    return bits.view(torch.int64) if last == 1 and not any(length % grain for length in lengths) else None


def _filled_up(tensor: Tensor, grain: int, first: int) -> Tensor:
    """The words of a copy of a tensor whose rows begin with element `first`; what lies outside of it is 0."""
    bits = tensor.contiguous().view(_INTEGERS[tensor.element_size()])
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


def _on_device(table: Tensor, where: Stretches, last: int) -> int:
    """The sum of the blocks of a rectangle, with one wait for the device."""
    factors, sums, powers = weights_of_places(str(table.device)), list[Tensor](), list[int]()
    for cell in cells(where, BLOCKS_AT_ONCE):
        part = table[cell.row : cell.row + cell.rows, cell.begin : cell.end]
        mixed = (part >> SHIFT).add_(part) if part.dtype == torch.int64 else part.to(torch.int64)
        if cell.blocks > 1:
            sums.append(mixed.view(cell.blocks, blocks.BLOCK).mul_(factors).sum(1))
        else:
            sums.append(mixed.mul_(factors.as_strided(part.shape, (where.pitch, 1), cell.place)).sum().view(1))
        powers.extend(range(last - cell.block, last - cell.block - cell.blocks, -1))
    values = cast("list[int]", torch.cat(sums).tolist() if sums else [])
    return sum(value * pow(BASE, power, 1 << 64) for value, power in zip(values, powers, strict=True))
