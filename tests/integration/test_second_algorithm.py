"""The seams carry another shape of algorithm: two trained models, many optimizer steps, an extra stage, a state."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from asyncrlhf.config.load import load
from asyncrlhf.control.checkpoint import Manifest
from asyncrlhf.launch import run
from asyncrlhf.messages import unpack
from tests.integration.actor_critic import Learnt
from tests.integration.tiny import SCRATCH, grpo

CRITIC = f"{SCRATCH.replace('groups.policy', 'groups.critic')}[groups.critic]\nhead = 'value'\n"


def config_of(directory: Path, staleness: str) -> Path:
    path = directory / "config.toml"
    path.write_text(
        grpo(
            algorithm="tests.integration.actor_critic:ActorCritic",
            top=f"prompts_per_step = 4\nanswers_per_prompt = 2\n{staleness}",
            groups=CRITIC + "[checkpoint]\nevery = 2",
        )
    )
    os.chdir(directory)
    return path


@pytest.mark.parametrize(
    "staleness", ["max_staleness = 0", "max_staleness = 4\nlookahead = 2\noff_policy = 'decoupled'"]
)
def test_two_models_an_extra_stage_and_state(tmp_path: Path, staleness: str) -> None:
    path = config_of(tmp_path, staleness)
    assert run(load(str(path), ["train_steps=4"])) == 0
    assert run(load(str(path), ["train_steps=6"])) == 0

    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    steps = Counter((e["group"], e["train_step"]) for e in events if e["type"] == "OptimizerStep" and e["applied"])
    assert steps == {(group, t): 4 for group in ("policy", "critic") for t in range(6)}
    uids = [uid for e in events if e["type"] == "Popped" for uid in e["uids"]]
    assert len(uids) == len(set(uids)) == 24
    versions = [e["policy_version"] for e in events if e["type"] == "StepEnded"]
    assert versions == [1, 2, 3, 4, 5, 6]
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["staleness"]["max_token_lag"] <= summary["staleness"]["bound"]

    manifest = msgspec.json.decode(Path("run/checkpoints/step-000006/manifest.json").read_bytes(), type=Manifest)
    assert manifest.state is not None
    learnt = unpack(manifest.state)
    assert isinstance(learnt, Learnt)
    assert learnt.train_steps == 6, "the state of the first run was restored and counted on"
    assert manifest.optimizer_steps == {"policy": 24, "critic": 24}
    for group in ("policy", "critic"):
        before = load_file(f"run/initial/{group}/model.safetensors")
        after = load_file(f"run/checkpoints/step-000006/{group}/model.safetensors")
        assert any(not torch.equal(before[name], after[name]) for name in before.keys() & after.keys())
