"""Rectangles that are copied and summed up on CPUs by a few threads.

The threads of a small pool, as many as this process may use CPUs, take blocks in turn: they copy one, and sum it up
while it is in the cache. Who asks for the sums works as well, and waits for those that have begun. Where Numba
cannot be imported, NumPy's functions do all of it, without a word: the sums are the same.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from asyncrlhf.weights.checksum import blocks
from asyncrlhf.weights.checksum.blocks import BASE, MASK, SHIFT, WORD, Cell, Stretches, cells, weights_of_places

__all__ = ("Part", "Words", "fill_and_sum")

THREADS = 4
"""Memory is not faster for more. Those beside the one that asks are not counted by `threads` or OMP_NUM_THREADS."""
BLOCKS_PER_THREAD = 8
"""Another thread is not asked for less."""
BLOCKS_AT_ONCE = 8
COMPILED_FROM = 32
"""Blocks. Of less there is no need to compile anything: NumPy's functions, one after another, take a few ms."""

Words = npt.NDArray[np.int64]
_own = threading.local()
"""Memory of a block for each thread: to allocate it anew costs more than to use it."""
_NOTHING: Words = np.empty(0, np.int64)


@dataclass(eq=False)
class Part:
    """A rectangle to be filled, if there is something to fill it `here`, and summed up."""

    there: Words
    """[stretches, words of one]"""
    here: Words | None
    where: Stretches
    last: int
    """Power of the tensor's first block."""
    sums: list[int] = field(default_factory=list[int])
    """What threads have found."""


Share = tuple[Callable[[Part, Cell, Words], int], Part, Cell]


def fill_and_sum(parts: Sequence[Part]) -> list[int]:
    """The sum of each, mod 2^64, after it was filled. Waits for all."""
    count = sum(part.there.size for part in parts) // blocks.BLOCK
    compiled = count >= COMPILED_FROM and _inner_loop() is not None
    todo = iter([share for part in parts for share in _shares(part, compiled)])  # a list's: next() is one step
    others: list[Future[None]] = []
    try:
        for _ in range(min(THREADS, _processors(), count // BLOCKS_PER_THREAD) - 1):
            others.append(_pool().submit(_work, todo))  # noqa: PERF401 - what came before a refused one counts
    except RuntimeError as refused:
        if "cannot schedule new futures" not in str(refused):
            raise
        # the interpreter ends: this thread goes on alone
    try:
        _work(todo)
    finally:
        for other in others:
            if not other.cancel():
                other.result()
    return [sum(part.sums) & MASK for part in parts]


def _shares(part: Part, compiled: bool) -> Iterator[Share]:
    """Of a part: what a thread does at once."""
    compiled = compiled and part.there.dtype == np.int64
    for cell in cells(part.where, BLOCKS_AT_ONCE if compiled else 1):
        yield _compiled if compiled else _interpreted, part, cell


def _work(todo: Iterator[Share]) -> None:
    """Whatever of it no other thread has taken."""
    factors = weights_of_places("cpu").numpy()
    for value, part, cell in todo:
        power = pow(BASE, part.last - cell.block - cell.blocks + 1, 1 << 64)
        part.sums.append(value(part, cell, factors) * power)


def _compiled(part: Part, cell: Cell, factors: Words) -> int:
    """The weighted sum of a cell, after it was copied."""
    inner_loop, size = _inner_loop(), blocks.BLOCK
    assert inner_loop is not None
    row, rows, begin, end, _, count, place = cell
    there, there_pitch = _span(part.there, row, rows, begin, end)
    here, here_pitch = (_NOTHING, 0) if part.here is None else _span(part.here, row, rows, begin, end)
    if count > 1:
        return inner_loop(there, here, count, size, size, size, factors, 0, 0, BASE)
    return inner_loop(there, here, rows, end - begin, there_pitch, here_pitch, factors, place, part.where.pitch, 1)


def _span(table: Words, row: int, rows: int, begin: int, end: int) -> tuple[Words, int]:
    """All memory from the first word of these rows to their last one, and how far apart the rows are in it."""
    if rows == 1:
        return table[row, begin:end], 0
    pitch = table.strides[0] // WORD
    return as_strided(table[row, begin:], ((rows - 1) * pitch + end - begin,), (WORD,)), pitch


def _interpreted(part: Part, cell: Cell, factors: Words) -> int:
    """The same of one block, and words of any size."""
    row, rows, begin, end, _, _, place = cell
    there = part.there[row : row + rows, begin:end]
    if part.here is not None:
        np.copyto(there, part.here[row : row + rows, begin:end])
    if not hasattr(_own, "scratch"):
        _own.scratch = np.empty(blocks.BLOCK, np.int64)
    mixed: Words = _own.scratch[: there.size].reshape(there.shape)
    if there.dtype == np.int64:
        np.add(np.right_shift(there, SHIFT, mixed), there, mixed)
    else:
        np.copyto(mixed, there)
    numbers = np.ndarray(there.shape, np.int64, factors, WORD * place, (WORD * part.where.pitch, WORD))
    return int(np.einsum("ij,ij->", mixed, numbers))


@lru_cache(maxsize=1)
def _inner_loop() -> Callable[[Words, Words, int, int, int, int, Words, int, int, int], int] | None:
    """None where Numba cannot be imported, or compiles nothing (NUMBA_DISABLE_JIT); found out once."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return None
    try:
        from asyncrlhf.weights.checksum.compiled import fill_and_sum_rows
    except ImportError:
        return None
    return fill_and_sum_rows


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS - 1, "checksum")


os.register_at_fork(after_in_child=_pool.cache_clear)
