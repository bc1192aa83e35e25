"""Numbers, resume and evaluation over the real core: the cases N and R of systems of this kind, as small scenarios."""

from __future__ import annotations

from typing import Any

import pytest

from algorithms.grpo import GRPO
from asyncrlhf.messages import GenerateRequest
from asyncrlhf.observe import (
    Evaluated,
    EvaluationStarted,
    Fenced,
    Granted,
    OptimizerStep,
    Published,
    StepEnded,
)
from asyncrlhf.testing import (
    FakeSampler,
    FakeSamplerOptions,
    Fault,
    Scenario,
    Timing,
    simulate,
)
from tests.contract.inspector import check_batches, go, settled, simulate_with
from tests.contract.shapes import Staged, TwoModels

QUICK = Timing(verbs={"step": 5.0, "commit": 1.0, "spawn": 2.0})


# ---- numbers


def test_N2_a_rollout_that_is_aborted_begins_again_from_the_prompt() -> None:
    """No token of the first attempt is sampled on, and its answers are others."""
    requests: list[GenerateRequest] = []

    class Listening(FakeSampler):
        def add(self, new: Any) -> Any:
            requests.extend(new)
            return super().add(new)

    run = simulate_with(Listening, Scenario(rows=12, faults=[Fault(at=15.0, verb="token")]))
    assert run.reason == "completed"
    again = [event for event in run.events_of(Granted) if event.attempt > 1]
    assert again
    assert all(request.tokens == () for request in requests)
    seeds = [request.seed for request in requests]
    assert len(seeds) == len(set(seeds))
    for experience in (e for p in run.popped for e in p.experiences):
        assert min(v for s in experience.rollout.samples for v in s.versions()) >= experience.prompt.version


def test_N10_fewer_answers_than_asked_for_keep_their_rollout_and_their_own_baseline() -> None:
    sampler = FakeSamplerOptions(rejected=0.25)
    run = go(GRPO, Scenario(answers_per_prompt=4, min_answers=2, rows=30, sampler=sampler, max_filtered=30))
    check_batches(run)
    sizes = {len(e.rollout.samples) for p in run.popped for e in p.experiences}
    assert sizes == {2, 3, 4}
    assert all("of 4 answers were sampled and limits.min_answers = 2" in e.error for e in settled(run, "failed"))
    for popped, batch in zip(run.popped, run.trainer().batches, strict=True):
        counted = [batch.rollouts.count(place) for place in range(len(popped.experiences))]
        assert counted == [len(experience.rollout.samples) for experience in popped.experiences]
        assert all(len(e.advantages) == len(e.rollout.samples) for e in popped.experiences)
        assert all(abs(sum(e.advantages)) < 1e-9 for e in popped.experiences)


def test_N10_by_default_a_rollout_with_a_missing_answer_does_not_train() -> None:
    run = go(GRPO, Scenario(answers_per_prompt=4, rows=30, sampler=FakeSamplerOptions(rejected=0.1), max_filtered=30))
    assert {len(e.rollout.samples) for p in run.popped for e in p.experiences} == {4}
    assert 3 < len(settled(run, "failed")) < 20


# ---- resume and evaluation


@pytest.mark.parametrize("payloads", [True, False])
@pytest.mark.parametrize("algorithm", [GRPO, TwoModels, Staged])
def test_R1_R2_what_is_trained_does_not_depend_on_crashes(algorithm: Any, payloads: bool) -> None:
    scenario = Scenario(answers_per_prompt=4, max_staleness=4, rows=60, checkpoint_every=2, payloads=payloads)
    whole = go(algorithm, scenario)
    saved, crashes = None, 0
    for crash_at in (350, 350, 350, None):
        run = go(algorithm, scenario, resume=saved, crash_at=crash_at)
        saved, crashes = run.saved, crashes + run.crashed
        if run.crashed:
            assert len(run.ledger.live) <= scenario.capacity
    assert crashes == 3
    for done in (whole, run):
        assert done.reason == "completed"
        assert sorted(uid for _, uids in done.batches for uid in uids) == list(range(60))


def test_R1_a_dropped_rollout_does_not_pin_the_resume_point() -> None:
    scenario = Scenario(
        rows=12,
        max_attempts=1,
        lease_timeout=50.0,
        replicas=1,
        checkpoint_every=1,
        faults=[Fault(at=15.0, kind="slow", verb="token", seconds=60.0)],
    )
    first = go(GRPO, scenario)
    assert settled(first, "dropped(timeout)")
    assert first.ledger.low_water == 12
    again = go(GRPO, scenario, resume=first.saved)
    assert again.batches == first.batches


def test_R4_every_counter_goes_on_where_it_stood() -> None:
    scenario = Scenario(max_staleness=1, rows=16, publish_every=2, checkpoint_every=4)
    first = simulate(TwoModels, Scenario(max_staleness=1, rows=16, publish_every=2, checkpoint_every=4, train_steps=4))
    second = simulate(TwoModels, scenario, resume=first.saved)
    assert [event.train_step for event in second.events_of(StepEnded)] == [4, 5, 6, 7]
    assert [event.policy_version for event in second.events_of(StepEnded)] == [5, 6, 7, 8]
    assert [event.publish_count for event in second.events_of(StepEnded)] == [2, 3, 3, 4]
    steps = [event.optimizer_step for event in second.events_of(OptimizerStep) if event.group == "policy"]
    assert steps == list(range(9, 17))
    assert second.algorithm.state.train_steps == 8


def test_R5_a_publish_waits_for_an_evaluation_at_most_max_hold_and_the_result_says_so() -> None:
    answers = FakeSamplerOptions(length=100.0, slots=8)
    held = {}
    for max_hold, label in ((1e6, "v1"), (30.0, "mixed(v1..v2)")):
        scenario = Scenario(
            rows=None,
            train_steps=3,
            max_staleness=2,
            sampler=answers,
            evaluation_every=1,
            evaluation_max_hold=max_hold,
            timing=QUICK,
            reward={"seconds": (0.0, 0.0)},
        )
        run = simulate(GRPO, scenario)
        assert run.reason == "train_steps"
        assert [event.version for event in run.events_of(EvaluationStarted)[:2]] == [0, 1]
        assert [event.label for event in run.events_of(Evaluated)[:2]] == ["v0", label]
        stepped, published = run.events_of(OptimizerStep)[1], run.events_of(Published)[1]
        held[max_hold] = published.t - stepped.t
    assert 30.0 <= held[30.0] < 35.0, "and then for the token under way, and the swap"
    assert held[1e6] > 50.0


def test_R5_an_evaluation_survives_the_death_of_its_engine() -> None:
    scenario = Scenario(
        rows=None,
        train_steps=6,
        max_staleness=2,
        sampler=FakeSamplerOptions(length=60.0),
        evaluation_every=3,
        evaluation_prompts=6,
        evaluation_max_hold=1e6,
        faults=[Fault(at=210.0, verb="token"), Fault(at=230.0, rank=1, verb="token")],
    )
    run = simulate(GRPO, scenario)
    assert run.reason == "train_steps"
    assert run.events_of(Fenced)
    assert [event.count for event in run.events_of(Evaluated)] == [6, 6, 6]
