"""The parts of one version that ranks have put, announced as one. Torch-free: the group of the ranks does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncrlhf.errors import PublishRefused
from asyncrlhf.messages import WeightHandle
from asyncrlhf.weights.layout import Layout

__all__ = ("ASSEMBLED", "assembled", "joined", "part")

ASSEMBLED = "asyncrlhf.weights.assemble:AssembledTransfer"
"""The WeightTransfer that reads what `assembled` and `joined` have made one."""


def part(layout: Layout, transport: str, version: int, payload: Mapping[str, Any]) -> Mapping[str, Any]:
    """What one rank has put through `transport` ("module:Class"), as a payload that `joined` makes one of; all that
    there is to read when `layout` has one rank."""
    return {
        "version": version,
        "transport": transport,
        "layout": msgspec.msgpack.encode(layout),
        "shards": (payload,),
    }


def assembled(layout: Layout, transport: str, version: int, payloads: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One payload of those that the ranks of `layout` have put, in its order, through `transport` ("module:Class")."""
    if len(payloads) != len(layout.holdings):
        raise PublishRefused(
            f"version {version}: {len(payloads)} of {len(layout.holdings)} ranks have put their weights"
        )
    return {**part(layout, transport, version, {}), "shards": tuple(payloads)}


def joined(handles: Sequence[WeightHandle]) -> WeightHandle:
    """What the ranks of one trainer announce, by rank, as one; where rank 0 has put everything, what it says. Raises
    PublishRefused when they do not mean the same weights."""
    first = handles[0]
    if first.transport != ASSEMBLED:
        return first
    for rank, handle in enumerate(handles):
        if (handle.version, handle.checksum) != (first.version, first.checksum):
            raise PublishRefused(
                f"rank 0 has put version {first.version} with checksum {first.checksum:#x}, and rank {rank} version "
                f"{handle.version} with {handle.checksum:#x}"
            )
    shards = tuple(shard for handle in handles for shard in handle.payload["shards"])
    return msgspec.structs.replace(first, payload={**first.payload, "shards": shards})
