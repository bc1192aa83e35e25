"""The gate: who gets a lease and when, what becomes of it, and whose lease was lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrlhf.errors import DataError, LeaseLost, WrongItem
from asyncrlhf.flow.experience import ExperienceQueue
from asyncrlhf.flow.gate import Holder, Popped
from asyncrlhf.flow.prompts import PromptSource, StageQueue
from asyncrlhf.messages import Experience, Prompt, Rollout
from asyncrlhf.testing import FakeRows
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


# ---- admission


@virtual
async def test_nothing_is_granted_before_the_first_weights_are_committed() -> None:
    scene = Scene()
    _, waiting = asks(scene)
    await settle()
    assert not waiting.done()
    scene.gate.publish(0)
    prompt = await waiting
    assert prompt is not None
    assert (prompt.uid, prompt.attempt, prompt.version) == (0, 1, 0)


@virtual
async def test_one_event_admits_everybody_for_whom_there_is_room() -> None:
    """No one-per-wake-up: the publish that makes room for B leases grants B."""
    scene = Scene(B=5)
    tasks = [asks(scene)[1] for _ in range(8)]
    scene.gate.publish(0)
    await settle()
    assert [task.done() for task in tasks] == [True] * 5 + [False] * 3


@virtual
async def test_a_row_that_cannot_be_used_fails_and_the_next_takes_its_place() -> None:
    scene = Scene(rows=FakeRows(20, unusable=0.7, seed=1))
    scene.gate.publish(0)
    prompts = [(await leased(scene))[1] for _ in range(2)]
    failed = [uid for _, uid, _ in scene.kinds("failed")]
    assert failed
    assert sorted(failed + [prompt.uid for prompt in prompts]) == list(range(max(p.uid for p in prompts) + 1))
    assert set(failed) == scene.rows.released


class Breaking(FakeRows):
    """Breaks at a row, as a data source of the user's may."""

    def __init__(self, at: int, where: str) -> None:
        super().__init__(None if where == "has" else 100)
        self._at, self._where = at, where

    def has(self, uid: int) -> bool:
        if self._where == "has" and uid >= self._at:
            raise DataError("the stream broke")
        return super().has(uid)

    def prompt(self, uid: int, attempt: int, version: int) -> Prompt:
        if self._where == "prompt" and uid >= self._at:
            raise ZeroDivisionError("the source broke")
        return super().prompt(uid, attempt, version)


@pytest.mark.parametrize(("where", "error"), [("has", DataError), ("prompt", ZeroDivisionError)])
@virtual
async def test_a_data_source_that_breaks_ends_the_run_whoever_happens_to_ask(where: str, error: Any) -> None:
    """Here it is a time-out that grants the row, in a callback of the event loop that nobody awaits."""
    scene = Scene(B=1, rows=Breaking(1, where), lease_timeout=10.0, counted=False, max_attempts=1)
    scene.gate.publish(0)
    holder, _ = await leased(scene)
    holder.task = None
    trainer = asyncio.ensure_future(scene.gate.pop())
    _, other = asks(scene)
    with pytest.raises(error, match="broke"):
        await trainer
    assert await other is None
    assert scene.gate.ended
    with pytest.raises(error, match="broke"):
        await scene.gate.pop()


@virtual
async def test_the_end_of_data_that_is_not_counted_beforehand_ends_the_run() -> None:
    scene = Scene(rows=1, counted=False)
    scene.gate.publish(0)
    _, prompt = await leased(scene)
    scene.gate.ready(experience(prompt))
    trainer = asyncio.ensure_future(scene.gate.pop())
    await settle()
    assert not trainer.done(), "another prompt may come"
    _, other = asks(scene)
    popped = await trainer
    assert popped is not None
    assert len(popped.experiences) == 1
    scene.gate.applied()
    scene.gate.publish(1)
    assert await scene.gate.pop() is None
    assert scene.ledger.reason == "completed"
    assert await other is None


