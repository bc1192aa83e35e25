"""Seconds of forward passes and of training. Cost model after HybridFlow (arXiv 2409.19256, appendix C), with its
defects mended: uneven splits count, and so does communication that does not shrink with more devices."""

from __future__ import annotations

import math

from asyncrlhf.placement.cluster import Block
from asyncrlhf.placement.coefficients import Coefficients
from asyncrlhf.placement.layouts import Layout
from asyncrlhf.placement.models import ModelSpec
from asyncrlhf.placement.workload import Workload

__all__ = ("bubble", "forward_seconds", "gather_seconds", "gradient_sync_seconds", "train_seconds")


def bubble(stages: int, micro_batches: float) -> float:
    """Idle share of a one-forward-one-backward pipeline: (N - 1) / (N - 1 + M) (RLHFuse)."""
    return (stages - 1) / (stages - 1 + micro_batches)


def _collectives(model: ModelSpec, block: Block, layout: Layout, tokens: float, count: int, fit: Coefficients) -> float:
    """`count` all-reduces per layer of activations of `tokens` tokens, over the tensor-parallel group; and, with expert
    parallelism, half as many exchanges of every token with its experts."""
    shape, seconds = model.shape, 0.0
    layers = math.ceil(shape.layers / layout.pp)
    if layout.tp > 1:
        volume = 2 * (layout.tp - 1) / layout.tp * 2 * shape.hidden * tokens
        seconds += layers * count * volume / (block.bandwidth(layout.tp) * fit.network)
    if layout.ep > 1:
        volume = (layout.ep - 1) / layout.ep * 2 * shape.hidden * tokens * shape.experts_active / layout.tp
        link = block.bandwidth(layout.model * layout.ep) * fit.network
        seconds += layers * count * volume / link
    return seconds


def _pass(model: ModelSpec, layout: Layout, tokens: float, work: Workload, flops: float) -> float:
    """Seconds of one forward pass's products over `tokens` tokens of one data-parallel rank; an uneven split of layers
    makes the fullest stage the clock."""
    shape = model.shape
    uneven = math.ceil(shape.layers / layout.pp) * layout.pp / shape.layers
    return tokens * model.forward_flops(work.mean_length) * uneven / (layout.model * flops)


def forward_seconds(model: ModelSpec, block: Block, layout: Layout, work: Workload, fit: Coefficients) -> float:
    """Reading one batch."""
    rows = math.ceil(work.samples / layout.dp)
    tokens = rows * work.mean_length
    seconds = _pass(model, layout, tokens, work, block.node.flops * fit.mfu_forward)
    seconds += _collectives(model, block, layout, tokens, 2, fit)
    micro_batches = work.micro_batches(rows)
    if work.optimizer_shards == 3:  # the next layer's weights are gathered while this one computes
        seconds = max(seconds, micro_batches * gather_seconds(model, block, layout, fit))
    return seconds / (1 - bubble(layout.pp, micro_batches))


def gradient_sync_seconds(model: ModelSpec, block: Block, layout: Layout, fit: Coefficients) -> float:
    """One optimizer step's traffic of data parallelism: gradients reduced in 32 bits (4 bytes per parameter), weights
    gathered in 16 (2 bytes). Over the network, a node sends each shard that it holds once."""
    if layout.dp == 1:
        return 0.0
    volume = 6 * model.trained_params * (layout.dp - 1) / layout.dp
    if layout.ep > 1:  # experts have ep times fewer copies to agree with
        routed = min(model.trained_params, model.shape.routed_params)
        copies = layout.dp // layout.ep
        volume -= 6 * routed * ((layout.dp - 1) / layout.dp - (copies - 1) / copies / layout.ep)
    return volume / _link(block, layout, fit)


def gather_seconds(model: ModelSpec, block: Block, layout: Layout, fit: Coefficients) -> float:
    """Weights that data parallelism shards (ZeRO-3), collected once: 2 bytes per parameter."""
    return 2 * model.params * (layout.dp - 1) / layout.dp / _link(block, layout, fit)


def _link(block: Block, layout: Layout, fit: Coefficients) -> float:
    """Bytes/s at which data-parallel groups move the whole model: over nvlink every device its shard, over the network
    a node each shard that it holds once."""
    shards, node = layout.model, block.node
    if block.count <= node.joined:
        return node.nvlink * fit.network * shards
    return node.nic * fit.network * shards / min(node.devices, shards)


def train_seconds(model: ModelSpec, block: Block, layout: Layout, work: Workload, fit: Coefficients) -> float:
    """All optimizer steps of one train step: backward passes cost twice a forward one, recomputing one more."""
    rows = math.ceil(work.samples / work.minibatches / layout.dp)
    tokens = rows * work.mean_length
    passes, collectives = (4, 6) if work.recompute else (3, 4)
    seconds = passes * _pass(model, layout, tokens, work, block.node.flops * fit.mfu_train)
    seconds += _collectives(model, block, layout, tokens, collectives, fit)
    micro_batches = work.micro_batches(rows)
    if work.optimizer_shards == 3:  # for the forward and again for the backward pass
        seconds = max(seconds, 2 * micro_batches * gather_seconds(model, block, layout, fit))
    seconds /= 1 - bubble(layout.pp, micro_batches)
    seconds += gradient_sync_seconds(model, block, layout, fit)
    return work.minibatches * (seconds + fit.update_overhead_s)
