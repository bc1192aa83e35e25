"""Inside vLLM's workers: weights from a trainer into the running model, without disk, in two phases.

vLLM mixes WeightsExtension into its worker class. Every worker holds a second set of its own parameters, which the
next version arrives in while the first is in use, and which is there before vLLM measures what a GPU has left for the
KV cache: the model's own loaders cut and fuse what arrives (a worker of a
tensor parallel group keeps its part only), and the swap is one of pointers on a CPU, a copy within the device's memory
on a GPU, whose captured graphs know the parameters by address.

A worker that sleeps has neither set, nor a KV cache: on GPUs through vLLM's sleep mode, which keeps addresses, and on
CPUs, where vLLM has none, by freeing the tensors. Woken, it reads weights into the first set; a second one is there
again from the next `prepare` on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from asyncrlhf.abc import WeightTransfer
from asyncrlhf.backends.torch.away import give_back
from asyncrlhf.backends.vllm.environment import CPU_BUILD
from asyncrlhf.errors import ConfigError, PublishRefused
from asyncrlhf.messages import WeightHandle, import_object
from asyncrlhf.weights.checksum import combine, tensor_checksum

from vllm.model_executor.layers import utils as vllm_layers  # isort: skip
from vllm.v1.worker.utils import clear_layer_kv_caches  # isort: skip

__all__ = ("WeightsExtension",)


def _read_live_weights(layer: nn.Module, remove_weight: bool) -> None:
    """In place of vLLM's choice of a matrix product on CPUs: its faster ones compute with packed copies of the weights,
    which a new version does not reach (with tied embeddings without any error)."""
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


if CPU_BUILD:
    vllm_layers.dispatch_cpu_unquantized_gemm = _read_live_weights


class WeightsExtension:
    """What vLLM's workers can do in addition; called on all of them at once."""

    device: torch.device
    model_runner: Any
    sleep: Callable[..., None]
    wake_up: Callable[[list[str]], None]

    _asyncrlhf_arrivals: Arrivals

    def asyncrlhf_reserve(self) -> str:
        """Allocate the second set. Gives the reason if there is no room for it, or no shapes to check it by."""
        runner = self.model_runner
        model: nn.Module = runner.get_model()
        try:
            self._asyncrlhf_arrivals = Arrivals(model, self.device, Path(runner.model_config.model))
        except ConfigError as refusal:
            return str(refusal)
        except torch.OutOfMemoryError as error:
            size = sum(parameter.nbytes for parameter in model.parameters()) / 2**30
            return (
                f"the weights take {size:.3g} GiB, and there is no room for them a second time, which the next version "
                "arrives in; raise tensor_parallel, choose a smaller dtype or a GPU of which less is in use "
                f"({error})"
            )
        return ""

    def asyncrlhf_prepare(self, handle: WeightHandle) -> str:
        """Receive weights into the second set. Gives the reason if they are refused; those in use stay."""
        try:
            self._asyncrlhf_arrivals.receive(handle)
        except PublishRefused as refusal:
            return str(refusal)
        return ""

    def asyncrlhf_commit(self) -> None:
        """Compute with what `asyncrlhf_prepare` brought."""
        self._asyncrlhf_arrivals.swap()

    def asyncrlhf_sleep(self) -> None:
        """Free weights and KV cache."""
        self._asyncrlhf_arrivals.release()
        if CPU_BUILD:
            clear_layer_kv_caches(self.model_runner.compilation_config.static_forward_context.values())
            self.model_runner.kv_caches.clear()
        else:
            self.sleep(level=2)
        give_back()

    def asyncrlhf_wake(self, handle: WeightHandle) -> str:
        """Receive weights into the memory in which they stay. Gives the reason if they are refused."""
        if not CPU_BUILD:
            self.wake_up(["weights"])
        try:
            self._asyncrlhf_arrivals.refill(handle)
        except PublishRefused as refusal:
            return str(refusal)
        return ""

    def asyncrlhf_wake_cache(self) -> None:
        """Make room for the KV cache again."""
        if CPU_BUILD:
            runner = self.model_runner
            runner.initialize_kv_cache_tensors(runner.kv_cache_config, runner._kernel_block_sizes)
        else:
            self.wake_up(["kv_cache"])