# ---- how a lease ends


@virtual
async def test_asking_for_the_next_prompt_settles_the_last_as_filtered() -> None:
    scene = Scene()
    scene.gate.publish(0)
    source = aiter(PromptSource(scene.gate))
    first, second = await anext(source), await anext(source)
    assert (first.uid, second.uid) == (0, 1)
    assert scene.kinds("filtered") == [("filtered", 0, 1)]


@virtual
async def test_a_lease_that_was_put_is_not_filtered() -> None:
    scene = Scene()
    scene.gate.publish(0)
    source = aiter(PromptSource(scene.gate))
    scene.gate.ready(experience(await anext(source)))
    await anext(source)
    assert scene.kinds("filtered") == []
    assert scene.ledger.account().counts["ready"] == 1


@virtual
async def test_an_exception_settles_what_its_task_held_as_failed() -> None:
    scene = Scene()
    scene.gate.publish(0)
    await leased(scene)
    task = asyncio.current_task()
    assert task is not None
    assert scene.gate.fail(task, ValueError("no")) is True
    assert scene.kinds("failed") == [("failed", 0, 1)]
    assert scene.gate.last_error == "ValueError: no"
    assert scene.gate.fail(task, ValueError("no")) is False, "it holds nothing any more"


@virtual
async def test_a_late_put_is_refused() -> None:
    scene = Scene()
    scene.gate.publish(0)
    queue = ExperienceQueue(Experience, scene.gate, scene.events.append)

    async def work() -> Prompt:
        holder, prompt = await leased(scene)
        holder.task = None  # as if it did not notice
        return prompt

    prompt = await asyncio.ensure_future(work())
    scene.gate.drop(prompt.uid, 1, "timeout")
    with pytest.raises(LeaseLost, match="uid 0, attempt 1"):
        await queue.put(experience(prompt))
    _, again = await leased(scene)
    assert (again.uid, again.attempt) == (0, 2)
    with pytest.raises(LeaseLost):
        await queue.put(experience(prompt))
    await queue.put(experience(again))
    with pytest.raises(LeaseLost):
        await queue.put(experience(again))
    assert scene.ledger.account().counts["ready"] == 1


@virtual
async def test_a_put_of_another_type_names_both() -> None:
    class Mine(Experience, frozen=True):
        pass

    scene = Scene()
    scene.gate.publish(0)
    _, prompt = await leased(scene)
    with pytest.raises(WrongItem, match="carries Mine, not Experience"):
        await ExperienceQueue(Mine, scene.gate, scene.events.append).put(experience(prompt))  # type: ignore[arg-type]


@virtual
async def test_tokens_that_no_engine_reported_are_counted_at_the_put_but_those_of_an_environment() -> None:
    scene = Scene(B=1)
    scene.gate.publish(0)
    _, prompt = await leased(scene)
    scene.gate.ready(experience(prompt, source="environment"))
    assert scene.ledger.account().tokens.generated == 0
    scene.gate.drop(0, 1, "test")
    _, again = await leased(scene)
    scene.gate.ready(experience(again, tokens=7))
    assert scene.ledger.account().tokens.generated == 7


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
    assert "uid 0 (attempt 2, running), granted 0.0 s ago" in scene.gate.oldest()
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


# ---- the trainer


async def popped_of(scene: Scene) -> Popped:
    popped = await scene.gate.pop()
    assert popped is not None
    return popped


@virtual
async def test_the_trainer_waits_for_whole_batches() -> None:
    scene = Scene(B=2)
    scene.gate.publish(0)
    trainer = asyncio.ensure_future(scene.gate.pop())
    prompts = [(await leased(scene))[1] for _ in range(2)]
    await asyncio.sleep(7)
    scene.gate.ready(experience(prompts[1]))
    await settle()
    assert not trainer.done()
    scene.gate.ready(experience(prompts[0]))
    popped = await trainer
    assert popped is not None
    assert [e.prompt.uid for e in popped.experiences] == [lease.uid for lease in popped.batch.leases] == [0, 1]
    assert popped.waited == 7.0


