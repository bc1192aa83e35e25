"""Four processes that move weights between all pairs of layouts, and then lose messages and each other."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from asyncrlhf.errors import PublishRefused
from asyncrlhf.weights import exchange as exchanges
from asyncrlhf.weights.exchange import Exchange, Receipt, join
from asyncrlhf.weights.layout import places
from asyncrlhf.weights.megatron_layout import MegatronParallel, megatron_layout
from asyncrlhf.weights.regions import allocate, dtype_of, holding_of
from asyncrlhf.weights.vllm_layout import VllmParallel, vllm_layout
from tests.integration.reshard_scene import DENSE, RANKS, MemoryTaken, held, pairs, same_bits, weights

CAP = 64 << 10
TIMEOUT = 120.0
SHORT = 3.0


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    found = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return found


def rank_main(rank: int, ports: list[int], answers: Connection) -> None:
    torch.set_num_threads(1)
    try:
        answers.send(("moved", [moved(rank, *pair) for pair in _joined(rank, ports[0])]))
        answers.send(("refused", refusals(rank, ports[1])))
        answers.send(("late", late(rank, ports[2])))
        answers.send(("killed", killed(rank, ports[3], answers)))
    except Exception:
        answers.send(("error", traceback.format_exc()))
    os._exit(0)  # gloo's threads may wait for a rank that is gone


def _joined(rank: int, port: int) -> Any:
    group = join("127.0.0.1", port, rank, RANKS, timeout=TIMEOUT)
    return ((group, *pair) for pair in pairs())


def moved(rank: int, group: Any, name: str, shape: Any, source: Any, destination: Any, _: Any) -> dict[str, Any]:
    """Two versions through one exchange, the second from tensors in another memory order, with rank 2 slow to read."""
    exchange = Exchange(source, destination, rank, group, cap=CAP, timeout=TIMEOUT)
    needs = holding_of(destination, rank)
    staged, exact, peaks, receipts = allocate(needs), True, list[int](), list[Receipt]()
    for version in (1, 2):
        tensors = held(holding_of(source, rank), weights(shape, version), odd=version == 2)
        with MemoryTaken() as taken, slow_reader(rank == 2 and version == 2):
            receipts.append(exchange.run(version, tensors, staged))
        peaks.append(taken.peak)
        model = {
            name: value.to(dtype_of(destination.parameters[name].dtype))
            for name, value in weights(shape, version).items()
        }
        exact = exact and same_bits(staged, held(needs, model))
    return {"pair": name, "exact": exact, "receipts": receipts, "peak": max(peaks)}


@contextlib.contextmanager
def slow_reader(slow: bool) -> Iterator[None]:
    """The other ranks are ahead of this one, with messages that it has not asked for yet."""
    original = exchanges._Message.unpack

    def slowly(message: Any, *args: Any) -> str:
        time.sleep(0.005)
        return original(message, *args)

    if slow:
        exchanges._Message.unpack = slowly
    try:
        yield
    finally:
        exchanges._Message.unpack = original


def _ends() -> tuple[Any, Any]:
    where = places(RANKS)
    return megatron_layout(DENSE, MegatronParallel(tensor=2, pipeline=2), where), vllm_layout(
        DENSE, VllmParallel(tensor=4), where
    )


class Engine:
    """Serves with `live`; what arrives whole takes its place."""

    def __init__(self, rank: int, group: Any, timeout: float) -> None:
        self.rank = rank
        self.source, destination = _ends()
        self.needs = holding_of(destination, rank)
        self.exchange = Exchange(self.source, destination, rank, group, cap=CAP, timeout=timeout)
        self.live, self.staged = held(self.needs, weights(DENSE, 0)), allocate(self.needs)

    def take(self, version: int, *, tensors: Any = None) -> str:
        """Why the version was refused; empty: it is served now."""
        if tensors is None:
            tensors = held(holding_of(self.source, self.rank), weights(DENSE, version))
        try:
            self.exchange.run(version, tensors, self.staged)
        except PublishRefused as error:
            return str(error)
        self.live, self.staged = self.staged, self.live
        return ""

    def serves(self, version: int) -> bool:
        return same_bits(self.live, held(self.needs, weights(DENSE, version)))


def refusals(rank: int, port: int) -> dict[str, Any]:
    """One rank after another spoils a version; the group, one that torch.distributed knows, goes on, and so does
    version 0 until one arrives whole."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT)
    )
    engine = Engine(rank, dist.new_group(), TIMEOUT)
    reasons = {"unready": engine.take(1, tensors={} if rank == 2 else None)}
    original = exchanges._Message.pack

    def flipped(message: Any, *args: Any) -> None:
        original(message, *args)
        message.buffer[5] ^= 1

    if rank == 1:
        exchanges._Message.pack = flipped
    reasons["flipped"] = engine.take(2)
    exchanges._Message.pack = original
    reasons["version"] = engine.take(3 + (rank == 3))
    still = engine.serves(0)
    source, destination = _ends()
    other = Exchange(
        source, destination, rank, engine.exchange._group, cap=CAP * (2 if rank == 0 else 1), timeout=TIMEOUT
    )
    engine.exchange, mine = other, engine.exchange
    reasons["plan"] = engine.take(5)
    engine.exchange = mine
    reasons["whole"] = engine.take(6)
    return {"reasons": reasons, "still": still, "then": engine.serves(6)}


def late(rank: int, port: int) -> dict[str, Any]:
    """Rank 0 is alive and takes no part."""
    engine = Engine(rank, join("127.0.0.1", port, rank, RANKS, timeout=TIMEOUT), SHORT)
    if rank == 0:
        return {"reason": "", "again": "", "still": engine.serves(0)}
    return {"reason": engine.take(1), "again": engine.take(2), "still": engine.serves(0)}


def killed(rank: int, port: int, answers: Connection) -> dict[str, Any]:
    """Rank 3 dies with half of the buckets sent."""
    engine = Engine(rank, join("127.0.0.1", port, rank, RANKS, timeout=TIMEOUT), TIMEOUT)
    original: Callable[..., str] = Exchange._carry
    half = engine.exchange.plan.bucket_count // 2

    def dies(exchange: Exchange, index: int, *args: Any) -> str:
        if index >= half:
            answers.send(("killed", {"reason": "died", "still": True}))
            os._exit(1)
        return original(exchange, index, *args)

    if rank == 3:
        Exchange._carry = dies
    return {"reason": engine.take(1), "still": engine.serves(0)}
