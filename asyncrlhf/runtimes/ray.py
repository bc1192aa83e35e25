"""The Ray runtime: every engine an actor, on this machine or on a cluster.

A caller waits on the event loop for its reply, which comes with everything else that the engine says (actor.py); long
columns stay in Ray's object store (lots.py). When
the actor's process ends, for whatever reason, every call in flight raises EngineLost with what Ray knows about it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrlhf.abc import Beside, EngineHandle, EngineSpec, InFlight, OnEvents, Place
from asyncrlhf.errors import ConfigError, EngineLost
from asyncrlhf.runtimes.actor import EngineActor, Said
from asyncrlhf.runtimes.feasible import Ask
from asyncrlhf.runtimes.handle import Calls, started, unsendable
from asyncrlhf.runtimes.logs import last_lines
from asyncrlhf.runtimes.loop import Call, Cancel, Command
from asyncrlhf.runtimes.lots import claim
from asyncrlhf.runtimes.parcel import Parcel, opened, packed
from asyncrlhf.runtimes.reserve import Reservation

__all__ = ("ActorEngine", "RayRuntime")

STARTING = 600.0
"""Seconds that the processes of actors may take to start, all of them, before those that are to be beside them do."""
KNOCK_SECONDS = 5.0
"""That a cluster has to accept a connection."""
KEEP_GPUS = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
"""Set to 0: an actor for which Ray reserves no GPU keeps those that it is told to see."""
RESTARTS_OF_RAY = 0
"""Engines hold state: when and how one is started again is the supervisor's to decide."""


