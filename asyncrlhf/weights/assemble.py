"""Weights that several ranks have put, read as one checkpoint: a WeightTransfer for engines that load whole parameters.

Each rank of the trainer puts what it holds through a transport between threads, processes or Ray actors, and the group
makes one payload of theirs. An engine then receives Hugging Face parameters one after another, put together from the
slices where they lie, those of this machine first where several ranks have put the same; never is more than one of them
whole beside the engine's own. Nobody waits: a version stays
readable until the next but one is put.

    rank r of the trainer     payload = SharedMemoryTransfer().send(7, dict(chunks.named_parameters()))
                              own = part(layout, "asyncrlhf.weights.shared:SharedMemoryTransfer", payload)
    its group                 whole = joined(own of every rank)
                              WeightHandle(transport="asyncrlhf.weights.assemble:AssembledTransfer", payload=whole, ...)
    an engine                 for name, tensor in AssembledTransfer().receive(handle.payload): ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import torch
from torch import Tensor

from asyncrlhf.abc.transfer import WeightTransfer
from asyncrlhf.errors import PublishRefused
from asyncrlhf.messages import import_object
from asyncrlhf.weights.layout import Box, Layout, full_box
from asyncrlhf.weights.regions import region
from asyncrlhf.weights.shapes import Parameter
from asyncrlhf.weights.whereabouts import machine

__all__ = ("AssembledTransfer", "on_this_machine")


class AssembledTransfer:
    """Reads what `assembled` has made one of; to be used by one engine."""

    def __init__(self) -> None:
        self._transports: dict[str, WeightTransfer] = {}

    @torch.no_grad()
    def receive(self, payload: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """The parameters, to be read at once and not written. Raises PublishRefused if one is not there whole, or if
        newer bytes took its place, also while it was read."""
        transport = self._transport(payload["transport"])
        for shard in payload["shards"]:
            if shard["version"] != payload["version"]:
                raise PublishRefused(f"version {payload['version']} came with a part of version {shard['version']}")
        sources = _sources(payload["layout"], on_this_machine(payload["shards"]))
        uses = Counter((source.index, source.tensor) for _, parts in sources for source in parts)
        needed = {index for index, _ in uses}
        streams = {
            index: _Stream(index, transport.receive(shard), uses)
            for index, shard in enumerate(payload["shards"])
            if index in needed
        }
        for parameter, parts in sources:
            yield parameter.name, _whole(parameter, parts, streams)
        for stream in streams.values():
            stream.end()

    def _transport(self, path: str) -> WeightTransfer:
        if path not in self._transports:
            self._transports[path] = import_object(path)()
        return self._transports[path]


class _Stream:
    """The tensors that one rank has put, as they come: each is kept from when it arrives until its last use."""

    def __init__(self, index: int, arriving: Iterator[tuple[str, Tensor]], uses: Counter[tuple[int, str]]) -> None:
        """`uses`: how often each tensor of each rank is asked for."""
        self._arriving = arriving
        self._left = {name: count for (rank, name), count in uses.items() if rank == index}
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str) -> Tensor | None:
        """None: the rank has not put it."""
        while name not in self._kept:
            arrived = next(self._arriving, None)
            if arrived is None:
                return None
            if self._left.get(arrived[0]):
                self._kept[arrived[0]] = arrived[1]
        self._left[name] -= 1
        return self._kept[name] if self._left[name] else self._kept.pop(name)

    def end(self) -> None:
        """Let the transport say whether the bytes were there to the last."""
        for _ in self._arriving:
            pass


class _Source(msgspec.Struct, frozen=True):
    """Where a rectangle of a parameter is."""

    box: Box
    index: int
    """Which of the layout's ranks."""
    tensor: str
    offset: tuple[int, ...]


@lru_cache(maxsize=4)
def _sources(encoded: bytes, first: frozenset[int]) -> tuple[tuple[Parameter, tuple[_Source, ...]], ...]:
    """Every parameter with slices that cover it once, from the ranks `first` where they have them. Raises
    PublishRefused when they do not."""
    layout = msgspec.msgpack.decode(encoded, type=Layout)
    found: dict[str, dict[Box, _Source]] = {name: {} for name in layout.parameters}
    for index in sorted(range(len(layout.holdings)), key=lambda index: index not in first):
        for piece in layout.holdings[index].slices:
            found[piece.parameter].setdefault(piece.box, _Source(piece.box, index, piece.tensor, piece.offset))
    for name, sources in found.items():
        covered = sum(_count(box) for box in sources)
        if covered != _count(full_box(layout.parameters[name].shape)):
            raise PublishRefused(
                f"{layout.name} covers {covered} elements of {name}, of shape {layout.parameters[name].shape}"
            )
    return tuple((parameter, tuple(found[name].values())) for name, parameter in layout.parameters.items())


def _whole(parameter: Parameter, sources: Sequence[_Source], streams: Mapping[int, _Stream]) -> Tensor:
    parts: list[tuple[Box, Tensor]] = []
    for source in sources:
        tensor = streams[source.index].take(source.tensor)
        if tensor is None:
            raise PublishRefused(f"{parameter.name}: rank {source.index} has put no {source.tensor}")
        lengths = tuple(high - low for low, high in source.box)
        parts.append((source.box, region(tensor, source.offset, lengths)))
    if len(parts) == 1:
        return parts[0][1]
    full = torch.empty(parameter.shape, dtype=parts[0][1].dtype, device=parts[0][1].device)
    for box, part in parts:
        full[tuple(slice(low, high) for low, high in box)] = part
    return full


def on_this_machine(shards: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """Which of what ranks have put lies in the memory of this machine; none, where a transport does not say."""
    said = {index: shard["machine"] for index, shard in enumerate(shards) if "machine" in shard}
    here = machine() if said else ""
    return frozenset(index for index, where in said.items() if where == here)


def _count(box: Box) -> int:
    count = 1
    for low, high in box:
        count *= high - low
    return count
