"""The gate: whose lease was lost, who is told, and what is known about those that take long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrlhf.errors import LeaseLost
from asyncrlhf.flow.gate import Holder
from asyncrlhf.flow.holding import oldest
from asyncrlhf.flow.prompts import PromptSource, StageQueue
from asyncrlhf.messages import Prompt, Rollout
from tests.unit.virtual import Scene, experience, settle, virtual


def asks(scene: Scene) -> tuple[Holder, asyncio.Task[Prompt | None]]:
    holder = Holder()
    return holder, asyncio.ensure_future(scene.gate.next_prompt(holder))


async def leased(scene: Scene) -> tuple[Holder, Prompt]:
    """A lease that this very task holds."""
    holder = Holder()
    prompt = await scene.gate.next_prompt(holder)
    assert prompt is not None
    return holder, prompt


def now() -> float:
    return asyncio.get_running_loop().time()


# ---- lost leases


@virtual
async def test_L1_a_lease_that_takes_too_long_is_dropped_named_and_leased_again() -> None:
    scene = Scene(B=1, lease_timeout=30.0, max_attempts=2)
    scene.gate.publish(0)
    attempts: list[tuple[int, float]] = []

    async def work() -> None:
        _, prompt = await leased(scene)
        attempts.append((prompt.attempt, now()))
        await asyncio.Event().wait()

    for _ in range(3):
        task = asyncio.ensure_future(work())
        await asyncio.wait([task])
        assert task.cancelled()
        assert scene.gate.was_lost(task)
        assert not scene.gate.was_lost(task), "asking forgets it"
    assert attempts == [(1, 0.0), (2, 30.0), (1, 60.0)]
    states = scene.kinds()
    assert states[:4] == [("Granted", 0, 1), ("dropped(timeout)", 0, 1), ("Granted", 0, 2), ("dropped(timeout)", 0, 2)]
    assert states[4] == ("Granted", 1, 1), "two attempts were lost, as max_attempts allows"
    assert 0 in scene.rows.released


@virtual
async def test_time_outs_count_from_each_lease_and_spare_what_is_ready() -> None:
    scene = Scene(B=3, lease_timeout=30.0)
    scene.gate.publish(0)
    _, ready = await leased(scene)
    await asyncio.sleep(10)
    holder, late = await leased(scene)
    holder.task = None
    scene.gate.ready(experience(ready))
    await asyncio.sleep(29)
    assert scene.gate.is_current(late)
    await asyncio.sleep(2)
    assert not scene.gate.is_current(late)
    assert scene.kinds("dropped(timeout)") == [("dropped(timeout)", late.uid, 1)]
    assert scene.ledger.account().counts["ready"] == 1


@virtual
async def test_a_prompt_that_is_lost_and_granted_at_once_has_one_owner() -> None:
    """The worker that lost it is cancelled, the one that has it is not, and its lease is really its own."""
    scene = Scene(B=1)
    scene.gate.publish(0)
    owner: list[asyncio.Task[Any]] = []

    async def work() -> None:
        async for _ in PromptSource(scene.gate):
            await asyncio.Event().wait()

    first, second = asyncio.ensure_future(work()), asyncio.ensure_future(work())
    await settle()
    scene.gate.drop(0, 1, "fenced")
    await settle()
    assert first.cancelled()
    assert not second.done()
    assert scene.kinds() == [("Granted", 0, 1), ("dropped(fenced)", 0, 1), ("Granted", 0, 2)]
    assert "uid 0 (attempt 2, running), granted 0.0 s ago" in oldest(scene.gate.unfinished())
    owner.append(second)
    assert scene.gate.fail(second, ValueError("x"))
    assert scene.kinds("failed") == [("failed", 0, 2)]
    second.cancel()


@virtual
async def test_a_prompt_that_is_lost_on_its_way_never_arrives() -> None:
    """Dropped in the instant between the grant and the worker's waking up: the worker gets the next one."""
    scene = Scene(B=1)
    holder, waiting = asks(scene)
    await settle()
    scene.gate.publish(0)
    scene.gate.drop(0, 1, "late")
    other, also_waiting = asks(scene)
    prompts = [await asyncio.wait_for(task, 5) for task in (waiting,)]
    assert [(p.uid, p.attempt) for p in prompts if p] == [(0, 2)]
    assert holder.prompt == prompts[0]
    assert scene.ledger.account().counts["running"] == 1
    also_waiting.cancel()
    assert other.prompt is None


