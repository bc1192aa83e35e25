"""Models in their duties, and the order of one train step: generate, prepare (read and score), train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrlhf.placement.models import ModelSpec

__all__ = ("Unit", "units_of")


@dataclass(frozen=True, slots=True)
class Unit:
    """A model and what it does in a train step. Example: Unit("rollout", policy, generates=True)."""

    name: str
    model: ModelSpec
    generates: bool = False
    reads: bool = False
    """One forward pass over the batch."""
    trains: bool = False


def units_of(models: Mapping[str, ModelSpec], *, shadows: bool = False, recompute: bool = False) -> dict[str, Unit]:
    """`rollout` and one unit per model. `shadows`: the critic's values come from a copy of its own, `shadow_critic`
    (separation); `recompute`: the policy reads the batch before it trains."""
    units: dict[str, Unit] = {}
    for name, model in models.items():
        if model.role == "policy":
            units["rollout"] = Unit("rollout", model, generates=True)
            units[name] = Unit(name, model, reads=recompute, trains=True)
        elif model.role == "critic":
            units[name] = Unit(name, model, reads=not shadows, trains=True)
            if shadows:
                units["shadow_critic"] = Unit("shadow_critic", model, reads=True)
        else:
            units[name] = Unit(name, model, reads=True)
    return units
