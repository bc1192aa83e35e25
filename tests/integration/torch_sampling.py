"""Drives a sampler and checks its answers against plain forwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import torch

from asyncrlhf.abc import GenerateEngine
from asyncrlhf.backends.torch.options import SamplerOptions
from asyncrlhf.backends.torch.sample import TorchSampler
from asyncrlhf.messages import (
    ArrayColumn,
    EngineEvent,
    Finished,
    GenerateRequest,
    Progress,
    Rejected,
    Sample,
    TrainBatch,
    WeightHandle,
)
from tests.integration.torch_scene import reference_logprobs


def sampler(model: str, **options: Any) -> TorchSampler:
    settings = {"slots": 8, "max_sequence_tokens": 64, "version": 0, "device": "cpu"}
    return TorchSampler(SamplerOptions(model=model, **(settings | options)))


class Log:
    """Collects the events of a sampler, and counts the tokens it reports."""

    def __init__(self, engine: GenerateEngine) -> None:
        self.engine = engine
        self.samples: dict[str, Sample] = {}
        self.rejected: dict[str, str] = {}
        self.reported: dict[str, list[int]] = defaultdict(list)

    def take(self, events: Iterable[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, Progress):
                assert event.request_id not in self.samples, "progress after the end"
                assert event.token_count > 0
                self.reported[event.request_id] += [event.version] * event.token_count
            elif isinstance(event, Finished):
                assert event.request_id not in self.samples
                self.samples[event.request_id] = event.sample
            elif isinstance(event, Rejected):
                self.rejected[event.request_id] = event.reason

    def run(self, requests: list[GenerateRequest], steps: int = 10_000) -> dict[str, Sample]:
        self.take(self.engine.add(requests))
        for _ in range(steps):
            if not self.engine.has_work:
                break
            self.take(self.engine.step())
        return self.samples

    def publish(self, handle: WeightHandle, version: int, kv: str = "rebuild") -> None:
        self.engine.prepare(msgspec.structs.replace(handle, version=version))
        self.take(self.engine.commit(version, kv))


def check(modules: list[Any], request: GenerateRequest, sample: Sample) -> None:
    """Tokens, stop, and each log-prob under the weights of the version that its segment names."""
    versions = torch.tensor(sample.versions())
    for version in set(sample.versions()):
        expected = reference_logprobs(modules[version], request.prompt_token_ids, sample.token_ids, request.temperature)
        gap = (expected - torch.tensor(sample.logprobs)).abs()[versions == version]
        assert gap.max() < 1e-5, (request, sample, version)
    stopped = sample.token_ids[-1] in request.stop_token_ids
    assert sample.finish_reason == ("stop" if stopped else "length")
    assert not set(sample.token_ids[:-1]) & set(request.stop_token_ids)
    assert stopped or len(sample.token_ids) == request.max_tokens
    assert len(sample.token_ids) <= request.max_tokens


def batch_of(requests: list[GenerateRequest], samples: dict[str, Sample]) -> TrainBatch:
    """Answers as a trainer gets them."""
    answers = [samples[request.request_id].token_ids for request in requests]
    rows = [np.asarray([*r.prompt_token_ids, *a], np.int32) for r, a in zip(requests, answers, strict=True)]
    lengths = tuple(len(answer) for answer in answers)
    return TrainBatch(
        train_step=0,
        prompt_lengths=tuple(len(request.prompt_token_ids) for request in requests),
        response_lengths=lengths,
        unmasked=lengths,
        rollouts=tuple(range(len(rows))),
        columns={"token_ids": ArrayColumn("sequence", tuple(rows))},
    )


def require_probe(engine: GenerateEngine, handle: WeightHandle) -> None:
    """It computes with these weights."""
    assert handle.probe is not None
    np.testing.assert_allclose(engine.probe(handle.probe.token_ids), handle.probe.logprobs, atol=1e-5)
