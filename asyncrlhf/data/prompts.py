"""From a row to a prompt: text, token ids, ground truth and the columns a reward function may ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2 import TemplateError

from asyncrlhf.config.schema import Data
from asyncrlhf.data.rows import Row, problem_of
from asyncrlhf.errors import ConfigError, DataError, SampleError

__all__ = ("EncodedPrompt", "PromptEncoder", "Tokenizer")


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    bos_token_id: int | None
    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]: ...

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """Example: EncodedPrompt(text="qwert>", token_ids=(17, 23, 5, 18, 20, 63), ground_truth="trewq", columns={})."""

    text: str
    """What the model reads: the chat template is applied."""
    token_ids: tuple[int, ...]
    ground_truth: Any
    columns: Mapping[str, Any]
    """Every column but the prompt and the ground truth; data.response stays in any case."""


class PromptEncoder:
    """Turns rows into prompts as [data] says.

    Text goes through the tokenizer with its special tokens (a leading BOS where the model has one); a chat template
    writes its own. An empty prompt becomes a BOS, or else an EOS, so that its answer follows something. Raises
    ConfigError when a chat template is wanted and the tokenizer has none.
    """

    def __init__(self, tokenizer: Tokenizer, data: Data) -> None:
        if data.chat and getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError(
                "data.chat = true, but the tokenizer has no chat template; use an instruction-tuned model or remove it"
            )
        self._tokenizer, self._data = tokenizer, data
        self._taken = {data.prompt, data.ground_truth} - {data.response}

    def encode(self, uid: int, row: Row) -> EncodedPrompt:
        """Raises SampleError, naming `uid`, for a row that lacks a column, gives no token or too many of them, and
        DataError for an empty prompt that nothing can stand for."""
        data = self._data
        if problem := problem_of(row.columns, data):
            raise SampleError(f"prompt {uid}: {problem}")
        text = self._text(uid, row.columns[data.prompt])
        token_ids = tuple(self._tokenizer.encode(text, add_special_tokens=not data.chat))
        if not text and not token_ids:
            token_ids = (self._start(uid),)
        if not token_ids:
            raise SampleError(f"prompt {uid}: {text!r} has no token")
        if data.max_prompt_tokens is not None and len(token_ids) > data.max_prompt_tokens:
            raise SampleError(
                f"prompt {uid} has {len(token_ids)} tokens, above data.max_prompt_tokens = {data.max_prompt_tokens}; "
                "shorten it or raise the limit"
            )
        return EncodedPrompt(
            text=text,
            token_ids=token_ids,
            ground_truth=row.columns.get(data.ground_truth),
            columns={name: value for name, value in row.columns.items() if name not in self._taken},
        )

    def _start(self, uid: int) -> int:
        """What stands for an empty prompt."""
        for token in (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id):
            if token is not None:
                return token
        raise DataError(
            f"prompt {uid} is empty, and the tokenizer has neither a BOS nor an EOS token to stand for it; give column "
            f"{self._data.prompt!r} some text in every row"
        )

    def _text(self, uid: int, prompt: str | list[Mapping[str, Any]]) -> str:
        if not self._data.chat:
            return str(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as problem:
            raise SampleError(f"prompt {uid}: the chat template refuses its messages: {problem}") from problem