@virtual
async def test_a_batch_that_no_publish_has_closed_is_an_error_that_says_what_to_write() -> None:
    scene = Scene(B=1)
    scene.gate.publish(0)
    scene.gate.ready(experience((await leased(scene))[1]))
    await popped_of(scene)
    with pytest.raises(RuntimeError, match=r"train step 0 is not closed: `await self\.coordinator\.publish"):
        await scene.gate.pop()
    with pytest.raises(RuntimeError, match="train step 0 is not closed"):
        scene.gate.require_closed()


@virtual
async def test_two_trainers_are_refused() -> None:
    scene = Scene(B=1)
    first = asyncio.ensure_future(scene.gate.pop())
    await settle()
    with pytest.raises(RuntimeError, match="two coroutines pop batches"):
        await scene.gate.pop()
    scene.gate.stop()
    assert await first is None


@virtual
async def test_stopping_wakes_everybody_and_ends_the_iteration() -> None:
    scene = Scene(B=1)
    scene.gate.publish(0)
    _, prompt = await leased(scene)
    scene.gate.ready(experience(prompt))
    await popped_of(scene)
    _, waiting = asks(scene)
    await settle()
    scene.gate.stop()
    assert await waiting is None
    assert [p async for p in PromptSource(scene.gate)] == []
    scene.gate.applied()
    assert await scene.gate.pop() is None
    assert scene.ledger.version == 1, "what was in training has been finished"


@virtual
async def test_waiting_at_the_deadline_ends_after_wait_timeout() -> None:
    """K = D = 1, B = 1: uid 1 of version 0 is due at step 1, and never comes."""
    scene = Scene(B=1, K=1, D=1, at_deadline="wait", wait_timeout=50.0)
    scene.gate.publish(0)
    _, first = await leased(scene)
    holder, _ = await leased(scene)
    holder.task = None
    scene.gate.ready(experience(first))
    await popped_of(scene)
    scene.gate.applied()
    scene.gate.publish(1)
    _, third = await leased(scene)
    scene.gate.ready(experience(third))
    popped = await popped_of(scene)
    assert (now(), popped.waited) == (50.0, 50.0)
    assert [lease.uid for lease in popped.batch.leases] == [third.uid]
    assert scene.kinds("dropped(late)") == [("dropped(late)", 1, 1)]


@virtual
async def test_A9_what_is_left_over_at_a_publish_stays_and_the_rest_is_refilled() -> None:
    """70 are ready, the trainer takes 64 and publishes: 6 are outstanding, and 122 more are admitted."""
    scene = Scene(B=64, K=1, D=1, rows=None)
    scene.gate.publish(0)
    for _ in range(70):
        scene.gate.ready(experience((await leased(scene))[1]))
    assert len((await popped_of(scene)).experiences) == 64
    scene.gate.applied()
    tasks = [asks(scene)[1] for _ in range(200)]
    scene.gate.publish(1)
    await settle()
    assert scene.ledger.account().counts["ready"] == 6
    assert sum(task.done() for task in tasks) == 122
    for task in tasks:
        task.cancel()


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
    assert scene.gate.oldest() == "no lease is live"
    _, first = await leased(scene)
    await asyncio.sleep(12)
    await leased(scene)
    scene.gate.whereabouts = lambda uid, attempt: f"engine {uid}.{attempt}"
    assert scene.gate.oldest() == ("the oldest lease is uid 0 (attempt 1, running at engine 0.1), granted 12.0 s ago")
    scene.gate.score(first)
    assert "scoring" in scene.gate.oldest()
    scene.gate.ready(experience(first))
    assert "uid 1" in scene.gate.oldest()


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
