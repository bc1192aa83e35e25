"""Warnings before a run: from known facts only, at the edge of what makes them true."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrlhf.config.groups import Scratch, TorchRollout, TorchScore, TorchTrain
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
    """Weights of every engine on the CPU, and four times that for a trained one; what is not known counts nothing."""
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
    assert least_host_bytes([policy, reference, rollout]) == (16 + 2 + 12) * params
    unknown = [
        TorchTrain(model=str(tmp_path / "later"), device="cpu"),
        TorchScore(model=str(tmp_path), device="cuda"),
        TorchScore(model=str(tmp_path), device="auto"),
        TorchScore(device="cpu"),
        object(),
    ]
    assert least_host_bytes(unknown) is None
