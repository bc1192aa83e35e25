"""Workers of run_algorithm: what costs them a lease, and how they go on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrlhf.algorithm import cause_of, gather
from asyncrlhf.errors import Exhausted, GroupError, LeaseLost, SampleError
from asyncrlhf.messages import Experience, Prompt
from tests.unit.plain import Plain, plain, run, trained
from tests.unit.virtual import Scene, experience, settle, virtual


@virtual
async def test_a_run_ends_when_its_data_does_and_leaves_no_task_behind() -> None:
    algorithm = plain(Scene(rows=7))
    await run(algorithm)
    assert (algorithm.steps, trained(algorithm.scene)) == (4, 7)
    assert asyncio.all_tasks() == {asyncio.current_task()}


# ---- errors that cost a lease


@virtual
async def test_a_lost_lease_cancels_the_work_on_it_and_the_worker_goes_on() -> None:
    scene = Scene(rows=6, lease_timeout=30.0)
    cancelled: list[int] = []

    async def answer(prompt: Prompt) -> Experience:
        try:
            await asyncio.sleep(1e6 if prompt.uid == 2 and prompt.attempt == 1 else 1)
        except asyncio.CancelledError:
            cancelled.append(prompt.uid)
            raise
        return experience(prompt)

    await run(plain(scene, answer), workers=2)
    assert cancelled == [2]
    assert trained(scene) == 6


@virtual
async def test_a_late_put_is_refused_and_the_worker_goes_on() -> None:
    """It does not listen to its cancellation, so that it puts what is no longer wanted."""
    scene = Scene(rows=4, lease_timeout=30.0)
    refused: list[int] = []

    async def answer(prompt: Prompt) -> Experience:
        if prompt.uid == 1 and prompt.attempt == 1:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                refused.append(prompt.uid)
        return experience(prompt)

    await run(plain(scene, answer))
    assert refused == [1]
    assert trained(scene) == 4


@virtual
async def test_a_second_put_of_a_lease_is_refused_and_the_worker_goes_on() -> None:
    class Twice(Plain):
        async def generate(self) -> None:
            async for prompt in self.prompts:
                await self.experience.put(experience(prompt))
                await self.experience.put(experience(prompt))

    scene = Scene(rows=5)
    await run(plain(scene, kind=Twice))
    assert trained(scene) == 5


@pytest.mark.parametrize("error", [SampleError("no answer"), ValueError("bad row"), TypeError("None has no len()")])
@virtual
async def test_an_exception_costs_its_lease_and_the_worker_goes_on(error: Exception) -> None:
    scene = Scene(rows=6)

    async def answer(prompt: Prompt) -> Experience:
        if prompt.uid % 2:
            raise error
        return experience(prompt)

    await run(plain(scene, answer))
    assert (trained(scene), len(scene.kinds("failed"))) == (3, 3)


@virtual
async def test_a_lease_lost_while_its_answer_fails_is_not_a_failure_of_the_run() -> None:
    """The time-out cancels the worker in the very instant in which what it waits for breaks."""
    scene = Scene(B=1, rows=3, lease_timeout=10.0)

    async def breaks() -> None:
        await asyncio.sleep(10.0)
        raise ValueError("both at once")

    async def answer(prompt: Prompt) -> Experience:
        if (prompt.uid, prompt.attempt) == (1, 1):
            await gather(breaks(), asyncio.sleep(1e6))
        return experience(prompt)

    await run(plain(scene, answer), workers=1)
    assert trained(scene) + len(scene.kinds("failed")) == 3


@virtual
async def test_L5_a_bug_in_the_worker_ends_the_run_with_its_last_error() -> None:
    scene = Scene(rows=None, max_filtered=9)

    async def answer(prompt: Prompt) -> Experience:
        raise KeyError(f"column of {prompt.uid}")

    with pytest.raises(Exhausted, match=r"9 prompts in a row.*the last failure was KeyError: 'column of 8'"):
        await run(plain(scene, answer))
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual
async def test_a_worker_whose_stage_cancels_itself_loses_its_lease_not_the_worker() -> None:
    scene = Scene(rows=6)

    async def answer(prompt: Prompt) -> Experience:
        if prompt.uid == 3:
            broken = asyncio.ensure_future(asyncio.sleep(1))
            broken.cancel()
            await broken
        return experience(prompt)

    await run(plain(scene, answer), workers=1)
    assert (trained(scene), scene.kinds("failed")) == (5, [("failed", 3, 1)])


# ---- helpers


@virtual
async def test_gather_gives_both_results_or_the_first_failure() -> None:
    async def gives(value: Any, after: float) -> Any:
        await asyncio.sleep(after)
        if isinstance(value, Exception):
            raise value
        return value

    assert await gather(gives(1, 2), gives("a", 1)) == (1, "a")
    assert await gather(asyncio.ensure_future(gives(1, 0)), gives(2, 0)) == (1, 2)
    other = asyncio.ensure_future(gives(2, 100))
    with pytest.raises(SampleError, match="mine"):
        await gather(gives(SampleError("mine"), 1), other)
    await settle()
    assert other.cancelled()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0, "what the TaskGroup asked for is over"


@virtual
async def test_cancelling_gather_cancels_both() -> None:
    both = [asyncio.ensure_future(asyncio.sleep(100)) for _ in range(2)]
    task = asyncio.ensure_future(gather(*both))
    await settle()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [task.cancelled(), *(future.cancelled() for future in both)] == [True] * 3


def test_the_cause_of_many_errors_is_the_one_that_has_a_name() -> None:
    errors = BaseExceptionGroup("", [ValueError("x"), ExceptionGroup("", [SampleError("y"), GroupError("z")])])
    assert str(cause_of(errors)) == "z"
    assert str(cause_of(ExceptionGroup("", [ValueError("x"), SampleError("y")]))) == "x"
    assert isinstance(cause_of(LeaseLost("l")), LeaseLost)
