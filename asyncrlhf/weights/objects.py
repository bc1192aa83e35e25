"""Weights through Ray's object store: shared memory on one node, and Ray's own transfer between nodes.

A version is a list of buckets, each one object with the bytes of some tensors. Sending copies every byte once, into the
store; receivers read it there, or on another node in what Ray has brought, which is the next bucket while they work on
one. So beside the model, its trainer holds a bucket or two, or the largest tensor if that is more, and every receiver
one more while the end of the last one is copied. Ray frees a version when the trainer has put the next but one and
nobody holds its payload; if the trainer's process ends its weights go with it, and the run then goes on from its newest
checkpoint.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from asyncrlhf.errors import GroupError

__all__ = ("ObjectTransfer",)

TIMEOUT = 60.0
"""Seconds that a bucket may take to arrive."""

Layout = tuple[tuple[str, str, tuple[int, ...]], ...]
"""(name, dtype, shape) of every tensor in a bucket."""


class ObjectTransfer:
    """A WeightTransfer for engines that are Ray actors."""

    def __init__(self, bucket_bytes: int = 256 << 20) -> None:
        """`bucket_bytes`: a bucket holds at most so much, or one tensor."""
        self._bucket_bytes = bucket_bytes
        self._kept: deque[list[Any]] = deque()

    @torch.no_grad()
    def send(self, version: int, weights: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Put `weights` into the object store. Raises ray.exceptions.ObjectStoreFullError when they do not fit."""
        if len(self._kept) > 1:
            self._kept.popleft()  # before the new ones take its place
        references: list[Any] = []
        layouts: list[Layout] = []
        for names in self._buckets(weights):
            references.append(ray.put([_bytes_of(weights[name]) for name in names]))
            layouts.append(tuple((name, _dtype_of(weights[name]), tuple(weights[name].shape)) for name in names))
        self._kept.append(references)
        return {"version": version, "buckets": references, "layouts": layouts}

    def receive(self, payload: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """The tensors in place, to be read and not written. Raises GroupError if they do not arrive, for
        which the engine is fenced; if the trainer has ended, its own loss ends the session."""
        references, layouts = payload["buckets"], payload["layouts"]
        for number, layout in enumerate(layouts):
            ahead = references[number : number + 2]
            ray.wait(ahead, num_returns=len(ahead), timeout=0)  # so that the next one is brought meanwhile
            try:
                arrays: list[Any] = ray.get(references[number], timeout=TIMEOUT)
            except (RayError, TimeoutError) as error:
                first = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                raise GroupError(f"weights of version {payload['version']} have not arrived: {first}") from error
            for (name, dtype, shape), array in zip(layout, arrays, strict=True):
                yield name, _view(array, getattr(torch, dtype), shape)

    def _buckets(self, weights: Mapping[str, Tensor]) -> Iterator[list[str]]:
        """The names of each bucket, in their order."""
        names: list[str] = []
        size = 0
        for name, tensor in weights.items():
            if names and size + tensor.nbytes > self._bucket_bytes:
                yield names
                names, size = [], 0
            names.append(name)
            size += tensor.nbytes
        if names:
            yield names


def _dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes_of(tensor: Tensor) -> Any:
    """uint8 [bytes], the tensor's own where it is contiguous and on the CPU: numpy has no bfloat16."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def _view(array: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor on these bytes. What lies in the object store is read-only, which torch has no word for."""
    if not array.size:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_uint8 * array.size).from_address(array.ctypes.data)
    memory.owner = array
    return torch.frombuffer(memory, dtype=dtype).view(shape)
