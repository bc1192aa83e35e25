"""Weights by a group of each engine and its trainer: who is lost hurts nobody else, and bytes are whole or refused."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from asyncrlhf.errors import ConfigError, GroupError, PublishRefused
from asyncrlhf.messages import WeightHandle
from asyncrlhf.weights import collective, whereabouts
from asyncrlhf.weights.assemble import AssembledTransfer
from asyncrlhf.weights.collective import (
    CollectiveTransfer,
    NodeTransfer,
    _Comes,
    _Intake,
    _Meets,
    is_shared_here,
    parcels,
)
from asyncrlhf.weights.layout import places
from asyncrlhf.weights.pair import Pair, Talk
from asyncrlhf.weights.parts import ASSEMBLED, assembled
from asyncrlhf.weights.shared import SharedMemoryTransfer
from asyncrlhf.weights.torch_layout import fsdp_layout
from tests.integration.reshard_scene import DENSE, held, same_bits
from tests.integration.reshard_scene import weights as model_weights

CAP = 32 << 10


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Ten of 40 kB, each more than a message, and ten that share one."""
    random = torch.Generator().manual_seed(seed)
    large = {f"large{number}": torch.randn(10_000, generator=random) for number in range(10)}
    return large | {f"small{number}": torch.randn(5, generator=random) for number in range(10)}


def require_whole(found: dict[str, torch.Tensor], seed: int) -> None:
    wanted = weights(seed)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def receive(payload: Any) -> dict[str, torch.Tensor]:
    return dict(CollectiveTransfer(CAP).receive(payload))


def test_a_parcel_is_at_most_a_bucket_or_one_tensor_and_none_is_left_out() -> None:
    area = SharedMemoryTransfer().send(0, weights(0))
    found = list(parcels(area["layout"], area["size"], CAP))
    assert [name for _, _, tensors in found for name, *_ in tensors] == list(weights(0))
    assert [len(tensors) for _, _, tensors in found] == [1] * 10 + [10]
    assert all(stop - start <= CAP or len(tensors) == 1 for start, stop, tensors in found)
    assert [start for start, _, _ in found[1:]] == [stop for _, stop, _ in found[:-1]]


