"""The ranks of one trained model, as each of them sees it: where they meet, small things said to all, shared tensors.

Whatever is asked here is asked by all ranks at once, and waits for the slowest. A rank alone waits for nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from asyncrlhf.errors import ConfigError
from asyncrlhf.weights.pair import open_store as open_store

__all__ = (
    "BACKENDS",
    "World",
    "gathered",
    "interface_towards",
    "meet",
    "open_store",
    "own_device",
    "replicate",
    "shard",
    "spread_like",
)

T = TypeVar("T")
SIOCGIFADDR = 0x8915
"""Linux: ask for the address of a network interface."""
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Small things travel between CPUs, also where tensors travel between GPUs."""


class World:
    """One rank among `size`."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def everyones(self, own: T) -> list[T]:
        """What each rank brings, by rank."""
        if self.size == 1:
            return [own]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own)
        return found

    def first(self, own: T) -> T:
        """What rank 0 brings."""
        if self.size == 1:
            return own
        found: list[Any] = [own if self.rank == 0 else None]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def totals(self, *own: int) -> tuple[int, ...]:
        """Each number summed over the ranks."""
        return tuple(map(sum, zip(*self.everyones(own), strict=True)))

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def meet(
    store: dist.TCPStore | None, host: str, port: int, rank: int, ranks: int, device: torch.device, timeout: float
) -> World:
    """Meet the other ranks at the store of rank 0. Raises ConfigError if two of them have the same GPU."""
    if interface := interface_towards(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    patience = timedelta(seconds=timeout)
    if store is None:
        store = dist.TCPStore(host, port, ranks, is_master=False, timeout=patience)
    store.set_timeout(patience)
    _require_own_device(store, rank, ranks, device)
    dist.init_process_group(BACKENDS[device.type], store=store, rank=rank, world_size=ranks, timeout=patience)
    return World(rank, ranks)


def interface_towards(host: str) -> str:
    """The network interface through which this machine reaches another; "" if it cannot be told. Where gloo looks its
    own name up it may find an address that no other machine knows."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
        except OSError:
            return ""
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == own:
                    return name
    return ""


def own_device(device: torch.device, rank: int) -> torch.device:
    """The device of a rank: where several GPUs are seen and none is named, GPU number `rank` of this machine."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", rank % torch.cuda.device_count())


def _require_own_device(store: dist.TCPStore, rank: int, ranks: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    store.set(f"device/{rank}", str(torch.cuda.get_device_properties(device).uuid))
    devices = {store.get(f"device/{other}") for other in range(ranks)}
    if len(devices) < ranks:
        raise ConfigError(
            f"the model's {ranks} ranks take {ranks} GPUs, and see {len(devices)}; lower its parallel sizes, or do not "
            "name one GPU for all of them"
        )


# ---- parameters shared by ranks ------------------------------------------------------------------------------------
def replicate(module: nn.Module) -> DistributedDataParallel:
    """Every rank keeps all of it; gradients become their mean over ranks."""
    return DistributedDataParallel(module, forward_sync_buffers=False, gradient_as_bucket_view=True)


def shard(module: nn.Module, layers: list[nn.Module], device: torch.device, ranks: int) -> None:
    """Every rank keeps its part of each parameter, gradient and moment; whole layers exist while they compute (FSDP,
    arXiv 2304.11277). Gradients become their mean over ranks."""
    mesh = init_device_mesh(device.type, (ranks,))
    for part in (*layers, module):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)


def gathered(tensor: Tensor) -> Tensor:
    """All of a tensor, whose parts may be on other ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """A tensor that all ranks have, with its parts where those of `parameter` are."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    return distribute_tensor(whole.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
