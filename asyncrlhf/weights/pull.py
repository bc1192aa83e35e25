"""Reshard within a process or a machine: each rank reads the slices it lacks from where the trainer's ranks put them.

A trainer's rank puts what it holds, by local name, into any WeightTransfer (`InprocTransfer` between threads,
`SharedMemoryTransfer` between processes: then nothing but those slices is read, in place); its payload goes to all that
need it. Nobody waits: a version stays readable until the next but one is put. This is also how policy and engine take
turns on the same devices in separate processes: the trainer's ranks may free their memory once they have put.

    payload = transfer.send(7, local)                           # each rank of the trainer; gather them by rank
    receipt = pull(plan, rank, 7, payloads, transfer, staged)   # each rank of an engine
    require_whole(receipts, handle)                             # of all ranks, then commit
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from asyncrlhf.abc.transfer import WeightTransfer
from asyncrlhf.errors import PublishRefused
from asyncrlhf.messages import WeightHandle
from asyncrlhf.weights.checksum import Sums, require_checksum
from asyncrlhf.weights.layout import Box
from asyncrlhf.weights.plan import Move, Plan
from asyncrlhf.weights.regions import region

__all__ = ("Receipt", "pull", "require_whole", "sources_of")


class Receipt(msgspec.Struct, frozen=True):
    """What one rank has read."""

    byte_count: int
    own_byte_count: int
    """Part of `byte_count` that the rank itself has put, or the one whose device it is on."""
    sums: dict[str, dict[Box, int]]
    """Parameter -> rectangle -> its partial checksum, of the type in which it came."""


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
) -> Receipt:
    """Fill `staged` with all that `rank` needs of `version`.

    Raises PublishRefused when a rank's weights are missing, of another version, or overwritten meanwhile; what is in
    `staged` then is of no use, and the engine goes on with the version it has.
    """
    wanted: dict[int, dict[str, list[Move]]] = defaultdict(lambda: defaultdict(list))
    for move in plan.moves:
        if move.target == rank:
            wanted[move.source][move.source_tensor].append(move)
    byte_count, own, sums = 0, 0, Sums[tuple[str, Box]]()
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
                sums.copy(
                    (move.parameter, move.box),
                    region(tensor, move.source_offset, move.lengths),
                    region(staged[move.target_tensor], move.target_offset, move.lengths),
                    move.box,
                    plan.shapes[move.parameter],
                )
                byte_count += move.byte_count
                own += move.byte_count if source == rank else 0
            if not missing:
                sums.settle()  # before the transport says whether the bytes were there to the last
        if missing:
            raise PublishRefused(f"version {version}: rank {source} has put no {sorted(missing)[0]}")
    found = defaultdict[str, dict[Box, int]](dict)
    for (parameter, box), value in sums.settle().items():
        found[parameter][box] = value
    return Receipt(byte_count, own, dict(found))


def require_whole(receipts: Iterable[Receipt], handle: WeightHandle) -> None:
    """Raises PublishRefused unless what the ranks of one engine have read is, each rectangle once, what was announced,
    and rectangles that several have read came alike."""
    found: dict[str, dict[Box, int]] = defaultdict(dict)
    for receipt in receipts:
        for name, sums in receipt.sums.items():
            for box, value in sums.items():
                if found[name].setdefault(box, value) != value:
                    raise PublishRefused(f"version {handle.version}: ranks of one engine read {name!r} differently")
    require_checksum(handle, ((name, sum(sums.values()) % (1 << 64)) for name, sums in found.items()))
