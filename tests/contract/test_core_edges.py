"""The contract's edges over the real core, one scenario each: tight bounds, void steps, full queues, memory."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest

from algorithms.grpo import GRPO
from asyncrlhf.observe import Event, Granted, OptimizerStep, Popped, Published, Settled, StepEnded
from asyncrlhf.testing import FakeSamplerOptions, FakeTrainerOptions, Run, Scenario, Timing, fake_logprobs, simulate
from tests.contract.inspector import check_batches, go
from tests.contract.shapes import Filtered, TwoModels

LEASES = 100_000 if int(os.environ.get("EXAMPLES", "60")) >= 1000 else 6_000
pytestmark = pytest.mark.timeout(400 if LEASES < 100_000 else 0)

TAILS = Scenario(
    prompts_per_step=3,
    answers_per_prompt=2,
    max_staleness=3,
    lookahead=1,
    rows=None,
    train_steps=80,
    sampler=FakeSamplerOptions(slots=8, length=6.0, sigma=1.5),
    max_tokens=400,
)


def with_values(scenario: Scenario, **values: Any) -> Scenario:
    return Scenario(**{name: getattr(scenario, name) for name in scenario.__dataclass_fields__} | values)


# ---- 2: the bound


def test_A4_tokens_of_lag_K_train_and_tokens_of_lag_K_plus_1_are_masked() -> None:
    run = go(GRPO, TAILS)
    assert run.reason == "train_steps"
    check_batches(run)
    popped: list[Popped] = run.events_of(Popped)
    assert max(lag for event in popped for lag in event.trained_by_lag) == 3
    masked = {lag for event in popped for lag in event.masked_by_lag}
    assert min(masked) == 4


@pytest.mark.parametrize("mode", ["wait", "drop"])
def test_rollouts_of_head_lag_K_are_consumed_and_none_of_K_plus_1(mode: str) -> None:
    run = go(GRPO, with_values(TAILS, at_deadline=mode))
    assert run.reason == "train_steps"
    check_batches(run)
    popped: list[Popped] = run.events_of(Popped)
    assert max(lag for event in popped for lag in event.head_lags) == 3
    assert not any(event.masked_by_lag for event in popped)


@pytest.mark.parametrize("mode", ["wait", "drop"])
def test_more_leases_than_one_batch_share_a_deadline(mode: str) -> None:
    """K = D = 3, B = 2: eight leases of version 0 are due by step 3."""
    scenario = with_values(TAILS, prompts_per_step=2, lookahead=3, at_deadline=mode, wait_timeout=1e6)
    run = go(GRPO, scenario)
    assert run.reason == "train_steps"
    check_batches(run)
    late = [event for event in run.events_of(Settled) if event.state == "dropped(late)"]
    assert bool(late) is (mode == "drop"), "waiting drops nothing before its time-out"


def test_after_wait_timeout_waiting_does_as_dropping_would() -> None:
    run = go(GRPO, with_values(TAILS, lookahead=3, at_deadline="wait", wait_timeout=3.0))
    assert run.reason == "train_steps"
    check_batches(run)
    assert [event for event in run.events_of(Settled) if event.state == "dropped(late)"]


# ---- 5: whole rollouts, and baselines before masks


def test_rollouts_train_whole_and_baselines_come_before_masks() -> None:
    run = go(GRPO, TAILS)
    advantages = run.algorithm.advantages
    partly_masked = 0
    for popped, batch in zip(run.popped, run.trainer().batches, strict=True):
        masks, column = batch.columns["mask"].fetch(), batch.columns["advantages"].fetch()
        assert len(batch) == sum(len(e.rollout.samples) for e in popped.experiences)
        for place, experience in enumerate(popped.experiences):
            rows = [row for row, rollout in enumerate(batch.rollouts) if rollout == place]
            assert len(rows) == 2
            expected = np.array(advantages(experience.rewards), np.float32)
            assert np.array_equal(np.concatenate([column[row] for row in rows]), expected)
            partly_masked += any(not masks[row].all() and masks[row].any() for row in rows)
    assert partly_masked, "no rollout was cut at the bound, so this says nothing"


# ---- 8: log-probs of the version that sampled them


@pytest.mark.parametrize("kv", ["rebuild", "keep"])
def test_stored_logprobs_are_those_of_the_sampling_version(kv: Any) -> None:
    run = go(GRPO, with_values(TAILS, kv=kv))
    exported, spans = run.trainer().exported, 0
    for experience in (e for popped in run.popped for e in popped.experiences):
        for sample in experience.rollout.samples:
            versions, mixed = sample.versions(), [s.kv_mixed for s in sample.segments for _ in range(s.token_count)]
            spans = max(spans, len(set(versions)))
            for place, version in enumerate(versions):
                prefix = sample.token_ids[: place + 1]
                if not mixed[place]:
                    assert (
                        sample.logprobs[place]
                        == fake_logprobs(exported[version], experience.prompt.token_ids, prefix)[-1]
                    )
            assert not any(mixed) or kv == "keep"
            assert kv == "rebuild" or any(mixed) is (len(set(versions)) > 1)
    assert spans >= 4, "no answer saw several swaps, so this says nothing"


# ---- 12: void steps


@pytest.mark.parametrize("trainer", [FakeTrainerOptions(not_finite=0.4), FakeTrainerOptions(empty=0.4)])
def test_a_void_step_changes_nothing_and_is_tried_again(trainer: FakeTrainerOptions) -> None:
    before: list[Any] = []
    voids: list[int] = []
    due = [0]

    def watch(run: Run[Any], event: Event) -> None:
        if not run.ledger.published:
            return
        state = (run.trainer().weights["w"], run.trainer().steps, run.ledger.published, run.coordinator.publish_count)
        if isinstance(event, Popped):
            assert event.train_step == due[0]
            before[:] = [event.train_step, state]
        elif isinstance(event, StepEnded):
            due[0] = event.train_step + (not event.void)
            assert event.policy_version == due[0] == run.ledger.step
            if event.void:
                assert before == [event.train_step, state]
                voids.append(event.train_step)

    scenario = with_values(TAILS, trainer=trainer, max_void_steps=100, train_steps=30)
    run = simulate(GRPO, scenario, watch=watch)
    assert run.reason == "train_steps"
    assert len(voids) > 5
    assert [event.version for event in run.events_of(Published)] == list(range(1, 31))
    lost = [event for event in run.events_of(Settled) if event.state == "dropped(void)"]
    assert len(lost) == 3 * len([event for event in run.events_of(StepEnded) if event.void])


def test_a_step_of_the_critic_alone_is_not_void_and_publishes_the_weights_unchanged() -> None:
    run = simulate(TwoModels, Scenario(rows=8), warm_up=2)
    assert (run.reason, run.ledger.version) == ("completed", 4)
    assert [event.changed for event in run.events_of(Published)] == [False, False, True, True]
    assert [event.version for event in run.events_of(Published)] == [1, 2, 3, 4]
    engine = run.runtime.engine("rollout")
    assert (engine.version, engine.checksum) == (4, run.trainer().exported[4])
    assert run.algorithm.state.train_steps == 4


def test_weights_that_fail_the_gate_end_the_run_and_are_not_published() -> None:
    run = simulate(GRPO, Scenario(rows=20, trainer=FakeTrainerOptions(broken_from=3)))
    assert run.reason == "PublishRefused"
    assert run.ledger.published == 2
    assert run.runtime.engine("rollout").version == 2


# ---- 14: publishing with full queues


@pytest.mark.parametrize("mode", ["in_flight", "drain"])
def test_L3_publishing_with_every_rollout_ready_terminates(mode: Any) -> None:
    """The trainer is so slow that everything is ready whenever it publishes; nothing takes time in a second run."""
    for verbs in ({"step": 1e3}, {}):
        scenario = with_values(TAILS, lookahead=3, publish_mode=mode, train_steps=10, timing=Timing(verbs=verbs))
        ready: list[int] = []

        def watch(run: Run[Any], event: Event, ready: list[int] = ready) -> None:
            if isinstance(event, OptimizerStep):
                ready.append(run.ledger.account().counts["ready"])

        run = simulate(GRPO, scenario, watch=watch)
        assert run.reason == "train_steps"
        if verbs:
            assert ready[:5] == [9] * 5, "B D rollouts, and not one running"


# ---- 10: memory


def test_memory_is_bounded_over_many_leases() -> None:
    """Objects that the collector knows, after a sixth of the leases and after all of them."""
    marks = {LEASES // 60: 0, LEASES // 10: 0}

    def watch(run: Run[Any], event: Event) -> None:
        if isinstance(event, StepEnded) and event.policy_version in marks:
            gc.collect()
            marks[event.policy_version] = len(gc.get_objects())

    scenario = Scenario(
        prompts_per_step=10,
        answers_per_prompt=1,
        max_staleness=4,
        rows=None,
        train_steps=LEASES // 10 + 1,
        sampler=FakeSamplerOptions(slots=16, length=1.0, sigma=1.0, rejected=0.05),
        trainer=FakeTrainerOptions(history=False),
        reward={"equal": 1.0, "failing": 0.05, "seconds": (0.0, 40.0)},
        max_filtered=10_000,
        lease_timeout=60.0,
        max_tokens=8,
    )
    run = simulate(TwoModels, scenario, watch=watch, keep=False)
    assert run.reason == "train_steps"
    early, late = marks.values()
    assert run.ledger.account().granted_leases > LEASES
    assert late - early < 1000, f"{early} objects, then {late}"


def test_A7_filters_cost_no_capacity() -> None:
    """Half of the rollouts are filtered for 100 steps: the room stays, and is used."""
    most: dict[int, int] = {}

    def watch(run: Run[Any], event: Event) -> None:
        if isinstance(event, Granted):
            step = run.ledger.step
            most[step] = max(most.get(step, 0), len(run.ledger.live))

    scenario = with_values(TAILS, reward={"equal": 0.5}, train_steps=100, max_filtered=1000)
    run = simulate(Filtered, scenario, watch=watch)
    assert run.reason == "train_steps"
    assert run.ledger.account().counts["filtered"] > 200
    assert {most[step] for step in range(98)} == {6}, "B (D + 1) leases live within every step"
