"""Problems in a few words, for the tests of placement."""

from __future__ import annotations

from typing import Any

from asyncrlhf.placement.cluster import NODES, Cluster, NodeType
from asyncrlhf.placement.coefficients import Coefficients
from asyncrlhf.placement.models import SHAPES, ModelSpec, Role
from asyncrlhf.placement.plan import Problem
from asyncrlhf.placement.workload import Workload

PPO: tuple[Role, ...] = ("policy", "critic", "reference", "reward")


def model(name: str, role: Role = "policy") -> ModelSpec:
    return ModelSpec(role=role, shape=SHAPES[name])


def problem(
    devices: int,
    shape: str,
    *,
    roles: tuple[Role, ...] = PPO,
    critic: str | None = None,
    node: str | NodeType = "A100",
    strategies: tuple[str, ...] = ("colocate", "split", "standalone"),
    work: Workload | None = None,
    fit: Coefficients | None = None,
    **others: Any,
) -> Problem:
    """HybridFlow's workload (1024 prompts of 1024 + 1024 tokens, 8 updates) unless `work` says otherwise. `critic`:
    shape of critic and reward model."""
    kind = NODES[node] if isinstance(node, str) else node
    large = critic or shape
    return Problem(
        cluster=Cluster(((kind, devices),)),
        models={role: model(shape if role in ("policy", "reference") else large, role) for role in roles},
        work=work or Workload(minibatches=8),
        fit=fit or Coefficients(),
        strategies=strategies,
        fixed=others.pop("fixed", {}),
        **others,
    )
