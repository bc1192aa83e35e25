"""Publishing to one engine after another: generation never stops, and the bound holds as it does otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from algorithms.grpo import GRPO
from asyncrlhf.observe import EngineBusy, Event, Fenced, Published
from asyncrlhf.testing import FakeSamplerOptions, Fault, Run, Scenario, Timing, simulate
from tests.contract.inspector import check_batches, go

SLOW_SWAPS = Timing(verbs={"step": 20.0, "commit": 10.0, "prepare": 10.0})


def scenario(**others: Any) -> Scenario:
    sampler = FakeSamplerOptions(slots=8, length=12.0, sigma=1.0)
    values: dict[str, Any] = {"rows": 60, "replicas": 3, "max_staleness": 4, "timing": SLOW_SWAPS, "sampler": sampler}
    return Scenario(**values | others)


def swaps(run: Run[Any]) -> list[list[tuple[float, float]]]:
    """When engines took over new weights (start, end), publish by publish; not at launch."""
    busy = sorted((e.start, e.end) for e in run.events_of(EngineBusy) if e.work == "commit")[3:]
    return [busy[first : first + 3] for first in range(0, len(busy), 3)]


@pytest.mark.parametrize("mode", ["in_flight", "drain"])
def test_swaps_follow_each_other_and_prepares_do_not(mode: Any) -> None:
    run = go(GRPO, scenario(publish_mode=mode, publish_rolling=True))
    check_batches(run)
    assert run.reason == "completed"
    for (_, first), (second, also), (third, _) in swaps(run):
        assert first <= second
        assert also <= third
    prepares = sorted((e.start, e.end) for e in run.events_of(EngineBusy) if e.work == "prepare")[3:]
    assert all(prepares[first][1] > prepares[first + 1][0] for first in range(0, len(prepares), 3))
    together = go(GRPO, scenario(publish_mode="in_flight"))
    assert all(first[1] > last[0] for first, _, last in swaps(together)), "without it they are at it all at once"


def test_while_one_engine_is_drained_the_others_take_its_requests() -> None:
    """Of the answers begun within a publish all go to engines that are not drained, and none is held back."""
    waiting: list[int] = []
    draining: list[int] = []

    def watch(run: Run[Any], event: Event) -> None:
        group: Any = run.groups["rollout"]
        waiting.append(len(group._held_back) if any(r.serving for r in group.replicas) else 0)
        draining.append(sum(replica.draining for replica in group.replicas))

    run = simulate(GRPO, scenario(publish_mode="drain", publish_rolling=True), watch=watch)
    assert run.reason == "completed"
    assert max(draining) == 1
    assert max(waiting) == 0


def test_P_rises_with_the_last_engine_and_one_that_dies_is_passed_over() -> None:
    served: list[tuple[int, list[int]]] = []

    def watch(run: Run[Any], event: Event) -> None:
        members: Any = run.coordinator._members
        served.append((run.ledger.published or 0, list(members.serving.values())))

    faults = [Fault(rank=1, at=100.0, verb="commit")]
    run = simulate(GRPO, scenario(publish_rolling=True, faults=faults), watch=watch)
    check_batches(run)
    assert run.reason == "completed"
    assert any(len(set(versions)) > 1 for _, versions in served), "versions differ while it rolls"
    assert all(published <= min(versions, default=published) for published, versions in served)
    assert len(run.events_of(Fenced)) == 1
    (published,) = [event for event in run.events_of(Published) if event.fenced]
    assert published.fenced == ("rollout/1",)
