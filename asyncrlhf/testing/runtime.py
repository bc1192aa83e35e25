"""FakeRuntime: engines on the event loop, under its (virtual) clock, with the delays and faults of a plan.

Each engine has one timeline, as if it had a thread: a command takes the time the plan gives it and acts at its end;
between commands a sampler takes a step every `pace` seconds. No task is started, only timers.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from asyncrlhf.abc import Engine, EngineHandle, EngineSpec, GenerateEngine, InFlight, OnEvents, Place
from asyncrlhf.errors import AsyncRLHFError, EngineLost, GroupError
from asyncrlhf.messages import Busy, EngineEvent, Failed, Finished, import_object
from asyncrlhf.runtimes.loop import RETURNS_EVENTS

__all__ = ("FakeHandle", "FakeRuntime", "Fault", "Timing")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with one engine, once, at its first action `at` seconds after the launch or later.

    die: the engine breaks (a Failed event, every call raises GroupError). lost: its process is gone (the same, but
    calls raise EngineLost). hang: it answers nothing more. lose: it does what it is told, but the reply is lost. slow:
    it takes `seconds` more. mute: it breaks without a Failed event.
    """

    group: str = "rollout"
    rank: int = 0
    at: float = 0.0
    """Below 0: during the launch already."""
    kind: Literal["die", "lost", "hang", "lose", "slow", "mute"] = "die"
    verb: str = ""
    """The action it waits for: "prepare", "commit", "add", "abort", "step", ...; empty: whatever comes next."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds that things take. Each is multiplied by a random number in [1, 1 + jitter]."""

    seed: int = 0
    pace: float = 1.0
    """One step of a sampler: a token for each of its running answers."""
    verbs: Mapping[str, float] = field(default_factory=dict[str, float])
    """Per verb, e.g. {"step": 5.0, "commit": 1.0, "spawn": 2.0}; others take no time."""
    latency: float = 0.0
    """A message to an engine or from it; messages of one engine stay in order."""
    jitter: float = 0.0


class FakeRuntime:
    """Spawns any Engine class. `zombies`: engines that were closed work on, and what they say still arrives."""

    transport = "asyncrlhf.testing.trainer:FakeTransfer"

    def __init__(self, timing: Timing | None = None, faults: Sequence[Fault] = (), *, zombies: bool = False) -> None:
        self.timing = timing or Timing()
        self.zombies = zombies
        self.handles: list[FakeHandle] = []
        """Every engine ever spawned, in order."""
        self.late: list[EngineEvent] = []
        """Events that arrived after their engine had been closed."""
        self.launched_at: float | None = 0.0
        """Time that faults count from; None: not launched yet."""
        self._faults = sorted(faults, key=lambda fault: fault.at)
        self._random = Random(self.timing.seed)

    def expect(self, places: Sequence[Place]) -> None:
        """Nothing needs a head start."""

    def kill(self) -> None:
        """Timers end with their loop."""

    async def spawn(self, spec: EngineSpec, on_events: OnEvents) -> EngineHandle:
        seconds = self.seconds("spawn")
        if seconds:
            await asyncio.sleep(seconds)
        handle = FakeHandle(self, spec, on_events)
        self.handles.append(handle)
        return handle

    def in_flight(self) -> list[InFlight]:
        return [call for handle in self.handles for call in handle.in_flight()]

    async def close(self) -> None:
        for handle in self.handles:
            handle.end()

    def engine(self, group: str, rank: int = 0) -> Any:
        """The newest engine of a group and rank itself, to look into."""
        return next(h.engine for h in reversed(self.handles) if (h.spec.group, h.spec.rank) == (group, rank))

    def seconds(self, verb: str) -> float:
        """How long this takes, this time."""
        timing = self.timing
        plain = timing.pace if verb == "token" else timing.latency if verb == "message" else timing.verbs.get(verb, 0.0)
        return plain * (1.0 + timing.jitter * self._random.random()) if plain else 0.0

    def fault(self, spec: EngineSpec, verb: str, now: float) -> Fault | None:
        """The fault that strikes this action, used up by asking."""
        age = -1e-9 if self.launched_at is None else now - self.launched_at
        for fault in self._faults:
            if fault.at > age:
                return None
            if (fault.group, fault.rank) == (spec.group, spec.rank) and fault.verb in ("", verb):
                self._faults.remove(fault)
                return fault
        return None


@dataclass(slots=True, eq=False)
class _Command:
    verb: str
    arguments: tuple[Any, ...]
    reply: asyncio.Future[Any]


