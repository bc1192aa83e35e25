"""Weights between processes of one machine: the trainer writes one of two areas of shared memory, engines read it.

The memory is anonymous (memfd): it has no name that could be left behind, and is freed with the last process that maps
it. Receivers reach it through the sender's /proc/PID/fd. A header in each area says whose it is and which version it
holds, before and after the bytes are written, so that a reader notices when newer ones took their place.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrlhf.errors import GroupError, PublishRefused

__all__ = ("SharedMemoryTransfer",)

_HEADER = struct.Struct("<16sqq")
"""Token of the sender's area, version whose writing began last, version that is whole."""
_ALIGNMENT = 64
_KEPT = 8
"""Areas that a receiver keeps mapped."""

Layout = tuple[tuple[str, str, tuple[int, ...], int], ...]
"""(name, dtype, shape, offset) of every tensor."""


class _Descriptor:
    """Of a file, which is closed with the last that refers to this."""

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, os.close, number)


@dataclass(frozen=True, slots=True, eq=False)
class _Area:
    """Shared memory that this process writes."""

    descriptor: _Descriptor
    memory: mmap.mmap
    token: bytes
    layout: Layout
    tensors: dict[str, Tensor]


class SharedMemoryTransfer:
    """A WeightTransfer for engines in processes of one machine (Linux)."""

    def __init__(self) -> None:
        self._areas: list[_Area | None] = [None, None]
        self._sent = 0
        self._mapped: dict[tuple[int, int, bytes], mmap.mmap] = {}

    @torch.no_grad()
    def send(self, version: int, weights: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Copy `weights` into the older area. Raises OSError when the machine has no memory for it."""
        slot = self._sent % 2
        layout, size = _layout(weights)
        area = self._areas[slot]
        if area is None or area.layout != layout:
            self._areas[slot] = None
            self._areas[slot] = area = self._allocate(layout, size)
        _HEADER.pack_into(area.memory, 0, area.token, version, -1)
        for name, tensor in weights.items():
            area.tensors[name].copy_(tensor)
        _HEADER.pack_into(area.memory, 0, area.token, version, version)
        self._sent += 1
        return {
            "pid": os.getpid(),
            "descriptor": area.descriptor.number,
            "token": area.token,
            "size": size,
            "version": version,
            "layout": layout,
        }

    def receive(self, payload: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """The tensors in place, to be read at once. Raises PublishRefused if newer bytes took their place, also while
        they were read, and GroupError if the process that holds them has ended."""
        memory = self._map(payload)
        self._require(memory, payload)
        for name, dtype, shape, offset in payload["layout"]:
            yield name, _view(memory, dtype, tuple(shape), offset)
        self._require(memory, payload)

    def raw(self, payload: Mapping[str, Any]) -> Tensor:
        """All bytes of an area in place, uint8 [payload["size"]]. Raises as `receive` does; whether they were there to
        the last is said by asking again."""
        memory = self._map(payload)
        self._require(memory, payload)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _allocate(self, layout: Layout, size: int) -> _Area:
        descriptor = _Descriptor(os.memfd_create("asyncrlhf-weights", os.MFD_CLOEXEC))
        os.posix_fallocate(descriptor.number, 0, size)
        memory = mmap.mmap(descriptor.number, size)
        tensors = {name: _view(memory, dtype, shape, offset) for name, dtype, shape, offset in layout}
        return _Area(descriptor, memory, os.urandom(16), layout, tensors)

    def _map(self, payload: Mapping[str, Any]) -> mmap.mmap:
        key = (payload["pid"], payload["descriptor"], payload["token"])
        if key not in self._mapped:
            while len(self._mapped) >= _KEPT:
                del self._mapped[next(iter(self._mapped))]
            try:
                with open(f"/proc/{key[0]}/fd/{key[1]}", "rb", opener=_at_once) as file:
                    self._mapped[key] = mmap.mmap(file.fileno(), payload["size"], access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise GroupError(
                    f"weights of version {payload['version']} are gone: process {key[0]} of this machine does not hold "
                    f"them, or not any more ({error})"
                ) from error
        return self._mapped[key]

    def _require(self, memory: mmap.mmap, payload: Mapping[str, Any]) -> None:
        token, begun, whole = _HEADER.unpack_from(memory, 0)
        if token != payload["token"] or not begun == whole == payload["version"]:
            with contextlib.suppress(KeyError):
                del self._mapped[payload["pid"], payload["descriptor"], payload["token"]]
            held = f"version {begun}" if token == payload["token"] else "something else"
            raise PublishRefused(
                f"weights of version {payload['version']} are gone: their place in process {payload['pid']} holds "
                f"{held}. A version can be read until the next but one is published"
            )


def _at_once(path: str, flags: int) -> int:
    """Whatever has the number by now: an area that was replaced is closed."""
    return os.open(path, flags | os.O_NONBLOCK)


def _layout(weights: Mapping[str, Tensor]) -> tuple[Layout, int]:
    """Where every tensor lies, and the size of it all in bytes."""
    found: list[tuple[str, str, tuple[int, ...], int]] = []
    end = _HEADER.size
    for name, tensor in weights.items():
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        found.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
        end = offset + tensor.numel() * tensor.element_size()
    return tuple(found), end


def _view(memory: mmap.mmap, dtype: str, shape: tuple[int, ...], offset: int) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    count = 1
    for length in shape:
        count *= length
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=offset).view(shape)
