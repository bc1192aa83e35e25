"""PromptStream: a data set encoded for one run, as the gate reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrlhf.data.prompts import PromptEncoder, Tokenizer
from asyncrlhf.data.rows import Row
from asyncrlhf.data.source import Dataset
from asyncrlhf.errors import SampleError
from asyncrlhf.messages import Prompt

__all__ = ("PromptStream",)


class PromptStream:
    """Rows by uid as Prompts; with columns for them they carry their own answer, and a worse one, and the end token."""

    def __init__(
        self,
        dataset: Dataset,
        encoder: PromptEncoder,
        tokenizer: Tokenizer,
        *,
        response: str | None,
        rejected: str | None,
        eos: int | None,
        warn: Callable[[str], object] | None = None,
    ) -> None:
        """`warn`: told once, about the first text with something in it that the tokenizer has no token for."""
        self._dataset, self._encoder, self._tokenizer = dataset, encoder, tokenizer
        self._response, self._rejected, self._eos = response, rejected, eos
        self._unknown, self._warn = getattr(tokenizer, "unk_token_id", None), warn

    def has(self, uid: int) -> bool:
        return self._dataset.has(uid)

    def prompt(self, uid: int, attempt: int, version: int) -> Prompt:
        row = self._dataset.row(uid)
        encoded = self._encoder.encode(uid, row)
        self._look_for_unknown(uid, encoded.text, encoded.token_ids)
        return Prompt(
            uid=uid,
            epoch=self._dataset.epoch(uid),
            attempt=attempt,
            version=version,
            token_ids=encoded.token_ids,
            text=encoded.text,
            ground_truth=encoded.ground_truth,
            target_token_ids=self._answer(uid, row, self._response),
            rejected_token_ids=self._answer(uid, row, self._rejected),
            columns=encoded.columns,
        )

    def release(self, uid: int) -> None:
        self._dataset.release(uid)

    def _answer(self, uid: int, row: Row, column: str | None) -> tuple[int, ...]:
        if column is None:
            return ()
        text = row.columns.get(column)
        if not isinstance(text, str) or not text:
            raise SampleError(f"prompt {uid}: column {column!r} holds {text!r}, not the text of an answer")
        end = () if self._eos is None else (self._eos,)
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        self._look_for_unknown(uid, text, token_ids)
        return (*token_ids, *end)

    def _look_for_unknown(self, uid: int, text: str, token_ids: Sequence[int]) -> None:
        if self._warn is None or self._unknown is None:
            return
        if count := sum(token == self._unknown for token in token_ids):
            self._warn(
                f"prompt {uid}: the tokenizer has no token for {count} of the {len(token_ids)} parts of {text[:60]!r}; "
                "the model cannot tell them apart, here and wherever else they appear. Does the data fit the model?"
            )
            self._warn = None
