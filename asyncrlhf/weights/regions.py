"""Tensors of a holding: memory for them, the part that a move means, and whether a rank has what is expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncrlhf.errors import ConfigError, PublishRefused
from asyncrlhf.weights.layout import Holding, Layout

__all__ = ("allocate", "dtype_of", "holding_of", "region", "require_shape", "require_tensors")


def dtype_of(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def holding_of(layout: Layout, rank: int) -> Holding | None:
    """What `rank` holds in this layout; None if it takes no part."""
    return next((holding for holding in layout.holdings if holding.place.rank == rank), None)


def allocate(holding: Holding | None, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Memory for all that a rank holds: a shadow of an engine's weights. Padding is zero."""
    tensors = {} if holding is None else holding.tensors
    return {name: torch.zeros(t.shape, dtype=dtype_of(t.dtype), device=device) for name, t in tensors.items()}


def region(tensor: Tensor, offset: tuple[int, ...], lengths: tuple[int, ...]) -> Tensor:
    """The view of `lengths` at `offset`; dimensions that only the tensor has come first and are indexed."""
    extra = len(offset) - len(lengths)
    view = tensor[offset[:extra]] if extra else tensor
    for dim, (start, length) in enumerate(zip(offset[extra:], lengths, strict=True)):
        if length != view.shape[dim]:
            view = view.narrow(dim, start, length)
    return view


def require_shape(version: int, name: str, found: Sequence[int], expected: Sequence[int] | None) -> None:
    """Raises PublishRefused for a parameter that an engine's model has in another shape, or (None) not at all."""
    if expected is None or tuple(found) != tuple(expected):
        raise PublishRefused(
            f"version {version} brings {name!r} of shape {tuple(found)}, which this model "
            f"{'does not have' if expected is None else f'has as {tuple(expected)}'}"
        )


def require_tensors(tensors: Mapping[str, Tensor], holding: Holding | None, side: str) -> None:
    """Raises ConfigError when an engine's tensors are not those of its layout. The type may differ."""
    for name, expected in () if holding is None else holding.tensors.items():
        found = tuple(tensors[name].shape) if name in tensors else "nothing"
        if found != expected.shape:
            raise ConfigError(
                f"{side} tensor {name} of rank {holding.place.rank if holding else '?'} has shape {expected.shape} in "
                f"its layout, and the engine gave {found}"
            )
