"""Warnings before a run: from known facts only, at the edge of what makes them true."""

from __future__ import annotations

import json
from pathlib import Path

from msgspec.structs import replace

from asyncrlhf.config.groups import (
    MegatronScore,
    MegatronTrain,
    Scratch,
    TorchRollout,
    TorchScore,
    TorchTrain,
    VllmRollout,
)
from asyncrlhf.placement.advice import Facts, warnings
from asyncrlhf.placement.earlier import least_host_bytes

GIB = 1 << 30


def test_overlap_that_cannot_help() -> None:
    def said(generate: float, lease: float = 0.0, lookahead: int = 1) -> list[str]:
        facts = Facts(lookahead=lookahead, max_staleness=2 * lookahead, generate_s=generate, train_s=1.0, lease_s=lease)
        return [text for text in warnings(facts) if text.startswith("overlap")]

    assert said(0.05) == [
        "overlap can gain 1.05 x at most: a train step generates 0.05 s and trains 1 s; give the busier pool more "
        "devices, or set max_staleness = 0"
    ]
    assert said(0.11) == []
    assert said(0.05, lease=3.0) == [], "overlap hides the latency of rewards too"
    assert said(0.05, lookahead=0) == [], "nothing overlaps anyway"


def test_lookahead_against_littles_law() -> None:
    def said(lookahead: int) -> list[str]:
        facts = Facts(lookahead=lookahead, max_staleness=8, generate_s=0.5, train_s=1.0, lease_s=3.0)
        return [text for text in warnings(facts) if text.startswith("lookahead")]

    assert said(2) == [
        "lookahead = 2 is below lease time / step time = 3 s / 1 s = 3.0: the trainer waits; set lookahead = 3 and "
        "max_staleness = 6"
    ]
    assert said(3) == []


def test_memory_that_does_not_fit() -> None:
    facts = Facts(lookahead=0, max_staleness=0, device_need=83.1 * GIB, device_have=80 * GIB, host_need=1, host_have=2)
    (text,) = warnings(facts)
    assert text.startswith("device memory: at least 83.1 GiB are needed and 80.0 GiB are there")
    (text,) = warnings(Facts(lookahead=0, max_staleness=0, host_need=9 * GIB, host_have=8 * GIB))
    assert text.startswith("host memory: at least 9.0 GiB are needed and 8.0 GiB are there")


def test_least_host_memory_is_arithmetic(tmp_path: Path) -> None:
    """Weights of every engine on the CPU, twice that for one that takes new ones, and four times that for a trained one
    of torch; what is not known counts nothing."""
    keys = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 10,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(keys))
    params = 2 * (4 * 8 * 8 + 3 * 8 * 16) + 10 * 8
    policy = TorchTrain(scratch=Scratch(characters="ab", config=keys), device="cpu")
    reference = TorchScore(model=str(tmp_path), device="cpu", dtype="bfloat16")
    assert least_host_bytes([policy]) == 16 * params
    assert least_host_bytes([reference]) == 2 * params
    rollout = TorchRollout(model=str(tmp_path), device="cpu", replicas=3, max_tokens=4)
    assert least_host_bytes([policy, reference, rollout]) == (16 + 2 + 24) * params
    vllm = VllmRollout(model=str(tmp_path), device="cpu", replicas=2, max_tokens=4, dtype="bfloat16")
    assert least_host_bytes([vllm]) == 2 * 2 * 2 * params
    copies = TorchTrain(model=str(tmp_path), device="cpu", data_parallel=2)
    assert least_host_bytes([copies]) == 2 * 16 * params
    assert least_host_bytes([replace(copies, sharding="full")]) == 16 * params
    unknown = [
        TorchTrain(model=str(tmp_path / "later"), device="cpu"),
        TorchScore(model=str(tmp_path), device="cuda"),
        TorchScore(model=str(tmp_path), device="auto"),
        TorchScore(device="cpu"),
        object(),
    ]
    assert least_host_bytes(unknown) is None


def test_least_host_memory_of_ranks_that_share_a_model(tmp_path: Path) -> None:
    """Every copy has weights and gradients, and all of them together one set of moments; experts have fewer copies."""
    keys = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 16,
        "moe_intermediate_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 10,
        "tie_word_embeddings": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(keys))
    routed = 2 * 4 * 3 * 8 * 16
    dense = 2 * (4 * 8 * 8 + 4 * 8) + 10 * 8
    model = {"model": str(tmp_path), "device": "cpu"}
    alone = MegatronTrain(**model)
    assert least_host_bytes([alone]) == 16 * (dense + routed)
    assert least_host_bytes([replace(alone, dtype="bfloat16")]) == 18 * (dense + routed)
    four = {"tensor_parallel": 2, "data_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 4}
    assert least_host_bytes([MegatronTrain(**model, **four)]) == 8 * (2 * dense + routed) + 8 * (dense + routed)
    assert least_host_bytes([MegatronScore(**model, **four)]) == 4 * (2 * dense + routed)
