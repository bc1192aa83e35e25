"""Procedural tasks: rows computed from (seed, index), and the reward functions that go with them."""

from __future__ import annotations

import string
from random import Random
from typing import Any

from asyncrlhf.errors import ConfigError

__all__ = ("Reverse", "SizedReverse", "exact_match", "reverse")


class Reverse:
    """Words to be spelt backwards, without end: row i is the same whenever asked."""

    def __init__(self, length: int, seed: int, alphabet: str) -> None:
        self._length, self._seed, self._alphabet = length, seed, alphabet

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        word = "".join(Random(f"{self._seed}/{index}").choices(self._alphabet, k=self._length))
        return {"prompt": f"{word}>", "answer": word[::-1]}


class SizedReverse(Reverse):
    """The first `rows` of them."""

    def __init__(self, length: int, seed: int, alphabet: str, rows: int) -> None:
        super().__init__(length, seed, alphabet)
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        if not 0 <= index < self._rows:
            raise IndexError(index)
        return super().__getitem__(index)


def reverse(length: int = 5, seed: int = 0, rows: int | None = None, alphabet: str = string.ascii_lowercase) -> Reverse:
    """Spell a word of `length` letters backwards: {"prompt": "qwert>", "answer": "trewq"}.

    `rows` None: as many as are asked for. Raises ConfigError if a word or the task would be empty.
    """
    for name, size in (("length", length), ("rows", 1 if rows is None else rows), ("alphabet", len(alphabet))):
        if size < 1:
            raise ConfigError(f"reverse: {name} = {size} leaves nothing to reverse; use 1 or more")
    return Reverse(length, seed, alphabet) if rows is None else SizedReverse(length, seed, alphabet, rows)


def exact_match(prompt: str, response: str, ground_truth: Any, **columns: Any) -> float:
    """1.0 if the response is the ground truth, white space around either aside; else 0.0."""
    return float(response.strip() == str(ground_truth).strip())
