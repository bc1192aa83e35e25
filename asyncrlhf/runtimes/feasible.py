"""Whether nodes have what pools ask for. Pure, and blind to what others have taken."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

__all__ = ("Ask", "Node", "amounts", "shortage")

MOST_POOLS = 8
"""Above it only single pools and all of them together are held against the nodes."""
ROUNDING = 1e-3
"""Shares of a device do not add up exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine. Example: Node(name="a", devices=8, cores=64, labels={"pool": "generation"})."""

    name: str
    devices: float = 0
    cores: float = 0
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A pool: what it asks for in all, and what its largest engine needs on one node."""

    pool: str
    devices: float = 0
    cores: float = 0
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    engine_devices: float = 0
    engine_cores: float = 0

    def fits(self, node: Node) -> bool:
        """Whether a node has all of its labels."""
        return all(node.labels.get(key) == value for key, value in self.labels.items())


def shortage(asks: Sequence[Ask], nodes: Sequence[Node], where: str) -> str:
    """What `where` ("the cluster", "this machine") cannot give, in one line with both numbers and the fix; "" if
    nothing.

    Not complete, as packing is hard: pools that pass may still find no place together. Those that fail never do.
    """
    for ask in asks:
        if problem := _alone(ask, nodes, where):
            return problem
    for together in _subsets(asks):
        theirs = [node for node in nodes if any(ask.fits(node) for ask in together)]
        names = " and ".join(ask.pool for ask in together)
        for what, need, have in _sums(together, theirs):
            if need > have + ROUNDING:
                return (
                    f"pools {names} need {amounts({what: need})} together, their nodes in {where} have {have:g}; give "
                    "the pools fewer, or add nodes"
                )
    return ""


def amounts(counts: Mapping[str, float]) -> str:
    """Words for numbers of things. Example: {"device": 2, "core": 1} is "2 devices and 1 core"."""
    return " and ".join(f"{count:g} {name}{'' if count == 1 else 's'}" for name, count in counts.items())


def _alone(ask: Ask, nodes: Sequence[Node], where: str) -> str:
    theirs = [node for node in nodes if ask.fits(node)]
    wanted = ", ".join(f'{key} = "{value}"' for key, value in ask.labels.items())
    if ask.labels and not theirs:
        known = sorted({f'{k} = "{v}"' for node in nodes for k, v in node.labels.items() if k in ask.labels})
        return (
            f"pools.{ask.pool}.labels: none of {len(nodes)} nodes of {where} has {wanted}; "
            f"{'they have ' + ', '.join(known) if known else 'none has a label of that name'}; change it, or start "
            "nodes with these labels"
        )
    subject = f"{where} has"
    if ask.labels:
        subject = f"the {len(theirs)} of {len(nodes)} nodes of {where} with {wanted} have"
    for what, need, have in _sums([ask], theirs):
        if need > have + ROUNDING:
            return (
                f"pools.{ask.pool} needs {amounts({what: need})}, {subject} {have:g}; give the pool fewer, or add nodes"
            )
    fitting = [
        node
        for node in theirs
        if node.devices + ROUNDING >= ask.engine_devices and node.cores + ROUNDING >= ask.engine_cores
    ]
    if not fitting:
        needs = amounts({"device": ask.engine_devices, "core": ask.engine_cores})
        largest = max(theirs, key=lambda node: (node.devices, node.cores))
        has = amounts({"device": largest.devices, "core": largest.cores})
        wide = ask.engine_devices > largest.devices + ROUNDING
        return (
            f"pools.{ask.pool}: an engine needs {needs} of one node, and no node of {where} has them: the largest has "
            f"{has}; lower {'its parallel size' if wide else f'pools.{ask.pool}.cores'}, or add nodes"
        )
    return ""


def _sums(asks: Sequence[Ask], nodes: Sequence[Node]) -> Iterator[tuple[str, float, float]]:
    """(what, needed, there) for each kind of resource."""
    yield "device", math.fsum(ask.devices for ask in asks), math.fsum(node.devices for node in nodes)
    yield "core", math.fsum(ask.cores for ask in asks), math.fsum(node.cores for node in nodes)


def _subsets(asks: Sequence[Ask]) -> Iterator[Sequence[Ask]]:
    """Two pools and more, the small sets first (Hall's condition)."""
    if len(asks) > MOST_POOLS:
        yield asks
        return
    for count in range(2, len(asks) + 1):
        yield from combinations(asks, count)
