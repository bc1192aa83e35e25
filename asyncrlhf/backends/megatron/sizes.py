"""What a megatron layout asks of a model and of the machine, to be checked before any engine starts. Torch-free."""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol

from asyncrlhf.backends.megatron import families
from asyncrlhf.errors import ConfigError

__all__ = ("require_fits", "require_installed")


class Sizes(Protocol):
    """A table, or the options of an engine."""

    @property
    def tensor_parallel(self) -> int: ...

    @property
    def pipeline_parallel(self) -> int: ...

    @property
    def virtual_pipeline(self) -> int: ...

    @property
    def expert_parallel(self) -> int: ...

    @property
    def sequence_parallel(self) -> bool: ...


def require_installed() -> None:
    """Raises ConfigError where megatron-core is missing."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise ConfigError('backend = "megatron" needs megatron-core; pip install "asyncrlhf[megatron]"')


def require_fits(sizes: Sizes, config: Any) -> None:
    """Raises ConfigError for parallel sizes that do not divide what they cut, and for an architecture that cannot be
    built. `config`: the Hugging Face configuration."""
    families.fields(config)
    families.rotary(config)
    layers = sizes.pipeline_parallel * sizes.virtual_pipeline
    stages = "pipeline_parallel" if sizes.virtual_pipeline == 1 else "pipeline_parallel * virtual_pipeline"
    for name, size, total, what in (
        ("tensor_parallel", sizes.tensor_parallel, config.num_key_value_heads, "key/value heads"),
        ("tensor_parallel", sizes.tensor_parallel, config.intermediate_size, "places of intermediate_size"),
        (stages, layers, config.num_hidden_layers, "layers"),
        ("expert_parallel", sizes.expert_parallel, getattr(config, "num_experts", 1), "experts"),
    ):
        if total % size:
            fits = [str(number) for number in range(1, min(total, 64) + 1) if total % number == 0]
            raise ConfigError(f"{name} = {size} does not divide {total} {what}; use {' or '.join(fits)}")
    if hasattr(config, "num_experts") and sizes.tensor_parallel > 1 and not sizes.sequence_parallel:
        raise ConfigError(
            f"tensor_parallel = {sizes.tensor_parallel} of a model with {config.num_experts} experts takes "
            "sequence_parallel = true, so that each rank brings tokens of its own to them"
        )
