"""Columns by reference on real actors: whose they are, what survives whose end, and what a loss looks like."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrlhf.abc import EngineHandle
from asyncrlhf.errors import DataLost
from asyncrlhf.messages import (
    EngineEvent,
    Finished,
    GenerateRequest,
    Sample,
    Stored,
    TrainBatch,
    column_of,
    sequence_column,
)
from tests.integration.long_answers import TOKENS, spec

pytestmark = pytest.mark.timeout(600)


@asynccontextmanager
async def engines(logs: Path, inline_bytes: int = 0) -> AsyncGenerator[tuple[Any, EngineHandle, list[Sample]]]:
    """A sampler, a reader, and two answers that the sampler has given."""
    from asyncrlhf.runtimes.ray import RayRuntime

    runtime = RayRuntime(logs, address="auto", inline_bytes=inline_bytes)
    samples: list[Sample] = []
    complete = asyncio.Event()

    def hear(events: list[EngineEvent]) -> None:
        samples.extend(event.sample for event in events if isinstance(event, Finished))
        if len(samples) == 2:
            complete.set()

    try:
        sampler = await runtime.spawn(spec("rollout", "LongSampler"), hear)
        reader = await runtime.spawn(spec("reference", "LongReader"), lambda events: None)
        await sampler.call("add", [request("a"), request("b")])
        await complete.wait()
        yield sampler, reader, samples
    finally:
        await runtime.close()


def request(name: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, prompt_token_ids=(1,), max_tokens=TOKENS, temperature=1.0, stop_token_ids=(), seed=0
    )


def batch_of(samples: list[Sample]) -> TrainBatch:
    lengths = tuple(len(sample.token_ids) for sample in samples)
    return TrainBatch(
        train_step=0,
        prompt_lengths=(1,) * len(samples),
        response_lengths=lengths,
        unmasked=lengths,
        rollouts=tuple(range(len(samples))),
        columns={
            "token_ids": sequence_column([(1,)] * len(samples), [sample.token_ids for sample in samples]),
            "behaviour_logprobs": column_of("token", [sample.logprobs for sample in samples]),
        },
    )


def lots(samples: list[Sample]) -> list[Any]:
    return [sample.token_ids.lot for sample in samples if isinstance(sample.token_ids, Stored)]


async def test_L12_answers_outlive_the_sampler_that_gave_them(ray_here: str, tmp_path: Path) -> None:
    """kill -9 of its process while they wait: the controller owns them once it has claimed them."""
    import ray

    async with engines(tmp_path) as (sampler, reader, samples):
        claims = [lot.reference for lot in lots(samples)]
        assert len(ray.wait(claims, num_returns=2, timeout=60, fetch_local=False)[0]) == 2
        os.kill(sampler._pid, signal.SIGKILL)
        await sampler._ended.wait()
        rows = await reader.call("logprobs", batch_of(samples))
        assert [len(row) for row in rows] == [TOKENS, TOKENS]
        assert all(isinstance(row, Stored) for row in rows), "a result that long is stored in turn"
        again = await reader.call("scores", batch_of(samples).with_columns(more=column_of("token", rows)))
        assert again == [3.0 * TOKENS + 1] * 2
        assert rows[0][5] == 5.0
        assert "blocking" not in (tmp_path / "reference-0.log").read_text()
        assert (samples[0].token_ids[-1], samples[0].logprobs[0]) == (TOKENS - 1, -0.5)


async def test_columns_are_lost_with_their_machine_and_the_engine_that_wants_them_lives_on(
    ray_here: str, ray_cluster: Any, tmp_path: Path
) -> None:
    """The call fails with DataLost and does not hang; others are answered."""
    import ray

    from asyncrlhf.runtimes.actor import EngineActor
    from asyncrlhf.runtimes.ray import ActorEngine

    async with engines(tmp_path) as (_, reader, samples):
        node = ray_cluster.add_node(num_cpus=1, resources={"other machine": 1})
        kind: Any = ray.remote(EngineActor)
        actor = kind.options(num_cpus=0, resources={"other machine": 1}, max_concurrency=10).remote(
            "tests.integration.long_answers", os.getcwd(), sys.path, ""
        )
        there: list[EngineEvent] = []
        heard = asyncio.Event()

        def hear(events: list[EngineEvent]) -> None:
            there.extend(event for event in events if isinstance(event, Finished))
            if there:
                heard.set()

        sampler = ActorEngine(spec("rollout", "LongSampler"), actor, tmp_path / "log", hear, inline_bytes=0)
        await sampler.start()
        await sampler.call("add", [request("c")])
        await heard.wait()
        far = [event.sample for event in there if isinstance(event, Finished)]
        assert len(ray.wait([lot.reference for lot in lots(far)], timeout=60, fetch_local=False)[0]) == 1
        ray_cluster.remove_node(node)
        with pytest.raises(DataLost, match="gone"):
            await reader.call("scores", batch_of([*samples, *far]))
        assert await reader.call("scores", batch_of(samples)) == [2.0 * TOKENS + 1] * 2
        await sampler.close(at_once=True)


async def test_columns_that_were_never_claimed_are_lost_with_their_actor(ray_here: str, tmp_path: Path) -> None:
    from asyncrlhf.runtimes.lots import RayLot, claim

    async with engines(tmp_path) as (sampler, _, _):
        os.kill(sampler._pid, signal.SIGKILL)
        await sampler._ended.wait()
        late = RayLot(99)
        claim(sampler.actor, [late])
        with pytest.raises(DataLost, match="ActorDied"):
            await asyncio.to_thread(RayLot.fetch_all, [late])


async def test_what_is_not_longer_than_inline_bytes_stays_in_its_message(ray_here: str, tmp_path: Path) -> None:
    async with engines(tmp_path, inline_bytes=8 * TOKENS) as (_, reader, samples):
        assert lots(samples) == []
        rows = await reader.call("logprobs", batch_of(samples[:1]))
        assert not isinstance(rows[0], Stored)
