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
from asyncrlhf.placement.setplan import Member, Rejection, SetPlan
from asyncrlhf.placement.sets import Sets
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
        self.kept: list[Sets] = []  # the allocator knows them by identity
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
            found = self._gathering(strategy)
        elif strategy.symmetric:
            found = self._symmetric(strategy)
        elif strategy.lanes:
            found = self._lanes(strategy)
        else:
            found = self._partition(strategy, self.sets)
        if isinstance(found, Candidate):
            self.found.append(found)
        else:
            self.refused.append(found)

    def _partition(self, strategy: Strategy, sets: Sets) -> Candidate | Refused:
        units = self.shadowed if strategy.shadows else self.units
        options: list[list[Option]] = []
        for part in strategy.sets:
            found = self.allocator.feasible(tuple(units[name] for name in part), sets)
            if isinstance(found, Rejection):
                return Refused(strategy.label, found.text)
            options.append(found)
        best = self.allocator.allocate(options, sets)
        if best is None:
            need = sum(min(count for _, count, _ in found) for found in options)
            return Refused(
                strategy.label, f"its {len(options)} sets need {need} devices, have {self.problem.cluster.devices}"
            )
        return self.value.candidate(strategy, tuple(plan for _, _, plan in best))

    def _gathering(self, strategy: Strategy) -> Refused:
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
        return Refused(
            strategy.name,
            f"{2 * spec.params / GIB:.1f} GiB of weights that {count} devices shard are gathered for every token: "
            f"{gathered * 1e3:.0f} ms, and {engine * 1e3:.0f} ms with engines of their own, as in colocate",
        )

    def _symmetric(self, strategy: Strategy) -> Candidate | Refused:
        """One layout for training and generation: the one that [layouts] says, else tensor parallel alone."""
        names = [name for name, unit in self.units.items() if unit.model.role == "policy"]
        asked = {name: self.problem.fixed[name] for name in names if name in self.problem.fixed}
        sizes = {(tp, pp) for tp, pp, _ in asked.values()} or {(tp, 1) for tp in (1, 2, 4, 8)}
        if len(sizes) > 1 and asked:
            said = " and ".join(
                f"layouts.{name} says tensor_parallel {tp} * pipeline_parallel {pp}"
                for name, (tp, pp, _) in asked.items()
            )
            return Refused(strategy.name, f"it trains and generates in one layout, and {said}; make them the same")
        found: list[Candidate | Refused] = []
        for tp, pp in sorted(sizes):
            devices = {name: asked[name][2] if name in asked else 0 for name in names}
            fixed = {**self.problem.fixed, **{name: (tp, pp, count) for name, count in devices.items()}}
            sets = Sets(self.problem.work, self.problem.fit, fixed, self.problem.most_pp)
            self.kept.append(sets)
            found.append(self._partition(strategy, sets))
        fitting = [each for each in found if isinstance(each, Candidate)]
        return min(fitting, key=self.value.of) if fitting else found[-1]

    def _lanes(self, strategy: Strategy) -> Candidate | Refused:
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
        return Refused(strategy.label, reason.text) if best is None else self.value.candidate(strategy, (best[1],))

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
