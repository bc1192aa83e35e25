"""FakeSampler: a GenerateEngine without a model, whose answers are functions of their seed, weights and prefix."""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from msgspec.structs import replace

from asyncrlhf.abc import GenerateEngine
from asyncrlhf.errors import PublishRefused
from asyncrlhf.messages import (
    EngineEvent,
    Finished,
    GenerateRequest,
    Message,
    Progress,
    Rejected,
    Sample,
    Segment,
    WeightHandle,
    import_object,
)
from asyncrlhf.testing.trainer import weights_checksum, weights_logprobs

__all__ = ("FakeSampler", "FakeSamplerOptions", "fake_logprobs")

LOWEST_TOKEN = 8
"""Sampled tokens start here; ids below serve as stop tokens."""


class FakeSamplerOptions(Message, frozen=True, kw_only=True):
    """How long answers are, and which are refused."""

    slots: int = 4
    """Answers decoded at once; the others wait."""
    length: float = 6.0
    """Median length of an answer, in tokens with the stop token."""
    sigma: float = 0.0
    """Log-normal spread of lengths; 0: all equal."""
    rejected: float = 0.0
    """Share of answers that the engine refuses, by their seed."""
    vocabulary: int = 64
    max_sequence_tokens: int = 1_000_000
    deaf_from: int | None = None
    """From this version on a commit changes the number and not the weights."""
    version: int = -1
    """Version of the weights it starts with; -1: none, so it refuses everything until the first commit."""


