"""How rows are laid out for one forward: a pure function of their lengths, which no result may depend on.

A forward reads `bins` sequences of `width` places. Rows may share a bin (a mask or the positions keep them apart), and
in the layout "shared" rows with the same prompt may share that too: the answers follow one copy of the prompt.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ("Cut", "Integers", "Layout", "Part", "ranges", "starts_of")

Integers = NDArray[np.int64]
Layout = Literal["padded", "packed", "shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One micro-batch: `n` rows and where they stand. A row's own places hold the tokens it brings, all but its last
    answer token, which nothing follows: prompt and answer, or the answer alone behind the prompt of an earlier row."""

    rows: Integers
    """[n] rows of the batch, in the order they are laid out."""
    brings_prompt: NDArray[np.bool_]
    """[n] whether the prompt is among the row's own tokens."""
    bins: int
    width: int
    bin: Integers
    """[n] the bin each row stands in."""
    start: Integers
    """[n] place in the bin of the row's first own token."""
    prompt_start: Integers
    """[n] place in the bin of the prompt that the row stands behind."""

    @property
    def alone(self) -> bool:
        """Whether every row has a bin to itself."""
        return len(self.rows) == self.bins


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How the rows of a batch become micro-batches."""

    tokens: int
    """Most tokens of a micro-batch, in the layout "padded" padding included; a longer row goes alone."""
    rows: int = 0
    """Rows of a micro-batch instead, if above 0."""
    layout: Layout = "padded"
    """"padded": every row in a bin of its own. "packed": all rows in one bin. "shared": answers to one prompt behind a
    single copy of it, wherever that is less work, several such units to a bin."""
    pairs_per_token: float = 0.0
    """Attention pairs that cost as much as the rest of the model costs for one token; decides when sharing is less
    work."""
    multiple: int = 1
    """Places of a row are filled up to a multiple of this."""

    def plan(
        self,
        prompts: Integers,
        answers: Integers,
        rows: Integers,
        prompt_keys: Sequence[object] = (),
        together: Integers | None = None,
    ) -> list[Part]:
        """Micro-batches that hold each of `rows` once, rows of similar length together.

        `prompts`, `answers`: int64 [R] lengths of all rows, answers 1 or more. `prompt_keys`: for "shared", equal for
        equal prompts. `together`: int64 [R], rows with the same number stay in one micro-batch, whatever its size, and
        for "shared" have the same key.
        """
        order = rows[np.argsort((prompts + answers)[rows], kind="stable")]
        if self.layout == "shared":
            units = self._units(prompts, answers, order, prompt_keys)
        else:
            units = [[row] for row in order.tolist()]
        blocks: dict[int, list[list[int]]] = {}
        for number, unit in enumerate(units):
            blocks.setdefault(number if together is None else int(together[unit[0]]), []).append(unit)
        lengths = {key: [self._places(prompts, answers, unit) for unit in block] for key, block in blocks.items()}
        parts: list[Part] = []
        chosen: list[list[int]] = []
        total = 0
        for key in sorted(blocks, key=lambda key: max(lengths[key])):
            block, longest = blocks[key], max(lengths[key])
            if self.rows:
                size = sum(map(len, block))
            else:
                size = longest * len(block) if self.layout == "padded" else sum(lengths[key])
            before = longest * len(chosen) if self.layout == "padded" and not self.rows else total
            if chosen and before + size > (self.rows or self.tokens):
                parts.append(self._part(prompts, answers, chosen))
                chosen, before = [], 0
            chosen += block
            total = before + size
        if chosen:
            parts.append(self._part(prompts, answers, chosen))
        return parts

    def _units(
        self, prompts: Integers, answers: Integers, order: Integers, prompt_keys: Sequence[object]
    ) -> list[list[int]]:
        """Rows that share one copy of their prompt; a row joins if it saves more on the prompt than it adds in
        attention between answers that have nothing to do with each other."""
        units: list[list[int]] = []
        current: dict[object, list[int]] = {}
        size: dict[object, int] = {}
        for row in order.tolist():
            key, prompt, answer = prompt_keys[row], int(prompts[row]), int(answers[row])
            unit = current.get(key)
            if unit is not None:
                together = (size[key] + answer) ** 2 - size[key] ** 2
                joins = together - (prompt + answer) ** 2 < self.pairs_per_token * prompt
                if joins and not (self.rows and len(unit) >= self.rows):
                    unit.append(row)
                    size[key] += answer - 1
                    continue
            current[key], size[key] = [row], prompt + answer - 1
            units.append(current[key])
        return units

    def _part(self, prompts: Integers, answers: Integers, units: list[list[int]]) -> Part:
        lengths = [self._places(prompts, answers, unit) for unit in units]
        if self.layout == "padded":
            bins, starts, width = list(range(len(units))), [0] * len(units), max(lengths)
        elif self.layout == "packed":
            bins, starts, width = [0] * len(units), np.cumsum([0, *lengths[:-1]]).tolist(), sum(lengths)
        else:
            bins, starts, width = self._bins(lengths)
        sizes = np.asarray([len(unit) for unit in units])
        rows = np.asarray([row for unit in units for row in unit], dtype=np.int64)
        brings_prompt = np.zeros(len(rows), dtype=np.bool_)
        brings_prompt[starts_of(sizes)] = True
        own = np.where(brings_prompt, prompts[rows], 0) + answers[rows] - 1
        prompt_start = np.repeat(np.asarray(starts, dtype=np.int64), sizes)
        within = starts_of(own)
        within -= np.repeat(within[starts_of(sizes)], sizes)
        return Part(
            rows=rows,
            brings_prompt=brings_prompt,
            bins=max(bins) + 1,
            width=width,
            bin=np.repeat(np.asarray(bins, dtype=np.int64), sizes),
            start=prompt_start + within,
            prompt_start=prompt_start,
        )

    def _places(self, prompts: Integers, answers: Integers, unit: list[int]) -> int:
        if len(unit) == 1:
            length = int(prompts[unit[0]] + answers[unit[0]]) - 1
        else:
            length = int(prompts[unit[0]] + answers[unit].sum()) - len(unit)
        return -(-length // self.multiple) * self.multiple

    def _bins(self, lengths: list[int]) -> tuple[list[int], list[int], int]:
        """Bins for units: (bin, start) of each unit, and the width with the least work in places and pairs."""
        longest = max(lengths)
        found: tuple[float, list[int], list[int], int] | None = None
        for width in sorted({longest * quarters // 4 for quarters in (4, 5, 6, 8, 12)}):
            bins, starts = _fill(lengths, width)
            work = (max(bins) + 1) * width * (self.pairs_per_token + width)
            if found is None or work < found[0]:
                found = work, bins, starts, width
        assert found is not None
        return found[1:]


def _fill(lengths: list[int], width: int) -> tuple[list[int], list[int]]:
    """(bin, start) of each unit in bins of `width` places: the longest first, each into the fullest bin it fits."""
    bins, starts = [0] * len(lengths), [0] * len(lengths)
    free: list[tuple[int, int]] = []
    """(free places, bin), ascending."""
    count = 0
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        at = bisect_left(free, (lengths[i], -1))
        if at < len(free):
            left, bins[i] = free.pop(at)
        else:
            left, bins[i] = width, count
            count += 1
        starts[i] = width - left
        insort(free, (left - lengths[i], bins[i]))
    return bins, starts


def ranges(starts: Integers, lengths: Integers) -> Integers:
    """start, start + 1, ... (`lengths` of them) for every start, end to end."""
    return np.repeat(starts - starts_of(lengths), lengths) + np.arange(lengths.sum())


def starts_of(lengths: Integers) -> Integers:
    """Where each of several stretches laid end to end begins."""
    return np.cumsum(lengths) - lengths
