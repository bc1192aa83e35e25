"""Layouts to move weights between, and what a plan does to them, with numpy arrays in the place of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrlhf.weights.layout import Box, Holding, Layout
from asyncrlhf.weights.plan import Plan
from asyncrlhf.weights.shapes import ModelShape

Array = NDArray[np.int64]

DENSE = ModelShape(
    hidden=16,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=2,
    ff=24,
    vocab=131,
    qkv_bias=True,
    qk_norm=True,
    dtype="float32",
)
MIXTURE = ModelShape(
    hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, ff=8, vocab=70, experts=4, tied=True, dtype="float32"
)


def full(shape: ModelShape) -> dict[str, Array]:
    """Every element of a model is another number, and none is negative."""
    found: dict[str, Array] = {}
    first = 0
    for parameter in shape.parameters():
        count = int(np.prod(parameter.shape))
        found[parameter.name] = np.arange(first, first + count, dtype=np.int64).reshape(parameter.shape)
        first += count
    return found


def region(tensor: Any, offset: tuple[int, ...], lengths: tuple[int, ...]) -> Any:
    extra = len(offset) - len(lengths)
    return tensor[(*offset[:extra], *(slice(o, o + n) for o, n in zip(offset[extra:], lengths, strict=True)))]


def lengths(box: Box) -> tuple[int, ...]:
    return tuple(high - low for low, high in box)


def held(holding: Holding, model: dict[str, Array]) -> dict[str, Array]:
    """What a rank holds of a model; padding is -1."""
    tensors = {name: np.full(tensor.shape, -1, dtype=np.int64) for name, tensor in holding.tensors.items()}
    for piece in holding.slices:
        target = region(tensors[piece.tensor], piece.offset, lengths(piece.box))
        assert (target == -1).all(), f"{piece.parameter} lies where something else lies, in {piece.tensor}"
        target[...] = model[piece.parameter][tuple(slice(low, high) for low, high in piece.box)]
    return tensors


def carried_out(
    plan: Plan, source: Layout, destination: Layout, model: dict[str, Array]
) -> dict[int, dict[str, Array]]:
    """What the ranks of the destination hold in the end."""
    sources = {holding.place.rank: held(holding, model) for holding in source.holdings}
    targets = {
        holding.place.rank: {name: np.full(t.shape, -1, dtype=np.int64) for name, t in holding.tensors.items()}
        for holding in destination.holdings
    }
    for move in plan.moves:
        taken = region(sources[move.source][move.source_tensor], move.source_offset, move.lengths)
        place = region(targets[move.target][move.target_tensor], move.target_offset, move.lengths)
        assert (place == -1).all(), f"{move.parameter} is moved twice"
        place[...] = taken
    return targets


def require_exact(plan: Plan, source: Layout, destination: Layout, model: dict[str, Array]) -> None:
    """Every byte is where the destination's layout says, padding is untouched, and nothing has come twice."""
    targets = carried_out(plan, source, destination, model)
    for holding in destination.holdings:
        for name, wanted in held(holding, model).items():
            assert (targets[holding.place.rank][name] == wanted).all(), f"{name} of rank {holding.place.rank}"
