"""Reshard within a process or a machine: each rank reads the slices it lacks from where the trainer's ranks put them.

A trainer's rank puts what it holds, by local name, into any WeightTransfer (`InprocTransfer` between threads,
`SharedMemoryTransfer` between processes: then nothing but those slices is read, in place); its payload goes to all that
need it. Nobody waits: a version stays readable until the next but one is put. This is also how policy and engine take
turns on the same devices in separate processes: the trainer's ranks may free their memory once they have put.

    payload = transfer.send(7, local)                           # each rank of the trainer; gather them by rank
    pull(plan, rank, 7, payloads, transfer, staged)             # each rank of an engine, then commit
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from asyncrlhf.abc.transfer import WeightTransfer
from asyncrlhf.errors import PublishRefused
from asyncrlhf.weights.plan import Move, Plan
from asyncrlhf.weights.regions import region

__all__ = ("pull", "sources_of")


def sources_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks whose payloads `rank` needs, itself included if it has trained weights of its own."""
    return tuple(sorted({move.source for move in plan.moves if move.target == rank}))


@torch.no_grad()
def pull(
    plan: Plan,
    rank: int,
    version: int,
    payloads: Mapping[int, Mapping[str, Any]],
    transfer: WeightTransfer,
    staged: Mapping[str, Tensor],
) -> int:
    """Fill `staged` with all that `rank` needs of `version`; gives the bytes read.

    Raises PublishRefused when a rank's weights are missing, of another version, or overwritten meanwhile; what is in
    `staged` then is of no use, and the engine goes on with the version it has.
    """
    wanted: dict[int, dict[str, list[Move]]] = defaultdict(lambda: defaultdict(list))
    for move in plan.moves:
        if move.target == rank:
            wanted[move.source][move.source_tensor].append(move)
    byte_count = 0
    for source, by_tensor in wanted.items():
        if source not in payloads:
            raise PublishRefused(
                f"version {version}: rank {rank} needs the weights of rank {source}, which has put none"
            )
        held = payloads[source]["version"]
        if held != version:
            raise PublishRefused(f"version {version}: rank {source} has put version {held}")
        missing = set(by_tensor)
        for name, tensor in transfer.receive(payloads[source]):
            missing.discard(name)
            for move in by_tensor.get(name, ()):
                taken = region(tensor, move.source_offset, move.lengths)
                region(staged[move.target_tensor], move.target_offset, move.lengths).copy_(taken)
                byte_count += move.byte_count
        if missing:
            raise PublishRefused(f"version {version}: rank {source} has put no {sorted(missing)[0]}")
    return byte_count
