"""The weight transport suite over those within a process and between processes, for tensors, and the fake one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from asyncrlhf.errors import PublishRefused
from asyncrlhf.messages import import_object
from asyncrlhf.testing import FakeTransfer
from asyncrlhf.testing.conformance import WEIGHT_TRANSFER, TransferSubject
from asyncrlhf.weights.collective import CollectiveTransfer, NodeTransfer, parcels
from asyncrlhf.weights.inproc import InprocTransfer
from asyncrlhf.weights.shared import SharedMemoryTransfer

SMALL = 32 << 10
"""Bytes of a bucket that some tensors share and others exceed."""
checks = pytest.mark.parametrize("check", WEIGHT_TRANSFER, ids=lambda check: check.__name__)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Large and small, empty, of several types, and one that is not contiguous."""
    random = torch.Generator().manual_seed(seed)
    matrix = torch.randn(37, 53, generator=random)
    return {
        "large": torch.randn(1000, 301, generator=random),
        "transposed": matrix.T,
        "half": torch.randn(65, generator=random).to(torch.bfloat16),
        "scalar": torch.tensor(float(seed)),
        "empty": torch.zeros(0, 4),
        "nan": torch.tensor([float("nan"), -0.0, float("inf"), seed]),
    }


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def overwrite(weights: dict[str, torch.Tensor]) -> None:
    for weight in weights.values():
        weight.add_(1.0)


@checks
@pytest.mark.parametrize("transfer", [InprocTransfer, SharedMemoryTransfer])
def test_torch(check: Any, transfer: Callable[[], Any]) -> None:
    check(TransferSubject(make=transfer, weights=tensors, change=overwrite, equal=same_bytes, weight=torch.randn))


@checks
@pytest.mark.parametrize("transfer", [NodeTransfer, CollectiveTransfer, lambda: CollectiveTransfer(SMALL)])
def test_collective(check: Any, transfer: Callable[[], Any]) -> None:
    def pieces(payload: Any) -> int:
        return len(list(parcels(payload["area"]["layout"], payload["area"]["size"], SMALL)))

    check(
        TransferSubject(
            make=transfer, weights=tensors, change=overwrite, equal=same_bytes, weight=torch.randn, pieces=pieces
        )
    )


@checks
@pytest.mark.parametrize("bucket_bytes", [256 << 20, 4096], ids=["one-bucket", "N14-buckets"])
def test_ray(check: Any, bucket_bytes: int, ray_here: None) -> None:
    from asyncrlhf.weights.objects import ObjectTransfer

    subject = TransferSubject(
        make=lambda: ObjectTransfer(bucket_bytes),
        weights=tensors,
        change=overwrite,
        equal=same_bytes,
        weight=torch.randn,
        pieces=lambda payload: len(payload["buckets"]),
        keeps=True,
    )
    check(subject)


def test_N14_tensors_smaller_and_larger_than_a_bucket_share_it_or_have_one_of_their_own(ray_here: None) -> None:
    from asyncrlhf.weights.objects import ObjectTransfer

    sizes = {"a": 500, "b": 500, "large": 5000, "c": 24, "d": 1000, "e": 1}
    weights = {name: torch.randn(size) for name, size in sizes.items()}
    payload = ObjectTransfer(4096).send(0, weights)
    buckets = [[name for name, _, _ in layout] for layout in payload["layouts"]]
    assert buckets == [["a", "b"], ["large"], ["c", "d"], ["e"]]
    received = dict(ObjectTransfer().receive(payload))
    assert all(same_bytes(received[name], weight) for name, weight in weights.items())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("path", "bucket_bytes"),
    [
        ("asyncrlhf.weights.objects:ObjectTransfer", 4096),
        ("asyncrlhf.weights.collective:CollectiveTransfer", SMALL),
    ],
)
def test_N14_every_receiver_on_another_node_gets_every_byte_although_one_of_them_is_killed(
    ray_here: str, ray_cluster: Any, path: str, bucket_bytes: int
) -> None:
    """L7: each brings the buckets for itself, so nobody waits for one that is gone, and one that comes later is as good
    as any."""
    import ray

    from asyncrlhf.weights.checksum import checksum

    node = ray_cluster.add_node(num_cpus=1, resources={"other node": 4})
    try:
        kind: Any = ray.remote(Receiver)
        options = {"num_cpus": 0, "resources": {"other node": 1}}
        receivers = [kind.options(**options).remote(path, bucket_bytes) for _ in range(3)]
        assert {ray.get(r.node.remote()) for r in receivers} == {node.node_id}
        weights = tensors(3)
        sender = import_object(path)(bucket_bytes)
        payload = sender.send(0, weights)
        assert all(ray.get([r.begin.remote(payload) for r in receivers]))
        ray.kill(receivers[0])
        later = kind.options(**options).remote(path, bucket_bytes)
        assert ray.get(later.begin.remote(payload), timeout=60)
        sums = ray.get([r.finish.remote() for r in (*receivers[1:], later)], timeout=60)
        assert sums == [checksum(weights)] * 3
        overwrite(weights)
        payload = sender.send(1, weights)
        assert all(ray.get([r.begin.remote(payload) for r in receivers[1:]], timeout=60))
        sums = ray.get([r.finish.remote() for r in receivers[1:]], timeout=60)
        assert sums == [checksum(weights)] * 2
    finally:
        ray_cluster.remove_node(node)


