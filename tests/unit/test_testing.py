"""What asyncrlhf.testing promises its users: documented examples that run, and no torch."""

from __future__ import annotations

import doctest
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

import asyncrlhf as rl
from algorithms.sft import SFT
from asyncrlhf import ops
from asyncrlhf.testing import Fault, Scenario, simulate, world


def test_the_example_of_simulate_runs() -> None:
    found = doctest.DocTestFinder().find(world.simulate, "simulate", globs={})
    results = [doctest.DocTestRunner().run(test) for test in found]
    assert sum(result.attempted for result in results) >= 6
    assert sum(result.failed for result in results) == 0


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, asyncrlhf.testing, asyncrlhf.testing.conformance; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


class MyLoss(ops.Loss, frozen=True):
    strength: float = 1.0


@dataclass(kw_only=True)
class Mine(rl.Algorithm):
    """An algorithm of a user's own: best of n, a policy by another name, a setting."""

    questions: rl.PromptSource
    sampler: rl.RolloutGroup
    judge: rl.RewardGroup
    actor: rl.PolicyGroup
    clock: rl.Coordinator
    scored: rl.ExperienceQueue[rl.Experience]
    loss: MyLoss = field(default_factory=MyLoss)
    least: float = 0.0

    async def generate(self) -> None:
        async for prompt in self.questions:
            rollout = await self.sampler.sample(prompt)
            rewards = await self.judge.score(rollout)
            if max(rewards) >= self.least:
                await self.scored.put(rl.Experience(rollout=rollout, rewards=rewards))

    async def train(self) -> None:
        async for batch in self.scored.batches():
            await self.actor.step(batch, self.loss)
            await self.clock.publish(self.actor)


def test_an_algorithm_of_ones_own_runs_in_a_few_lines() -> None:
    run = simulate(Mine, Scenario(rows=20, max_staleness=2, faults=[Fault(at=30.0)]), least=0.5)
    assert run.reason == "completed"
    assert run.algorithm.least == 0.5
    assert len(run.batches) > 5
    assert run.ledger.account().counts["filtered"] == 20 - sum(len(uids) for _, uids in run.batches)
    assert run.trainer("actor").exported.keys() == set(range(run.ledger.version + 1))


def test_the_same_scenario_gives_the_same_run() -> None:
    first, second = (simulate(Mine, Scenario(rows=20, max_staleness=2, seed=7)) for _ in range(2))
    assert first.events == second.events
    assert simulate(Mine, Scenario(rows=20, max_staleness=2, seed=8)).batches != []


def test_supervised_training_needs_no_engine_that_samples() -> None:
    class Answered(world.FakeRows):
        def prompt(self, uid: int, attempt: int, version: int) -> rl.Prompt:
            prompt = super().prompt(uid, attempt, version)
            return rl.Prompt(**{n: getattr(prompt, n) for n in prompt.__struct_fields__} | {"target_token_ids": (9, 0)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "FakeRows", Answered)
        run = simulate(SFT, Scenario(rows=5, epochs=2))
    assert (run.reason, len(run.batches)) == ("completed", 5)
