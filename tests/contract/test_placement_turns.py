"""Groups that share devices, on fakes: one computes at a time, whatever happens, and the run ends as it should."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from algorithms.grpo import GRPO, GRPOExperience
from algorithms.ppo import PPO
from asyncrlhf.errors import DataLost
from asyncrlhf.observe import EngineBusy, Evaluated, Fenced, Measured, Restarted, Settled, StepEnded, TurnTaken
from asyncrlhf.testing import FakeSamplerOptions, Fault, Run, Scenario, Timing, build_run, run_virtual
from asyncrlhf.testing.shadow import FakeShadow
from tests.contract.inspector import go
from tests.contract.test_core_invariants import ends_well

ALL = tuple((name, "") for name in ("rollout", "policy", "critic", "reference", "reward"))
LANES = (*ALL[:3], ("reference", "a"), ("reward", "b"))
SPLIT = (ALL[0], ALL[1], ALL[3]), (ALL[2], ALL[4])
SLOW = Timing(
    verbs={"step": 5.0, "commit": 1.0, "spawn": 2.0, "logprobs": 1.5, "scores": 1.0, "sleep": 0.5, "wake": 2.0}
)
EVALUATES = Scenario(
    rows=None,
    train_steps=8,
    together=(ALL[:2],),
    timing=SLOW,
    sampler=FakeSamplerOptions(slots=8, length=40.0, sigma=0.2),
    evaluation_every=1,
    max_staleness=2,
    lookahead=1,
    probe_gap=0.0,
)
TOGETHER = Scenario(rows=16, optional=("reference",), reward_model=True, together=(ALL,), timing=SLOW)


def overlaps(run: Run[Any]) -> list[tuple[EngineBusy, EngineBusy]]:
    """Moments at which two groups of a set computed at once. Adding and giving up answers is no computing."""
    found: list[tuple[EngineBusy, EngineBusy]] = []
    busy = [event for event in run.events_of(EngineBusy) if event.work not in ("add", "abort")]
    for members in run.scenario.together:
        for (one, lane), (two, other) in combinations(members, 2):
            if lane and other and lane != other:
                continue
            mine, theirs = ([e for e in busy if e.group == name and e.end > e.start] for name in (one, two))
            found += [(a, b) for a in mine for b in theirs if a.start < b.end - 1e-9 and b.start < a.end - 1e-9]
    return found


def order_of(run: Run[Any]) -> list[str]:
    return [event.group for event in run.events_of(TurnTaken)]


def test_a_synchronous_step_generates_reads_trains_and_publishes_in_turn() -> None:
    run = ends_well(PPO, TOGETHER, minibatches=2)
    assert not overlaps(run)
    steps = re.findall("rollout (?:reference reward|reward reference) critic policy ", " ".join(order_of(run)) + " ")
    assert len(steps) == 8, "one change to each model per train step"
    alone = ends_well(PPO, replace(TOGETHER, together=()), minibatches=2)
    assert run.batches == alone.batches
    assert run.trainer().weights == alone.trainer().weights
    assert run.trainer("critic").weights == alone.trainer("critic").weights


def test_models_that_only_read_are_beside_each_other_in_lanes() -> None:
    timing = replace(SLOW, verbs={**SLOW.verbs, "logprobs": 30.0, "scores": 30.0})
    run = ends_well(PPO, replace(TOGETHER, together=(LANES,), timing=timing, rows=4))
    assert not overlaps(run)
    reads = [e for e in run.events_of(EngineBusy) if e.work in ("logprobs", "scores")]
    first, second = sorted(reads, key=lambda e: e.start)[:2]
    assert {first.group, second.group} == {"reference", "reward"}
    assert second.start < first.end


def test_answers_are_interrupted_when_a_batch_is_there_and_go_on_with_new_weights() -> None:
    sampler = FakeSamplerOptions(slots=64, length=40.0, sigma=0.8)
    scenario = replace(TOGETHER, max_staleness=4, lookahead=2, sampler=sampler, rows=24, probe_gap=0.0)
    run = ends_well(PPO, scenario, minibatches=2)
    assert not overlaps(run)
    versions = [
        [segment.version for segment in sample.segments]
        for popped in run.popped
        for experience in popped.experiences
        for sample in experience.rollout.samples
    ]
    assert any(len(set(found)) > 1 for found in versions), "some answers have tokens of two versions"
    slept = [event for event in run.events_of(EngineBusy) if event.work == "sleep"]
    assert slept


MOVES = {"sleep", "wake", "offload", "onload"}


def test_where_memory_stays_nobody_moves_and_a_synchronous_step_is_the_same() -> None:
    run = ends_well(PPO, replace(TOGETHER, offload=False), minibatches=2)
    assert not overlaps(run)
    assert {"rollout", "policy", "critic", "reference", "reward"} == set(order_of(run))
    assert MOVES.isdisjoint(event.work for event in run.events_of(EngineBusy))
    alone = ends_well(PPO, replace(TOGETHER, together=()), minibatches=2)
    assert run.batches == alone.batches
    assert run.trainer().weights == alone.trainer().weights


def test_where_memory_stays_answers_stand_still_and_go_on_with_new_weights() -> None:
    sampler = FakeSamplerOptions(slots=64, length=40.0, sigma=0.8)
    scenario = replace(TOGETHER, offload=False, max_staleness=4, lookahead=2, sampler=sampler, rows=24, probe_gap=0.0)
    run = ends_well(PPO, scenario, minibatches=2)
    assert not overlaps(run)
    works = {event.work for event in run.events_of(EngineBusy)}
    assert MOVES.isdisjoint(works)
    assert {"pause", "go_on"} <= works
    for rank in range(scenario.replicas):
        verbs = [e.work for e in run.events_of(EngineBusy) if e.group == "rollout" and e.rank == rank]
        stands = re.findall("pause(.*?)go_on", " ".join(verbs[verbs.index("pause") :]))
        assert not [between for between in stands if "generate" in between], "no token in another's turn"
        late = re.findall("go_on (?:add |abort )*(?:prepare|commit)", " ".join(verbs))
        assert not late, "it goes on with the newest weights"
    samples = [s for popped in run.popped for e in popped.experiences for s in e.rollout.samples]
    assert any(len({segment.version for segment in sample.segments}) > 1 for sample in samples)


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("at_deadline", ["mask", "wait", "drop"])
def test_a_model_whose_caller_has_gone_ends_what_it_is_at_before_the_next_turn(offload: bool, at_deadline: str) -> None:
    """A lease that is lost while its answers are read cancels who asked for it, and not the engine."""
    timing = Timing(verbs={**SLOW.verbs, "logprobs": 6.0, "scores": 6.0}, jitter=0.5)
    for seed in range(6):
        bounds = {"max_staleness": 1, "lookahead": 1, "lease_timeout": 8.0, "max_attempts": 100}
        run = go(PPO, replace(TOGETHER, offload=offload, timing=timing, seed=seed, at_deadline=at_deadline, **bounds))
        assert not overlaps(run), seed


@pytest.mark.parametrize("kind", ["die", "hang", "lost"])
@pytest.mark.parametrize("verb", ["pause", "go_on", "token"])
def test_a_dead_sampler_gives_its_turn_back_where_memory_stays(kind: Any, verb: str) -> None:
    scenario = replace(TOGETHER, offload=False, publish_timeout=50.0, lease_timeout=200.0)
    run = ends_well(PPO, replace(scenario, faults=[Fault(at=20.0, kind=kind, verb=verb)]))
    assert not overlaps(run)
    assert run.events_of(Restarted)
    assert len(run.events_of(StepEnded)) == 8


def test_an_evaluation_has_its_answers_before_anybody_trains() -> None:
    scenario = replace(TOGETHER, evaluation_every=2, evaluation_prompts=3, evaluation_max_hold=1e4)
    run = ends_well(PPO, scenario)
    assert not overlaps(run)
    labels = [event.label for event in run.events_of(Evaluated)]
    assert len(labels) >= 4
    assert all(re.fullmatch(r"v\d+", label) for label in labels)


@dataclass(kw_only=True)
class ReadsLate(GRPO):
    """Asks its frozen model within a train step, while answers wait for the sampler to come back."""

    async def generate(self) -> None:
        async for prompt in self.prompts:
            self.newest = await self.rollout.sample(prompt)
            rewards = await self.reward.score(self.newest)
            advantages = self.advantages(rewards)
            await self.experience.put(
                GRPOExperience(rollout=self.newest, rewards=rewards, advantages=advantages, reference_logprobs=None)
            )

    async def train(self) -> None:
        async for batch in self.experience.batches():
            await self.policy.step(batch, self.loss)
            assert self.reference is not None
            await self.reference.logprobs(self.newest)
            await self.coordinator.publish(self.policy)


@pytest.mark.parametrize("seed", range(4))
def test_a_frozen_model_is_read_within_a_train_step(seed: int) -> None:
    together = ALL[0], ALL[1], ALL[3]
    scenario = replace(EVALUATES, evaluation_every=0, optional=("reference",), together=(together,), seed=seed)
    sampler = FakeSamplerOptions(slots=64, length=40.0, sigma=0.8)
    run = ends_well(ReadsLate, replace(scenario, train_steps=12, max_staleness=4, lookahead=2, sampler=sampler))
    assert not [event for event in run.events_of(Settled) if event.state == "dropped(timeout)"]
    assert not overlaps(run)


def test_in_the_order_of_admission_others_come_when_the_first_answers_are_there() -> None:
    """Not with every answer behind one that takes long."""
    sampler = FakeSamplerOptions(slots=64, length=40.0, sigma=1.2)
    scenario = replace(TOGETHER, order="admission", max_staleness=4, lookahead=4, rows=24, sampler=sampler)
    run = ends_well(PPO, scenario)
    assert order_of(run).count("rollout") <= 2 * len(run.batches) + 2


@pytest.mark.parametrize("together", [ALL[:2], ALL, LANES, ALL[1:]])
def test_nobody_loses_a_lease_while_others_have_the_devices(together: Any) -> None:
    """A train step takes longer than a lease may be silent."""
    slow = replace(SLOW, verbs={**SLOW.verbs, "step": 1000.0})
    sampler = FakeSamplerOptions(slots=64, length=40.0, sigma=0.8)
    scenario = replace(TOGETHER, together=(together,), timing=slow, sampler=sampler, max_staleness=4, lookahead=2)
    run = ends_well(PPO, replace(scenario, stall_timeout=5000.0, lease_timeout=900.0))
    assert not run.events_of(Restarted)
    assert not [event for event in run.events_of(Settled) if event.state == "dropped(timeout)"]


@pytest.mark.parametrize("hold", [0.0, 60.0])
def test_an_evaluation_keeps_training_waiting_no_longer_than_it_may(hold: float) -> None:
    """Eight answers at a time of sixty take 190 s; then they go on between train steps, and have several versions."""
    scenario = replace(EVALUATES, train_steps=6, evaluation_prompts=60, evaluation_max_hold=hold)
    run, patient = ends_well(GRPO, scenario), ends_well(GRPO, replace(scenario, evaluation_max_hold=1e4))
    assert not overlaps(run)
    assert any(event.label.startswith("mixed") for event in run.events_of(Evaluated))
    assert not any(event.label.startswith("mixed") for event in patient.events_of(Evaluated))
    assert run.events[-1].t < 0.7 * patient.events[-1].t


def test_an_evaluation_that_has_been_interrupted_may_end_with_the_run() -> None:
    """It takes 190 s, of which it has 130 before the last train step and 130 after it."""
    run = ends_well(GRPO, replace(EVALUATES, train_steps=2, evaluation_prompts=60, evaluation_max_hold=130.0))
    assert [event.label for event in run.events_of(Evaluated)] == ["v0", "mixed(v1..v2)"]


@pytest.mark.parametrize("hold", [60.0, 1e6])
def test_a_hung_engine_with_an_evaluation_holds_nobody_for_ever(hold: float) -> None:
    """The batch is there at 26 s, and nothing but evaluations is left to sample."""
    hang = Fault(at=60.0, kind="hang", verb="token")
    scenario = replace(EVALUATES, evaluation_prompts=8, evaluation_max_hold=hold, replicas=1, faults=[hang])
    sampler = FakeSamplerOptions(slots=64, length=40.0, sigma=0.8)
    run = go(GRPO, replace(scenario, sampler=sampler, max_staleness=0, lookahead=0, stall_timeout=500.0))
    assert run.reason == ("train_steps" if hold == 60.0 else "Stalled"), run.error
    if run.reason == "Stalled":
        assert re.search(r"group policy waits \d+\.\d s for group rollout: its turn on set 0", str(run.error))


@pytest.mark.parametrize("kind", ["die", "hang", "lost"])
@pytest.mark.parametrize("verb", ["sleep", "wake", "token"])
def test_a_dead_sampler_gives_its_turn_back(kind: Any, verb: str) -> None:
    scenario = replace(TOGETHER, publish_timeout=50.0, lease_timeout=200.0)
    run = ends_well(PPO, replace(scenario, faults=[Fault(at=20.0, kind=kind, verb=verb)]))
    assert not overlaps(run)
    assert len(run.events_of(StepEnded)) == 8


@pytest.mark.parametrize("verb", ["offload", "onload", "logprobs"])
def test_a_lost_reference_gives_its_turn_back(verb: str) -> None:
    run = ends_well(PPO, replace(TOGETHER, faults=[Fault(group="reference", at=20.0, kind="lost", verb=verb)]))
    assert not overlaps(run)


@pytest.mark.parametrize("verb", ["offload", "onload"])
def test_a_reference_that_cannot_change_over_is_started_again(verb: str) -> None:
    run = ends_well(PPO, replace(TOGETHER, faults=[Fault(group="reference", at=20.0, kind="die", verb=verb)]))
    assert not overlaps(run)
    assert {event.group for event in run.events_of(Restarted)} == {"reference"}


@pytest.mark.parametrize("together", [ALL, ALL[1:], ALL[:2]])
@pytest.mark.parametrize("kind", ["lost", "die"])
@pytest.mark.parametrize("verb", ["offload", "onload"])
@pytest.mark.parametrize("group", ["policy", "critic"])
def test_a_trained_model_that_cannot_change_over_ends_the_run(group: str, verb: str, kind: Any, together: Any) -> None:
    """In its own name, whoever waits for the devices: no other engine is blamed for it."""
    fault = Fault(group=group, at=60.0, kind=kind, verb=verb)
    scenario = replace(TOGETHER, rows=40, together=(together,), max_staleness=4, lookahead=2, faults=[fault])
    run = go(PPO, scenario, minibatches=2)
    if group not in dict(together):
        assert run.reason == "completed"
        return
    assert run.reason == ("EngineLost" if kind == "lost" else "GroupError")
    assert f"group '{group}', rank 0" in str(run.error)
    assert not run.events_of(Fenced)
    assert not run.events_of(Restarted)


@pytest.mark.parametrize("verb", ["offload", "onload"])
@pytest.mark.parametrize("group", ["policy", "critic"])
def test_a_trained_model_that_hangs_as_it_changes_over_ends_the_run_by_its_name(group: str, verb: str) -> None:
    """Before the run is stalled."""
    fault = Fault(group=group, at=60.0, kind="hang", verb=verb)
    run = go(PPO, replace(TOGETHER, rows=40, stall_timeout=500.0, faults=[fault]))
    assert run.reason == "EngineLost"
    assert f"group '{group}': {verb} has not come back within half of limits.stall_timeout, 250 s" in str(run.error)


def test_turns_look_at_seats_and_not_at_all_who_wait() -> None:
    """Nor does a cancelled one get the turn."""

    async def main() -> int:
        run = await build_run(PPO, TOGETHER)
        (turns,) = run.turns
        seats = {seat.name: seat for seat in turns._seats}

        async def wait() -> None:
            async with seats["policy"].taken():
                pass

        async with seats["critic"].taken():
            waiting = [asyncio.ensure_future(wait()) for _ in range(1000)]
            await asyncio.sleep(1.0)
            looked = 0
            plain = turns._is_due

            def counted(seat: Any) -> bool:
                nonlocal looked
                looked += 1
                return plain(seat)

            turns._is_due = counted  # type: ignore[method-assign]
            turns.advance()
            for task in waiting[::2]:
                task.cancel()
            turns.advance()
        await asyncio.wait(waiting)
        assert [task.cancelled() for task in waiting] == [True, False] * 500
        assert not seats["policy"].holders
        assert not turns._waiting
        await run.runtime.close()
        return looked

    assert run_virtual(main()) < 600, "an end of a turn looks once, and so do the ends of cancelled ones"


@pytest.mark.parametrize("together", [(), (("rollout", ""), ("shadow_critic", ""))])
def test_a_critic_s_copy_gives_its_values(together: Any) -> None:
    """Without staleness those of the critic itself, whoever shares its devices."""
    scenario = replace(TOGETHER, shadows=2, together=(together,) if together else ())
    run, alone = ends_well(PPO, scenario, minibatches=2), ends_well(PPO, replace(TOGETHER, together=()), minibatches=2)
    assert not overlaps(run)
    assert run.trainer("policy").weights == alone.trainer("policy").weights
    found = [(e.train_step, e.metrics["version"]) for e in run.events_of(Measured) if e.group == "shadow_critic"]
    assert {version - step for step, version in found} == {0.0}
    assert len(found) == 8
    for other, count in ((run, 8), (alone, 16)):  # rewards of tokens take no forward, so the critic is asked for them
        assert len([e for e in other.events_of(EngineBusy) if e.group == "critic" and e.work == "apply"]) == count


@pytest.mark.parametrize("verb", ["apply", "values"])
def test_a_copy_is_not_blamed_for_data_that_is_lost(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The train step that needs it ends."""
    plain: Any = getattr(FakeShadow, verb)

    def lacks(self: FakeShadow, *arguments: Any) -> Any:
        if arguments[-1].train_step == 2:
            raise DataLost("the column is gone with its node")
        return plain(self, *arguments)

    monkeypatch.setattr(FakeShadow, verb, lacks)
    run = go(PPO, replace(TOGETHER, shadows=2, together=()))
    assert run.reason == "DataLost"
    assert not run.events_of(Fenced)


