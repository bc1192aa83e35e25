"""Publishing beside the next train step: one at a time, P rises with the last engine, nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from algorithms.grpo import GRPO
from asyncrlhf.errors import GroupError
from asyncrlhf.observe import (
    Checkpointed,
    Evaluated,
    Event,
    Fenced,
    OptimizerStep,
    Popped,
    Published,
    StepEnded,
)
from asyncrlhf.testing import FakeSamplerOptions, FakeTrainerOptions, Fault, Run, Scenario, Timing, build_run
from asyncrlhf.testing.trainer import FakeTrainer
from tests.contract.inspector import check_batches, go
from tests.contract.test_core_invariants import check_trained
from tests.unit.virtual import virtual

SLOW = Timing(verbs={"step": 5.0, "prepare": 8.0, "commit": 1.0, "spawn": 2.0})
"""Engines take longer to take weights than a train step."""
SCENARIO = Scenario(
    timing=SLOW, rows=None, train_steps=12, prompts_per_step=2, max_staleness=4, lookahead=2, publish_overlap=True
)


def ended(scenario: Scenario, algorithm: type[GRPO] = GRPO) -> Run[Any]:
    run = go(algorithm, scenario)
    assert run.reason == "train_steps", run.error
    check_batches(run)
    check_trained(run)
    assert run.ledger.published == run.ledger.version == 12, "the last publish has ended before the run"
    assert {run.runtime.engine("rollout", rank).version for rank in range(scenario.replicas)} == {12}
    return run


def test_the_trainer_steps_on_while_engines_prepare_and_waits_for_the_publish_before() -> None:
    run = ended(SCENARIO)
    published: list[Published] = run.events_of(Published)
    assert [event.version for event in published] == list(range(1, 13))
    seen = [event for event in run.events if isinstance(event, OptimizerStep | Published)]
    steps = {event.train_step: n for n, event in enumerate(seen) if isinstance(event, OptimizerStep)}
    ahead = [e.version for n, e in enumerate(seen) if isinstance(e, Published) and steps.get(e.version, n) < n]
    assert len(ahead) > 3, "step v has ended before version v was published"
    assert all(event.exposed < event.seconds for event in published[:-1])
    assert any(event.exposed for event in published[:-1]), "the trainer came to wait"


def test_without_overlap_every_publish_ends_before_the_next_batch_is_taken() -> None:
    run = ended(replace(SCENARIO, publish_overlap=False))
    seen = [event for event in run.events if isinstance(event, Popped | Published)]
    assert [type(event) for event in seen] == [Popped, Published] * 12
    assert all(event.exposed == event.seconds for event in run.events_of(Published))


class Saving(GRPO):
    async def train(self) -> None:
        async def save(version: int) -> None:
            del version
            await self.coordinator.settled()

        self.coordinator._after_step = save
        await super().train()


def test_what_a_checkpoint_waits_for_a_publish_is_in_the_time_of_the_step_that_waits_with_it() -> None:
    steps = ended(SCENARIO, Saving).events_of(StepEnded)
    assert [later.t - sooner.t for sooner, later in pairwise(steps)] == [
        pytest.approx(event.seconds) for event in steps[1:]
    ]


def test_a_fast_publish_is_not_waited_for() -> None:
    run = ended(replace(SCENARIO, timing=Timing(verbs={"step": 5.0, "prepare": 1.0, "commit": 1.0})))
    assert all(event.exposed == 0.0 for event in run.events_of(Published)[:-1])


@pytest.mark.parametrize(("with_whom", "beside"), [("reference", True), ("policy", False)])
def test_a_sampler_in_turn_with_a_reference_takes_weights_while_training_goes_on(with_whom: str, beside: bool) -> None:
    """And not where it is the trained model that it takes turns with."""
    sets = ((("rollout", ""), (with_whom, "")),)
    run = ended(replace(SCENARIO, together=sets, optional=("reference",)))
    published = run.events_of(Published)
    assert any(event.exposed < event.seconds for event in published[:-1]) is beside


def test_exports_keep_the_trainer_from_the_next_step_and_count_as_exposed() -> None:
    """They run in its engine, ahead of the step: without overlap nothing else is."""
    timing = Timing(verbs={"step": 5.0, "export": 20.0, "prepare": 1.0, "commit": 1.0})
    fast = replace(SCENARIO, timing=timing, sampler=FakeSamplerOptions(slots=64, length=4.0, sigma=0.0))
    run = ended(fast)
    assert [event.exposed for event in run.events_of(Published)[1:-1]] == [pytest.approx(20.0)] * 10
    alone = sum(event.exposed for event in ended(replace(fast, publish_overlap=False)).events_of(Published))
    assert sum(event.exposed for event in run.events_of(Published)) < alone


def test_an_export_is_not_exposed_while_the_trainer_waits_for_a_batch() -> None:
    timing = Timing(verbs={"step": 5.0, "export": 20.0})
    slow = replace(SCENARIO, timing=timing, sampler=FakeSamplerOptions(slots=64, length=300.0, sigma=0.0))
    published = ended(slow).events_of(Published)
    assert sum(event.exposed for event in published[:-1]) < 0.5 * sum(event.seconds for event in published[:-1])


def test_the_last_good_step_is_saved_when_an_export_beside_training_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the trainer waits for a batch: what failed has been raised, and a checkpoint does not hear of it again."""
    export = FakeTrainer.export

    def fails(trainer: FakeTrainer, version: int) -> Any:
        if version == 5:
            raise GroupError("export: no memory")
        return export(trainer, version)

    @virtual
    async def main() -> None:
        slow = FakeSamplerOptions(slots=2, length=100.0, sigma=0.0)
        run = await build_run(GRPO, replace(SCENARIO, sampler=slow))
        close = run.runtime.close

        async def saves_first() -> None:
            assert (run.ledger.training, run.ledger.published) == (None, 4)
            await run.save(run.coordinator.version)
            await close()

        monkeypatch.setattr(run.runtime, "close", saves_first)
        assert await run.main() == "GroupError"
        assert [event.train_step for event in run.events_of(Checkpointed)] == [0, 5]
        saved.append(run.saved)

    saved: list[Any] = []
    monkeypatch.setattr(FakeTrainer, "export", fails)
    main()
    monkeypatch.setattr(FakeTrainer, "export", export)
    run = go(GRPO, SCENARIO, resume=saved[0])
    assert (run.reason, run.ledger.published) == ("train_steps", 12)


