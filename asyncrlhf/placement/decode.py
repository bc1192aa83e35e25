"""Seconds of generation: the roofline of one decode step, and answers that end at different times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrlhf.placement.cluster import Block, NodeType
from asyncrlhf.placement.coefficients import Coefficients
from asyncrlhf.placement.layouts import Layout
from asyncrlhf.placement.models import ModelSpec
from asyncrlhf.placement.workload import Workload

__all__ = (
    "Generation",
    "decode_step_seconds",
    "generation",
    "longest_answer_seconds",
    "tail_migration_seconds",
    "zero3_decode_step_seconds",
)

SEGMENTS = 32


@dataclass(frozen=True, slots=True)
class Generation:
    """Sampling one batch."""

    seconds: float
    """Of a batch that begins and ends with idle engines."""
    stream: float
    """Of a batch when engines are kept full: the next one's answers take the places of those that end."""
    waves: float
    """Sequences of a replica over those that its KV cache holds."""
    capacity: int
    """Sequences that one replica's KV cache holds."""
    lease: float
    """Mean seconds that a prompt's answers take when engines are kept full: as long as the longest of them."""


def decode_step_seconds(
    model: ModelSpec, node: NodeType, layout: Layout, active: float, context: float, fit: Coefficients
) -> float:
    """One token for each of `active` sequences of `context` tokens on one replica: the larger of memory and compute
    time, then two collectives per layer, then overheads per step and per sequence."""
    shape, tp, whole = model.shape, layout.tp, layout.model
    read = 2 * shape.touched_params(active) / tp + active * context * shape.kv_bytes / whole
    memory = read / (node.hbm * fit.mbu)
    work = active * (2 * (shape.active_params + shape.embedding_params) + 4 * shape.layers * shape.hidden * context)
    compute = work / whole / (node.flops * fit.mfu_decode)
    seconds = max(memory, compute) + fit.step_overhead_s + fit.sequence_overhead_s * active
    if tp > 1:
        link = (node.nvlink if tp <= node.joined else node.nic / node.devices) * fit.network
        volume = 4 * active * shape.hidden * (tp - 1) / tp
        seconds += 2 * shape.layers * (fit.collective_s * (1 + math.log2(tp)) + volume / link)
    return seconds


def zero3_decode_step_seconds(model: ModelSpec, block: Block, fit: Coefficients) -> float:
    """A token from weights that all devices of the block shard: 2 P bytes are gathered for it, over the network once
    per node (what makes flattening slow in the adaptive placement paper, arXiv 2312.11819)."""
    node = block.node
    return 2 * model.params / ((node.nvlink if block.count <= node.joined else node.nic) * fit.network)


def generation(
    model: ModelSpec, block: Block, layout: Layout, work: Workload, free: float, fit: Coefficients
) -> Generation | None:
    """One batch over `layout.dp` replicas, each device with `free` bytes for KV cache. None: not one answer fits.

    Answers are dealt to replicas by length, so one replica stands for all. Those beyond the cache wait for a place;
    then the active set shrinks as answers end.
    """
    shape, node = model.shape, block.node
    count = math.ceil(work.samples / layout.dp)
    lengths = work.response.quantiles(min(count, SEGMENTS))
    per_token = shape.kv_bytes / layout.model * max(1.0, layout.tp / shape.kv_heads)
    longest = work.prompt_tokens + lengths[-1]
    if free < per_token * longest:
        return None
    capacity = int(free // (per_token * (work.prompt_tokens + work.mean_response)))
    each = count / len(lengths)
    active = min(count, max(1, capacity))
    prefill = count * work.prompt_tokens * model.forward_flops(work.prompt_tokens)
    seconds = prefill / layout.model / (node.flops * fit.mfu_forward)
    middle = work.prompt_tokens + work.mean_response / 2
    full = decode_step_seconds(model, node, layout, active, middle, fit)
    crowd = float(active)
    if work.ahead:  # answers shorter than the longest to their prompt have left their places by then
        crowd = min(max(1.0, count * work.window * work.mean_response / work.longest[0]), max(1.0, capacity))
    pace = decode_step_seconds(model, node, layout, crowd, middle, fit)
    stream = seconds + count * work.mean_response / crowd * pace
    queued = count - active
    seconds += queued * work.mean_response / active * full
    share, done = active / count, 0
    for i, length in enumerate(lengths):
        if length > done:
            left = max(1.0, (len(lengths) - i) * each * share)
            context = work.prompt_tokens + (done + length) / 2
            seconds += (length - done) * decode_step_seconds(model, node, layout, left, context, fit)
            done = length
    longest = work.response.quantiles(min(work.samples, 4096))[-1]  # some replica has the longest of the batch
    if longest > done:
        context = work.prompt_tokens + (done + longest) / 2
        seconds += (longest - done) * decode_step_seconds(model, node, layout, 1, context, fit)
    return Generation(seconds, min(stream, seconds), count / active, capacity, work.longest[0] * pace)


def longest_answer_seconds(
    model: ModelSpec, node: NodeType, layout: Layout, work: Workload, fit: Coefficients
) -> float:
    """The longest answer with an engine to itself: more devices do not make a batch's generation shorter than this."""
    longest = work.response.quantiles(min(work.samples, 4096))[-1]
    return longest * decode_step_seconds(model, node, layout, 1, work.prompt_tokens + longest / 2, fit)


def tail_migration_seconds(
    lengths: Sequence[int], replicas: int, threshold: float, step_s: tuple[float, float], inference_s: float, most: int
) -> float:
    """Generation and inference when the last `threshold` share of answers moves to few replicas, so that the others
    start inference early (RLHFuse's inter-stage fusion).

    A decode step takes step_s[0] + step_s[1] * active on a replica that holds at most `most` sequences; inference takes
    `inference_s` on all replicas together and is spread over those that are free.
    """
    ordered = sorted(lengths)
    tail = math.ceil(threshold * len(ordered))
    cut = ordered[-tail - 1] if tail < len(ordered) else 0
    base, slope = step_s

    def decode(part: Sequence[int], share: int, begin: int) -> float:
        seconds, done = 0.0, begin
        for i, length in enumerate(part):
            if length > done:
                seconds += (length - done) * (base + slope * (len(part) - i) / share)
                done = length
        return seconds

    head = decode([min(length, cut) for length in ordered], replicas, 0)
    kept = min(replicas, max(1, math.ceil(tail / most))) if tail else 0
    rest = decode(ordered[len(ordered) - tail :], kept, cut) if tail else 0.0
    free = replicas - kept
    done_early = min(rest * free / replicas, inference_s * (1 - tail / len(ordered)))
    return head + rest + inference_s - done_early
