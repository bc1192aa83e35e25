"""Weights between machines by torch.distributed, and by shared memory within one.

The trainer copies a version into one of two areas of shared memory, and goes on training. An engine that follows it
from the same machine reads it there; one on another machine asks for it, bucket by bucket, and a thread beside the
trainer sends from that area, which is host memory, what it asks for. Each engine and each rank of a trainer that puts a
part are a pair (pair.py), which meets when the engine first asks and lasts over publishes: whoever is late or lost
hurts nobody else, and may come again. An engine waits for its trainer, no longer than pair.SECONDS for a message, and
raises GroupError when that is lost: it is fenced, and the run goes on. The trainer waits for no engine.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from asyncrlhf.errors import GroupError, PublishRefused
from asyncrlhf.messages import WeightHandle, import_object
from asyncrlhf.messages.samples import Message
from asyncrlhf.weights.pair import SECONDS, Pair, Talk, open_store
from asyncrlhf.weights.parts import ASSEMBLED
from asyncrlhf.weights.shared import Layout, SharedMemoryTransfer
from asyncrlhf.weights.whereabouts import address, machine

__all__ = ("CollectiveTransfer", "NodeTransfer", "is_shared_here", "parcels")

LOST = (OSError, EOFError, RuntimeError)
ENDING = 10.0
"""Seconds that a trainer's process which ends waits for the threads that send."""
PAUSE = 1.0
"""Seconds after a connection that could not be accepted."""


