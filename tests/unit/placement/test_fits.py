"""Case M3: what the groups of a pool need of a GPU is added up group by group, and held against what it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrlhf.config.groups import TorchRollout, TorchScore, TorchTrain, VllmRollout
from asyncrlhf.config.schema import Pool
from asyncrlhf.placement.cluster import GIB
from asyncrlhf.placement.fits import device_memory, memory_warnings

KEYS = {
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
"""1.54e9 parameters: 5.75 GiB in 32 bits."""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(KEYS))
    return str(tmp_path)


def test_m3_a_fraction_for_the_sampler_leaves_room_for_whom_it_shares_with(model: str) -> None:
    policy = TorchTrain(model=model, pool="shared")
    sampler = VllmRollout(max_tokens=8, pool="shared")
    tables = {"policy": policy, "rollout": sampler, "other": TorchScore(model=model, pool="elsewhere")}
    pools = {"shared": Pool(devices=1, engines_per_device=2)}
    (text,) = memory_warnings(pools, tables, {}, 80 * GIB)
    assert text == (
        "pools.shared: its groups need at least 95.0 GiB of a GPU side by side (policy 23.0, rollout 72.0), and a GPU "
        "has 80.0 GiB; use groups.rollout.gpu_memory_utilization = 0.71 or less, placement.sets that take turns with "
        'placement.offload = "always", more devices, larger parallel sizes or a smaller dtype'
    )
    assert not list(memory_warnings(pools, tables, {"shared": ("policy", "rollout")}, 80 * GIB)), "one at a time"
    assert not list(memory_warnings(pools, tables, {}, None)), "nobody knows"
    assert not list(memory_warnings({"shared": Pool()}, tables, {}, 80 * GIB)), "on CPUs"
    smaller = VllmRollout(max_tokens=8, pool="shared", gpu_memory_utilization=0.71)
    assert not list(memory_warnings(pools, {**tables, "rollout": smaller}, {}, 80 * GIB))


def test_one_group_alone_can_be_too_large(model: str) -> None:
    tables = {"policy": TorchTrain(model=model, pool="shared"), "rollout": TorchRollout(max_tokens=8, pool="shared")}
    pools = {"shared": Pool(devices=1)}
    (text,) = memory_warnings(pools, tables, {"shared": ("policy", "rollout")}, 16 * GIB)
    assert "need at least 23.0 GiB of a GPU one at a time (policy 23.0), and a GPU has 16.0 GiB" in text
    two = {"policy": TorchTrain(model=model, pool="shared", data_parallel=2, sharding="full")}
    assert not list(memory_warnings({"shared": Pool(devices=2)}, two, {}, 16 * GIB))


def test_nvidia_smi_says_how_large_gpus_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 81559\necho 40960\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert device_memory() == 40 * GIB
    program.write_text("#!/bin/sh\nexit 9\n")
    assert device_memory() is None
