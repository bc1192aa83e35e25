"""Experts behind vLLM's sampler: their weights are not computed with as they come. A process in which vLLM has begun
with a model without experts cannot have one with them: these tests have their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoModelForCausalLM

from asyncrlhf.backends.vllm.options import VllmOptions
from asyncrlhf.errors import ConfigError, PublishRefused
from tests.integration.torch_sampling import Log, check, require_probe
from tests.integration.torch_scene import make_model, make_requests, trainer
from tests.integration.vllm_host import SHARED, VllmHost

pytestmark = pytest.mark.timeout(480)
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
EXPERTS = SHAPE | {
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,  # not a multiple of 32, which vLLM's kernels on CPUs take: it is padded
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@pytest.mark.parametrize("processes", [1, 2])
def test_experts_are_packed_anew_with_every_version(host: VllmHost, tmp_path: Path, processes: int) -> None:
    """Answers go on across publishes, weights that are refused, and a sleep; what the directory holds is never sampled
    with."""
    models = [make_model(tmp_path / str(seed), seed=seed, **EXPERTS) for seed in range(3)]
    modules = [AutoModelForCausalLM.from_pretrained(model) for model in models]
    trainers = [trainer(model, transport=SHARED) for model in models[:2]]
    first, second = (follows.export(0) for follows in trainers)
    wider = trainer(make_model(tmp_path / "wider", **EXPERTS | {"moe_intermediate_size": 64}), transport=SHARED)
    log = Log(host.make(models[2], tensor_parallel=processes))
    log.publish(first, 0)
    requests = make_requests(6, max_tokens=24, stops=())
    log.run(requests, steps=5)
    log.publish(second, 1)
    require_probe(log.engine, second)
    log.run([], steps=5)
    with pytest.raises(PublishRefused, match=r"down_proj' of shape \(4, 64, 64\), .* has as \(4, 64, 48\)"):
        log.publish(wider.export(2), 2)
    with pytest.raises(PublishRefused, match="announced with checksum"):
        log.publish(msgspec.structs.replace(first, checksum=first.checksum ^ 1), 2)
    require_probe(log.engine, second)
    log.publish(first, 2)
    require_probe(log.engine, first)
    log.run([], steps=5)
    log.take(log.engine.sleep())
    with pytest.raises(PublishRefused, match="announced with checksum"):
        log.engine.wake(msgspec.structs.replace(first, version=3, checksum=first.checksum ^ 1))
    log.engine.wake(msgspec.structs.replace(second, version=3))
    require_probe(log.engine, second)
    log.run([])
    for request in requests:
        check([modules[0], modules[1], modules[0], modules[1]], request, log.samples[request.request_id])
    assert {version for sample in log.samples.values() for version in sample.versions()} == {0, 1, 2, 3}


def test_experts_that_are_not_what_vllm_has_made_of_them_are_refused_at_the_start(
    host: VllmHost, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"Qwen3MoeForCausalLM .* became something else when .* use backend = .torch"):
        host.start_without_packing(VllmOptions(model=make_model(tmp_path, **EXPERTS), device="cpu", transport=SHARED))


def test_experts_in_layers_that_are_not_known_are_refused_at_the_start(host: VllmHost, tmp_path: Path) -> None:
    """As if Qwen2 had them, in layers of its own."""
    model = make_model(tmp_path, **SHAPE)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts": 4}))
    with pytest.raises(ConfigError, match="num_experts = 4, and Qwen2ForCausalLM has its experts in no layer"):
        host.make(model)


def test_a_family_whose_experts_trainers_name_otherwise_is_refused_at_the_start(host: VllmHost, tmp_path: Path) -> None:
    model = make_model(tmp_path, model_type="mixtral", num_local_experts=4, **SHAPE)
    with pytest.raises(ConfigError, match=r"experts of MixtralForCausalLM in vLLM: .* were not taken .*use backend"):
        host.make(model)
