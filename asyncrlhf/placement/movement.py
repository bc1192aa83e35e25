"""Bytes and seconds of weights that move: between two layouts on the same devices, and from one pool to another."""

from __future__ import annotations

import math

from asyncrlhf.placement.cluster import GIB, Block
from asyncrlhf.placement.coefficients import Coefficients
from asyncrlhf.placement.layouts import Layout
from asyncrlhf.placement.models import ModelSpec

__all__ = ("broadcast_seconds", "push_seconds", "reshard_peak", "reshard_seconds", "reshard_volume")


def reshard_volume(system: str, train: Layout, generate: Layout) -> float:
    """Share of the model that each device receives between training and generation on the same devices (HybridFlow,
    table 2): DeepSpeed-Chat gathers over all N, HybridFlow-V over a copy's N1 = t p, HybridFlow only what it lacks.

    Example: t p = 8 and t_g p_g = 2 give 3/8 with "hybridflow"; DeepSpeed-Chat on 16 devices 15/16.
    """
    n1, ng = train.model, generate.model
    if system == "deepspeed-chat":
        return (train.devices - 1) / train.devices
    if system == "hybridflow-v":
        return (n1 - 1) / n1
    return max(0, n1 - ng) / (ng * n1)


def reshard_peak(system: str, train: Layout, generate: Layout) -> float:
    """Share of the model that a device holds at most while it reshards (HybridFlow, table 2)."""
    return 1.0 if system != "hybridflow" else 1 / generate.model


def reshard_seconds(model: ModelSpec, block: Block, train: Layout, generate: Layout, fit: Coefficients) -> float:
    """Training layout to generation layout within the groups of t p devices, or, where generation is split finer, a
    local copy."""
    volume = reshard_volume("hybridflow", train, generate) * 2 * model.params
    return volume / (block.bandwidth(train.model) * fit.network)


def push_seconds(
    model: ModelSpec, source: Block, target: Block, replica: int, fit: Coefficients, *, gather: float = 0.0
) -> float:
    """From training devices to engines of `replica` devices each, every rank sending its part; replicas on further
    nodes are reached along a chain that overlaps, so the thinner side's network is the clock. `gather`: the share
    that has to be collected from data-parallel shards first."""
    size = 2 * model.params
    calls = math.ceil(size / (fit.bucket_gib * GIB))
    links = [
        block.node.nic * min(block.nodes, _nodes(block, count))
        for block, count in ((source, source.count), (target, replica))
    ]
    return broadcast_seconds(size * (1 + gather), min(links) * fit.network, calls, fit.call_s)


def _nodes(block: Block, devices: int) -> int:
    return max(1, devices // block.node.devices)


def broadcast_seconds(size: float, link: float, calls: int = 0, call_s: float = 0.0) -> float:
    """`size` bytes from one sender along a chain over one link of `link` bytes/s."""
    return calls * call_s + size / link
