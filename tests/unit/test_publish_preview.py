"""What `check` says about the bytes that a publish moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrlhf.config.load import load
from asyncrlhf.launch import check
from tests.integration.tiny import grpo

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}
MEGATRON = ["groups.policy.backend=megatron", "groups.policy.device=cpu"]


def checked(directory: Path, *overrides: str, **changes: Any) -> list[str]:
    """Lines that are about moving weights."""
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG | changes))
    path = directory / "run.toml"
    path.write_text(grpo(model='[groups.policy]\nmodel = "model"\n'))
    overrides = ("train_steps=2", "prompts_per_step=4", "answers_per_prompt=4", "runtime=local", *overrides)
    lines = check(load(str(path), [*overrides, f"groups.policy.model={model}"])).splitlines()
    first = [number for number, line in enumerate(lines) if line.startswith("publish of")]
    return [] if not first else [line for line in lines[first[0] :] if line.startswith(("publish of", "  "))]


def rows(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines[3:]]


def test_every_rank_sends_its_part_once_and_every_engine_reads_all(tmp_path: Path) -> None:
    lines = checked(tmp_path, *MEGATRON, "groups.policy.tensor_parallel=2", "groups.rollout.replicas=3")
    assert lines[0] == "publish of groups.policy to groups.rollout:"
    assert lines[1].startswith("  megatron tp2 dp1 -> checkpoint on each of 3: ")
    assert lines[2].split() == ["rank", "sent", "received"]
    found = rows(lines)
    assert [row[0] for row in found] == ["0", "1", "2", "3", "4"]
    received = [" ".join(row[3:5]) for row in found[2:]]
    assert received == ["548.2 KiB"] * 3, "140352 numbers of 4 bytes"


def test_each_process_of_a_vllm_engine_reads_its_slices(tmp_path: Path) -> None:
    vllm = ["groups.rollout.backend=vllm", "groups.rollout.tensor_parallel=2"]
    lines = checked(tmp_path, "groups.policy.data_parallel=2", "groups.policy.sharding=full", *vllm)
    assert lines[1].startswith("  torch fsdp2 x 1 -> vllm tp2 x 1: ")
    received = [" ".join(row[3:5]) for row in rows(lines)[2:]]
    assert received == ["275.2 KiB"] * 2, "half of 548.2 KiB, and the half of the norms that the other reads, too"


@pytest.mark.parametrize(
    ("overrides", "source"),
    [
        (["groups.policy.data_parallel=2", "groups.policy.sharding=full"], "torch fsdp2 x 1"),
        (["groups.policy.data_parallel=2"], "rank 0 of torch dp2"),
        ([*MEGATRON, "groups.policy.pipeline_parallel=2", "groups.policy.data_parallel=2"], "megatron pp2 dp2"),
    ],
)
def test_the_trainer_may_be_cut_in_any_way(tmp_path: Path, overrides: list[str], source: str) -> None:
    assert checked(tmp_path, *overrides)[1].startswith(f"  {source} -> checkpoint on each of 1: ")


def test_a_rank_alone_moves_what_it_has_and_a_family_without_a_table_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert checked(tmp_path) == []
    two = ["groups.policy.data_parallel=2", "groups.policy.sharding=full"]
    lines = checked(tmp_path / "other", *two, model_type="gpt2")
    assert len(lines) == 2
    assert lines[1].startswith("  its bytes are not known: model_type = 'gpt2' has no table of parameters")
