"""Weights of experts in a worker: they are loaded in one form, and computed with in another.

Once vLLM has loaded them it pads, swaps or packs them for the kernel that it has chosen (on CPUs into tiles), and keeps
nothing else. A later version is loaded into tensors of the first form, and put through the same steps of vLLM's. That
they give what vLLM computes with is no assumption: at the start they are held against it, element by element, on the
weights of the model's own directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from asyncrlhf.errors import ConfigError
from asyncrlhf.weights.fused import fused

from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts  # isort: skip
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (  # isort: skip
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod  # isort: skip
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase  # isort: skip
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod  # isort: skip
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info  # isort: skip

__all__ = ("TORCH", "Experts", "published")

TORCH = 'use backend = "torch" for it'
KEPT = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
"""What vLLM computes with in layers from whose parameters nothing outside of parameters is derived."""


class Experts:
    """The layers of experts of a model; false if it has none."""

    def __init__(self, model: nn.Module, directory: Path) -> None:
        """`model`: as vLLM has loaded it from `directory`. Raises ConfigError for one whose experts are in layers that
        are not known here, or from whose other weights vLLM derives what is no parameter."""
        self._layers = [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]
        if not self._layers:
            config = json.loads((directory / "config.json").read_bytes())
            for key, number in _numbers_of("experts", config):
                raise ConfigError(
                    f"{key} = {number}, and {type(model).__name__} has its experts in no layer of vLLM's into which "
                    f"weights are published; {TORCH}"
                )
            return
        for method in {type(getattr(layer, "quant_method", None)) for layer in model.modules()}:
            if issubclass(method, QuantizeMethodBase) and method not in KEPT:
                raise ConfigError(
                    f"no weights are published into experts beside layers of {method.__name__} in vLLM; {TORCH}"
                )
        if hasattr(model, "process_weights_after_loading"):
            raise ConfigError(f"no weights are published into experts of {type(model).__name__} in vLLM; {TORCH}")

    def __bool__(self) -> bool:
        return bool(self._layers)

    def unpack(self) -> None:
        """Give the parameters the form in which weights are loaded, all 0. Where it has another shape they get other
        memory."""
        for layer in self._layers:
            loaded, _ = get_layerwise_info(layer).restore_metadata
            for name, parameter in _own(layer).items():
                if parameter.shape != loaded[name].shape:
                    parameter.data = parameter.new_empty(loaded[name].shape)
                parameter.zero_()

    def pack(self) -> None:
        """Give what was loaded the form that is computed with; layer by layer, so that two forms of only one are there
        at once."""
        for layer in self._layers:
            loaded = _own(layer)
            try:
                # Of a layer that has been through this vLLM leaves out the second step, which packs on CPUs.
                layer.quant_method.process_weights_after_loading(layer)
                layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)
                packed = {name: parameter.data for name, parameter in _own(layer).items()}
            finally:
                layer._parameters.update(loaded)
            for name, parameter in loaded.items():
                parameter.data = packed[name]


def _numbers_of(ending: str, config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Keys that end so, with their numbers above 1, in nested tables, too."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _numbers_of(ending, value)
        elif key.endswith(ending) and isinstance(value, int) and value > 1:
            yield key, value


def _own(layer: nn.Module) -> dict[str, nn.Parameter]:
    return dict(layer.named_parameters(recurse=False))


def published(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a Hugging Face directory as trainers publish them: all experts of a layer in two."""
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in directory.glob("*.safetensors")]
        where: dict[str, Any] = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        parts: dict[str, list[str]] = {}
        for name in where:
            parts.setdefault(fused(name)[0], []).append(name)
        for whole, names in parts.items():
            yield whole, where[whole].get_tensor(whole) if whole in where else _joined(where, names)


def _joined(where: Mapping[str, Any], names: list[str]) -> Tensor:
    """All experts in one tensor, one below another in each: [experts, rows, columns]."""
    experts: dict[int, list[str]] = {}
    for name in sorted(names):
        experts.setdefault(fused(name)[1] or 0, []).append(name)
    rows = [torch.cat([where[name].get_tensor(name) for name in experts[expert]]) for expert in sorted(experts)]
    return torch.stack(rows)
