"""What every group with a model says about its hardware, and how its ranks share the model. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from asyncrlhf.config.bounds import Count, Device, Dtype, Name, Positive, Table
from asyncrlhf.errors import ConfigError

__all__ = (
    "Compute",
    "Megatron",
    "require_sizes",
)


class Compute(Table, frozen=True, kw_only=True):
    """What every group with a model says about its hardware."""

    pool: Name | None = None
    """Pool that its engines are in; left out: "generation" for rollout groups and "training" for others, if there."""
    dtype: Dtype = "float32"
    """Of the weights."""
    device: Device = "auto"
    """"auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", ..."""
    threads: Positive = 1
    """Compute threads on the CPU, per engine. Checksums of weights take up to 4 threads for a moment at each publish
    beside them, whatever this key or OMP_NUM_THREADS says."""
    core: Count | None = None
    """Pin the engine to this core, replica or rank i to core + i; left out: a core each where there are enough of them,
    else the system decides."""

    @property
    def sizes(self) -> dict[str, int]:
        """Parallel sizes of one model by key; their product is the number of its ranks."""
        return {}

    @property
    def ranks(self) -> int:
        """Processes that one model takes."""
        return math.prod(self.sizes.values())

    @property
    def many(self) -> str:
        """The sizes above 1, for messages."""
        return _above_one(self.sizes)

    def __post_init__(self) -> None:
        self.require_gpus(self.sizes)

    def require_gpus(self, sizes: Mapping[str, int]) -> None:
        """Raises ConfigError if `device` names one GPU, and the product of `sizes` is more."""
        if ":" in self.device and (count := math.prod(sizes.values())) > 1:
            raise ConfigError(
                f'device = "{self.device}" is 1 GPU, and {_above_one(sizes)} takes {count}; use "cuda", and '
                "CUDA_VISIBLE_DEVICES to choose among them, or lower the latter"
            )


def _above_one(sizes: Mapping[str, int]) -> str:
    return " * ".join(f"{key} = {size}" for key, size in sizes.items() if size > 1)


class Megatron(Protocol):
    """What every megatron group says about how its ranks share a model."""

    @property
    def tensor_parallel(self) -> int: ...

    @property
    def pipeline_parallel(self) -> int: ...

    @property
    def expert_parallel(self) -> int: ...

    @property
    def sequence_parallel(self) -> bool: ...

    @property
    def sizes(self) -> dict[str, int]: ...

    @property
    def ranks(self) -> int: ...


def require_sizes(table: Megatron) -> None:
    """Rules between the parallel sizes of a megatron group. Raises ConfigError."""
    if table.sequence_parallel and table.tensor_parallel == 1:
        raise ConfigError(
            "sequence_parallel shares tokens among tensor_parallel = 1 ranks; raise that, or leave it false"
        )
    stage = table.ranks // table.pipeline_parallel
    if stage % table.expert_parallel:
        shared = " * ".join(key for key in table.sizes if key != "pipeline_parallel")
        raise ConfigError(
            f"expert_parallel = {table.expert_parallel} does not divide the {stage} ranks of {shared}, which share the "
            "experts; lower the first or raise data_parallel"
        )
