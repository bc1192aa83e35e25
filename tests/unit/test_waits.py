"""Who waits for whom: the text, and what a run's parts say at one moment."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from algorithms.grpo import GRPO
from asyncrlhf.observe.waits import ALIKE, Wait, wait_lines
from asyncrlhf.testing import Fault, Scenario, Timing, build_run, simulate
from tests.unit.virtual import virtual


def test_the_longest_waits_come_first_and_like_ones_are_counted() -> None:
    waits = [Wait(f"prompt uid {uid} (attempt 1)", "rollout/1", "", 600.0 - uid, kind="prompts") for uid in range(20)]
    lines = wait_lines([Wait("train step 12", "policy/0", "step", 34.2), *waits, Wait("a", "b")], ["a note"])
    assert lines[0] == "prompt uid 0 (attempt 1) waits 600.0 s for rollout/1"
    assert lines[ALIKE : ALIKE + 2] == ["train step 12 waits 34.2 s for policy/0: step", "a waits for b"]
    assert lines[ALIKE + 2 :] == [f"{20 - ALIKE} more prompts", "a note"]
    assert wait_lines([]) == ["nobody waits"]


@pytest.mark.parametrize(
    ("edges", "circles"),
    [
        ("ab bc cd", []),
        ("ab bc ca", ["a -> b -> c -> a"]),
        ("xa ab ba bd", ["a -> b -> a"]),
        ("aa bc", ["a -> a"]),
        ("ab ac bd cd", []),
        ("ab ba cd dc", ["a -> b -> a", "c -> d -> c"]),
    ],
)
def test_circles_are_called_out(edges: str, circles: list[str]) -> None:
    lines = wait_lines([Wait(edge[0], edge[1]) for edge in edges.split()])
    assert [line for line in lines if line.startswith("a circle")] == [
        f"a circle: {circle}; nobody in it can go on" for circle in circles
    ]


def stalled(scenario: Scenario) -> list[str]:
    """What the end of a stalled run says about who waits."""
    run = simulate(GRPO, scenario)
    assert run.reason == "Stalled"
    return str(run.error).splitlines()[1:]


def test_l1_a_stalled_run_says_who_waits_for_the_engine_that_hangs() -> None:
    hang = Fault(kind="hang", verb="token")
    lines = stalled(Scenario(rows=12, replicas=1, lease_timeout=0.0, stall_timeout=500.0, faults=[hang]))
    assert "train step 0 waits 500.0 s for the next batch: 0 of 2 prompts are ready" in lines
    prompts = [
        line for line in lines if re.fullmatch(r"prompt uid \d \(attempt 1\) waits \d+\.\d s for rollout/0", line)
    ]
    assert len(prompts) == 2


def test_l9_a_publish_that_waits_for_an_engine_says_which() -> None:
    faults = [Fault(at=10.0, verb="commit"), Fault(at=10.0, verb="probe", kind="slow", seconds=5000.0)]
    limits: dict[str, Any] = {"stall_timeout": 1000.0, "publish_timeout": 1e5, "timing": Timing(verbs={"step": 5.0})}
    lines = stalled(Scenario(rows=20, replicas=1, faults=faults, **limits))
    assert any(re.match(r"train step 0 waits 1\d\d\d\.\d s for the publish$", line) for line in lines), lines
    assert any(re.match(r"the publish waits \S+ s for a rollout engine: that serves$", line) for line in lines)
    assert any(re.match(r"the publish waits \S+ s for rollout/0: probe$", line) for line in lines)
    assert "rollout/0 is out of service; it is being started again, try 1 of 3" in lines


@virtual
async def seen(scenario: Scenario, wanted: str) -> None:
    """A line that matches is there at some moment of the run, which goes on to its end."""
    run = await build_run(GRPO, scenario)
    task = asyncio.create_task(run.main())
    while not any(re.fullmatch(wanted, line) for line in run.waits()):
        await asyncio.sleep(1.0)
        assert not task.done(), wanted
    assert await task == "completed"


def test_a_train_step_waits_for_its_engine_and_admission_for_the_step() -> None:
    slow = Timing(verbs={"step": 50.0})
    seen(Scenario(timing=slow), r"train step 0 waits \d+\.\d s for policy/0: step")
    seen(Scenario(timing=slow), "admission waits for train step 0: 2 workers, 0 prompts are live, .*")


@pytest.mark.parametrize(("group", "verb"), [("rollout", ""), ("reference", "logprobs")])
def test_when_an_engine_starts_again(group: str, verb: str) -> None:
    """The first time at once; this one breaks whenever it has begun."""
    faults = [Fault(group=group, at=10.0, kind="lost", verb=verb)] * 4
    due = rf"{group}/0 is out of service; it starts again in \d\.\d s, try [34] of 5"
    seen(Scenario(rows=12, replicas=1, max_restarts=5, optional=("reference",), faults=faults), due)


def test_what_a_publish_waits_for() -> None:
    drain = Scenario(publish_mode="drain", max_staleness=2, lookahead=1, timing=Timing(pace=1.0))
    seen(drain, r'the publish waits \d+\.\d s for rollout/0: its answers, publish.mode = "drain"')


def test_a_run_whose_two_ends_wait_for_each_other_is_a_circle() -> None:
    """No prompt is live, none is admitted, and the trainer waits for a batch: admission waits for its next step."""
    waits = [Wait("train step 5", "the next batch"), Wait("the next batch", "admission")]
    waits.append(Wait("admission", "train step 5"))
    circle = "train step 5 -> the next batch -> admission -> train step 5"
    assert wait_lines(waits)[0] == f"a circle: {circle}; nobody in it can go on"
