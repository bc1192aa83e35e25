"""What the simulator is told, and what it finds: durations of one policy's pipeline, and its steady state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from asyncrlhf.flow.ledger import LedgerRules

__all__ = ("Draw", "Pipeline", "Simulated")

Draw = Callable[[Random], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What happens, in seconds. Example: one engine that takes 1 s for every answer, and a trainer that takes 1 s:
    Pipeline(rules=..., engines=1, slots=1, length=lambda r: 1, decode=lambda active: 1.0, train=lambda r, n: 1.0)."""

    rules: LedgerRules
    engines: int = 1
    slots: int = 256
    """Answers that one engine decodes at once."""
    length: Draw
    """Tokens of an answer; rounded, at least 1."""
    decode: Callable[[int], float]
    """Of one token for each of so many active answers."""
    prefill: float = 0.0
    """Of taking up one answer, added to its engine's time."""
    reward: Draw = lambda random: 0.0
    """Latency of scoring a rollout; all at once."""
    score: Sequence[float] = ()
    """Models that read a rollout on devices of their own, one rollout after the other: seconds each takes for one."""
    read: float = 0.0
    """Before a train step, of models that read its batch in turn with it on shared devices, and of their changes of
    turns. Engines stand still, and nothing is trained."""
    train: Callable[[Random, int], float]
    """Of a train step on a batch of so many tokens, whatever has to be read first on the same devices included."""
    publish: float = 0.0
    """From the end of a train step to weights in place, without a change of turns."""
    export: float = 0.0
    """Of it, what the trainer's engines do."""
    load: float = 0.0
    """Of it, what an engine stands still for."""
    overlap: bool = False
    """The next train step goes on beside a publish, once the weights are exported. One publish at a time: the next one,
    and the end of its train step, wait for it. Not where devices are shared."""
    mode: Literal["in_flight", "drain"] = "in_flight"
    shared: bool = False
    """Generation and training take turns on the same devices: engines stand still from the pop to the commit, or, after
    a train step that publishes nothing, until the trainer waits for a batch."""
    to_train: float = 0.0
    """Between turns, of the engines leaving the devices and the trainer coming. Nothing is computed meanwhile."""
    to_generate: float = 0.0
    """The other way; a part of every publish."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What a run came to. Of the steady state, the train steps without their first fifth, are `step`, `median`,
    `tokens_s`, `generate` and `train`; everything else is of the whole run. Shares are of elapsed time, lags in
    versions."""

    step: float
    """Seconds of a train step, on average."""
    median: float
    """The same, in the median."""
    steps: int
    tokens_s: float
    """Trained tokens per second."""
    masked: float
    """Share of popped tokens."""
    dropped: float
    """Share of generated tokens."""
    lag_mean: float
    """Of trained tokens."""
    lag_max: int
    head_lag_mean: float
    """Of rollouts, from the version of their oldest token."""
    head_lag_max: int
    lease: float
    """Mean seconds from grant to ready."""
    generate: float
    """Busy share of the engines."""
    train: float
    wait: float
    """Share that the trainer waits for a batch."""
    reason: str

    @property
    def bound(self) -> float:
        """(g + r) / max(g, r) with the busy seconds of both pools: what overlap can gain at most."""
        return (self.generate + self.train) / max(self.generate, self.train, 1e-12)
