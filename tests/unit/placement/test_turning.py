"""Turns and publishes beside training, by hand: who has the devices when, and what that makes of a train step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncrlhf.flow.ledger import LedgerRules
from asyncrlhf.observe.events import AnyEvent, TurnTaken
from asyncrlhf.placement.pipeline import Pipeline
from asyncrlhf.placement.simulate import simulate
from asyncrlhf.placement.turning import measured_turning, turns_of_both, usual_turning

GENERATE, TRAIN, PUBLISH = 10.0, 4.0, 2.0
"""Seconds: 10 tokens of 1 s for all of a batch, a train step, and a publish of which 0.5 is the export."""


def rules(lookahead: int = 0, every: int = 1) -> LedgerRules:
    return LedgerRules(prompts_per_step=2, max_staleness=2 * lookahead, lookahead=lookahead, publish_every=every)


TURNS = Pipeline(
    rules=rules(),
    slots=2,
    length=lambda random: 10,
    decode=lambda active: 1.0,
    train=lambda random, tokens: TRAIN,
    publish=PUBLISH,
    export=0.5,
    shared=True,
    to_train=0.25,
    to_generate=0.75,
)


def test_a_synchronous_step_on_shared_devices_is_the_sum_of_its_parts_and_two_switches() -> None:
    found = simulate(TURNS, 20, check=True)
    assert found.step == pytest.approx(GENERATE + 0.25 + TRAIN + PUBLISH + 0.75)
    assert found.median == pytest.approx(found.step)
    assert found.generate == pytest.approx(GENERATE / found.step)
    assert found.train == pytest.approx(TRAIN / found.step)


def test_looking_ahead_on_shared_devices_saves_nothing_but_what_is_generated_at_once() -> None:
    """Four answers may be live and two slots decode: one after the other, as many seconds as before; no publish goes on
    beside training there."""
    ahead = replace(TURNS, rules=rules(lookahead=1), overlap=True)
    assert simulate(ahead, 40, check=True).step == pytest.approx(GENERATE + 0.25 + TRAIN + PUBLISH + 0.75, rel=0.02)
    wide = replace(ahead, slots=4)  # two batches at once: of two steps, one finds its batch ready
    assert simulate(wide, 40, check=True).step == pytest.approx(GENERATE / 2 + 0.25 + TRAIN + PUBLISH + 0.75, rel=0.1)


def test_without_a_publish_the_engines_come_back_only_when_the_trainer_waits() -> None:
    """Every second step publishes. Four slots make two batches at once, D = 1: the second step finds its batch ready
    and the trainer still there, so two steps have 10 s of generation and one change of either kind."""
    every = replace(TURNS, rules=rules(lookahead=1, every=2), slots=4)
    assert simulate(every, 41, check=True).step == pytest.approx(
        (GENERATE + 0.25 + 2 * TRAIN + PUBLISH + 0.75) / 2, rel=0.03
    )


@pytest.mark.parametrize(
    ("publish", "expected"),
    [
        (PUBLISH, TRAIN + 0.5),  # hidden, but for the export
        (3.0, TRAIN + 0.5),
        (7.0, 7.0),  # the next publish waits for it, and a train step for that one to begin
    ],
)
def test_a_publish_beside_training_costs_its_export_until_it_is_the_longest(publish: float, expected: float) -> None:
    beside = replace(
        TURNS,
        rules=rules(lookahead=4),
        length=lambda random: 1,
        publish=publish,
        shared=False,
        overlap=True,
    )
    assert simulate(beside, 60, check=True).step == pytest.approx(expected, rel=0.02)
    waits = replace(beside, overlap=False)
    assert simulate(waits, 60, check=True).step == pytest.approx(TRAIN + publish, rel=0.02)


def test_changes_of_turns_are_read_from_a_run() -> None:
    def turn(t: float, group: str, seconds: float) -> TurnTaken:
        return TurnTaken(t=t, devices="shared", group=group, seconds=seconds)

    events: list[AnyEvent] = [turn(0, "policy", 9.0), turn(1, "rollout", 0.3), turn(2, "policy", 0.1)]
    events += [turn(3, "rollout", 0.5), turn(4, "policy", 0.2), turn(5, "rollout", 9.0), turn(6, "policy", 0.3)]
    events += [turn(6, "reference", 0.05), TurnTaken(t=7, devices="others", group="reward", seconds=9.0)]
    turns = turns_of_both(events, "rollout", {"policy"})
    assert {event.devices for event in turns} == {"shared"}
    found = measured_turning([event for event in turns if event.t >= 1], "rollout", {"policy"})
    assert (found.to_train, found.to_generate, found.to_read) == (0.2, 0.5, 0.05)
    assert (found.cold_train, found.cold_generate, found.uneven) == (0.0, 0.0, 1.0)


def test_the_usual_change_grows_with_the_weights_from_what_any_model_costs() -> None:
    """As measured, "colocate" against no turns: 5 and 9 ms with 2.4 MB of weights, 20 and 44 ms with 39 MB."""
    assert usual_turning(2.4e6, offload=False) == usual_turning(39e6, offload=False)
    small, large = (usual_turning(weights, offload=True) for weights in (2.4e6, 39e6))
    assert (small.to_train, small.to_generate) == (pytest.approx(0.0052, rel=0.1), pytest.approx(0.0091, rel=0.1))
    assert (large.to_train, large.to_generate) == (pytest.approx(0.0204, rel=0.1), pytest.approx(0.0444, rel=0.1))
