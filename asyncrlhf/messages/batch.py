"""TrainBatch: the lengths of its rows, and a handle per column. Splitting never touches a token.

A row is one sample. Columns come at three levels: "sequence" (prompt and response tokens), "token" (response tokens)
and "sample" (one number a row). Here the handles are the arrays themselves; a runtime whose data lives elsewhere (an
object store) brings its own Column, and the rows travel when an engine calls `fetch`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ("Array", "ArrayColumn", "Column", "Joined", "Level", "RunColumn", "Statistics", "TrainBatch")

Array = NDArray[np.generic]
Level = Literal["sequence", "token", "sample"]


class Column(Protocol):
    """Handle of one column: knows its level, gives rows away without moving them, and fetches them on demand."""

    @property
    def level(self) -> Level: ...

    def take(self, rows: Sequence[int]) -> Column: ...

    def fetch(self) -> Sequence[Array]:
        """One 1-D array per row: int32 token ids and versions, float32 otherwise."""
        ...


class Joined:
    """Many 1-D arrays of one type on their way to another process: they travel as one, and arrive as a list again."""

    def __init__(self, rows: Sequence[Array]) -> None:
        self._rows = rows

    def __reduce__(self) -> tuple[Any, ...]:
        return _split, (np.concatenate(self._rows), [len(row) for row in self._rows])


def _split(flat: Array, lengths: Sequence[int]) -> list[Array]:
    ends = itertools.accumulate(lengths)
    return [flat[end - length : end] for length, end in zip(lengths, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class ArrayColumn:
    """A column held in this process."""

    level: Level
    rows: tuple[Array, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.level, Joined(self.rows) if self.rows else [])

    def take(self, rows: Sequence[int]) -> ArrayColumn:
        return ArrayColumn(self.level, tuple(self.rows[i] for i in rows))

    def fetch(self) -> Sequence[Array]:
        return self.rows


@dataclass(frozen=True, slots=True)
class RunColumn:
    """A column of few different values, as runs: they become arrays where they are fetched.

    Example: a row of 5 tokens, the first 3 of version 7: values (7, 8), counts (3, 2).
    """

    level: Level
    values: tuple[tuple[float, ...], ...]
    counts: tuple[tuple[int, ...], ...]
    dtype: str = "float32"

    def take(self, rows: Sequence[int]) -> RunColumn:
        values, counts = (tuple(runs[i] for i in rows) for runs in (self.values, self.counts))
        return replace(self, values=values, counts=counts)

    def fetch(self) -> Sequence[Array]:
        runs = zip(self.values, self.counts, strict=True)
        return [np.repeat(np.array(values, self.dtype), np.array(counts, np.int64)) for values, counts in runs]


def _arrived(level: Level, rows: Sequence[Array]) -> ArrayColumn:
    return ArrayColumn(level, tuple(rows))


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Of some numbers. `a + b` are those of all of them together (Chan, Golub and LeVeque 1979)."""

    count: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    """The root of the mean squared distance from the mean."""

    def __add__(self, other: Statistics) -> Statistics:
        count = self.count + other.count
        share = other.count / count if count else 0.0
        apart = other.mean - self.mean
        variance = (1 - share) * self.deviation**2 + share * other.deviation**2 + share * (1 - share) * apart**2
        return Statistics(count=count, mean=self.mean + share * apart, deviation=math.sqrt(variance))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Rows to train on in train step `train_step`.

    Always present: `token_ids` (sequence), `behaviour_logprobs`, `mask` (1.0 where the token may enter a gradient),
    `versions` (token; -1: written by the data set), and where there are any `rewards` (sample). Before a loss sees it:
    `anchor_logprobs` and `weight` (token) from the off-policy correction. Algorithms and transforms add their own.

    Example: two rows, prompts of 6 tokens, responses of 3 and 5: prompt_lengths (6, 6), response_lengths (3, 5);
    columns["token_ids"].fetch() gives arrays of 9 and 11, columns["mask"].fetch() arrays of 3 and 5.
    """

    train_step: int
    prompt_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    unmasked: tuple[int, ...]
    """Unmasked response tokens of each row; 0 rows may be skipped unless a loss needs them."""
    rollouts: tuple[int, ...]
    """Which rollout of the batch each row belongs to, ascending."""
    columns: Mapping[str, Column]
    rows: tuple[int, ...] = ()
    """Position of each row in the popped batch; filled in when left out."""
    several_steps: bool = False
    """Part of a plan of several optimizer steps: even a step on all rows is not the only one of its train step."""
    origin: TrainBatch | None = field(default=None, repr=False, compare=False)
    """The popped batch that these rows come from; None for that batch itself, and for what is sent to an engine."""

    def __post_init__(self) -> None:
        if not self.rows:
            object.__setattr__(self, "rows", tuple(range(len(self))))

    def __len__(self) -> int:
        return len(self.response_lengths)

    @property
    def token_count(self) -> int:
        """Response tokens, masked ones included."""
        return sum(self.response_lengths)

    @property
    def popped(self) -> TrainBatch:
        """The popped batch that these rows come from."""
        return self if self.origin is None else self.origin

    def statistics(self, name: str) -> Statistics:
        """Of a column with one number a row."""
        numbers = np.concatenate(self.columns[name].fetch()).astype(np.float64)
        return Statistics(count=len(numbers), mean=float(numbers.mean()), deviation=float(numbers.std()))

    def require_whole_rollouts(self) -> None:
        """Raises ValueError if a rollout has rows in this batch and others elsewhere."""
        here, popped = Counter(self.rollouts), Counter(self.popped.rollouts)
        for rollout, count in here.items():
            if count != popped[rollout]:
                raise ValueError(
                    f"rollout {rollout} has {popped[rollout]} rows, of which {count} are in this mini-batch; a loss "
                    'with level "rollout" needs them together: step on the whole batch, and set prompts_per_step lower '
                    "for more optimizer steps"
                )

    def take(self, rows: Sequence[int]) -> TrainBatch:
        """The batch of these rows, in this order."""

        def pick(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(values[i] for i in rows)

        return replace(
            self,
            prompt_lengths=pick(self.prompt_lengths),
            response_lengths=pick(self.response_lengths),
            unmasked=pick(self.unmasked),
            rollouts=pick(self.rollouts),
            columns={name: column.take(rows) for name, column in self.columns.items()},
            rows=pick(self.rows),
            origin=self.popped,
        )

    def with_columns(self, **columns: Column) -> TrainBatch:
        """The same rows with columns added or replaced."""
        return replace(self, columns={**self.columns, **columns}, origin=self.popped)

    def without_origin(self) -> TrainBatch:
        """The same rows on their own, to be sent to an engine."""
        return replace(self, origin=None)

    def minibatches(self, count: int, *, epochs: int = 1, seed: int = 0) -> list[TrainBatch]:
        """`count` parts of nearly equal row count per epoch, shuffled anew each epoch by (seed, train_step, epoch).

        Parts without a row are left out. `minibatches(1)` is the batch itself. Raises ValueError below 1. Whatever
        `take`, `with_columns` or a group's `apply` makes of a part stays a part of the popped batch.
        """
        if count < 1 or epochs < 1:
            raise ValueError(f"minibatches = {count}, epochs = {epochs}; both must be 1 or more")
        if count == epochs == 1:
            return [self]
        orders: list[list[int]] = []
        for epoch in range(epochs):
            order = list(range(len(self)))
            Random(f"{seed}/{self.train_step}/{epoch}").shuffle(order)
            size, extra = divmod(len(order), count)
            start = 0
            for part in range(count):
                end = start + size + (part < extra)
                if end > start:
                    orders.append(order[start:end])
                start = end
        planned = replace(self, several_steps=self.several_steps or len(orders) > 1, origin=self.popped)
        return [planned.take(order) for order in orders]
