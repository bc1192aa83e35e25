"""Invariant 7: max_staleness = 0 is the synchronous loop, same batches and bit-equal weights, written out by hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from algorithms.grpo import GRPO, GRPOLoss
from asyncrlhf.errors import SampleError
from asyncrlhf.groups.rollout import answer_seed
from asyncrlhf.messages import (
    ArrayColumn,
    Finished,
    GenerateRequest,
    Prompt,
    Rollout,
    Sample,
    TrainBatch,
    pack,
)
from asyncrlhf.testing import FakeReward, FakeRows, FakeSampler, FakeTrainer, Scenario, run_virtual
from tests.contract.inspector import go
from tests.contract.scenarios import scenarios

EXAMPLES = int(os.environ.get("EXAMPLES", "60"))
pytestmark = pytest.mark.timeout(400 if EXAMPLES <= 60 else 0)


class ByHand:
    """Sample B prompts, score them, train on them, take over the weights, repeat. No gate, no queue, no task."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rows = FakeRows(scenario.rows, epochs=scenario.epochs, unusable=scenario.unusable, seed=scenario.seed)
        self.reward = FakeReward(seed=scenario.seed, **scenario.reward | {"seconds": (0.0, 0.0)})
        self.sampler = FakeSampler(scenario.sampler)
        self.trainer = FakeTrainer(scenario.trainer)
        self.batches: list[tuple[int, ...]] = []
        self.next_uid = self.voids = 0

    async def run(self) -> None:
        version = 0
        self.publish(version)
        while scored := await self.sample_batch(version):
            self.batches.append(tuple(prompt.uid for prompt, _, _ in scored))
            batch = train_batch(version, scored)
            if self.trainer.step(batch, pack(GRPOLoss())).applied:
                version += 1
                self.publish(version)
            if version == self.scenario.train_steps:
                return

    def publish(self, version: int) -> None:
        self.sampler.prepare(self.trainer.export(version))
        self.sampler.commit(version, "rebuild")

    async def sample_batch(self, version: int) -> list[tuple[Prompt, Sequence[Sample], Sequence[float]]]:
        found: list[tuple[Prompt, Sequence[Sample], Sequence[float]]] = []
        while len(found) < self.scenario.prompts_per_step and self.rows.has(self.next_uid):
            uid, self.next_uid = self.next_uid, self.next_uid + 1
            try:
                prompt = self.rows.prompt(uid, 1, version)
                samples = self.answer(prompt)
                rewards = await self.reward.score(Rollout(prompt=prompt, samples=tuple(samples)))
            except SampleError:
                continue
            found.append((prompt, samples, rewards))
        short = len(found) < self.scenario.prompts_per_step
        return [] if short and self.scenario.last == "drop" else found

    def answer(self, prompt: Prompt) -> list[Sample]:
        scenario = self.scenario
        requests = [
            GenerateRequest(
                request_id=str(number),
                prompt_token_ids=prompt.token_ids,
                max_tokens=scenario.max_tokens,
                temperature=1.0,
                stop_token_ids=(0,),
                seed=answer_seed(scenario.seed, prompt.uid, 1, number),
            )
            for number in range(scenario.answers_per_prompt)
        ]
        self.sampler.add(requests)
        done: dict[str, Sample] = {}
        while self.sampler.has_work:
            done |= {e.request_id: e.sample for e in self.sampler.step() if isinstance(e, Finished)}
        least = scenario.answers_per_prompt if scenario.min_answers is None else scenario.min_answers
        if len(done) < least:
            raise SampleError(f"{len(done)} answers")
        return [done[request.request_id] for request in requests if request.request_id in done]


def train_batch(step: int, scored: Sequence[tuple[Prompt, Sequence[Sample], Sequence[float]]]) -> TrainBatch:
    rows: list[tuple[int, Prompt, Sample, float, float, bool]] = []
    for place, (prompt, samples, rewards) in enumerate(scored):
        mean, deviation = fmean(rewards), pstdev(rewards)
        gains = [(reward - mean) / (deviation + 1e-4) for reward in rewards]
        rows += [(place, prompt, s, r, g, any(gains)) for s, r, g in zip(samples, rewards, gains, strict=True)]

    def column(level: Any, values: Any, kind: Any = np.float32) -> ArrayColumn:
        return ArrayColumn(level, tuple(np.array(value, kind) for value in values))

    lengths = tuple(len(sample.token_ids) for _, _, sample, _, _, _ in rows)
    return TrainBatch(
        train_step=step,
        prompt_lengths=tuple(len(prompt.token_ids) for _, prompt, _, _, _, _ in rows),
        response_lengths=lengths,
        unmasked=tuple(n * trains for n, (*_, trains) in zip(lengths, rows, strict=True)),
        rollouts=tuple(place for place, *_ in rows),
        columns={
            "token_ids": column("sequence", [p.token_ids + s.token_ids for _, p, s, _, _, _ in rows], np.int32),
            "behaviour_logprobs": column("token", [s.logprobs for _, _, s, _, _, _ in rows]),
            "versions": column("token", [[step] * n for n in lengths], np.int32),
            "mask": column("token", [[float(t)] * n for n, (*_, t) in zip(lengths, rows, strict=True)]),
            "rewards": column("sample", [[r] for _, _, _, r, _, _ in rows]),
            "advantages": column("sample", [[g] for _, _, _, _, g, _ in rows]),
        },
    )


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(scenarios(max_staleness=0, byte_limit=None, lease_timeout=0.0, kv="rebuild", evaluation_every=0))
def test_A6_zero_staleness_is_the_synchronous_loop(scenario: Scenario) -> None:
    """The seed of the trainer is the scenario's, as `build_run` gives it."""
    run = go(GRPO, scenario)
    assert run.reason in {"completed", "train_steps"}, run.error
    by_hand = ByHand(scenario)
    by_hand.trainer = FakeTrainer(run.trainer().options)
    run_virtual(by_hand.run())
    assert [tuple(lease.uid for lease in p.batch.leases) for p in run.popped] == by_hand.batches
    assert run.trainer().weights == by_hand.trainer.weights
    assert run.trainer().exported == by_hand.trainer.exported
    for popped in run.popped:
        versions = {s.version for e in popped.experiences for x in e.rollout.samples for s in x.segments}
        assert versions == {popped.batch.step}, "every batch's version equals the trainer's"


def test_the_weights_depend_on_what_was_sampled() -> None:
    """Else the comparison above would say little."""
    weights = [go(GRPO, Scenario(seed=0, rows=n)).trainer().weights["w"] for n in (4, 6)]
    assert weights[0] != weights[1]
