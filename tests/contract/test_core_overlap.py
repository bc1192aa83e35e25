"""Publishing beside the next train step: one at a time, P rises with the last engine, nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from algorithms.grpo import GRPO
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
from asyncrlhf.testing import FakeTrainerOptions, Fault, Run, Scenario, Timing, build_run
from tests.contract.inspector import check_batches, go
from tests.contract.test_core_invariants import check_trained
from tests.unit.virtual import virtual

SLOW = Timing(verbs={"step": 5.0, "prepare": 8.0, "commit": 1.0, "spawn": 2.0})
"""Engines take longer to take weights than a train step."""
SCENARIO = Scenario(
    timing=SLOW, rows=None, train_steps=12, prompts_per_step=2, max_staleness=4, lookahead=2, publish_overlap=True
)


def ended(scenario: Scenario) -> Run[Any]:
    run = go(GRPO, scenario)
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


def test_a_fast_publish_is_not_waited_for() -> None:
    run = ended(replace(SCENARIO, timing=Timing(verbs={"step": 5.0, "prepare": 1.0, "commit": 1.0})))
    assert all(event.exposed == 0.0 for event in run.events_of(Published)[:-1])


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
    assert len(labels) >= 4
    assert all(label == f"v{step}" for step, label in labels)


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