class CollectiveTransfer:
    """A WeightTransfer whose engines all ask the trainer's process, wherever they are."""

    shares_memory = False

    def __init__(self, bucket_bytes: int = 256 << 20) -> None:
        """`bucket_bytes`: no message is larger, and an engine receives at once so much, or one tensor."""
        self._bucket_bytes = bucket_bytes
        self._memory = SharedMemoryTransfer()
        self._outlet: _Outlet | None = None
        self._intakes: dict[bytes, _Intake] = {}
        weakref.finalize(self, _close_all, self._intakes)

    def send(self, version: int, weights: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Copy `weights` into the older area. Raises OSError when the machine has no memory for it."""
        area = self._memory.send(version, weights)
        if self._outlet is None:
            self._outlet = _Outlet()
            weakref.finalize(self, self._outlet.close)
        self._outlet.offer(version, area)
        return {"version": version, "machine": machine(), "area": area, "outlet": self._outlet.where}

    def receive(self, payload: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """The tensors, to be read at once and not written. Raises PublishRefused if newer bytes took their place, and
        GroupError if the trainer is lost."""
        if self.shares_memory and payload["machine"] == machine():
            yield from self._memory.receive(payload["area"])
            return
        for start, stop, tensors in parcels(payload["area"]["layout"], payload["area"]["size"], self._bucket_bytes):
            found = self._fetch(payload, start, stop)
            for name, dtype, shape, offset in tensors:
                yield name, _view(found[offset - start :], getattr(torch, dtype), tuple(shape))

    def _fetch(self, payload: Mapping[str, Any], start: int, stop: int) -> Tensor:
        """Bytes of an area, uint8 [stop - start], from its trainer; from a new pair if there is none."""
        key = payload["outlet"]["key"]
        try:
            if key not in self._intakes:
                for old in [old for old, intake in self._intakes.items() if intake.has_ended]:
                    self._intakes.pop(old).close()
                self._intakes[key] = _Intake(payload["outlet"])
            return self._intakes[key].fetch(payload["version"], start, stop, self._bucket_bytes)
        except LOST as error:
            if (lost := self._intakes.pop(key, None)) is not None:
                lost.close()
            first = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise GroupError(
                f"weights of version {payload['version']} have not arrived from {payload['outlet']['host']}, where "
                f"each message has {SECONDS:g} s: {first}"
            ) from error


class NodeTransfer(CollectiveTransfer):
    """A WeightTransfer whose engines read the trainer's memory where they are on its machine, and else ask it."""

    shares_memory = True


def is_shared_here(weights: WeightHandle) -> bool:
    """Whether every process of this machine can read these weights in place."""
    path, shards = weights.transport, (weights.payload,)
    if path == ASSEMBLED:
        path, shards = weights.payload["transport"], weights.payload["shards"]
    kind = import_object(path)
    if kind is NodeTransfer:
        return all(shard["machine"] == machine() for shard in shards)
    return kind is SharedMemoryTransfer


class _Comes(Message, frozen=True):
    """What an engine says first."""

    key: bytes


class _Meets(Message, frozen=True):
    """What it is answered: the name of the pair at the store."""

    name: str


class _Outlet:
    """Beside a trainer: gives what it has put to whoever asks and knows the key, each in a thread of its own."""

    def __init__(self) -> None:
        host = address()
        self._listener = socket.create_server((host, 0))
        self._store, port = open_store(host, 1)
        self._key = os.urandom(16)
        self.where = {
            "host": host,
            "port": self._listener.getsockname()[1],
            "store": port,
            "key": self._key,
        }
        self._offered: dict[int, Mapping[str, Any]] = {}
        self._numbers = itertools.count()
        self._served: dict[Talk, threading.Thread] = {}
        self._pairs: set[Pair] = set()
        self._closed = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="weights", daemon=True)
        self._accepting.start()

    def offer(self, version: int, area: Mapping[str, Any]) -> None:
        last = list(self._offered.items())[-1:]
        self._offered = {**dict(last), version: area}

    def close(self) -> None:
        """Wait for the threads, at most ENDING: a process that ends while one is within torch is aborted."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        end = time.monotonic() + ENDING
        self._join(self._accepting, end)
        self._store = None  # nobody meets any more
        served = list(self._served.items())
        for talk, _ in served:
            talk.close()
        for pair in list(self._pairs):
            pair.close()
        for _, thread in served:
            self._join(thread, end)

    def _join(self, thread: threading.Thread, end: float) -> None:
        if thread is not threading.current_thread():  # whose garbage the transfer may have been
            thread.join(max(0.0, end - time.monotonic()))

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                self._begin(self._listener.accept()[0])
            except LOST as error:
                if not self._closed.is_set():
                    _complain("a connection was not accepted", error)
                    self._closed.wait(PAUSE)

    def _begin(self, connection: socket.socket) -> None:
        try:
            talk = Talk(connection)
            thread = threading.Thread(target=self._serve, args=(talk,), name="weights", daemon=True)
            self._served[talk] = thread
            try:
                thread.start()
            except RuntimeError:
                del self._served[talk]
                raise
        except LOST:
            connection.close()
            raise

    def _serve(self, talk: Talk) -> None:
        """One engine, from when it comes until it goes."""
        pair: Pair | None = None
        try:
            comes = talk.hear(_Comes)
            if not hmac.compare_digest(comes.key, self._key):
                return
            name = str(next(self._numbers))
            talk.say(_Meets(name))
            pair = Pair(0, (self.where["host"], self.where["store"]), name, self.where["host"])
            self._pairs.add(pair)
            self._answer(talk, pair)
        except LOST as error:
            if not self._closed.is_set():
                _complain("an engine is lost", error)
        finally:
            talk.close()
            if pair is not None:
                self._pairs.discard(pair)
                pair.close()
            self._served.pop(talk, None)

    def _answer(self, talk: Talk, pair: Pair) -> None:
        """Until the engine goes. What it is told before and after a message is why that is of no use, or ""."""
        reader = SharedMemoryTransfer()

        def there(version: int) -> Tensor:
            return reader.raw(self._offered_as(version))

        while (asked := talk.listen(tuple[int, int, int])) is not None:
            version, start, stop = asked
            try:
                found = there(version)[start:stop]
                talk.say("")
                pair.send(found)
                there(version)
            except PublishRefused as problem:
                talk.say(str(problem))
            else:
                talk.say("")

    def _offered_as(self, version: int) -> Mapping[str, Any]:
        offered = self._offered
        if version not in offered:
            raise PublishRefused(
                f"weights of version {version} are gone: their trainer has versions {' and '.join(map(str, offered))}. "
                "A version can be read until the next but one is published"
            )
        return offered[version]


class _Intake:
    """Beside an engine: its end of the pair with one trainer."""

    def __init__(self, where: Mapping[str, Any]) -> None:
        host = str(where["host"])
        self._talk = Talk(socket.create_connection((host, where["port"]), SECONDS))
        try:
            self._talk.say(_Comes(where["key"]))
            meets = self._talk.hear(_Meets)
            self._pair = Pair(1, (host, where["store"]), meets.name, self._talk.own_host)
        except BaseException:
            self._talk.close()
            raise
        print(f"weights come from {self._talk.peer} by gloo", flush=True)

    @property
    def has_ended(self) -> bool:
        return self._talk.has_ended

    def fetch(self, version: int, start: int, stop: int, cap: int) -> Tensor:
        """uint8 [stop - start], in messages of `cap` bytes at most. Raises PublishRefused for bytes that newer ones
        have replaced."""
        found = torch.empty(stop - start, dtype=torch.uint8)
        for low in range(start, stop, cap):
            high = min(low + cap, stop)
            self._talk.say((version, low, high))
            self._require()
            self._pair.receive(found[low - start : high - start])
            self._require()
        return found

    def close(self) -> None:
        self._talk.close()
        self._pair.close()

    def _require(self) -> None:
        if problem := self._talk.hear(str):
            raise PublishRefused(problem)


def _complain(what: str, error: BaseException) -> None:
    print(f"weights: {what}: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)


def _close_all(intakes: Mapping[bytes, _Intake]) -> None:
    for intake in intakes.values():
        intake.close()


def parcels(layout: Layout, size: int, cap: int) -> Iterator[tuple[int, int, Layout]]:
    """(first byte, byte after the last, tensors) of what is received at once: at most `cap` bytes, or one tensor.
    `size`: of all of it."""
    ends = [*(entry[3] for entry in layout[1:]), size]
    taken: list[Any] = []
    for entry, end in zip(layout, ends, strict=True):
        if taken and end - taken[0][3] > cap:
            yield taken[0][3], entry[3], tuple(taken)
            taken = []
        taken.append(entry)
    if taken:
        yield taken[0][3], size, tuple(taken)


def _view(found: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel()
    return found[: count * dtype.itemsize].view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
