"""Short requests, and a reward that every answer earns some of: how positive its words are."""

from __future__ import annotations

from functools import cache
from typing import Any

__all__ = ("positive", "requests")

SUBJECTS = (
    "the weather", "a train ride", "my neighbour", "the new phone", "a dinner at home", "the football match",
    "our school", "a long meeting", "the city at night", "an old car", "the concert", "my first job",
    "a walk in the rain", "the library", "a birthday", "the dentist", "a film about space", "the garden",
    "a crowded bus", "the holiday", "a cup of tea", "the exam", "my cousin's dog", "the hospital", "a broken window",
    "the market", "an online order", "the hotel room", "a letter", "the swimming pool", "a power cut", "the museum",
)  # fmt: skip
FORMS = ("Write one sentence about {}.", "Tell me in one sentence about {}.", "Describe {} in a single sentence.")


def requests(*, held_out: bool = False) -> list[dict[str, Any]]:
    """Chats of one message; every eighth subject is held out."""
    subjects = [s for i, s in enumerate(SUBJECTS) if (i % 8 == 7) == held_out]
    return [{"prompt": [{"role": "user", "content": form.format(s)}]} for s in subjects for form in FORMS]


def positive(prompt: str, response: str, ground_truth: Any, **columns: Any) -> float:
    """From -1 to 1, by the words of a lexicon."""
    return float(_lexicon().polarity_scores(response)["compound"])


@cache
def _lexicon() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()
