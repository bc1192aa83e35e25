"""The gate: who gets a lease and when, how it ends, and what the trainer gets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrlhf.errors import DataError, LeaseLost, WrongItem
from asyncrlhf.flow.experience import ExperienceQueue
from asyncrlhf.flow.gate import Holder, Popped
from asyncrlhf.flow.prompts import PromptSource
from asyncrlhf.messages import Experience, Prompt
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


@virtual
async def test_an_experience_with_tokens_that_nobody_sampled_costs_its_lease() -> None:
    scene = Scene()
    scene.gate.publish(0)
    _, prompt = await leased(scene)
    scene.gate.report(0, 1, 0, 0, 3)
    scene.gate.score(prompt)
    with pytest.raises(ValueError, match="holds 4 tokens of version 0, and its lease sampled 3") as caught:
        scene.gate.ready(experience(prompt))
    task = asyncio.current_task()
    assert task is not None
    assert scene.gate.fail(task, caught.value), "the worker still holds it"
    assert scene.kinds("failed") == [("failed", 0, 1)]
    scene.ledger.check()


@virtual
async def test_sampled_tokens_that_are_not_put_are_dropped() -> None:
    scene = Scene()
    scene.gate.publish(0)
    _, prompt = await leased(scene)
    scene.gate.report(0, 1, 0, 0, 4)
    scene.gate.report(0, 1, 1, 0, 6)
    scene.gate.score(prompt)
    scene.gate.ready(experience(prompt))
    tokens = scene.ledger.account().tokens
    assert (tokens.generated, tokens.dropped, tokens.open) == (10, 6, 4)
    scene.ledger.check()


# ---- transactions


def moves_of(scene: Scene) -> list[tuple[int, int]]:
    """(tokens, grants) that are known whenever the gate has moved."""
    moves: list[tuple[int, int]] = []
    scene.gate.on_moved = lambda: moves.append((scene.ledger.account().tokens.generated, scene.gate.granted))
    return moves


@virtual
async def test_what_moves_together_moves_the_gate_once_at_the_end() -> None:
    scene = Scene(B=1)
    scene.gate.publish(0)
    await leased(scene)
    moves = moves_of(scene)
    with scene.gate.together():
        for answer in range(3):
            scene.gate.report(0, 1, answer, 0, 4)
        assert moves == []
    assert moves == [(12, 1)]
    scene.gate.report(0, 1, 0, 0, 4)
    assert moves == [(12, 1), (16, 1)], "what follows stands alone"


@virtual
async def test_the_inner_of_two_transactions_is_part_of_the_outer_one() -> None:
    scene = Scene(B=1)
    scene.gate.publish(0)
    await leased(scene)
    moves = moves_of(scene)
    with scene.gate.together():
        with scene.gate.together():
            scene.gate.report(0, 1, 0, 0, 4)
        with scene.gate.together():
            pass
        assert moves == []
    assert moves == [(4, 1)]


@virtual
async def test_a_transaction_that_breaks_moves_the_gate_all_the_same() -> None:
    """Whoever waits for what it has settled gets it, and the next transaction is one of its own."""
    scene = Scene(B=1)
    scene.gate.publish(0)
    holder, prompt = await leased(scene)
    holder.task = None
    _, waiting = asks(scene)
    await settle()
    moves = moves_of(scene)

    def breaks() -> None:
        with scene.gate.together():
            scene.gate.drop(prompt.uid, prompt.attempt, "test")
            assert moves == []
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        breaks()
    assert len(moves) == 1
    again = await waiting
    assert again is not None
    assert (again.uid, again.attempt) == (0, 2)
    scene.gate.report(0, 2, 0, 0, 4)
    assert len(moves) == 2


@virtual
async def test_a_transaction_in_which_nothing_moves_does_not_move_the_gate() -> None:
    scene = Scene(B=1)
    scene.gate.publish(0)
    moves = moves_of(scene)
    with scene.gate.together():
        pass
    with pytest.raises(ZeroDivisionError), scene.gate.together():
        raise ZeroDivisionError
    assert moves == []


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
