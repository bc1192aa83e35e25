"""The torch sampler across publishes: each token is sampled, flagged and reported under its own version."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrlhf.backends.torch.options import OptimizerOptions, TrainerOptions
from asyncrlhf.backends.torch.train import TorchTrainer
from asyncrlhf.errors import GroupError, PublishRefused
from asyncrlhf.messages import ArrayColumn, Segment, WeightHandle, pack
from asyncrlhf.weights.collective import CollectiveTransfer, _Intake
from tests.integration.torch_sampling import Log, check, sampler
from tests.integration.torch_scene import (
    PolicyLoss,
    largest_gap,
    make_batch,
    make_model,
    make_requests,
    reference_logprobs,
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three policies of one architecture, far from each other."""
    return [make_model(tmp_path_factory.mktemp("policy"), seed=seed) for seed in range(3)]


@pytest.fixture(scope="session")
def modules(models: list[str]) -> list[Any]:
    return [AutoModelForCausalLM.from_pretrained(model) for model in models]


@pytest.fixture(scope="session")
def trainers(models: list[str]) -> list[TorchTrainer]:
    return [TorchTrainer(TrainerOptions(model=model, device="cpu")) for model in models]


def test_every_token_is_reported_once_under_its_version(models: list[str], trainers: list[TorchTrainer]) -> None:
    log = Log(sampler(models[0]))
    requests = make_requests(30)
    log.run(requests, steps=3)
    log.publish(trainers[1].export(1), 1)
    log.run([], steps=2)
    log.publish(trainers[2].export(2), 2)
    samples = log.run([])
    assert {name: tuple(versions) for name, versions in log.reported.items()} == {
        name: sample.versions() for name, sample in samples.items()
    }
    assert len(samples) == 30
    assert any(len(sample.segments) == 3 for sample in samples.values())


def test_a_swap_in_flight_changes_the_following_tokens_only(
    models: list[str], modules: list[Any], trainers: list[TorchTrainer]
) -> None:
    requests = make_requests(20, max_tokens=12)
    before = Log(sampler(models[0], slots=20)).run(requests)
    log = Log(sampler(models[0], slots=16))
    log.run(requests, steps=4)
    log.publish(trainers[1].export(1), 1)
    assert log.engine.version == 1
    log.run([], steps=3)
    log.publish(trainers[2].export(2), 2)
    samples = log.run([])
    mixed = 0
    for request in requests:
        sample = samples[request.request_id]
        check(modules, request, sample)
        versions = sample.versions()
        assert list(versions) == sorted(versions)
        assert not any(segment.kv_mixed for segment in sample.segments)
        kept = versions.count(0)
        assert sample.token_ids[:kept] == before[request.request_id].token_ids[:kept]
        mixed += len(set(versions)) > 1
    assert mixed > 5


def test_kept_kv_flags_the_tokens_that_follow_until_the_request_ends(
    models: list[str], modules: list[Any], trainers: list[TorchTrainer]
) -> None:
    log = Log(sampler(models[0], slots=4))
    requests = make_requests(6, max_tokens=9, stops=())
    log.run(requests, steps=3)
    log.publish(trainers[1].export(1), 1, kv="keep")
    samples = log.run([])
    for request in requests[:4]:
        mine = samples[request.request_id]
        assert mine.segments == (
            Segment(version=0, token_count=3),
            Segment(version=1, token_count=6, kv_mixed=True),
        )
        expected = reference_logprobs(modules[1], request.prompt_token_ids, mine.token_ids)[3:]
        assert (expected - torch.tensor(mine.logprobs[3:])).abs().max() > 1e-3
    for request in requests[4:]:
        assert samples[request.request_id].segments == (Segment(version=1, token_count=9),)
        check(modules, request, samples[request.request_id])


def test_a_header_only_publish_changes_the_number_and_nothing_else(
    models: list[str], modules: list[Any], trainers: list[TorchTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(5, max_tokens=8, stops=())
    log = Log(sampler(models[1]))
    log.publish(trainers[1].export(1), 1)
    log.run(requests, steps=3)
    handle = trainers[1].export(2)
    assert not handle.changed
    monkeypatch.setattr(log.engine, "_rebuild", lambda: pytest.fail("nothing changed"))
    log.engine._replica._transports.clear()
    log.publish(msgspec.structs.replace(handle, transport="nowhere:Nothing"), 2, kv="keep")
    samples = log.run([])
    for request in requests:
        sample = samples[request.request_id]
        assert sample.segments == (Segment(version=1, token_count=3), Segment(version=2, token_count=5))
        assert largest_gap(modules[1], request, sample) < 1e-5


def test_an_engine_that_joins_late_reads_a_header_s_bytes(
    models: list[str], modules: list[Any], trainers: list[TorchTrainer]
) -> None:
    trainers[2].export(1)
    handle = trainers[2].export(2)
    assert not handle.changed
    log = Log(sampler(models[0]))
    log.publish(handle, 2)
    for request in make_requests(3):
        check(modules, request, log.run([request])[request.request_id])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda handle: {"checksum": handle.checksum + 1}, "announced with checksum"),
        (lambda handle: {"payload": dict(handle.payload) | {"version": 99}}, "are gone"),
    ],
)
def test_bytes_that_are_not_the_announced_ones_are_refused(
    models: list[str],
    modules: list[Any],
    trainers: list[TorchTrainer],
    change: Callable[[WeightHandle], dict[str, Any]],
    message: str,
) -> None:
    log = Log(sampler(models[0]))
    handle = trainers[1].export(1)
    with pytest.raises(PublishRefused, match=message):
        log.engine.prepare(msgspec.structs.replace(handle, version=1, **change(handle)))
    with pytest.raises(ValueError, match=r"commit\(1\) without prepare\(1\)"):
        log.engine.commit(1, "rebuild")
    request = make_requests(1)[0]
    check(modules, request, log.run([request])[request.request_id])
    log.publish(handle, 1)
    again = msgspec.structs.replace(request, request_id="again")
    check(modules, again, log.run([again])["again"])


