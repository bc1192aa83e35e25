"""`placement.strategy = "auto"`: the planner's best placement among those that the groups of a run can take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec.structs import replace

from asyncrlhf.config.groups import Compute, MegatronCritic, RolloutTable, Trained
from asyncrlhf.config.placement import Placement
from asyncrlhf.config.schema import Config
from asyncrlhf.errors import ConfigError
from asyncrlhf.placement.cluster import Cluster, Pool
from asyncrlhf.placement.coefficients import Coefficients
from asyncrlhf.placement.earlier import shape_in
from asyncrlhf.placement.models import ModelSpec, Role
from asyncrlhf.placement.plan import Candidate, Problem
from asyncrlhf.placement.search import search
from asyncrlhf.placement.workload import Lengths, Workload

__all__ = ("chosen",)

STRATEGIES = ("colocate", "alternating", "async", "split", "standalone", "interleaving", "separation", "auto")
PROMPT_TOKENS = 256
"""Of a prompt, where data.max_prompt_tokens says nothing."""
READS: Mapping[str, Role] = {"policy": "policy", "critic": "critic", "reference": "reference", "reward": "reward"}


def chosen(
    config: Config, roles: Mapping[str, str], tables: Mapping[str, object], gpus: int, cores: int
) -> tuple[Config, str]:
    """The configuration with the placement that the planner has found in the place of "auto", and its sizes where the
    groups say none; and what was found, in words. `gpus`, `cores`: of the machine. Raises ConfigError if it has to know
    more, or nothing fits."""
    models = {name: table for name, table in tables.items() if isinstance(table, Compute)}
    rollouts = [name for name in models if roles[name] == "rollout"]
    policies = [name for name in models if roles[name] == "policy"]
    if len(rollouts) != 1 or len(policies) != 1:
        raise ConfigError(
            f'placement.strategy = "auto" plans for 1 policy and 1 rollout group, and {config.algorithm} has '
            f"{len(policies)} and {len(rollouts)}; name a strategy"
        )
    outcome = search(_problem(config, models, roles, rollouts[0], policies[0], _cluster(config, gpus, cores)))
    best = outcome.candidates[0]
    wanted = _placement(config.placement, best, rollouts[0])
    groups = {name: dict(table) for name, table in config.groups.items()}
    for part in best.sets:
        for unit, layout in part.layouts.items():
            name = rollouts[0] if unit == "rollout" else unit
            key = "replicas" if unit in ("rollout", "shadow_critic") else "data_parallel"
            if name in groups and isinstance(models.get(name), RolloutTable | Trained) and layout.dp > 1:
                groups[name].setdefault(key, layout.dp)
    text = (
        f"{best.strategy.label}, by formula (about {best.step:.3g} s per train step, an estimate that nothing was "
        "measured for); to predict from measurements: run some 20 train steps, then plan --calibrate RUN_DIR"
    )
    return replace(config, groups=groups, placement=wanted), text


def _placement(asked: Placement, best: Candidate, rollout: str) -> Placement:
    label = best.strategy.label
    offload = asked.offload
    if offload == "auto" and asked.turns != "none":  # as what was found to be best
        offload = "always" if any(part.offloads for part in best.sets) else "never"
    if best.strategy.name == "auto":
        sets = [[rollout if unit == "rollout" else unit for unit in part] for part in best.strategy.sets]
        return Placement(sets=sets, turns=asked.turns, offload=offload, devices=asked.devices)
    name: Any = label.partition(",")[0]
    return Placement(strategy=name, turns=asked.turns, offload=offload, shared_shadow="shared" in label)


def _offload(asked: Placement) -> Literal["auto", "always", "never"]:
    """On CPUs what sleeps takes next to nothing, and the formula has what it takes on a GPU."""
    if asked.turns == "none":
        return "never"
    return "auto" if asked.offload == "always" and asked.node is None else asked.offload


def _cluster(config: Config, gpus: int, cores: int) -> Cluster:
    wanted = config.placement
    count = wanted.devices or gpus or cores
    if config.runtime == "inproc":
        count = 1
    if gpus and wanted.node is None:
        raise ConfigError(
            f'placement.strategy = "auto" has to know what kind the {gpus} GPUs are; set placement.node, for example '
            'to "H100"'
        )
    node = wanted.node or "CPU"
    whole = Cluster.build([Pool(node=node)], {}).devices
    if count > whole and count % whole:
        raise ConfigError(
            f'placement.devices = {count} is no whole number of nodes "{node}" with {whole} devices each; use '
            f"{count - count % whole}"
        )
    pool = Pool(node=node, devices_per_node=count) if count < whole else Pool(node=node, nodes=count // whole)
    return Cluster.build([pool], {})


def _problem(
    config: Config, models: Mapping[str, Compute], roles: Mapping[str, str], rollout: str, policy: str, cluster: Cluster
) -> Problem:
    specs: dict[str, ModelSpec] = {}
    fixed: dict[str, tuple[int, int, int]] = {}
    for name, table in models.items():
        sizes = table.sizes
        if name == rollout:
            fixed["rollout"] = getattr(table, "tensor_parallel", 1), 1, 0
        elif roles[name] in READS:
            shape = shape_in(table) or (shape_in(models[policy]) if roles[name] == "reference" else None)
            if shape is None:
                raise ConfigError(
                    f'groups.{name}: placement.strategy = "auto" needs the shape of its model, and there is no '
                    "config.json yet; name a strategy"
                )
            specs[name] = ModelSpec(role=READS[roles[name]], shape=shape)
            fixed[name] = sizes.get("tensor_parallel", 1), sizes.get("pipeline_parallel", 1), 0
    impossible = set[str]() if config.max_staleness else {"async"}
    if any(isinstance(table, MegatronCritic) for table in models.values()):
        impossible.add("separation")  # which has a copy of the critic
    sampled = models[rollout]
    assert isinstance(sampled, RolloutTable)
    work = Workload(
        prompts_per_step=config.prompts_per_step,
        answers_per_prompt=config.answers_per_prompt,
        prompt_tokens=config.data.max_prompt_tokens or PROMPT_TOKENS,
        response=Lengths(mean=max(1.0, sampled.max_tokens / 2), cv=0.5, max=sampled.max_tokens),
        minibatches=min(config.settings.get("minibatches", 1), config.prompts_per_step * config.answers_per_prompt),
        max_staleness=config.max_staleness,
        lookahead=config.lookahead,
        publish=config.publish.mode,
        offload=_offload(config.placement),
    )
    return Problem(
        cluster=cluster,
        models=specs,
        work=work,
        fit=Coefficients(),
        strategies=tuple(strategy for strategy in STRATEGIES if strategy not in impossible),
        fixed=fixed,
    )
