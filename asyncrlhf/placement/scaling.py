"""How a workload scales: the best placement at ever more devices, and what keeps the next doubling from helping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncrlhf.errors import ConfigError
from asyncrlhf.placement.cluster import Cluster
from asyncrlhf.placement.plan import Candidate, Problem
from asyncrlhf.placement.search import search

__all__ = ("Point", "as_json", "as_text", "curve")


@dataclass(frozen=True, slots=True)
class Point:
    """`candidate` None: nothing fits, for `reason`."""

    devices: int
    candidate: Candidate | None
    reason: str = ""


def curve(problem: Problem, points: int = 7) -> list[Point]:
    """From 1/2^(points - 1) of the devices to all of them, in whole nodes of every pool."""
    found: list[Point] = []
    for share in (2.0**-i for i in range(points - 1, -1, -1)):
        pools = tuple(
            (node, max(1, round(count * share / node.devices)) * node.devices) for node, count in problem.cluster.pools
        )
        pools = tuple(
            (node, min(count, most)) for (node, count), (_, most) in zip(pools, problem.cluster.pools, strict=True)
        )
        cluster = Cluster(pools)
        if found and cluster.devices == found[-1].devices:
            continue
        try:
            best = search(replace(problem, cluster=cluster), limit=20_000).candidates[0]
            found.append(Point(cluster.devices, best))
        except ConfigError as refused:
            found.append(Point(cluster.devices, None, str(refused)))
    return found


def as_text(points: Sequence[Point]) -> str:
    """One line per point; efficiency is against the first that fits."""
    lines = [f"{'devices':>8} {'used':>6} {'step s':>9} {'speed-up':>9} {'efficiency':>10}  bound by"]
    first = next((point for point in points if point.candidate is not None), None)
    for point in points:
        if point.candidate is None or first is None or first.candidate is None:
            lines.append(f"{point.devices:>8} {'-':>6} {'-':>9} {'-':>9} {'-':>10}  {point.reason}")
            continue
        speed = first.candidate.step / point.candidate.step
        share = speed * first.devices / point.devices
        lines.append(
            f"{point.devices:>8} {point.candidate.devices:>6} {point.candidate.step:>9.1f} {speed:>9.2f} "
            f"{100 * share:>8.0f} %  {point.candidate.bottleneck}; {point.candidate.strategy.label}"
        )
    return "\n".join(lines)


def as_json(points: Sequence[Point]) -> list[dict[str, Any]]:
    return [
        {"devices": point.devices, "step_s": None, "reason": point.reason}
        if point.candidate is None
        else {
            "devices": point.devices,
            "used": point.candidate.devices,
            "step_s": point.candidate.step,
            "strategy": point.candidate.strategy.label,
            "bottleneck": point.candidate.bottleneck,
        }
        for point in points
    ]