class Arrivals:
    """The second set of parameters."""

    def __init__(self, model: nn.Module, device: torch.device, directory: Path) -> None:
        """`directory`: where the model was loaded from. Raises ConfigError if it names no shapes to check by."""
        self._model, self._device = model, device
        self._shapes = dict(_shapes(directory))
        if not self._shapes:
            raise ConfigError(
                f"{directory} holds no weights as *.safetensors, whose shapes every version is held against; save the "
                "model there with save_pretrained"
            )
        self._parameters = dict(model.named_parameters())
        self._shapes_here = {name: parameter.shape for name, parameter in self._parameters.items()}
        self._spare = self._allocated()
        self._transports: dict[str, WeightTransfer] = {}

    @torch.no_grad()
    def receive(self, handle: WeightHandle) -> None:
        """Fill the second set. Raises PublishRefused when the bytes do not have the announced checksum, and when
        parameters are missing, unknown, or of another shape."""
        self._spare = self._spare or self._allocated()
        self._exchange()
        try:
            self._load(handle)
        finally:
            self._exchange()

    @torch.no_grad()
    def release(self) -> None:
        """Free both sets; on GPUs the first one is vLLM's to free."""
        self._spare = {}
        if self._device.type == "cpu":
            for parameter in self._parameters.values():
                parameter.data = torch.empty(0, dtype=parameter.dtype)

    @torch.no_grad()
    def refill(self, handle: WeightHandle) -> None:
        """After `release`: fill the set in use. Raises PublishRefused as `receive` does."""
        if self._device.type == "cpu":
            for name, tensor in self._allocated().items():
                self._parameters[name].data = tensor
        self._load(handle)

    def _load(self, handle: WeightHandle) -> None:
        """Let the model read weights into what its parameters now are."""
        parts: dict[str, int] = {}
        arriving = self._arriving(handle, parts)
        try:
            loaded: set[str] | None = self._model.load_weights(arriving)  # type: ignore[operator]
            for _ in arriving:  # what it had no use for counts, too
                pass
        except PublishRefused:
            raise
        except Exception as error:  # whatever a model's loader raises for names and shapes it does not know
            raise PublishRefused(
                f"version {handle.version} does not fit into {type(self._model).__name__}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if loaded is not None and (missing := sorted(self._parameters.keys() - loaded)):
            raise PublishRefused(
                f"version {handle.version} lacks {len(missing)} parameters of {type(self._model).__name__}, among them "
                f"{missing[0]!r}"
            )
        if (digest := combine(parts.items())) != handle.checksum:
            raise PublishRefused(
                f"version {handle.version} was announced with checksum {handle.checksum:#x}, but the bytes that "
                f"arrived have {digest:#x}; they are not used"
            )

    @torch.no_grad()
    def swap(self) -> None:
        """The two sets change places."""
        if self._device.type == "cpu":
            self._exchange()
            return
        for name, parameter in self._parameters.items():
            parameter.data.copy_(self._spare[name])

    def _allocated(self) -> dict[str, Tensor]:
        """Memory for a set."""
        return {
            name: torch.empty(shape, dtype=self._parameters[name].dtype, device=self._device)
            for name, shape in self._shapes_here.items()
        }

    def _exchange(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data, self._spare[name] = self._spare[name], parameter.data

    def _arriving(self, handle: WeightHandle, parts: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
        if handle.transport not in self._transports:
            self._transports[handle.transport] = import_object(handle.transport)()
        for name, tensor in self._transports[handle.transport].receive(handle.payload):
            shape = self._shapes.get(name, tensor.shape)
            if shape != tensor.shape:  # the model's loaders would take a part of it without a word
                raise PublishRefused(
                    f"version {handle.version} brings {name!r} of shape {tuple(tensor.shape)}, which this model has as "
                    f"{tuple(shape)}"
                )
            arrived = tensor.to(self._device)
            parts[name] = tensor_checksum(arrived)
            yield name, arrived


def _shapes(directory: Path) -> Iterator[tuple[str, torch.Size]]:
    """Name and shape of every tensor of a Hugging Face directory."""
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, torch.Size(file.get_slice(name).get_shape())
