"""A trained model cut over ranks by megatron-core, through the launcher, and a resume in another layout."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from asyncrlhf.config.load import load
from asyncrlhf.errors import ConfigError
from asyncrlhf.launch import check, run
from asyncrlhf.models import Models
from asyncrlhf.wiring import wire
from tests.integration.tiny import SCRATCH, grpo
from tests.integration.torch_scene import distance, trainer, weights

pytestmark = pytest.mark.timeout(600)

MEGATRON = (
    SCRATCH.replace("num_key_value_heads = 1", "num_key_value_heads = 2")
    + """
[groups.policy]
backend = "megatron"
device = "cpu"
"""
)
GRPO = grpo(
    model=MEGATRON,
    top="""
runtime = "local"
train_steps = 1
prompts_per_step = 2
answers_per_prompt = 4
max_staleness = 0
""",
    groups="""
[settings.loss]
kl = 0.1
[groups.reference]
backend = "megatron"
device = "cpu"
[checkpoint]
every = 2
""",
).replace('runtime = "inproc"\n', "", 1)


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_grpo_cut_over_ranks_is_the_run_of_the_torch_engine_also_in_another_layout(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    Path("run.toml").write_text(GRPO)
    torch_alone = ["runtime=inproc", "groups.policy.backend=torch", "groups.reference.backend=torch", "run_dir=alone"]
    assert run(load("run.toml", ["train_steps=5", *torch_alone])) == 0
    assert run(load("run.toml", ["train_steps=3", "groups.policy.tensor_parallel=2"])) == 0
    assert run(load("run.toml", ["train_steps=5", "groups.policy.pipeline_parallel=2"])) == 0
    alone, cut = metrics(Path("alone")), metrics(Path("run"))
    assert [row["train_step"] for row in cut] == [0, 1, 2, 3, 4]
    for ours, theirs in zip(cut, alone, strict=True):
        for key in ("reward/mean", "response_length/mean", "loss/loss", "loss/grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key
        assert max(ours["logprob_gap"], ours["probe_gap"]) < 1e-4  # the sampler, a torch engine, has megatron's weights
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    worked = {event["rank"] for event in events if event["type"] == "EngineBusy" and event["group"] == "policy"}
    assert worked == {0, 1}
    last, expected = trainer(str(final("run"))), trainer(str(final("alone")))
    assert distance(weights(last), weights(expected)) < 1e-3


def final(run: str) -> Path:
    """The newest model of a run."""
    return max(Path(run, "checkpoints").iterdir()) / "policy"


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.toml"
    path.write_text(GRPO)
    inproc = load(str(path), ["runtime=inproc", "groups.policy.tensor_parallel=2", "groups.policy.pipeline_parallel=2"])
    with pytest.raises(ConfigError, match=r"tensor_parallel = 2 \* pipeline_parallel = 2 takes 4 processes"):
        wire(inproc)
    with pytest.raises(ConfigError, match=r'groups.policy: device = "auto" takes CUDA, which is not here'):
        Models.require_devices(wire(load(str(path), ["groups.policy.device=auto"])))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"groups.policy: .*pip install .asyncrlhf\[megatron\]"):
        Models.require_devices(wire(load(str(path), [])))


def test_sizes_that_do_not_fit_the_model_start_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.chdir(tmp_path)
    Path("run.toml").write_text(GRPO)
    with pytest.raises(ConfigError, match="tensor_parallel = 3 does not divide 2 key/value heads; use 1 or 2"):
        run(load("run.toml", ["train_steps=1", "groups.policy.tensor_parallel=3"]))


def test_check_refuses_sizes_and_devices_that_a_run_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.toml"
    path.write_text(GRPO)

    def refused(*overrides: str, table: str = "policy") -> str:
        with pytest.raises(ConfigError, match=rf"^groups.{table}: ") as caught:
            check(load(str(path), list(overrides)))
        return str(caught.value)

    assert "run_dir" in check(load(str(path), ["groups.policy.tensor_parallel=2"]))
    words = "tensor_parallel = 3 does not divide 2 key/value heads; use 1 or 2"
    assert words in refused("groups.policy.tensor_parallel=3")
    assert words in refused("groups.reference.tensor_parallel=3", table="reference")
    assert "pipeline_parallel = 3 does not divide 2 layers" in refused("groups.policy.pipeline_parallel=3")
    experts = ["groups.policy.expert_parallel=2", "groups.policy.data_parallel=2"]
    assert "expert_parallel = 2 does not divide 1 experts; use 1" in refused(*experts)
    vllm = ["groups.rollout.backend=vllm", "groups.rollout.tensor_parallel=4"]
    assert "tensor_parallel = 4 does not divide 2 attention heads" in refused(*vllm, table="rollout")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert refused("groups.policy.device=auto") == (
        'groups.policy: device = "auto" with backend = "megatron" takes 1 GPU, and this machine has 0; set device = '
        '"cpu"'
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert 'device = "cuda" and tensor_parallel = 2 with backend = "megatron" takes 2 GPUs, and this machine has 1' in (
        refused("groups.policy.device=cuda", "groups.policy.tensor_parallel=2")
    )
    far = ["runtime=ray", "ray.address=far:1", "groups.policy.device=cuda", "groups.policy.tensor_parallel=2"]
    assert "run_dir" in check(load(str(path), far))