@contextlib.contextmanager
def _signals_kept() -> Generator[None]:
    """Ray handles SIGTERM from its start on, its core by a dump and an end of which the interpreter does not know:
    whoever handled it before does so again."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


class RayRuntime:
    """Spawns ActorEngines. `address`: a cluster to join ("auto", "host:port"); left out: a Ray of this run's own."""

    transport = "asyncrlhf.weights.collective:NodeTransfer"

    def __init__(
        self,
        logs: Path,
        *,
        address: str | None = None,
        pools: Sequence[Ask] = (),
        patience: float = 10.0,
        grace: float = 5.0,
        inline_bytes: int = 65536,
    ) -> None:
        """`logs`: directory for what engines print, where they can see it. `pools`: what the cluster must have, and
        `patience`: seconds that it may take until it is free. `grace`: seconds that closing an engine waits before its
        process is killed. `inline_bytes`: answers and columns that are larger go by reference."""
        self._logs, self._address, self._grace, self._inline_bytes = logs, address, grace, inline_bytes
        self._reserved = Reservation(pools, patience)
        self._waiting: list[tuple[Place, Any]] = []
        self._engines: list[ActorEngine] = []
        self._hosts: dict[tuple[str, int], tuple[str, str | None]] = {}
        """Node and GPUs of the engines that others are beside."""
        self._started = False

    def expect(self, places: Sequence[Place]) -> None:
        """Start or join Ray, reserve what the places need, and start the actors; those beside others once it is known
        where these are, for which this waits STARTING seconds at most. Raises ConfigError if the cluster cannot be
        reached or has too little, and no actor was started then; also if one does not start, or is where another
        cannot be beside it, and `kill` ends those that were started."""
        self._connect()
        self._reserved.take(places)
        self._start(place for place in places if place.beside is None)
        actors = {(place.group, place.rank): actor for place, actor in self._waiting}
        hosts = {(p.beside.group, rank) for p in places if p.beside is not None for rank in p.beside.ranks}
        self._hosts.update(_devices({key: actors[key] for key in sorted(hosts)}))
        self._start(place for place in places if place.beside is not None)

    def _start(self, places: Iterable[Place]) -> None:
        for place in places:
            self._waiting.append((place, self._actor(place)))  # where `kill` finds it if the next one fails

    async def spawn(self, spec: EngineSpec, on_events: OnEvents) -> EngineHandle:
        self._connect()
        found = next((pair for pair in self._waiting if pair[0] == spec.place), None)
        if found is not None:
            self._waiting.remove(found)
        actor = self._actor(spec.place) if found is None else found[1]
        log = self._log(spec.place)
        engine = ActorEngine(spec, actor, log, on_events, grace=self._grace, inline_bytes=self._inline_bytes)
        self._engines.append(engine)
        await started(engine, self._engines)
        return engine

    def in_flight(self) -> list[InFlight]:
        return [call for engine in self._engines for call in engine.calls.in_flight()]

    async def close(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                tasks.create_task(engine.close())

    def kill(self) -> None:
        for _, actor in self._waiting:
            _kill(actor)
        for engine in self._engines:
            _kill(engine.actor)
        self._waiting.clear()
        self._reserved.release()
        if self._started:
            self._started = False
            ray.shutdown()

    def _connect(self) -> None:
        if self._started or ray.is_initialized():  # else it is somebody's who goes on with it
            return
        own: dict[str, Any] = {"address": "local", "include_dashboard": False}
        options = own if self._address is None else {"address": self._address}
        try:
            _knock(self._address)
            with _signals_kept():
                ray.init(
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}},
                    **options,
                )
        except (RayError, OSError, RuntimeError, ValueError) as error:
            where = "cannot be started here" if self._address is None else f'ray.address = "{self._address}"'
            raise ConfigError(f'runtime = "ray": {where}: {str(error).partition(chr(10))[0]}') from error
        self._started = True
        if self._address is not None:
            cluster = ray.get_runtime_context().gcs_address
            print(f'joined the Ray at {cluster} (ray.address = "{self._address}")', file=sys.stderr, flush=True)

    def _actor(self, place: Place) -> Any:
        """An actor that will hold the engine of a place. Without a pool it asks for no logical CPU: engines of one
        machine share its cores, and how many threads each computes with is in its place."""
        self._logs.mkdir(parents=True, exist_ok=True)
        kind: Any = ray.remote(EngineActor)
        options = kind.options(
            max_restarts=RESTARTS_OF_RAY,
            max_concurrency=1000,
            name=f"{place.group}/{place.rank}/{os.urandom(4).hex()}",
            **(self._reserved.options(place) if place.beside is None else self._beside(place.beside)),
        )
        module, log = place.engine.partition(":")[0], str(self._log(place).resolve())
        return options.remote(module, os.getcwd(), [path or os.getcwd() for path in sys.path], log)

    def _beside(self, on: Beside) -> dict[str, Any]:
        """An actor on the node of those ranks that sees their GPUs, in their order. Raises ConfigError if they are on
        several nodes."""
        hosts = [self._hosts[on.group, rank] for rank in on.ranks]
        if len(nodes := {node for node, _ in hosts}) > 1:
            raise ConfigError(
                f"an engine of {len(hosts)} processes is to be on the devices of ranks {on.ranks} of {on.group}, which "
                f"Ray has put on {len(nodes)} nodes; lower its tensor_parallel, or have larger nodes"
            )
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0}
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(hosts[0][0], soft=False)
        seen = [gpus for _, gpus in hosts if gpus is not None]
        if seen:
            devices = ",".join(filter(None, seen))
            options["runtime_env"] = {"env_vars": {"CUDA_VISIBLE_DEVICES": devices, KEEP_GPUS: "0"}}
        return options

    def _log(self, place: Place) -> Path:
        return self._logs / f"{place.group}-{place.rank}.log"


