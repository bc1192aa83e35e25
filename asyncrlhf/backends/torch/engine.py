"""What every engine of the torch backend has: a number of threads, and an end."""

from __future__ import annotations

import torch

from asyncrlhf.abc import Engine
from asyncrlhf.backends.torch.away import give_back

__all__ = ("TorchEngine",)


class TorchEngine(Engine):
    """An engine that computes with torch."""

    @classmethod
    def use_threads(cls, count: int) -> None:
        """Compute with `count` CPU threads."""
        torch.set_num_threads(count)

    def close(self) -> None:
        """Drop the weights, and whatever else the engine holds, at once; no method may be called after this."""
        vars(self).clear()
        give_back()
