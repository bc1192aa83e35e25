"""What went wrong in systems of this kind, as small scenarios over the real core; the ids are those of the case list."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pytest

import asyncrlhf as rl
from algorithms.grpo import GRPO
from asyncrlhf.messages import GenerateRequest
from asyncrlhf.observe import (
    Evaluated,
    EvaluationStarted,
    Event,
    Fenced,
    Granted,
    OptimizerStep,
    Popped,
    Published,
    Restarted,
    Settled,
    StepEnded,
    Warned,
)
from asyncrlhf.testing import (
    FakeSampler,
    FakeSamplerOptions,
    FakeTrainerOptions,
    Fault,
    Run,
    Scenario,
    Timing,
    simulate,
)
from tests.contract.inspector import check_batches, go
from tests.contract.shapes import Filtered, Staged, TwoModels

QUICK = Timing(verbs={"step": 5.0, "commit": 1.0, "spawn": 2.0})


def settled(run: Run[Any], state: str) -> list[Settled]:
    return [event for event in run.events_of(Settled) if event.state == state]


# ---- accounting of staleness


def test_A1_a_sample_across_six_publishes_trains_no_token_older_than_the_bound() -> None:
    scenario = Scenario(
        max_staleness=2,
        lookahead=1,
        rows=None,
        train_steps=40,
        sampler=FakeSamplerOptions(length=6.0, sigma=1.6),
        max_tokens=500,
    )
    run = go(GRPO, scenario)
    check_batches(run)
    samples = [s for p in run.popped for e in p.experiences for s in e.rollout.samples]
    assert max(len(set(sample.versions())) for sample in samples) >= 7


def test_A2_a_batch_that_is_filtered_whole_is_refilled() -> None:
    """The first four prompts are unusable, whatever they are: the batch comes from those that follow."""

    class FilteredAtFirst(Filtered):
        def advantages(self, rewards: Any) -> Any:
            return super().advantages(rewards) if len(run_of[0].events_of(Settled)) >= 4 else (0.0,) * len(rewards)

    run_of: list[Run[Any]] = []

    def watch(run: Run[Any], event: Event) -> None:
        run_of[:] = [run]

    run = simulate(FilteredAtFirst, Scenario(rows=12), watch=watch)
    assert run.reason == "completed"
    assert len(settled(run, "filtered")) >= 4
    assert [len(uids) for _, uids in run.batches[:3]] == [2, 2, 2]


def test_A2_a_filter_that_rejects_everything_ends_the_run_by_name() -> None:
    run = simulate(Filtered, Scenario(rows=None, train_steps=5, reward={"equal": 1.0}, max_filtered=30))
    assert run.reason == "Exhausted"
    assert "30 prompts in a row were filtered or failed (limits.max_filtered = 30)" in str(run.error)
    assert run.ledger.account().counts["filtered"] == 30


def test_A4_without_staleness_no_weights_move_within_a_rollout() -> None:
    run = go(GRPO, Scenario(rows=20, sampler=FakeSamplerOptions(sigma=1.5, slots=2)))
    check_batches(run)
    for popped in run.popped:
        samples = [s for e in popped.experiences for s in e.rollout.samples]
        assert {version for sample in samples for version in sample.versions()} == {popped.batch.step}


@pytest.mark.parametrize("staleness", range(4))
def test_A5_every_lookahead_and_publish_interval_starts_cold(staleness: int) -> None:
    for lookahead in range(staleness + 1):
        for every in range(1, lookahead + 2):
            scenario = Scenario(max_staleness=staleness, lookahead=lookahead, publish_every=every, rows=9)
            run = go(GRPO, scenario)
            assert (run.reason, len(run.batches)) == ("completed", 5), scenario


def test_A6_without_staleness_nothing_is_admitted_between_pop_and_publish() -> None:
    run = go(GRPO, Scenario(rows=20, sampler=FakeSamplerOptions(sigma=1.0)))
    training = False
    for event in run.events:
        training = isinstance(event, Popped) or (training and not isinstance(event, Published))
        assert not (training and isinstance(event, Granted))


def test_A8_a_batch_without_a_valid_token_is_no_step_and_gives_its_places_back() -> None:
    def watch(run: Run[Any], event: Event) -> None:
        if isinstance(event, StepEnded):
            assert event.void
            assert event.leases["training"] == 0
            assert run.ledger.room() == 4

    scenario = Scenario(max_staleness=1, rows=None, train_steps=9, reward={"equal": 1.0}, max_void_steps=6)
    run = simulate(GRPO, scenario, watch=watch)
    assert run.reason == "NoSignal"
    assert "6 train steps in a row held no token to train on" in str(run.error)
    assert (run.ledger.version, run.trainer().steps, run.coordinator.publish_count) == (0, 0, 0)
    assert len(settled(run, "dropped(void)")) == 12


def test_A8_steps_that_are_never_finite_end_the_run_by_name() -> None:
    run = simulate(GRPO, Scenario(rows=None, train_steps=9, trainer=FakeTrainerOptions(not_finite=1.0)))
    assert run.reason == "Diverged"
    assert run.ledger.version == 0


def test_A9_rollouts_left_over_at_a_publish_do_not_stop_production() -> None:
    """Six of eight are ready when the trainer takes four and publishes: two stay outstanding, the rest is refilled."""
    seen: list[tuple[int, int]] = []

    def watch(run: Run[Any], event: Event) -> None:
        if isinstance(event, StepEnded):
            seen.append((run.ledger.account().counts["ready"], run.ledger.room()))

    scenario = Scenario(
        prompts_per_step=4, max_staleness=1, rows=40, sampler=FakeSamplerOptions(slots=3, sigma=0.5), timing=QUICK
    )
    run = go(GRPO, scenario)
    check_batches(run)
    run = simulate(GRPO, scenario, watch=watch)
    assert run.reason == "completed"
    assert any(0 < ready < 4 for ready, _ in seen)
    assert {room for _, room in seen} == {8}


def test_A10_a_full_queue_makes_the_producer_wait_and_loses_nothing() -> None:
    most = [0]

    def watch(run: Run[Any], event: Event) -> None:
        most[0] = max(most[0], run.ledger.account().counts["ready"])

    scenario = Scenario(max_staleness=4, rows=30, timing=Timing(verbs={"step": 500.0}))
    run = simulate(GRPO, scenario, watch=watch)
    counts = run.ledger.account().counts
    assert most[0] == 4, "B D are ready while B train"
    assert counts["admitted"] == counts["consumed"] == 30


def test_A11_depth_and_bound_are_separate_knobs() -> None:
    """The typical lag follows lookahead, not the bound."""
    means: list[float] = []
    for ahead in (1, 4):
        scenario = Scenario(max_staleness=4, lookahead=ahead, rows=200, timing=Timing(verbs={"step": 30.0}))
        run = simulate(GRPO, scenario)
        events = run.events_of(Popped)[8:-8]
        means.append(fmean(lag for event in events for lag in event.head_lags))
    assert means[0] == 1.0
    assert means[1] > 3.9


# ---- liveness


@pytest.mark.parametrize("kind", ["hang", "mute"])
def test_L1_a_sample_that_never_finishes_is_leased_again_and_named(kind: Any) -> None:
    fault = Fault(at=20.0, kind=kind, verb="token")
    scenario = Scenario(rows=12, replicas=1, lease_timeout=100.0, publish_timeout=50.0, faults=[fault])
    run = go(GRPO, scenario)
    check_batches(run)
    assert run.reason == "completed"
    lost = settled(run, "dropped(timeout)")
    assert lost
    again = {(event.uid, event.attempt) for event in run.events_of(Granted)}
    assert all((event.uid, event.attempt + 1) in again for event in lost)
    assert sorted(uid for _, uids in run.batches for uid in uids) == list(range(12))


def test_L1_a_prompt_leased_again_goes_to_an_engine_that_answers() -> None:
    """The hung engine is not fenced before long, so it would take every attempt of a prompt if it were asked first."""
    hang = Fault(at=20.0, kind="hang", verb="token")
    scenario = Scenario(rows=12, lease_timeout=100.0, publish_timeout=5000.0, stall_timeout=9000.0, faults=[hang])
    run = go(GRPO, scenario)
    assert run.reason == "completed"
    assert {event.attempt for event in run.events_of(Granted)} == {1, 2}


def test_L1_a_lost_reply_does_not_stop_the_others() -> None:
    """The reply to `add` never comes: after its time-out the engine is fenced, meanwhile the other one works on."""
    scenario = Scenario(rows=12, lease_timeout=100.0, faults=[Fault(at=20.0, kind="lose", verb="add")])
    run = go(GRPO, scenario)
    assert (run.reason, len(run.batches)) == ("completed", 6)


def test_L1_the_same_after_a_resume() -> None:
    hang = Fault(at=20.0, kind="hang", verb="token")
    scenario = Scenario(
        rows=12,
        replicas=1,
        lease_timeout=100.0,
        publish_timeout=50.0,
        checkpoint_every=1,
        max_staleness=2,
        faults=[hang],
    )
    crashed = go(GRPO, scenario, crash_at=150)
    assert crashed.crashed
    assert crashed.batches
    run = go(GRPO, scenario, resume=crashed.saved)
    assert run.reason == "completed"
    assert sorted(uid for _, uids in run.batches for uid in uids) == list(range(12))


def test_L1_an_engine_that_hangs_for_ever_stalls_the_run_by_name() -> None:
    """No time-out frees its leases, so nothing moves: the message names the lease, its age and its engine."""
    scenario = Scenario(
        rows=12,
        replicas=1,
        lease_timeout=0.0,
        stall_timeout=500.0,
        faults=[Fault(kind="hang", verb="token")],
    )
    run = simulate(GRPO, scenario)
    assert run.reason == "Stalled"
    assert "nothing has moved for 500 s (limits.stall_timeout = 500 s)" in str(run.error)
    assert "uid 0 (attempt 1, running at rollout/0), granted 5" in str(run.error)


def test_L1_leasing_the_same_prompts_again_and_again_is_no_progress() -> None:
    """Every engine that comes in its place hangs as well: Stalled, though leases end and are granted all the time."""
    faults = [Fault(at=float(at), kind="hang", verb="token") for at in range(0, 10_000, 100)]
    scenario = Scenario(
        rows=None,
        train_steps=9,
        replicas=1,
        lease_timeout=60.0,
        stall_timeout=1000.0,
        max_attempts=1000,
        max_restarts=1000,
        faults=faults,
    )
    run = simulate(GRPO, scenario)
    assert run.reason == "Stalled"
    assert len(settled(run, "dropped(timeout)")) > 4


def test_L2_data_shorter_than_the_run_goes_on_with_the_next_epoch() -> None:
    run = simulate(GRPO, Scenario(rows=4, epochs=3, train_steps=6))
    assert run.reason == "train_steps"
    epochs = [{e.prompt.epoch for e in popped.experiences} for popped in run.popped]
    assert epochs == [{0}, {0}, {1}, {1}, {2}, {2}]


@pytest.mark.parametrize("counted", [True, False])
def test_L2_data_that_ends_before_the_run_is_a_named_end(counted: bool) -> None:
    run = simulate(GRPO, Scenario(rows=5, train_steps=6, max_staleness=2, counted=counted))
    assert (run.reason, len(run.batches)) == ("completed", 3)
    assert [len(uids) for _, uids in run.batches] == [2, 2, 1]


def test_L4_moving_weights_cancels_nothing() -> None:
    scenario = Scenario(max_staleness=8, lookahead=4, rows=60, sampler=FakeSamplerOptions(length=40.0, sigma=0.5))
    run = go(GRPO, scenario)
    assert run.reason == "completed"
    samples = [s for p in run.popped for e in p.experiences for s in e.rollout.samples]
    assert sum(len(set(sample.versions())) > 1 for sample in samples) > 20
    assert {event.state for event in run.events_of(Settled)} == {"consumed"}
    assert all(event.attempt == 1 for event in run.events_of(Granted))


def test_L5_an_error_of_an_engine_reaches_the_trainer_that_waits() -> None:
    fault = Fault(group="reference", at=10.0, kind="die", verb="logprobs")
    run = simulate(GRPO, Scenario(rows=30, max_staleness=1, optional=("reference",), faults=[fault]))
    assert run.reason == "GroupError"
    assert "group 'reference', rank 0" in str(run.error)


def test_L5_what_a_callback_raises_ends_the_run() -> None:
    """An engine that reports tokens of a version it cannot have breaks the ledger's rules, in nobody's task."""

    class Lying(FakeSampler):
        def step(self) -> Any:
            if self.version == 1:
                self.version = 7
            return super().step()

    run = simulate_with(Lying, Scenario(rows=30, max_staleness=1))
    assert run.reason == "ValueError"
    assert "tokens of version 7 reported" in str(run.error)


def test_L6_a_reward_that_hangs_costs_its_own_rollout_and_rewards_run_in_parallel() -> None:
    reward = {"seconds": (20.0, 30.0), "hanging": 0.2, "timeout": 200.0}
    run = go(GRPO, Scenario(max_staleness=4, prompts_per_step=4, rows=40, reward=reward, max_filtered=40))
    check_batches(run)
    assert run.reason == "completed"
    failed = settled(run, "failed")
    assert 2 < len(failed) < 20
    assert all("no reward within 200 s" in event.error for event in failed)
    assert run.scorer.most_running > 4
    assert len(settled(run, "consumed")) == 40 - len(failed)


def test_L7_an_engine_that_dies_within_a_publish_is_replaced_and_the_version_is_committed_without_it() -> None:
    for verb in ("prepare", "commit"):
        run = go(GRPO, Scenario(rows=16, max_staleness=1, faults=[Fault(at=15.0, verb=verb)]))
        check_batches(run)
        assert (run.reason, len(run.batches)) == ("completed", 8)
        (fenced,) = run.events_of(Fenced)
        assert "by the fault plan" in fenced.reason
        (published,) = [event for event in run.events_of(Published) if event.fenced]
        assert published.fenced == ("rollout/0",)
        assert len(run.events_of(Restarted)) == 1
        assert {h.engine.version for h in run.runtime.handles[-1:]} == {8}


def test_L7_a_commit_that_comes_too_late_is_refused_although_it_arrives() -> None:
    """The engine takes 500 s for what may take 60: it is fenced; what it says afterwards counts for nothing."""
    late = Fault(at=15.0, kind="slow", verb="commit", seconds=500.0)
    run = go(GRPO, Scenario(rows=60, max_staleness=2, publish_timeout=60.0, zombies=True, faults=[late]))
    check_batches(run)
    assert (run.reason, len(run.batches)) == ("completed", 30)
    (fenced,) = run.events_of(Fenced)
    assert "no answer to commit within publish.timeout = 60" in fenced.reason


def test_L7_an_engine_that_dies_again_and_again_ends_the_run_by_name() -> None:
    faults = [Fault(at=float(at), verb="token") for at in range(0, 400, 10)]
    run = simulate(GRPO, Scenario(rows=200, replicas=1, max_restarts=3, max_attempts=9, faults=faults))
    assert run.reason == "GroupError"
    assert "rollout/0 failed 4 times, groups.rollout.max_restarts = 3; the last time:" in str(run.error)
    assert len(run.events_of(Restarted)) == 3


def test_L7_an_engine_that_dies_while_it_is_brought_back_is_restarted_once_more() -> None:
    faults = [Fault(at=10.0, verb="token"), Fault(at=10.1, verb="prepare"), Fault(at=10.2, verb="commit")]
    run = go(GRPO, Scenario(rows=40, replicas=1, faults=faults))
    assert (run.reason, len(run.batches)) == ("completed", 20)
    assert len(run.events_of(Restarted)) == 3


def test_L7_an_engine_that_comes_back_while_weights_move_on_gets_the_newest() -> None:
    """It is so slow to take the weights that they are gone, and published twice anew, before it has them."""
    timing = Timing(verbs={"step": 2.0, "spawn": 2.0})
    faults = [Fault(at=10.0, verb="token"), Fault(at=11.0, kind="slow", verb="prepare", seconds=40.0)]
    scenario = Scenario(rows=100, max_staleness=2, timing=timing, faults=faults, trainer=FakeTrainerOptions(seed=1))
    run = go(GRPO, scenario)
    check_batches(run)
    assert run.reason == "completed"
    assert len(settled(run, "consumed")) + len(settled(run, "dropped(void)")) == 100
    assert len(run.events_of(Restarted)) == 1


def test_L8_a_run_ends_with_an_evaluation_in_flight() -> None:
    scenario = Scenario(rows=8, evaluation_every=4, evaluation_max_hold=1e4, reward={"seconds": (300.0, 300.0)})
    run = simulate(GRPO, scenario)
    assert (run.reason, len(run.batches)) == ("completed", 4)
    (evaluated,) = run.events_of(Evaluated)
    assert (evaluated.train_step, evaluated.count, evaluated.label) == (4, 2, "v4")


def test_L8_an_evaluation_that_takes_too_long_is_cut_off_at_the_end() -> None:
    scenario = Scenario(rows=8, evaluation_every=4, evaluation_max_hold=50.0, reward={"seconds": (300.0, 300.0)})
    run = simulate(GRPO, scenario)
    assert run.reason == "completed"
    assert not run.events_of(Evaluated)
    assert ["cut off after evaluation.max_hold = 50 s" in event.message for event in run.events_of(Warned)] == [True]


@pytest.mark.parametrize("verb", ["prepare", "commit"])
def test_L10_an_engine_that_breaks_at_the_launch_ends_the_run_with_its_traceback(verb: str) -> None:
    run = simulate(GRPO, Scenario(faults=[Fault(at=-1.0, verb=verb)]))
    assert run.reason == "GroupError"
    assert f"die at '{verb}', by the fault plan" in str(run.error)
    assert not run.events_of(Granted)


def test_L13_a_checkpoint_at_an_epoch_boundary_resumes_with_the_next_epoch() -> None:
    first = simulate(GRPO, Scenario(rows=4, epochs=2, train_steps=2, checkpoint_every=2))
    assert [uids for _, uids in first.batches] == [(0, 1), (2, 3)]
    second = simulate(GRPO, Scenario(rows=4, epochs=2, checkpoint_every=2), resume=first.saved)
    assert second.reason == "completed"
    assert [uids for _, uids in second.batches] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert {e.prompt.epoch for p in second.popped for e in p.experiences} == {1}


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
        assert run.events_of(EvaluationStarted)[0].version == 1
        assert run.events_of(Evaluated)[0].label == label
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
    assert [event.count for event in run.events_of(Evaluated)] == [6, 6]


@dataclass(kw_only=True)
class Impatient(GRPO):
    """Gives up on slow rollouts: a worker's own time-out within its lease."""

    patience: float = 20.0

    async def generate(self) -> None:
        async for prompt in self.prompts:
            try:
                async with asyncio.timeout(self.patience):
                    rollout = await self.rollout.sample(prompt)
            except TimeoutError:
                continue
            rewards = await self.reward.score(rollout)
            experience = self.experience.item_type(
                rollout=rollout, rewards=rewards, advantages=self.advantages(rewards), reference_logprobs=None
            )
            await self.experience.put(experience)


def test_L4_a_worker_may_cancel_its_own_sampling() -> None:
    scenario = Scenario(rows=40, max_staleness=2, sampler=FakeSamplerOptions(sigma=1.2), max_filtered=40)
    run = go(Impatient, scenario)
    check_batches(run)
    assert run.reason == "completed"
    filtered = settled(run, "filtered")
    assert 2 < len(filtered) < 38
    assert all(event.token_count for event in filtered)


def simulate_with(engine: type[FakeSampler], scenario: Scenario) -> Run[Any]:
    """GRPO with another class of sampler in the place of the fake one."""
    path = FakeSampler.__module__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{path}.FakeSampler", engine)
        return simulate(GRPO, scenario)


assert rl.__version__
