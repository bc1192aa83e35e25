"""run_algorithm: how workers survive, how runs end and with which error, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import asyncrlhf as rl
from asyncrlhf.algorithm import IDLE_RETURNS, cause_of, gather, run_algorithm
from asyncrlhf.errors import Exhausted, GroupError, LeaseLost, SampleError, Stalled, WrongItem
from asyncrlhf.flow.experience import ExperienceQueue
from asyncrlhf.flow.prompts import PromptSource
from asyncrlhf.messages import Experience, Prompt
from asyncrlhf.testing import Deadlock
from tests.unit.virtual import Scene, experience, settle, virtual


@dataclass(kw_only=True)
class Plain(rl.Algorithm):
    """Answers come from `answer`; a train step takes a second and is always applied."""

    scene: Scene
    prompts: PromptSource
    experience: ExperienceQueue[Experience]
    answer: Callable[[Prompt], Awaitable[Experience | None]]
    forgets_publish: bool = False
    steps: int = 0

    async def generate(self) -> None:
        async for prompt in self.prompts:
            found = await self.answer(prompt)
            if found is not None:
                await self.experience.put(found)

    async def train(self) -> None:
        async for _ in self.experience.batches():
            await asyncio.sleep(1)
            self.steps += 1
            if not self.forgets_publish:
                self.scene.gate.applied()
                self.scene.gate.publish(self.scene.ledger.version)


async def at_once(prompt: Prompt) -> Experience:
    return experience(prompt)


def plain(
    scene: Scene, answer: Callable[[Prompt], Awaitable[Any]] = at_once, kind: type[Plain] = Plain, **more: Any
) -> Plain:
    return kind(
        scene=scene,
        prompts=PromptSource(scene.gate),
        experience=ExperienceQueue(Experience, scene.gate, scene.events.append),
        answer=answer,
        **more,
    )


async def run(algorithm: Plain, *, workers: int = 2, stall_timeout: float = 1000.0, **parts: Any) -> None:
    scene = algorithm.scene

    async def start() -> None:
        scene.gate.publish(0)

    async def finish() -> None:
        pass

    defaults: dict[str, Any] = {"services": [], "start": start, "finish": finish, "close": []}
    await run_algorithm(algorithm, scene.gate, workers=workers, stall_timeout=stall_timeout, **defaults | parts)


def trained(scene: Scene) -> int:
    return scene.ledger.account().counts["consumed"]


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


# ---- errors that cost the run


@virtual
async def test_an_exception_of_a_worker_without_a_lease_ends_the_run() -> None:
    class Broken(Plain):
        async def generate(self) -> None:
            raise RuntimeError("before any prompt")

    with pytest.raises(RuntimeError, match="before any prompt"):
        await run(plain(Scene(), kind=Broken))
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual
async def test_L5_the_failure_of_a_group_ends_the_run_while_the_trainer_waits() -> None:
    async def answer(prompt: Prompt) -> Experience:
        await asyncio.sleep(5)
        raise GroupError("group 'reference', rank 0: out of memory")

    with pytest.raises(GroupError, match="out of memory"):
        await run(plain(Scene(), answer))
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual
async def test_an_item_of_the_wrong_type_ends_the_run_at_once() -> None:
    async def answer(prompt: Prompt) -> Any:
        return prompt

    scene = Scene()
    with pytest.raises(WrongItem, match="carries Experience, not Prompt"):
        await run(plain(scene, answer))
    assert len(scene.kinds("Granted")) <= 2


@virtual
async def test_an_error_of_train_ends_the_run() -> None:
    class Broken(Plain):
        async def train(self) -> None:
            async for batch in self.experience.batches():
                raise ZeroDivisionError(f"at step {batch.train_step}")

    with pytest.raises(ZeroDivisionError, match="at step 0"):
        await run(plain(Scene(), kind=Broken))
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual
async def test_the_end_of_the_run_reaches_a_worker_whose_lease_is_lost_at_that_moment() -> None:
    """Both cancel it: it must not take the second for the first, and wait for ever."""
    scene = Scene(B=2, rows=None)

    class Broken(Plain):
        async def train(self) -> None:
            await asyncio.sleep(5)
            scene.gate.drop(0, 1, "fenced")
            raise GroupError("the trainer broke")

    async def answer(prompt: Prompt) -> Experience:
        await asyncio.sleep(1e6)
        return experience(prompt)

    with pytest.raises(GroupError, match="the trainer broke"):
        await run(plain(scene, answer, kind=Broken))
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual
async def test_a_service_that_breaks_ends_the_run() -> None:
    async def service() -> None:
        await asyncio.sleep(2)
        raise GroupError("the coordinator broke")

    async def answer(prompt: Prompt) -> Experience:
        await asyncio.sleep(1e6)
        return experience(prompt)

    with pytest.raises(GroupError, match="the coordinator broke"):
        await run(plain(Scene(), answer), services=[service])


@virtual
async def test_what_a_callback_raises_ends_the_run() -> None:
    def callback() -> None:
        raise ValueError("an engine said what it must not")

    async def answer(prompt: Prompt) -> Experience:
        await asyncio.sleep(1e6)
        return experience(prompt)

    asyncio.get_running_loop().call_later(3, callback)
    with pytest.raises(ValueError, match="an engine said what it must not"):
        await run(plain(Scene(), answer))
    assert asyncio.get_running_loop().get_exception_handler() is None, "as it was before"


@virtual
async def test_a_launch_that_fails_ends_the_run_before_any_worker() -> None:
    async def start() -> None:
        raise GroupError("no such device")

    scene = Scene()
    with pytest.raises(GroupError, match="no such device"):
        await run(plain(scene), start=start)
    assert scene.events == []


@virtual
async def test_L5_a_train_that_forgets_to_publish_is_told_so() -> None:
    with pytest.raises(RuntimeError, match=r"train step 0 is not closed: `await self\.coordinator\.publish"):
        await run(plain(Scene(), forgets_publish=True))


@virtual
async def test_a_train_that_returns_with_an_open_batch_is_told_so() -> None:
    class Leaves(Plain):
        async def train(self) -> None:
            async for _ in self.experience.batches():
                return

    with pytest.raises(RuntimeError, match="train step 0 is not closed"):
        await run(plain(Scene(), kind=Leaves))


@virtual
async def test_a_generate_that_returns_without_taking_prompts_is_told_so() -> None:
    class Idle(Plain):
        async def generate(self) -> None:
            await asyncio.sleep(0.001)

    with pytest.raises(RuntimeError, match=r"Idle\.generate\(\) has returned \d+ times, and nobody takes a prompt"):
        await run(plain(Scene(), kind=Idle))


@virtual
async def test_a_generate_that_takes_one_prompt_and_returns_is_fine() -> None:
    class OneByOne(Plain):
        async def generate(self) -> None:
            async for prompt in self.prompts:
                await self.experience.put(experience(prompt))
                return

    scene = Scene(rows=IDLE_RETURNS + 100, B=50)
    await run(plain(scene, kind=OneByOne), workers=1)
    assert trained(scene) == IDLE_RETURNS + 100


@virtual
async def test_a_generate_that_waits_for_something_else_stalls_by_name() -> None:
    class Waiting(Plain):
        async def generate(self) -> None:
            await asyncio.Event().wait()

    with pytest.raises(Stalled, match=r"train step 0 waits, and nothing has moved for 300 s.*no lease is live"):
        await run(plain(Scene(), kind=Waiting), stall_timeout=300.0)
    assert asyncio.get_running_loop().time() == 300.0


@virtual
async def test_a_run_that_moves_slowly_is_not_stalled() -> None:
    async def answer(prompt: Prompt) -> Experience:
        await asyncio.sleep(250)
        return experience(prompt)

    scene = Scene(rows=10)
    await run(plain(scene, answer), stall_timeout=300.0)
    assert trained(scene) == 10


# ---- the end


@virtual
async def test_workers_end_before_what_is_under_way_is_awaited_and_services_last() -> None:
    order: list[str] = []
    closed = asyncio.Event()

    class Noting(Plain):
        async def generate(self) -> None:
            try:
                await super().generate()
            finally:
                order.append("worker")

    async def service() -> None:
        await closed.wait()
        order.append("service")

    async def finish() -> None:
        order.append("finish")

    algorithm = plain(Scene(rows=2), kind=Noting)
    await run(algorithm, workers=2, services=[service], finish=finish, close=[closed.set])
    assert order == ["worker", "worker", "finish", "service"]


@virtual
async def test_further_stages_have_as_many_workers() -> None:
    running: list[str] = []

    class Staged(Plain):
        async def generate(self) -> None:
            running.append("generate")
            await super().generate()

        async def more(self) -> None:
            running.append("more")
            await asyncio.Event().wait()

        def stages(self) -> Sequence[rl.Stage]:
            return (self.more,)

    await run(plain(Scene(rows=5), kind=Staged), workers=3)
    assert sorted(running) == ["generate"] * 3 + ["more"] * 3


def test_a_deadlock_of_a_run_says_who_waits_where() -> None:
    async def never(prompt: Prompt) -> Experience:
        await asyncio.Event().wait()
        return experience(prompt)

    @virtual
    async def stuck() -> None:
        scene = Scene()
        await asyncio.wait([asyncio.ensure_future(plain(scene, never).generate())])

    with pytest.raises(Deadlock, match=r"Gate\.next_prompt|gate\.py"):
        stuck()
    gc.collect()


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
