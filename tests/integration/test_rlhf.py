"""From preferences to a reward model to PPO with four models, with the real engines, through the launcher."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification, AutoTokenizer

from algorithms.ppo import PPOState
from asyncrlhf import ops
from asyncrlhf.backends.torch.options import ScorerOptions, TrainerOptions
from asyncrlhf.backends.torch.score import TorchScorer
from asyncrlhf.backends.torch.scratch import write_model
from asyncrlhf.backends.torch.train import TorchTrainer
from asyncrlhf.config.load import load
from asyncrlhf.control.checkpoint import Manifest
from asyncrlhf.errors import ConfigError
from asyncrlhf.launch import run
from asyncrlhf.messages import ArrayColumn, TrainBatch, unpack
from asyncrlhf.wiring import wire
from tests.integration.tiny import SCRATCH

REWARD_MODEL = f"""
algorithm = "algorithms.reward_model:RewardModel"
run_dir = "rm"
runtime = "inproc"
train_steps = 40
prompts_per_step = 16
[data]
source = "tests.integration.tiny:preferences"
options = {{ rows = 500 }}
response = "chosen"
rejected = "rejected"
{SCRATCH.replace("policy", "reward_model")}
[groups.reward_model]
layout = "shared"
[groups.reward_model.optimizer]
learning_rate = 3e-3
[observe]
console = "off"
trace = false
"""

PPO = f"""
algorithm = "algorithms.ppo:PPO"
run_dir = "ppo"
runtime = "inproc"
prompts_per_step = 8
answers_per_prompt = 2
max_staleness = 2
lookahead = 1
off_policy = "decoupled"
[settings]
minibatches = 2
critic_warmup = 2
[settings.kl]
coefficient = 0.02
target = 8.0
[data]
source = "asyncrlhf.data.tasks:reverse"
options = {{ length = 2, alphabet = "abc" }}
{SCRATCH}
[groups.policy.optimizer]
learning_rate = 3e-3
[groups.critic]
model = "rm/final"
new_head = true
[groups.critic.optimizer]
learning_rate = 3e-3
[groups.reference]
[groups.reward]
backend = "torch"
model = "rm/final"
[groups.rollout]
max_tokens = 6
max_sequence_tokens = 12
[checkpoint]
every = 8
[observe]
console = "off"
trace = false
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a trained reward model in rm/."""
    directory = tmp_path_factory.mktemp("rlhf")
    before = Path.cwd()
    os.chdir(directory)
    try:
        Path("rm.toml").write_text(REWARD_MODEL)
        assert run(load("rm.toml")) == 0
    finally:
        os.chdir(before)
    return directory


@pytest.fixture
def inside(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    Path("ppo.toml").write_text(PPO)
    shutil.rmtree("ppo", ignore_errors=True)


def rows(directory: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(directory, "metrics.jsonl").read_text().splitlines()]


def batch_of(texts: list[str]) -> TrainBatch:
    """Each text as the answer to a prompt of one token."""
    tokenizer = AutoTokenizer.from_pretrained("rm/final")
    ids = [[0, *tokenizer.encode(text, add_special_tokens=False)] for text in texts]
    lengths = tuple(len(row) - 1 for row in ids)
    return TrainBatch(
        train_step=0,
        prompt_lengths=(1,) * len(ids),
        response_lengths=lengths,
        unmasked=lengths,
        rollouts=tuple(range(len(ids))),
        columns={"token_ids": ArrayColumn("sequence", tuple(np.array(row, np.int32) for row in ids))},
    )


@pytest.mark.usefixtures("inside")
def test_a_reward_model_learns_preferences_and_is_the_same_model_everywhere() -> None:
    found = rows("rm")
    assert found[0]["loss/loss"] == pytest.approx(np.log(2), abs=1e-4)
    assert found[0]["loss/accuracy"] == 0.5
    assert fmean(row["loss/accuracy"] for row in found[-10:]) > 0.85
    assert found[-1]["loss/margin"] > 1
    assert all(row["reward/mean"] is None for row in found)

    batch = batch_of(["a", "aaa", "bbb", "cabac", "c", "aab", "bcbcb"])
    scorer = TorchScorer(ScorerOptions(model="rm/final", head="value", device="cpu"))
    trained = TorchTrainer(TrainerOptions(model="rm/final", head="value", device="cpu"))
    module = AutoModelForTokenClassification.from_pretrained("rm/final")
    with torch.no_grad():
        plain = [
            float(module(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, -1, 0])
            for ids in batch.columns["token_ids"].fetch()
        ]
    np.testing.assert_allclose(scorer.scores(batch), trained.scores(batch), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(scorer.scores(batch), plain, rtol=1e-4, atol=1e-5)
    assert plain[1] > plain[2]


@pytest.mark.usefixtures("inside")
def test_ppo_with_four_models_learns_and_resumes_with_its_state() -> None:
    assert run(load("ppo.toml", ["train_steps=24"])) == 0
    manifest = msgspec.json.decode(Path("ppo/checkpoints/step-000024/manifest.json").read_bytes(), type=Manifest)
    assert manifest.state is not None
    state = unpack(manifest.state)
    assert isinstance(state, PPOState)
    assert state.rewards.count == 24 * 16
    assert run(load("ppo.toml", ["train_steps=32"])) == 0

    found = rows("ppo")
    assert [row["train_step"] for row in found] == list(range(32))
    assert found[24]["state/rewards/count"] == 25 * 16, "the state went on where it was"
    assert found[24]["state/kl_coefficient"] == pytest.approx(state.kl_coefficient, rel=0.021)
    assert fmean(r["reward/mean"] for r in found[-8:]) > fmean(r["reward/mean"] for r in found[:3]) + 0.4
    assert found[0]["critic/explained_variance"] == pytest.approx(0, abs=1e-5), "the critic's head began at 0"
    assert [row.get("loss/loss") is None for row in found[:3]] == [True, True, False], "the critic warms up alone"
    assert found[0]["state/kl"] == pytest.approx(0, abs=1e-4)
    assert found[-1]["state/kl"] > 0.05
    for name in (
        "loss/clip_fraction",
        "critic/loss",
        "critic/clip_fraction",
        "critic/explained_variance",
        "critic/scaled_reward",
        "state/kl_coefficient",
        "busy/reward",
        "busy/reference",
    ):
        assert isinstance(found[-1][name], float), name
    newest = Path("ppo/checkpoints/step-000032")
    for group in ("policy", "critic"):
        before = load_file(
            "ppo/initial/policy/model.safetensors" if group == "policy" else "rm/final/model.safetensors"
        )
        after = load_file(newest / group / "model.safetensors")
        assert any(not torch.equal(before[name], after[name]) for name in before.keys() & after.keys())


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    "changes",
    [
        ["settings.kl_in=loss", "settings.loss.entropy=0.01"],
        ["settings.kl.target=0", "settings.epochs=2", "max_staleness=0", "lookahead=0", "off_policy=none"],
        ["settings.scale.normalise=false", "settings.value_loss.clip=0", "groups.critic.new_head=false"],
    ],
)
def test_ppo_s_other_choices_run(changes: list[str]) -> None:
    assert run(load("ppo.toml", ["train_steps=4", *changes])) == 0
    last = rows("ppo")[-1]
    assert last["rejected_steps"] == 0
    assert isinstance(last["loss/loss"], float)
    if "settings.kl.target=0" in changes:
        assert last["state/kl_coefficient"] == 0.02
    assert ("loss/entropy" in last) == ("settings.loss.entropy=0.01" in changes)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("inside")
def test_ppo_by_reference_is_the_same_run() -> None:
    """Answers, reference log-probs, values, advantages and proximal log-probs go from actor to actor.

    The same up to float32: where a buffer begins in memory decides how torch adds up, so the last bits may differ.
    """
    same = ["train_steps=4", "max_staleness=0", "lookahead=0", "order=admission"]
    assert run(load("ppo.toml", same)) == 0
    expected = rows("ppo")
    shutil.rmtree("ppo")
    assert run(load("ppo.toml", [*same, "runtime=ray", "ray.inline_bytes=0", "checkpoint.every=1"])) == 0
    for row, found in zip(expected, rows("ppo"), strict=True):
        for name in ("reward/mean", "state/kl", "loss/loss", "critic/loss", "critic/explained_variance", "grad_norm"):
            if row.get(name) is None:
                assert found.get(name) is None, name
            else:
                assert found[name] == pytest.approx(row[name], rel=1e-4, abs=1e-6), name


@pytest.mark.usefixtures("inside")
def test_four_models_share_a_tokenizer_and_a_reward_model_has_a_head(capfd: pytest.CaptureFixture[str]) -> None:
    config = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    write_model("other", characters="abcdefgh<", config=config)
    write_model("headless", characters="abcdefgh>", config=config)
    with pytest.raises(ConfigError, match=r"groups\.reward\.model = 'other' has another vocabulary than '.*policy'"):
        run(load("ppo.toml", ["train_steps=4", "groups.reward.model=other"]))
    assert run(load("ppo.toml", ["train_steps=4", "groups.reward.model=headless"])) == 1
    assert "lacks 1 weights of Qwen2ForTokenClassification, among them 'score.weight'" in capfd.readouterr().err


@pytest.mark.usefixtures("inside")
def test_a_reward_model_needs_whole_pairs() -> None:
    with pytest.raises(ConfigError, match='at_deadline = "mask" .* settings.loss of .*RewardModel works on whole seq'):
        wire(load("rm.toml", ["max_staleness=2", "off_policy=none"]))
    Path("unpaired.toml").write_text(REWARD_MODEL.replace('rejected = "rejected"', ""))
    with pytest.raises(ConfigError, match=r"data.rejected is missing; algorithms.reward_model:RewardModel needs it"):
        wire(load("unpaired.toml"))


def test_the_configuration_in_the_readme_is_accepted(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    block = next(part for part in text.split("```") if 'algorithm = "algorithms.ppo:PPO"' in part)
    top, others = "train_steps = 1\nprompts_per_step = 8\nrun_dir = 'ppo'", "[data]\npath = 'x.jsonl'\n"
    text = re.sub("# \\.\\.\\. .*", top, block.removeprefix("toml"))
    (tmp_path / "ppo.toml").write_text(f"{text}{others}[groups.rollout]\nmax_tokens = 4\n")
    wiring = wire(load(str(tmp_path / "ppo.toml")))
    assert set(wiring.roles.values()) == {"policy", "critic", "reference", "reward", "rollout"}
    assert wiring.settings["kl"] == ops.KLControl(coefficient=0.05, target=6.0)
