"""A plan as tables of a run's configuration: pools, which group is in which, and how its ranks share a model."""

from __future__ import annotations

import math
from typing import Any

import tomli_w

from asyncrlhf.errors import ConfigError
from asyncrlhf.placement.layouts import Layout
from asyncrlhf.placement.plan import Candidate, Outcome, Problem
from asyncrlhf.placement.setplan import Member, SetPlan

__all__ = ("as_toml",)

UTILIZATION = 0.9
"""Part of a GPU that a vLLM engine takes which has it to itself."""
SHADOW = "shadow_"
"""Begins the name of a critic's copy."""


def as_toml(outcome: Outcome) -> str:
    """The best placement that the groups of a run can take, and in comments why better ones are not it. Raises
    ConfigError if there is none among those found."""
    refused: dict[str, str] = {}
    for candidate in (*outcome.candidates, *outcome.best_of.values()):
        if obstacle := _obstacle(candidate):
            refused[f"# not {candidate.strategy.label}, {candidate.step:.1f} s: {obstacle}"] = obstacle
        else:
            title = f"# {candidate.strategy.label}: {candidate.step:.1f} s per train step, as planned"
            return "\n".join([title, *refused, tomli_w.dumps(_tables(outcome.problem, candidate))])
    raise ConfigError(
        f"none of {len(refused)} placements can be written as tables: " + "; ".join(dict.fromkeys(refused.values()))
    )


def _obstacle(candidate: Candidate) -> str:
    """What a configuration has no keys for; "": nothing."""
    for part in candidate.sets:
        for member in part.members:
            name, layout, shape = member.unit.name, part.layouts[member.unit.name], member.unit.model.shape
            if name.startswith(SHADOW) and layout.model > 1:
                return f"{name} has {layout.model} devices to a copy, and copies are whole"
            if member.unit.generates:
                if layout.pp > 1:
                    return f"{name} has pipeline_parallel = {layout.pp}, and its engines take tensor_parallel only"
                if layout.tp > 1 and len(part.members) > 1:
                    return (
                        f"engines of {name} with tensor_parallel = {layout.tp} share no GPUs; set "
                        f"layouts.{name}.tensor_parallel = 1"
                    )
            elif shape.kv_heads % layout.tp:
                return f"{name} has {shape.kv_heads} key/value heads for tensor_parallel = {layout.tp}"
            elif shape.layers % layout.pp:
                return f"{name} has {shape.layers} layers for pipeline_parallel = {layout.pp}"
    return ""


def _tables(problem: Problem, candidate: Candidate) -> dict[str, Any]:
    pools: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    for i, part in enumerate(candidate.sets):
        names = [member.unit.name for member in part.members]
        pool = "generation" if names == ["rollout"] else "training" if "policy" in names else f"pool{i}"
        sharing = _engines_per_device(part)
        pools[pool] = {"devices": part.devices} | ({"engines_per_device": sharing} if sharing > 1 else {})
        for member in part.members:
            groups[member.unit.name] = {"pool": pool, **_sizes(problem, part, member, sharing)}
    work = problem.work
    sets = [[member.unit.name for member in part.members] for part in candidate.sets]
    shared = {"placement": {"sets": sets}} if any(len(part) > 1 for part in sets) else {}
    return {"max_staleness": work.max_staleness, "lookahead": work.ahead, **shared, "pools": pools, "groups": groups}


def _engines_per_device(part: SetPlan) -> int:
    """Where several units share devices each of their processes is an engine."""
    if len(part.members) == 1:
        return 1
    return math.ceil(sum(part.layouts[member.unit.name].devices for member in part.members) / part.devices)


def _sizes(problem: Problem, part: SetPlan, member: Member, sharing: int) -> dict[str, Any]:
    layout = part.layouts[member.unit.name]
    if member.unit.name.startswith(SHADOW):
        return {"follows": member.unit.name.removeprefix(SHADOW), "replicas": layout.dp}
    if member.unit.generates:
        found: dict[str, Any] = {"backend": "vllm", "replicas": layout.dp, "tensor_parallel": layout.tp}
        return found | ({"gpu_memory_utilization": round(UTILIZATION / sharing, 2)} if sharing > 1 else {})
    if layout.devices == 1:
        return {"backend": "torch"}
    if member.unit.trains and problem.work.optimizer_shards == 3 and layout.devices == layout.dp and layout.ep == 1:
        return {"backend": "torch", "data_parallel": layout.dp, "sharding": "full"}
    return {"backend": "megatron", **_megatron(layout)}


def _megatron(layout: Layout) -> dict[str, Any]:
    return {
        "tensor_parallel": layout.tp,
        "pipeline_parallel": layout.pp,
        "data_parallel": layout.dp,
        "expert_parallel": layout.ep,
        "sequence_parallel": layout.tp > 1,
    }