@pytest.mark.parametrize("kind", ["lost", "hang", "die"])
@pytest.mark.parametrize("verb", ["apply", "values", "prepare", "commit", "offload"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_lost_copy_is_started_again(kind: Any, verb: str, count: int) -> None:
    faults = [Fault(group="shadow_critic", at=20.0, kind=kind, verb=verb)]
    together = (("rollout", ""), ("shadow_critic", ""), ("reference", ""))
    run = ends_well(PPO, replace(TOGETHER, shadows=count, together=(together,), faults=faults), minibatches=2)
    assert not overlaps(run)
    assert len(run.batches) == 8


@pytest.mark.parametrize("at", [0.5, 7.0, 12.0, 17.0, 23.0, 31.0, 55.5])
@pytest.mark.parametrize("bound", [0, 4])
def test_a_stop_ends_every_wait_for_a_turn(at: float, bound: int) -> None:
    async def stopped() -> Run[PPO]:
        scenario = replace(TOGETHER, rows=40, max_staleness=bound, sampler=FakeSamplerOptions(length=12.0, sigma=0.5))
        run = await build_run(PPO, scenario)
        task = asyncio.create_task(run.main())
        await asyncio.sleep(at)
        run.coordinator.stop()
        await task
        return run

    run = run_virtual(stopped())
    assert run.reason == "stopped"
    assert not overlaps(run)
    assert not [line for turns in run.turns for line in turns.holders()]


def test_a_stalled_run_says_who_has_the_turn() -> None:
    """One prompt of two is sampled, and nobody reads it before the other is, whose engine hangs."""
    hang = Fault(kind="hang", verb="token", at=1.0)
    scenario = replace(TOGETHER, lease_timeout=0.0, stall_timeout=500.0, answers_per_prompt=1, faults=[hang])
    run = go(PPO, scenario)
    assert run.reason == "Stalled"
    lines = str(run.error).splitlines()
    assert any(re.fullmatch(r"group reference waits \d+\.\d s for group rollout: its turn on set 0", x) for x in lines)
    assert "group rollout has its turn on set 0" in lines


def test_a_hung_trainer_ends_the_run_while_others_wait_for_its_turn() -> None:
    hang = Fault(group="policy", at=10.0, kind="hang", verb="step")
    run = go(PPO, replace(TOGETHER, stall_timeout=500.0, max_staleness=2, lookahead=1, faults=[hang]))
    assert run.reason == "EngineLost"


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_turns_are_exclusive_and_everything_ends(data: st.DataObject) -> None:
    """Any staleness, sets, lengths and faults: nobody computes in another's turn, and every prompt is trained once."""
    bound = data.draw(st.sampled_from([0, 0, 1, 2, 4]))
    together = data.draw(st.sampled_from([(ALL,), (LANES,), SPLIT, ((ALL[0], ALL[3]),), ((ALL[0], ALL[2], ALL[4]),)]))
    faults: list[Fault] = []
    for _ in range(data.draw(st.integers(0, 2))):
        group = data.draw(st.sampled_from(["rollout", "reference", "reward"]))
        # two models that hang one after the other take stall_timeout together
        kind: Any = data.draw(st.sampled_from(["lost", "slow", "hang"][: 3 if group == "rollout" else 2]))
        faults.append(Fault(group=group, at=data.draw(st.floats(1.0, 150.0)), kind=kind, seconds=20.0))
    scenario = replace(
        TOGETHER,
        rows=12,
        seed=data.draw(st.integers(0, 100)),
        max_staleness=bound,
        lookahead=data.draw(st.integers(0, bound)),
        prompts_per_step=data.draw(st.integers(1, 3)),
        publish_rolling=data.draw(st.booleans()),
        together=together,
        offload=data.draw(st.booleans()),
        shadows=data.draw(st.integers(0, 2)),
        publish_overlap=bound > 0 and data.draw(st.booleans()),
        faults=faults,
        sampler=FakeSamplerOptions(slots=data.draw(st.integers(2, 8)), length=12.0, sigma=data.draw(st.floats(0, 1))),
        evaluation_every=data.draw(st.sampled_from([0, 1, 2])),
        evaluation_prompts=data.draw(st.sampled_from([2, 12])),
        evaluation_max_hold=data.draw(st.sampled_from([0.0, 20.0, 1e4])),
        order=data.draw(st.sampled_from(["ready", "admission"])),
        timing=replace(SLOW, jitter=0.5, latency=data.draw(st.sampled_from([0.0, 0.1]))),
        publish_timeout=100.0,
        lease_timeout=400.0,
        max_attempts=10,
    )
    run = ends_well(PPO, scenario, minibatches=2)
    assert not overlaps(run)
