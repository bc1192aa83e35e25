"""Seconds of a train step from those of its stages: closed forms, by which schedule and simulator are checked."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrlhf.placement.setplan import SetPlan

__all__ = ("pipelined_step", "speedup_bound", "steady_step", "synchronous_step", "windowed_step")


def synchronous_step(generate: float, prepare: float, train: float, others: float = 0.0) -> float:
    """One stage after the other; `others`: switches, sync, what else nothing overlaps (HybridFlow, algorithm 1)."""
    return generate + prepare + train + others


def pipelined_step(busy: Sequence[float], latency: float = 0.0, lookahead: int = 1, exposed: float = 0.0) -> float:
    """Steady state with a lag of at least 1: the busiest pool is the clock; and a batch that needs `latency` seconds
    from its first token to new weights, of which lookahead + 1 are under way, comes no faster than this."""
    return max(*busy, 0.0, latency / (lookahead + 1)) + exposed


def windowed_step(lease: float, others: float, window: float, turn: float = 0.0) -> float:
    """Little's law: a step's rollouts are decoded for `lease` seconds each, and no more than `window` batches at once;
    `others` are the seconds of a step in which one batch fewer is live. `turn`: of these, engines stand still for so
    long (training on their own devices), and a lease is the longer for every turn that falls into it.

    Solves window * step = lease * step / (step - turn) + others.
    """
    if not turn:
        return (lease + others) / window
    half = (lease + others + window * turn) / (2 * window)
    return half + max(0.0, half * half - others * turn / window) ** 0.5


def speedup_bound(stages: Sequence[float]) -> float:
    """What overlapping alone can gain with the same seconds per stage: their sum over the largest. Two stages with
    g / t = 10 gain 1.1 at most."""
    return sum(stages) / max(stages)


def steady_step(
    sets: Sequence[SetPlan], lookahead: int, window: float, sync: float, exposed: float, reward: float
) -> tuple[float, str, float]:
    """Seconds of a train step, what bounds it, and the seconds of the same stages without overlap. `window`: batches
    that are decoded at once (Workload.window); `reward`: latency of a reward function; `exposed`: the part of `sync`
    that trainer or engines wait for."""
    generate = max(part.generate for part in sets)
    prepare, train = max(part.prepare for part in sets), max(part.train for part in sets)
    switch = max(part.switch for part in sets)
    alone = synchronous_step(generate, prepare, train, switch + sync + reward)
    if lookahead == 0:
        largest = max((generate, "generation"), (prepare, "preparation"), (train, "training"), (sync, "weight sync"))
        return alone, max(largest, (reward, "reward latency"))[1], alone
    busy = [part.busy for part in sets]
    top = max(busy)
    turn = next(part for part in sets if part.lease)
    held = turn.prepare + turn.train if turn.train else 0.0
    waits = windowed_step(turn.lease, reward + prepare + train + switch + exposed, window, held)
    step = max(pipelined_step(busy, exposed=exposed), min(waits, alone))
    if step > (top + exposed) * (1 + 1e-9):
        return step, f"lookahead {lookahead}: leases of {turn.lease + reward:.0f} s", alone
    place = sets[busy.index(top)]
    stages = {"generation": place.stream, "preparation": place.prepare, "training": place.train}
    return step, max(stages, key=lambda name: stages[name]) + " pool", alone
