"""What goes on beside training: one thing at a time, and who waits for it."""

from __future__ import annotations

import asyncio

import pytest

from asyncrlhf.control.underway import UnderWay
from tests.unit.virtual import virtual


def under_way() -> UnderWay:
    return UnderWay(asyncio.get_running_loop().time)


@virtual
async def test_whoever_needs_it_over_waits_and_it_knows_for_how_long() -> None:
    beside, seen = under_way(), list[float]()

    async def work() -> None:
        await asyncio.sleep(10.0)
        seen.append(beside.waited())

    async with asyncio.TaskGroup() as tasks:
        await beside.over()
        assert not beside
        beside.begin(tasks, work())
        assert beside
        await asyncio.sleep(7.0)
        assert beside.waited() == 0.0
        await beside.over()
        assert not beside
        beside.begin(tasks, work())
    await beside.over()
    assert seen == [pytest.approx(3.0), 0.0]
    assert beside.waited() == 0.0


@virtual
async def test_there_is_one_at_most() -> None:
    beside = under_way()
    async with asyncio.TaskGroup() as tasks:
        beside.begin(tasks, asyncio.sleep(1.0))
        second = asyncio.sleep(1.0)
        with pytest.raises(AssertionError, match="under way already"):
            beside.begin(tasks, second)
        second.close()


@virtual
async def test_its_failure_reaches_who_waits_and_ends_its_tasks() -> None:
    beside, reached = under_way(), list[str]()

    async def work() -> None:
        await asyncio.sleep(1.0)
        raise RuntimeError("refused")

    async def wait() -> None:
        try:
            await beside.over()
        except RuntimeError as error:
            reached.append(str(error))

    async with asyncio.TaskGroup() as waiting:
        waiting.create_task(wait())
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as tasks:
                beside.begin(tasks, work())
    assert reached == ["refused"]


@virtual
async def test_what_its_tasks_have_raised_can_be_forgotten_also_while_somebody_waits() -> None:
    beside, reached = under_way(), list[str]()

    async def work() -> None:
        await asyncio.sleep(1.0)
        raise RuntimeError("refused")

    async def wait() -> None:
        try:
            await beside.over()
        except RuntimeError as error:
            reached.append(str(error))

    async def fail(waiting: asyncio.TaskGroup) -> None:
        async with asyncio.TaskGroup() as tasks:
            beside.begin(tasks, work())
            waiting.create_task(wait())
            await asyncio.sleep(0.5)
            beside.forget()

    async with asyncio.TaskGroup() as waiting:
        with pytest.raises(ExceptionGroup):
            await fail(waiting)
        await beside.over()
    assert reached == ["refused"]


@virtual
async def test_one_that_was_cut_off_is_over() -> None:
    beside = under_way()

    async def cut_off() -> None:
        async with asyncio.TaskGroup() as tasks:
            beside.begin(tasks, asyncio.sleep(100.0))
            await asyncio.sleep(1.0)
            raise RuntimeError("something else")

    with pytest.raises(ExceptionGroup):
        await cut_off()
    assert not beside
    await beside.over()
