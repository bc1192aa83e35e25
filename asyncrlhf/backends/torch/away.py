"""Tensors whose memory is another's for a while: their bytes wait in host memory, they themselves stay what they are.

Nothing that refers to them has to be told: optimizers, replicas' hooks and parts of FSDP see the same tensors again.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

__all__ = ("Away", "give_back")


class Away:
    """The bytes of `tensors`, which have none until `back`; those of `gradients` are not kept, and come back as zeros.
    Tensors that share memory are one."""

    def __init__(self, tensors: Iterable[Tensor], gradients: Iterable[Tensor] = ()) -> None:
        self._emptied = [(storage, storage.nbytes()) for storage in _storages(gradients)]
        self._kept = [
            (storage, storage.clone() if storage.device.type == "cpu" else storage.cpu())
            for storage in _storages(tensors)
        ]
        for storage, _ in (*self._emptied, *self._kept):
            storage.resize_(0)

    def back(self) -> None:
        """Give every tensor its bytes."""
        while self._kept:
            storage, kept = self._kept.pop()
            storage.resize_(kept.nbytes())
            storage.copy_(kept, False)
        while self._emptied:
            storage, size = self._emptied.pop()
            storage.resize_(size)
            storage.fill_(0)


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return list({storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in local)}.values())


def give_back() -> None:
    """Let others have memory that is free here and was kept for what comes next: by torch, of GPUs, and by the C
    library, of the host."""
    gc.collect(1)  # what is older is not garbage of now, and takes long to look through
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of the GNU C library
    if trim is not None:
        trim(0)
