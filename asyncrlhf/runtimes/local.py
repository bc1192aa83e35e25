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

from asyncrlhf.abc import EngineHandle, EngineSpec, OnEvents, Place
from asyncrlhf.errors import ConfigError, EngineLost
from asyncrlhf.runtimes.frames import LENGTH, decode, encode, header_length, read_header
from asyncrlhf.runtimes.handle import Calls, require_not_configuration
from asyncrlhf.runtimes.logs import last_lines

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
        self._waiting += [Host(place, self._logs) for place in places]

    async def spawn(self, spec: EngineSpec, on_events: OnEvents) -> EngineHandle:
        host = next((host for host in self._waiting if host.place == spec.place), None)
        if host is None:
            host = Host(spec.place, self._logs)
        else:
            self._waiting.remove(host)
        engine = ProcessEngine(spec, host, on_events, grace=self._grace)
        self._engines.append(engine)
        try:
            await engine.start()
        except asyncio.CancelledError:
            await engine.close()
            raise
        except ConfigError as error:
            require_not_configuration(spec, error, (e.spec for e in self._engines if e.calls.was_built))
            raise
        return engine

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
        """End it at once, and reap it."""
        self.socket.close()
        if self.process.returncode is None:
            self.process.kill()
            self.process.wait()

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

    def __init__(self, spec: EngineSpec, host: Host, on_events: OnEvents, *, grace: float = 5.0) -> None:
        self.spec, self.host = spec, host
        self.calls = Calls(spec, on_events)
        self._grace = grace
        self._reader_task: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._room = asyncio.Lock()

    async def start(self) -> None:
        """Send the specification and wait until the engine is built. Raises what its constructor raised."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self.host.socket, limit=1 << 22)
        self._reader_task = asyncio.create_task(self._read(reader), name=f"{self.spec.group}/{self.spec.rank} reader")
        await self._send(encode("spawn", (list(sys.path), self.spec)))
        await self.calls.ready

    async def call(self, verb: str, *arguments: Any) -> Any:
        frame = encode("call", arguments, key=(opened := self.calls.open())[0], verb=verb)
        key, reply = opened
        await self._send(frame)
        try:
            return await reply
        except asyncio.CancelledError:
            if not self.calls.ended and self._writer is not None:
                self._writer.writelines(encode("cancel", key=key))
            raise

    async def close(self, *, at_once: bool = False) -> None:
        if self.calls.close() and self._writer is not None:
            with contextlib.suppress(ConnectionError, RuntimeError):
                self._writer.writelines(encode("close"))
        loop = asyncio.get_running_loop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await loop.run_in_executor(None, self.host.process.wait, 0.0 if at_once else self._grace)
        if self.host.process.returncode is None:
            self.host.process.kill()
            await loop.run_in_executor(None, self.host.process.wait)
        if self._reader_task is not None:
            self._reader_task.cancel()
            await asyncio.wait([self._reader_task])
        if self._writer is not None:
            self._writer.close()

    async def _send(self, frame: Sequence[bytes | memoryview]) -> None:
        """Frames leave whole and in order; waits while the process does not read. Never raises for a process that has
        ended: its reader fails the call."""
        assert self._writer is not None
        with contextlib.suppress(ConnectionError):
            self._writer.writelines(frame)
            await self._writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Consumes what the process says until it ends; fails every call then."""
        try:
            while True:
                header = read_header(await reader.readexactly(header_length(await reader.readexactly(LENGTH))))
                payload = decode([await reader.readexactly(size) for size in header.sizes])
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
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        words = await asyncio.get_running_loop().run_in_executor(None, self._end)
        if not self.calls.ended:
            self.calls.fail(EngineLost(f"group {self.spec.group!r}, rank {self.spec.rank}: {words}"))

    def _end(self) -> str:
        """A process that has closed its socket ends, or is ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.host.process.wait(self._grace)
        if self.host.process.returncode is None:
            self.host.process.kill()
        return self.host.last_words()
