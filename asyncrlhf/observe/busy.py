"""Who computed for how long: the busy seconds of every engine, cut at the ends of the train steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrlhf.observe.events import EngineBusy, GroupShape

__all__ = ("BusyMeter", "BusyShares")

GENERATE = "generate"
MERGE_SECONDS = 1e-3
MAX_SLICES = 4096


@dataclass(slots=True)
class _Engine:
    """Slices of one engine that no train step has counted yet: [start, end, is generation], disjoint, in order."""

    slices: deque[tuple[float, float, bool]] = field(default_factory=deque[tuple[float, float, bool]])
    seen_until: float = 0.0

    def add(self, start: float, end: float, generates: bool) -> None:
        start = max(start, self.seen_until)
        if end <= start:
            return
        self.seen_until = end
        if self.slices:
            first, last, same = self.slices[-1]
            if same == generates and start - last < MERGE_SECONDS:
                start = first + (start - last)  # the gap is not busy
                self.slices.pop()
        self.slices.append((start, end, generates))
        if len(self.slices) > MAX_SLICES:
            (a, b, same), (c, d, _) = self.slices.popleft(), self.slices.popleft()
            self.slices.appendleft((a, b + (d - c), same))

    def forget(self, low: float, high: float) -> None:
        """Leave out what lies between these two moments, if they are apart."""
        if high - low < MERGE_SECONDS:
            return
        kept: deque[tuple[float, float, bool]] = deque()
        for start, end, generates in self.slices:
            parts = ((start, min(end, low)), (max(start, high), end))
            kept.extend((first, last, generates) for first, last in parts if first < last)
        self.slices = kept

    def take(self, until: float, budget: float) -> tuple[float, float]:
        """Busy seconds before `until`, at most `budget`: (generating, anything else). The rest stays for later."""
        spent = {True: 0.0, False: 0.0}
        while self.slices and budget > 0.0:
            start, end, generates = self.slices[0]
            if start >= until:
                break
            self.slices.popleft()
            taken = min(min(end, until) - start, budget)
            spent[generates] += taken
            budget -= taken
            if start + taken < end:
                self.slices.appendleft((start + taken, end, generates))
        return spent[True], spent[False]


@dataclass(frozen=True, slots=True)
class BusyShares:
    """One train step. `groups` in seconds (mean over a group's engines), the others as shares of the step, 0 to 1."""

    groups: Mapping[str, float]
    generate: float
    """Rollout groups, weight swaps included."""
    train: float
    """Groups that take optimizer steps."""
    swap: float
    """The part of `generate` that is not generation."""
    idle: float
    """What is left of the rollout groups' time; 0 where there are none."""


class BusyMeter:
    """Adds up EngineBusy slices, at most the length of the step per engine; a slice reported late counts in the step
    that hears of it, so that nothing is lost and no share exceeds 1. What engines do between steps (they start, or
    save) is no step's."""

    def __init__(self) -> None:
        self._shapes: dict[str, GroupShape] = {}
        self._engines: dict[str, dict[int, _Engine]] = {}
        self._generating: set[str] = set()
        self._training: list[str] = []
        self._closed = -math.inf

    def declare(self, shapes: Mapping[str, GroupShape]) -> None:
        self._shapes.update(shapes)

    def trains(self, group: str) -> None:
        """`group` took an optimizer step."""
        if group not in self._training:
            self._training.append(group)

    def add(self, slice_: EngineBusy) -> None:
        generates = slice_.work == GENERATE
        if generates:
            self._generating.add(slice_.group)
        engine = self._engines.setdefault(slice_.group, {}).setdefault(slice_.rank, _Engine())
        engine.add(slice_.start, slice_.end, generates)

    def policy(self) -> str:
        """The group whose metrics are `loss/*`: the one declared "policy", or called so, or the first to step."""
        declared = [name for name, shape in self._shapes.items() if shape.role == "policy"]
        for name in (*declared, "policy"):
            if name in self._training:
                return name
        return self._training[0] if self._training and not declared else "policy"

    def close(self, now: float, seconds: float) -> BusyShares:
        """The step that ended at `now` after `seconds`."""
        for engine in (engine for engines in self._engines.values() for engine in engines.values()):
            engine.forget(self._closed, now - seconds)
        self._closed = now
        groups: dict[str, float] = {}
        busy, swaps, ranks = {"generate": 0.0, "train": 0.0}, 0.0, {"generate": 0, "train": 0}
        for name in sorted(self._shapes.keys() | self._engines.keys()):
            taken = [engine.take(now, seconds) for engine in self._engines.get(name, {}).values()]
            total = sum(generating + other for generating, other in taken)
            count = max(self._ranks(name), len(taken))
            groups[name] = total / count if count else 0.0
            if self._is_rollout(name):
                pool = "generate"
                swaps += sum(other for _, other in taken)
            elif name in self._training:
                pool = "train"
            else:
                continue
            busy[pool] += total
            ranks[pool] += count

        def share(value: float, count: int) -> float:
            return min(1.0, value / (count * seconds)) if count and seconds > 0 else 0.0

        generate = share(busy["generate"], ranks["generate"])
        return BusyShares(
            groups,
            generate=generate,
            idle=1.0 - generate if ranks["generate"] else 0.0,
            train=share(busy["train"], ranks["train"]),
            swap=share(swaps, ranks["generate"]),
        )

    def _ranks(self, group: str) -> int:
        return self._shapes[group].ranks if group in self._shapes else 0

    def _is_rollout(self, group: str) -> bool:
        return self._shapes[group].role == "rollout" if group in self._shapes else group in self._generating
