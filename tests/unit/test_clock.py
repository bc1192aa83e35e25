"""The virtual clock: exact jumps, deadlocks that say who waits where, and no threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from asyncrlhf.testing.clock import Deadlock, run_virtual


def now() -> float:
    return asyncio.get_running_loop().time()


def test_time_jumps_to_the_next_timer_and_nobody_sleeps() -> None:
    async def main() -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []

        async def sleeper(name: str, delay: float) -> None:
            await asyncio.sleep(delay)
            seen.append((name, now()))

        async with asyncio.TaskGroup() as group:
            group.create_task(sleeper("year", 31_536_000.0))
            group.create_task(sleeper("tenth", 0.1))
            group.create_task(sleeper("three tenths", 0.3))
        return seen

    begun = time.monotonic()
    assert run_virtual(main()) == [("tenth", 0.1), ("three tenths", 0.3), ("year", 31_536_000.0)]
    assert time.monotonic() - begun < 60.0


def test_time_stands_still_while_anything_is_ready() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return now()

    assert run_virtual(main()) == 0.0


def test_timeouts_fire_at_their_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.Event().wait()
        return now()

    assert run_virtual(main()) == 60.0


def test_a_cancelled_timer_is_not_jumped_to() -> None:
    async def main() -> float:
        async with asyncio.timeout(3600):
            await asyncio.sleep(1)
        await asyncio.sleep(1)
        return now()

    assert run_virtual(main()) == 2.0


async def takes_from(queue: asyncio.Queue[int]) -> int:
    return await queue.get()  # waits here


async def numbers(queue: asyncio.Queue[int]) -> AsyncIterator[int]:
    while True:
        yield await queue.get()


async def iterates(queue: asyncio.Queue[int]) -> None:
    async for _ in numbers(queue):  # iterates here
        pass


def line_of(comment: str) -> int:
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, start=1) if line.rstrip().endswith(f"# {comment}"))


def test_a_deadlock_names_every_pending_task_and_the_line_it_waits_at() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            await asyncio.sleep(2)
            group.create_task(takes_from(asyncio.Queue()), name="consumer")
            group.create_task(iterates(asyncio.Queue()), name="trainer")
            group.create_task(asyncio.Event().wait(), name="library only")

    with pytest.raises(Deadlock) as caught:
        run_virtual(main())
    message = str(caught.value)
    assert "at 2.0 s nothing is ready and no timer is set; 4 unfinished tasks" in message
    assert f"consumer (takes_from) waits at {__file__}:{line_of('waits here')}" in message
    assert f"trainer (iterates) waits at {__file__}:{line_of('iterates here')}" in message
    assert "library only (Event.wait) waits at " in message


def test_a_deadlock_cancels_the_tasks_so_their_cleanup_runs() -> None:
    cleaned: list[str] = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            cleaned.append("main")

    with pytest.raises(Deadlock):
        run_virtual(main())
    assert cleaned == ["main"]


def test_work_in_threads_is_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(time.sleep, 0)

    with pytest.raises(RuntimeError, match="cannot run in a thread under a virtual clock"):
        run_virtual(main())


def test_the_result_and_the_exception_of_the_coroutine_come_through() -> None:
    async def fails() -> None:
        await asyncio.sleep(5)
        raise KeyError("mine")

    assert run_virtual(asyncio.sleep(7, "done")) == "done"
    with pytest.raises(KeyError, match="mine"):
        run_virtual(fails())
