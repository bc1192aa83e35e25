"""What groups and engines say to each other. Engines see requests and answer with events; neither knows a lease."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from asyncrlhf.messages.samples import Message, Sample, Segment

__all__ = (
    "Busy",
    "EngineEvent",
    "Failed",
    "Finished",
    "GenerateRequest",
    "Probe",
    "Progress",
    "Rejected",
    "ScoreRequest",
    "StepResult",
    "WeightHandle",
)


class GenerateRequest(Message, frozen=True, kw_only=True):
    """One answer to sample.

    `tokens`, `logprobs` and `segments` are what an earlier engine had sampled already (abort and continue, a fenced
    engine); the engine appends to them and samples at most `max_tokens - len(tokens)` more.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    """0 means greedy; log-probs are then those of temperature 1."""
    stop_token_ids: tuple[int, ...]
    seed: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    segments: tuple[Segment, ...] = ()


class ScoreRequest(Message, frozen=True, kw_only=True):
    """All answers to one prompt, as text, for a reward function."""

    uid: int
    prompt: str
    responses: tuple[str, ...]
    ground_truth: Any = None
    columns: Mapping[str, Any] = {}
    """The other columns of the data row."""


class Progress(Message, frozen=True, kw_only=True, tag=True):
    """`token_count` further tokens of a request were sampled by `version`; sent at its first token, at a swap of
    weights and before Finished, so that every token is reported exactly once."""

    request_id: str
    version: int
    token_count: int


class Finished(Message, frozen=True, kw_only=True, tag=True):
    """A request is complete."""

    request_id: str
    sample: Sample


class Rejected(Message, frozen=True, kw_only=True, tag=True):
    """A request cannot be answered (empty prompt, prompt too long, token out of vocabulary); the engine goes on."""

    request_id: str
    reason: str


class Busy(Message, frozen=True, kw_only=True, tag=True):
    """The engine computed from `start` to `end` (seconds of time.perf_counter)."""

    start: float
    end: float
    work: str
    """What it did: "generate", "step", "logprobs", "export", ..."""
    token_count: int = 0


class Failed(Message, frozen=True, kw_only=True, tag=True):
    """The engine itself is broken and answers no more; nothing follows this event."""

    reason: str
    lost: bool = False
    """Its process has ended: another one may do better."""


EngineEvent = Progress | Finished | Rejected | Busy | Failed


class Probe(Message, frozen=True, kw_only=True):
    """What a model says with some weights. Example: Probe(token_ids=(5, 9, 2), logprobs=(-3.1, -0.2))."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-prob of every token but the first, at temperature 1."""


class WeightHandle(Message, frozen=True, kw_only=True):
    """Weights of one version, announced; the bytes move through the transport named here, never through a message."""

    version: int
    checksum: int
    """Of all parameter bytes in name order; equal checksums mean equal weights."""
    changed: bool
    """False: the same bytes as the version published before; engines only take the new number."""
    byte_count: int
    transport: str
    """Import path "module:Class" of the WeightTransfer that reads `payload`."""
    payload: Mapping[str, Any]
    probe: Probe | None = None
    """Whoever has committed these weights is asked for these log-probs: bytes that arrive need not be in use."""


class StepResult(Message, frozen=True, kw_only=True):
    """What one optimizer step did.

    `applied` False means weights, optimizer and schedule are untouched, and `reason` says why: "not_finite" (gradient
    norm was inf or nan) or "empty" (no unmasked token).
    """

    applied: bool
    reason: Literal["", "not_finite", "empty"] = ""
    metrics: Mapping[str, float] = {}
    """Means over unmasked tokens unless the name says otherwise: loss, entropy, grad_norm, learning_rate,
    kl_behaviour, ratio_max, logprob_gap, and the loss's own measures."""
