"""What flows from stage to stage: Prompt -> Rollout -> Experience. Each arrow adds what was not known before it.

All are frozen: a stage that knows more makes a new message. Token ids and log-probs have one entry per token: they are
tuples or, where the runtime stores long answers, sequences that are fetched when they are read (stored.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

__all__ = ("Experience", "Message", "PerSample", "PerToken", "Prompt", "Rollout", "Sample", "Segment")

PerSample = tuple[float, ...]
"""A column of an Experience with one number per answer, in the order of `rollout.samples`."""
PerToken = tuple[Sequence[float], ...]
"""A column of an Experience with one number per response token of every answer."""


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of everything that crosses a queue: immutable, comparable, one msgpack encoding.

    Only its count of references frees it: the collector, which would look at every answer of thousands of live leases
    again and again, does not look for cycles through messages, unless their class says `gc=True`.
    """


class Prompt(Message, frozen=True, kw_only=True):
    """One question with its lease.

    Example: Prompt(uid=70, epoch=1, attempt=1, version=3, token_ids=(12, 7, 44), text="ab>", ground_truth="ba")
    is row 6 of a data set of 64 rows in its second epoch, granted while the published version was 3.
    """

    uid: int
    """Place in the data stream: epoch * rows + position. With `epoch` it names the prompt in every file."""
    epoch: int
    attempt: int
    """1 for the first lease of this prompt; late results of an older attempt are refused."""
    version: int
    """Published version when the lease was granted."""
    token_ids: tuple[int, ...]
    text: str
    ground_truth: Any = None
    target_token_ids: tuple[int, ...] = ()
    """The data set's own answer with the end token, where `data.response` names one; empty otherwise."""
    rejected_token_ids: tuple[int, ...] = ()
    """A worse answer with the end token, where `data.rejected` names one; empty otherwise."""
    columns: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """The other columns of the data row, passed to the reward function by name."""


class Segment(Message, frozen=True, kw_only=True):
    """A run of consecutive response tokens with one origin. Example: Segment(version=4, token_count=17)."""

    version: int
    """Policy version whose forward pass sampled these tokens (w_i of the staleness contract)."""
    token_count: int
    source: Literal["model", "environment", "data"] = "model"
    """Who wrote the tokens: the policy, an environment (never trained on), or the data set (supervised training)."""
    kv_mixed: bool = False
    """The KV cache behind these tokens holds entries of older versions (`publish.kv = "keep"`)."""


class Sample(Message, frozen=True, kw_only=True):
    """One answer: T response tokens, the log-prob each was sampled with, and who sampled it.

    Example: Sample(token_ids=(5, 9, 0), logprobs=(-0.1, -1.2, -0.3), segments=(Segment(version=4, token_count=3),),
    finish_reason="stop"). Log-probs are natural logarithms at the sampling temperature over the full vocabulary.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    segments: tuple[Segment, ...]
    finish_reason: Literal["stop", "length"]

    def __post_init__(self) -> None:
        if isinstance(self.token_ids, list) or isinstance(self.logprobs, list):  # from a file
            msgspec.structs.force_setattr(self, "token_ids", tuple(self.token_ids))
            msgspec.structs.force_setattr(self, "logprobs", tuple(self.logprobs))
        counted = sum(segment.token_count for segment in self.segments)
        if not len(self.token_ids) == len(self.logprobs) == counted:
            raise ValueError(
                f"a sample has {len(self.token_ids)} tokens, {len(self.logprobs)} log-probs and segments of {counted} "
                "tokens in all; the three must be equal"
            )

    def versions(self) -> tuple[int, ...]:
        """w_i of every response token (environment tokens carry the version current when they were inserted)."""
        return tuple(s.version for s in self.segments for _ in range(s.token_count))


class Rollout(Message, frozen=True, kw_only=True):
    """All answers to one prompt (what GRPO calls a group)."""

    prompt: Prompt
    samples: tuple[Sample, ...]

    @classmethod
    def from_data(cls, prompt: Prompt) -> Rollout:
        """The data set's own answer as a rollout of one sample. Raises ValueError if the row has none."""
        return cls._of_data(prompt, response=prompt.target_token_ids)

    @classmethod
    def pair_from_data(cls, prompt: Prompt) -> Rollout:
        """The data set's own answer and its rejected one, in this order. Raises ValueError if the row lacks either."""
        return cls._of_data(prompt, response=prompt.target_token_ids, rejected=prompt.rejected_token_ids)

    @classmethod
    def _of_data(cls, prompt: Prompt, **answers: tuple[int, ...]) -> Rollout:
        samples: list[Sample] = []
        for key, tokens in answers.items():
            if not tokens:
                raise ValueError(f"uid {prompt.uid} has no answer of its own; name its column in data.{key}")
            segment = Segment(version=prompt.version, token_count=len(tokens), source="data")
            logprobs = (0.0,) * len(tokens)
            samples.append(Sample(token_ids=tokens, logprobs=logprobs, segments=(segment,), finish_reason="stop"))
        return cls(prompt=prompt, samples=tuple(samples))


class Experience(Message, frozen=True, kw_only=True):
    """A scored rollout, ready to train on. An algorithm subclasses it with exactly the columns it fills.

    Every further field annotated `PerSample` or `PerToken` becomes a column of the TrainBatch under its own name;
    a column that is None in every experience of a batch is left out.

    A class with `dict=True` (for cached_property) or with fields that may hold exceptions, which refer to much, says
    `gc=True`: the collector frees no others that something within refers back to. A cached value never should.
    """

    rollout: Rollout
    rewards: PerSample | None
    """One per answer; None where nothing is scored (supervised training)."""
    trainable: bool = True
    """False: keeps its place in the batch, but its tokens are masked (GRPO's zero-variance rollouts)."""

    @property
    def prompt(self) -> Prompt:
        return self.rollout.prompt
