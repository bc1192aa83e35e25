"""Layouts of torch trainers: every rank whole (DDP), or sharded by rows (FSDP2), also in several replicas (HSDP).

Local tensors carry the names of transformers' modules, where all experts of a layer lie in two tensors; those of
`checkpoint_layout` carry the names of the checkpoint, for engines that load one and for writing one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from asyncrlhf.weights.layout import Holding, Layout, Place, Shelf, share
from asyncrlhf.weights.shapes import ModelShape, Parameter, Part

__all__ = ("checkpoint_layout", "fsdp_layout", "replicated_layout")


def replicated_layout(shape: ModelShape, places: Sequence[Place]) -> Layout:
    """Every rank holds every parameter."""
    return fsdp_layout(shape, places, shards=1)


def fsdp_layout(shape: ModelShape, places: Sequence[Place], *, shards: int = 0, padded: bool = False) -> Layout:
    """Dimension 0 of every tensor in `shards` chunks of ceil(rows / shards); the last ones may be short or empty.

    `shards`: 0 means over all ranks; fewer make replicas of consecutive ranks. `padded`: short chunks have room for as
    many rows as the others, as the storage behind FSDP2's tensors does.
    """
    shards = shards or len(places)
    share("ranks of a torch trainer", len(places), shards)
    parameters = shape.parameters()
    hold = partial(_holding, shape, parameters, shards=shards, padded=padded)
    name = f"torch dp{len(places)}" if shards == 1 else f"torch fsdp{shards} x {len(places) // shards}"
    holdings = tuple(hold(place, index % shards) for index, place in enumerate(places))
    return Layout(name, {parameter.name: parameter for parameter in parameters}, holdings)


def checkpoint_layout(shape: ModelShape, places: Sequence[Place], *, spread: bool = False) -> Layout:
    """Whole parameters, by their names in a checkpoint: all of them on every rank, or each on one of them (`spread`),
    such that all hold about the same number of bytes: then every rank writes a file of the checkpoint."""
    parameters = shape.parameters()
    shelves, load = [Shelf(place) for place in places], [0] * len(places)
    for parameter in parameters:
        least = load.index(min(load))
        load[least] += parameter.byte_count
        for shelf in [shelves[least]] if spread else shelves:
            shelf.whole(parameter, parameter.name)
    name = f"checkpoint {'over' if spread else 'on each of'} {len(places)}"
    return Layout(name, {p.name: p for p in parameters}, tuple(shelf.holding() for shelf in shelves))


def _holding(
    shape: ModelShape, parameters: Sequence[Parameter], place: Place, shard: int, *, shards: int, padded: bool
) -> Holding:
    shelf = Shelf(place)
    for parameter in parameters:
        name, whole, start = _in_module(shape, parameter)
        chunk = -(-whole[0] // shards)
        low = min(shard * chunk, whole[0])
        high = min(low + chunk, whole[0])
        local = (chunk if padded else high - low, *whole[1:])
        shelf.tensor(name, local, parameter.dtype)
        if parameter.expert >= 0:
            if low <= parameter.expert < high:
                box = tuple((0, length) for length in parameter.shape)
                shelf.put(parameter, box, name, local, (parameter.expert - low, *start))
        else:
            shelf.rows(parameter, low, high - low, name, local[0], 0)
    return shelf.holding()


def _in_module(shape: ModelShape, parameter: Parameter) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """(tensor of the module, its full shape, where the parameter starts in it, experts aside)."""
    if parameter.expert < 0:
        return parameter.name, parameter.shape, (0,) * len(parameter.shape)
    prefix = f"model.layers.{parameter.layer}.mlp.experts."
    if parameter.part is Part.DOWN:
        return prefix + "down_proj", (shape.experts, shape.hidden, shape.ff), (0, 0)
    start = shape.ff if parameter.part is Part.UP else 0
    return prefix + "gate_up_proj", (shape.experts, 2 * shape.ff, shape.hidden), (start, 0)
