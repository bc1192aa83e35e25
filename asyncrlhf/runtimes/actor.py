"""The Ray actor round one engine: its event loop talks to the controller while an EngineLoop computes in a thread.

Everything the engine says leaves through `listen`, in order, but for long columns, which stay until they are claimed
(lots.py); `put` only hands commands over.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import os
import platform
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ray

from asyncrlhf.abc import EngineSpec
from asyncrlhf.errors import AsyncRLHFError
from asyncrlhf.messages import EngineEvent
from asyncrlhf.runtimes.garbage import leave_alone
from asyncrlhf.runtimes.loop import Command, Commands, EngineLoop, build, described
from asyncrlhf.runtimes.lots import RayLot, Shelf
from asyncrlhf.runtimes.parcel import Parcel, opened, packed
from asyncrlhf.weights.whereabouts import address, settle

__all__ = ("EngineActor", "Said")


class Said(NamedTuple):
    """One thing that an engine has said."""

    kind: Literal["ready", "result", "error", "events", "failed", "ended"]
    payload: Any = None
    key: int = -1
    lots: Sequence[RayLot] = ()
    """What the payload refers to, to be claimed by whoever hears it."""


class EngineActor:
    """Made by ray.remote. It imports the engine's module while its specification is still on the way."""

    def __init__(self, module: str, directory: str, path: Sequence[str], log: str) -> None:
        """`directory`: where relative paths begin, if it exists here. `path`: where modules are looked for. `log`: a
        file for what it prints, if its directory exists here."""
        if Path(directory).is_dir():
            os.chdir(directory)
        sys.path[:] = path
        if log and Path(log).parent.is_dir():
            with open(log, "ab", buffering=0) as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            print(f"process {os.getpid()} on {platform.node()}", flush=True)
        with contextlib.suppress(Exception):
            faulthandler.enable()
        settle(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())
        os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"  # engines wait for objects, but in a thread of their own
        self._loop = asyncio.get_event_loop()
        self._commands: Commands = Commands()
        self._next, self._early = 0, dict[int, Command]()
        self._said: list[Said] = []
        self._news = asyncio.Event()
        self._shelf = Shelf(0)
        self._imported = threading.Thread(target=_import, args=(module,), daemon=True)
        self._imported.start()

    async def whereabouts(self) -> tuple[int, str]:
        """The number of its process, and the address of its machine in the cluster."""
        return os.getpid(), address()

    async def devices(self) -> tuple[str, str | None]:
        """The node that it is on, and the GPUs that it sees there, as CUDA_VISIBLE_DEVICES names them; None: all."""
        return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES")

    async def start(self, spec: EngineSpec, inline_bytes: int) -> None:
        """Build the engine and run it; `listen` says when it is ready, or why it is not. `inline_bytes`: columns that
        are larger are stored."""
        self._shelf = Shelf(inline_bytes)
        threading.Thread(target=self._main, args=(spec,), name=f"{spec.group}/{spec.rank}", daemon=True).start()

    async def put(self, number: int, commands: Sequence[Parcel]) -> None:
        """Hand commands over. They are numbered, the first of these as given, since Ray may deliver them in another
        order than they were sent."""
        try:
            self._early.update(enumerate(map(opened, commands), number))
        except Exception as error:  # an argument that cannot be unpickled here, and a caller that would wait for ever
            print(f"a message cannot be read: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        while self._next in self._early:
            self._commands.put(self._early.pop(self._next))
            self._next += 1

    async def take(self, numbers: Sequence[int]) -> Any:
        """Lots, one return value each."""
        return self._shelf.take(numbers)

    async def stop(self) -> None:
        """End the engine; "ended" is heard when it is closed."""
        self._commands.put(None)

    async def listen(self) -> Parcel:
        """Waits until the engine has said something; every Said since the last call, in order."""
        await self._news.wait()
        self._news.clear()
        said, self._said = self._said, []
        return packed(said)

    # ---- in the engine's thread, as an Outbox --------------------------------------------------------------------
    def result(self, key: Any, value: Any, events: Sequence[EngineEvent] = ()) -> None:
        stored, lots = self._shelf.result(value)
        self._say(*([self._events(events)] if events else ()), Said("result", stored, key, lots))

    def error(self, key: Any, error: AsyncRLHFError) -> None:
        self._say(Said("error", error, key))

    def events(self, events: Sequence[EngineEvent]) -> None:
        self._say(self._events(events))

    def _events(self, events: Sequence[EngineEvent]) -> Said:
        stored, lots = self._shelf.events(events)
        return Said("events", stored, lots=lots)

    def _main(self, spec: EngineSpec) -> None:
        self._imported.join()
        engine = None
        try:
            engine = built = build(spec)
            leave_alone()
            self._say(Said("ready"))
            EngineLoop(spec, built, self._commands, self).run()
        except BaseException as error:  # the boundary of the thread: everything becomes a message
            self._say(Said("failed", described(spec, error)))
        finally:
            if engine is not None:
                try:
                    engine.close()
                except Exception as error:  # nobody awaits it any more
                    print(f"{spec.group}/{spec.rank} could not be closed: {error!r}", file=sys.stderr, flush=True)
            self._say(Said("ended"))

    def _say(self, *said: Said) -> None:
        self._loop.call_soon_threadsafe(self._hear, said)

    def _hear(self, said: Sequence[Said]) -> None:
        self._said += said
        self._news.set()


def _import(module: str) -> None:
    """An import that fails will fail again, with a better message, when the engine is built."""
    with contextlib.suppress(Exception):
        importlib.import_module(module)
