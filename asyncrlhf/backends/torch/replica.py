"""The weights of an engine that follows a trainer: received into a second set of buffers, taken over in one swap."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from asyncrlhf.abc import WeightTransfer
from asyncrlhf.backends.torch.model import Model
from asyncrlhf.errors import PublishRefused
from asyncrlhf.messages import WeightHandle, import_object
from asyncrlhf.weights.checksum import Sums, require_checksum
from asyncrlhf.weights.layout import full_box
from asyncrlhf.weights.regions import require_shape

__all__ = ("Replica",)


class Replica:
    """Two sets of buffers for the parameters of `model`: those in use, and those the next version arrives in."""

    def __init__(self, model: Model, transport: str) -> None:
        self._parameters = model.parameters()
        self._shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        self._transports: dict[str, WeightTransfer] = {transport: import_object(transport)()}
        self._spare: dict[str, Tensor] = {}
        self._checksum: int | None = None
        self._prepared: WeightHandle | None = None

    @torch.no_grad()
    def prepare(self, handle: WeightHandle) -> None:
        """Receive the weights, unless those in use are the very same.

        Raises PublishRefused when the bytes do not have the announced checksum, when parameters are missing or
        unknown, or when a shape differs.
        """
        self._prepared = None
        if handle.checksum != self._checksum:
            if not self._spare:
                self._spare = {name: torch.empty_like(p, requires_grad=False) for name, p in self._parameters.items()}
            self._receive(handle, self._spare)
        self._prepared = handle

    @torch.no_grad()
    def commit(self, version: int) -> bool:
        """Use what `prepare` brought; False if nothing had to move. Raises ValueError for another version."""
        prepared = self._prepared
        if prepared is None or prepared.version != version:
            raise ValueError(
                f"commit({version}) without prepare({version}); prepared is {prepared and prepared.version}"
            )
        self._prepared = None
        if prepared.checksum == self._checksum:
            return False
        for name, parameter in self._parameters.items():
            parameter.data, self._spare[name] = self._spare[name], parameter.data
        self._checksum = prepared.checksum
        return True

    def drop_spare(self) -> None:
        """Free the set that is not in use, unless the next version is there already."""
        if self._prepared is None:
            self._spare = {}

    @torch.no_grad()
    def release(self) -> None:
        """Free both sets."""
        self._spare, self._prepared, self._checksum = {}, None, None
        for parameter in self._parameters.values():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    @torch.no_grad()
    def refill(self, handle: WeightHandle) -> None:
        """After `release`: receive weights into the set in use. Raises PublishRefused as `prepare` does; whatever it
        raises, both sets are free then."""
        for name, parameter in self._parameters.items():
            parameter.data = torch.empty(self._shapes[name], dtype=parameter.dtype, device=parameter.device)
        try:
            self._receive(handle, {name: parameter.data for name, parameter in self._parameters.items()})
        except BaseException:
            self.release()
            raise
        self._checksum = handle.checksum

    def _receive(self, handle: WeightHandle, into: Mapping[str, Tensor]) -> None:
        """Fill a set of buffers, and check what is now in them (before a change of dtype, if any)."""
        sums, missing = Sums[str](), set(into)
        for name, tensor in self._transport(handle.transport).receive(handle.payload):
            require_shape(handle.version, name, tensor.shape, self._shapes.get(name))
            sums.copy(name, tensor, into[name], full_box(tensor.shape), tensor.shape)
            missing.discard(name)
            if not missing:
                sums.settle()  # before the transport says whether the bytes were there to the last
        if missing:
            raise PublishRefused(
                f"version {handle.version} lacks {len(missing)} parameters, among them {min(missing)!r}"
            )
        require_checksum(handle, sums.settle().items())

    def _transport(self, path: str) -> WeightTransfer:
        if path not in self._transports:
            self._transports[path] = import_object(path)()
        return self._transports[path]
