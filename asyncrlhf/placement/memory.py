"""Bytes on a device by item, and on the host. Adam's two moments and the 32-bit weights count from train step 0."""

from __future__ import annotations

import math

from asyncrlhf.placement.cluster import Block
from asyncrlhf.placement.coefficients import Coefficients
from asyncrlhf.placement.layouts import Layout
from asyncrlhf.placement.models import ModelSpec
from asyncrlhf.placement.workload import Workload

__all__ = ("engine_weights", "frozen_weights", "host_bytes", "pass_memory", "training_state", "wake_up_peak")


def _per_device(model: ModelSpec, params: float, layout: Layout) -> float:
    """Parameters on one device: the fullest pipeline stage; experts are split over `ep` as well."""
    shape = model.shape
    uneven = math.ceil(shape.layers / layout.pp) / shape.layers
    routed = min(params, shape.routed_params)
    return (params - routed + routed / layout.ep) * uneven / layout.tp


def training_state(model: ModelSpec, layout: Layout, work: Workload) -> dict[str, float]:
    """What a trained model holds all the time: 2 bytes of weights and 4 of gradients per parameter, and 12 of optimizer
    state, which data parallelism shards (ZeRO-1; with 3 everything)."""
    held = _per_device(model, model.params, layout)
    trained = _per_device(model, model.trained_params, layout)
    copies = layout.dp if work.optimizer_shards == 3 else 1
    layers = math.ceil(model.shape.layers / layout.pp) / model.shape.layers
    shared = model.trained_params * layers / (layout.tp * layout.dp)  # an expert's dp / ep copies share theirs
    return {"weights": 2 * held / copies, "gradients": 4 * trained / copies, "optimizer": 12 * shared}


def frozen_weights(model: ModelSpec, layout: Layout, work: Workload) -> float:
    """16-bit weights of a model that only reads."""
    return 2 * _per_device(model, model.params, layout) / (layout.dp if work.optimizer_shards == 3 else 1)


def engine_weights(model: ModelSpec, layout: Layout) -> float:
    """16-bit weights of a generation engine."""
    return 2 * _per_device(model, model.params, layout)


def pass_memory(model: ModelSpec, layout: Layout, work: Workload) -> dict[str, float]:
    """What micro-batches take on the first pipeline stage while they are computed: activations, also of those that wait
    for their backward pass (as many as stages, or as there are), and logits in 32 bits."""
    shape, length = model.shape, work.mean_length
    tokens = max(work.micro_batch_tokens, length)
    layer = 34 * tokens * shape.hidden / layout.tp
    layers = math.ceil(shape.layers / layout.pp)
    waiting = min(layout.pp, work.micro_batches(math.ceil(work.samples / work.minibatches / layout.dp)))
    if not model.trained:
        activations = layer / 4
    elif work.recompute:
        activations = 2 * tokens * shape.hidden * layers * waiting / layout.tp + layer
    else:
        activations = layer * layers * waiting
    return {"activations": activations, "logits": 0.0 if model.scalar else 4 * tokens * shape.vocab / layout.tp}


def wake_up_peak(train_shard: float, engine: float, kv: float, bucket: float, *, two_phase: bool = True) -> float:
    """Bytes while a sleeping engine takes new weights: its weights wake, take buckets, and only then does the KV cache
    wake (`two_phase`); else the cache is there as well."""
    return train_shard + engine + bucket + (0.0 if two_phase else kv)


def host_bytes(offloaded: float, block: Block, fit: Coefficients) -> float:
    """On one node, at worst, when every device of it has moved `offloaded` bytes there."""
    return offloaded * min(block.count, block.node.devices) * fit.host_factor
