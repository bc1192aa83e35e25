"""HybridFlow's zero-redundancy grouping: train and generate on the same ranks, and receive only what a rank lacks.

Training is p-t-d (pipeline, tensor, data), generation p_g-t_g on the same N = p * t * d ranks. A rank generates with
tensor coordinate `tp // (t / t_g)` and pipeline coordinate `pp // (p / p_g)`; then what it trains lies inside what it
generates with, and it receives (N1 - t_g p_g) / (t_g p_g N1) of the model, N1 = p * t (arXiv:2409.19256, section 5.3,
3D-HybridEngine, table 2). Ranks with equal generation coordinates are a micro data-parallel group: in general not
consecutive ones.

Example: Regrouping(pipeline=1, tensor=8, data=2, generate_pipeline=1, generate_tensor=2): each rank receives 3/8 M.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

from msgspec.structs import replace

from asyncrlhf.errors import ConfigError
from asyncrlhf.messages.samples import Message
from asyncrlhf.weights.layout import Layout, Place
from asyncrlhf.weights.shapes import ModelShape
from asyncrlhf.weights.vllm_layout import VllmParallel, vllm_holding

__all__ = ("Coordinates", "Regrouping", "regrouped_layout")


class Coordinates(Message, frozen=True):
    """One rank's place in generation."""

    tensor: int
    pipeline: int
    engine: int
    """Which of the d * d_g engines it belongs to."""


class Regrouping(Message, frozen=True):
    """Sizes of both layouts. Ranks are in megatron-core's order: tensor fastest, then data, then pipeline."""

    pipeline: int
    tensor: int
    data: int
    generate_pipeline: int
    generate_tensor: int

    def __post_init__(self) -> None:
        pairs = (
            ("pipeline", self.pipeline, self.generate_pipeline),
            ("tensor", self.tensor, self.generate_tensor),
        )
        for what, train, generate in pairs:
            if train % generate:
                raise ConfigError(
                    f"generation with {what} parallelism {generate} on the ranks of training with {train}: the former "
                    f"must divide the latter; use {' or '.join(str(n) for n in range(1, train + 1) if not train % n)}"
                )

    @property
    def rank_count(self) -> int:
        return self.pipeline * self.tensor * self.data

    @property
    def micro_data(self) -> int:
        """d_g: engines per data-parallel replica of the trainer."""
        return self.pipeline * self.tensor // (self.generate_pipeline * self.generate_tensor)

    @property
    def received_fraction(self) -> Fraction:
        """Of the model's bytes, what each rank receives when every parameter is split evenly."""
        train, generate = self.pipeline * self.tensor, self.generate_pipeline * self.generate_tensor
        return Fraction(train - generate, generate * train)

    @property
    def peak_fraction(self) -> Fraction:
        """Of the model's bytes, what each rank holds for generation; its training shard is part of it."""
        return Fraction(1, self.generate_pipeline * self.generate_tensor)

    def training(self, rank: int) -> tuple[int, int, int]:
        """(pp, tp, dp) of a rank."""
        return rank // (self.tensor * self.data), rank % self.tensor, rank // self.tensor % self.data

    def generation(self, rank: int) -> Coordinates:
        pp, tp, dp = self.training(rank)
        stages, width = self.pipeline // self.generate_pipeline, self.tensor // self.generate_tensor
        micro = pp % stages * width + tp % width
        return Coordinates(tensor=tp // width, pipeline=pp // stages, engine=dp * self.micro_data + micro)

    def engines(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of every engine, stage by stage, tensor ranks in order."""
        found: dict[int, list[int]] = defaultdict(list)
        for rank in range(self.rank_count):
            found[self.generation(rank).engine].append(rank)
        key = self.generation
        return tuple(
            tuple(sorted(ranks, key=lambda rank: (key(rank).pipeline, key(rank).tensor)))
            for _, ranks in sorted(found.items())
        )

    def nearest(self, rank: int) -> tuple[int, ...]:
        """Whom a rank takes weights from, itself first, then the others of its micro data-parallel group."""
        group = next(group for group in self.micro_groups() if rank in group)
        return (rank, *(other for other in group if other != rank))

    def micro_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that together hold, as trainers, exactly what each of them generates with."""
        found: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for rank in range(self.rank_count):
            place = self.generation(rank)
            found[self.training(rank)[2], place.pipeline, place.tensor].append(rank)
        return tuple(tuple(ranks) for _, ranks in sorted(found.items()))


def regrouped_layout(
    shape: ModelShape, regrouping: Regrouping, places: Sequence[Place], options: VllmParallel | None = None
) -> Layout:
    """The engines' layout on the trainer's ranks. `options`: what else is known of the engines, sizes aside."""
    if len(places) != regrouping.rank_count:
        raise ConfigError(
            f"{len(places)} ranks for a layout of {regrouping.rank_count}; give pipeline * tensor * data = "
            f"{regrouping.pipeline} * {regrouping.tensor} * {regrouping.data}"
        )
    parallel = replace(
        options or VllmParallel(), tensor=regrouping.generate_tensor, pipeline=regrouping.generate_pipeline
    )
    holdings = tuple(
        vllm_holding(shape, parallel, place, regrouping.generation(rank).tensor, regrouping.generation(rank).pipeline)
        for rank, place in enumerate(places)
    )
    name = f"{parallel.name} x {len(places) // (parallel.tensor * parallel.pipeline)}, regrouped"
    return Layout(name, {parameter.name: parameter for parameter in shape.parameters()}, holdings)
