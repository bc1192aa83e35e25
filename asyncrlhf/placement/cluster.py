"""What there is to run on: node types, pools of equal nodes, and the block of devices that a set of units is given."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrlhf.config.bounds import Amount, Name, Positive, PositiveAmount, Table
from asyncrlhf.errors import ConfigError

__all__ = ("GIB", "NODES", "Block", "Cluster", "NodeType", "Pool")

GIB = 1 << 30


class NodeType(Table, frozen=True, kw_only=True):
    """One kind of machine; numbers are per device unless they say otherwise. Vendors' data-sheet values, 16-bit dense.

    Example: NODES["A100"] has 8 devices of 80 GiB, 312 TFLOP/s, 2.0 TB/s, 25 GB/s of network for the whole node.
    """

    devices: Positive = 8
    memory_gib: PositiveAmount
    tflops: PositiveAmount
    """Dense, 16 bits."""
    hbm_tb_s: PositiveAmount
    nvlink_gb_s: PositiveAmount
    """One direction."""
    nic_gb_s: PositiveAmount
    """Of the whole node, one direction."""
    pcie_gb_s: PositiveAmount = 25.0
    """Device to pinned host memory."""
    host_gib: PositiveAmount = 1024.0
    """Of the whole node."""
    fabric: Positive | None = None
    """Devices that nvlink joins; left out: those of one node."""
    price: Amount = 0.0
    """Of one device-hour, in any one currency; 0: unknown."""

    @property
    def memory(self) -> float:
        return self.memory_gib * GIB

    @property
    def flops(self) -> float:
        return self.tflops * 1e12

    @property
    def hbm(self) -> float:
        return self.hbm_tb_s * 1e12

    @property
    def nvlink(self) -> float:
        return self.nvlink_gb_s * 1e9

    @property
    def nic(self) -> float:
        return self.nic_gb_s * 1e9

    @property
    def pcie(self) -> float:
        return self.pcie_gb_s * 1e9

    @property
    def joined(self) -> int:
        """Devices that nvlink joins."""
        return self.fabric or self.devices


NODES: Mapping[str, NodeType] = {
    "A100": NodeType(memory_gib=80, tflops=312, hbm_tb_s=2.0, nvlink_gb_s=300, nic_gb_s=25),
    "H100": NodeType(
        memory_gib=80, tflops=989, hbm_tb_s=3.35, nvlink_gb_s=450, nic_gb_s=400, pcie_gb_s=50, host_gib=2048
    ),
    "H200": NodeType(
        memory_gib=141, tflops=989, hbm_tb_s=4.8, nvlink_gb_s=450, nic_gb_s=400, pcie_gb_s=50, host_gib=2048
    ),
    "H800": NodeType(
        memory_gib=80, tflops=989, hbm_tb_s=3.35, nvlink_gb_s=200, nic_gb_s=400, pcie_gb_s=50, host_gib=2048, price=1.0
    ),
    "H20": NodeType(
        memory_gib=96, tflops=148, hbm_tb_s=4.0, nvlink_gb_s=450, nic_gb_s=200, pcie_gb_s=50, host_gib=2048, price=0.35
    ),
    "GB200": NodeType(
        devices=4,
        memory_gib=186,
        tflops=2500,
        hbm_tb_s=8.0,
        nvlink_gb_s=900,
        nic_gb_s=200,
        pcie_gb_s=200,
        host_gib=960,
        fabric=72,
    ),
    "CPU": NodeType(
        devices=64, memory_gib=4, tflops=0.05, hbm_tb_s=0.01, nvlink_gb_s=5, nic_gb_s=1, pcie_gb_s=5, host_gib=256
    ),
}
"""Node types by name. The prices of H800 and H20 are relative to each other (StreamRL); the A100 has the 200 Gbit/s
network of HybridFlow's test bed; the devices of "CPU" are cores, and its numbers are guesses."""


class Pool(Table, frozen=True, kw_only=True):
    """Equal nodes."""

    node: Name
    """A name in [nodes], or one of A100, H100, H200, H800, H20, GB200, CPU."""
    nodes: int = 1
    """How many of them."""
    devices_per_node: Positive | None = None
    """Use only so many of each; left out: all."""


@dataclass(frozen=True, slots=True)
class Block:
    """Devices of one pool, aligned: a part of one node, or whole nodes.

    Example: Block(NODES["A100"], 16) spans two nodes.
    """

    node: NodeType
    count: int
    pool: int = 0
    """Which pool it is cut from."""

    @property
    def nodes(self) -> int:
        return -(-self.count // self.node.devices)

    def bandwidth(self, group: int) -> float:
        """Bytes/s of one device among `group` adjacent ones that talk to each other."""
        return self.node.nvlink if group <= self.node.joined else self.node.nic / self.node.devices


@dataclass(frozen=True, slots=True)
class Cluster:
    """All pools."""

    pools: tuple[tuple[NodeType, int], ...]
    """(type, devices) of each."""

    @property
    def devices(self) -> int:
        return sum(count for _, count in self.pools)

    @classmethod
    def build(cls, pools: list[Pool], custom: Mapping[str, NodeType]) -> Cluster:
        """Raises ConfigError for an unknown node type, and for a cluster without a device."""
        known = {**NODES, **custom}
        found: list[tuple[NodeType, int]] = []
        for i, pool in enumerate(pools):
            if pool.node not in known:
                close = difflib.get_close_matches(pool.node, known, 1, 0.5)
                hint = f'did you mean "{close[0]}"?' if close else f"known: {', '.join(known)}"
                raise ConfigError(f'cluster.pools[{i}].node = "{pool.node}" is not a node type; {hint}')
            node = known[pool.node]
            used = pool.devices_per_node or node.devices
            if used > node.devices:
                raise ConfigError(
                    f"cluster.pools[{i}].devices_per_node = {used} is more than the {node.devices} devices of "
                    f"{pool.node}; use {node.devices} or fewer"
                )
            if pool.nodes < 1:
                raise ConfigError(
                    f"cluster.pools[{i}].nodes = {pool.nodes}: 0 devices, and a plan needs at least 1; set nodes to 1 "
                    "or more"
                )
            if used < node.devices and pool.nodes > 1:
                raise ConfigError(
                    f"cluster.pools[{i}]: {used} of {node.devices} devices on each of {pool.nodes} nodes cannot form "
                    "aligned blocks; use whole nodes, or nodes = 1"
                )
            found.append((node, pool.nodes * used))
        if not found:
            raise ConfigError("cluster.pools is empty: 0 devices, and a plan needs at least 1; add a pool")
        return cls(tuple(found))

    def sizes(self, pool: int) -> list[int]:
        """Device counts of aligned blocks: 1, 2, 4, ... within a node, then whole nodes."""
        node, count = self.pools[pool]
        inner = [size for size in (1, 2, 4, 8, 16, 32) if size < node.devices and size <= count]
        return [*inner, *range(node.devices, count + 1, node.devices)] or [count]
