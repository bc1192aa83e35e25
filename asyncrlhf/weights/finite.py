"""Whether all numbers of a model are finite, at the speed of memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ("not_finite",)


@torch.no_grad()
def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of those with a number that is not. A sum is finite only if every number is; one that is not may be
    too large, so its numbers are then looked at one by one."""
    if not tensors:
        return []
    sums = torch.stack([tensor.detach().sum().float() for tensor in tensors.values()]).isfinite().tolist()
    suspects = [name for name, finite in zip(tensors, sums, strict=True) if not finite]
    return [name for name in suspects if not bool(tensors[name].isfinite().all())]
