"""What a placement is ranked by: the length, or the price, of a train step on its sets."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrlhf.placement.cluster import Block
from asyncrlhf.placement.movement import push_seconds
from asyncrlhf.placement.plan import Candidate, Problem, Sync
from asyncrlhf.placement.setplan import SetPlan
from asyncrlhf.placement.steps import steady_step
from asyncrlhf.placement.strategies import Strategy
from asyncrlhf.placement.units import Unit, units_of
from asyncrlhf.placement.workload import lognormal_quantiles

__all__ = ("Value", "reward_latency")


class Value:
    """Remembers how long weights take between two blocks."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.reward = reward_latency(problem)
        self._leaders = {id(unit.model): unit for unit in units_of(problem.models).values() if unit.trains}
        self._syncs: dict[tuple[str, Block, Block, int], Sync] = {}

    def cost(self, plans: Sequence[SetPlan]) -> float:
        sync = self.sync(plans)
        step = self._step(plans, sync)[0]
        return step * _price(plans) if self.problem.by_price else step

    def _step(self, plans: Sequence[SetPlan], sync: Sync) -> tuple[float, str, float]:
        work = self.problem.work
        return steady_step(plans, work.ahead, work.window, sync.seconds, sync.exposed, self.reward)

    def least(self, plans: Sequence[SetPlan]) -> float:
        """No allocation that contains these sets costs less."""
        if self.problem.work.ahead:
            step = max(plan.busy for plan in plans)
        else:
            step = (
                max(plan.generate for plan in plans)
                + max(plan.prepare for plan in plans)
                + max(plan.train for plan in plans)
                + max(plan.switch for plan in plans)
            )
        return step * _price(plans) if self.problem.by_price else step

    def of(self, candidate: Candidate) -> float:
        return candidate.price if self.problem.by_price else candidate.step

    def candidate(self, strategy: Strategy, plans: tuple[SetPlan, ...]) -> Candidate:
        """The placement with its timing."""
        sync = self.sync(plans)
        step, bottleneck, alone = self._step(plans, sync)
        return Candidate(strategy, plans, sync, step, alone, bottleneck, step * _price(plans) / 3600)

    def sync(self, plans: Sequence[SetPlan]) -> Sync:
        """Weights from each trained model to those who follow it elsewhere."""
        where = {member.unit.name: (plan, member.block) for plan in plans for member in plan.members}
        total = Sync()
        for follower in ("rollout", "shadow_critic"):
            if follower not in where:
                continue
            plan, target = where[follower]
            model = next(member.unit.model for member in plan.members if member.unit.name == follower)
            leader = self._leaders[id(model)]
            source = where[leader.name][1]
            if where[leader.name][0] is plan:
                continue
            replica = plan.layouts[follower].model
            key = (follower, source, target, replica)
            if key not in self._syncs:
                self._syncs[key] = self._push(source, target, replica, leader)
            total = Sync(total.seconds + self._syncs[key].seconds, total.exposed + self._syncs[key].exposed)
        return total

    def _push(self, source: Block, target: Block, replica: int, unit: Unit) -> Sync:
        work, fit = self.problem.work, self.problem.fit
        shards = 1.0 if work.optimizer_shards == 3 else 0.0
        seconds = push_seconds(unit.model, source, target, replica, fit, gather=shards)
        if work.ahead == 0 or work.publish == "drain":
            return Sync(seconds, seconds)
        load = 2 * 2 * unit.model.params / replica / (target.node.hbm * fit.mbu)  # engines pause to copy, read + write
        return Sync(seconds, load + fit.call_s)


def reward_latency(problem: Problem) -> float:
    """Seconds that a reward function adds to a batch: the slowest of all calls where all answers end at once; where
    they do not, or generation runs ahead, the slowest of a prompt's calls on average."""
    work = problem.work
    if not work.reward_seconds:
        return 0.0
    calls = work.answers_per_prompt if work.ahead or work.response.cv or work.response.observed else work.samples
    return lognormal_quantiles(work.reward_seconds, work.reward_cv, max(2, min(calls, 4096)))[-1]


def _price(plans: Sequence[SetPlan]) -> float:
    """Of one hour of all devices."""
    return sum(plan.devices * plan.members[0].block.node.price for plan in plans)
