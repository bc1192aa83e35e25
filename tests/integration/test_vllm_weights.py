"""How weights come to vLLM's workers: in slices and whole, from one trainer and from ranks; and how they go."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from asyncrlhf.errors import PublishRefused
from asyncrlhf.messages import WeightHandle
from asyncrlhf.weights.layout import Layout, places
from asyncrlhf.weights.plan import make_plan
from asyncrlhf.weights.shapes import model_shape
from asyncrlhf.weights.torch_layout import fsdp_layout, replicated_layout
from asyncrlhf.weights.vllm_layout import VllmParallel, vllm_layout
from tests.integration.crew import Crew
from tests.integration.torch_sampling import Log, batch_of, check, require_probe
from tests.integration.torch_scene import PolicyLoss, make_batch, make_model, make_requests, trainer
from tests.integration.vllm_host import ENGINES_ONLY, SHARED, Hosted, VllmHost

pytestmark = pytest.mark.timeout(480)
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("policy"), **SHAPE)


@pytest.fixture(scope="module")
def crew() -> Generator[Crew]:
    crew = Crew(2)
    yield crew
    crew.close()


@pytest.fixture
def pair(host: VllmHost, model: str) -> Hosted:
    """A sampler of two processes that share every layer."""
    return host.make(model, tensor_parallel=2)


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_processes_read_their_slices_of_what_two_ranks_train(
    host: VllmHost, crew: Crew, model: str, sharding: str
) -> None:
    """Replicas (DDP) and parts (FSDP2), of which each process is beside one: it reads what the plan says, and what it
    answers has the log-probs that the ranks compute for it, before a step and behind it."""
    shape = model_shape(json.loads((Path(model) / "config.json").read_bytes()), "float32")
    beside = () if sharding == "none" else ((0,), (1,))
    source = replicated_layout(shape, places(1)) if sharding == "none" else fsdp_layout(shape, places(2))
    needed = vllm_layout(shape, VllmParallel(tensor=2), places(2, first=0 if beside else 2))
    pair, expected, own = host.make(model, tensor_parallel=2, beside=beside), *bytes_read(source, needed)
    assert bool(beside) is all(own)
    assert max(expected) < 0.65 * shape.byte_count, "norms, and the keys and values of the one head, go to both"
    crew.become(model, 2, sharding=sharding, transport=SHARED)
    log = Log(pair)
    for version in range(2):
        weights: WeightHandle = crew.call("export", version)
        log.publish(weights, version)
        assert (pair.bytes_read, pair.bytes_own) == (expected, own)
        require_probe(pair, weights)
        requests = make_requests(6, max_tokens=10, stops=(), prefix=f"v{version}-")
        samples = log.run(requests)
        found = crew.call("logprobs", batch_of(requests, samples))
        for request, logprobs in zip(requests, found, strict=True):
            np.testing.assert_allclose(samples[request.request_id].logprobs, logprobs, atol=1e-5)
        assert crew.step(make_batch(seed=version), PolicyLoss()).applied


def bytes_read(source: Layout, destination: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of each process, and what of it comes from the rank that it is beside."""
    first = destination.holdings[0].place.rank
    rows = [row for row in make_plan(source, destination, cap=1 << 30).traffic() if row.rank >= first]
    return tuple(row.received + row.copied for row in rows), tuple(row.copied for row in rows)


def test_two_processes_go_on_across_publishes_a_sleep_and_weights_that_are_refused(
    pair: Hosted, model: str, tmp_path: Path
) -> None:
    """From a transport that reaches both, and from one that reaches only the engine."""
    other = make_model(tmp_path / "other", seed=1, **SHAPE)
    near, far = trainer(model, transport=SHARED), trainer(other, transport=ENGINES_ONLY)
    first, second, log = near.export(0), far.export(1), Log(pair)
    log.publish(first, 0)
    requests = make_requests(4, max_tokens=24, stops=())
    log.run(requests, steps=4)
    log.publish(second, 1)
    require_probe(pair, second)
    log.run([], steps=4)
    log.take(pair.sleep())
    with pytest.raises(PublishRefused, match="announced with checksum"):
        pair.wake(msgspec.structs.replace(first, version=2, checksum=first.checksum ^ 1))
    pair.wake(msgspec.structs.replace(first, version=2))
    log.run([], steps=4)
    deeper = trainer(make_model(tmp_path / "deeper", **SHAPE | {"num_hidden_layers": 3}), transport=SHARED)
    with pytest.raises(PublishRefused, match="which this model does not have"):
        log.publish(deeper.export(3), 3)
    log.run([])
    before, after = (AutoModelForCausalLM.from_pretrained(directory) for directory in (model, other))
    for request in requests:
        check([before, after, before], request, log.samples[request.request_id])
        assert set(log.samples[request.request_id].versions()) == {0, 1, 2}


def test_a_family_without_a_table_is_loaded_whole_by_vllm(host: VllmHost, tmp_path: Path) -> None:
    model = make_model(tmp_path / "first", model_type="llama", attention_bias=True, **SHAPE)
    other = make_model(tmp_path / "other", model_type="llama", attention_bias=True, seed=1, **SHAPE)
    log, follows = Log(host.make(model)), trainer(other, transport=SHARED)
    weights = follows.export(1)
    log.publish(weights, 1)
    assert log.engine.bytes_read == ()  # type: ignore[attr-defined]
    request = make_requests(1)[0]
    check([None, AutoModelForCausalLM.from_pretrained(other)], request, log.run([request])[request.request_id])
    with pytest.raises(PublishRefused, match="announced with checksum"):
        log.engine.prepare(msgspec.structs.replace(weights, version=2, checksum=weights.checksum ^ 1))
    log.take(log.engine.sleep())
    log.engine.wake(msgspec.structs.replace(weights, version=2))
    again = msgspec.structs.replace(request, request_id="again")
    assert log.run([again])["again"].token_ids == log.samples[request.request_id].token_ids


def test_M1_memory_goes_with_sleep_and_comes_back_once(host: VllmHost, tmp_path: Path) -> None:
    """Awake: two sets of weights. Asleep: none. Woken: one, and nowhere on the way there a second."""
    large = make_model(tmp_path, **SHAPE | {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 8192})
    follows = trainer(large, transport=SHARED)
    log = Log(host.make(large, kv_cache_bytes=16 << 20))
    first, size, cache = follows.export(0), 2 * 3 * 256 * 8192 * 4, 16 << 20
    log.publish(first, 0)
    requests = make_requests(4, max_tokens=12, stops=())
    log.run(requests, steps=4)
    awake = host.memory("RssAnon")
    log.take(log.engine.sleep())
    asleep = host.memory("RssAnon")
    assert awake - asleep > 1.8 * size
    host.forget_peak()
    before = host.memory("VmHWM")
    log.engine.wake(first)
    assert host.memory("VmHWM") - before < 1.5 * size + cache, "what they are read from was mapped before"
    assert 0.9 * size < host.memory("RssAnon") - asleep < 1.5 * size + cache
    log.run([])
    for request in requests:
        check([AutoModelForCausalLM.from_pretrained(large)], request, log.samples[request.request_id])
