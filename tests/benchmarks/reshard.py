"""Moving what differs against gathering everything, for a model of 100M parameters on four ranks.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.reshard [rounds]

The ways take turns in the same processes; a round's time is that of its slowest rank, and medians of rounds are
compared. Memory is the growth of a rank's resident set while it moves, the largest of all ranks and rounds: the weights
that it trains and the buffer that it receives into are there before. "Exchange" goes over gloo (weights/exchange.py).
"Pull" is what runs do (weights/pull.py): a rank copies what it has into shared memory, and reads there what it needs;
its memory is that of the rank's two areas, which it keeps from one version to the next. "Gather" is what conversion
tools do: each tensor goes to all stages, its parts to all tensor ranks, and whole parameters are kept until all are
there.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from asyncrlhf.weights.exchange import Exchange
from asyncrlhf.weights.layout import Holding, Layout, places
from asyncrlhf.weights.megatron_layout import MegatronParallel, megatron_layout
from asyncrlhf.weights.plan import Plan, describe
from asyncrlhf.weights.pull import pull
from asyncrlhf.weights.regions import allocate, dtype_of, region
from asyncrlhf.weights.shapes import ModelShape
from asyncrlhf.weights.shared import SharedMemoryTransfer
from asyncrlhf.weights.vllm_layout import VllmParallel, vllm_layout
from asyncrlhf.weights.zero_redundancy import Regrouping, regrouped_layout
from tests.integration.reshard_ranks import free_ports
from tests.integration.reshard_scene import held, same_bits, weights

RANKS = 4
CAP = 16 << 20
SHAPE = ModelShape(hidden=640, layers=12, heads=8, kv_heads=4, head_dim=80, ff=1984, vocab=32003, dtype="float32")
WHERE = places(RANKS)


def regrouped(tensor: int, pipeline: int, generate_tensor: int) -> Layout:
    regrouping = Regrouping(
        pipeline=pipeline,
        tensor=tensor,
        data=RANKS // tensor // pipeline,
        generate_pipeline=1,
        generate_tensor=generate_tensor,
    )
    return regrouped_layout(SHAPE, regrouping, WHERE, VllmParallel(vocab_multiple=512))


def cases() -> Iterator[tuple[MegatronParallel, Layout]]:
    yield MegatronParallel(tensor=2, pipeline=2), vllm_layout(SHAPE, VllmParallel(tensor=4), WHERE)
    yield MegatronParallel(tensor=2, pipeline=2), regrouped(2, 2, 2)
    yield MegatronParallel(tensor=4), regrouped(4, 1, 2)
    yield MegatronParallel(pipeline=4), vllm_layout(SHAPE, VllmParallel(tensor=4), WHERE)
    yield MegatronParallel(tensor=2), regrouped(2, 1, 2)


class Gather:
    """Every rank gets every parameter whole, and cuts out its own."""

    def __init__(self, source: Layout, parallel: MegatronParallel, needs: Holding, rank: int) -> None:
        self.source, self.needs, self.rank = source, needs, rank
        self.tensor, self.pipeline = parallel.tensor, parallel.pipeline
        per_stage = RANKS // self.pipeline
        self.stage, self.place = rank // per_stage, rank % per_stage
        self.twins = [dist.new_group([s * per_stage + i for s in range(self.pipeline)]) for i in range(per_stage)]
        blocks = range(0, RANKS, self.tensor)
        self.parts = [dist.new_group(list(range(first, first + self.tensor))) for first in blocks]
        self.per_stage = per_stage

    def run(self, tensors: Mapping[str, Tensor], staged: Mapping[str, Tensor]) -> None:
        whole = {
            name: torch.empty(parameter.shape, dtype=dtype_of(parameter.dtype))
            for name, parameter in self.source.parameters.items()
        }
        for stage in range(self.pipeline):
            first = self.source.holdings[stage * self.per_stage : (stage + 1) * self.per_stage]
            for name, spec in first[0].tensors.items():
                mine = tensors[name] if stage == self.stage else torch.empty(spec.shape, dtype=dtype_of(spec.dtype))
                if self.pipeline > 1:
                    dist.broadcast(mine, stage * self.per_stage + self.place, group=self.twins[self.place])
                shards = [torch.empty_like(mine) for _ in range(self.tensor)] if self.tensor > 1 else [mine]
                if self.tensor > 1:
                    dist.all_gather(shards, mine, group=self.parts[self.rank // self.tensor])
                for shard, holding in zip(shards, first, strict=False):
                    for piece in holding.slices:
                        if piece.tensor == name:
                            lengths = tuple(high - low for low, high in piece.box)
                            target = region(whole[piece.parameter], tuple(low for low, _ in piece.box), lengths)
                            target.copy_(region(shard, piece.offset, lengths))
        for piece in self.needs.slices:
            lengths = tuple(high - low for low, high in piece.box)
            taken = region(whole[piece.parameter], tuple(low for low, _ in piece.box), lengths)
            region(staged[piece.tensor], piece.offset, lengths).copy_(taken)


class Pull:
    """Every rank puts what it has where all can read it, and takes what it needs."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank, self.transfer = plan, rank, SharedMemoryTransfer()
        self.version = self.area = 0

    def run(self, tensors: Mapping[str, Tensor], staged: Mapping[str, Tensor]) -> None:
        self.version += 1
        own = self.transfer.send(self.version, tensors)
        self.area = own["size"]
        payloads: list[Any] = [None] * RANKS
        dist.all_gather_object(payloads, own)
        pull(self.plan, self.rank, self.version, dict(enumerate(payloads)), self.transfer, staged)


