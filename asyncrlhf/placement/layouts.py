"""Parallel sizes: which ones tile a block of devices, and what is wrong with those that do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from asyncrlhf.errors import ConfigError
from asyncrlhf.placement.models import Shape

__all__ = ("Layout", "divisors", "generation_layouts", "require_layout", "splits_heads", "training_layouts")


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """Tensor, pipeline, data and expert parallel sizes. Example: Layout(8, 2, 4) takes 64 devices.

    Expert parallelism lies inside data parallelism: `ep` divides `dp`.
    """

    tp: int
    pp: int
    dp: int
    ep: int = 1

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def model(self) -> int:
        """Devices that hold one copy: N1 = t p."""
        return self.tp * self.pp

    def __str__(self) -> str:
        experts = f" ep{self.ep}" if self.ep > 1 else ""
        return f"tp{self.tp} pp{self.pp} dp{self.dp}{experts}"


@lru_cache(maxsize=4096)
def divisors(count: int) -> tuple[int, ...]:
    """In ascending order."""
    small = [i for i in range(1, int(count**0.5) + 1) if count % i == 0]
    return tuple(small + [count // i for i in reversed(small) if i * i != count])


def splits_heads(shape: Shape, tp: int) -> bool:
    """Every rank has whole query heads, and whole key/value heads or an equal copy of one."""
    return shape.heads % tp == 0 and (shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0)


def _model_sizes(shape: Shape, devices: int, width: int) -> Iterator[tuple[int, int]]:
    for tp in divisors(devices):
        if tp <= width and splits_heads(shape, tp):
            for pp in divisors(devices // tp):
                if -(-shape.layers // pp) * (pp - 1) < shape.layers:  # no stage is empty
                    yield tp, pp


def training_layouts(shape: Shape, devices: int, width: int, rows: float, *, most_pp: int = 0) -> list[Layout]:
    """Every (t, p, e) with t up to `width` (the devices that nvlink joins) and a data-parallel size of at most `rows`,
    the sequences of an optimizer step. `most_pp`: no more pipeline stages; 0: as many as there are layers."""
    found: list[Layout] = []
    for tp, pp in _model_sizes(shape, devices, width):
        dp = devices // (tp * pp)
        if dp > rows or (most_pp and pp > most_pp):
            continue
        experts = [ep for ep in divisors(dp) if shape.experts % ep == 0] if shape.experts else [1]
        found += (Layout(tp, pp, dp, ep) for ep in experts)
    return found


def generation_layouts(shape: Shape, devices: int, width: int) -> list[Layout]:
    """Every (t_g, p_g) whose replicas fill the devices; `dp` is the number of replicas. Pipelines only where tensor
    parallelism already has the whole node: they do not shorten a token."""
    sizes = list(_model_sizes(shape, devices, width))
    widest = max((tp for tp, _ in sizes), default=1)
    return [Layout(tp, pp, devices // (tp * pp)) for tp, pp in sizes if pp == 1 or (tp == widest and pp <= 16)]


def require_layout(unit: str, shape: Shape, layout: Layout, devices: int, width: int, rows: int | None) -> None:
    """Raises ConfigError, which names the unit and both numbers, for a layout that does not fit. `rows`: sequences of
    one optimizer step of a trained model."""
    tp, pp = layout.tp, layout.pp
    if tp > width:
        raise ConfigError(
            f"{unit}.tensor_parallel = {tp} is more than the {width} devices that nvlink joins; use {width} or less"
        )
    if not splits_heads(shape, tp):
        fits = [str(t) for t in range(1, width + 1) if splits_heads(shape, t)]
        raise ConfigError(
            f"{unit}.tensor_parallel = {tp} does not divide {shape.heads} heads and {shape.kv_heads} key/value heads; "
            f"use {', '.join(fits)}"
        )
    if pp > shape.layers:
        raise ConfigError(
            f"{unit}.pipeline_parallel = {pp} is more than its {shape.layers} layers; use {shape.layers} or less"
        )
    if devices % layout.model:
        raise ConfigError(
            f"{unit}: tensor_parallel * pipeline_parallel = {tp} * {pp} = {layout.model} does not tile its {devices} "
            f"devices; give it a multiple of {layout.model} devices, or sizes whose product divides {devices}"
        )
    replicas = devices // layout.model
    if rows is not None and rows < replicas:
        raise ConfigError(
            f"{unit}: an optimizer step has {rows} sequences for a data parallel size of {replicas}; raise "
            f"workload.prompts_per_step or answers_per_prompt, lower minibatches, or raise tensor_parallel * "
            f"pipeline_parallel to {-(-devices // rows)} or more"
        )
