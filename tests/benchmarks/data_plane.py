"""What data by reference and messages cost under `runtime = "ray"`, beside Ray's own ways, in one Ray and interleaved.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.data_plane [--rounds 15] [--megabytes 64] [--messages 10000]

**By reference.** Two engines, each an actor of RayRuntime. One gives a column (float32 rows of 8192 values, such as
log-probs of a reference or values of a critic); its actor stores what it gives, this process claims it, makes a
TrainBatch of it, and sends that to the other, which fetches it: the way of every column that is larger than
`ray.inline_bytes`. Against it, between the same two: `ray.put` of one array of the same bytes there, `ray.get` here.
`round trip` is from asking the one to the answer of the other, which has then read every byte, as this process sees
it. `fetch` is what the consumer waits for its rows; since a lot is stored while its reference is on its way, that
includes the rest of storing it, which a `ray.put` has done before it gives a reference, so that `fetch` alone
compares different things.
`answers` are sampled ones of 16384 tokens, a lot each, made from Python numbers: token ids and log-probs, fetched as
two columns. Against them, as many objects of the same bytes.

**Messages.** A queue of the controller's stages against `ray.util.queue.Queue`, which is an actor, both put to and got
from here, one message after another. That is what somebody would replace; it is not the same work, since the stages
are coroutines of one process, and their queue reaches no other. So, too, the same work: a small request to an engine
and its answer through RayRuntime, against one `ray.util.queue.Queue` for requests and one for answers, by their
asynchronous methods, and an actor that takes whatever there is from the one and puts it into the other. Both have the
same number of requests in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import ray
from ray.util.queue import Queue as RayQueue

from asyncrlhf.abc import Engine, EngineHandle, EngineSpec, GenerateEngine
from asyncrlhf.flow.queue import Queue
from asyncrlhf.messages import (
    Array,
    Column,
    EngineEvent,
    Finished,
    GenerateRequest,
    Sample,
    Segment,
    TrainBatch,
    WeightHandle,
    column_of,
    sequence_column,
)
from asyncrlhf.runtimes.ray import RayRuntime

ROW = 8192
ANSWER = 16384
PROMPT = (5, 6, 7)


class Options(msgspec.Struct, frozen=True):
    megabytes: int = 64


class Model(Engine):
    """Gives columns, reads batches, and answers small questions."""

    Options = Options

    def __init__(self, options: Options) -> None:
        flat = np.arange(options.megabytes << 18, dtype=np.float32)
        self._flat, self._rows = flat, np.split(flat, len(flat) // ROW)

    def logprobs(self) -> Sequence[Array]:
        return self._rows

    def put(self) -> Any:
        return [ray.put([self._flat])]

    def put_many(self, count: int) -> Any:
        """The same bytes as so many objects of two arrays."""
        parts = np.split(self._flat, 2 * count)
        return [ray.put(list(pair)) for pair in zip(parts[::2], parts[1::2], strict=True)]

    def read(self, batch: TrainBatch) -> Mapping[str, float]:
        """Seconds to fetch every column, and to fetch and read it."""
        started = time.perf_counter()
        found = [column.fetch() for column in batch.columns.values()]
        fetched = time.perf_counter()
        total = sum(float(row.sum()) for rows in found for row in rows)
        return {"fetch": fetched - started, "fetch, read": time.perf_counter() - started, "total": total}

    def get(self, references: Sequence[Any]) -> Mapping[str, float]:
        started = time.perf_counter()
        found = ray.get(references)
        fetched = time.perf_counter()
        total = sum(float(array.sum()) for arrays in found for array in arrays)
        return {"fetch": fetched - started, "fetch, read": time.perf_counter() - started, "total": total}

    def ask(self, number: int) -> int:
        return number


class Sampler(GenerateEngine):
    """Gives long answers at once."""

    Options = Options

    def __init__(self, options: Options) -> None:
        self._asked: list[GenerateRequest] = []
        segments = (Segment(version=0, token_count=ANSWER),)
        self._sample = Sample(
            token_ids=(9,) * ANSWER, logprobs=(-0.5,) * ANSWER, segments=segments, finish_reason="length"
        )

    @property
    def has_work(self) -> bool:
        return bool(self._asked)

    def add(self, requests: Sequence[GenerateRequest]) -> Sequence[EngineEvent]:
        self._asked += requests
        return []

    def step(self) -> Sequence[EngineEvent]:
        asked, self._asked = self._asked, []
        return [Finished(request_id=request.request_id, sample=self._sample) for request in asked]

    def abort(self, request_ids: Sequence[str]) -> Sequence[GenerateRequest]:
        return []

    def prepare(self, weights: WeightHandle) -> None: ...

    def commit(self, version: int, kv: str) -> Sequence[EngineEvent]:
        return []

    def probe(self, token_ids: Sequence[int]) -> Sequence[float]:
        return []

    def sleep(self) -> Sequence[EngineEvent]:
        return []

    def wake(self, weights: WeightHandle) -> None: ...


class Echo:
    """Takes what is in one queue and puts it into another."""

    def __init__(self, requests: RayQueue, answers: RayQueue) -> None:
        self._requests, self._answers = requests, answers

    def serve(self, count: int) -> None:
        while count:
            items = [self._requests.get()]
            items += self._requests.get_nowait_batch(self._requests.qsize())
            self._answers.put_nowait_batch(items)
            count -= len(items)


def batch_of(columns: Mapping[str, Column], lengths: Sequence[int]) -> TrainBatch:
    return TrainBatch(
        train_step=0,
        prompt_lengths=(len(PROMPT),) * len(lengths),
        response_lengths=tuple(lengths),
        unmasked=tuple(lengths),
        rollouts=tuple(range(len(lengths))),
        columns=columns,
    )


async def timed(call: Awaitable[Mapping[str, float]]) -> dict[str, float]:
    started = time.perf_counter()
    found = await call
    return {"round trip": time.perf_counter() - started, **{k: v for k, v in found.items() if k != "total"}}


async def by_reference(producer: EngineHandle, consumer: EngineHandle) -> Mapping[str, float]:
    rows = await producer.call("logprobs")
    return await consumer.call("read", batch_of({"logprobs": column_of("token", rows)}, [len(row) for row in rows]))


async def by_ray(producer: EngineHandle, consumer: EngineHandle) -> Mapping[str, float]:
    return await consumer.call("get", await producer.call("put"))


async def by_ray_in_parts(producer: EngineHandle, consumer: EngineHandle, count: int) -> Mapping[str, float]:
    return await consumer.call("get", await producer.call("put_many", count))


async def of_answers(
    sampler: EngineHandle, consumer: EngineHandle, finished: Queue[Finished], count: int
) -> Mapping[str, float]:
    await sampler.call("add", [_request(number) for number in range(count)])
    samples = [(await finished.get()).sample for _ in range(count)]
    columns = {
        "token_ids": sequence_column([PROMPT] * count, [sample.token_ids for sample in samples]),
        "behaviour_logprobs": column_of("token", [sample.logprobs for sample in samples]),
    }
    return await consumer.call("read", batch_of(columns, [ANSWER] * count))


async def of_queue(queue: Queue[int], count: int) -> float:
    started = time.perf_counter()
    for number in range(count):
        await queue.put(number)
        await queue.get()
    return count / (time.perf_counter() - started)


def of_ray_queue(queue: RayQueue, count: int) -> float:
    started = time.perf_counter()
    for number in range(count):
        queue.put(number)
        queue.get()
    return count / (time.perf_counter() - started)


async def of_calls(engine: EngineHandle, count: int, in_flight: int) -> float:
    """Small requests and their answers."""

    async def one(share: int) -> None:
        for number in range(share):
            await engine.call("ask", number)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(in_flight):
            tasks.create_task(one(count // in_flight))
    return count / (time.perf_counter() - started)


async def of_two_queues(requests: RayQueue, answers: RayQueue, echo: Any, count: int, in_flight: int) -> float:
    """The same through two queues, by their asynchronous methods."""

    async def one(share: int) -> None:
        for number in range(share):
            await requests.put_async(number)
            await answers.get_async()

    count -= count % in_flight
    serving = echo.serve.remote(count)
    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(in_flight):
            tasks.create_task(one(count // in_flight))
    seconds = time.perf_counter() - started
    await serving
    return count / seconds


async def measure(arguments: argparse.Namespace) -> None:
    with TemporaryDirectory() as directory:
        runtime = RayRuntime(Path(directory))
        try:
            await measure_in(runtime, arguments)
        finally:
            await runtime.close()
            runtime.kill()


async def measure_in(runtime: RayRuntime, arguments: argparse.Namespace) -> None:
    options, count = Options(arguments.megabytes), (arguments.megabytes << 17) // ANSWER
    finished = Queue(1 << 20, Finished)

    def hear(events: Sequence[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, Finished):
                tasks.create_task(finished.put(event))

    def spec(group: str, kind: str) -> EngineSpec:
        return EngineSpec(group=group, rank=0, engine=f"tests.benchmarks.data_plane:{kind}", options=options)

    async with asyncio.TaskGroup() as tasks:
        producer = await runtime.spawn(spec("producer", "Model"), lambda events: None)
        consumer = await runtime.spawn(spec("consumer", "Model"), lambda events: None)
        sampler = await runtime.spawn(spec("sampler", "Sampler"), hear)
        turns: dict[str, list[dict[str, float]]] = {}
        for _ in range(arguments.rounds + 1):
            for name, call in {
                "ray.put, get of one array": by_ray(producer, consumer),
                "a column by reference": by_reference(producer, consumer),
                f"ray.put, get of {count}": by_ray_in_parts(producer, consumer, count),
                f"{count} answers by reference": of_answers(sampler, consumer, finished, count),
            }.items():
                turns.setdefault(name, []).append(await timed(call))
        print(f"{arguments.megabytes} MiB, milliseconds")
        bases = ["ray.put, get of one array"] * 2 + [f"ray.put, get of {count}"] * 2
        for (name, found), base in zip(turns.items(), bases, strict=True):
            for part in ("round trip", "fetch", "fetch, read"):
                values = [1e3 * turn[part] for turn in found[1:]]
                middle = statistics.median(values)
                of = middle / statistics.median(1e3 * turn[part] for turn in turns[base][1:])
                print(f"{name:26} {part:12} {middle:8.1f}  x{of:5.2f}   {' '.join(f'{v:.0f}' for v in values)}")
        await measure_messages(consumer, arguments)


async def measure_messages(engine: EngineHandle, arguments: argparse.Namespace) -> None:
    ours, rays, requests, answers = Queue(1024, int), RayQueue(1024), RayQueue(), RayQueue()
    echo = ray.remote(Echo).remote(requests, answers)
    count, in_flight = arguments.messages, arguments.in_flight
    rates: dict[str, list[float]] = {}
    for _ in range(arguments.message_rounds + 1):
        rates.setdefault("a queue of the controller", []).append(await of_queue(ours, count))
        rates.setdefault("ray.util.queue.Queue", []).append(of_ray_queue(rays, count // 20))
        rates.setdefault(f"calls, {in_flight} in flight", []).append(await of_calls(engine, count, in_flight))
        found = await of_two_queues(requests, answers, echo, count // 5, in_flight)
        rates.setdefault(f"two queues, {in_flight} in flight", []).append(found)
    print("messages a second")
    for number, (name, found) in enumerate(rates.items()):
        middle = statistics.median(found[1:])
        base = statistics.median(list(rates.values())[number | 1][1:])
        print(f"{name:28} {middle:11,.0f}  x{middle / base:7.1f}   {' '.join(f'{v:,.0f}' for v in found[1:])}")


def _request(number: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(number), prompt_token_ids=PROMPT, max_tokens=ANSWER, temperature=1.0, stop_token_ids=(), seed=0
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--messages", type=int, default=10000)
    parser.add_argument("--in-flight", type=int, default=500)
    parser.add_argument("--message-rounds", type=int, default=5)
    asyncio.run(measure(parser.parse_args()))
    return 0


if __name__ == "__main__":
    from tests.benchmarks import data_plane  # engines unpickle what they are given from there

    sys.exit(data_plane.main())
