"""Data sets behind the gate: rows addressed by uid = epoch * rows + position, so that a resume finds the same ones."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from bisect import bisect_right
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from random import Random
from typing import Any, Protocol, cast

from asyncrlhf.config.load import import_named
from asyncrlhf.config.schema import Data
from asyncrlhf.data.rows import Report, Row, read_jsonl
from asyncrlhf.errors import AsyncRLHFError, ConfigError, DataError

__all__ = ("Dataset", "EndlessRows", "FiniteRows", "RowStream", "open_dataset")

Columns = Mapping[str, Any]

KEPT_ORDERS = 3
"""Epochs whose order is remembered: leases of the epoch before may still be open when one begins."""


class Dataset(Protocol):
    """Rows by uid. One owner, one thread; nothing here waits for anybody."""

    @property
    def count(self) -> int | None:
        """Rows over all epochs; None: endless, or not known yet."""
        ...

    @property
    def report(self) -> Report:
        """What was found on opening."""
        ...

    def has(self, uid: int) -> bool:
        """Whether there is such a row."""
        ...

    def row(self, uid: int) -> Row:
        """The row, again and again until `release(uid)`. Fresh uids of a stream are asked for in ascending order."""
        ...

    def epoch(self, uid: int) -> int:
        """Which pass over the rows this uid belongs to, from 0."""
        ...

    def release(self, uid: int) -> None:
        """The row will not be asked for again."""
        ...

    def resume(self, cursor: int, needed: Collection[int]) -> None:
        """Go on at `cursor`, the next fresh uid; of those below it only `needed` are asked for again. Call it first.
        Raises DataError if the data set is shorter than what had been read of it."""
        ...


class Indexed(Protocol):
    """What a factory may return: rows by position, the same whenever asked."""

    def __getitem__(self, index: int, /) -> Columns: ...


class FiniteRows:
    """A known number of rows, passed over `epochs` times (None: without end), shuffled by (seed, epoch)."""

    def __init__(
        self, rows: Indexed, row_count: int, report: Report, *, epochs: int | None, shuffle: bool, seed: int
    ) -> None:
        self.report = report
        self.count = None if epochs is None else epochs * row_count
        self._rows, self._row_count = rows, row_count
        self._shuffle, self._seed = shuffle, seed
        self._orders: dict[int, list[int]] = {}

    def has(self, uid: int) -> bool:
        return self.count is None or uid < self.count

    def row(self, uid: int) -> Row:
        epoch, position = divmod(uid, self._row_count)
        place = self._order(epoch)[position] if self._shuffle else position
        with _told(f"{self.report.source}: row {place}"):
            return Row(self._rows[place])

    def epoch(self, uid: int) -> int:
        return uid // self._row_count

    def release(self, uid: int) -> None:
        pass

    def resume(self, cursor: int, needed: Collection[int]) -> None:
        if self.count is not None and cursor > self.count:
            raise _shorter(self.report.source, self.count, cursor)

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            while len(self._orders) >= KEPT_ORDERS:
                del self._orders[next(iter(self._orders))]
            order = list(range(self._row_count))
            Random(f"{self._seed}/{epoch}").shuffle(order)
            self._orders[epoch] = order
        return self._orders[epoch]


class EndlessRows:
    """Rows by position without end, in their own order; all of epoch 0."""

    count = None

    def __init__(self, rows: Indexed, report: Report) -> None:
        self.report = report
        self._rows = rows

    def has(self, uid: int) -> bool:
        return True

    def row(self, uid: int) -> Row:
        try:
            with _told(f"{self.report.source}: row {uid}", IndexError):
                return Row(self._rows[uid])
        except IndexError:
            raise DataError(f"{self.report.source} has no row {uid}: rows that end need a __len__") from None

    def epoch(self, uid: int) -> int:
        return 0

    def release(self, uid: int) -> None:
        pass

    def resume(self, cursor: int, needed: Collection[int]) -> None:
        pass


class RowStream:
    """Rows of unknown number, in their own order; opened anew for each of `epochs` passes (None: without end).

    A row is held from the moment it is looked at until it is released. An epoch without a row is the end.
    """

    def __init__(self, open_rows: Callable[[], Iterable[Columns]], report: Report, epochs: int | None) -> None:
        self.report = report
        self._open, self._epochs = open_rows, epochs
        self._rows: Iterator[Columns] = iter(open_rows())
        self._starts = [0]
        self._held: dict[int, Row] = {}
        self._next = 0
        self._ended = False

    @property
    def count(self) -> int | None:
        return self._next if self._ended else None

    def has(self, uid: int) -> bool:
        while self._next <= uid and self._pull():
            pass
        return uid < self._next

    def row(self, uid: int) -> Row:
        if not self.has(uid) or uid not in self._held:
            state = "was released" if uid < self._next else "does not exist"
            raise DataError(f"{self.report.source}: row {uid} {state}; {self._next} have been read")
        return self._held[uid]

    def epoch(self, uid: int) -> int:
        return bisect_right(self._starts, uid) - 1

    def release(self, uid: int) -> None:
        self._held.pop(uid, None)

    def resume(self, cursor: int, needed: Collection[int]) -> None:
        keep = frozenset(needed)
        for uid in [held for held in self._held if held < cursor and held not in keep]:
            del self._held[uid]
        while self._next < cursor and self._pull():
            if self._next - 1 not in keep:
                del self._held[self._next - 1]
        if self._next < cursor:
            raise _shorter(self.report.source, self._next, cursor)

    def _pull(self) -> bool:
        """Hold one more row; False at the end."""
        while not self._ended:
            for columns in self._rows:
                self._held[self._next] = Row(columns)
                self._next += 1
                return True
            if self._starts[-1] == self._next or len(self._starts) == self._epochs:
                self._ended = True
            else:
                self._starts.append(self._next)
                self._rows = iter(self._open())
        return False


def open_dataset(data: Data, seed: int, where: str = "data") -> Dataset:
    """The data set that the table `where` describes. Raises ConfigError or DataError.

    What a factory returns is read by position if it has `__len__` and `__getitem__`, in turn if it can be iterated,
    and by position without end if it has only `__getitem__`.
    """
    if data.source is None:
        rows, report = read_jsonl(str(data.path), data, where)
        return FiniteRows(rows, len(rows), report, epochs=data.epochs, shuffle=data.shuffle, seed=seed)
    name = f'{where}.source = "{data.source}"'
    factory = _factory(data.source, data.options, where)
    with _told(name):
        made: Any = factory()
    kind = cast(type[Any], type(made))
    plain = isinstance(made, Mapping | str | bytes)
    if not plain and hasattr(kind, "__len__") and hasattr(kind, "__getitem__"):
        with _told(name):
            row_count = len(made)
        if not row_count:
            raise DataError(f"{name} gives no row")
        report = Report(data.source, row_count)
        return FiniteRows(made, row_count, report, epochs=data.epochs, shuffle=data.shuffle, seed=seed)
    if not plain and hasattr(kind, "__iter__"):
        stream = RowStream(_once_then(made, factory, name), Report(data.source, None), data.epochs)
        if not stream.has(0):
            raise DataError(f"{name} gives no row")
        return stream
    if not plain and hasattr(kind, "__getitem__"):
        if data.epochs not in (None, 1):
            raise ConfigError(
                f"{where}.epochs = {data.epochs}, but {name} has rows without end; remove epochs and set train_steps"
            )
        return EndlessRows(made, Report(data.source, None))
    raise ConfigError(f"{name} gives a {kind.__name__}, not rows; return a list of dicts, or an iterator of them")


def _factory(source: str, options: Mapping[str, Any], where: str) -> Callable[[], Any]:
    made = import_named(f"{where}.source", source)
    if not callable(made):
        raise ConfigError(f'{where}.source = "{source}" is a {type(made).__name__}; name a function that returns rows')
    try:
        inspect.signature(made).bind(**options)
    except TypeError as problem:
        raise ConfigError(f"{where}.options do not fit {source}{inspect.signature(made)}: {problem}") from None
    return lambda: made(**options)


def _once_then(
    first: Iterable[Columns], factory: Callable[[], Iterable[Columns]], name: str
) -> Callable[[], Iterable[Columns]]:
    """Opens `first`, and what the factory makes anew from the second time on."""
    opened = False

    def open_rows() -> Iterable[Columns]:
        nonlocal opened
        again, opened = opened, True
        with _told(name):
            yield from factory() if again else first

    return open_rows


@contextlib.contextmanager
def _told(name: str, *passed: type[Exception]) -> Generator[None]:
    """What somebody else's code raises inside, but for `passed`, becomes a DataError that says from where."""
    try:
        yield
    except (AsyncRLHFError, *passed):
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).strip().partition("\n")[0]
        raise DataError(
            f"{name} raised {type(error).__name__}{text and f': {text}'} ({place.filename}, line {place.lineno})"
        ) from error


def _shorter(source: str, row_count: int, cursor: int) -> DataError:
    return DataError(
        f"{source} has {row_count} rows, but {cursor} had been read before: it has changed; restore it, or start anew "
        'with resume = "never"'
    )
