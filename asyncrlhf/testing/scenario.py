"""Scenario: the knobs of a configuration, a workload, and what goes wrong, in one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrlhf.flow.ledger import LedgerRules
from asyncrlhf.testing.runtime import Fault, Timing
from asyncrlhf.testing.sampler import FakeSamplerOptions
from asyncrlhf.testing.trainer import FakeTrainerOptions

__all__ = ("Scenario",)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run in small: the knobs of a configuration under their own names, the workload, and what goes wrong."""

    seed: int = 0
    timing: Timing = field(default_factory=lambda: Timing(verbs={"step": 5.0, "commit": 1.0, "spawn": 2.0}, jitter=0.5))
    prompts_per_step: int = 2
    answers_per_prompt: int = 2
    max_staleness: int = 0
    lookahead: int | None = None
    """None: half of max_staleness, rounded up, as in a configuration."""
    at_deadline: Literal["mask", "wait", "drop"] = "mask"
    order: Literal["ready", "admission"] = "ready"
    train_steps: int | None = None
    last: Literal["train", "drop"] = "train"
    publish_every: int = 1
    publish_mode: Literal["in_flight", "drain"] = "in_flight"
    publish_rolling: bool = False
    publish_overlap: bool = False
    publish_timeout: float = 300.0
    kv: Literal["rebuild", "keep"] = "rebuild"
    byte_limit: int | None = None
    max_attempts: int = 3
    max_filtered: int | None = None
    max_void_steps: int = 10
    min_answers: int | None = None
    lease_timeout: float = 900.0
    wait_timeout: float = 60.0
    stall_timeout: float = 1800.0
    max_restarts: int = 3
    probe_gap: float = 1e-6
    """As `publish.probe_gap`."""

    rows: int | None = 12
    """Rows of the data set; None: without end, which needs train_steps."""
    epochs: int = 1
    unusable: float = 0.0
    """Share of rows that cannot be encoded."""
    counted: bool = True
    """Whether the ledger knows from the start how many rows there are."""

    together: Sequence[tuple[tuple[str, str], ...]] = ()
    """Sets of devices whose groups take turns: (group, lane) of each; see control/turns.py."""
    offload: bool = True
    """Whether who leaves takes its memory along."""
    shadows: int = 0
    """Copies of the critic that give its values, a group named "shadow_critic"; 0: it gives them itself."""
    replicas: int = 2
    sampler: FakeSamplerOptions = FakeSamplerOptions()
    trainer: FakeTrainerOptions = FakeTrainerOptions()
    max_tokens: int = 1000
    optional: tuple[str, ...] = ()
    """Groups to build for fields that may be None."""
    reward: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of FakeReward."""
    reward_model: bool = False
    """Score with an engine (FakeScorer, which gives the same rewards) in the place of FakeReward."""
    faults: Sequence[Fault] = ()
    zombies: bool = False
    """Engines that were closed work on, and what they say still arrives."""

    checkpoint_every: int = 0
    """Train steps between two checkpoints, kept in memory; 0: none but that of the start."""
    payloads: bool = True
    evaluation_every: int = 0
    evaluation_prompts: int = 2
    evaluation_max_hold: float = 60.0

    @property
    def ahead(self) -> int:
        """D."""
        return (self.max_staleness + 1) // 2 if self.lookahead is None else self.lookahead

    @property
    def capacity(self) -> int:
        """Leases that may be live: B (D + 1)."""
        return self.prompts_per_step * (self.ahead + 1)

    def rules(self) -> LedgerRules:
        return LedgerRules(
            prompts_per_step=self.prompts_per_step,
            max_staleness=self.max_staleness,
            lookahead=self.ahead,
            publish_every=self.publish_every,
            byte_limit=self.byte_limit,
            at_deadline=self.at_deadline,
            order=self.order,
            answers_per_prompt=self.answers_per_prompt,
            max_attempts=self.max_attempts,
            max_filtered=self.max_filtered,
            max_void_steps=self.max_void_steps,
            last=self.last,
            train_steps=self.train_steps,
        )
