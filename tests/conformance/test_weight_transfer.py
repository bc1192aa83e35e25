"""The weight transport suite over those within a process and between processes, for tensors, and the fake one."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from asyncrlhf.errors import PublishRefused
from asyncrlhf.testing import FakeTransfer
from asyncrlhf.testing.conformance import WEIGHT_TRANSFER, TransferSubject
from asyncrlhf.weights.inproc import InprocTransfer
from asyncrlhf.weights.shared import SharedMemoryTransfer

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
    check(TransferSubject(make=transfer, weights=tensors, change=overwrite, equal=same_bytes))


@checks
def test_ray(check: Any, ray_here: None) -> None:
    from asyncrlhf.weights.objects import ObjectTransfer

    check(TransferSubject(make=ObjectTransfer, weights=tensors, change=overwrite, equal=same_bytes, keeps=True))


@checks
def test_fake(check: Any) -> None:
    def weights(seed: int) -> dict[str, Any]:
        return {"w": [Random(seed).random() for _ in range(4)], "b": [float(seed)]}

    def change(held: dict[str, Any]) -> None:
        for values in held.values():
            values[0] += 1.0

    check(TransferSubject(make=FakeTransfer, weights=weights, change=change, equal=lambda a, b: list(a) == list(b)))


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
