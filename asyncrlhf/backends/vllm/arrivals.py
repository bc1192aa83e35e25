"""The two sets of a worker's parameters: those that vLLM computes with, and those in which the next version arrives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from asyncrlhf.abc import WeightTransfer
from asyncrlhf.backends.vllm.experts import TORCH, Experts, published
from asyncrlhf.backends.vllm.slices import Slices, shapes_in
from asyncrlhf.errors import ConfigError, PublishRefused
from asyncrlhf.messages import WeightHandle, import_object
from asyncrlhf.weights.checksum import require_checksum, tensor_checksum
from asyncrlhf.weights.pull import Receipt
from asyncrlhf.weights.regions import require_shape

__all__ = ("Arrivals",)


class Arrivals:
    """Reads slices where there is a table of them, and whole parameters through the model's own loaders otherwise:
    those cut and fuse what arrives. Models with experts are loaded whole."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        directory: Path,
        rank: int,
        ranks: int,
        beside: Sequence[Sequence[int]],
    ) -> None:
        """`directory`: where the model was loaded from, by worker `rank` of `ranks`. `beside`: see VllmOptions. Raises
        ConfigError if the directory names no shapes to check by, or if weights that come later would not become what
        vLLM computes with."""
        self._model, self._device = model, device
        self._shapes = dict(shapes_in(directory))
        if not self._shapes:
            raise ConfigError(
                f"{directory} holds no weights as *.safetensors, whose shapes every version is held against; save the "
                "model there with save_pretrained"
            )
        self._parameters = dict(model.named_parameters())
        self._shapes_here = {name: parameter.shape for name, parameter in self._parameters.items()}
        self._spare = self._allocated()
        self._experts = Experts(model, directory)
        if self._experts:
            self._require_same(directory)
        self.slices = None if self._experts else Slices.of(directory, self._parameters, rank, ranks, beside)
        """None: no table."""
        self._transports: dict[str, WeightTransfer] = {}

    @torch.no_grad()
    def receive(self, handle: WeightHandle) -> Receipt | None:
        """Fill the second set. Raises PublishRefused when parameters are missing, unknown, or of another shape. With
        slices the checksum is to be held against the announced one, of all workers together; without, it raises
        PublishRefused for a wrong one, too."""
        self._spare = self._spare or self._allocated()
        self._exchange()
        try:
            return self._fill(handle)
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
    def refill(self, handle: WeightHandle) -> Receipt | None:
        """After `release`: fill the set in use; what is padding is 0. Raises PublishRefused as `receive` does."""
        if self._device.type == "cpu":
            for name, tensor in self._allocated().items():
                self._parameters[name].data = tensor
            return self._fill(handle)
        kept = {name: parameter.data.zero_() for name, parameter in self._parameters.items()}  # as vLLM gave it back
        try:
            receipt = self._fill(handle)
            for name, parameter in self._parameters.items():
                if parameter.data_ptr() != kept[name].data_ptr():
                    kept[name].copy_(parameter)
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = kept[name]
        return receipt

    def _fill(self, handle: WeightHandle) -> Receipt | None:
        """Read weights into what the model's parameters now are."""
        self._experts.unpack()
        if self.slices is not None:
            receipt = self.slices.receive(handle, {name: p.data for name, p in self._parameters.items()})
        else:
            receipt = self._load(handle)
        self._experts.pack()
        return receipt

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
        require_checksum(handle, parts.items())

    @torch.no_grad()
    def _require_same(self, directory: Path) -> None:
        """Fill the second set with the weights of `directory`, as a trainer would publish them. Raises ConfigError
        unless both sets are the same then, bit by bit."""
        self._shapes.clear()
        model = type(self._model).__name__
        self._exchange()
        try:
            self._experts.unpack()
            self._model.load_weights(self._from(directory))  # type: ignore[operator]
            self._experts.pack()
        except Exception as error:  # whatever a model's loader raises for names and shapes it does not know
            raise ConfigError(
                f"no weights are published into experts of {model} in vLLM: their own, named as trainers name them, "
                f"were not taken ({type(error).__name__}: {error}); {TORCH}"
            ) from error
        finally:
            self._exchange()
        for name, parameter in self._parameters.items():
            if not torch.equal(parameter, self._spare[name]):
                raise ConfigError(
                    f"no weights are published into experts of {model} in vLLM: its own {name!r} became something else "
                    f"when it was loaded again; {TORCH}"
                )

    def _from(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in published(directory):
            self._shapes[name] = tensor.shape
            yield name, tensor.to(self._device)

    @torch.no_grad()
    def swap(self) -> None:
        """The two sets change places."""
        if self._device.type == "cpu":
            self._exchange()
            return
        for name, parameter in self._parameters.items():
            parameter.data.copy_(self._spare[name])

    def _allocated(self) -> dict[str, Tensor]:
        """Memory for a set; what is padding stays 0."""
        return {
            name: torch.zeros(shape, dtype=self._parameters[name].dtype, device=self._device)
            for name, shape in self._shapes_here.items()
        }

    def _exchange(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data, self._spare[name] = self._spare[name], parameter.data

    def _arriving(self, handle: WeightHandle, parts: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
        """Of no other shapes: the model's loaders would take a part of them without a word."""
        if handle.transport not in self._transports:
            self._transports[handle.transport] = import_object(handle.transport)()
        for name, tensor in self._transports[handle.transport].receive(handle.payload):
            unknown = None if self._experts else tensor.shape
            require_shape(handle.version, name, tensor.shape, self._shapes.get(name, unknown))
            arrived = tensor.to(self._device)
            parts[name] = tensor_checksum(arrived)
            yield name, arrived
