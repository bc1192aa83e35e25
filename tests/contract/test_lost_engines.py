"""A process that is gone is started again: under GRPO and PPO nothing is lost, and nothing is trained on twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from algorithms.grpo import GRPO
from algorithms.ppo import PPO
from asyncrlhf.algorithm import Algorithm
from asyncrlhf.observe import Restarted, Scored
from asyncrlhf.testing import Fault, Scenario, Timing
from tests.contract.inspector import check_batches, go, settled
from tests.contract.test_core_invariants import check_trained

SCENARIO = Scenario(
    rows=24,
    optional=("reference",),
    max_staleness=2,
    reward_model=True,
    stall_timeout=400.0,
    timing=Timing(verbs={"step": 5.0, "commit": 1.0, "spawn": 2.0, "logprobs": 3.0, "scores": 2.0}, jitter=0.5),
)
VERBS = {"reference": "logprobs", "reward": "scores"}


def check_whole(run: Any) -> None:
    assert run.reason == "completed", run.error
    check_batches(run)
    check_trained(run)
    counts = run.ledger.account().counts  # void: rewards that were all equal
    assert counts["consumed"] + counts.get("dropped(void)", 0) == 24, counts
    last: dict[int, int] = {}
    for event in run.events_of(Scored):
        assert last.get(event.uid, 0) < event.attempt, "scored twice under one lease"
        last[event.uid] = event.attempt


@pytest.mark.parametrize("algorithm", [GRPO, PPO])
@pytest.mark.parametrize("group", ["rollout", "reference", "reward"])
@pytest.mark.parametrize("kind", ["lost", "hang", "lose"])
@pytest.mark.parametrize("seed", range(4))
def test_a_lost_engine_loses_and_doubles_nothing(algorithm: type[Algorithm], group: str, kind: Any, seed: int) -> None:
    times = (7.0 + 11 * seed, 90.0 if kind == "lost" else 500.0)
    faults = [Fault(group=group, at=at, kind=kind, verb=VERBS.get(group, "")) for at in times]
    run = go(algorithm, replace(SCENARIO, seed=seed, faults=faults))
    check_whole(run)
    assert {event.group for event in run.events_of(Restarted)} <= {group}
    assert kind == "lose" or run.events_of(Restarted)


@pytest.mark.parametrize("algorithm", [GRPO, PPO])
def test_all_of_them_at_once(algorithm: type[Algorithm]) -> None:
    faults = [Fault(group=group, at=40.0, kind="lost") for group in ("rollout", "reference", "reward")]
    run = go(algorithm, replace(SCENARIO, faults=faults))
    check_whole(run)
    assert sorted(event.group for event in run.events_of(Restarted)) == ["reference", "reward", "rollout"]


def test_leases_do_not_age_while_no_engine_is_there_to_serve_them() -> None:
    timing = Timing(verbs={"step": 5.0, "spawn": 150.0})
    fault = Fault(at=20.0, kind="lost")
    run = go(GRPO, replace(SCENARIO, replicas=1, timing=timing, lease_timeout=100.0, faults=[fault]))
    check_whole(run)
    assert len(run.events_of(Restarted)) == 1
    assert not settled(run, "dropped(timeout)")


@pytest.mark.parametrize("algorithm", [GRPO, PPO])
@pytest.mark.parametrize("group", ["reference", "reward"])
def test_one_that_is_lost_too_often_ends_the_run_by_name_and_the_checkpoint_goes_on(
    algorithm: type[Algorithm], group: str
) -> None:
    faults = [Fault(group=group, at=30.0, kind="lost", verb=VERBS[group]) for _ in range(4)]
    run = go(algorithm, replace(SCENARIO, checkpoint_every=1, faults=faults))
    assert run.reason == "GroupError"
    assert f"groups.{group}.max_restarts = 3" in str(run.error)
    assert run.saved is not None
    check_whole(go(algorithm, SCENARIO, resume=run.saved))


@pytest.mark.parametrize("algorithm", [GRPO, PPO])
def test_a_lost_policy_ends_this_session_for_another_to_go_on(algorithm: type[Algorithm]) -> None:
    run = go(algorithm, replace(SCENARIO, checkpoint_every=1, faults=[Fault(group="policy", at=40.0, kind="lost")]))
    assert run.reason == "EngineLost"
    check_whole(go(algorithm, SCENARIO, resume=run.saved))
