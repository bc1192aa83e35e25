"""The local runtime: every engine in a process of its own, started before its model is known. The default.

A caller waits on the event loop for its reply; the process runs an EngineLoop (child.py). The socket to a process that
ends, for whatever reason, ends with it: then every call in flight raises EngineLost with its signal and last words.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrlhf.abc import EngineHandle, EngineSpec, InFlight, OnEvents, Place
from asyncrlhf.errors import EngineLost, SampleError
from asyncrlhf.runtimes.frames import LENGTH, Header, decode, encode, header_length, read_header
from asyncrlhf.runtimes.handle import Calls, started, unsendable
from asyncrlhf.runtimes.logs import last_lines
from asyncrlhf.runtimes.loop import described

__all__ = ("Host", "LocalRuntime", "ProcessEngine")

ARENA_LIMIT = "2"
"""Memory arenas of glibc per process: one engine computes in one thread."""


class LocalRuntime:
    """Spawns ProcessEngines. What they print goes to `logs`/GROUP-RANK.log (left out: to a temporary directory)."""

    transport = "asyncrlhf.weights.shared:SharedMemoryTransfer"

    def __init__(self, logs: Path | None = None, *, grace: float = 5.0) -> None:
        """`grace`: seconds that closing an engine waits before its process is killed."""
        self._scratch = tempfile.TemporaryDirectory(prefix="asyncrlhf-") if logs is None else None
        self._logs = Path(self._scratch.name) if logs is None and self._scratch else logs or Path()
        self._grace = grace
        self._waiting: list[Host] = []
        self._engines: list[ProcessEngine] = []

    def expect(self, places: Sequence[Place]) -> None:
        """Start their processes, which import what they will need. Raises OSError."""
        for place in places:
            self._waiting.append(Host(place, self._logs))

    async def spawn(self, spec: EngineSpec, on_events: OnEvents) -> EngineHandle:
        host = next((host for host in self._waiting if host.place == spec.place), None)
        if host is None:
            host = Host(spec.place, self._logs)
        else:
            self._waiting.remove(host)
        engine = ProcessEngine(spec, host, on_events, grace=self._grace)
        self._engines.append(engine)
        await started(engine, self._engines)
        return engine

    def in_flight(self) -> list[InFlight]:
        return [call for engine in self._engines for call in engine.calls.in_flight()]

    async def close(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                tasks.create_task(engine.close())
        self.kill()

    def kill(self) -> None:
        for host in (*self._waiting, *(engine.host for engine in self._engines)):
            host.kill()
        self._waiting.clear()
        if self._scratch is not None:
            self._scratch.cleanup()


class Host:
    """A process that waits for an engine, or has one."""

    def __init__(self, place: Place, logs: Path) -> None:
        self.place = place
        self._group_ended = False
        self.log = logs / f"{place.group}-{place.rank}.log"
        logs.mkdir(parents=True, exist_ok=True)
        self.socket, theirs = socket.socketpair()
        environment = os.environ | {
            "OMP_NUM_THREADS": str(place.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", ARENA_LIMIT),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "PYTHONUNBUFFERED": "1",
        }
        if place.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
        module = place.engine.partition(":")[0]
        command = [sys.executable, "-m", "asyncrlhf.runtimes.child", str(theirs.fileno()), module]
        command.append(f"{place.group}/{place.rank}")  # for whoever looks at the list of processes
        with theirs, self.log.open("ab") as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # signals to the terminal's foreground are the parent's to handle
            )

    def kill(self) -> None:
        """End it at once with whatever it has started, and reap it."""
        self.socket.close()
        self.kill_group()
        self.process.wait()

    def kill_group(self) -> None:
        """End the process and all others of its group: what a reward function has started, say. Only once after its
        end, when its number may become somebody else's."""
        if self._group_ended:
            return
        self._group_ended = self.process.poll() is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """How the process ended and what it printed last, once it has ended."""
        code = self.process.wait()
        how = f"has ended with exit code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                how = f"was ended by {signal.Signals(-code).name} (signal {-code})"
            if code == -signal.SIGKILL:
                how += "; if nobody did, the system may have run out of memory"
        said = last_lines(self.log, self._log_start)
        return f"process {self.process.pid} {how}. {self.log} says last:{said}"


