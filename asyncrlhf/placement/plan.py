"""What a search gives back: candidates with their timing, and reasons against the others. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrlhf.placement.cluster import Cluster
from asyncrlhf.placement.coefficients import Coefficients
from asyncrlhf.placement.models import ModelSpec
from asyncrlhf.placement.setplan import SetPlan
from asyncrlhf.placement.strategies import Strategy
from asyncrlhf.placement.workload import Workload

__all__ = ("Candidate", "Outcome", "Problem", "Refused", "Sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything that a plan depends on."""

    cluster: Cluster
    models: Mapping[str, ModelSpec]
    work: Workload
    fit: Coefficients
    strategies: tuple[str, ...] = ("auto",)
    fixed: Mapping[str, tuple[int, int, int]]
    """unit -> (t, p, devices of its set or 0) that the user insists on."""
    most_pp: int = 0
    """Pipeline stages of a trained or read model at most; 0: no limit."""
    by_price: bool = False
    """Rank by cost of a train step instead of its length."""
    top: int = 5


@dataclass(frozen=True, slots=True)
class Sync:
    """New weights on their way from training to generation, and from the critic to its shadow."""

    seconds: float = 0.0
    exposed: float = 0.0
    """The part that somebody waits for."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement that fits. `sets` in the order of the strategy; their devices are cut from the pools in `starts`."""

    strategy: Strategy
    sets: tuple[SetPlan, ...]
    sync: Sync
    step: float
    """Seconds of a train step, steady state."""
    alone: float
    """The same stages, one after the other."""
    bottleneck: str
    price: float
    """Of a train step, in the currency of the node types; 0: unknown."""

    @property
    def devices(self) -> int:
        return sum(part.devices for part in self.sets)

    def starts(self) -> list[int]:
        """First device of every set within its pool: largest blocks first, so that all are aligned."""
        starts = [0] * len(self.sets)
        used: dict[int, int] = {}
        for i in sorted(range(len(self.sets)), key=lambda i: -self.sets[i].devices):
            pool = self.sets[i].members[0].block.pool
            starts[i] = used.get(pool, 0)
            used[pool] = starts[i] + self.sets[i].devices
        return starts


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a strategy has no place among the candidates."""

    strategy: str
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """`candidates`: best first. `best_of`: the best of every strategy that has one. `examined`: placements compared."""

    problem: Problem
    candidates: tuple[Candidate, ...]
    best_of: Mapping[str, Candidate]
    refused: tuple[Refused, ...]
    examined: int
    exhaustive: bool
