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
from asyncrlhf.weights.plan import make_plan, size_text
from asyncrlhf.weights.same_devices import SameDevices
from asyncrlhf.weights.shapes import ModelShape, model_shape
from asyncrlhf.weights.torch_layout import checkpoint_layout, fsdp_layout, replicated_layout
from asyncrlhf.weights.vllm_layout import VllmParallel, vllm_layout
from asyncrlhf.weights.zero_redundancy import regrouped_layout

__all__ = ("plan_lines",)

BUCKET = 256 << 20
"""Bytes of messages in a plan; here nothing is sent in them."""
MOST_ROWS = 32
MOST_PARTS = 60_000
"""Parameters times ranks times processes beyond which no plan is made: it would take seconds."""
GRAIN = 128
"""Megatron's vocabulary is filled up to a multiple of it."""
PROBLEMS = (ConfigError, OSError, KeyError, TypeError, ValueError)
HEADER = f" {'of its rank':>12} {'of others':>11} {'to others':>11}"


def plan_lines(tables: Mapping[str, Struct], shared: Mapping[str, SameDevices] | None = None) -> list[str]:
    """For every rollout group that follows a model on several ranks: bytes that each rank and each process of its
    engines moves when all weights have changed. One line where they cannot be told, none where the model is not there
    yet. `shared`: the groups whose processes are on the devices of ranks; what each takes of its own rank and of others
    is held against HybridFlow's formula."""
    found: list[str] = []
    for name, rollout in tables.items():
        trained = tables.get(rollout.follows) if isinstance(rollout, RolloutTable) else None
        if not isinstance(trained, TorchTrain | MegatronTrain) or trained.ranks == 1:
            continue
        assert isinstance(rollout, RolloutTable)
        said = f"publish of groups.{rollout.follows} to groups.{name}"
        file = None if trained.model is None else Path(trained.model) / "config.json"
        if file is not None and not file.is_file():
            file = None
        if shared is not None and name in shared:
            found += [
                f"{said}, whose processes are on the devices of the ranks:",
                *_beside(trained, shared[name], file),
            ]
        elif file is not None:
            found += [f"{said}:", *_lines(trained, rollout, file)]
    return found


def _shape(trained: TorchTrain | MegatronTrain, file: Path) -> ModelShape:
    dtype = trained.dtype if isinstance(trained, MegatronTrain) else "float32"
    return model_shape(json.loads(file.read_bytes()), dtype)


def _beside(trained: TorchTrain | MegatronTrain, shared: SameDevices, file: Path | None) -> list[str]:
    """Rank by rank: where it stands in training, which process of an engine is on its device, and what that takes."""
    grouping = shared.regrouping
    rows, said = [""] * grouping.rank_count, ""
    if file is not None:
        try:
            rows, said = _taken(trained, shared, _shape(trained, file))
        except PROBLEMS as problem:
            said = f"its bytes are not known: {str(problem) or type(problem).__name__}"
    lines = [f"{'rank':>6} {'pp tp dp':>9} {'engine':>7} {'process':>8}" + (HEADER if rows[0] else "")]
    for rank, row in list(enumerate(rows))[:MOST_ROWS]:
        place, (pp, tp, dp) = grouping.generation(rank), grouping.training(rank)
        process = place.pipeline * grouping.generate_tensor + place.tensor
        lines.append(f"{rank:>6} {f'{pp:>2} {tp:>2} {dp:>2}':>9} {place.engine:>7} {process:>8}{row}")
    left = grouping.rank_count - MOST_ROWS
    return [f"  {line}" for line in (*lines, *([f"and {left} more"] if left > 0 else []), *([said] if said else []))]


def _taken(trained: TorchTrain | MegatronTrain, shared: SameDevices, shape: ModelShape) -> tuple[list[str], str]:
    """(what each rank's process takes, the formula). Data parallel copies do the same, unless they divide the
    experts among them. Raises ConfigError."""
    grouping = shared.regrouping
    nothing = [""] * grouping.rank_count
    if not shared.by_rank:
        return nothing, "each process takes what it needs from one copy of each part, wherever that was put"
    train, generate = grouping.pipeline * grouping.tensor, grouping.generate_pipeline * grouping.generate_tensor
    part = size_text(round(grouping.received_fraction * shape.byte_count))
    formula = f"HybridFlow's (N1 - t_g p_g) / (t_g p_g N1) = ({train} - {generate}) / ({generate} * {train}) of "
    formula += f"{size_text(shape.byte_count)}, if all parameters divide evenly: {part} of others"
    one = replace(grouping, data=1)
    if isinstance(trained, MegatronTrain) and trained.tensor_parallel % trained.expert_parallel:
        one = grouping
        formula += "; experts are divided among data parallel copies too, and come from all of them"
    elif isinstance(trained, MegatronTrain):
        trained = replace(trained, data_parallel=1, context_parallel=1)
    ranks = one.rank_count
    if len(shape.parameters()) * ranks * ranks > MOST_PARTS:
        return nothing, formula
    needed = regrouped_layout(shape, one, places(ranks))
    near = {rank: one.nearest(rank) for rank in range(ranks)}
    traffic = make_plan(_layout(trained, shape), needed, cap=BUCKET, near=near).traffic()
    cells = [f" {size_text(row.copied):>12} {size_text(row.received):>11} {size_text(row.sent):>11}" for row in traffic]
    stands = [grouping.training(rank) for rank in range(grouping.rank_count)]
    return [cells[(pp * one.data + dp % one.data) * grouping.tensor + tp] for pp, tp, dp in stands], formula


def _lines(trained: TorchTrain | MegatronTrain, rollout: RolloutTable, file: Path) -> list[str]:
    try:
        shape = _shape(trained, file)
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
    except PROBLEMS as problem:
        return [f"  its bytes are not known: {str(problem) or type(problem).__name__}"]
    traffic = plan.traffic()
    lines = [f"{plan.source} -> {plan.destination}: {size_text(sum(row.received for row in traffic))} between ranks"]
    if len(traffic) <= MOST_ROWS:
        lines.append(f"{'rank':>6} {'sent':>11} {'received':>11}")
        lines += [f"{row.rank:>6} {size_text(row.sent):>11} {size_text(row.received):>11}" for row in traffic]
    return [f"  {line}" for line in lines]


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
