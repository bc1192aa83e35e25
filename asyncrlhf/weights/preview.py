"""What a publish will move, from a configuration and the sizes in a model's config.json. Loads no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from asyncrlhf.config.groups import MegatronTrain, RolloutTable, TorchTrain, VllmRollout
from asyncrlhf.errors import ConfigError
from asyncrlhf.weights.layout import Layout, places, without_replicas
from asyncrlhf.weights.megatron_layout import MegatronParallel, megatron_layout
from asyncrlhf.weights.plan import describe, make_plan
from asyncrlhf.weights.shapes import ModelShape, model_shape
from asyncrlhf.weights.torch_layout import checkpoint_layout, fsdp_layout, replicated_layout
from asyncrlhf.weights.vllm_layout import VllmParallel, vllm_layout

__all__ = ("plan_lines",)

BUCKET = 256 << 20
"""Bytes that the plan lets a rank hold at once, as many as in a bucket of Ray's objects."""
MOST_ROWS = 32
MOST_PARTS = 60_000
"""Parameters times ranks times processes beyond which no plan is made: it would take seconds."""
GRAIN = 128
"""Megatron's vocabulary is filled up to a multiple of it."""


def plan_lines(tables: Mapping[str, Struct]) -> list[str]:
    """For every rollout group that follows a model on several ranks: bytes that each rank and each process of its
    engines moves when all weights have changed. One line where they cannot be told, none where the model is not there
    yet."""
    found: list[str] = []
    for name, rollout in tables.items():
        trained = tables.get(rollout.follows) if isinstance(rollout, RolloutTable) else None
        if not isinstance(trained, TorchTrain | MegatronTrain) or trained.ranks == 1 or trained.model is None:
            continue
        file = Path(trained.model) / "config.json"
        if file.is_file():
            assert isinstance(rollout, RolloutTable)
            found.append(f"publish of groups.{rollout.follows} to groups.{name}:")
            found += _lines(trained, rollout, file)
    return found


def _lines(trained: TorchTrain | MegatronTrain, rollout: RolloutTable, file: Path) -> list[str]:
    try:
        dtype = trained.dtype if isinstance(trained, MegatronTrain) else "float32"
        shape = model_shape(json.loads(file.read_bytes()), dtype)
        engines = rollout.replicas * (rollout.tensor_parallel if isinstance(rollout, VllmRollout) else 1)
        if len(shape.parameters()) * trained.ranks * engines > MOST_PARTS:
            return [f"  {shape.byte_count / (1 << 30):.1f} GiB from {trained.ranks} ranks to {engines} processes"]
        source = without_replicas(_layout(trained, shape))
        engine_places = places(engines, first=trained.ranks)
        if isinstance(rollout, VllmRollout):
            needed = vllm_layout(shape, VllmParallel(tensor=rollout.tensor_parallel), engine_places)
        else:
            needed = checkpoint_layout(shape, engine_places)
        plan = make_plan(source, needed, cap=BUCKET)
    except (ConfigError, OSError, KeyError, TypeError, ValueError) as problem:
        return [f"  its bytes are not known: {str(problem) or type(problem).__name__}"]
    lines = describe(plan).splitlines()
    return [f"  {line}" for line in (lines if len(lines) <= MOST_ROWS + 2 else lines[:1])]


def _layout(trained: TorchTrain | MegatronTrain, shape: ModelShape) -> Layout:
    """Where the ranks have what they publish."""
    if isinstance(trained, MegatronTrain):
        grain = math.lcm(GRAIN, trained.tensor_parallel)
        parallel = MegatronParallel(
            tensor=trained.tensor_parallel,
            pipeline=trained.pipeline_parallel,
            virtual_pipeline=trained.virtual_pipeline,
            context=trained.context_parallel,
            expert=trained.expert_parallel,
            expert_tensor=1,
            padded_vocab=-(-shape.vocab // grain) * grain,
        )
        return megatron_layout(shape, parallel, places(trained.ranks))
    if trained.sharding == "full":
        return fsdp_layout(shape, places(trained.ranks))
    return replace(replicated_layout(shape, places(1)), name=f"rank 0 of torch dp{trained.ranks}")
