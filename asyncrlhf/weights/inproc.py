"""Weights within one process: the trainer copies into one of two buffers, and engines read that buffer in place.

The trainer never waits: a version's bytes stay until the next but one `send`, by which time every engine that serves
has committed a newer version.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from asyncrlhf.errors import PublishRefused

__all__ = ("InprocTransfer",)

_TABLE: dict[str, tuple[int, dict[str, Tensor]]] = {}
"""Buffer key -> (version, tensor by name), for every live sender of this process."""
_NUMBERS = itertools.count()


class InprocTransfer:
    """A WeightTransfer for engines in the threads of one process."""

    def __init__(self) -> None:
        number = next(_NUMBERS)
        self._keys = itertools.cycle([f"inproc-{number}-a", f"inproc-{number}-b"])
        for key in (f"inproc-{number}-a", f"inproc-{number}-b"):
            weakref.finalize(self, _TABLE.pop, key, None)

    @torch.no_grad()
    def send(self, version: int, weights: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Copy `weights` into the older buffer; the payload names it."""
        key = next(self._keys)
        _, buffer = _TABLE.pop(key, (-1, {}))
        if buffer.keys() != weights.keys():
            buffer = {name: torch.empty_like(tensor, requires_grad=False) for name, tensor in weights.items()}
        for name, tensor in weights.items():
            buffer[name].copy_(tensor)
        _TABLE[key] = (version, buffer)
        return {"key": key, "version": version}

    def receive(self, payload: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """The tensors themselves, to be read and not written. Raises PublishRefused if newer bytes took their place,
        also while they were read."""
        yield from _held(payload).items()
        _held(payload)


def _held(payload: Mapping[str, Any]) -> dict[str, Tensor]:
    version, buffer = _TABLE.get(payload["key"], (-1, {}))
    if version != payload["version"]:
        raise PublishRefused(
            f"weights of version {payload['version']} are gone: buffer {payload['key']!r} of this process holds "
            f"version {version}. A version can be read until the next but one is published"
        )
    return buffer
