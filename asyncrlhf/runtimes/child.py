"""The process of one engine: python -m asyncrlhf.runtimes.child SOCKET MODULE NAME.

It imports MODULE (slow: torch) while its parent still prepares, then waits for the engine's specification, builds it,
and runs its EngineLoop. It ends when it is told to, when the engine breaks, or when its parent is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from asyncrlhf.abc import Engine, EngineSpec
from asyncrlhf.errors import AsyncRLHFError, GroupError
from asyncrlhf.messages import EngineEvent
from asyncrlhf.runtimes.frames import LENGTH, Header, Kind, decode, encode, header_length, read_header
from asyncrlhf.runtimes.garbage import leave_alone
from asyncrlhf.runtimes.loop import Call, Cancel, Commands, EngineLoop, build, described

PR_SET_PDEATHSIG = 1
AT_ONCE = 1 << 17
"""Bytes of frames that are joined, so that the parent wakes up once."""


class Channel:
    """The socket to the parent: reads in one thread, writes from any."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._writing = threading.Lock()

    def receive(self) -> tuple[Header, Any]:
        """Waits for the next frame. Raises EOFError when the parent is gone."""
        header = read_header(self._read(header_length(self._read(LENGTH))))
        return header, decode([self._read(size) for size in header.sizes])

    def send(self, kind: Kind, payload: Any = None, *, key: int = -1) -> None:
        self._write(encode(kind, payload, key=key))

    def _write(self, parts: Sequence[bytes | memoryview]) -> None:
        whole = [b"".join(parts)] if sum(map(len, parts)) <= AT_ONCE else parts
        with self._writing:
            for part in whole:
                self._socket.sendall(part)

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self._socket.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]
        return data

    # ---- as an Outbox ------------------------------------------------------------------------------------------
    def result(self, key: Any, value: Any, events: Sequence[EngineEvent] = ()) -> None:
        said = encode("events", list(events)) if events else []
        self._write([*said, *encode("result", value, key=key)])

    def error(self, key: Any, error: AsyncRLHFError) -> None:
        self.send("error", error, key=key)

    def events(self, events: Sequence[EngineEvent]) -> None:
        self.send("events", list(events))


def main(descriptor: int, module: str) -> None:
    os.set_inheritable(descriptor, False)  # a process that a reward function starts must not keep the socket open
    _die_with_parent()
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent's to handle, also when all processes of a job get them
        signal.signal(number, _pass_over)
    channel = Channel(socket.socket(fileno=descriptor))
    commands: Commands = Commands()
    path, spec = _wait_for_spec(channel, module)
    threading.Thread(target=_read, args=(channel, commands), name="reader", daemon=True).start()
    sys.path[:] = path
    engine: Engine | None = None
    code = 0
    try:
        engine = build(spec)
        leave_alone()
        channel.send("ready")
        EngineLoop(spec, engine, commands, channel).run()
    except BaseException as error:  # the boundary of the process: everything becomes a message
        code = 1
        with contextlib.suppress(OSError):  # its log may be on a full disk, which is what it has to say
            traceback.print_exception(error)
        _fail(channel, spec, error)
    finally:
        try:
            if engine is not None:
                engine.close()
        except Exception as error:  # nobody awaits it any more
            with contextlib.suppress(OSError):
                print(f"{spec.group}/{spec.rank} could not be closed: {error!r}", file=sys.stderr)
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)  # threads of users' functions may hang


def _pass_over(number: int, frame: object) -> None:
    """Not SIG_IGN, which what a reward function starts would inherit: nobody could terminate that."""


def _wait_for_spec(channel: Channel, module: str) -> tuple[list[str], EngineSpec]:
    """Import meanwhile; an import that fails will fail again, with a better message, when the engine is built."""
    with contextlib.suppress(Exception):
        importlib.import_module(module)
    try:
        return channel.receive()[1]
    except (EOFError, ConnectionError):
        os._exit(0)


def _read(channel: Channel, commands: Commands) -> None:
    """The reader thread: from frames to commands."""
    while True:
        try:
            header, payload = channel.receive()
        except (EOFError, ConnectionError):
            os._exit(1)  # whatever the engine does: nobody is left to tell
        except Exception as error:  # an argument that cannot be unpickled here
            print(f"a message cannot be read: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        if header.kind == "call":
            commands.put(Call(header.key, header.verb, payload))
        elif header.kind == "cancel":
            commands.put(Cancel(header.key))
        else:
            commands.put(None)


def _fail(channel: Channel, spec: EngineSpec, error: BaseException) -> None:
    failure = described(spec, error)
    with contextlib.suppress(OSError):
        try:
            channel.send("failed", failure)
        except Exception:  # its arguments cannot be pickled
            channel.send("failed", GroupError(str(failure)))


def _die_with_parent() -> None:
    """SIGKILL from the kernel when the parent ends, also while a C extension holds the interpreter (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