@virtual
async def test_a_worker_cancelled_on_its_way_gives_the_lease_back() -> None:
    scene = Scene(B=1)
    _, first = asks(scene)
    await settle()
    scene.gate.publish(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    _, prompt = await leased(scene)
    assert (prompt.uid, prompt.attempt) == (0, 2)
    assert scene.kinds("dropped(restart)") == [("dropped(restart)", 0, 1)]


@virtual
async def test_what_waits_in_a_stage_queue_is_nobodys_and_lost_items_are_left_out() -> None:
    scene = Scene(B=3)
    scene.gate.publish(0)
    queue: StageQueue[Rollout] = StageQueue(3, Rollout, scene.gate, name="answered")
    for _ in range(3):
        _, prompt = await leased(scene)
        await queue.put(experience(prompt).rollout)
    scene.gate.drop(1, 1, "timeout")
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0, "the lease had been handed over"
    items = aiter(queue)
    assert [(await anext(items)).prompt.uid for _ in range(2)] == [0, 2]
    assert scene.kinds("filtered") == [("filtered", 0, 1)]


@virtual
async def test_a_worker_that_waits_for_room_in_a_stage_queue_still_holds_its_lease() -> None:
    scene = Scene(B=2)
    scene.gate.publish(0)
    queue: StageQueue[Rollout] = StageQueue(1, Rollout, scene.gate)

    async def work() -> None:
        _, prompt = await leased(scene)
        await queue.put(experience(prompt).rollout)

    await asyncio.ensure_future(work())
    blocked = asyncio.ensure_future(work())
    await settle()
    scene.gate.drop(1, 1, "timeout")
    await settle()
    assert blocked.cancelled()
    assert queue.statistics().items == 1


@virtual
async def test_a_put_into_a_stage_queue_under_a_lost_lease_is_refused() -> None:
    scene = Scene(B=1)
    scene.gate.publish(0)
    queue: StageQueue[Rollout] = StageQueue(1, Rollout, scene.gate)
    holder, prompt = await leased(scene)
    holder.task = None
    scene.gate.drop(0, 1, "timeout")
    with pytest.raises(LeaseLost):
        await queue.put(experience(prompt).rollout)
    assert queue.statistics().items == 0


# ---- watching over it


@virtual
async def test_leases_that_end_without_a_result_are_no_progress() -> None:
    scene = Scene(B=2, lease_timeout=10.0)
    scene.gate.publish(0)
    moved = scene.gate.last_moved
    holder, _ = await leased(scene)
    holder.task = None
    await asyncio.sleep(5)
    holder, prompt = await leased(scene)
    holder.task = None
    await asyncio.sleep(20)
    assert scene.kinds("dropped(timeout)")
    assert scene.gate.last_moved == moved
    scene.gate.report(prompt.uid, prompt.attempt, 0, 0, 3)
    assert scene.gate.last_moved == moved, "a late report is none either"
    _, again = await leased(scene)
    scene.gate.report(again.uid, again.attempt, 0, 0, 3)
    assert scene.gate.last_moved == now()


@virtual
async def test_the_oldest_lease_is_named_with_its_age_and_place() -> None:
    scene = Scene(B=2)
    scene.gate.publish(0)
    assert oldest(scene.gate.unfinished()) == "no lease is live"
    _, first = await leased(scene)
    await asyncio.sleep(12)
    await leased(scene)
    scene.gate.whereabouts = lambda uid, attempt: f"engine {uid}.{attempt}"
    assert oldest(scene.gate.unfinished()) == (
        "the oldest lease is uid 0 (attempt 1, running at engine 0.1), granted 12.0 s ago"
    )
    scene.gate.score(first)
    assert "scoring" in oldest(scene.gate.unfinished())
    scene.gate.ready(experience(first))
    assert "uid 1" in oldest(scene.gate.unfinished())


@virtual
async def test_the_trainer_waits_for_batches_and_for_engines() -> None:
    scene = Scene(B=1)
    assert scene.gate.trainer_waits_since is None
    await asyncio.sleep(3)
    trainer = asyncio.ensure_future(scene.gate.pop())
    await settle()
    assert scene.gate.trainer_waits_since == 3.0
    scene.gate.stop()
    await trainer
    assert scene.gate.trainer_waits_since is None
    with scene.gate.trainer_waits():
        assert scene.gate.trainer_waits_since == 3.0
    assert scene.gate.trainer_waits_since is None


@virtual
async def test_a_pause_is_no_silence_and_what_came_before_it_counts() -> None:
    scene = Scene(B=3, lease_timeout=30.0)
    scene.gate.publish(0)
    lost: dict[int, float] = {}

    async def work() -> None:
        _, prompt = await leased(scene)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            lost[prompt.uid] = now()
            raise

    tasks = [asyncio.ensure_future(work()) for _ in range(2)]
    await asyncio.sleep(20.0)
    scene.gate.silence.pause("rollout", lambda: {0, 2})
    await asyncio.sleep(5.0)
    tasks.append(asyncio.ensure_future(work()))
    await asyncio.sleep(95.0)
    assert lost == {1: 30.0}
    scene.gate.silence.go_on("rollout")
    scene.gate.silence.go_on("rollout")
    await asyncio.wait(tasks)
    assert lost == {1: 30.0, 0: 130.0, 2: 150.0}
