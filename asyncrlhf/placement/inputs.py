"""The keys of a plan's TOML file, and what they come to. Raises ConfigError, with both numbers, for what cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from msgspec import field

from asyncrlhf.config.bounds import Count, Name, Positive, Table
from asyncrlhf.config.convert import convert
from asyncrlhf.errors import ConfigError
from asyncrlhf.placement.cluster import Cluster, NodeType, Pool
from asyncrlhf.placement.coefficients import Coefficients
from asyncrlhf.placement.layouts import Layout, require_layout
from asyncrlhf.placement.models import ModelSpec, Role, Shape, named, read_directory
from asyncrlhf.placement.plan import Problem
from asyncrlhf.placement.strategies import STRATEGIES
from asyncrlhf.placement.units import units_of
from asyncrlhf.placement.workload import Workload

__all__ = ("PlanFile", "problem_of")

ROLES: tuple[Role, ...] = ("policy", "critic", "reference", "reward")
DEFAULT = list(STRATEGIES)


class ClusterTable(Table, frozen=True, kw_only=True):
    """What there is to run on."""

    pools: list[Pool]
    """One entry per kind of node. Example: [{ node = "A100", nodes = 16 }]."""


class ModelTable(Table, frozen=True, kw_only=True):
    """One model: exactly one of `name`, `directory` and `shape`."""

    role: Role | None = None
    """Left out: the name of the table, which then is a role."""
    name: Name | None = None
    """A known shape, such as "llama-13b" or "qwen2.5-7b"."""
    directory: Name | None = None
    """A Hugging Face directory whose config.json says the shape."""
    shape: Shape | None = None
    """Layers, hidden, ffn, heads, kv_heads, ..."""
    lora_rank: Count = 0
    """Rank of adapters that are trained instead of the weights; 0: the weights are."""

    def spec(self, key: str) -> ModelSpec:
        """Raises ConfigError unless one shape and a role are given."""
        given = [name for name in ("name", "directory", "shape") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"models.{key}: {' and '.join(given) or 'no shape'} set; set one of name, directory, shape"
            )
        role = self.role or key
        if role not in ROLES:
            raise ConfigError(f"models.{key} has no role; name the table one of {', '.join(ROLES)}, or set role")
        if self.name is not None:
            shape = named(f"models.{key}.name", self.name)
        elif self.directory is not None:
            shape = read_directory(f"models.{key}.directory", self.directory)
        else:
            shape = cast(Shape, self.shape)
        return ModelSpec(role=role, shape=shape, lora_rank=self.lora_rank)


class LayoutTable(Table, frozen=True, kw_only=True):
    """Parallel sizes of one unit ("rollout" or a model) that the search has to keep."""

    tensor_parallel: Positive = 1
    pipeline_parallel: Positive = 1
    devices: Positive | None = None
    """Of the set that the unit is in; left out: the search decides."""


class PlanFile(Table, frozen=True, kw_only=True):
    """Everything that a plan depends on."""

    cluster: ClusterTable
    """Pools of nodes."""
    nodes: dict[str, NodeType] = field(default_factory=dict)
    """Node types of your own, by name."""
    models: dict[str, ModelTable]
    """policy, and critic, reference, reward where the algorithm has them. A reward function is no model: see
    workload.reward_seconds."""
    workload: Workload = Workload()
    """One train step."""
    calibration: Coefficients = Coefficients()
    """How far from the data sheet kernels are."""
    layouts: dict[str, LayoutTable] = field(default_factory=dict)
    """Sizes to keep, per unit."""
    strategies: list[str] = field(default_factory=lambda: list(DEFAULT))
    """Which to compare."""
    max_pipeline: Count = 0
    """Pipeline stages at most; 0: no limit."""
    objective: Literal["time", "price"] = "time"
    """Rank by seconds, or by cost, of a train step."""
    top: Positive = 5
    """Placements to show."""


def problem_of(table: Mapping[str, Any]) -> Problem:
    """The plan's file as a problem. Raises ConfigError in one line."""
    for key, kind in (("nodes", NodeType), ("models", ModelTable), ("layouts", LayoutTable)):
        for name, each in table.get(key, {}).items():
            if isinstance(each, dict):  # one by one, so that an error names it
                convert(cast("dict[str, Any]", each), kind, f"{key}.{name}")
    plan = convert(table, PlanFile)
    cluster = Cluster.build(plan.cluster.pools, plan.nodes)
    models = {key: model.spec(key) for key, model in plan.models.items()}
    policies = [key for key, model in models.items() if model.role == "policy"]
    if len(policies) != 1:
        raise ConfigError(f"models has {len(policies)} with the role policy; a plan is for exactly 1")
    for name in plan.strategies:
        if name not in STRATEGIES:
            raise ConfigError(f'strategies: "{name}" is not a strategy; use some of {", ".join(STRATEGIES)}')
    problem = Problem(
        cluster=cluster,
        models=models,
        work=plan.workload,
        fit=plan.calibration,
        strategies=tuple(plan.strategies),
        fixed={
            name: (each.tensor_parallel, each.pipeline_parallel, each.devices or 0)
            for name, each in plan.layouts.items()
        },
        most_pp=plan.max_pipeline,
        by_price=plan.objective == "price",
        top=plan.top,
    )
    _check_layouts(plan, problem)
    if plan.objective == "price" and not all(node.price for node, _ in cluster.pools):
        raise ConfigError('objective = "price", and a node type has price = 0 (unknown); set its price in [nodes]')
    return problem


def _check_layouts(plan: PlanFile, problem: Problem) -> None:
    units = units_of(problem.models, shadows=True)
    work, pools = problem.work, problem.cluster.pools
    total = problem.cluster.devices
    for name, table in plan.layouts.items():
        if name not in units:
            raise ConfigError(f"layouts.{name} is not a unit; units here: {', '.join(units)}")
        unit, devices = units[name], table.devices
        widest = max(node.joined for node, _ in pools)
        layout = Layout(table.tensor_parallel, table.pipeline_parallel, 1)
        if devices is not None and devices > total:
            raise ConfigError(f"layouts.{name}.devices: need {devices}, have {total}; add nodes or ask for fewer")
        if devices is None and layout.model > total:
            raise ConfigError(
                f"layouts.{name}: tensor_parallel * pipeline_parallel = {layout.model}: need {layout.model} devices, "
                f"have {total}; add nodes or lower one of the two"
            )
        rows = work.samples // work.minibatches if unit.trains else None
        require_layout(
            f"layouts.{name}", unit.model.shape, layout, devices or layout.model, widest, rows if devices else None
        )
    if work.samples < work.minibatches:
        raise ConfigError(
            f"workload.minibatches = {work.minibatches} of a batch of {work.samples} sequences; lower the first to "
            f"{work.samples} or raise prompts_per_step"
        )
