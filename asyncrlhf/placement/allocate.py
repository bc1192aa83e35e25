"""Devices for sets: every node-aligned combination, pruned by what it costs at least; beyond a limit a coarse grid and
refinement."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyncrlhf.placement.cluster import Block
from asyncrlhf.placement.plan import Problem
from asyncrlhf.placement.setplan import Member, Rejection, SetPlan
from asyncrlhf.placement.sets import Sets
from asyncrlhf.placement.units import Unit
from asyncrlhf.placement.value import Value

__all__ = ("LIMIT", "Allocator", "Option")

LIMIT = 400_000
"""Allocations beyond which a search is no longer exhaustive."""
SMALL = 4
"""Nodes up to which a set may have a part of a node."""
MANY = 64
"""Block sizes beyond which a set is tried on a grid of them only."""

Option = tuple[int, int, SetPlan]
"""(pool, devices, plan)"""


@dataclass
class _Best:
    cost: float = math.inf
    options: tuple[Option, ...] = ()


class Allocator:
    """`examined`: complete allocations that were compared. `exhaustive`: none was left out but for being worse."""

    def __init__(self, problem: Problem, value: Value, limit: int) -> None:
        self.problem, self.value, self.limit = problem, value, limit
        self.examined, self.exhaustive = 0, True
        self._options: dict[tuple[object, ...], list[Option] | Rejection] = {}
        self._of_pool: dict[int, list[int]] = {}

    def _sizes(self, pool: int) -> list[int]:
        """Device counts that a set may have."""
        if pool in self._of_pool:
            return self._of_pool[pool]
        node, count = self.problem.cluster.pools[pool]
        sizes = self.problem.cluster.sizes(pool)
        if count > SMALL * node.devices:
            sizes = [size for size in sizes if size % node.devices == 0]
        self._of_pool[pool] = sizes
        return sizes

    def feasible(self, units: tuple[Unit, ...], sets: Sets) -> list[Option] | Rejection:
        """Blocks on which these units fit, of sizes worth having: one that is no faster than a smaller one is left
        out. A Rejection: nowhere."""
        key = (id(sets), tuple((unit.name, unit.reads) for unit in units))
        if key in self._options:
            return self._options[key]
        found: list[Option] = []
        refused: Rejection | None = None
        for pool in range(len(self.problem.cluster.pools)):
            sizes = self._sizes(pool)
            for count in sizes if len(sizes) <= MANY else _grid(sizes):
                plan = self._set(units, pool, count, sets)
                if isinstance(plan, SetPlan):
                    found.append((pool, count, plan))
                elif refused is None or plan.shortage <= refused.shortage:
                    refused = plan
        if not found:
            assert refused is not None
            self._options[key] = refused
        else:
            self._options[key] = _worth_having(found)
        return self._options[key]

    def _set(self, units: Sequence[Unit], pool: int, count: int, sets: Sets) -> SetPlan | Rejection:
        node = self.problem.cluster.pools[pool][0]
        return sets.plan([Member(unit, Block(node, count, pool)) for unit in units])

    def allocate(self, options: list[list[Option]], sets: Sets) -> tuple[Option, ...] | None:
        """Devices for every set: all combinations, or, where they are too many, the best of a thinned list."""
        ways = math.prod(len(found) for found in options) / math.factorial(len(options) - 1)
        refined = any(len(self._sizes(pool)) > MANY for pool in range(len(self.problem.cluster.pools)))
        if ways > self.limit:
            most = max(3, int((self.limit * math.factorial(len(options) - 1)) ** (1 / len(options))))
            options = [_thinned(found, most) for found in options]
        self.exhaustive &= ways <= self.limit and not refined
        best = self._combine(options)
        if best is not None and (ways > self.limit or refined):
            best = self._refine(best, sets)
        return best

    def _combine(self, options: list[list[Option]]) -> tuple[Option, ...] | None:
        capacity = [count for _, count in self.problem.cluster.pools]
        order = sorted(range(len(options)), key=lambda i: len(options[i]))
        least = [min(count for _, count, _ in options[i]) for i in order]
        best = _Best()
        chosen: list[Option] = []

        def extend(depth: int, left: list[int]) -> None:
            if depth == len(order):
                self.examined += 1
                plans = [plan for _, _, plan in chosen]
                cost = self.value.cost(plans)
                if cost < best.cost:
                    placed: list[Option | None] = [None] * len(order)
                    for i, option in zip(order, chosen, strict=True):
                        placed[i] = option
                    best.cost, best.options = cost, tuple(option for option in placed if option is not None)
                return
            reserve = sum(least[depth + 1 :]) if len(left) == 1 else 0
            for option in reversed(options[order[depth]]):
                pool, count, _ = option
                if count + reserve <= left[pool]:
                    chosen.append(option)
                    if self.value.least([plan for _, _, plan in chosen]) < best.cost:
                        left[pool] -= count
                        extend(depth + 1, left)
                        left[pool] += count
                    chosen.pop()

        extend(0, capacity)
        return best.options or None

    def _refine(self, start: tuple[Option, ...], sets: Sets) -> tuple[Option, ...]:
        """Move devices between sets, in ever smaller portions, while that helps."""
        best, cost = start, self.value.cost([plan for _, _, plan in start])
        for portion in _portions(max(len(self._sizes(pool)) for pool, _, _ in start)):
            moved = True
            while moved:
                moved = False
                for neighbour in self._neighbours(best, portion, sets):
                    other = self.value.cost([plan for _, _, plan in neighbour])
                    self.examined += 1
                    if other < cost * (1 - 1e-9):
                        best, cost, moved = neighbour, other, True
                        break
        return best

    def _neighbours(self, at: tuple[Option, ...], portion: int, sets: Sets) -> Iterator[tuple[Option, ...]]:
        """One set grown by `portion` sizes, or to what another pool has of its size: into free devices, or at another
        set's cost; and one set shrunk."""
        pools = self.problem.cluster.pools
        for i, (pool, count, plan) in enumerate(at):
            for target, size in self._moves(pool, count, portion):
                changed = self._resized(plan, target, size, sets)
                if changed is None:
                    continue
                grown = (*at[:i], (target, size, changed), *at[i + 1 :])
                missing = sum(each for where, each, _ in grown if where == target) - pools[target][1]
                if missing <= 0:
                    yield grown
                    continue
                for j, (where, each, donor) in enumerate(grown):
                    left = max((s for s in self._sizes(where) if s <= each - missing), default=0)
                    if j != i and where == target and left:
                        shrunk = self._resized(donor, where, left, sets)
                        if shrunk is not None:
                            yield (*grown[:j], (where, left, shrunk), *grown[j + 1 :])

    def _moves(self, pool: int, count: int, portion: int) -> Iterator[tuple[int, int]]:
        """(pool, size) that a set of `count` devices may take instead."""
        for target in range(len(self.problem.cluster.pools)):
            sizes = self._sizes(target)
            at = bisect_left(sizes, count)
            for i in (at + portion, at - portion) if target == pool else (at,):
                if 0 <= i < len(sizes):
                    yield target, sizes[i]

    def _resized(self, plan: SetPlan, pool: int, count: int, sets: Sets) -> SetPlan | None:
        found = self._set([member.unit for member in plan.members], pool, count, sets)
        return found if isinstance(found, SetPlan) else None


