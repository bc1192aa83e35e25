"""Where the parameters of a model lie that torch's FSDP2 has cut: rows in even chunks, of which the last may be short
or empty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrlhf.weights.layout import Holding, Layout, Place, Shelf
from asyncrlhf.weights.shapes import Dtype, Parameter, Part

__all__ = ("layout_of", "local_parts")


def layout_of(parameters: Mapping[str, Tensor], ranks: int) -> Layout:
    """Of all ranks; tensors carry the names of the parameters."""
    described = {name: _described(name, parameter) for name, parameter in parameters.items()}
    holdings = tuple(_holding(described, Place(rank), ranks) for rank in range(ranks))
    return Layout(f"torch fsdp{ranks}", described, holdings)


def local_parts(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this rank has of every parameter."""
    return {name: cast("DTensor", parameter).to_local().detach() for name, parameter in parameters.items()}


def _described(name: str, parameter: Tensor) -> Parameter:
    dtype = cast("Dtype", str(parameter.dtype).removeprefix("torch."))
    return Parameter(name=name, shape=tuple(parameter.shape), dtype=dtype, part=Part.OTHER)


def _holding(parameters: Mapping[str, Parameter], place: Place, ranks: int) -> Holding:
    shelf = Shelf(place)
    for name, parameter in parameters.items():
        rows = parameter.shape[0]
        chunk = -(-rows // ranks)
        low = min(place.rank * chunk, rows)
        count = min(low + chunk, rows) - low
        shelf.rows(parameter, low, count, name, count, 0)
    return shelf.holding()