class ActorEngine:
    """One engine in an actor, as its callers see it."""

    def __init__(
        self,
        spec: EngineSpec,
        actor: Any,
        log: Path,
        on_events: OnEvents,
        *,
        grace: float = 5.0,
        inline_bytes: int = 65536,
    ) -> None:
        self.spec, self.actor = spec, actor
        self._inline_bytes = inline_bytes
        self.calls = Calls(spec, on_events)
        self._log, self._grace = log, grace
        self._log_start = log.stat().st_size if log.exists() else 0
        self._loop = asyncio.get_running_loop()
        self._listener: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._pid = self._sent = 0
        self._together: list[Parcel] | None = None
        self.address = ""

    async def start(self) -> None:
        """Send the specification and wait until the engine is built. Raises what its constructor raised."""
        self._listener = asyncio.create_task(self._listen(), name=f"{self.spec.group}/{self.spec.rank} listener")
        with contextlib.suppress(RayActorError):  # the listener says why
            self._pid, self.address = await self.actor.whereabouts.remote()
            await self.actor.start.remote(self.spec, self._inline_bytes)
        await self.calls.ready

    async def call(self, verb: str, *arguments: Any) -> Any:
        key, reply = self.calls.open(verb)
        try:
            self._put(Call(key, verb, arguments))
        except Exception as error:  # whatever the pickling of a user's object raises
            reply.cancel()
            raise unsendable(self.spec, verb, error) from error
        try:
            return await reply
        except asyncio.CancelledError:
            if not self.calls.ended:
                self._put(Cancel(key))
            raise

    def _put(self, command: Command) -> None:
        """Send a command at once, and those that follow before the event loop goes round as one message. Raises
        whatever the pickling of a user's object raises."""
        parcel = packed(command)
        if self._together is not None and isinstance(parcel, bytes):
            self._together.append(parcel)
            return
        self._send_rest()
        self.actor.put.remote(self._sent, [parcel])
        self._sent += 1
        self._together = []
        self._loop.call_soon(self._send_rest)

    def _send_rest(self) -> None:
        parcels, self._together = self._together, None
        if parcels:
            self.actor.put.remote(self._sent, parcels)
            self._sent += len(parcels)

    async def close(self, *, at_once: bool = False) -> None:
        if self.calls.close():
            self.actor.stop.remote()
        if self._listener is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.0 if at_once else self._grace):
                    await self._ended.wait()
            self._listener.cancel()
            await asyncio.wait([self._listener])
        _kill(self.actor)

    async def _listen(self) -> None:
        """Consumes what the engine says until it ends; fails every call then."""
        try:
            while True:
                for said in opened(await self.actor.listen.remote()):
                    claim(self.actor, said.lots)
                    self._loop.call_soon(self._hear, said)  # where an error ends the run
                    if said.kind == "ended":
                        self._ended.set()
                        return
        except Exception as error:  # the actor has ended, what it said is lost, or it cannot be unpickled here
            self._ended.set()
            if not self.calls.ended:
                words = " ".join(f"{type(error).__name__}: {error}".split())
                quoted = last_lines(self._log, self._log_start)
                lost = EngineLost(
                    f"group {self.spec.group!r}, rank {self.spec.rank}: actor of process {self._pid} is lost: {words}. "
                    f"{self._log} says last:{quoted}"
                )
                self._loop.call_soon(self.calls.fail, lost)
                _kill(self.actor)

    def _hear(self, said: Said) -> None:
        match said.kind:
            case "ready":
                self.calls.built()
            case "result":
                self.calls.result(said.key, said.payload)
            case "error":
                self.calls.error(said.key, said.payload)
            case "events":
                self.calls.events(said.payload)
            case "failed":
                self.calls.fail(said.payload)
            case "ended":
                pass


def _knock(address: str | None) -> None:
    """Raises OSError, in seconds instead of minutes, if nobody listens at a "host:port"."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=KNOCK_SECONDS).close()


def _devices(actors: Mapping[tuple[str, int], Any]) -> dict[tuple[str, int], tuple[str, str | None]]:
    """Node and GPUs of actors. Waits until their processes have started; raises ConfigError if one does not."""
    deadline = time.monotonic() + STARTING
    asked = {key: actor.devices.remote() for key, actor in actors.items()}
    found: dict[tuple[str, int], tuple[str, str | None]] = {}
    for (group, rank), devices in asked.items():
        try:
            found[group, rank] = ray.get(devices, timeout=max(0.0, deadline - time.monotonic()))
        except RayError as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(
                f'runtime = "ray": the actor of group {group!r}, rank {rank} has not started, for which it had '
                f"{STARTING:g} s, and others are to be beside it: {words}; see what Ray logs on its node"
            ) from error
    return found


def _kill(actor: Any) -> None:
    if not ray.is_initialized():  # it has ended with its Ray, and ray.kill would join another one
        return
    with contextlib.suppress(RayError, RuntimeError, ValueError):
        ray.kill(actor, no_restart=True)