def _worth_having(found: list[Option]) -> list[Option]:
    """Smallest first within a pool; a larger block only if some stage is faster there than on every smaller one."""
    kept: list[Option] = []
    best: dict[int, tuple[float, ...]] = {}
    for pool, count, plan in sorted(found, key=lambda option: (option[0], option[1])):
        stages = (plan.generate, plan.sampling, plan.prepare, plan.train, plan.switch)
        before = best.get(pool)
        if before is None or any(now < then * (1 - 1e-9) for now, then in zip(stages, before, strict=True)):
            best[pool] = stages if before is None else tuple(map(min, stages, before))
            kept.append((pool, count, plan))
    return kept


def _grid(sizes: Sequence[int]) -> list[int]:
    """About 40 of many sizes, denser where they are small, the largest included."""
    last = len(sizes) - 1
    return [sizes[i] for i in sorted({round(last ** (k / 39)) for k in range(40)} | {0, last})]


def _thinned(found: list[Option], most: int) -> list[Option]:
    if len(found) <= most:
        return found
    step = (len(found) - 1) / (most - 1)
    return [found[round(i * step)] for i in range(most)]


def _portions(sizes: int) -> list[int]:
    """Steps on a list of so many sizes, largest first."""
    portions = [1]
    while portions[-1] * 4 <= sizes:
        portions.append(portions[-1] * 2)
    return portions[::-1]
