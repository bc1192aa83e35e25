"""How a column is packed into lots."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from asyncrlhf.messages import Array, Stored
from asyncrlhf.runtimes.lots import MOST_LOTS, Shelf
from asyncrlhf.runtimes.parcel import opened, packed

FLAT = np.arange(4000, dtype=np.float32)


def rows_of(shelf: Shelf, rows: list[Array]) -> tuple[list[Stored], list[Array]]:
    """What the shelf makes of them, and the array of each lot."""
    found, lots = shelf.result(rows)
    return found, [shelf.take([lot.number])[0] for lot in lots]


@pytest.mark.parametrize(
    "rows",
    [
        np.split(FLAT, 400),
        np.split(FLAT, [0, 7, 7, 2000]),
        np.split(FLAT, 400)[::-1],
        np.split(FLAT[::2], 100),
        np.split(FLAT[::-1], 100),
        [row.copy() for row in np.split(FLAT, 40)],
        list(FLAT.reshape(40, 100)),
        np.split(torch.arange(10002.0).view(-1, 2)[:, 1].numpy(), [5000]),
        [FLAT[:100], FLAT[100:200].view(np.int32).view(np.float32), FLAT[200:201]],
    ],
    ids=["parts", "empty", "reversed", "strided", "backwards", "apart", "matrix", "column", "views"],
)
def test_a_column_is_packed_whole_into_few_lots(rows: list[Array]) -> None:
    found, arrays = rows_of(Shelf(100), rows)
    assert len(arrays) <= MOST_LOTS
    at = dict(zip(dict.fromkeys(id(s.lot) for s in found), arrays, strict=True))
    for row, stored in zip(rows, found, strict=True):
        assert at[id(stored.lot)][stored.start : stored.start + len(stored)].tolist() == row.tolist()
        assert stored.total == pytest.approx(math.fsum(row.tolist()), rel=1e-9)


def test_rows_that_lie_one_after_another_are_not_copied() -> None:
    _, arrays = rows_of(Shelf(100), np.split(FLAT, 400))
    assert all(np.shares_memory(array, FLAT) for array in arrays)


def test_totals_are_exact_enough_for_differences_of_long_sums() -> None:
    """Also where float32 would round every partial sum in the same direction."""
    numbers = [np.full(33334, -0.3, np.float32), -np.random.default_rng(0).exponential(0.5, 20000).astype(np.float32)]
    found, _ = rows_of(Shelf(0), numbers)
    assert [row.total for row in found] == [pytest.approx(math.fsum(row.tolist()), abs=1e-8) for row in numbers]


def test_a_column_refers_to_the_lots_that_arrive_with_it() -> None:
    """So that whoever claims those has claimed its rows."""
    found, lots = Shelf(100).result({"values": np.split(FLAT, 400), "returns": np.split(FLAT, 40)})
    message = packed((found, lots))
    assert isinstance(message, bytes)
    columns, arrived = opened(message)
    assert [lot.number for lot in arrived] == [lot.number for lot in lots]
    assert {id(row.lot) for rows in columns.values() for row in rows} == set(map(id, arrived))
    for name, rows in found.items():
        assert fields(columns[name]) == fields(rows)


def fields(rows: list[Stored]) -> list[tuple[float, ...]]:
    return [(row.lot.number, row.part, row.start, len(row), row.total) for row in rows]


def test_a_lot_is_larger_than_what_goes_inline() -> None:
    _, arrays = rows_of(Shelf(8000), np.split(FLAT, 400))
    assert [array.nbytes > 8000 for array in arrays] == [True] * (len(arrays) - 1) + [False]
    assert rows_of(Shelf(16000), np.split(FLAT, 400))[1] == []