class FakeHandle:
    """One engine on the event loop."""

    address = "127.0.0.1"

    def __init__(self, runtime: FakeRuntime, spec: EngineSpec, on_events: OnEvents) -> None:
        """Raises GroupError with the original traceback if the engine cannot be built."""
        self.spec = spec
        self.hung = False
        self._runtime, self._on_events = runtime, on_events
        self._loop = asyncio.get_running_loop()
        self._commands: deque[_Command] = deque()
        self._open: dict[asyncio.Future[Any], InFlight] = {}
        self._failure: AsyncRLHFError | None = None
        self._busy = self._closed = self._ended = False
        self._outbox: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._inbox: deque[_Command] = deque()
        self._arrival = self._departure = 0.0
        try:
            kind = import_object(spec.engine)
            kind.use_threads(spec.threads)
            self.engine: Engine = kind(spec.options)
        except Exception as error:
            raise GroupError(self._described(error)) from error

    async def call(self, verb: str, *arguments: Any) -> Any:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)
        command = _Command(verb, arguments, self._loop.create_future())
        self._open[command.reply] = InFlight(f"{self.spec.group}/{self.spec.rank}", verb, self._loop.time())
        command.reply.add_done_callback(self._open.pop)
        self._inbox.append(command)
        self._arrival = max(self._arrival, self._loop.time() + self._runtime.seconds("message"))
        self._loop.call_at(self._arrival, self._arrive)
        return await command.reply

    async def close(self, *, at_once: bool = False) -> None:
        self._refuse("the engine has been closed")
        if not self._runtime.zombies:
            self.end()
        elif self.hung:
            self.hung = False
            self._turn()

    def in_flight(self) -> list[InFlight]:
        return list(self._open.values())

    def end(self) -> None:
        """Whatever is left of it stops."""
        self._refuse("the runtime has been closed")
        if not self._ended:
            self._ended = True
            try:
                self.engine.close()
            except Exception as error:  # nobody awaits it any more: the loop's handler logs it
                message = f"{self.spec.group}/{self.spec.rank} could not be closed"
                self._loop.call_exception_handler({"message": message, "exception": error})

    def _refuse(self, reason: str) -> None:
        """Every call from now on, for this reason or the one it failed for."""
        self._closed = True
        self._failure = self._failure or GroupError(f"group {self.spec.group!r}, rank {self.spec.rank}: {reason}")
        for reply in list(self._open):
            _set_error(reply, self._failure)

    # ---- the engine's timeline ---------------------------------------------------------------------------------
    def _arrive(self) -> None:
        self._commands.append(self._inbox.popleft())
        if not self._busy:
            self._turn()

    def _turn(self) -> None:
        """Begin the next action."""
        self._busy = False
        if self._ended or self.hung:
            return
        command = self._commands.popleft() if self._commands else None
        works = isinstance(self.engine, GenerateEngine) and self.engine.has_work and not self.engine.still
        if command is None and not works:
            return
        self._busy = True
        verb = "token" if command is None else command.verb
        seconds = self._runtime.seconds(verb)
        fault = self._runtime.fault(self.spec, verb, self._loop.time())
        if fault is not None and fault.kind == "hang":
            self.hung = True
            if command is not None:
                self._commands.appendleft(command)
            return
        if fault is not None and fault.kind in ("die", "lost", "mute"):
            kind = EngineLost if fault.kind == "lost" else GroupError
            self._break(kind(self._described(RuntimeError(f"{fault.kind} at {verb!r}, by the fault plan"))), fault)
            return
        if fault is not None and fault.kind == "slow":
            seconds += fault.seconds
        lost = fault is not None and fault.kind == "lose"
        self._loop.call_later(seconds, self._act, command, lost, self._loop.time())

    def _act(self, command: _Command | None, lost: bool, started: float) -> None:
        """The end of an action: it takes effect, and its answer leaves."""
        if self._ended:
            return
        busy = Busy(start=started, end=self._loop.time(), work=command.verb if command else "generate")
        try:
            if command is None:
                assert isinstance(self.engine, GenerateEngine)
                self._send(self._deliver, [busy, *self.engine.step()])
            else:
                result = getattr(self.engine, command.verb)(*command.arguments)
                self._send(self._deliver, [busy, *(result if command.verb in RETURNS_EVENTS else ())])
                if not lost:
                    self._send(_set_result, command.reply, None if command.verb in RETURNS_EVENTS else result)
        except Exception as error:
            if command is None or not isinstance(error, AsyncRLHFError):
                self._break(GroupError(self._described(error)))
                return
            self._send(_set_error, command.reply, error)
        self._turn()

    def _break(self, error: GroupError, fault: Fault | None = None) -> None:
        self.hung = True
        self._send(self._fail, error, fault is not None and fault.kind == "mute")

    # ---- what it says, in order --------------------------------------------------------------------------------
    def _send(self, function: Callable[..., object], *arguments: object) -> None:
        self._outbox.append((function, arguments))
        self._departure = max(self._departure, self._loop.time() + self._runtime.seconds("message"))
        self._loop.call_at(self._departure, self._depart)

    def _depart(self) -> None:
        function, arguments = self._outbox.popleft()
        function(*arguments)

    def _deliver(self, events: Sequence[EngineEvent]) -> None:
        if self._closed:
            self._runtime.late += [event for event in events if isinstance(event, Finished)]
        self._on_events(events)

    def _fail(self, error: GroupError, mute: bool) -> None:
        if self._failure is not None:
            return
        self._failure = error
        for reply in list(self._open):
            _set_error(reply, error)
        if not mute:
            self._on_events([Failed(reason=str(error), lost=isinstance(error, EngineLost))])

    def _described(self, error: BaseException) -> str:
        trace = "".join(traceback.format_exception(error))
        return f"group {self.spec.group!r}, rank {self.spec.rank}: {type(error).__name__}: {error}\n{trace}"


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_error(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
