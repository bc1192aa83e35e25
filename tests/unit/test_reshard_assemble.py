"""Sharded weights read as one checkpoint: exact from every layout, one parameter at a time, and never two versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrlhf.errors import PublishRefused
from asyncrlhf.testing.conformance import WEIGHT_TRANSFER, TransferSubject
from asyncrlhf.weights.assemble import AssembledTransfer
from asyncrlhf.weights.collective import CollectiveTransfer
from asyncrlhf.weights.inproc import InprocTransfer
from asyncrlhf.weights.layout import Holding, Layout, LocalTensor, Place, Slice, places
from asyncrlhf.weights.megatron_layout import MegatronParallel, megatron_layout
from asyncrlhf.weights.parts import assembled, joined
from asyncrlhf.weights.plan import make_plan
from asyncrlhf.weights.shapes import ModelShape, Parameter, Part
from asyncrlhf.weights.shared import SharedMemoryTransfer
from asyncrlhf.weights.torch_layout import checkpoint_layout, fsdp_layout, replicated_layout
from tests.conformance.test_weight_transfer import overwrite, same_bytes, tensors
from tests.integration.reshard_scene import DENSE, MIXTURE, SOURCES, MemoryTaken, ShardTrainer, held, same_bits, weights
from tests.unit.reshard_scene import full, require_exact

TRANSPORTS = {
    "asyncrlhf.weights.inproc:InprocTransfer": InprocTransfer,
    "asyncrlhf.weights.shared:SharedMemoryTransfer": SharedMemoryTransfer,
    "asyncrlhf.weights.collective:CollectiveTransfer": CollectiveTransfer,
}
transports = pytest.mark.parametrize("path", TRANSPORTS)


def layouts() -> list[tuple[ModelShape, Layout]]:
    return [
        *((shape, megatron_layout(shape, parallel, places(4))) for shape, parallel in SOURCES.values()),
        (DENSE, megatron_layout(DENSE, MegatronParallel(pipeline=2, virtual_pipeline=2), places(2))),
        (DENSE, fsdp_layout(DENSE, places(3))),
        (MIXTURE, fsdp_layout(MIXTURE, places(2))),
        (DENSE, replicated_layout(DENSE, places(2))),
    ]


def put(layout: Layout, senders: list[Any], version: int, model: dict[str, Tensor], path: str) -> Any:
    payloads = [s.send(version, held(h, model)) for s, h in zip(senders, layout.holdings, strict=True)]
    return assembled(layout, path, version, payloads)


@transports
def test_a_checkpoint_comes_out_of_every_layout(path: str) -> None:
    for shape, layout in layouts():
        senders = [TRANSPORTS[path]() for _ in layout.holdings]
        payload = put(layout, senders, 3, weights(shape, 1), path)
        assert same_bits(dict(AssembledTransfer().receive(payload)), weights(shape, 1)), layout.name


def test_one_parameter_is_whole_at_a_time() -> None:
    shape, layout = layouts()[0]
    path = "asyncrlhf.weights.shared:SharedMemoryTransfer"
    senders = [SharedMemoryTransfer() for _ in layout.holdings]
    payload = put(layout, senders, 3, weights(shape, 1), path)
    with MemoryTaken() as taken:
        for _ in AssembledTransfer().receive(payload):
            pass
    largest = max(parameter.byte_count for parameter in shape.parameters())
    assert largest <= taken.peak <= 2 * largest


class Watched(InprocTransfer):
    """Counts what has been taken of all that was put."""

    taken = 0

    def receive(self, payload: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().receive(payload):
            Watched.taken += 1
            yield name, tensor


def test_parts_are_taken_as_they_are_needed() -> None:
    """So that of what lies on another machine little is here at a time."""
    shape, parallel = SOURCES["tp2pp2"]
    ranks = ShardTrainer(megatron_layout(shape, parallel, places(4)), f"{__name__}:Watched")
    handle = joined(ranks.export(0, weights(shape, 1)))
    taken: dict[str, int] = {}
    Watched.taken = 0
    for name, _ in AssembledTransfer().receive(handle.payload):
        taken[name] = Watched.taken
    before_layer = [taken[f"model.layers.{layer}.input_layernorm.weight"] for layer in range(shape.layers)]
    whole = max(taken.values())
    assert before_layer == sorted(before_layer)
    assert before_layer[0] < whole / shape.layers
    assert before_layer[2] < 0.75 * whole


@transports
def test_a_version_that_newer_bytes_replace_while_it_is_read_is_refused(path: str) -> None:
    shape, layout = layouts()[0]
    senders = [TRANSPORTS[path]() for _ in layout.holdings]
    receiver = AssembledTransfer()
    reading = receiver.receive(put(layout, senders, 1, weights(shape, 1), path))
    next(reading)
    put(layout, senders, 2, weights(shape, 2), path)
    newest = put(layout, senders, 3, weights(shape, 3), path)
    with pytest.raises(PublishRefused, match="version 1 are gone"):
        list(reading)
    assert same_bits(dict(receiver.receive(newest)), weights(shape, 3))


def test_parts_of_two_versions_and_missing_parts_are_refused() -> None:
    shape, layout = layouts()[0]
    path = "asyncrlhf.weights.inproc:InprocTransfer"
    senders = [InprocTransfer() for _ in layout.holdings]
    payloads = [s.send(1, held(h, weights(shape, 1))) for s, h in zip(senders, layout.holdings, strict=True)]
    with pytest.raises(PublishRefused, match="3 of 4 ranks"):
        assembled(layout, path, 1, payloads[:3])
    newer = senders[2].send(2, held(layout.holdings[2], weights(shape, 2)))
    with pytest.raises(PublishRefused, match="version 1 came with a part of version 2"):
        list(AssembledTransfer().receive(assembled(layout, path, 1, [*payloads[:2], newer, payloads[3]])))
    lacking = held(layout.holdings[0], weights(shape, 1))
    del lacking["0.decoder.layers.0.mlp.linear_fc1.weight"]
    again = [senders[0].send(1, lacking), *payloads[1:]]
    with pytest.raises(PublishRefused, match="gate_proj.weight: rank 0 has put no 0.decoder.layers.0.mlp.linear_fc1"):
        list(AssembledTransfer().receive(assembled(layout, path, 1, again)))
    half = Layout("half", layout.parameters, layout.holdings[::2])
    with pytest.raises(PublishRefused, match="half covers .* of shape"):
        list(AssembledTransfer().receive(assembled(half, path, 1, payloads[::2])))


class OneRank:
    """A trainer of one rank behind the seam of the conformance suite."""

    def __init__(self) -> None:
        self._sender, self._receiver = SharedMemoryTransfer(), AssembledTransfer()

    def send(self, version: int, weights: dict[str, Tensor]) -> Any:
        kinds: dict[torch.dtype, Any] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
        parameters, slices, locals_ = dict[str, Parameter](), list[Slice](), dict[str, LocalTensor]()
        for name, tensor in weights.items():
            shape, dtype = tuple(tensor.shape), kinds[tensor.dtype]
            parameters[name] = Parameter(name=name, shape=shape, dtype=dtype, part=Part.OUTPUT)
            locals_[name] = LocalTensor(shape, dtype)
            slices.append(Slice(name, tuple((0, n) for n in shape), name, (0,) * len(shape)))
        layout = Layout("one", parameters, (Holding(Place(0), locals_, tuple(slices)),))
        payload = self._sender.send(version, weights)
        return assembled(layout, "asyncrlhf.weights.shared:SharedMemoryTransfer", version, [payload])

    def receive(self, payload: Any) -> Any:
        return self._receiver.receive(payload)


@pytest.mark.parametrize("check", WEIGHT_TRANSFER, ids=lambda check: check.__name__)
def test_it_is_a_weight_transfer(check: Any) -> None:
    check(TransferSubject(make=OneRank, weights=tensors, change=overwrite, equal=same_bytes, weight=torch.randn))


def test_a_checkpoint_is_written_by_all_ranks_in_about_equal_parts() -> None:
    from tests.unit.reshard_scene import DENSE as SMALL

    layout = checkpoint_layout(SMALL, places(3), spread=True)
    source = megatron_layout(SMALL, MegatronParallel(tensor=2), places(2))
    plan = make_plan(source, layout, cap=1 << 20)
    require_exact(plan, source, layout, full(SMALL))
    names = [name for holding in layout.holdings for name in holding.tensors]
    assert sorted(names) == sorted(layout.parameters)
    load = [row.received + row.copied for row in plan.traffic()]
    assert max(load) - min(load) <= max(p.byte_count for p in SMALL.parameters())
    everywhere = checkpoint_layout(SMALL, places(2))
    assert all(list(holding.tensors) == list(layout.parameters) for holding in everywhere.holdings)
