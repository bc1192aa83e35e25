"""Weights through Ray's object store: shared memory on one node, and Ray's own transfer between nodes.

A version is one object. Ray frees it when the trainer has put the next but one and nobody holds its payload.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from asyncrlhf.errors import PublishRefused

__all__ = ("ObjectTransfer",)

TIMEOUT = 60.0
"""Seconds that an object may take to arrive."""


class ObjectTransfer:
    """A WeightTransfer for engines that are Ray actors."""

    def __init__(self) -> None:
        self._kept: deque[Any] = deque(maxlen=2)

    @torch.no_grad()
    def send(self, version: int, weights: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Put `weights` into the object store. Raises ray.exceptions.ObjectStoreFullError when they do not fit."""
        arrays = {name: _bytes_of(tensor) for name, tensor in weights.items()}
        layout = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in weights.items()}
        reference = ray.put(arrays)
        self._kept.append(reference)
        return {"reference": reference, "version": version, "layout": layout}

    def receive(self, payload: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """The tensors, one copy at a time. Raises PublishRefused if they are gone."""
        try:
            arrays: Mapping[str, Any] = ray.get(payload["reference"], timeout=TIMEOUT)
        except (RayError, TimeoutError) as error:
            first = str(error).partition("\\n")[0]
            raise PublishRefused(f"weights of version {payload['version']} are gone: {first}") from error
        for name, (dtype, shape) in payload["layout"].items():
            yield name, _tensor_of(arrays[name], getattr(torch, dtype), shape)


def _bytes_of(tensor: Tensor) -> Any:
    """uint8 [bytes]: numpy has no bfloat16."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def _tensor_of(array: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A copy, since what lies in the object store is read-only."""
    return torch.from_numpy(array.copy()).view(dtype).view(shape) if array.size else torch.empty(shape, dtype=dtype)
