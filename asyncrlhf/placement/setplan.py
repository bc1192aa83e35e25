"""Units on a block of devices, as values: what was chosen for each, what the set costs, or why it does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrlhf.placement.cluster import GIB, Block
from asyncrlhf.placement.layouts import Layout
from asyncrlhf.placement.units import Unit

__all__ = ("Choice", "Engine", "Member", "Rejection", "SetPlan", "Stage")


@dataclass(frozen=True, slots=True)
class Member:
    """A unit on its block. `lane`: members of different lanes are on different devices of the set and run at once
    (interleaving); "" is on all of them."""

    unit: Unit
    block: Block
    lane: str = ""


@dataclass(frozen=True, slots=True)
class Stage:
    """Seconds of one unit in one train step, switches between tenants apart."""

    generate: float = 0.0
    prepare: float = 0.0
    train: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """A unit under one layout."""

    layout: Layout
    stage: Stage
    items: Mapping[str, float]
    """Bytes per device that stay while the unit is awake, by item."""
    passing: Mapping[str, float]
    """Bytes per device while it computes."""

    @property
    def resident(self) -> float:
        return sum(self.items.values())

    @property
    def peak(self) -> float:
        return self.resident + sum(self.passing.values())


@dataclass(frozen=True, slots=True)
class Engine:
    """How a set generates: seconds alone and with full engines, waves, seconds of a lease, bytes of weights and cache,
    seconds of resharding."""

    layout: Layout
    seconds: float
    stream: float
    waves: float
    lease: float
    weights: float
    cache: float
    moving: float


@dataclass(frozen=True, slots=True)
class Rejection:
    """No layout fits: for what, what the least one needs, and what there is, in bytes (0: not about memory)."""

    reason: str
    need: float = 0.0
    have: float = 0.0
    spelled: bool = False
    """The reason says both numbers already."""

    @property
    def shortage(self) -> float:
        return self.need - self.have

    @property
    def text(self) -> str:
        """Example: "policy needs 83.1 of 73.6 GiB of device memory"."""
        if self.spelled or not self.need:
            return self.reason
        return f"{self.reason.format(f'{self.need / GIB:.1f} of {self.have / GIB:.1f} GiB')}"


@dataclass(frozen=True, slots=True)
class SetPlan:
    """A set that fits. All bytes are per device."""

    members: tuple[Member, ...]
    layouts: Mapping[str, Layout]
    stages: Mapping[str, Stage]
    switch: float
    """Seconds per train step of waking, sleeping and resharding."""
    items: Mapping[str, float]
    """"unit item" -> bytes at the peak."""
    peak: float
    peak_at: str
    host: float
    """Bytes on the host of one node, at worst."""
    offloads: bool
    waves: float = 1.0
    generate: float = 0.0
    stream: float = 0.0
    """As `generate`, with engines that are kept full."""
    prepare: float = 0.0
    train: float = 0.0
    lease: float = 0.0
    """Seconds that the answers to a prompt take, engines kept full."""
    streams: bool = False
    """Generation runs ahead, so engines are kept full."""

    @property
    def sampling(self) -> float:
        """Seconds of generation that the set's devices are taken for."""
        return self.stream if self.streams else self.generate

    @property
    def busy(self) -> float:
        """Seconds of a train step that the set's devices are taken for."""
        return self.sampling + self.prepare + self.train + self.switch

    @property
    def devices(self) -> int:
        return max(member.block.count for member in self.members)
