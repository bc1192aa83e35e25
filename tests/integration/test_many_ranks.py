"""Trained models on several ranks through the launcher: the run of one rank, and a resume with another number."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrlhf.config.derive import derive
from asyncrlhf.config.load import load
from asyncrlhf.errors import ConfigError
from asyncrlhf.launch import run
from asyncrlhf.wiring import wire
from tests.integration.tiny import SCRATCH, grpo

pytestmark = pytest.mark.timeout(600)

PPO = grpo(
    algorithm="algorithms.ppo:PPO",
    top="prompts_per_step = 2\nanswers_per_prompt = 2\nmax_staleness = 0",
    groups=f"""
[settings]
minibatches = 2
[settings.kl]
coefficient = 0.0
{SCRATCH.replace("groups.policy", "groups.critic")}
[groups.critic.optimizer]
learning_rate = 3e-3
[checkpoint]
every = 2
""",
)
RANKS = [
    "runtime=local",
    "groups.policy.data_parallel=2",
    "groups.policy.sharding=full",
    "groups.critic.data_parallel=2",
]


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a3_n6_ppo_on_two_ranks_each_is_the_run_of_one_and_goes_on_with_one(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    Path("run.toml").write_text(PPO)
    assert run(load("run.toml", ["train_steps=4", "run_dir=alone"])) == 0
    assert run(load("run.toml", ["train_steps=3", *RANKS])) == 0
    assert run(load("run.toml", ["train_steps=4"])) == 0  # from the checkpoint of the ranks, in this process
    alone, together = metrics(Path("alone")), metrics(Path("run"))
    assert [row["train_step"] for row in together] == [0, 1, 2, 3]
    for ours, theirs in zip(together, alone, strict=True):
        for key in ("reward/mean", "loss/loss", "loss/grad_norm", "critic/explained_variance", "critic/loss"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key
        assert ours["staleness/token_lag_max"] == 0
    for group in ("policy", "critic"):
        ours, theirs = (
            load_file(f"{name}/checkpoints/step-000004/{group}/model.safetensors") for name in ("run", "alone")
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    shapes = next(event["groups"] for event in events if event["type"] == "RunStarted")
    assert (shapes["policy"]["ranks"], shapes["critic"]["ranks"]) == (2, 2)
    worked = {event["rank"] for event in events if event["type"] == "EngineBusy" and event["group"] == "policy"}
    assert worked == {0, 1}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["groups.policy.data_parallel=2", "runtime=inproc"],
            'groups.policy.data_parallel = 2 takes 2 processes, and runtime = "inproc" is 1',
        ),
        (["groups.policy.sharding=full"], 'sharding = "full" spreads the model over data_parallel = 1 ranks'),
        (["groups.policy.data_parallel=0"], "groups.policy.data_parallel"),
        (
            ["groups.policy.data_parallel=2", "groups.policy.device=cuda:1"],
            'groups.policy.device = "cuda:1" is 1 GPU, and data_parallel = 2 takes 2',
        ),
        (
            ["groups.policy.attention=flash_attention_2", "groups.policy.layout=packed"],
            'needs layout = "packed" and dtype = "bfloat16", not "packed" and "float32"',
        ),
        (["groups.policy.sharding=half"], "groups.policy.sharding"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(PPO)
    with pytest.raises(ConfigError, match=message):
        wire(load(str(path), ["train_steps=4", *overrides]))


def test_more_ranks_than_samples_are_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(PPO)
    assert not any("data_parallel" in line for line in derive(load(str(path), ["train_steps=4", *RANKS])).warnings)
    found = derive(load(str(path), ["train_steps=4", "groups.critic.data_parallel=6"])).warnings
    assert any("groups.critic.data_parallel = 6, and a train step has 4 samples: 2 ranks" in line for line in found)
