"""The best placement of every strategy: all set partitions, all node-aligned allocations, all parallel sizes.

HybridFlow's mapping search (arXiv 2409.19256, algorithms 1 and 2) over more strategies, with memory as the first
sieve. Beyond LIMIT allocations a coarse grid with refinement takes the place of the exhaustive one.
"""

from __future__ import annotations

from asyncrlhf.errors import ConfigError
from asyncrlhf.placement.allocate import LIMIT, Allocator, Option
from asyncrlhf.placement.cluster import GIB, Block
from asyncrlhf.placement.decode import decode_step_seconds, zero3_decode_step_seconds
from asyncrlhf.placement.layouts import generation_layouts
from asyncrlhf.placement.plan import Candidate, Outcome, Problem, Refused
from asyncrlhf.placement.sets import Member, Rejection, SetPlan, Sets
from asyncrlhf.placement.strategies import Strategy, strategies
from asyncrlhf.placement.units import units_of
from asyncrlhf.placement.value import Value

__all__ = ("search",)


def search(problem: Problem, limit: int = LIMIT) -> Outcome:
    """Every strategy asked for. Raises ConfigError when none of them fits, with the reason of each."""
    search_ = _Search(problem, limit)
    for strategy in strategies(list(problem.strategies), problem.models, problem.work):
        if isinstance(strategy, tuple):
            search_.refused.append(Refused(*strategy))
        else:
            search_.add(strategy)
    return search_.outcome()


