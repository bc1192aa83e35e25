"""A virtual clock for tests of asyncio code: time jumps to the next timer when nothing is ready, and nobody sleeps.

The loop waits for nothing real. Work handed to a thread (`asyncio.to_thread`, `run_in_executor`) would end at no
particular virtual time, so the loop refuses it; sockets, pipes and subprocesses must not be used under it either.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import sysconfig
from collections.abc import Coroutine
from types import FrameType
from typing import Any, NoReturn, TypeVar

__all__ = ("Deadlock", "VirtualClockLoop", "run_virtual")

T = TypeVar("T")
LIBRARY = sysconfig.get_path("stdlib")


class Deadlock(RuntimeError):
    """Nothing is ready, no timer is set, and the main coroutine is unfinished. The message says who waits where."""


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0.0 seconds and moves only when nothing is ready, to exactly the next timer.

    Example: run_virtual(asyncio.sleep(3600)) returns at once, with the clock at 3600.0.
    """

    _scheduled: list[asyncio.TimerHandle]  # the base loop's timers, a heap
    _clock_resolution: float  # the base loop runs timers due before time() + this

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now

    def jump(self) -> None:
        """To the next timer. Raises Deadlock if none is set."""
        if not self._scheduled:
            raise Deadlock(_who_waits(self))
        self._now = max(self._now, self._scheduled[0].when())
        self._clock_resolution = math.ulp(self._now)

    def run_in_executor(self, executor: object, func: object, *args: object) -> NoReturn:
        """Refused: a thread knows nothing of virtual time."""
        name = getattr(func, "__qualname__", repr(func))
        raise RuntimeError(f"{name} cannot run in a thread under a virtual clock; await a fake of it instead")


class _JumpingSelector(selectors.DefaultSelector):
    """Where the loop would sleep, the clock jumps."""

    def __init__(self, loop: VirtualClockLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and (timeout is None or timeout > 0):
            self._loop.jump()
        return ready


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end under a virtual clock. Raises Deadlock, or whatever the coroutine raises."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)


def _who_waits(loop: VirtualClockLoop) -> str:
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    lines = [f"{task.get_name()} ({_name(task)}) waits at {_where(task)}" for task in tasks]
    return "\n  ".join(
        (f"at {loop.time()} s nothing is ready and no timer is set; {len(tasks)} unfinished tasks:", *lines)
    )


def _name(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", "?")


def _where(task: asyncio.Task[Any]) -> str:
    """The innermost line the task waits at; one in the standard library only if its coroutine has no other."""
    library, place = "an unknown line", None
    waiting: Any = task.get_coro()
    while waiting is not None:
        frame: FrameType | None = getattr(waiting, "cr_frame", None) or getattr(waiting, "ag_frame", None)
        if frame is not None:
            file, line = frame.f_code.co_filename, f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if file.startswith(LIBRARY) and "site-packages" not in file:
                library = line
            else:
                place = line
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "ag_await", None)
    return place or library
