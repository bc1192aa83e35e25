"""What one worker needs of every version, read where the trainer's ranks have put it and written where it belongs.

Of M bytes in its machine's memory a worker of t reads M/t, and of those each once; what comes over a network comes
whole, of every rank that has a slice for it. A worker on the device of one of the ranks takes what that rank has put
from it, and the rest from those that are nearest. This takes a table of where vLLM keeps a family's parameters
(weights/vllm_layout.py), which is held against what vLLM itself has loaded; models of other families are loaded by
vLLM's own loaders, parameter by parameter (worker.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from asyncrlhf.abc import WeightTransfer
from asyncrlhf.errors import ConfigError, PublishRefused
from asyncrlhf.messages import WeightHandle, import_object
from asyncrlhf.weights.assemble import on_this_machine
from asyncrlhf.weights.layout import Holding, Layout, Place, Shelf
from asyncrlhf.weights.parts import ASSEMBLED
from asyncrlhf.weights.plan import Plan, make_plan
from asyncrlhf.weights.pull import Receipt, pull
from asyncrlhf.weights.regions import region, require_shape
from asyncrlhf.weights.shapes import Dtype, model_shape
from asyncrlhf.weights.vllm_layout import VllmParallel, vllm_layout

__all__ = ("Slices", "shapes_in")

WHOLE = 1 << 20
"""Number in a plan of whoever has put whole parameters: above those of all ranks of a trainer."""
FIRST = WHOLE + 1
"""Number in a plan of the first worker that is on no rank's device."""
HERE = "here"
"""This machine's name in a plan."""
CAP = 1 << 40
"""No message is sent, so that moves need not be cut."""


class Slices:
    """The plan of one worker."""

    def __init__(self, layout: Layout, rank: int, near: Mapping[int, Sequence[int]]) -> None:
        """`layout`: where all workers keep the parameters. `rank`: the number of this one there. `near`: by number,
        whom a worker takes from first."""
        self._layout, self._rank, self._near = layout, rank, near
        self._transports: dict[str, WeightTransfer] = {}
        self._plans: dict[tuple[bytes, frozenset[int]], Plan] = {}

    @classmethod
    def of(
        cls,
        directory: Path,
        parameters: Mapping[str, Tensor],
        rank: int,
        ranks: int,
        beside: Sequence[Sequence[int]] = (),
    ) -> Self | None:
        """For `parameters`, those of worker `rank` of `ranks`, loaded from `directory`; None if there is no table, or
        one that says something else than they do. `beside`: by worker the trainer's ranks that are nearest, first the
        one whose device it is on; left out: none is."""
        numbers = [near[0] for near in beside] or range(FIRST, FIRST + ranks)
        config = json.loads((directory / "config.json").read_bytes())
        dtype = cast("Dtype", str(next(iter(parameters.values())).dtype).removeprefix("torch."))
        try:
            where = [Place(number, HERE) for number in numbers]
            layout = vllm_layout(model_shape(config, dtype), VllmParallel(tensor=ranks), where)
        except ConfigError:
            return None
        made = cls(layout, numbers[rank], {near[0]: near for near in beside})
        return made if made._agrees(directory, parameters) else None

    def receive(self, handle: WeightHandle, into: Mapping[str, Tensor]) -> Receipt:
        """Fill `into`, by vLLM's names. Raises PublishRefused if the weights are those of another model, or are gone.
        Their checksum is the caller's to hold against the announced one, with what the other workers have read."""
        payload = handle.payload
        if handle.transport == ASSEMBLED:
            path, shards, encoded = payload["transport"], payload["shards"], payload["layout"]
        else:
            path, shards, encoded = handle.transport, (payload,), b""
        if path not in self._transports:
            self._transports[path] = import_object(path)()
        try:
            plan = self._plan(encoded, on_this_machine(shards))
        except ConfigError as error:
            raise PublishRefused(f"version {handle.version} does not fit into this model: {error}") from error
        transport = self._transports[path] if encoded else _Whole(self._transports[path], self._layout, handle.version)
        payloads = dict(enumerate(shards)) if encoded else {WHOLE: shards[0]}
        return pull(plan, self._rank, payload["version"], payloads, transport, into)

    def _plan(self, encoded: bytes, here: frozenset[int]) -> Plan:
        """From the ranks of this layout, of which those are on this machine, or from whole parameters."""
        if (encoded, here) not in self._plans:
            ranks = msgspec.msgpack.decode(encoded, type=Layout) if encoded else None
            source = _whole(self._layout) if ranks is None else _by_index(ranks, here)
            self._plans[encoded, here] = make_plan(source, self._layout, cap=CAP, near=self._near)
        return self._plans[encoded, here]

    def _agrees(self, directory: Path, parameters: Mapping[str, Tensor]) -> bool:
        """Whether the table has these tensors, and the directory's weights where vLLM has put them."""
        holding = next(holding for holding in self._layout.holdings if holding.place.rank == self._rank)
        if {name: tensor.shape for name, tensor in holding.tensors.items()} != {
            name: tuple(parameter.shape) for name, parameter in parameters.items()
        }:
            return False
        slices: dict[str, list[Any]] = {}
        for piece in holding.slices:
            slices.setdefault(piece.parameter, []).append(piece)
        for name, file in _tensors_in(directory):
            for piece in slices.pop(name, ()):
                lengths = tuple(high - low for low, high in piece.box)
                there = region(parameters[piece.tensor].detach(), piece.offset, lengths)
                here = file[tuple(slice(low, high) for low, high in piece.box)]
                if not torch.equal(here.to(there.device, there.dtype), there):
                    return False
        return not slices


class _Whole:
    """A transport of whole parameters that brings those of this model, all of their shape, and no others."""

    def __init__(self, inner: WeightTransfer, layout: Layout, version: int) -> None:
        self._inner, self._parameters, self._version = inner, layout.parameters, version

    def receive(self, payload: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        missing = set(self._parameters)
        for name, tensor in self._inner.receive(payload):
            missing.discard(name)
            known = self._parameters.get(name)
            require_shape(self._version, name, tensor.shape, known and known.shape)
            yield name, tensor
        if missing:
            raise PublishRefused(
                f"version {self._version} lacks {len(missing)} parameters of this model, among them {min(missing)!r}"
            )


def _whole(layout: Layout) -> Layout:
    """One rank that has every parameter."""
    shelf = Shelf(Place(WHOLE))
    for parameter in layout.parameters.values():
        shelf.whole(parameter, parameter.name)
    return Layout("whole parameters", layout.parameters, (shelf.holding(),))


def _by_index(layout: Layout, here: frozenset[int]) -> Layout:
    """The same, its ranks numbered as their payloads are, and those that are not on this machine on another."""
    places = (Place(index, HERE if index in here else "elsewhere") for index in range(len(layout.holdings)))
    holdings = (Holding(place, own.tensors, own.slices) for place, own in zip(places, layout.holdings, strict=True))
    return Layout(layout.name, layout.parameters, tuple(holdings))


def shapes_in(directory: Path) -> Iterator[tuple[str, torch.Size]]:
    """Name and shape of every tensor of a Hugging Face directory."""
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, torch.Size(file.get_slice(name).get_shape())


def _tensors_in(directory: Path) -> Iterator[tuple[str, Any]]:
    """Name and a slicable of every tensor of a Hugging Face directory; only what is sliced is read."""
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_slice(name)
