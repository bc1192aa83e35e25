"""Liveness over the real core: the cases L of systems of this kind, as small scenarios."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from algorithms.grpo import GRPO
from asyncrlhf.errors import EngineLost
from asyncrlhf.observe import (
    Evaluated,
    Fenced,
    Granted,
    Published,
    Restarted,
    Settled,
    Warned,
)
from asyncrlhf.testing import (
    FakeSampler,
    FakeSamplerOptions,
    FakeTrainerOptions,
    Fault,
    Scenario,
    Timing,
    build_run,
    simulate,
)
from tests.contract.inspector import check_batches, go, settled, simulate_with
from tests.unit.virtual import virtual

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
    assert {event.state for event in run.events_of(Settled)} <= {"consumed", "dropped(void)"}
    assert all(event.attempt == 1 for event in run.events_of(Granted))


@pytest.mark.parametrize(("group", "verb"), [("reference", "logprobs"), ("policy", "step"), ("policy", "export")])
@pytest.mark.parametrize("kind", ["die", "mute", "hang"])
def test_L5_an_error_of_an_engine_reaches_the_trainer(group: str, verb: str, kind: Any) -> None:
    """An engine that hangs is an error too, once its time is over, unless a fresh one can take its place."""
    fault = Fault(group=group, at=10.0, kind=kind, verb=verb)
    run = simulate(GRPO, Scenario(rows=30, max_staleness=1, optional=("reference",), faults=[fault]))
    if (group, kind) == ("reference", "hang"):
        assert run.reason == "completed"
        return
    assert run.reason == ("EngineLost" if kind == "hang" else "GroupError")
    assert f"group '{group}'" in str(run.error)
    assert ("limits.stall_timeout = 1800 s" in str(run.error)) is (kind == "hang")


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


def test_N13_an_engine_that_does_not_use_the_weights_it_has_committed_is_fenced() -> None:
    sampler = FakeSamplerOptions(deaf_from=3)
    run = simulate(GRPO, Scenario(rows=40, replicas=1, max_restarts=2, sampler=sampler))
    assert run.reason == "GroupError"
    assert "has committed version 3, and differs from its trainer by" in str(run.error)
    assert [event.version for event in run.events_of(Published)] == [1, 2]
    assert {event.probe_gap for event in run.events_of(Published)} == {0.0}
    assert len(run.events_of(Restarted)) == 2


def test_L9_a_publish_that_no_engine_is_left_for_stalls_by_name() -> None:
    """The only engine dies within the publish, and the one in its place takes too long to take its weights."""
    timing = Timing(verbs={"step": 5.0})
    faults = [Fault(at=10.0, verb="commit"), Fault(at=10.0, verb="probe", kind="slow", seconds=5000.0)]
    limits = {"stall_timeout": 1000.0, "publish_timeout": 1e5}
    run = simulate(GRPO, Scenario(rows=20, replicas=1, timing=timing, faults=faults, **limits))
    assert run.reason == "Stalled"
    assert "nothing has moved for 1000 s" in str(run.error)
    assert run.events_of(Fenced)


def test_L8_a_run_ends_with_an_evaluation_in_flight() -> None:
    scenario = Scenario(rows=8, evaluation_every=4, evaluation_max_hold=1e4, reward={"seconds": (300.0, 300.0)})
    run = simulate(GRPO, scenario)
    assert (run.reason, len(run.batches)) == ("completed", 4)
    found = [(event.train_step, event.count, event.label) for event in run.events_of(Evaluated)]
    assert found == [(0, 2, "v0"), (4, 2, "v4")]


def test_L8_an_evaluation_that_takes_too_long_is_cut_off_at_the_end() -> None:
    scenario = Scenario(rows=8, evaluation_every=4, evaluation_max_hold=50.0, reward={"seconds": (300.0, 300.0)})
    run = simulate(GRPO, scenario)
    assert run.reason == "completed"
    assert [event.train_step for event in run.events_of(Evaluated)] == [0]
    assert ["cut off after evaluation.max_hold = 50 s" in event.message for event in run.events_of(Warned)] == [True]


@pytest.mark.parametrize("verb", ["prepare", "commit"])
def test_L10_an_engine_that_breaks_at_the_launch_ends_the_run_with_its_traceback(verb: str) -> None:
    """Where it may not be started again."""
    run = simulate(GRPO, Scenario(faults=[Fault(at=-1.0, verb=verb)], max_restarts=0))
    assert run.reason == "GroupError"
    assert f"die at '{verb}', by the fault plan" in str(run.error)
    assert not run.events_of(Granted)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("fault", [("die", "prepare"), ("lost", "commit"), ("hang", "prepare"), ("mute", "probe")])
def test_L10_an_engine_that_fails_at_the_launch_is_replaced(fault: Any, replicas: int) -> None:
    faults = [Fault(at=-1.0, kind=fault[0], verb=fault[1])]
    run = go(GRPO, Scenario(replicas=replicas, rows=20, faults=faults))
    check_batches(run)
    assert run.reason == "completed", run.error
    kinds = [type(event) for event in run.events if isinstance(event, Fenced | Restarted)]
    assert kinds == [Fenced, Restarted]


@virtual
async def test_L10_an_engine_lost_before_there_are_weights_is_back_before_a_lease() -> None:
    """Its group has started, and the coordinator has not."""
    run = await build_run(GRPO, Scenario(replicas=1))
    handle: Any = next(handle for handle in run.runtime.handles if handle.spec.group == "rollout")
    handle._fail(EngineLost("killed"), False)
    assert await run.main() == "completed"
    kinds = [type(event) for event in run.events if isinstance(event, Fenced | Restarted | Granted)]
    assert kinds[:3] == [Fenced, Restarted, Granted]


@virtual
async def test_a_trainer_lost_while_engines_read_its_first_weights_ends_the_session_by_its_name() -> None:
    """They miss the weights first, and are not to blame."""
    run = await build_run(GRPO, Scenario(faults=[Fault(at=-1.0, verb="prepare")]))

    class Gone:
        def see(self, event: Any, *, live: bool) -> None:
            if isinstance(event, Fenced):
                handle: Any = next(handle for handle in run.runtime.handles if handle.spec.group == "policy")
                handle._loop.call_soon(handle._fail, EngineLost("the trainer was killed"), False)

        def close(self) -> None: ...

    run.log.subscribe(Gone())
    assert await run.main() == "EngineLost"
    assert "the trainer was killed" in str(run.error)
    assert not run.events_of(Granted)


def test_L13_a_checkpoint_at_an_epoch_boundary_resumes_with_the_next_epoch() -> None:
    first = simulate(GRPO, Scenario(rows=4, epochs=2, train_steps=2, checkpoint_every=2))
    assert [uids for _, uids in first.batches] == [(0, 1), (2, 3)]
    second = simulate(GRPO, Scenario(rows=4, epochs=2, checkpoint_every=2), resume=first.saved)
    assert second.reason == "completed"
    assert [uids for _, uids in second.batches] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert {e.prompt.epoch for p in second.popped for e in p.experiences} == {1}


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
    sampled = sum(handle.engine.token_count for handle in run.runtime.handles if handle.spec.group == "rollout")
    assert sampled == run.ledger.account().tokens.generated, "what was aborted is on the books, to the token"