class Receiver:
    """Receives some of the weights, and the others when it is told to."""

    def __init__(self, path: str, bucket_bytes: int) -> None:
        self.transfer = import_object(path)(bucket_bytes)

    def node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    def begin(self, payload: Any) -> bool:
        self.reading = self.transfer.receive(payload)
        self.received = dict([next(self.reading)])
        return bool(self.received)

    def finish(self) -> int:
        from asyncrlhf.weights.checksum import checksum

        self.received |= {name: tensor.clone() for name, tensor in self.reading}
        return checksum(self.received)


def test_receiving_copies_nothing(ray_here: None) -> None:
    """Every receiver of one node reads the same memory, at addresses that suit every type."""
    from asyncrlhf.weights.objects import ObjectTransfer

    payload = ObjectTransfer().send(0, tensors(0))
    first, second = (dict(ObjectTransfer().receive(payload)) for _ in range(2))
    assert [t.data_ptr() for t in first.values()] == [t.data_ptr() for t in second.values()]
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in first.values() if tensor.numel())


@checks
def test_fake(check: Any) -> None:
    def weights(seed: int) -> dict[str, Any]:
        return {"w": [Random(seed).random() for _ in range(4)], "b": [float(seed)]}

    def change(held: dict[str, Any]) -> None:
        for values in held.values():
            values[0] += 1.0

    def weight(count: int) -> list[float]:
        return [0.5] * count

    def equal(a: Any, b: Any) -> bool:
        return list(a) == list(b)

    check(TransferSubject(make=FakeTransfer, weights=weights, change=change, equal=equal, weight=weight))


def test_N14_a_receiver_too_slow_for_its_version_is_told_so_and_the_next_one_arrives_whole() -> None:
    sender, receiver = SharedMemoryTransfer(), SharedMemoryTransfer()
    reading = receiver.receive(sender.send(0, tensors(0)))
    name, first = next(reading)
    assert same_bytes(first, tensors(0)[name])
    sender.send(1, tensors(1))
    newest = sender.send(2, tensors(2))  # where version 0 was
    with pytest.raises(PublishRefused, match="holds version 2"):
        list(reading)
    arrived = dict(receiver.receive(newest))
    assert all(same_bytes(arrived[name], weight) for name, weight in tensors(2).items())


def test_N14_weights_that_change_their_shape_move_to_new_memory() -> None:
    sender, receiver = SharedMemoryTransfer(), SharedMemoryTransfer()
    for version in range(4):
        weights = {"w": torch.full((version + 1, 1000), float(version))}
        assert same_bytes(dict(receiver.receive(sender.send(version, weights)))["w"], weights["w"])


def descriptors() -> int:
    """Areas that this process has open."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum("asyncrlhf-weights" in os.readlink(link) for link in links if os.path.lexists(link))


def test_areas_that_were_replaced_are_closed() -> None:
    before, sender = descriptors(), SharedMemoryTransfer()
    for version in range(6):
        sender.send(version, {"w": torch.zeros(version + 1)})
    assert descriptors() <= before + 4, "two areas, and a mapping of each"


def test_a_send_that_fails_leaves_the_version_before_it_and_the_next_one_does_so_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sender, receiver = SharedMemoryTransfer(), SharedMemoryTransfer()
    sender.send(0, {"w": torch.zeros(10)})
    newest = sender.send(1, {"w": torch.ones(10)})
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            sender.send(2, {"w": torch.ones(20)})
    assert bool((dict(receiver.receive(newest))["w"] == 1).all())
    sender.send(3, {"w": torch.ones(20)})
    assert bool((dict(receiver.receive(newest))["w"] == 1).all())
