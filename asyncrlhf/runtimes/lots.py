"""Data by reference under Ray: what an engine computes stays with Ray, and messages carry references.

An actor packs long columns into lots before it says anything (`Shelf`). Whoever hears of them claims them at once, as
results of a task of that actor (`claim`): thus the *caller*, which is the controller, owns them, and they outlive the
actor that computed them (save for the milliseconds that a claim takes), but not the machine they lie on. Ray frees a
lot when no message in the controller, and no batch on its way to an engine, refers to it any more. Lots of less than
100 KiB lie in the controller's memory, as bytes, until an engine asks for them: so Ray treats small results.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import ray
from msgspec.structs import replace
from ray.exceptions import RayError

from asyncrlhf.errors import DataLost
from asyncrlhf.messages import Array, EngineEvent, Finished, Sample, Stored, StoredRows

__all__ = ("RayLot", "Shelf", "claim")

TIMEOUT = 300.0
"""Seconds that lots may take to arrive."""
TOKEN_BYTES = 8
"""Of a token id (int32) and its log-prob (float32)."""
MOST_LOTS = 8
"""Of one column: each costs whoever stores and fetches it about a millisecond, and is fetched whole, once a node, and
freed whole."""
SUMMED_AT_ONCE = 2048
"""Numbers that are widened to float64 before they are summed: 16 KiB, which a core has at hand. With numpy's 8192 the
sum of a long row takes about 1.4 times as long."""


class RayLot:
    """Arrays that lie with Ray, as a list. A Lot."""

    __slots__ = ("number", "reference")

    def __init__(self, number: int) -> None:
        """`number`: where they are on their actor's shelf, until they are claimed."""
        self.number = number
        self.reference: Any = None

    def __repr__(self) -> str:
        return f"lot {self.number} ({self.reference})"

    @classmethod
    def fetch_all(cls, lots: Sequence[RayLot]) -> Sequence[Sequence[Array]]:
        try:
            return ray.get([lot.reference for lot in lots], timeout=TIMEOUT)
        except (RayError, TimeoutError) as error:
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise DataLost(f"at least one of {len(lots)} stored answers or columns is gone: {why}") from None


def claim(actor: Any, lots: Sequence[RayLot]) -> None:
    """Own these lots of an actor; nothing is moved. If the actor is gone, so are they, as `fetch_all` says."""
    if lots:
        numbers = [lot.number for lot in lots]
        references = actor.take.options(num_returns=len(lots)).remote(numbers)
        for lot, reference in zip(lots, [references] if len(lots) == 1 else references, strict=True):
            lot.reference = reference


class Shelf:
    """Where an actor keeps lots until they are claimed. Filled by the engine's thread, emptied by the event loop."""

    def __init__(self, inline_bytes: int) -> None:
        """`inline_bytes`: what is not larger stays in its message."""
        self._inline_bytes = inline_bytes
        self._numbers = itertools.count()
        self._lots: dict[int, list[Array]] = {}

    def take(self, numbers: Sequence[int]) -> Any:
        """The arrays of these lots: one value for one of them, else a list. They leave the shelf."""
        found = [self._lots.pop(number) for number in numbers]
        return found[0] if len(found) == 1 else found

    def events(self, events: Sequence[EngineEvent]) -> tuple[list[EngineEvent], list[RayLot]]:
        """The events with long answers stored, and the lots of those."""
        lots: list[RayLot] = []
        said = [replace(e, sample=self._sample(e.sample, lots)) if isinstance(e, Finished) else e for e in events]
        return said, lots

    def result(self, value: Any) -> tuple[Any, list[RayLot]]:
        """The result of a verb with its columns stored, if it is a column or has some by name, and their lots."""
        lots: list[RayLot] = []
        if isinstance(value, dict):
            named = cast("dict[Any, Any]", value)
            return {name: self._rows(column, lots) for name, column in named.items()}, lots
        return self._rows(value, lots), lots

    def _put(self, arrays: list[Array], lots: list[RayLot]) -> RayLot:
        lot = RayLot(next(self._numbers))
        self._lots[lot.number] = arrays
        lots.append(lot)
        return lot

    def _sample(self, sample: Sample, lots: list[RayLot]) -> Sample:
        count = len(sample.token_ids)
        if TOKEN_BYTES * count <= self._inline_bytes:
            return sample
        ids, logprobs = np.asarray(sample.token_ids, np.int32), np.asarray(sample.logprobs, np.float32)
        lot = self._put([ids, logprobs], lots)
        stored = Stored(lot, 1, count, total=sum(sample.logprobs))
        return replace(sample, token_ids=cast("Any", Stored(lot, 0, count, total=int(ids.sum()))), logprobs=stored)

    def _rows(self, value: Any, lots: list[RayLot]) -> Any:
        """Rows of a column, packed in their order into lots of more than `inline_bytes` if they are more than that, and
        into MOST_LOTS of them at most."""
        if not _is_column(value) or (byte_count := sum(row.nbytes for row in value)) <= self._inline_bytes:
            return value
        least = max(self._inline_bytes, byte_count // MOST_LOTS)
        found = StoredRows()
        part: list[Array] = []
        size = 0
        for number, row in enumerate(value, 1):
            part.append(row)
            size += row.nbytes
            if size > least or number == len(value):
                found += self._parcel(part, lots)
                part, size = [], 0
        return found

    def _parcel(self, rows: list[Array], lots: list[RayLot]) -> list[Stored]:
        """These rows end to end, as one lot."""
        lot = self._put([_end_to_end(rows)], lots)
        lengths = list(map(len, rows))
        starts = itertools.accumulate(lengths, initial=0)
        fields = zip(lengths, starts, _totals(rows), strict=False)
        return [Stored(lot, 0, length, start, total) for length, start, total in fields]


def _totals(rows: Sequence[Array]) -> list[float]:
    """The sum of each row, in float64."""
    kept = np.setbufsize(SUMMED_AT_ONCE)
    try:
        return [float(np.add.reduce(row, dtype=np.float64)) for row in rows]
    finally:
        np.setbufsize(kept)


def _end_to_end(rows: Sequence[Array]) -> Array:
    """These rows in one array: where they lie, if that is one after another in one, else copied."""
    whole = rows[0].base
    if not isinstance(whole, np.ndarray) or whole.ndim != 1 or not whole.flags.c_contiguous:
        return np.concatenate(rows)
    rows = [row for row in rows if row.size]
    begin = place = rows[0].ctypes.data if rows else 0
    for row in rows:
        alike = row.base is whole and row.ndim == 1 and row.dtype == whole.dtype and row.flags.c_contiguous
        if not alike or row.ctypes.data != place:
            return np.concatenate(rows)
        place += row.nbytes
    first = (begin - whole.ctypes.data) // whole.itemsize
    return whole[first : first + (place - begin) // whole.itemsize]


def _is_column(value: Any) -> bool:
    rows = cast("list[Any]", value) if isinstance(value, list) else []
    return bool(rows) and all(isinstance(row, np.ndarray) for row in rows)
