"""Where every slice of every parameter lies: a layout is what a set of ranks holds, as values, without any tensor.

A slice says that a rectangle of a Hugging Face parameter lies in one local tensor, at an offset: what is fused, split,
replicated or padded in some engine is then all the same to whoever moves weights from one engine to another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from asyncrlhf.errors import ConfigError
from asyncrlhf.weights.shapes import BYTES, Dtype, Parameter

__all__ = (
    "Box",
    "Holding",
    "Layout",
    "LocalTensor",
    "Place",
    "Slice",
    "full_box",
    "places",
    "share",
    "without_replicas",
)

Box = tuple[tuple[int, int], ...]
"""A rectangle: (first, past the last) index in every dimension of a parameter."""


class Place(msgspec.Struct, frozen=True):
    """Where a rank runs. Two ranks with the same `rank` share a process or a device: between them bytes are copied.

    Example: Place(rank=5, node="b") is rank 5 of those that take part in moving weights, on machine "b".
    """

    rank: int
    node: str = ""


class LocalTensor(msgspec.Struct, frozen=True):
    """A tensor that one rank holds. What no slice covers is padding."""

    shape: tuple[int, ...]
    dtype: Dtype


class Slice(msgspec.Struct, frozen=True):
    """A rectangle of a parameter, in a local tensor.

    Example: Slice("...k_proj.weight", ((80, 160), (0, 640)), "...qkv_proj.weight", (320, 0)): rows 80 to 160 of the
    keys start at row 320 of the fused tensor. A local tensor with more dimensions than the parameter (experts in one
    tensor) has them first, and `offset` picks one index of each.
    """

    parameter: str
    box: Box
    tensor: str
    offset: tuple[int, ...]


class Holding(msgspec.Struct, frozen=True):
    """All that one rank holds."""

    place: Place
    tensors: dict[str, LocalTensor]
    slices: tuple[Slice, ...]


class Layout(msgspec.Struct, frozen=True):
    """All ranks of one side: of a trainer, or of all the engines that follow it."""

    name: str
    """What messages call it, for example "megatron tp2 pp2"."""
    parameters: dict[str, Parameter]
    holdings: tuple[Holding, ...]


class Shelf:
    """Collects what one rank holds, and refuses what does not fit into its local tensors."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._tensors: dict[str, LocalTensor] = {}
        self._slices: list[Slice] = []

    def tensor(self, name: str, shape: tuple[int, ...], dtype: Dtype) -> None:
        """A local tensor; told again, it must be the same."""
        known = self._tensors.setdefault(name, LocalTensor(shape, dtype))
        if known.shape != shape:
            raise ConfigError(f"local tensor {name} has shape {known.shape} for one parameter, {shape} for another")

    def put(self, parameter: Parameter, box: Box, name: str, shape: tuple[int, ...], offset: tuple[int, ...]) -> None:
        """`box` of `parameter` lies at `offset` of local tensor `name` of `shape`; an empty box only declares it."""
        self.tensor(name, shape, parameter.dtype)
        lengths = [high - low for low, high in box]
        if min(lengths) <= 0:
            return
        extent = [1] * (len(offset) - len(box)) + lengths
        if len(offset) != len(shape) or any(o + n > m for o, n, m in zip(offset, extent, shape, strict=True)):
            raise ConfigError(
                f"{parameter.name}: a piece of shape {tuple(lengths)} at {offset} does not fit into {name} of shape "
                f"{shape}"
            )
        self._slices.append(Slice(parameter.name, box, name, offset))

    def whole(self, parameter: Parameter, name: str) -> None:
        """All of a parameter, as a tensor of its own."""
        self.put(parameter, full_box(parameter.shape), name, parameter.shape, (0,) * len(parameter.shape))

    def split(self, parameter: Parameter, name: str, dim: int, rank: int, ranks: int) -> None:
        """This rank's equal share along `dim`, as a tensor of its own."""
        width = share(parameter.name, parameter.shape[dim], ranks)
        box, shape = list(full_box(parameter.shape)), list(parameter.shape)
        box[dim], shape[dim] = (rank * width, (rank + 1) * width), width
        self.put(parameter, tuple(box), name, tuple(shape), (0,) * len(shape))

    def rows(self, parameter: Parameter, first: int, count: int, name: str, total: int, offset: int) -> None:
        """`count` rows from `first`, at row `offset` of a local tensor of `total` rows."""
        tail = full_box(parameter.shape[1:])
        shape = (total, *parameter.shape[1:])
        self.put(parameter, ((first, first + count), *tail), name, shape, (offset, *(0 for _ in tail)))

    def vocabulary(self, parameter: Parameter, name: str, padded: int, rank: int, ranks: int) -> None:
        """This rank's share of `padded` rows, of which the checkpoint has fewer."""
        width = share(f"padded vocabulary of {parameter.name}", padded, ranks)
        first = min(rank * width, parameter.shape[0])
        self.rows(parameter, first, min((rank + 1) * width, parameter.shape[0]) - first, name, width, 0)

    def holding(self) -> Holding:
        return Holding(self._place, self._tensors, tuple(self._slices))


def full_box(shape: Sequence[int]) -> Box:
    return tuple((0, length) for length in shape)


def share(what: str, length: int, ranks: int) -> int:
    """`length / ranks`. Raises ConfigError if that is not whole."""
    if length % ranks:
        raise ConfigError(f"{what}: {length} does not divide into {ranks} equal parts")
    return length // ranks


def places(count: int, *, first: int = 0, per_node: int = 0) -> tuple[Place, ...]:
    """Ranks `first` .. `first + count`, `per_node` on each machine; 0: all on one."""
    ranks = range(first, first + count)
    return tuple(Place(rank, str(rank // per_node) if per_node else "") for rank in ranks)


def without_replicas(layout: Layout) -> Layout:
    """The layout with every tensor on one rank of those that hold the same, such that all hold about as many bytes:
    then what all ranks send is the model, once."""
    found: dict[frozenset[tuple[str, Box]], list[tuple[int, str]]] = {}
    pieces: dict[tuple[int, str], list[Slice]] = {}
    for index, holding in enumerate(layout.holdings):
        for piece in holding.slices:
            pieces.setdefault((index, piece.tensor), []).append(piece)
    for where, slices in pieces.items():
        found.setdefault(frozenset((piece.parameter, piece.box) for piece in slices), []).append(where)
    load = [0] * len(layout.holdings)
    chosen: set[tuple[int, str]] = set()

    def size(where: tuple[int, str]) -> int:
        index, name = where
        tensor = layout.holdings[index].tensors[name]
        return math.prod(tensor.shape) * BYTES[tensor.dtype]

    for copies in sorted(found.values(), key=lambda copies: -size(copies[0])):
        best = min(copies, key=lambda where: load[where[0]])
        load[best[0]] += size(best)
        chosen.add(best)
    holdings = tuple(
        Holding(
            holding.place,
            {name: tensor for name, tensor in holding.tensors.items() if (index, name) in chosen},
            tuple(piece for piece in holding.slices if (index, piece.tensor) in chosen),
        )
        for index, holding in enumerate(layout.holdings)
    )
    return Layout(layout.name, layout.parameters, holdings)
