"""PPO over the real core on fakes: who is stepped and when, what its state counts, and that faults lose nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from algorithms.ppo import PPO
from asyncrlhf import ops
from asyncrlhf.messages import unpack
from asyncrlhf.observe import Measured, OptimizerStep
from asyncrlhf.testing import FakeTrainer, Fault, Run, Scenario, Timing
from tests.contract.inspector import go
from tests.contract.test_core_invariants import ends_well

WITH_REFERENCE = Scenario(rows=24, optional=("reference",), max_staleness=2, checkpoint_every=3)


def steps_of(run: Run[Any], group: str) -> list[int]:
    return [e.train_step for e in run.events_of(OptimizerStep) if e.group == group]


def test_policy_and_critic_take_the_same_steps_after_the_warm_up() -> None:
    run = ends_well(PPO, Scenario(rows=12), minibatches=2, epochs=2, critic_warmup=2)
    assert len(run.batches) == 6
    assert steps_of(run, "critic") == [step for step in range(6) for _ in range(4)]
    assert steps_of(run, "policy") == [step for step in range(2, 6) for _ in range(4)]
    first, third = run.trainer().exported[0], run.trainer().exported[3]
    assert run.trainer().exported[2] == first != third, "versions go on while the policy stays"


def test_models_work_side_by_side() -> None:
    """Reference beside reward, and policy beside critic: each pair takes as long as the slower one."""
    ends: list[float] = []
    for reference in (0.0, 30.0):
        timing = Timing(verbs={"step": 5.0, "logprobs": reference})
        run = ends_well(PPO, replace(WITH_REFERENCE, rows=2, timing=timing, reward={"seconds": (30.0, 30.0)}))
        steps = run.events_of(OptimizerStep)
        assert [e.t for e in steps if e.group == "policy"] == [e.t for e in steps if e.group == "critic"]
        ends.append(run.events[-1].t)
    assert ends[1] == pytest.approx(ends[0], abs=1.0)


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("target", [0.0, 0.001, 40.0])
def test_a_batch_is_penalised_with_what_the_batches_before_it_gave(warmup: int, target: float) -> None:
    """Ziegler et al. 2019, section 2.2, in float64: e_t = clip(KL_t / target - 1, -0.2, 0.2), and beta_(t+1) = beta_t
    (1 + K e_t) is for the next batch; it rests while the policy does."""
    used: list[float] = []
    apply = FakeTrainer.apply

    def recording(self: FakeTrainer, transform: Any, batch: Any) -> Any:
        found = unpack(transform)
        if isinstance(found, ops.TokenRewards):
            used.append(found.kl)
        return apply(self, transform, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTrainer, "apply", recording)
        control = ops.KLControl(coefficient=0.5, target=target, gain=0.3)
        run = ends_well(PPO, WITH_REFERENCE, kl=control, critic_warmup=warmup)
    beta, expected = np.float64(0.5), list[np.float64]()
    for step, batch in enumerate(run.popped):
        expected.append(beta)
        kls = np.array([kl for experience in batch.experiences for kl in experience.kl], np.float64)
        if target and step >= warmup:
            beta = beta * (1 + 0.3 * np.clip(kls.mean() / target - 1, -0.2, 0.2))
    assert len(used) == 12
    assert used == pytest.approx(expected, rel=1e-5), "KLs travel as float32"
    assert run.algorithm.state.kl_coefficient == pytest.approx(beta, rel=1e-5)


@pytest.mark.parametrize("critic_warmup", [0, 5])
def test_its_state_counts_every_reward_and_controls_the_coefficient(critic_warmup: int) -> None:
    control = ops.KLControl(coefficient=0.5, target=0.001)
    run = ends_well(PPO, WITH_REFERENCE, kl=control, critic_warmup=critic_warmup)
    state, popped = run.algorithm.state, [e for p in run.popped for e in p.experiences]
    rewards = [reward for experience in popped for reward in experience.rewards]
    assert state.rewards.count == len(rewards) == 48
    assert state.rewards.mean == pytest.approx(sum(rewards) / len(rewards))
    coefficient = 0.5
    for batch in run.popped[critic_warmup:]:
        kls = [kl for experience in batch.experiences for kl in experience.kl]
        coefficient *= 1.02 if sum(kls) / len(kls) / 0.001 > 1.2 else 0.98
    assert state.kl_coefficient == pytest.approx(coefficient)
    shown = [event.metrics for event in run.events_of(Measured) if event.group == "state"]
    assert len(shown) == 12
    assert shown[-1] == {
        "kl": state.kl,
        "kl_coefficient": state.kl_coefficient,
        "rewards/count": 48.0,
        "rewards/mean": state.rewards.mean,
        "rewards/deviation": state.rewards.deviation,
    }


@pytest.mark.parametrize("group", ["rollout", "reference", "policy", "critic"])
@pytest.mark.parametrize("kind", ["die", "lost", "hang", "lose", "slow"])
def test_faults_of_any_group_lose_nothing(group: str, kind: Any) -> None:
    """A rollout engine is replaced, and so is a reference unless it has a bug; another ends the run by name, and the
    run goes on from there."""
    verb = {"reference": "logprobs", "policy": "step", "critic": "apply"}.get(group, "")
    scenario = replace(WITH_REFERENCE, faults=[Fault(group=group, at=40.0, kind=kind, verb=verb, seconds=20.0)])
    run = go(PPO, scenario)
    if run.reason != "completed":
        assert group in ("policy", "critic") or (group, kind) == ("reference", "die")
        assert run.reason == ("GroupError" if kind == "die" else "EngineLost")
        assert group in str(run.error)
        run = go(PPO, WITH_REFERENCE, resume=run.saved)
    assert run.reason == "completed"
    assert sorted(uid for _, uids in run.batches for uid in uids) == list(range(24))
    assert run.algorithm.state.rewards.count == 48


@pytest.mark.parametrize("crash_at", [150, 400, 700])
def test_a_resumed_run_goes_on_with_its_state(crash_at: int) -> None:
    run = go(PPO, WITH_REFERENCE, crash_at=crash_at)
    if run.crashed:
        run = go(PPO, WITH_REFERENCE, resume=run.saved)
    assert run.reason == "completed"
    assert run.algorithm.state.rewards.count == 48, "every reward once: state and weights are of one checkpoint"
