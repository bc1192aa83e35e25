"""The inner loop of a checksum on CPUs, compiled by Numba: words are read from memory once, copied and summed up.

To import this is slow, so threads.py does so when there is much to sum up: once in a process, the first checksum of
16 MiB and more takes 0.7 s longer and some 140 MB of memory (measured).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
import numpy.typing as npt

from asyncrlhf.weights.checksum.blocks import SHIFT

__all__ = ("fill_and_sum_rows",)

Words = npt.NDArray[np.int64]


def _fill_and_sum_rows(
    there: Words,
    here: Words,
    rows: int,
    length: int,
    there_pitch: int,
    here_pitch: int,
    factors: Words,
    place: int,
    pitch: int,
    step: np.uint64,
) -> np.uint64:
    total = np.uint64(0)
    for row in range(rows):
        target = there[row * there_pitch : row * there_pitch + length]
        numbers = factors[place + row * pitch : place + row * pitch + length]
        part = np.uint64(0)
        if here.size:
            source = here[row * here_pitch : row * here_pitch + length]
            for column in range(length):
                word = source[column]
                target[column] = word
                part += np.uint64(numbers[column]) * (np.uint64(word) + np.uint64(word >> SHIFT))
        else:
            for column in range(length):
                word = target[column]
                part += np.uint64(numbers[column]) * (np.uint64(word) + np.uint64(word >> SHIFT))
        total = total * step + part
    return total


_compile = cast(
    "Callable[..., Any]", numba.njit("u8(i8[::1], i8[::1], i8, i8, i8, i8, i8[::1], i8, i8, u8)", nogil=True)
)
fill_and_sum_rows = cast(
    "Callable[[Words, Words, int, int, int, int, Words, int, int, int], int]", _compile(_fill_and_sum_rows)
)
"""Of `rows` of `length` words, int64, whose starts are so many words apart in the memory `there`: the weighted sum, mod
2^64, after they were copied from `here` unless that is empty. The factors of a row begin at `place` of `factors`, and
`pitch` further for every next one; what was found before it is multiplied by `step`."""
