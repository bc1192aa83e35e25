"""The table that says which groups share devices, and whether they take turns there. Torch-free."""

from __future__ import annotations

from itertools import chain
from typing import Literal

from msgspec import field

from asyncrlhf.config.bounds import Count, Name, Table
from asyncrlhf.errors import ConfigError

__all__ = ("Placement", "StrategyName")

StrategyName = Literal[
    "colocate",
    "flattening",
    "interleaving",
    "separation",
    "standalone",
    "split",
    "async",
    "alternating",
    "auto",
]


class Placement(Table, frozen=True, kw_only=True):
    """Sets of groups that share devices: at most one of `strategy` and `sets`. With neither groups are where their
    pools put them, and nobody takes turns."""

    strategy: StrategyName | None = None
    """"colocate" or "flattening": all models on all devices, those of judges (`evaluation.judges`) among the reward
    models. "interleaving": the same, but models that read answers
    divide the devices among them and read at once. "separation": each model on its own devices, and the critic's values
    come from a copy. "standalone": each model on its own devices, the policy beside its rollout engines. "split":
    rollout, policy and reference | critic and reward models. "async": rollout | all others. "alternating": as colocate,
    and there are as many rollout engines as ranks of the policy. "auto": the planner's best."""
    sets: list[list[Name]] = field(default_factory=list[list[Name]])
    """Groups that share devices, set by set, in the place of a strategy. Example: [["rollout", "policy"], ["critic"]].
    A group with a model that is in none has a set of its own, as `check` says. Judges with a model
    (`evaluation.judges.<name>`) are such groups, too."""
    turns: Literal["auto", "all", "none"] = "auto"
    """Where one group of a set computes at a time. "auto": where a rollout group is with others; "all": in
    every set; "none": nowhere, so all of them have to fit."""
    offload: Literal["auto", "always", "never"] = "auto"
    """Whether a group that has had its turn takes its memory off the devices (weights, optimizer state, KV cache); the
    same for all sets. "auto": where a set that takes turns is on GPUs; on CPUs it would come back to the same memory.
    "never": all groups have to fit at once, as with turns = "none", and still compute one at a time."""
    devices: Count = 0
    """GPUs, or engines on CPUs, in all. Where all models share them it is also the size of groups that say none
    (replicas, data_parallel); 0: as the groups say. With "auto" what the plan is for; 0: this machine's."""
    node: Name | None = None
    """Type of the nodes, for "auto": as in the cluster of a plan ("H100", "CPU", ...); required with GPUs."""
    shared_shadow: bool = False
    """With "separation": the critic's copy is on the rollout engines' devices."""

    def __post_init__(self) -> None:
        if self.strategy is not None and self.sets:
            raise ConfigError(f'strategy = "{self.strategy}" and sets = {self.sets} both say who shares; set one')
        if self.shared_shadow and self.strategy != "separation":
            raise ConfigError(
                f'shared_shadow = true and strategy = "{self.strategy}": only "separation" has a shadow; set that, or '
                "remove the first"
            )
        if self.strategy is None and not self.sets:
            ignored = 'turns = "all"' if self.turns == "all" else f"devices = {self.devices}" if self.devices else ""
            if ignored:
                raise ConfigError(
                    f"{ignored}, and neither strategy nor sets says which groups share devices; set one, or remove the "
                    "first"
                )
        if self.offload != "auto" and (self.turns == "none" or (self.strategy is None and not self.sets)):
            why = 'turns = "none"' if self.turns == "none" else "neither strategy nor sets"
            raise ConfigError(
                f'offload = "{self.offload}" is for groups that take turns, and with {why} none do; remove it, or set '
                'turns = "all" and what shares devices'
            )
        if [] in self.sets:
            raise ConfigError(f"sets = {self.sets} has a set without groups; remove it")
        if self.node is not None and self.strategy != "auto":
            raise ConfigError(f'node = "{self.node}" is for strategy = "auto", and it is "{self.strategy}"; remove it')
        seen: set[str] = set()
        for name in chain.from_iterable(self.sets):
            if name in seen:
                raise ConfigError(f'sets = {self.sets} has "{name}" twice; a group is in one set')
            seen.add(name)
