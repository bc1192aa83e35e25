"""Seconds of a decode step from what a run logged: o0 + o1 * active answers, by least squares over leases."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from asyncrlhf.observe.events import EngineBusy, Popped, Sampled

__all__ = ("fit_decode",)

RATIOS = (0.0, *(10 ** (i / 8) for i in range(-32, 9)), math.inf)
"""o1 / o0 that are tried; between the best and its neighbours twice more."""
LEASES = 1500
"""Leases that are looked at, the newest."""
USUAL = 40.0
"""o0 / o1 of a run that does not tell: a decode step costs as much as so many answers in it before there is one.
Measured between 16 and 67 (torch backend, 2 cores of an AMD EPYC, 0.6 million parameters)."""
CLEAR = 0.9
"""A ratio is told from the extremes if its squared error is at most so much of theirs."""


@dataclass(frozen=True, slots=True)
class _Lease:
    begin: float
    end: float
    longest: int
    """Tokens of its longest answer: decode steps that it was there for."""
    active: float
    """Its answers that were active, on average over these steps."""


def fit_decode(
    busy: Sequence[EngineBusy], rollout: str, sampled: Sequence[Sampled], popped: Sequence[Popped], answers: int
) -> tuple[tuple[float, float], bool]:
    """(o0, o1), and whether the run tells them apart; if not, their ratio is the usual one, and busy seconds are kept.

    For every lease the steps of its longest answer are known; those that its engine can have done meanwhile are the
    integral of dt / (o0 + o1 * active). Their ratio decides how well the two agree; the scale follows from it.
    """
    engines = len({event.rank for event in busy if event.group == rollout}) or 1
    slices = [(event.start, event.end) for event in busy if event.group == rollout and event.work == "generate"]
    leases = _leases(sampled, popped, answers)
    tokens = sum(event.token_count for event in sampled)
    if not leases or not slices:
        return (0.0, sum(end - start for start, end in slices) / max(1, tokens)), False
    load = _Load(slices, leases, engines)
    ratios = list(RATIOS)
    errors = {ratio: load.error(ratio) for ratio in ratios}
    for _ in range(2):
        at = ratios.index(min(ratios, key=lambda ratio: errors[ratio][0]))
        if ratios[at] not in (0.0, math.inf):
            low, high = max(ratios[at - 1], ratios[at] / 2), min(ratios[at + 1], ratios[at] * 2)
            new = [low * (high / low) ** (i / 8) for i in range(1, 8)]
            errors |= {ratio: load.error(ratio) for ratio in new}
            ratios = sorted({*ratios, *new})
    best = min(ratios, key=lambda ratio: errors[ratio][0])
    error, scale = errors[best]
    if math.isfinite(error) and error <= CLEAR * min(errors[0.0][0], errors[math.inf][0]):
        return (scale, scale * best), True
    seconds = sum(end - start for start, end in slices)
    base = seconds / max(1e-12, tokens * (1 / max(1.0, load.mean_active) + 1 / USUAL))
    return (base, base / USUAL), False


def _leases(sampled: Sequence[Sampled], popped: Sequence[Popped], answers: int) -> list[_Lease]:
    longest: dict[int, int] = {}
    for event in popped:
        for i, uid in enumerate(event.uids):
            longest[uid] = max(event.response_lengths[i * answers : (i + 1) * answers], default=0)
    return [
        _Lease(event.t - event.seconds, event.t, longest[event.uid], event.token_count / longest[event.uid])
        for event in sampled
        if longest.get(event.uid) and event.seconds > 0
    ]


class _Load:
    """Active answers and busy engines over time, both constant between the moments at which one of them changes."""

    def __init__(self, slices: Sequence[tuple[float, float]], leases: Sequence[_Lease], engines: int) -> None:
        changes: dict[float, list[float]] = {}
        for lease in leases:
            changes.setdefault(lease.begin, [0.0, 0.0])[0] += lease.active / engines
            changes.setdefault(lease.end, [0.0, 0.0])[0] -= lease.active / engines
        for start, end in slices:
            changes.setdefault(start, [0.0, 0.0])[1] += 1 / engines
            changes.setdefault(end, [0.0, 0.0])[1] -= 1 / engines
        times = sorted(changes)
        self._active = list(accumulate(changes[time][0] for time in times))
        busy = accumulate(changes[time][1] for time in times)
        self._busy = [(after - before) * share for (before, after), share in zip(pairwise(times), busy, strict=False)]
        self._spans = [
            (bisect_right(times, lease.begin) - 1, bisect_right(times, lease.end) - 1, lease.longest)
            for lease in leases[-LEASES:]
        ]

    @property
    def mean_active(self) -> float:
        """Answers of a decode step, on average over the busy seconds."""
        spans = [(a, seconds) for a, seconds in zip(self._active, self._busy, strict=False) if a > 1e-9]
        return sum(a * seconds for a, seconds in spans) / max(1e-12, sum(seconds for _, seconds in spans))

    def error(self, ratio: float) -> tuple[float, float]:
        """Squared error of the leases' steps if o1 = ratio * o0, and the o0 (with an infinite ratio: the o1) at which
        it is least."""
        rates = ((1 / max(a, 1e-9) if ratio == math.inf else 1 / (1 + ratio * a)) for a in self._active)
        sums = [0.0, *accumulate(seconds * rate for seconds, rate in zip(self._busy, rates, strict=False))]
        points = [(sums[last] - sums[first], float(steps)) for first, last, steps in self._spans]
        square, cross = sum(x * x for x, _ in points), sum(x * y for x, y in points)
        if not square or not cross:
            return math.inf, 0.0
        return sum((x * cross / square - y) ** 2 for x, y in points), square / cross