def measured(work: Callable[[], Any]) -> tuple[float, float]:
    """(seconds of the slowest rank, MiB by which the resident set of the hungriest grew)."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    dist.barrier()
    started = time.perf_counter()
    work()
    figures = torch.tensor([time.perf_counter() - started, status("VmHWM") - before])
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    return float(figures[0]), float(figures[1])


def status(key: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(key + ":"))


def compared(
    rank: int, rounds: int, model: Mapping[str, Tensor], parallel: MegatronParallel, destination: Layout
) -> tuple[str, dict[str, list[tuple[float, float]]]]:
    """(what was compared, way -> what each round took)."""
    source = megatron_layout(SHAPE, parallel, WHERE)
    tensors, needs = held(source.holdings[rank], model), destination.holdings[rank]
    exchange = Exchange(source, destination, rank, dist.new_group(), cap=CAP)
    gather, pulls = Gather(source, parallel, needs, rank), Pull(exchange.plan, rank)
    exchanged, gathered, pulled = allocate(needs), allocate(needs), allocate(needs)
    work: dict[str, Callable[[], Any]] = {
        "exchange": lambda: exchange.run(0, tensors, exchanged),
        "gather": lambda: gather.run(tensors, gathered),
        "pull": lambda: pulls.run(tensors, pulled),
    }
    for way in (*work.values(), *work.values()):
        way()
    assert same_bits(exchanged, gathered)
    assert same_bits(pulled, gathered)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    for turn in range(rounds):
        for name in list(work)[:: 1 if turn % 2 else -1]:
            seconds, grown = measured(work[name])
            found[name].append((seconds, 2 * pulls.area / (1 << 20) if name == "pull" else grown))
    return describe(exchange.plan).splitlines()[0], found


def rank_main(rank: int, port: int, rounds: int, answers: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    model = weights(SHAPE, 0)
    for parallel, destination in cases():
        answer = compared(rank, rounds, model, parallel, destination)
        if rank == 0:
            answers.send(answer)
    dist.barrier()
    os._exit(0)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    here, there = multiprocessing.get_context("spawn").Pipe(duplex=False)
    context = multiprocessing.start_processes(
        rank_main, args=(free_ports(1)[0], rounds, there), nprocs=RANKS, join=False, start_method="spawn"
    )
    there.close()
    print(f"{SHAPE.byte_count / 4e6:.1f}M parameters, float32, {RANKS} ranks, {rounds} rounds")
    for _ in cases():
        try:
            title, found = here.recv()
        except EOFError:
            context.join()  # raises what went wrong there
            raise
        print(title)
        seconds = {name: statistics.median(second for second, _ in values) for name, values in found.items()}
        memory = {name: max(mebibytes for _, mebibytes in values) for name, values in found.items()}
        print(f"  {'gather':9s} {seconds['gather'] * 1e3:8.0f} ms {memory['gather']:8.1f} MiB")
        for name in ("exchange", "pull"):
            faster, part = seconds["gather"] / seconds[name], memory[name] / memory["gather"]
            print(f"  {name:9s} {seconds[name] * 1e3:8.0f} ms {memory[name]:8.1f} MiB", end="")
            print(f"  {faster:.1f}x faster, {part:.3f} of the memory", flush=True)
    context.join()


if __name__ == "__main__":
    main()