@pytest.mark.parametrize("bound", range(1, 5))
@pytest.mark.parametrize("mode", ["in_flight", "drain"])
def test_every_interval_up_to_lookahead_plus_1_goes_on(bound: int, mode: Any) -> None:
    """Who waits for P to rise waits for engines, and they for nobody: also at the widest interval."""
    for ahead in range(1, bound + 1):
        for every in range(1, ahead + 2):
            widths = {"max_staleness": bound, "lookahead": ahead, "publish_every": every}
            run = go(GRPO, replace(SCENARIO, publish_mode=mode, **widths))
            assert run.reason == "train_steps", run.error
            check_batches(run)
            assert max(lag for event in run.events_of(Popped) for lag in event.head_lags) <= ahead


@pytest.mark.parametrize("kind", ["die", "hang", "lose", "slow"])
@pytest.mark.parametrize("verb", ["prepare", "commit", "probe"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_engine_that_fails_in_a_publish_is_fenced_and_the_run_goes_on(kind: Any, verb: str, replicas: int) -> None:
    faults = [Fault(at=at, kind=kind, verb=verb, seconds=200.0) for at in (20.0, 90.0)]
    run = ended(replace(SCENARIO, replicas=replicas, publish_timeout=60.0, faults=faults))
    fenced = {event.rank for event in run.events_of(Fenced)}
    assert fenced == {0}
    assert any("rollout/0" in event.fenced for event in run.events_of(Published))


def test_weights_that_fail_the_gate_are_neither_published_nor_saved() -> None:
    run = go(GRPO, replace(SCENARIO, trainer=FakeTrainerOptions(broken_from=5), checkpoint_every=1))
    assert run.reason == "PublishRefused"
    assert run.ledger.published == 4
    assert [event.train_step for event in run.events_of(Checkpointed)][-1] == 4


@pytest.mark.parametrize("every", [1, 2])
def test_R4_a_checkpoint_is_taken_when_no_publish_is_under_way(every: int) -> None:
    """So the count of publishes goes on exactly, and what it resumes from is what was published."""
    seen: list[tuple[int, int, int]] = []

    def watch(run: Run[Any], event: Event) -> None:
        if isinstance(event, Checkpointed) and event.train_step:
            seen.append((event.train_step, run.ledger.published or 0, run.coordinator.publish_count))

    @virtual
    async def first() -> None:
        run = await build_run(GRPO, scenario, watch=watch)
        await run.main()
        saved.append(run.saved)

    saved: list[Any] = []
    scenario = replace(SCENARIO, publish_every=every, checkpoint_every=1, train_steps=8)
    first()
    assert seen == [(step, step - step % every, step // every) for step in range(1, 9)]
    run = go(GRPO, replace(SCENARIO, publish_every=every), resume=saved[0])
    assert (run.reason, run.coordinator.publish_count) == ("train_steps", 12 // every)


def test_R5_evaluations_are_pinned_to_the_version_of_their_step() -> None:
    run = ended(replace(SCENARIO, evaluation_every=2, evaluation_max_hold=1e3))
    labels = [(event.train_step, event.label) for event in run.events_of(Evaluated)]
    assert labels == [(step, f"v{step}") for step in range(0, 13, 2)], "the last one, too"


def test_void_steps_publish_nothing() -> None:
    run = ended(replace(SCENARIO, trainer=FakeTrainerOptions(not_finite=0.4), max_void_steps=100))
    assert any(event.void for event in run.events_of(StepEnded))
    assert [event.version for event in run.events_of(Published)] == list(range(1, 13))


def test_a_stop_awaits_the_publish_under_way() -> None:
    def watch(run: Run[Any], event: Event) -> None:
        if isinstance(event, Popped) and event.train_step == 4:
            assert run.coordinator.publishing
            run.coordinator.stop()

    @virtual
    async def main() -> None:
        run = await build_run(GRPO, SCENARIO, watch=watch)
        assert await run.main() == "stopped"
        assert run.ledger.version == run.ledger.published == 5

    main()


@virtual
async def test_L9_admission_waits_for_a_publish_and_says_so() -> None:
    timing = Timing(verbs={"step": 5.0, "prepare": 50.0})
    run = await build_run(GRPO, replace(SCENARIO, timing=timing, max_staleness=2, lookahead=1))
    lines: list[str] = []

    def watch(run: Run[Any], event: Event) -> None:
        if isinstance(event, OptimizerStep) and run.coordinator.publishing:
            lines.extend(run.waits())

    run._watch = watch  # pyright: ignore[reportPrivateUsage]
    assert await run.main() == "train_steps"
    assert any(line.startswith("admission waits for the publish: ") for line in lines), lines
    assert any(line.startswith("the publish waits ") and line.endswith(" for rollout/0: prepare") for line in lines)
