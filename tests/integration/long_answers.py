"""Rollouts with long answers through real groups and a real gate, on actors of a Ray with a small object store: what
lies there, and what the controller refers to, after every train step.

    python -m tests.integration.long_answers ROLLOUTS

It prints one JSON object. Without spilling, a store that is full of what nobody reads ends the run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

import asyncrlhf as rl
from asyncrlhf.abc import EngineSpec, GenerateEngine, ScoreEngine
from asyncrlhf.algorithm import Algorithm, run_algorithm
from asyncrlhf.flow.experience import ExperienceQueue
from asyncrlhf.flow.gate import Gate
from asyncrlhf.flow.ledger import Ledger, LedgerRules
from asyncrlhf.flow.prompts import PromptSource
from asyncrlhf.groups import ReferenceGroup, RolloutGroup
from asyncrlhf.groups.answers import Sampling
from asyncrlhf.groups.frozen import FrozenEngine
from asyncrlhf.messages import (
    Array,
    EngineEvent,
    Finished,
    GenerateRequest,
    Message,
    Sample,
    Segment,
    Stored,
    TrainBatch,
    WeightHandle,
)
from asyncrlhf.observe import EventLog
from asyncrlhf.runtimes.ray import RayRuntime
from asyncrlhf.testing import FakeRows

STORE = 80 << 20
TOKENS = 13000
"""Tokens of an answer, which then takes 104 kB: more than Ray keeps outside its object store."""
PROMPTS = 25


class Nothing(Message, frozen=True):
    """Options of the engines here."""


class LongSampler(GenerateEngine):
    """Answers at once, with TOKENS tokens."""

    Options = Nothing

    def __init__(self, options: Nothing) -> None:
        self.version = 0
        self._tokens, self._logprobs = tuple(range(TOKENS)), (-0.5,) * TOKENS
        self._waiting: list[GenerateRequest] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def add(self, requests: Sequence[GenerateRequest]) -> Sequence[EngineEvent]:
        self._waiting += requests
        return []

    def step(self) -> Sequence[EngineEvent]:
        done, self._waiting = self._waiting, []
        segments = (Segment(version=self.version, token_count=TOKENS),)
        sample = Sample(token_ids=self._tokens, logprobs=self._logprobs, segments=segments, finish_reason="length")
        return [Finished(request_id=request.request_id, sample=sample) for request in done]

    def abort(self, request_ids: Sequence[str]) -> Sequence[GenerateRequest]:
        return []

    def prepare(self, weights: WeightHandle) -> None:
        pass

    def commit(self, version: int, kv: str) -> Sequence[EngineEvent]:
        self.version = version
        return []

    def probe(self, token_ids: Sequence[int]) -> Sequence[float]:
        return []

    def sleep(self) -> Sequence[EngineEvent]:
        return []

    def wake(self, weights: WeightHandle) -> None:
        self.version = weights.version


class LongReader(ScoreEngine):
    """Gives every token its own number as a log-prob, and every row the number of its tokens as a score."""

    Options = Nothing

    def __init__(self, options: Nothing) -> None:
        pass

    def logprobs(self, batch: TrainBatch) -> Sequence[Array]:
        rows = zip(batch.columns["token_ids"].fetch(), batch.prompt_lengths, strict=True)
        return [row[prompt:].astype(np.float32) for row, prompt in rows]

    def scores(self, batch: TrainBatch) -> Sequence[float]:
        return [float(sum(map(len, rows))) for rows in zip(*(c.fetch() for c in batch.columns.values()), strict=True)]


class LongExperience(rl.Experience, frozen=True):
    reference_logprobs: rl.PerToken


class Long(Algorithm):
    """Samples, reads, trains on nothing, and publishes the same weights."""

    def __init__(self, gate: Gate, rollout: RolloutGroup, reference: ReferenceGroup, trainer: Any) -> None:
        self.gate, self.rollout, self.reference, self.trainer = gate, rollout, reference, trainer
        self.prompts = PromptSource(gate)
        self.experience = ExperienceQueue(LongExperience, gate, lambda event: None)
        self.rollouts = 0
        self.used: list[float] = []
        """Bytes in the object store after every train step."""
        self.references: list[int] = []
        """Objects that this process refers to then."""

    async def generate(self) -> None:
        async for prompt in self.prompts:
            rollout = await self.rollout.sample(prompt)
            assert all(isinstance(sample.token_ids, Stored) for sample in rollout.samples)
            read = await self.reference.logprobs(rollout)
            await self.experience.put(LongExperience(rollout=rollout, rewards=(1.0,), reference_logprobs=read))

    async def train(self) -> None:
        async for batch in self.experience.batches():
            sizes = await self.trainer.call("scores", batch.without_origin())
            assert min(sizes) > 4 * TOKENS
            self.rollouts += len(sizes)
            del batch
            self.gate.applied()
            version = self.gate.ledger.version
            await self.rollout.commit(self.rollout.replicas[0], version)
            self.gate.publish(version)
            self.used.append(used())
            self.references.append(len(ray._private.worker.global_worker.core_worker.get_all_reference_counts()))


def used() -> float:
    """Bytes in the object store, as Ray reported them last."""
    return STORE - ray.available_resources().get("object_store_memory", 0.0)


def spec(group: str, engine: str) -> EngineSpec:
    return EngineSpec(group=group, rank=0, engine=f"tests.integration.long_answers:{engine}", options=Nothing())


async def flow(logs: Path, rollouts: int) -> Long:
    runtime = RayRuntime(logs, inline_bytes=0)
    log = EventLog(None, asyncio.get_running_loop().time)
    rules = LedgerRules(prompts_per_step=PROMPTS, max_staleness=rollouts, lookahead=1)
    gate = Gate(Ledger(rules, rollouts), FakeRows(rollouts), lambda event: None)
    sampling = Sampling(
        answers_per_prompt=1, min_answers=1, max_tokens=TOKENS, temperature=1.0, stop_token_ids=(), seed=0
    )
    group = RolloutGroup("rollout", log, runtime, [spec("rollout", "LongSampler")], sampling, gate)
    reference = ReferenceGroup("reference", log, FrozenEngine(log, runtime, spec("reference", "LongReader")))
    await group.start()
    await reference.start()
    algorithm = Long(gate, group, reference, await runtime.spawn(spec("trainer", "LongReader"), lambda events: None))

    async def start() -> None:
        for replica in group.replicas:
            replica.serving = True
        gate.publish(0)

    async def finish() -> None:
        pass

    try:
        await run_algorithm(
            algorithm,
            gate,
            workers=2 * PROMPTS,
            services=[group.serve, reference.serve],
            start=start,
            finish=finish,
            close=[group.close, reference.close],
            stall_timeout=250.0,
        )
    finally:
        await runtime.close()
    return algorithm


def main() -> None:
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=STORE,
        _system_config={"automatic_object_spilling_enabled": False},
    )
    with tempfile.TemporaryDirectory() as logs:
        done = asyncio.run(flow(Path(logs), int(sys.argv[1])))
    print(json.dumps({"rollouts": done.rollouts, "used": done.used, "references": done.references}))
    ray.shutdown()


if __name__ == "__main__":
    main()
