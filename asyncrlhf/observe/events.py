"""What happened, as frozen tagged Structs: one event, one line of events.jsonl.

Producers leave `t` alone; the log fills it in. A number that is not finite is written as null and reads back as None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal, cast

import msgspec

__all__ = (
    "AnyEvent",
    "Checkpointed",
    "EngineBusy",
    "Answered",
    "Evaluated",
    "EvaluationStarted",
    "Event",
    "Fenced",
    "Granted",
    "GroupShape",
    "Measured",
    "Number",
    "OptimizerStep",
    "Popped",
    "Published",
    "Restarted",
    "RunEnded",
    "RunStarted",
    "Sampled",
    "Scored",
    "Settled",
    "StepEnded",
    "TurnTaken",
    "WaitsSeen",
    "Warned",
    "decode_event",
    "encode_json",
    "finite",
)

Number = float | None
"""A float that may not be finite: NaN and infinities are null in every file and None when read back."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """Base of every event. `t` is in seconds since the run's start, never falls, and goes on after a resume."""

    t: float = 0.0


class GroupShape(msgspec.Struct, frozen=True):
    """What a model group is for ("rollout", "policy", "critic", ...) and how many engines it has."""

    role: str
    ranks: int


class RunStarted(Event, frozen=True):
    """The run begins, or goes on from a checkpoint taken at train step `resumed_from`."""

    resumed_from: int | None
    algorithm: str
    seed: int
    max_staleness: int
    lookahead: int
    prompts_per_step: int
    answers_per_prompt: int
    train_steps: int | None
    groups: Mapping[str, GroupShape] = {}
    """By name. A group left out is judged by what it does, and has the ranks that were seen to work."""

    @property
    def is_sampled(self) -> bool:
        """Whether answers are sampled: not so in supervised training."""
        return not self.groups or any(group.role == "rollout" for group in self.groups.values())

    @property
    def is_scored(self) -> bool:
        """Whether answers earn rewards: not so in supervised training."""
        return not self.groups or any(group.role == "reward" for group in self.groups.values())


class Granted(Event, frozen=True):
    """A lease: prompt `uid` may be answered, for the `attempt`-th time, while `version` is published."""

    uid: int
    attempt: int
    version: int


class Sampled(Event, frozen=True):
    """All answers to a prompt are there: `token_count` model tokens after `seconds`."""

    uid: int
    attempt: int
    token_count: int
    oldest_version: int
    newest_version: int
    seconds: float


class Scored(Event, frozen=True):
    """The answers to a prompt have their rewards after `seconds` of scoring."""

    uid: int
    attempt: int
    rewards: tuple[Number, ...]
    seconds: float


class Settled(Event, frozen=True):
    """A lease is over. `state`: "filtered", "failed", "consumed" or "dropped(reason)", e.g. "dropped(expired)"."""

    uid: int
    attempt: int
    state: str
    token_count: int
    error: str = ""


class Popped(Event, frozen=True):
    """Train step `train_step` has its batch, after waiting `waited` seconds.

    Model tokens of the batch = trained_by_lag + masked_by_lag (over age) + masked_untrainable, disjoint.
    """

    train_step: int
    uids: tuple[int, ...]
    reward_mean: Number
    rewards_std: Number
    waited: float
    trained_by_lag: Mapping[int, int]
    """Unmasked model tokens by token lag, in versions."""
    masked_by_lag: Mapping[int, int]
    """Model tokens masked because their lag is over the bound."""
    masked_untrainable: int
    """Model tokens masked because their rollout is not trainable."""
    head_lags: tuple[int, ...]
    """One per rollout, as queue_lags."""
    queue_lags: tuple[int, ...]
    response_lengths: tuple[int, ...]
    """One per sample, in tokens."""
    masked_by_position: tuple[int, ...]
    """The tokens of masked_by_lag in ten deciles of relative position in the response."""
    masked_by_length: tuple[int, ...]
    """The tokens of masked_by_lag in ten deciles of response length within the batch."""


class OptimizerStep(Event, frozen=True):
    """One optimizer step of `group`; `applied` False left everything untouched, for `reason`."""

    group: str
    train_step: int
    optimizer_step: int
    applied: bool
    reason: str
    metrics: Mapping[str, Number]
    seconds: float


class Measured(Event, frozen=True):
    """Numbers beside those of an optimizer step: what a transform of `group` measured of a batch, or, with the group
    "state", what the algorithm's state says at the end of the step."""

    group: str
    train_step: int
    metrics: Mapping[str, Number]


