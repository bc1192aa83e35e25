"""Two processes that move bytes: a torch.distributed group of the two, and a connection for what they say about it.

Each waits for the other, in every call: at most SECONDS (MEETING, to meet), and no longer than the other's process
lives. Whatever then goes wrong is an OSError, an EOFError or a RuntimeError; the pair is of no use any more and is
closed. The group is gloo's, whatever the engines compute on: what it sends lies in host memory, a wait of its ends when
the other is lost, and it takes nothing of a GPU that may be lent out.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist
from torch import Tensor

__all__ = ("SECONDS", "Pair", "Talk", "open_store")

SECONDS = 60.0
"""That a word or a message may take."""
MEETING = 15.0
"""Seconds that the other side may take to join the group, once it has said that it comes."""
KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""Seconds of silence before the first question whether the other machine is there, seconds between questions, and how
many may stay without an answer."""
LONGEST_WORD = 1 << 20
"""Bytes of one thing said; more is not from a peer."""
T = TypeVar("T")
_LENGTH = struct.Struct("<I")


def open_store(host: str, ranks: int, timeout: float = SECONDS) -> tuple[dist.TCPStore, int]:
    """A store at a free port of the machine called `host`, and the port."""
    listener = socket.create_server((host, 0))
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(
        host,
        port,
        ranks,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


class Talk:
    """A connection that carries plain data, length first."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that vanishes says nothing
        for option, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def own_host(self) -> str:
        """The address at which the other side reaches this one."""
        return str(self._connection.getsockname()[0])

    @property
    def peer(self) -> str:
        host, port = self._connection.getpeername()[:2]
        return f"{host}:{port}"

    @property
    def has_ended(self) -> bool:
        """Whether the other side has closed, or is lost; to be asked between an answer and the next question."""
        try:
            self._connection.settimeout(0)
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            with contextlib.suppress(OSError):
                self._connection.settimeout(SECONDS)

    def say(self, word: Any) -> None:
        encoded = msgspec.msgpack.encode(word)
        self._connection.sendall(_LENGTH.pack(len(encoded)) + encoded)

    def hear(self, kind: type[T]) -> T:
        """Raises OSError for what is not of this kind."""
        return self._word(self._read(_LENGTH.size), kind)

    def listen(self, kind: type[T]) -> T | None:
        """What is said next, however long it takes; None if the other side has closed."""
        self._connection.settimeout(None)
        first = self._connection.recv(1)
        self._connection.settimeout(SECONDS)
        return self._word(first + self._read(_LENGTH.size - 1), kind) if first else None

    def close(self) -> None:
        """Also wakes whoever listens in another thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _word(self, length: bytes, kind: type[T]) -> T:
        (count,) = _LENGTH.unpack(length)
        if count > LONGEST_WORD:
            raise OSError(f"{count} bytes were announced at once, and a word has {LONGEST_WORD} at most")
        try:
            return msgspec.msgpack.decode(self._read(count), type=kind)
        except msgspec.MsgspecError as error:
            raise OSError(f"{self.peer} says something else than it should: {error}") from error

    def _read(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            if not (part := self._connection.recv(count - len(found))):
                raise EOFError("the other side has closed its connection")
            found += part
        return bytes(found)


class Pair:
    """One end, number 0 or 1, of messages in host memory."""

    def __init__(self, end: int, store: tuple[str, int], name: str, own_host: str) -> None:
        """Meet the other end, which gives the same `name` and `store`: the host and port of a store, of which this end
        asks over a connection of its own."""
        self._other = 1 - end
        patience = timedelta(seconds=MEETING)
        meeting = dist.PrefixStore(name, dist.TCPStore(*store, is_master=False, timeout=patience))
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout, options._devices = patience, [_gloo_device(os.getpid(), own_host)]
        self._group = gloo(meeting, end, 2, options)

    def send(self, message: Tensor) -> None:
        self._group.send([message], self._other, 0).wait(timedelta(seconds=SECONDS))

    def receive(self, message: Tensor) -> None:
        self._group.recv([message], self._other, 0).wait(timedelta(seconds=SECONDS))

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._group.abort()


@lru_cache(maxsize=8)
def _gloo_device(process: int, host: str) -> Any:
    """One for all pairs of a process: it has a thread of its own. Bound to the address that the other end knows; left
    to itself gloo may find one that no other machine does."""
    return dist.ProcessGroupGloo.create_device(hostname=host)