def test_engines_of_the_trainers_machine_read_its_memory_and_others_ask_for_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(whereabouts.NODE, "node a")
    sender = NodeTransfer(CAP)
    payload = sender.send(0, weights(0))
    require_whole(dict(NodeTransfer(CAP).receive(payload)), 0)
    assert "by gloo" not in capfd.readouterr().out
    monkeypatch.setenv(whereabouts.NODE, "node b")
    require_whole(dict(NodeTransfer(CAP).receive(payload)), 0)
    assert "by gloo" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("kind", "here", "elsewhere"),
    [(NodeTransfer, True, False), (SharedMemoryTransfer, True, True), (CollectiveTransfer, False, False)],
)
def test_processes_that_an_engine_starts_read_in_place_what_is_in_the_memory_of_their_machine(
    kind: type[Any], here: bool, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(whereabouts.NODE, "node a")
    sender, path = kind(), f"{kind.__module__}:{kind.__name__}"
    layout = fsdp_layout(DENSE, places(1))
    own = sender.send(0, model_weights(DENSE, 0))
    alone = WeightHandle(version=0, checksum=0, changed=True, byte_count=0, transport=path, payload=own)
    parts = replace(alone, transport=ASSEMBLED, payload=assembled(layout, path, 0, [own]))
    assert is_shared_here(alone) is is_shared_here(parts) is here
    monkeypatch.setenv(whereabouts.NODE, "node b")
    assert is_shared_here(alone) is is_shared_here(parts) is elsewhere


def test_a_machine_that_does_not_say_who_shares_memory_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(whereabouts, "BOOT", tmp_path / "boot_id")
    with pytest.raises(ConfigError, match="boot_id"):
        whereabouts.machine()


def test_a_pair_lasts_over_publishes(capfd: pytest.CaptureFixture[str]) -> None:
    sender, receiver = CollectiveTransfer(CAP), CollectiveTransfer(CAP)
    for version in range(3):
        require_whole(dict(receiver.receive(sender.send(version, weights(version)))), version)
    assert capfd.readouterr().out.count("by gloo") == 1


def test_an_engine_that_stops_in_the_middle_may_ask_again(capfd: pytest.CaptureFixture[str]) -> None:
    sender, receiver = CollectiveTransfer(CAP), CollectiveTransfer(CAP)
    payload = sender.send(0, weights(0))
    for _ in range(3):
        next(receiver.receive(payload))
    require_whole(dict(receiver.receive(payload)), 0)
    assert capfd.readouterr().out.count("by gloo") == 1


def test_every_byte_of_every_rank_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, layout = DENSE, fsdp_layout(DENSE, places(3))
    senders = [CollectiveTransfer() for _ in layout.holdings]
    put = [
        sender.send(0, held(holding, model_weights(shape, 1)))
        for sender, holding in zip(senders, layout.holdings, strict=True)
    ]
    asked: list[tuple[int, int]] = []
    real = _Intake.fetch

    def fetch(intake: _Intake, version: int, start: int, stop: int, cap: int) -> torch.Tensor:
        asked.append((id(intake), stop - start))
        return real(intake, version, start, stop, cap)

    monkeypatch.setattr(_Intake, "fetch", fetch)
    path = "asyncrlhf.weights.collective:CollectiveTransfer"
    assert same_bits(dict(AssembledTransfer().receive(assembled(layout, path, 0, put))), model_weights(shape, 1))
    assert len({intake for intake, _ in asked}) == 3
    sizes = [part["area"]["size"] - part["area"]["layout"][0][3] for part in put]
    assert sorted(size for _, size in asked) == sorted(sizes)


def test_n14_an_engine_too_slow_for_its_version_is_told_so_and_takes_the_next_one() -> None:
    sender, receiver = CollectiveTransfer(CAP), CollectiveTransfer(CAP)
    reading = receiver.receive(sender.send(0, weights(0)))
    next(reading)
    sender.send(1, weights(1))
    newest = sender.send(2, weights(2))
    with pytest.raises(PublishRefused, match="version 0 are gone: their trainer has versions 1 and 2"):
        list(reading)
    require_whole(dict(receiver.receive(newest)), 2)


def test_l7_an_engine_that_loses_its_pair_fails_alone_and_then_meets_the_trainer_anew(
    capfd: pytest.CaptureFixture[str],
) -> None:
    sender, lost, other = CollectiveTransfer(CAP), CollectiveTransfer(CAP), CollectiveTransfer(CAP)
    payload = sender.send(0, weights(0))
    reading, others = lost.receive(payload), other.receive(payload)
    received = dict([next(others)])
    next(reading)
    for intake in lost._intakes.values():
        intake.close()
    with pytest.raises(GroupError, match="weights of version 0 have not arrived from 127.0.0.1"):
        list(reading)
    require_whole(received | dict(others), 0)
    require_whole(dict(lost.receive(payload)), 0)
    assert capfd.readouterr().out.count("by gloo") == 3


@pytest.mark.parametrize("word", [b"", b"\xff\xff\xff\xff", b"\x03\x00\x00\x00abc", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_stranger_is_turned_away_and_engines_get_their_weights(word: bytes) -> None:
    sender = CollectiveTransfer(CAP)
    payload = sender.send(0, weights(0))
    with socket.create_connection((payload["outlet"]["host"], payload["outlet"]["port"]), 30) as stranger:
        stranger.sendall(word)
        with contextlib.suppress(OSError):  # it may have been turned away by now
            stranger.shutdown(socket.SHUT_WR)
        require_whole(receive(payload), 0)
        try:
            said = stranger.recv(1)
        except ConnectionError:  # what it has said was not read to the end
            said = b""
        assert said == b""


def test_whoever_does_not_know_the_key_gets_nothing() -> None:
    sender = CollectiveTransfer(CAP)
    payload = sender.send(0, weights(0))
    with pytest.raises(GroupError, match="closed its connection"):
        receive(payload | {"outlet": payload["outlet"] | {"key": bytes(16)}})


def test_one_that_comes_and_never_meets_keeps_nobody_waiting() -> None:
    sender = CollectiveTransfer(CAP)
    payload = sender.send(0, weights(0))
    where = payload["outlet"]
    talk = Talk(socket.create_connection((where["host"], where["port"]), 30))
    talk.say(_Comes(where["key"]))
    assert talk.hear(_Meets).name
    require_whole(receive(payload), 0)
    talk.close()


def test_n14_an_engine_that_stands_still_in_a_message_holds_up_nobody_and_is_told_that_it_is_torn() -> None:
    sender = CollectiveTransfer(CAP)
    where = sender.send(0, weights(0))["outlet"]
    talk = Talk(socket.create_connection((where["host"], where["port"]), 30))
    talk.say(_Comes(where["key"]))
    pair = Pair(1, (where["host"], where["store"]), talk.hear(_Meets).name, talk.own_host)
    talk.say((0, 0, CAP))
    assert talk.hear(str) == ""
    sender.send(1, weights(1))
    require_whole(receive(sender.send(2, weights(2))), 2)
    pair.receive(torch.empty(CAP, dtype=torch.uint8))
    assert "weights of version 0 are gone" in talk.hear(str)
    talk.close()
    pair.close()


def test_n14_what_arrives_is_one_version_however_fast_newer_ones_are_put() -> None:
    sender, count = CollectiveTransfer(CAP), 60

    def model(version: int) -> dict[str, torch.Tensor]:
        return {f"w{number}": torch.full((20_000,), version, dtype=torch.int32) for number in range(4)}

    newest = [sender.send(0, model(0))]
    mixed: list[str] = []
    arrived: list[set[int]] = [set(), set()]
    first = [threading.Event(), threading.Event()]

    def follow(number: int) -> None:
        receiver, version = CollectiveTransfer(CAP), -1
        while version < count - 1:
            payload = newest[0]
            try:
                found = {name: tensor.clone() for name, tensor in receiver.receive(payload)}
            except PublishRefused:
                continue
            version = payload["version"]
            mixed.extend(name for name, tensor in found.items() if not bool((tensor == version).all()))
            arrived[number].add(version)
            first[number].set()

    threads = [threading.Thread(target=follow, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    assert all(event.wait(50) for event in first)
    for version in range(1, count):
        newest[0] = sender.send(version, model(version))
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive()
    assert not mixed
    assert all({0, count - 1} <= versions for versions in arrived)


def put(pipe: Connection) -> None:
    """A trainer's process."""
    sender = CollectiveTransfer(CAP)
    pipe.send(sender.send(0, weights(0)))
    pipe.recv()


def test_l7_a_trainer_that_is_killed_fails_the_engine_that_reads_from_it() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=put, args=(there,), daemon=True)
    process.start()
    try:
        assert here.poll(50)
        receiver = CollectiveTransfer(CAP)
        payload = here.recv()
        reading = receiver.receive(payload)
        next(reading)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(GroupError, match="weights of version 0 have not arrived"):
            list(reading)
        with pytest.raises(GroupError, match="weights of version 0 have not arrived"):
            list(receiver.receive(payload))
    finally:
        process.kill()
        process.join(10)


@pytest.mark.timeout(600)
def test_a_trainer_whose_process_ends_with_live_pairs_ends_well() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=put, args=(there,), daemon=True)
    process.start()
    try:
        assert here.poll(50)
        payload = here.recv()
        receiver = CollectiveTransfer(CAP)
        require_whole(dict(receiver.receive(payload)), 0)
        where = payload["outlet"]
        talk = Talk(socket.create_connection((where["host"], where["port"]), 30))
        talk.say(_Comes(where["key"]))
        assert talk.hear(_Meets).name, "and one that it waits for"
        here.send("end")
        process.join(50)
        assert process.exitcode == 0
        talk.close()
    finally:
        process.kill()
        process.join(10)


def test_a_connection_that_cannot_be_accepted_is_not_the_last_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    accept, refusals = socket.socket.accept, [OSError(errno.EMFILE, os.strerror(errno.EMFILE))] * 2

    def refuse(listener: socket.socket) -> Any:
        if refusals:
            raise refusals.pop()
        return accept(listener)

    monkeypatch.setattr(collective, "PAUSE", 0.01)
    monkeypatch.setattr(socket.socket, "accept", refuse)
    sender = CollectiveTransfer(CAP)
    require_whole(receive(sender.send(0, weights(0))), 0)
    assert capfd.readouterr().err.count("a connection was not accepted: OSError: [Errno 24]") == 2


def test_what_belonged_to_a_trainer_that_is_gone_is_closed_when_the_next_one_is_met() -> None:
    first, second, lives = CollectiveTransfer(CAP), CollectiveTransfer(CAP), CollectiveTransfer(CAP)
    receiver, payloads = CollectiveTransfer(CAP), [sender.send(0, weights(0)) for sender in (first, second, lives)]
    for payload in (payloads[0], payloads[2]):
        require_whole(dict(receiver.receive(payload)), 0)
    assert first._outlet is not None
    first._outlet.close()
    require_whole(dict(receiver.receive(payloads[1])), 0)
    assert list(receiver._intakes) == [payload["outlet"]["key"] for payload in (payloads[2], payloads[1])]
