"""What to say before a run, from facts that are known: measured by an earlier run, or arithmetic. Never a guess: a fact
that is None says nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ("Facts", "warnings")

WORTHWHILE = 1.1
"""Below this speed-up bound overlap is not worth its staleness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Seconds are per train step, and of the same (overlapped) run; memory is in bytes."""

    lookahead: int
    max_staleness: int
    generate_s: float | None = None
    """Busy, of one rollout engine."""
    train_s: float | None = None
    """Busy, of the trainers."""
    lease_s: float | None = None
    """Mean from grant to scored."""
    device_need: float | None = None
    device_have: float | None = None
    host_need: float | None = None
    host_have: float | None = None


def warnings(facts: Facts) -> list[str]:
    """Where overlap cannot help, memory does not fit, or the lookahead is too small (Little's law)."""
    return [
        *_overlap(facts),
        *_little(facts),
        *_memory("device", facts.device_need, facts.device_have),
        *_memory("host", facts.host_need, facts.host_have),
    ]


def _overlap(facts: Facts) -> list[str]:
    if facts.generate_s is None or facts.train_s is None or not facts.lookahead:
        return []
    larger = max(facts.generate_s, facts.train_s)
    bound = (facts.generate_s + facts.train_s) / larger if larger else 1.0
    waiting = 0.0 if facts.lease_s is None else facts.lease_s - facts.generate_s
    if bound >= WORTHWHILE or waiting > (WORTHWHILE - 1) * larger:  # overlap hides the latency of rewards as well
        return []
    return [
        f"overlap can gain {bound:.2f} x at most: a train step generates {facts.generate_s:.3g} s and trains "
        f"{facts.train_s:.3g} s; give the busier pool more devices, or set max_staleness = 0"
    ]


def _little(facts: Facts) -> list[str]:
    """D >= lease time / step time, with the step time that the busier pool allows."""
    if facts.lease_s is None or facts.generate_s is None or facts.train_s is None or not facts.lookahead:
        return []
    step = max(facts.generate_s, facts.train_s)
    need = math.ceil(facts.lease_s / step - 0.05) if step else 0
    if need <= facts.lookahead:
        return []
    return [
        f"lookahead = {facts.lookahead} is below lease time / step time = {facts.lease_s:.3g} s / {step:.3g} s = "
        f"{facts.lease_s / step:.1f}: the trainer waits; set lookahead = {need} and max_staleness = {2 * need}"
    ]


def _memory(where: str, need: float | None, have: float | None) -> list[str]:
    if need is None or have is None or need <= have:
        return []
    gib = 1 << 30
    return [
        f"{where} memory: at least {need / gib:.1f} GiB are needed and {have / gib:.1f} GiB are there; use fewer "
        "models or smaller ones, a smaller dtype, or more machines"
    ]
