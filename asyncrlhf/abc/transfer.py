"""The seam for moving weights from a trainer to the engines that follow it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("WeightTransfer",)


class WeightTransfer(Protocol):
    """One way to move weights. `send` runs beside the trainer, `receive` beside each engine; what `send` returns goes
    into WeightHandle.payload. A version's bytes stay readable until the next but one `send`."""

    def send(self, version: int, weights: Mapping[str, Tensor]) -> Mapping[str, Any]: ...

    def receive(self, payload: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]: ...
