"""Micro-batches: every row is in one of them, in places of its own, and budgets are kept."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrlhf.backends.torch.layout import Cut, Part

rows_strategy = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 7)), min_size=1, max_size=30)
PROMPTS = (1, 3, 3, 12)
"""Lengths of the four prompts that rows choose from."""


def places_of(part: Part, prompts: np.ndarray, answers: np.ndarray) -> dict[tuple[int, int], int]:
    """(bin, place) -> row that has a token of its own there; fails if two rows want the same place."""
    taken: dict[tuple[int, int], int] = {}
    for i, row in enumerate(part.rows.tolist()):
        count = answers[row] - 1 + (prompts[row] if part.brings_prompt[i] else 0)
        for place in range(int(part.start[i]), int(part.start[i] + count)):
            key = (int(part.bin[i]), place)
            assert key not in taken
            assert key[0] < part.bins
            assert place < part.width
            taken[key] = row
    return taken


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@given(
    rows=rows_strategy, tokens=st.integers(1, 60), row_limit=st.integers(0, 4), pairs=st.sampled_from([0.0, 50, 1e9])
)
def test_every_row_is_laid_out_once(
    layout: str, rows: list[tuple[int, int]], tokens: int, row_limit: int, pairs: float
) -> None:
    keys = [prompt for prompt, _ in rows]
    prompts = np.asarray([PROMPTS[key] for key in keys])
    answers = np.asarray([answer for _, answer in rows])
    chosen = np.flatnonzero(np.arange(len(rows)) % 5 != 4)
    cut = Cut(tokens=tokens, rows=row_limit, layout=layout, pairs_per_token=pairs)  # type: ignore[arg-type]
    parts = cut.plan(prompts, answers, chosen, keys)
    assert sorted(row for part in parts for row in part.rows.tolist()) == chosen.tolist()
    for part in parts:
        taken = places_of(part, prompts, answers)
        units: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, row in enumerate(part.rows.tolist()):
            units[int(part.bin[i]), int(part.prompt_start[i])].append(i)
            assert row in chosen
        for members in units.values():
            assert [bool(part.brings_prompt[i]) for i in members] == [True] + [False] * (len(members) - 1)
            assert len({keys[part.rows[i]] for i in members}) == 1
        if row_limit:
            assert len(part.rows) <= row_limit
        elif len(units) > 1:
            assert (part.bins * part.width if layout == "padded" else len(taken)) <= tokens
        if layout == "padded":
            assert part.alone
        if layout == "packed":
            assert part.bins == 1
            assert len(taken) == part.width


def test_rows_of_similar_length_go_together() -> None:
    prompts, answers = np.full(6, 2), np.asarray([9, 1, 8, 2, 9, 1])
    parts = Cut(tokens=30).plan(prompts, answers, np.arange(6))
    assert [sorted(part.rows.tolist()) for part in parts] == [[1, 3, 5], [0, 2, 4]]


def test_prompts_are_shared_only_where_that_is_less_work() -> None:
    keys = ["same"] * 4
    long_prompts = Cut(tokens=10_000, layout="shared", pairs_per_token=100)
    part = long_prompts.plan(np.full(4, 500), np.full(4, 10), np.arange(4), keys)[0]
    assert (part.bins, part.width) == (1, 500 + 4 * 9)
    long_answers = Cut(tokens=10_000, layout="shared", pairs_per_token=100)
    part = long_answers.plan(np.full(4, 5), np.full(4, 500), np.arange(4), keys)[0]
    assert part.alone


def test_short_rows_share_bins() -> None:
    answers = np.asarray([20, 3, 4, 5, 6])
    part = Cut(tokens=100, layout="shared").plan(np.full(5, 2), answers, np.arange(5), list(range(5)))[0]
    assert part.width == 21
    assert part.bins == 3


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@given(rows=rows_strategy, tokens=st.integers(1, 60), row_limit=st.integers(0, 4))
def test_rows_that_belong_together_stay_together(
    layout: str, rows: list[tuple[int, int]], tokens: int, row_limit: int
) -> None:
    """And groups that fit still share a micro-batch."""
    together = np.asarray([key for key, _ in rows])
    prompts, answers = np.asarray(PROMPTS)[together], np.asarray([answer for _, answer in rows])
    cut = Cut(tokens=tokens, rows=row_limit, layout=layout)  # type: ignore[arg-type]
    parts = cut.plan(prompts, answers, np.arange(len(rows)), together.tolist(), together)
    found = [sorted(set(together[part.rows].tolist())) for part in parts]
    assert sorted(key for keys in found for key in keys) == sorted(set(together.tolist()))
    for part, keys in zip(parts, found, strict=True):
        taken = places_of(part, prompts, answers)
        if len(keys) > 1 and row_limit:
            assert len(part.rows) <= row_limit
        elif len(keys) > 1:
            assert (part.bins * part.width if layout == "padded" else len(taken)) <= tokens
