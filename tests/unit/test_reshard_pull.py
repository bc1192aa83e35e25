"""Reading slices where the trainer's ranks have put them: in one process and through shared memory, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from torch import Tensor

from asyncrlhf.errors import PublishRefused
from asyncrlhf.weights.inproc import InprocTransfer
from asyncrlhf.weights.layout import Layout, places
from asyncrlhf.weights.megatron_layout import MegatronParallel, megatron_layout
from asyncrlhf.weights.plan import make_plan
from asyncrlhf.weights.pull import pull, sources_of
from asyncrlhf.weights.regions import allocate, dtype_of, holding_of
from asyncrlhf.weights.shared import SharedMemoryTransfer
from asyncrlhf.weights.vllm_layout import VllmParallel, vllm_layout
from tests.integration.reshard_scene import DENSE, held, pairs, same_bits, weights

CAP = 1 << 20
transfers = pytest.mark.parametrize("make", [InprocTransfer, SharedMemoryTransfer])


def put(source: Layout, senders: dict[int, Any], version: int, model: dict[str, Tensor]) -> dict[int, Any]:
    return {
        holding.place.rank: senders[holding.place.rank].send(version, held(holding, model))
        for holding in source.holdings
    }


@transfers
def test_N14_every_pair_of_layouts_is_exact_and_reads_only_its_slices(make: Callable[[], Any]) -> None:
    for name, shape, source, destination, _ in pairs():
        plan = make_plan(source, destination, cap=CAP)
        senders = {holding.place.rank: make() for holding in source.holdings}
        model = weights(shape, 1)
        payloads = put(source, senders, 1, model)
        converted = {key: value.to(dtype_of(destination.parameters[key].dtype)) for key, value in model.items()}
        for row in plan.traffic():
            needs = holding_of(destination, row.rank)
            staged = allocate(needs)
            mine = {rank: payloads[rank] for rank in sources_of(plan, row.rank)}
            receipt = pull(plan, row.rank, 1, mine, make(), staged)
            assert receipt.byte_count == row.received + row.copied
            assert same_bits(staged, held(needs, converted)), f"{name}, rank {row.rank}"


def ends() -> tuple[Layout, Layout]:
    return (
        megatron_layout(DENSE, MegatronParallel(tensor=2), places(2)),
        vllm_layout(DENSE, VllmParallel(), places(1, first=2)),
    )


@transfers
def test_N14_who_reads_too_late_is_refused_and_the_next_version_is_whole(make: Callable[[], Any]) -> None:
    source, destination = ends()
    plan, senders, receiver = make_plan(source, destination, cap=CAP), {0: make(), 1: make()}, make()
    needs = holding_of(destination, 2)
    live, staged = held(needs, weights(DENSE, 0)), allocate(needs)
    first = put(source, senders, 1, weights(DENSE, 1))
    put(source, senders, 2, weights(DENSE, 2))
    newest = put(source, senders, 3, weights(DENSE, 3))
    with pytest.raises(PublishRefused, match="version 1"):
        pull(plan, 2, 1, first, receiver, staged)
    assert same_bits(live, held(needs, weights(DENSE, 0)))
    pull(plan, 2, 3, newest, receiver, staged)
    assert same_bits(staged, held(needs, weights(DENSE, 3)))


class Overwritten(SharedMemoryTransfer):
    """Its memory is written anew as soon as the last tensor was taken."""

    def receive(self, payload: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        found = dict(super().receive(payload))
        yield from found.items()
        for tensor in found.values():
            tensor.zero_()


def test_all_is_read_before_a_transport_says_that_it_was_there_to_the_last() -> None:
    source, destination = ends()
    senders = {0: Overwritten(), 1: Overwritten()}
    needs = holding_of(destination, 2)
    staged, model = allocate(needs), weights(DENSE, 1)
    pull(make_plan(source, destination, cap=CAP), 2, 1, put(source, senders, 1, model), Overwritten(), staged)
    assert same_bits(staged, held(needs, model))


def test_what_was_not_put_is_named() -> None:
    source, destination = ends()
    plan, senders = make_plan(source, destination, cap=CAP), {0: InprocTransfer(), 1: InprocTransfer()}
    staged = allocate(holding_of(destination, 2))
    payloads = put(source, senders, 4, weights(DENSE, 1))
    assert sources_of(plan, 2) == (0, 1)
    assert sources_of(plan, 0) == ()
    with pytest.raises(PublishRefused, match="needs the weights of rank 1, which has put none"):
        pull(plan, 2, 4, {0: payloads[0]}, InprocTransfer(), staged)
    with pytest.raises(PublishRefused, match="version 5: rank 0 has put version 4"):
        pull(plan, 2, 5, payloads, InprocTransfer(), staged)
    tensors = held(source.holdings[1], weights(DENSE, 1))
    name = "0.decoder.layers.1.mlp.linear_fc2.weight"
    del tensors[name]
    payloads[1] = senders[1].send(4, tensors)
    with pytest.raises(PublishRefused, match=f"rank 1 has put no {name}"):
        pull(plan, 2, 4, payloads, InprocTransfer(), staged)
