"""Accounting of staleness over the real core: the cases A of systems of this kind, as small scenarios."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pytest

import asyncrlhf as rl
from algorithms.grpo import GRPO, GRPOExperience
from asyncrlhf.observe import (
    Event,
    Granted,
    Popped,
    Published,
    Settled,
    StepEnded,
)
from asyncrlhf.testing import (
    FakeSamplerOptions,
    FakeTrainerOptions,
    Run,
    Scenario,
    Timing,
    simulate,
)
from tests.contract.inspector import check_batches, go, settled
from tests.contract.shapes import Filtered

QUICK = Timing(verbs={"step": 5.0, "commit": 1.0, "spawn": 2.0})


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
    assert "30 prompts in a row were filtered, failed or timed out (limits.max_filtered = 30)" in str(run.error)
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


@dataclass(kw_only=True)
class Twice(GRPO):
    """Asks for more answers when the first all earn the same, and trains on those that differ."""

    async def generate(self) -> None:
        async for prompt in self.prompts:
            rollout = await self.rollout.sample(prompt)
            rewards = await self.reward.score(rollout)
            if len(set(rewards)) == 1 or prompt.uid % 2:
                more = await self.rollout.sample(prompt)
                rewards = (*rewards[:1], *await self.reward.score(more))
                rollout = rl.Rollout(prompt=prompt, samples=(rollout.samples[0], *more.samples))
            experience = GRPOExperience(
                rollout=rollout, rewards=rewards, advantages=self.advantages(rewards), reference_logprobs=None
            )
            await self.experience.put(experience)


def test_answers_asked_for_later_are_others_and_those_left_out_are_dropped() -> None:
    run = go(Twice, Scenario(rows=20, max_staleness=2))
    assert run.reason == "completed"
    check_batches(run, least=2, most=3)
    sizes = {len(e.rollout.samples) for p in run.popped for e in p.experiences}
    assert sizes == {2, 3}
    for experience in (e for p in run.popped for e in p.experiences):
        answers = [sample.token_ids for sample in experience.rollout.samples]
        assert len(set(answers)) == len(answers)
    tokens = run.ledger.account().tokens
    left_out = sum(6 for p in run.popped for e in p.experiences if len(e.rollout.samples) == 3)
    assert tokens.dropped >= left_out > 0
    assert sum(h.engine.token_count for h in run.runtime.handles if h.spec.group == "rollout") == tokens.generated


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
