"""Columns that are held by reference: their numbers lie where they were computed, and a message carries their length.

The controller passes a Stored on like any other sequence; whoever computes with the numbers fetches them. The objects
behind it (lots) are a runtime's: its references count, and what nobody refers to any more is freed there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast, overload

import numpy as np

from asyncrlhf.messages.batch import Array, ArrayColumn, Column, Joined, Level

__all__ = ("Lot", "Stored", "StoredColumn", "StoredRows", "column_of", "fetch", "sequence_column", "total")

LotType = TypeVar("LotType", bound="Lot")


class Lot(Protocol):
    """1-D arrays that lie together somewhere else. Whoever holds one keeps them there."""

    @classmethod
    def fetch_all(cls: type[LotType], lots: Sequence[LotType]) -> Sequence[Sequence[Array]]:
        """The arrays of each, read-only. Waits for them. Raises DataLost if they are gone."""
        ...


class Stored(Sequence[float]):
    """Some numbers of an array in a lot. Reading one fetches them all, and waits for it: `fetch` many at once instead.

    Example: the log-probs of an answer of 9000 tokens: Stored(lot, 1, 9000, total=-3120.5).
    """

    __slots__ = ("_length", "lot", "part", "start", "total")

    def __init__(self, lot: Lot, part: int, length: int, start: int = 0, total: float = 0.0) -> None:
        """`part`: which array of the lot; `start`: where in it they begin. `total`: their sum, as `sum` gives it."""
        self.lot, self.part, self.start, self._length, self.total = lot, part, start, length, total

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[float]: ...
    def __getitem__(self, index: int | slice) -> float | Sequence[float]:
        return self.values()[index]

    def __iter__(self) -> Iterator[float]:
        return iter(self.values())

    def __repr__(self) -> str:
        return f"Stored({len(self)} numbers of {self.lot!r})"

    def values(self) -> tuple[float, ...]:
        return tuple(fetch([self])[0].tolist())


class StoredRows(list[Stored]):
    """A list of many, which travels to another process as its lots and a few lists of numbers: a serializer that asks
    about every object, as Ray's does, takes milliseconds for a thousand of them."""

    def __reduce__(self) -> tuple[Any, ...]:
        lots = {id(row.lot): row.lot for row in self}
        numbers = dict(zip(lots, itertools.count(), strict=False))
        fields = zip(*((numbers[id(row.lot)], row.part, len(row), row.start, row.total) for row in self), strict=True)
        return _stored_rows, (list(lots.values()), *fields)


def _stored_rows(lots: Sequence[Lot], numbers: Iterable[int] = (), *fields: Iterable[float]) -> StoredRows:
    return StoredRows(map(cast("Any", Stored), map(lots.__getitem__, numbers), *fields))


def fetch(columns: Iterable[Stored]) -> list[Array]:
    """The arrays of many at once; a lot that several share is fetched once. Raises DataLost."""
    wanted = list(columns)
    lots = list({id(stored.lot): stored.lot for stored in wanted}.values())
    found: dict[int, Sequence[Array]] = {}
    for kind in {type(lot) for lot in lots}:
        mine = [lot for lot in lots if type(lot) is kind]
        found.update(zip(map(id, mine), kind.fetch_all(mine), strict=True))
    return [found[id(s.lot)][s.part][s.start : s.start + len(s)] for s in wanted]


def total(numbers: Sequence[float]) -> float:
    """Their sum, without fetching any."""
    return numbers.total if isinstance(numbers, Stored) else sum(numbers)


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """A column of which some rows are stored; every row is the pieces of which it consists, end to end."""

    level: Level
    pieces: tuple[tuple[Array | Stored, ...], ...]

    def __reduce__(self) -> tuple[Any, ...]:
        places = [tuple([isinstance(p, Stored) for p in row]) for row in self.pieces]
        stored = StoredRows([p for row in self.pieces for p in row if isinstance(p, Stored)])
        own = [p for row in self.pieces for p in row if not isinstance(p, Stored)]
        return _arrived, (self.level, places, stored, Joined(own) if own else [])

    def take(self, rows: Sequence[int]) -> StoredColumn:
        return StoredColumn(self.level, tuple(self.pieces[i] for i in rows))

    def fetch(self) -> Sequence[Array]:
        stored = iter(fetch(p for row in self.pieces for p in row if isinstance(p, Stored)))
        rows = [[next(stored) if isinstance(p, Stored) else p for p in row] for row in self.pieces]
        return [row[0] if len(row) == 1 else np.concatenate(row) for row in rows]


def _arrived(
    level: Level, places: Sequence[tuple[bool, ...]], stored: Sequence[Stored], own: Sequence[Array]
) -> StoredColumn:
    """`places`: for each piece of each row, whether it is stored."""
    there, here = iter(stored), iter(own)
    return StoredColumn(level, tuple([tuple([next(there if p else here) for p in row]) for row in places]))


def column_of(level: Level, rows: Sequence[Sequence[float] | Array], dtype: type[np.generic] = np.float32) -> Column:
    """One row each, of this type where they are not stored."""
    kinds = set(map(type, rows))
    if any(issubclass(kind, Stored) for kind in kinds):
        return StoredColumn(level, tuple((_piece(row, dtype),) for row in rows))
    if kinds == {tuple}:
        return ArrayColumn(level, _parts(itertools.chain.from_iterable(rows), list(map(len, rows)), dtype))
    return ArrayColumn(level, tuple(np.asarray(row, dtype) for row in rows))


def sequence_column(prompts: Sequence[tuple[int, ...]], responses: Sequence[Sequence[float]]) -> Column:
    """int32 token ids of prompt and response, one row each."""
    pairs = list(zip(prompts, responses, strict=True))
    if not any(issubclass(kind, Stored) for kind in set(map(type, responses))):
        numbers = itertools.chain.from_iterable(itertools.chain.from_iterable(pairs))
        lengths = [len(prompt) + len(response) for prompt, response in pairs]
        return ArrayColumn("sequence", _parts(numbers, lengths, np.int32))
    pieces = [(np.array(prompt, np.int32), _piece(response, np.int32)) for prompt, response in pairs]
    return StoredColumn("sequence", tuple(pieces))


def _parts(numbers: Iterable[float], lengths: Sequence[int], dtype: type[np.generic]) -> tuple[Array, ...]:
    """Arrays of these lengths, end to end in one: an array made for each row takes several times as long."""
    whole = np.fromiter(numbers, dtype, sum(lengths))
    ends = itertools.accumulate(lengths)
    return tuple(whole[end - length : end] for length, end in zip(lengths, ends, strict=True))


def _piece(row: Sequence[float] | Array, dtype: type[np.generic]) -> Array | Stored:
    return row if isinstance(row, Stored) else np.asarray(row, dtype)
