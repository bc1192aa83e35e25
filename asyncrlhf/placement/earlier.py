"""What `check` can know before a run: what an earlier run in the same directory measured, and the least that the models
weigh. Reads files; says nothing about what it does not find."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from asyncrlhf.config.groups import (
    Compute,
    MegatronFrozen,
    MegatronTrain,
    RolloutTable,
    TorchShadow,
    TorchTrain,
    Trained,
)
from asyncrlhf.errors import ConfigError
from asyncrlhf.observe.events import Granted, Scored, decode_event
from asyncrlhf.placement.advice import Facts
from asyncrlhf.placement.models import Shape, read_directory, shape_of

__all__ = ("facts_before", "least_bytes", "least_host_bytes", "shape_in")

TAIL_BYTES = 8 << 20
LEASES = (b'{"type":"Granted"', b'{"type":"Scored"')
SIZES = {"float32": 4, "bfloat16": 2}


def facts_before(directory: Path, *, lookahead: int, max_staleness: int, engines: Iterable[object] = ()) -> Facts:
    """Facts about a run that is to begin with these settings and engine tables in `directory`."""
    need = least_host_bytes(engines)
    generate, train = _busy(directory / "metrics.jsonl")
    return Facts(
        lookahead=lookahead,
        max_staleness=max_staleness,
        generate_s=generate,
        train_s=train,
        lease_s=_lease(directory / "events.jsonl"),
        host_need=need,
        host_have=None if need is None else float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    )


def _busy(path: Path) -> tuple[float | None, float | None]:
    """Busy seconds per train step of the two pools, without the first fifth of the steps."""
    try:
        rows: list[dict[str, Any]] = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    except (OSError, msgspec.DecodeError):
        return None, None
    steady = rows[len(rows) // 5 :]
    if len(rows) < 5 or not any(row.get("busy/generate") for row in steady):
        return None, None
    generate, train = (
        fmean(float(row.get(name) or 0.0) * float(row.get("time/step") or 0.0) for row in steady)
        for name in ("busy/generate", "busy/train")
    )
    return generate, train


def _lease(path: Path) -> float | None:
    """Mean seconds from grant to scored, of the newest leases."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")[1:]
    except OSError:
        return None
    granted: dict[tuple[int, int], float] = {}
    spans: list[float] = []
    for line in lines:
        if line.startswith(LEASES):
            try:
                event = decode_event(line)
            except msgspec.DecodeError:
                continue  # the last line of a run that was killed
            if isinstance(event, Granted):
                granted[event.uid, event.attempt] = event.t
            elif isinstance(event, Scored) and (event.uid, event.attempt) in granted:
                spans.append(event.t - granted[event.uid, event.attempt])
    return fmean(spans) if spans else None


def least_host_bytes(engines: Iterable[object]) -> float | None:
    """Bytes of host memory that engines on the CPU take at least: weights, twice where new ones arrive beside those in
    use, and those of everything that a trained model keeps. Engines on other devices, or whose model's shape is not
    known yet, count nothing. None: nothing is known."""
    total = 0.0
    for table in engines:
        if isinstance(table, Compute) and table.device == "cpu" and (shape := shape_in(table)) is not None:
            total += least_bytes(table, shape)
    return total or None


def least_bytes(table: Compute, shape: Shape) -> float:
    """Of all engines of a group: weights, twice where new ones arrive beside those in use, and everything that training
    keeps."""
    params, size = shape.params, SIZES[table.dtype]
    match table:
        case RolloutTable() | TorchShadow():
            return 2 * table.replicas * params * size
        case TorchTrain():  # gradients and Adam's two moments
            return 4 * params * size * (1 if table.sharding == "full" else table.data_parallel)
        case MegatronTrain():  # gradients; the moments, and main weights of shorter ones, are there once
            return _held(table, shape) * (size + 4) + params * (8 if size == 4 else 12)
        case MegatronFrozen():
            return _held(table, shape) * size
        case _:
            return params * size


def _held(table: MegatronTrain | MegatronFrozen, shape: Shape) -> float:
    """Parameters on all ranks of a megatron group: experts on `expert_parallel` of each stage's, the rest cut into
    `tensor_parallel` parts."""
    stage = table.ranks / table.pipeline_parallel
    routed = shape.routed_params
    return (shape.params - routed) * stage / table.tensor_parallel + routed * stage / table.expert_parallel


def shape_in(table: Compute) -> Shape | None:
    """Of a group's model, if its files or its table say it."""
    directory: object = getattr(table, "model", None)
    try:
        if isinstance(directory, str):
            return read_directory("model", directory)
        if isinstance(table, Trained) and table.scratch is not None:
            config: Mapping[str, Any] = table.scratch.config
            return shape_of("scratch.config", msgspec.json.encode(config))
    except ConfigError:
        return None
    return None