class SmallMessages(CollectiveTransfer):
    """Takes several messages for a model."""

    def __init__(self) -> None:
        super().__init__(bucket_bytes=4096)


def test_l7_a_collective_that_breaks_off_leaves_the_old_version_serving(
    models: list[str], modules: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, real, asked = Log(sampler(models[0])), _Intake.fetch, itertools.count()
    trainer = TorchTrainer(
        TrainerOptions(model=models[1], device="cpu", transport=f"{__name__}:{SmallMessages.__name__}")
    )
    handle = trainer.export(1)

    def fetch(intake: _Intake, *arguments: int) -> torch.Tensor:
        if next(asked) == 2:
            intake.close()
        return real(intake, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(_Intake, "fetch", fetch)
        with pytest.raises(GroupError, match="weights of version 1 have not arrived"):
            log.engine.prepare(handle)
    with pytest.raises(ValueError, match=r"commit\(1\) without prepare\(1\)"):
        log.engine.commit(1, "rebuild")
    request = make_requests(1)[0]
    check(modules, request, log.run([request])[request.request_id])
    log.publish(handle, 1)
    again = msgspec.structs.replace(request, request_id="again")
    check(modules, again, log.run([again])["again"])


def test_weights_of_another_architecture_are_refused(models: list[str], tmp_path: Path) -> None:
    engine = sampler(models[0])
    for name, changes in {"layers": {"num_hidden_layers": 1}, "size": {"intermediate_size": 40}}.items():
        other = TorchTrainer(TrainerOptions(model=make_model(tmp_path / name, **changes), device="cpu"))
        with pytest.raises(PublishRefused, match=r"lacks 12 parameters|of shape"):
            engine.prepare(other.export(1))


def test_n13_after_a_publish_the_sampler_agrees_with_the_trainer(models: list[str]) -> None:
    engine = TorchTrainer(TrainerOptions(model=models[0], device="cpu", optimizer=OptimizerOptions(learning_rate=1e-2)))
    log = Log(sampler(models[0]))
    for version in (1, 2):
        assert engine.step(make_batch(seed=version), pack(PolicyLoss())).applied
        log.publish(engine.export(version), version)
        requests = make_requests(6, seed=version, prefix=f"v{version}-")
        samples = log.run(requests)
        batch = dataclasses.replace(
            make_batch(rows=6, shared=1),
            prompt_lengths=tuple(len(r.prompt_token_ids) for r in requests),
            response_lengths=tuple(len(samples[r.request_id].token_ids) for r in requests),
            columns={
                "token_ids": ArrayColumn(
                    "sequence",
                    tuple(np.asarray(r.prompt_token_ids + samples[r.request_id].token_ids, np.int32) for r in requests),
                )
            },
        )
        for request, found in zip(requests, engine.logprobs(batch), strict=True):
            np.testing.assert_allclose(found, samples[request.request_id].logprobs, atol=1e-5)


def test_nothing_is_sampled_before_the_first_commit(models: list[str], trainers: list[TorchTrainer]) -> None:
    log = Log(sampler(models[0], version=-1))
    assert log.engine.version == -1
    request = make_requests(1)[0]
    log.run([request])
    assert "no weights were committed" in log.rejected[request.request_id]
    log.publish(trainers[0].export(0), 0)
    assert log.run([request])[request.request_id].versions()[0] == 0


def test_bfloat16_samples_follow_float32_weights(models: list[str], trainers: list[TorchTrainer]) -> None:
    log = Log(sampler(models[0], dtype="bfloat16"))
    log.publish(trainers[1].export(1), 1)
    module = AutoModelForCausalLM.from_pretrained(models[1], dtype=torch.bfloat16)
    for request in make_requests(4):
        assert largest_gap(module, request, log.run([request])[request.request_id]) < 0.2


@pytest.mark.parametrize("swap", [False, True])
def test_n15_an_aborted_request_goes_on_where_it_stopped(
    models: list[str], modules: list[Any], trainers: list[TorchTrainer], swap: bool
) -> None:
    requests = make_requests(12, max_tokens=8, stops=(5,))
    whole = Log(sampler(models[0])).run(requests)
    first = Log(sampler(models[0], slots=6))
    first.run(requests, steps=5)
    left = first.engine.abort([r.request_id for r in requests] + ["nobody"])
    assert sorted([*first.samples, *(r.request_id for r in left)]) == sorted(r.request_id for r in requests)
    assert first.engine.has_work, "unreported tokens are still to be sent"
    first.take(first.engine.step())
    assert not first.engine.has_work
    second = Log(sampler(models[0]))
    if swap:
        second.publish(trainers[1].export(1), 1)
    samples = second.run(left)
    seen = 0
    for request in left:
        sample, done = samples[request.request_id], len(request.tokens)
        assert sample.token_ids[:done] == request.tokens
        assert sample.logprobs[:done] == request.logprobs
        assert len(first.reported[request.request_id]) == done
        assert len(second.reported[request.request_id]) == len(sample.token_ids) - done <= request.max_tokens - done
        assert sample.versions() == (0,) * done + (int(swap),) * (len(sample.token_ids) - done)
        check(modules, msgspec.structs.replace(request, tokens=(), logprobs=(), segments=()), sample)
        if not swap:
            assert sample.token_ids == whole[request.request_id].token_ids
            assert sample.segments == whole[request.request_id].segments
        seen += done > 0
    assert seen >= 3