class _Search:
    def __init__(self, problem: Problem, limit: int) -> None:
        self.problem = problem
        work, fit = problem.work, problem.fit
        self.sets = Sets(work, fit, problem.fixed, problem.most_pp)
        self.symmetric: dict[int, Sets] = {}
        self.units = units_of(problem.models, recompute=work.recompute_logprobs)
        self.shadowed = units_of(problem.models, shadows=True, recompute=work.recompute_logprobs)
        self.value = Value(problem)
        self.allocator = Allocator(problem, self.value, limit)
        self.found: list[Candidate] = []
        self.refused: list[Refused] = []

    # ---- strategies

    def add(self, strategy: Strategy) -> None:
        """The best placement of one strategy, or why there is none."""
        if strategy.gathers:
            self._compare_gathering(strategy)
        elif strategy.symmetric:
            self._add_symmetric(strategy)
        elif strategy.lanes:
            self._add_lanes(strategy)
        else:
            self._add_partition(strategy, self.sets)

    def _add_partition(self, strategy: Strategy, sets: Sets) -> None:
        units = self.shadowed if strategy.shadows else self.units
        options: list[list[Option]] = []
        for part in strategy.sets:
            found = self.allocator.feasible(tuple(units[name] for name in part), sets)
            if isinstance(found, Rejection):
                self._refuse(strategy, found)
                return
            options.append(found)
        best = self.allocator.allocate(options, sets)
        if best is None:
            need = sum(min(count for _, count, _ in found) for found in options)
            self.refused.append(
                Refused(
                    strategy.label,
                    f"its {len(options)} sets need {need} devices, have {self.problem.cluster.devices}",
                )
            )
            return
        self.found.append(self.value.candidate(strategy, tuple(plan for _, _, plan in best)))

    def _compare_gathering(self, strategy: Strategy) -> None:
        """Flattening has no place of its own: on one device it is colocate, and on more it decodes more slowly."""
        problem = self.problem
        node, count = max(problem.cluster.pools, key=lambda pool: pool[1])
        spec = next(model for model in problem.models.values() if model.role == "policy")
        block, width = Block(node, count), min(count, node.joined)
        gathered = zero3_decode_step_seconds(spec, block, problem.fit)
        context = problem.work.mean_length
        engine = min(
            decode_step_seconds(spec, node, layout, 1, context, problem.fit)
            for layout in generation_layouts(spec.shape, count, width)
        )
        self.refused.append(
            Refused(
                strategy.name,
                f"{2 * spec.params / GIB:.1f} GiB of weights that {count} devices shard are gathered for every token: "
                f"{gathered * 1e3:.0f} ms, and {engine * 1e3:.0f} ms with engines of their own, as in colocate",
            )
        )

    def _add_symmetric(self, strategy: Strategy) -> None:
        """One tensor-parallel size for training and generation."""
        before, reasons = len(self.found), list[Refused]()
        for tp in (1, 2, 4, 8):
            if tp not in self.symmetric:
                fixed = {**self.problem.fixed, "rollout": (tp, 1, 0)}
                fixed |= {name: (tp, 1, 0) for name, unit in self.units.items() if unit.model.role == "policy"}
                self.symmetric[tp] = Sets(self.problem.work, self.problem.fit, fixed, self.problem.most_pp)
            kept = len(self.refused)
            try:
                self._add_partition(strategy, self.symmetric[tp])
            except ConfigError as problem:
                self.refused.append(Refused(strategy.label, str(problem)))
            reasons += self.refused[kept:]
            del self.refused[kept:]
        mine = self.found[before:]
        del self.found[before:]
        if mine:
            self.found.append(min(mine, key=self.value.of))
        else:
            self.refused.append(reasons[-1])

    def _add_lanes(self, strategy: Strategy) -> None:
        """Interleaving: frozen models divide the devices that the others share."""
        best: tuple[float, SetPlan] | None = None
        reason = Rejection("two lanes need 2 devices, and there is 1")
        for pool, (node, count) in enumerate(self.problem.cluster.pools):
            lanes = [name for lane in strategy.lanes for name in lane]
            shared = [self.units[name] for name in strategy.sets[0] if name not in lanes]
            for shares in self._shares(count, len(lanes), node.devices):
                members = [Member(unit, Block(node, count, pool)) for unit in shared]
                members += [
                    Member(self.units[name], Block(node, share, pool), name)
                    for name, share in zip(lanes, shares, strict=True)
                ]
                plan = self.sets.plan(members)
                self.allocator.examined += 1
                if isinstance(plan, Rejection):
                    reason = plan
                elif best is None or plan.busy < best[0]:
                    best = plan.busy, plan
        if best is None:
            self._refuse(strategy, reason)
        else:
            self.found.append(self.value.candidate(strategy, (best[1],)))

    def _shares(self, count: int, lanes: int, node: int) -> list[tuple[int, ...]]:
        """Node-aligned ways to divide `count` devices; within one node halves, quarters, ..."""
        unit = node if count >= lanes * node else max(1, count // (2 * lanes))
        parts = count // unit
        if lanes == 1:
            return [(count,)]
        step = max(1, parts // 32)
        return [
            (first * unit, *rest)
            for first in range(step, parts - lanes + 2, step)
            for rest in self._shares(count - first * unit, lanes - 1, unit)
            if sum(rest) + first * unit <= count
        ]

    def _refuse(self, strategy: Strategy, why: Rejection) -> None:
        self.refused.append(Refused(strategy.label, why.text))

    def outcome(self) -> Outcome:
        if not self.found:
            raise ConfigError(
                "no strategy fits: " + "; ".join(f"{each.strategy}: {each.reason}" for each in self.refused[:4])
            )
        self.found.sort(key=self.value.of)
        best_of: dict[str, Candidate] = {}
        for candidate in self.found:
            best_of.setdefault(candidate.strategy.name.partition(",")[0], candidate)
        return Outcome(
            self.problem,
            tuple(_distinct(self.found)[: self.problem.top]),
            best_of,
            tuple(self.refused),
            self.allocator.examined,
            self.allocator.exhaustive,
        )


def _distinct(found: list[Candidate]) -> list[Candidate]:
    """Without partitions of `auto` that are a named strategy's very placement."""
    kept: list[Candidate] = []
    named = [candidate for candidate in found if candidate.strategy.name != "auto"]
    seen = {_key(candidate) for candidate in named}
    for candidate in found:
        if candidate.strategy.name != "auto" or _key(candidate) not in seen:
            kept.append(candidate)
            seen.add(_key(candidate))
    return kept


def _key(candidate: Candidate) -> frozenset[object]:
    return frozenset((plan.members, tuple(sorted(plan.layouts.items()))) for plan in candidate.sets)
