from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrlhf.backends.torch.attention import SlotCache
from asyncrlhf.backends.torch.sampling import choose, stream_key, uniforms
from asyncrlhf.errors import ConfigError
from asyncrlhf.messages import GenerateRequest, Segment
from tests.integration.torch_sampling import Log, check, sampler
from tests.integration.torch_scene import largest_gap, make_model, make_requests


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three policies of one architecture, far from each other."""
    return [make_model(tmp_path_factory.mktemp("policy"), seed=seed) for seed in range(3)]


@pytest.fixture(scope="session")
def modules(models: list[str]) -> list[Any]:
    return [AutoModelForCausalLM.from_pretrained(model) for model in models]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5, 0.0])
def test_n4_logprobs_are_those_of_a_plain_forward_at_the_sampling_temperature(
    models: list[str], modules: list[Any], temperature: float
) -> None:
    log = Log(sampler(models[0]))
    requests = make_requests(30, temperature=temperature)
    samples = log.run(requests)
    assert len(samples) == 30
    for request in requests:
        check(modules, request, samples[request.request_id])
    if temperature == 0.0:
        greedy = requests[0]
        with torch.no_grad():
            logits = modules[0](torch.tensor([greedy.prompt_token_ids])).logits[0, -1]
        assert samples[greedy.request_id].token_ids[0] == int(logits.argmax())


@pytest.mark.parametrize("slots", [1, 3, 8, 64])
@pytest.mark.parametrize("prefill_tokens", [1, 20, 8192])
def test_answers_do_not_depend_on_what_runs_beside_them(models: list[str], slots: int, prefill_tokens: int) -> None:
    requests = make_requests(24, seed=1)
    alone = {r.request_id: Log(sampler(models[0])).run([r])[r.request_id] for r in requests[:6]}
    together = Log(sampler(models[0], slots=slots, prefill_tokens=prefill_tokens)).run(requests)
    assert len(together) == 24
    for name, sample in alone.items():
        assert together[name].token_ids == sample.token_ids
        np.testing.assert_allclose(together[name].logprobs, sample.logprobs, atol=1e-5)


def test_seeds_decide_answers(models: list[str]) -> None:
    requests = make_requests(12, max_tokens=20, stops=())
    first, second = (Log(sampler(models[0])).run(requests) for _ in range(2))
    assert first == second
    other = [msgspec.structs.replace(r, seed=r.seed + 1) for r in requests]
    changed = Log(sampler(models[0])).run(other)
    assert all(changed[name].token_ids != sample.token_ids for name, sample in first.items())
    huge = [msgspec.structs.replace(requests[0], request_id=str(seed), seed=seed) for seed in (-1, 2**63, 2**200)]
    assert len({s.token_ids for s in Log(sampler(models[0])).run(huge).values()}) >= 2


def test_many_ragged_requests_through_few_slots(models: list[str], modules: list[Any]) -> None:
    log = Log(sampler(models[0], slots=7))
    random = np.random.default_rng(4)
    requests = [msgspec.structs.replace(r, max_tokens=int(random.integers(1, 25))) for r in make_requests(150, seed=5)]
    waiting = list(requests)
    while waiting or log.engine.has_work:  # arrivals between steps
        arriving = int(random.integers(0, 12))
        log.take(log.engine.add(waiting[:arriving]))
        waiting = waiting[arriving:]
        log.take(log.engine.step())
        assert log.engine._slots.count <= 7
    assert len(log.samples) == 150
    for request in requests:
        check(modules, request, log.samples[request.request_id])


def test_n15_nothing_is_sampled_beyond_the_limit_or_a_stop(models: list[str]) -> None:
    log = Log(sampler(models[0]))
    request = make_requests(1, max_tokens=3)[0]
    run = {"logprobs": (-1.0,) * 3, "segments": (Segment(version=0, token_count=3),)}
    complete = msgspec.structs.replace(request, tokens=(9, 9, 9), **run)
    stopped = msgspec.structs.replace(complete, request_id="stopped", tokens=(9, 9, 5), max_tokens=8)
    samples = log.run([complete, stopped])
    assert samples[request.request_id].finish_reason == "length"
    assert samples["stopped"].finish_reason == "stop"
    assert {len(s.token_ids) for s in samples.values()} == {3}
    assert not log.reported


def test_n2_without_its_tokens_a_request_starts_from_the_prompt(models: list[str], modules: list[Any]) -> None:
    request = make_requests(1, max_tokens=10, stops=())[0]
    log = Log(sampler(models[0]))
    log.run([request], steps=4)
    log.engine.abort([request.request_id])
    log.take(log.engine.step())
    log.reported.clear()
    samples = log.run([request])
    assert len(log.reported[request.request_id]) == 10
    check(modules, request, samples[request.request_id])


def test_the_others_go_on_when_some_are_aborted(models: list[str], modules: list[Any]) -> None:
    log = Log(sampler(models[0], slots=9))
    requests = make_requests(14, seed=2, max_tokens=15, stops=(5,))
    log.run(requests, steps=3)
    gone = [r.request_id for r in requests[::3]]
    left = log.engine.abort(gone)
    samples = log.run([])
    assert {r.request_id for r in left} == set(gone) - set(samples)
    for request in requests:
        if request.request_id in samples:
            check(modules, request, samples[request.request_id])


def test_the_cache_grows_with_its_sequences(tmp_path: Path) -> None:
    model = make_model(tmp_path, max_position_embeddings=400)
    module = AutoModelForCausalLM.from_pretrained(model)
    log = Log(sampler(model, slots=3, max_sequence_tokens=300))
    short, long = make_requests(2, max_tokens=20, stops=())
    long = msgspec.structs.replace(long, max_tokens=250)
    late = msgspec.structs.replace(short, request_id="late", prompt_token_ids=(3, 4) * 90)
    log.run([short, long], steps=30)
    assert log.engine._cache._capacity == 64
    samples = log.run([late])
    assert log.engine._cache._capacity == 300
    for request in (short, long, late):
        assert largest_gap(module, request, samples[request.request_id]) < 1e-5


def test_waiting_requests_can_be_aborted(models: list[str]) -> None:
    engine = sampler(models[0], slots=1)
    requests = make_requests(4, stops=())
    engine.add(requests)
    engine.step()
    assert engine.abort(["r2", "r3"]) == requests[2:]
    assert set(Log(engine).run([])) == {"r0", "r1"}


def test_requests_that_cannot_be_answered_are_rejected_by_name_and_the_others_go_on(
    models: list[str], modules: list[Any]
) -> None:
    good = make_requests(2)

    def bad(name: str, **changes: Any) -> GenerateRequest:
        return msgspec.structs.replace(good[0], request_id=name, **changes)

    log = Log(sampler(models[0], max_sequence_tokens=40))
    samples = log.run(
        [
            bad("empty", prompt_token_ids=()),
            good[0],
            bad("long", prompt_token_ids=(3,) * 30, max_tokens=11),
            bad("fits", prompt_token_ids=(3,) * 30, max_tokens=10),
            bad("vocabulary", prompt_token_ids=(3, 42)),
            bad("negative", prompt_token_ids=(3, -1)),
            bad("no-tokens", max_tokens=0),
            bad("cold", temperature=-1.0),
            bad("torn", tokens=(3,), logprobs=(-1.0, -2.0)),
            good[1],
            msgspec.structs.replace(good[1]),
        ]
    )
    assert set(samples) == {good[0].request_id, good[1].request_id, "fits"}
    expected = {
        "empty": "no token",
        "long": "30 tokens and max_tokens = 11 need 41 places; this engine has 40",
        "vocabulary": "token 42 is outside the vocabulary of 42",
        "negative": "token -1 is outside",
        "no-tokens": "max_tokens = 0",
        "cold": "temperature = -1.0",
        "torn": "1 tokens to continue from come with 2 log-probs and segments of 0 tokens",
        good[1].request_id: "running already",
    }
    assert log.rejected.keys() == expected.keys()
    for name, reason in expected.items():
        assert reason in log.rejected[name]
    for request in good:
        check(modules, request, samples[request.request_id])
    limited = Log(sampler(models[0], max_sequence_tokens=4096))
    limited.run([bad("model", max_tokens=96)])
    assert "this engine has 96" in limited.rejected["model"]


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_other_architectures_and_groupings(tmp_path: Path, model_type: str, kv_heads: int) -> None:
    model = make_model(tmp_path, model_type=model_type, num_key_value_heads=kv_heads)
    module = AutoModelForCausalLM.from_pretrained(model)
    requests = make_requests(9)
    samples = Log(sampler(model, slots=4)).run(requests)
    for request in requests:
        check([module], request, samples[request.request_id])


def test_an_architecture_whose_cache_does_not_work_is_refused(
    models: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets(
        cache: SlotCache, keys: torch.Tensor, values: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        extent = keys.shape[2] if cache._positions is None else cache._extent
        return keys.expand(-1, -1, extent, -1), values.expand(-1, -1, extent, -1)

    monkeypatch.setattr(SlotCache, "update", forgets)
    with pytest.raises(ConfigError, match="qwen2 does not work with the sampler's KV cache"):
        sampler(models[0])


def test_slots_forget_the_stop_tokens_of_requests_before(models: list[str], modules: list[Any]) -> None:
    log = Log(sampler(models[0], slots=1))
    requests = make_requests(6, max_tokens=12)
    requests = [
        msgspec.structs.replace(r, stop_token_ids=() if i % 2 else r.stop_token_ids) for i, r in enumerate(requests)
    ]
    samples = log.run(requests)
    for request in requests:
        check(modules, request, samples[request.request_id])


def test_a_model_with_sliding_windows_is_refused(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"]
    model = make_model(tmp_path, use_sliding_window=True, sliding_window=4, layer_types=kinds)
    with pytest.raises(ConfigError, match="layers of type sliding_attention"):
        sampler(model)


def test_tokens_follow_the_distribution() -> None:
    logits = torch.tensor([1.0, -torch.inf, 2.0, 0.0, -torch.inf]).expand(20_000, 5)
    keys = np.asarray([stream_key(i) for i in range(20_000)], dtype=np.uint64)
    for temperature in (1.0, 0.5):
        numbers = uniforms(keys, np.full(20_000, 3))
        tokens, logprobs = choose(logits, np.full(20_000, temperature, np.float32), numbers)
        expected = torch.softmax(logits[0] / temperature, -1)
        found = torch.bincount(tokens, minlength=5) / 20_000
        assert (found - expected).abs().max() < 0.012
        assert found[[1, 4]].sum() == 0
        torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_the_ends_of_the_unit_interval_give_possible_tokens() -> None:
    logits = torch.tensor([[-torch.inf, 0.3, 0.1, -torch.inf]]).repeat(2, 1)
    for top in (1 - 2.0**-23, 1.0):  # 1.0 stands for a cumulative sum that ends a little low
        tokens, logprobs = choose(logits, np.ones(2, np.float32), np.asarray([0.0, top], dtype=np.float32))
        assert tokens.tolist() == [1, 2 if top < 1 else 1]
        assert logprobs.isfinite().all()


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    keys = np.asarray([stream_key(seed) for seed in range(200)], dtype=np.uint64)
    table = np.stack([uniforms(keys, np.full(200, place)) for place in range(200)])
    assert 0.0 <= table.min() < 1e-3
    assert 0.999 < table.max() < 1.0
    assert abs(table.mean() - 0.5) < 0.005
    assert abs(table.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.02