def fake_logprobs(checksum: int, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[float, ...]:
    """Log-prob of each token under the weights of this checksum, given the prompt and the tokens before it."""
    key, found = _prefix(checksum, prompt), list[float]()
    for token in tokens:
        key = _extend(key, token)
        found.append(_logprob(key))
    return tuple(found)


@dataclass(slots=True)
class _Answer:
    request: GenerateRequest
    length: int
    key: int
    tokens: list[int]
    logprobs: list[float]
    segments: list[Segment]
    open: int = 0
    """Tokens of the run that has no segment yet."""
    unreported: int = 0
    kv_mixed: bool = field(default=False)


class FakeSampler(GenerateEngine):
    """Samples one token per running answer and step; the same request under the same weights gives the same answer."""

    Options = FakeSamplerOptions

    def __init__(self, options: FakeSamplerOptions) -> None:
        self.options = options
        self.version = options.version
        self.checksum = 0
        self.token_count = 0
        """Tokens sampled since it was built, reported or not."""
        self._running: dict[str, _Answer] = {}
        self._waiting: deque[GenerateRequest] = deque()
        self._unsent: list[EngineEvent] = []
        self._prepared: WeightHandle | None = None

    @property
    def has_work(self) -> bool:
        return not self.asleep and bool(self._running or self._waiting or self._unsent)

    def add(self, requests: Sequence[GenerateRequest]) -> Sequence[EngineEvent]:
        events: list[EngineEvent] = []
        for request in requests:
            if reason := self._why_not(request):
                events.append(Rejected(request_id=request.request_id, reason=reason))
            elif request.tokens and _is_complete(request):
                events.append(_finished(request))
            else:
                self._waiting.append(request)
        return events

    def step(self) -> Sequence[EngineEvent]:
        if self.asleep:
            return []
        events, self._unsent = self._unsent, []
        for answer in list(self._running.values()):
            self._sample(answer)
            self._finish_if_complete(answer, events)
        while self._waiting and len(self._running) < self.options.slots:
            answer = self._admit(self._waiting.popleft())
            self._sample(answer)
            self._report(answer, events)
            self._finish_if_complete(answer, events)
        return events

    def abort(self, request_ids: Sequence[str]) -> Sequence[GenerateRequest]:
        wanted = frozenset(request_ids)
        given_back = [request for request in self._waiting if request.request_id in wanted]
        self._waiting = deque(request for request in self._waiting if request.request_id not in wanted)
        for request_id in [name for name in self._running if name in wanted]:
            answer = self._running.pop(request_id)
            self._report(answer, self._unsent)
            given_back.append(self._so_far(answer))
        return given_back

    def prepare(self, weights: WeightHandle) -> None:
        self._require("prepare", asleep=False)
        self._prepared = None
        if weights.changed:
            _require_bytes(weights)
        elif weights.checksum != self.checksum:
            raise PublishRefused(f"version {weights.version} is said to be unchanged, and this engine holds others")
        self._prepared = weights

    def commit(self, version: int, kv: str) -> Sequence[EngineEvent]:
        self._require("commit", asleep=False)
        if self._prepared is None or self._prepared.version != version:
            raise ValueError(f"commit({version}) without prepare({version})")
        events: list[EngineEvent] = []
        for answer in self._running.values():
            self._report(answer, events)
            self._close_run(answer)
        if self._prepared.checksum != self.checksum and not self._is_deaf(version):
            self.checksum = self._prepared.checksum
            for answer in self._running.values():
                answer.kv_mixed = kv == "keep"
                if kv == "rebuild":
                    answer.key = _prefix(self.checksum, answer.request.prompt_token_ids, answer.tokens)
        self.version, self._prepared = version, None
        return events

    def probe(self, token_ids: Sequence[int]) -> Sequence[float]:
        self._require("probe", asleep=False)
        return weights_logprobs(self.checksum, token_ids)

    def sleep(self) -> Sequence[EngineEvent]:
        events, self._unsent = self._unsent, []
        for answer in self._running.values():
            self._report(answer, events)
        self._waiting.extendleft(reversed([self._so_far(answer) for answer in self._running.values()]))
        self._running.clear()
        self._prepared, self.asleep = None, True
        return events

    def wake(self, weights: WeightHandle) -> None:
        self._require("wake", asleep=True)
        _require_bytes(weights)
        if not self._is_deaf(weights.version):
            self.checksum = weights.checksum
        self.version, self.asleep = weights.version, False

    def _is_deaf(self, version: int) -> bool:
        return self.options.deaf_from is not None and version >= self.options.deaf_from

    def _why_not(self, request: GenerateRequest) -> str:
        prompt, options = request.prompt_token_ids, self.options
        if self.version < 0:
            return "no weights were committed yet"
        if request.request_id in self._running or any(x.request_id == request.request_id for x in self._waiting):
            return f"request {request.request_id!r} is running already"
        if not prompt:
            return "the prompt has no token"
        if len(prompt) + request.max_tokens > options.max_sequence_tokens:
            return f"{len(prompt)} + {request.max_tokens} tokens do not fit {options.max_sequence_tokens} places"
        if not 0 <= min(prompt) <= max(prompt) < options.vocabulary:
            return f"a token is outside the vocabulary of {options.vocabulary}"
        if Random(request.seed ^ 1).random() < options.rejected:
            return "refused by the fault plan"
        return ""

    def _admit(self, request: GenerateRequest) -> _Answer:
        spread = Random(request.seed).lognormvariate(0.0, self.options.sigma) if self.options.sigma else 1.0
        answer = _Answer(
            request=request,
            length=max(1, round(self.options.length * spread)),
            key=_prefix(self.checksum, request.prompt_token_ids, request.tokens),
            tokens=list(request.tokens),
            logprobs=list(request.logprobs),
            segments=list(request.segments),
        )
        self._running[request.request_id] = answer
        return answer

    def _sample(self, answer: _Answer) -> None:
        request, place = answer.request, len(answer.tokens)
        if place + 1 == answer.length and request.stop_token_ids:
            token = request.stop_token_ids[0]
        else:
            token = _extend(answer.key, request.seed + place) % (self.options.vocabulary - LOWEST_TOKEN) + LOWEST_TOKEN
        answer.key = _extend(answer.key, token)
        answer.tokens.append(token)
        answer.logprobs.append(_logprob(answer.key))
        answer.open += 1
        answer.unreported += 1
        self.token_count += 1

    def _report(self, answer: _Answer, events: list[EngineEvent]) -> None:
        if answer.unreported:
            request_id = answer.request.request_id
            events.append(Progress(request_id=request_id, version=self.version, token_count=answer.unreported))
            answer.unreported = 0

    def _close_run(self, answer: _Answer) -> None:
        if answer.open:
            answer.segments.append(Segment(version=self.version, token_count=answer.open, kv_mixed=answer.kv_mixed))
            answer.open = 0

    def _so_far(self, answer: _Answer) -> GenerateRequest:
        self._close_run(answer)
        return replace(
            answer.request,
            tokens=tuple(answer.tokens),
            logprobs=tuple(answer.logprobs),
            segments=tuple(answer.segments),
        )

    def _finish_if_complete(self, answer: _Answer, events: list[EngineEvent]) -> None:
        if answer.tokens[-1] in answer.request.stop_token_ids or len(answer.tokens) >= answer.request.max_tokens:
            self._report(answer, events)
            del self._running[answer.request.request_id]
            events.append(_finished(self._so_far(answer)))


def _require_bytes(weights: WeightHandle) -> None:
    arrived = weights_checksum(dict(import_object(weights.transport)().receive(weights.payload)))
    if arrived != weights.checksum:
        raise PublishRefused(
            f"version {weights.version} was announced with checksum {weights.checksum}, and the bytes that arrived "
            f"have {arrived}"
        )


def _is_complete(request: GenerateRequest) -> bool:
    return request.tokens[-1] in request.stop_token_ids or len(request.tokens) >= request.max_tokens


def _finished(request: GenerateRequest) -> Finished:
    stopped = request.tokens[-1] in request.stop_token_ids
    sample = Sample(
        token_ids=request.tokens,
        logprobs=request.logprobs,
        segments=request.segments,
        finish_reason="stop" if stopped else "length",
    )
    return Finished(request_id=request.request_id, sample=sample)


def _prefix(checksum: int, prompt: Sequence[int], tokens: Sequence[int] = ()) -> int:
    return zlib.crc32(struct.pack(f"<{len(prompt) + len(tokens)}I", *prompt, *tokens), checksum & 0xFFFFFFFF)


def _extend(key: int, token: int) -> int:
    return zlib.crc32(struct.pack("<I", token & 0xFFFFFFFF), key)


def _logprob(key: int) -> float:
    """A multiple of 2^-10 between -4 and 0, so that float32 holds it exactly."""
    return -(key % 4093 + 1) / 1024
