"""Where the parameters of a megatron model lie in those that transformers has in memory, as engines that follow it
have them: all experts of a layer in two tensors, gate above up."""

from __future__ import annotations

from asyncrlhf.backends.megatron.exchange import Catalogue, Held
from asyncrlhf.backends.megatron.families import Piece
from asyncrlhf.weights.fused import fused
from asyncrlhf.weights.layout import Box, Holding, Layout, LocalTensor, Place, Slice, full_box
from asyncrlhf.weights.shapes import Dtype, Parameter, Part

__all__ = ("layout_of",)


def layout_of(catalogue: Catalogue, dtype: Dtype) -> Layout:
    """Of all ranks, as megatron-core has cut the model; tensors carry the names of `Model.parameters`."""
    experts: dict[str, int] = {}
    for name in catalogue.names:
        whole, expert = fused(name)
        if expert is not None:
            experts[whole] = max(experts.get(whole, 0), expert + 1)
    parameters: dict[str, Parameter] = {}
    for name in catalogue.names:
        whole, expert = fused(name)
        shape = catalogue.shape(name)
        if expert is not None:
            rows = shape[0] * (1 if _is_down(name) else 2)
            shape = (experts[whole], rows, *shape[1:])
        parameters[whole] = Parameter(name=whole, shape=shape, dtype=dtype, part=Part.OTHER)
    holdings = tuple(_holding(catalogue, parameters, rank, held, dtype) for rank, held in enumerate(catalogue.held))
    return Layout(f"megatron on {len(holdings)}", parameters, holdings)


def _holding(
    catalogue: Catalogue, parameters: dict[str, Parameter], rank: int, held: list[Held], dtype: Dtype
) -> Holding:
    tensors: dict[str, LocalTensor] = {}
    slices: list[Slice] = []
    for own in held:
        for piece in own.pieces:
            offset = [0] * len(own.shape)
            offset[piece.dim] = piece.local
            box = list(full_box(own.shape_of(piece)))
            box[piece.dim] = (piece.start, piece.stop)
            whole, expert = fused(piece.name)
            shape = own.shape
            if expert is not None:
                shape, offset = (1, *shape), [0, *offset]
                box = [(expert, expert + 1), *_lowered(catalogue, piece, box)]
            tensors[own.name] = LocalTensor(shape, dtype)
            slices.append(Slice(parameters[whole].name, tuple(box), own.name, tuple(offset)))
    return Holding(Place(rank), tensors, tuple(slices))


def _lowered(catalogue: Catalogue, piece: Piece, box: list[tuple[int, int]]) -> Box:
    """A rectangle of an expert's tensor in the one where `up` is below `gate`."""
    top = catalogue.shape(piece.name)[0] if piece.name.endswith("up_proj.weight") else 0
    return ((box[0][0] + top, box[0][1] + top), *box[1:])


def _is_down(name: str) -> bool:
    return name.endswith("down_proj.weight")
