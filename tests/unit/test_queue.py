"""Queue: types named in errors, both sides see close, cancellation loses nothing, and nobody is overtaken."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrlhf.errors import QueueClosed, WrongItem
from asyncrlhf.flow.queue import Queue, QueueStatistics


async def settle() -> None:
    """Let everybody run until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


def started(coroutine: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(coroutine)


def test_a_queue_needs_room_for_one() -> None:
    with pytest.raises(ValueError, match="queue 'answers': capacity must be at least 1, got 0"):
        Queue(0, int, name="answers")


async def test_items_come_out_in_the_order_they_went_in() -> None:
    queue = Queue(3, str)
    for item in "abc":
        await queue.put(item)
    assert [await queue.get() for _ in range(3)] == ["a", "b", "c"]


async def test_an_item_of_another_type_is_refused_with_both_types_and_the_fix() -> None:
    queue: Queue[Any] = Queue(1, int, name="scores")
    with pytest.raises(WrongItem, match="queue 'scores' carries int, not str; put a int or annotate the queue as"):
        await queue.put("7")
    with pytest.raises(TypeError):
        await queue.put("7")
    assert queue.statistics().items == 0


async def test_put_waits_for_room_and_get_for_an_item() -> None:
    queue = Queue(1, int)
    getter = started(queue.get())
    await settle()
    assert not getter.done()
    await queue.put(1)
    assert await getter == 1
    await queue.put(2)
    putter = started(queue.put(3))
    await settle()
    assert not putter.done()
    assert queue.statistics() == QueueStatistics(1, 1, 2, 1, 1, 0)
    assert await queue.get() == 2
    await putter
    assert await queue.get() == 3


async def test_get_all_takes_everything_that_is_there() -> None:
    queue = Queue(3, int)
    waiting = started(queue.get_all())
    await settle()
    assert not waiting.done()
    for item in (1, 2, 3):
        await queue.put(item)
    assert await waiting == [1, 2, 3]
    assert queue.statistics().items == 0


# ---- close


async def test_after_close_putters_are_refused_and_getters_drain_what_is_left() -> None:
    queue = Queue(2, int, name="q")
    await queue.put(1)
    queue.close()
    queue.close()
    with pytest.raises(QueueClosed, match="queue 'q' is closed; nothing more can be put into it"):
        await queue.put(2)
    assert await queue.get() == 1
    with pytest.raises(QueueClosed, match="queue 'q' is closed and empty"):
        await queue.get()
    with pytest.raises(QueueClosed):
        await queue.get_all()


async def test_close_wakes_everybody_who_waits() -> None:
    empty, full = Queue(1, int), Queue(1, int)
    await full.put(0)
    getters = [started(empty.get()) for _ in range(3)]
    putters = [started(full.put(i)) for i in range(3)]
    await settle()
    empty.close()
    full.close()
    results = await asyncio.gather(*getters, *putters, return_exceptions=True)
    assert all(isinstance(result, QueueClosed) for result in results)
    assert await full.get() == 0


async def test_an_item_put_just_before_the_close_reaches_the_getter_that_waited_for_it() -> None:
    queue = Queue(1, int)
    getter = started(queue.get())
    await settle()
    await queue.put(5)
    queue.close()
    assert await getter == 5


async def test_room_that_came_just_before_the_close_lets_nothing_in() -> None:
    queue = Queue(1, int)
    await queue.put(1)
    putter = started(queue.put(2))
    await settle()
    assert await queue.get() == 1
    queue.close()
    with pytest.raises(QueueClosed):
        await putter
    assert queue.statistics().items == 0


# ---- cancellation


async def test_a_cancelled_put_adds_nothing_and_gives_its_turn_to_the_next() -> None:
    queue = Queue(1, int)
    await queue.put(0)
    first, second = started(queue.put(1)), started(queue.put(2))
    await settle()
    assert await queue.get() == 0
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await second
    assert first.cancelled()
    assert await queue.get() == 2
    assert queue.statistics().items == 0


async def test_a_cancelled_get_takes_nothing_and_gives_its_turn_to_the_next() -> None:
    queue = Queue(1, int)
    first, second = started(queue.get()), started(queue.get())
    await settle()
    await queue.put(7)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert first.cancelled()
    assert await second == 7


async def test_waiting_again_and_again_with_a_time_out_leaves_no_trace() -> None:
    queue, full = Queue(1, int), Queue(1, int)
    await full.put(0)
    for _ in range(50):
        for waits in (queue.get, queue.get_all, lambda: full.put(1)):
            task = started(waits())
            await settle()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert queue.statistics().waiting_getters == full.statistics().waiting_putters == 0
    await queue.put(3)
    assert await queue.get() == 3
    assert await full.get_all() == [0]


# ---- fairness


async def test_a_latecomer_does_not_overtake_a_putter_that_waits() -> None:
    queue = Queue(1, str)
    await queue.put("a")
    waiting = [started(queue.put(item)) for item in "bc"]
    await settle()

    async def makes_room_and_takes_it() -> None:
        assert await queue.get() == "a"
        await queue.put("d")

    waiting.append(started(makes_room_and_takes_it()))
    await settle()
    assert [await queue.get() for _ in range(3)] == ["b", "c", "d"]
    await asyncio.gather(*waiting)


async def test_a_latecomer_does_not_overtake_a_getter_that_waits() -> None:
    queue = Queue(2, int)
    first = started(queue.get())
    await settle()

    async def puts_and_takes() -> list[int]:
        await queue.put(1)
        return await queue.get_all()

    second = started(puts_and_takes())
    await settle()
    await queue.put(2)
    assert (await first, await second) == (1, [2])


async def test_many_producers_and_consumers_lose_and_double_nothing() -> None:
    queue, taken = Queue(3, int), list[int]()

    async def produce(start: int) -> None:
        for item in range(start, start + 50):
            await queue.put(item)

    async def consume() -> None:
        while True:
            taken.extend([await queue.get()] if len(taken) % 3 else await queue.get_all())
            await asyncio.sleep(0)

    consumers = [started(consume()) for _ in range(4)]
    await asyncio.gather(*(produce(50 * i) for i in range(4)))
    queue.close()
    assert all(isinstance(r, QueueClosed) for r in await asyncio.gather(*consumers, return_exceptions=True))
    assert sorted(taken) == list(range(200))
    assert queue.statistics()[:4] == (0, 3, 200, 200)
