"""How runs end: with which error, in which order, and with nothing left behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from typing import Any

import pytest

import asyncrlhf as rl
from asyncrlhf.algorithm import IDLE_RETURNS
from asyncrlhf.errors import GroupError, Stalled, WrongItem
from asyncrlhf.messages import Experience, Prompt
from asyncrlhf.testing import Deadlock
from tests.unit.plain import Plain, plain, run, trained
from tests.unit.virtual import Scene, experience, virtual

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