class StepEnded(Event, frozen=True):
    """Train step `train_step` is over, `seconds` after the previous one ended (or after the start).

    `tokens`: generated, trained, masked, dropped, open; cumulative. `leases`: how many in each state, terminal states
    cumulative, e.g. {"running": 3, "ready": 1, "consumed": 40}.
    """

    train_step: int
    void: bool
    reason: str
    policy_version: int
    published_version: int
    publish_count: int
    tokens: Mapping[str, int]
    leases: Mapping[str, int]
    seconds: float


class TurnTaken(Event, frozen=True):
    """`group` computes on shared `devices` now: after `seconds` in which others left them and it came."""

    devices: str
    group: str
    seconds: float


class Published(Event, frozen=True):
    """Every serving engine has committed `version`, after `seconds`. For `exposed` of them the trainer could not go on:
    it waited for engines, or its own exported the weights while it had a batch."""

    version: int
    changed: bool
    byte_count: int
    seconds: float
    exposed: float
    fenced: tuple[str, ...]
    probe_gap: float | None = None
    """Largest difference between an engine and its trainer on fixed tokens, in nats; None: not asked."""


class EngineBusy(Event, frozen=True):
    """An engine computed from `start` to `end`, both in seconds since the run's start."""

    group: str
    rank: int
    start: float
    end: float
    work: str
    token_count: int


class Fenced(Event, frozen=True):
    """An engine was taken out of service; results of `incarnation` are refused from now on."""

    group: str
    rank: int
    incarnation: int
    reason: str


class Restarted(Event, frozen=True):
    """An engine is back as `incarnation`."""

    group: str
    rank: int
    incarnation: int


class Checkpointed(Event, frozen=True):
    """A checkpoint at train step `train_step` is complete at `path`."""

    train_step: int
    path: str
    seconds: float


class EvaluationStarted(Event, frozen=True):
    """An evaluation begins after `train_step`, pinned to `version`."""

    train_step: int
    version: int


class Answered(msgspec.Struct, frozen=True):
    """One answer to a held-out prompt, and what it scored: the reward as "reward", and what every judge says."""

    prompt: str
    response: str
    scores: Mapping[str, Number]


class Evaluated(Event, frozen=True):
    """An evaluation is over. `label` says which weights answered: "v12", or "mixed(v12..v13)"."""

    train_step: int
    label: str
    reward_mean: Number
    count: int
    token_count: int
    seconds: float
    judges: Mapping[str, Number] = {}
    """Mean score of every judge."""
    samples: tuple[Answered, ...] = ()
    """The first few answers."""


class Warned(Event, frozen=True):
    """Something a user should know that does not end the run."""

    message: str


class WaitsSeen(Event, frozen=True):
    """Who waited for whom when SIGUSR1 asked, a line each."""

    lines: tuple[str, ...]


class RunEnded(Event, frozen=True):
    """The last event of a run. `reason` is the class name of what ended it, `message` says it in words."""

    status: Literal["completed", "stopped", "failed"]
    reason: str
    message: str
    tokens: Mapping[str, int] = {}
    """Final counts as in StepEnded; empty: those of the last StepEnded."""


AnyEvent = (
    RunStarted
    | Granted
    | Sampled
    | Scored
    | Settled
    | Popped
    | OptimizerStep
    | Measured
    | StepEnded
    | Published
    | EngineBusy
    | Fenced
    | Restarted
    | Checkpointed
    | EvaluationStarted
    | Evaluated
    | WaitsSeen
    | Warned
    | TurnTaken
    | RunEnded
)


def finite(value: Number) -> Number:
    """The value as a float, or None if it is not finite."""
    return float(value) if value is not None and math.isfinite(value) else None


def _plain(value: object) -> float:
    """Scalars of array libraries are numbers like any other."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{type(value).__qualname__} has no place in an event")


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode_json(value: object) -> bytes:
    """One line of JSON without its newline; NaN and infinities become null, and halves of surrogate pairs, which have
    no UTF-8, escapes. Raises TypeError on foreign types."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return _encoder.encode(_without_surrogates(msgspec.to_builtins(value)))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {_without_surrogates(key): _without_surrogates(item) for key, item in items}
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in cast("list[Any]", value)]
    return value


def decode_event(line: bytes) -> AnyEvent:
    """The event of one line. Raises msgspec.DecodeError, or its subclass msgspec.ValidationError."""
    return _decoder.decode(line)
