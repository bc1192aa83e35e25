"""Algorithm: two coroutines, one for each pool, and what a run is: their TaskGroup and how it ends.

`generate` workers wait at the prompts' gate, `train` waits for batches; neither knows the other. The run ends when
`train` returns; a worker's exception costs its lease, a group's failure costs the run.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

from asyncrlhf.errors import AsyncRLHFError, GroupError, LeaseLost, QueueClosed, SampleError, Stalled
from asyncrlhf.flow.gate import Gate

__all__ = ("Algorithm", "Stage", "cause_of", "gather", "run_algorithm")

A = TypeVar("A")
B = TypeVar("B")
Stage = Callable[[], Awaitable[None]]


async def gather(first: Awaitable[A], second: Awaitable[B]) -> tuple[A, B]:
    """Await both at once; if either fails, the other is cancelled and the failure is raised."""

    async def awaited(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    try:
        async with asyncio.TaskGroup() as tasks:
            a, b = tasks.create_task(awaited(first)), tasks.create_task(awaited(second))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return a.result(), b.result()


class Algorithm(ABC):
    """Subclass it as a keyword-only dataclass whose fields are the groups, queues and settings it needs.

    The launcher reads the fields: a group is built from `[groups.<field>]`, a queue from its type, and everything else
    is a setting that `[settings]` may change.
    """

    state: Any = None
    """What the algorithm learns about itself (an adaptive coefficient, running statistics): a field
    `state: MyState`, a frozen Struct with a default. It is saved with the weights and restored on resume."""

    @abstractmethod
    async def generate(self) -> None:
        """Turn prompts into experience: `async for prompt in self.prompts: ... await self.experience.put(...)`.
        Runs as many workers as leases may be live."""

    @abstractmethod
    async def train(self) -> None:
        """Turn experience into weights: `async for batch in self.experience.batches(): ...` and, last in its body,
        `await self.coordinator.publish(...)`. Runs once."""

    def stages(self) -> Sequence[Stage]:
        """Further coroutines between the two, each run with as many workers as `generate`."""
        return ()


async def run_algorithm(
    algorithm: Algorithm,
    gate: Gate,
    *,
    workers: int,
    services: Sequence[Stage],
    start: Stage,
    finish: Stage,
    close: Sequence[Callable[[], None]],
    stall_timeout: float,
) -> None:
    """Run until `train` returns, then end the workers and services.

    `services` (group actors, coordinator) run beside it; `start` commits the first weights before any lease is
    granted; `finish` awaits what is still under way when training is over; `close` ends the services. Raises what
    ended the run: a RunEnded, a GroupError, or the error of `train`.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_service(service), name=_name(service)) for service in services]
            await start()
            watch = tasks.create_task(_watch(gate, stall_timeout), name="stall watch")
            pool = [
                tasks.create_task(_work(stage, gate), name=f"{_name(stage)}-{number}")
                for stage in (algorithm.generate, *algorithm.stages())
                for number in range(workers)
            ]
            await algorithm.train()
            gate.stop()
            watch.cancel()
            for worker in pool:
                worker.cancel()
            await asyncio.wait(pool)
            await finish()
            for function in close:
                function()
            await asyncio.wait(running)
    except BaseExceptionGroup as errors:
        raise cause_of(errors) from errors


async def _work(stage: Stage, gate: Gate) -> None:
    """One worker. Consumes leases through the iterators of its stage; waits at the gate; ends with the run."""
    task = asyncio.current_task()
    assert task is not None
    idle_returns = 0
    while not gate.ended:
        try:
            await stage()
        except asyncio.CancelledError:
            if not gate.was_lost(task):
                raise
            task.uncancel()
        except (LeaseLost, QueueClosed):
            continue
        except (GroupError, TypeError):
            raise
        except Exception as error:  # the lease's own failure: counted and named, and the worker goes on
            if not gate.fail(task, error):
                raise
        else:
            idle_returns = 0 if gate.filter_held(task) else idle_returns + 1
            if idle_returns > 1000 and not gate.ended:
                raise RuntimeError(
                    f"{_name(stage)}() has returned {idle_returns} times without taking a prompt; loop over "
                    "`async for prompt in self.prompts` until it ends"
                )
            await asyncio.sleep(0)


async def _service(service: Stage) -> None:
    await service()


async def _watch(gate: Gate, stall_timeout: float) -> None:
    """Raises Stalled when the trainer waits and nothing has moved for `stall_timeout` seconds."""
    loop = asyncio.get_running_loop()
    while True:
        since = gate.trainer_waits_since
        quiet = 0.0 if since is None else loop.time() - max(since, gate.last_moved)
        if quiet >= stall_timeout:
            raise Stalled(
                f"train step {gate.ledger.step} has waited for its batch, and nothing has moved for {quiet:.0f} s "
                f"(limits.stall_timeout = {stall_timeout:g} s); {gate.oldest()}"
            )
        await asyncio.sleep(stall_timeout - quiet)


def _name(stage: Stage) -> str:
    return getattr(stage, "__qualname__", repr(stage))


def cause_of(error: BaseException) -> BaseException:
    """Of all the errors in a group the one that names the end best: asyncrlhf's own first, then the first of all."""
    leaves = list(_leaves(error))
    named = [leaf for leaf in leaves if isinstance(leaf, AsyncRLHFError) and not isinstance(leaf, SampleError)]
    return (named or leaves)[0]


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _leaves(inner)
    else:
        yield error
