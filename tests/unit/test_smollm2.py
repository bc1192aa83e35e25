"""The demo on a pre-trained model: its data and its reward. The model itself is fetched by hand."""

from __future__ import annotations

import pytest

from configs.smollm2 import sentiment


def test_openings_are_chats_and_held_out_ones_are_others() -> None:
    train, held_out = sentiment.openings(), sentiment.openings(held_out=True)
    assert len(held_out) == sentiment.HELD_OUT
    assert len(train) > 10_000
    (message,) = train[0]["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith("Go on with this film review, in one sentence: ")
    texts = {row["prompt"][0]["content"] for row in train}
    assert texts.isdisjoint(row["prompt"][0]["content"] for row in held_out)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("A wonderful, moving film.", "A film."),
        ("A film.", "A dull, terrible film."),
        ("A great, wonderful, lovely film.", "great great great great great"),
    ],
)
def test_kind_words_are_worth_more_and_repeated_ones_less(better: str, worse: str) -> None:
    assert 1.0 >= sentiment.positive("", better) > sentiment.positive("", worse) >= -1.0
    assert sentiment.positive("", "") == 0.0
