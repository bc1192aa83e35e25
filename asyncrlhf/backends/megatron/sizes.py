"""What a megatron layout asks of a model and of the machine, to be checked before any engine starts. Torch-free."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Protocol

from asyncrlhf.backends.megatron import families
from asyncrlhf.errors import ConfigError

__all__ = ("require_divides", "require_fits", "require_installed")


CUT = {
    "num_key_value_heads": "key/value heads",
    "intermediate_size": "places of intermediate_size",
    "num_hidden_layers": "layers",
    "num_experts": "experts",
}
"""What ranks share, by its name in a Hugging Face configuration."""


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
    require_divides(sizes, {"num_experts": 1, **{key: getattr(config, key) for key in CUT if hasattr(config, key)}})
    if hasattr(config, "num_experts") and sizes.tensor_parallel > 1 and not sizes.sequence_parallel:
        raise ConfigError(
            f"tensor_parallel = {sizes.tensor_parallel} of a model with {config.num_experts} experts takes "
            "sequence_parallel = true, so that each rank brings tokens of its own to them"
        )


def require_divides(sizes: Sizes, model: Mapping[str, Any]) -> None:
    """Raises ConfigError for parallel sizes that do not divide what they cut. `model`: numbers of a Hugging Face
    configuration; one that is not there is not asked about."""
    stages = "pipeline_parallel" if sizes.virtual_pipeline == 1 else "pipeline_parallel * virtual_pipeline"
    for name, size, key in (
        ("tensor_parallel", sizes.tensor_parallel, "num_key_value_heads"),
        ("tensor_parallel", sizes.tensor_parallel, "intermediate_size"),
        (stages, sizes.pipeline_parallel * sizes.virtual_pipeline, "num_hidden_layers"),
        ("expert_parallel", sizes.expert_parallel, "num_experts"),
    ):
        total = model.get(key)
        if isinstance(total, int) and total % size:
            fits = [str(number) for number in range(1, min(total, 64) + 1) if total % number == 0]
            raise ConfigError(f"{name} = {size} does not divide {total} {CUT[key]}; use {' or '.join(fits)}")
