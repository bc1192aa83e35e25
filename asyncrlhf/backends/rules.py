"""Reward functions: the answers of a prompt are scored in parallel, every call within its own time.

`score` waits for its calls; a call waits for one of `concurrency` places and, unless it is async, for one of `threads`.
A hung call keeps its thread, which is replaced, so that the others go on.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from asyncrlhf.abc import RewardEngine
from asyncrlhf.config.bounds import Positive, PositiveAmount, Table
from asyncrlhf.config.load import import_named
from asyncrlhf.errors import ConfigError, SampleError
from asyncrlhf.messages import PerSample, ScoreRequest

__all__ = ("RewardRunner", "RuleEngine", "RuleOptions", "require_function")

GIVEN = ("prompt", "response", "ground_truth")
SPARE = 4
"""Stuck threads that are replaced, as a multiple of `threads`."""


class RuleOptions(Table, frozen=True, kw_only=True):
    """A reward function, and how it is called."""

    function: str
    """Import path "module:function"."""
    timeout: PositiveAmount = 10.0
    """Seconds per call, from the moment it runs."""
    concurrency: Positive = 64
    """Calls running at once."""
    threads: Positive = 8
    """Threads that run a function that is not async."""
    where: str = "groups.reward"
    """The table that errors name."""


class RuleEngine(RewardEngine):
    """A reward function in a thread or a process of its own."""

    Options = RuleOptions

    def __init__(self, options: RuleOptions) -> None:
        """Raises ConfigError for a function that cannot be imported, or not be called."""
        self._runner = RewardRunner(
            options.function, options.timeout, options.concurrency, options.threads, where=options.where
        )

    async def score(self, request: ScoreRequest) -> PerSample:
        rewards = await self._runner.score(
            request.prompt, request.responses, request.ground_truth, request.columns, request.uid
        )
        return tuple(rewards)

    def close(self) -> None:
        self._runner.close()


def require_function(where: str, function: str) -> None:
    """Raises ConfigError for a function that cannot be imported, or not be called with (prompt, response,
    ground_truth)."""
    _parameters(f'{where}.function = "{function}"', import_named(f"{where}.function", function))


class RewardRunner:
    """Calls `function(prompt, response, ground_truth, **columns) -> float`, plain or async; lives on one event loop.

    Columns of the data row go by name: all of them to a function with `**columns`, else those that it names. What
    cannot be interrupted here: an async function that blocks the event loop, and a call that never gives up the
    interpreter lock (some regular expressions). A process that does so is ended from outside (groups/scorers.py).
    """

    def __init__(
        self, function: str, timeout: float, concurrency: int, threads: int, *, where: str = "groups.reward"
    ) -> None:
        """`timeout`: seconds per call from the moment it runs. `where`: the table that errors name. No thread starts
        before the first call. Raises ConfigError for a function that cannot be imported, or not be called with
        (prompt, response, ground_truth)."""
        self._name, self._where = function, where
        self._function: Callable[..., Any] = import_named(f"{where}.function", function)
        self._positional, self._named = _parameters(f'{where}.function = "{function}"', self._function)
        self._timeout = timeout
        self._is_async = any(map(inspect.iscoroutinefunction, (self._function, type(self._function).__call__)))
        self._places = asyncio.Semaphore(concurrency)
        self._threads = _Threads(function, threads)

    @property
    def stuck_count(self) -> int:
        """Threads held by calls that ran out of time and have not come back."""
        return self._threads.stuck_count

    async def score(
        self, prompt_text: str, responses: Sequence[str], ground_truth: Any, columns: Mapping[str, Any], uid: int
    ) -> list[float]:
        """One finite reward per response, in order.

        Raises SampleError, naming `uid` and the answer, when a call raises, runs out of time, or gives anything but a
        finite number; the other calls of this prompt are then given up.
        """
        named = {
            name: value
            for name, value in columns.items()
            if name not in self._positional and (self._named is None or name in self._named)
        }
        try:
            async with asyncio.TaskGroup() as group:
                calls = [
                    group.create_task(
                        self._score_one(
                            f"prompt {uid}, answer {i}: reward {self._name}",
                            lambda text=text: self._function(prompt_text, text, ground_truth, **named),
                        )
                    )
                    for i, text in enumerate(responses)
                ]
        except ExceptionGroup as failed:
            first = next((error for error in failed.exceptions if isinstance(error, SampleError)), None)
            if first is None:
                raise
            raise first from first.__cause__
        return [call.result() for call in calls]

    def close(self) -> None:
        """Take no more calls. Waits for none: the threads of hung ones do not keep the process alive."""
        self._threads.close()

    async def _score_one(self, where: str, call: Callable[[], Any]) -> float:
        """Waits for a place, then for the call."""
        async with self._places:
            try:
                if self._is_async:
                    async with asyncio.timeout(self._timeout):
                        reward = await _guard_async(where, call)
                else:
                    reward = await self._threads.run(lambda: _guard(where, call), self._timeout)
            except TimeoutError:
                raise SampleError(
                    f"{where} ran longer than {self._where}.timeout = {self._timeout:g} s; make it faster or raise it"
                ) from None
            except _Refused as refused:
                raise SampleError(f"{where} was not called: {refused}") from None
        return _number(where, reward)


def _guard(where: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BaseException as error:  # in a thread of ours: neither Ctrl-C nor a cancellation arrives here
        raise SampleError(f"{where} raised {_described(error)}") from error


async def _guard_async(where: str, call: Callable[[], Any]) -> Any:
    try:
        return await call()
    except BaseException as error:  # of a user's function: only a cancellation of this task is not its own
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise SampleError(f"{where} raised {_described(error)}") from error


def _number(where: str, reward: Any) -> float:
    if inspect.iscoroutine(reward):
        reward.close()
        raise SampleError(f"{where} gave a coroutine; declare it `async def` or return a number")
    scalar = isinstance(reward, numbers.Real) or (hasattr(reward, "__float__") and getattr(reward, "ndim", 0) == 0)
    if not scalar:
        raise SampleError(f"{where} gave {reward!r:.80}; return a number")
    try:
        number = float(reward)
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise SampleError(f"{where} gave {reward!r:.80}; return a finite number")
    return number


def _parameters(key: str, function: Any) -> tuple[frozenset[str], frozenset[str] | None]:
    """Names that no column may take, and the columns the function names (None: all)."""
    fix = "write it as def reward(prompt, response, ground_truth, **columns) -> float"
    if inspect.isclass(function) or not callable(function):
        raise ConfigError(f"{key} is a {type(function).__name__}, not a function; {fix}")
    try:
        signature = inspect.signature(function)
        signature.bind_partial(*GIVEN)
    except (TypeError, ValueError) as problem:
        raise ConfigError(f"{key} cannot be called with 3 arguments ({problem}); {fix}") from None
    names = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for place, name in enumerate(GIVEN, 1):
        taken_at = names.index(name) + 1 if name in names else place
        if taken_at != place:
            raise ConfigError(f"{key} takes {name} as argument {taken_at}, but is given it as argument {place}; {fix}")
    taken = frozenset(GIVEN) | frozenset(names[:3])
    parameters = signature.parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return taken, None
    return taken, frozenset(names[3:]) | {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


class _Refused(Exception):
    """No thread will take the call."""


@dataclass(slots=True, eq=False)
class _Job:
    call: Callable[[], Any]
    timeout: float
    result: asyncio.Future[Any]
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class _Worker:
    inbox: SimpleQueue[_Job | None] = field(default_factory=SimpleQueue)
    stuck: bool = False


class _Threads:
    """`size` daemon threads that work; one whose call runs out of time counts as stuck and is replaced.

    All accounting is done on the event loop; a thread only calls and reports. With `SPARE * size` threads stuck no
    more are started, and once none is left that works, calls are refused until one comes back.
    """

    def __init__(self, name: str, size: int) -> None:
        self.stuck_count = 0
        self._name, self._size = name, size
        self._most = size * (1 + SPARE)
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._waiting: deque[_Job] = deque()
        self._closed = False

    async def run(self, call: Callable[[], Any], timeout: float) -> Any:
        """Waits for an idle thread, then for the call, at most `timeout` seconds: then raises TimeoutError.
        Raises _Refused when closed or when every thread is stuck, else what the call raises (a SampleError)."""
        loop = asyncio.get_running_loop()
        if self._closed:
            raise _Refused("the rewards are closed")
        if not self._idle and len(self._workers) - self.stuck_count < self._size:
            self._start_worker(loop)
        job = _Job(call, timeout, loop.create_future())
        self._waiting.append(job)
        self._refuse_if_none_works()
        self._dispatch()
        return await job.result

    def close(self) -> None:
        self._closed = True
        self._refuse_waiting("the rewards are closed")
        for worker in self._workers:
            worker.inbox.put(None)

    def _start_worker(self, loop: asyncio.AbstractEventLoop) -> None:
        if len(self._workers) < self._most:
            worker = _Worker()
            self._workers.add(worker)
            self._idle.append(worker)
            threading.Thread(target=self._work, args=(worker, loop), name=f"reward {self._name}", daemon=True).start()

    def _work(self, worker: _Worker, loop: asyncio.AbstractEventLoop) -> None:
        """The thread: waits for a job, calls, reports to the event loop. Ends with None, or when the loop is closed."""
        while (job := worker.inbox.get()) is not None:
            value, error = None, None
            try:
                value = job.call()
            except SampleError as problem:
                error = problem
            try:
                loop.call_soon_threadsafe(self._finish, worker, job, value, error)
            except RuntimeError:
                return
            del job, value, error

    def _dispatch(self) -> None:
        while self._idle and self._waiting:
            job = self._waiting.popleft()
            if not job.result.done():
                worker = self._idle.pop()
                job.timer = job.result.get_loop().call_later(job.timeout, self._expire, worker, job)
                worker.inbox.put(job)

    def _expire(self, worker: _Worker, job: _Job) -> None:
        worker.stuck = True
        self.stuck_count += 1
        if not job.result.done():
            job.result.set_exception(TimeoutError())
        if not self._closed:
            self._start_worker(job.result.get_loop())
            self._refuse_if_none_works()
            self._dispatch()

    def _finish(self, worker: _Worker, job: _Job, value: Any, error: SampleError | None) -> None:
        if job.timer is not None:
            job.timer.cancel()
        if worker.stuck:
            worker.stuck = False
            self.stuck_count -= 1
        if not job.result.done():
            if error is None:
                job.result.set_result(value)
            else:
                job.result.set_exception(error)
        if len(self._workers) - self.stuck_count > self._size:
            self._workers.discard(worker)
            worker.inbox.put(None)
        elif not self._closed:
            self._idle.append(worker)
            self._dispatch()

    def _refuse_if_none_works(self) -> None:
        if self.stuck_count == self._most:
            self._refuse_waiting(
                f"all {self._most} threads are stuck in calls that ran out of time; bound what the function waits for"
            )

    def _refuse_waiting(self, reason: str) -> None:
        while self._waiting:
            job = self._waiting.popleft()
            if not job.result.done():
                job.result.set_exception(_Refused(reason))


def _described(error: BaseException) -> str:
    """Type, message, and the place in the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    try:
        message = str(error)
    except Exception as problem:  # a user's class
        message = f"its message cannot be had ({type(problem).__name__})"
    return f"{type(error).__name__}: {message}{where}"
