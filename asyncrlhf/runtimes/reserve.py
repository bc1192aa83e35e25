"""What engines ask a Ray cluster for, reserved in placement groups before any of them starts.

The run waits at most `patience` seconds for what others hold. Engines beside ranks of another group ask for nothing:
those ranks hold their share of the devices, too. Engines that talk to each other all the time lie on one
node where they fit, else on as few as can be, and their ranks follow the nodes; every other engine has a placement
group of its own, which Ray moves to another node when its node is lost.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any

import ray
from msgspec.structs import replace
from ray._private.state import available_resources_per_node  # there is no public one per node
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrlhf.abc import Needs, Place
from asyncrlhf.errors import ConfigError
from asyncrlhf.runtimes.feasible import Ask, Node, amounts, shortage

__all__ = ("Reservation", "cluster_nodes")


class Reservation:
    """The placement groups of a run."""

    def __init__(self, pools: Sequence[Ask], patience: float) -> None:
        self._pools, self._patience, self._deadline = pools, patience, 0.0
        self._bundles: dict[tuple[str, int], tuple[PlacementGroup, int]] = {}
        self._groups: list[PlacementGroup] = []
        self._guests: dict[tuple[str, int], float] = {}
        """Devices that engines beside a rank need there."""

    def take(self, places: Sequence[Place]) -> None:
        """Reserve all that they need, or nothing. Raises ConfigError: the cluster has less, or less is free."""
        if problem := shortage(self._pools, cluster_nodes(), "the cluster"):
            raise ConfigError(problem)
        self._deadline = time.monotonic() + self._patience
        groups: dict[tuple[str, int], list[Place]] = {}
        for place in places:
            need, on = place.needs, place.beside
            if on is not None:
                for rank in on.ranks if need is not None else ():
                    self._guests[on.group, rank] = self._guests.get((on.group, rank), 0.0) + need.devices
            elif need is not None and (need.devices or need.cores):
                groups.setdefault((place.group, -1 if need.together else place.rank), []).append(place)
        try:
            for engines in sorted(groups.values(), key=len, reverse=True):  # the large ones while there is room
                self._take(engines)
        except BaseException:
            self.release()
            raise

    def options(self, place: Place) -> dict[str, Any]:
        """What an actor for this place is created with, unless it is beside ranks."""
        need = place.needs
        if need is None:
            return {"num_cpus": 0}
        options: dict[str, Any] = {"num_cpus": need.cores, "num_gpus": self._devices(place)}
        if not need.devices:
            options["runtime_env"] = {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}
        if (place.group, place.rank) in self._bundles:
            group, index = self._bundles[place.group, place.rank]
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, index)
        elif need.labels:
            options["label_selector"] = need.labels
        return options

    def release(self) -> None:
        for group in self._groups:
            with contextlib.suppress(RayError, RuntimeError, ValueError):
                remove_placement_group(group)
        self._groups.clear()
        self._bundles.clear()
        self._guests.clear()

    def _devices(self, place: Place) -> float:
        need = place.needs
        return 0.0 if need is None else need.devices + self._guests.get((place.group, place.rank), 0.0)

    def _take(self, engines: Sequence[Place]) -> None:
        needs = [replace(p.needs, devices=self._devices(p)) for p in engines if p.needs is not None]
        group = None
        if len(engines) > 1 and _fit_on_one(needs):
            group = self._placed(needs, "STRICT_PACK", (self._deadline - time.monotonic()) / 2)
        group = group or self._placed(needs, "PACK", self._deadline - time.monotonic())
        if group is None:
            raise ConfigError(self._not_free(engines, needs))
        nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        by_node = sorted(range(len(engines)), key=lambda bundle: (nodes[bundle], bundle))
        for place, bundle in zip(engines, by_node, strict=True):
            self._bundles[place.group, place.rank] = group, bundle

    def _placed(self, needs: Sequence[Needs], strategy: str, seconds: float) -> PlacementGroup | None:
        """None: it was not placed in time."""
        labels = [dict(need.labels) for need in needs]
        try:
            group = placement_group(
                [_resources(need) for need in needs],
                strategy=strategy,
                bundle_label_selector=labels if any(labels) else None,
            )
        except ValueError as error:
            raise ConfigError(f"pools.{needs[0].pool}: Ray refuses it: {error}") from error
        self._groups.append(group)
        if group.wait(max(1, math.ceil(seconds))):
            return group
        remove_placement_group(group)
        self._groups.remove(group)
        return None

    def _not_free(self, engines: Sequence[Place], needs: Sequence[Needs]) -> str:
        wanted = amounts({"device": math.fsum(n.devices for n in needs), "core": sum(n.cores for n in needs)})
        ask = Ask(pool=needs[0].pool, labels=needs[0].labels)
        nodes = [node for node in cluster_nodes(free=True) if ask.fits(node)]
        free = "; ".join(f"{amounts({'device': n.devices, 'core': n.cores})} on {n.name}" for n in nodes)
        return (
            f"pools.{ask.pool}: {wanted} for group {engines[0].group!r} have not been free within ray.patience = "
            f"{self._patience:g} s; free are {free}; wait for what runs there to end, raise ray.patience, or lower "
            f"pools.{ask.pool}"
        )


def cluster_nodes(*, free: bool = False) -> list[Node]:
    """The living nodes with all that they have, or with what is `free` of it."""
    found: list[Node] = []
    left: dict[str, dict[str, float]] = available_resources_per_node() if free else {}
    for node in ray.nodes():
        if node["Alive"]:
            has = left.get(node["NodeID"], {}) if free else node["Resources"]
            name = f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"
            labels = node.get("Labels") or {}
            found.append(Node(name=name, devices=has.get("GPU", 0), cores=has.get("CPU", 0), labels=labels))
    return found


def _resources(need: Needs) -> dict[str, float]:
    wanted = {"CPU": float(need.cores), "GPU": need.devices}
    return {name: count for name, count in wanted.items() if count}


def _fit_on_one(needs: Sequence[Needs]) -> bool:
    devices, cores = math.fsum(need.devices for need in needs), sum(need.cores for need in needs)
    ask = Ask(pool=needs[0].pool, labels=needs[0].labels)
    return any(ask.fits(node) and node.devices >= devices and node.cores >= cores for node in cluster_nodes())