class ProcessEngine:
    """One engine in another process, as its callers see it."""

    address = "127.0.0.1"

    def __init__(self, spec: EngineSpec, host: Host, on_events: OnEvents, *, grace: float = 5.0) -> None:
        self.spec, self.host = spec, host
        self.calls = Calls(spec, on_events)
        self._grace = grace
        self._loop = asyncio.get_running_loop()
        self._reader_task: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> None:
        """Send the specification and wait until the engine is built. Raises what its constructor raised."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self.host.socket, limit=1 << 22)
        name = f"{self.spec.group}/{self.spec.rank} reader"
        self._reader_task = self._loop.create_task(self._read(reader), name=name)
        self._watch()
        await self._send(encode("spawn", (list(sys.path), self.spec)))
        await self.calls.ready

    async def call(self, verb: str, *arguments: Any) -> Any:
        key, reply = self.calls.open(verb)
        try:
            await self._send(self._encoded(key, verb, arguments))
            return await reply
        except SampleError:
            reply.cancel()
            raise
        except asyncio.CancelledError:
            reply.cancel()
            if not self.calls.ended:
                self._write(encode("cancel", key=key))
            raise

    async def close(self, *, at_once: bool = False) -> None:
        if self.calls.close():
            self._write(encode("close"))
        await self._loop.run_in_executor(None, self._end, 0.0 if at_once else self._grace)
        if self._reader_task is not None:
            self._reader_task.cancel()
            await asyncio.wait([self._reader_task])
        if self._writer is not None:
            self._writer.close()

    def _watch(self) -> None:
        """When the process has ended, end what it has started, which may hold its end of the socket open."""
        if not hasattr(os, "pidfd_open"):
            return
        try:
            descriptor = os.pidfd_open(self.host.process.pid)
        except OSError:
            return

        def ended() -> None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
            self.host.kill_group()

        self._loop.add_reader(descriptor, ended)

    def _encoded(self, key: int, verb: str, arguments: tuple[Any, ...]) -> list[bytes | memoryview]:
        try:
            return encode("call", arguments, key=key, verb=verb)
        except Exception as error:  # whatever the pickling of a user's object raises
            raise unsendable(self.spec, verb, error) from error

    async def _send(self, frame: Sequence[bytes | memoryview]) -> None:
        """Frames leave whole and in order; waits while the process does not read. Never raises for a process that has
        ended: its reader fails the call."""
        assert self._writer is not None
        self._write(frame)
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    def _write(self, frame: Sequence[bytes | memoryview]) -> None:
        """To a process that has ended nothing: uvloop's transports, closed by an earlier write, raise RuntimeError."""
        if self._writer is not None:
            with contextlib.suppress(ConnectionError, RuntimeError):
                self._writer.writelines(frame)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Consumes what the process says until it ends; fails every call then. What it says is acted upon in callbacks
        of the event loop, whose errors end the run."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            try:
                while True:
                    header = read_header(await reader.readexactly(header_length(await reader.readexactly(LENGTH))))
                    payload = decode([await reader.readexactly(size) for size in header.sizes])
                    self._loop.call_soon(self._hear, header, payload)
            except (asyncio.IncompleteReadError, ConnectionError):
                raise
            except Exception as error:  # not a frame, or one that cannot be unpickled here
                self._loop.call_soon(self.calls.fail, described(self.spec, error))
                return
        words = await self._loop.run_in_executor(None, self._last_words)
        if not self.calls.ended:
            lost = EngineLost(f"group {self.spec.group!r}, rank {self.spec.rank}: {words}")
            self._loop.call_soon(self.calls.fail, lost)

    def _hear(self, header: Header, payload: Any) -> None:
        match header.kind:
            case "ready":
                self.calls.built()
            case "result":
                self.calls.result(header.key, payload)
            case "error":
                self.calls.error(header.key, payload)
            case "events":
                self.calls.events(payload)
            case "failed":
                self.calls.fail(payload)
            case _:
                raise ValueError(f"{self.spec.group}/{self.spec.rank} said {header.kind!r}")

    def _last_words(self) -> str:
        """A process that has closed its socket ends, or is ended."""
        self._end(self._grace)
        return self.host.last_words()

    def _end(self, grace: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.host.process.wait(grace)
        self.host.kill_group()
        self.host.process.wait()
