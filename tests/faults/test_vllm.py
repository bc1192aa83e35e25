"""Whole runs with vLLM as rollout engine, one of which loses it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from asyncrlhf.observe.events import EngineBusy
from tests.faults import scene
from tests.faults.forks import Forks
from tests.faults.halting import GO, HALTED
from tests.faults.test_local import DATA, gone, kill_at
from tests.faults.test_local import engines as engines_of
from tests.faults.test_ray import process
from tests.integration.tiny import SCRATCH, grpo

pytestmark = pytest.mark.timeout(900)
PATIENCE = 400.0
VLLM = (
    DATA.replace("[groups.reference]\n", "")
    .replace("epochs = 2", "epochs = 1")
    .replace("hidden_size = 16", "hidden_size = 64")  # vLLM's heads on CPUs are of 32 or more
    .replace("[groups.rollout]\n", '[groups.rollout]\nbackend = "vllm"\n')
)


def test_L7_a_lost_vllm_engine_is_replaced_and_every_prompt_is_trained_once(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path, VLLM), tmp_path / "run"
    child = forks.start(tmp_path, name)
    killed = kill_at(child, run, 3, "rollout/0")
    there = engines_of(child.pid)
    assert child.wait(PATIENCE) == 0, child.text
    assert gone(there)
    assert f"group 'rollout', rank 0: process {killed} was ended by SIGKILL (signal 9)" in child.text
    assert "engine rollout/0 is back" in child.text
    assert scene.lineage(run).consumed == dict.fromkeys(range(40), 1)
    assert scene.summary(run)["staleness"]["max_token_lag"] <= 2
    gaps = [row["logprob_gap"] for row in scene.rows(run) if row.get("logprob_gap") is not None]
    probes = [row["probe_gap"] for row in scene.rows(run) if "probe_gap" in row]
    assert max(gaps) < 1e-4
    assert max(probes) < 1e-4


def test_a_vllm_engine_is_a_ray_actor_too(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path, VLLM.replace('runtime = "local"', 'runtime = "ray"')), tmp_path / "run"
    child = forks.start(tmp_path, name)
    assert child.wait(PATIENCE) == 0, child.text
    assert scene.lineage(run).consumed == dict.fromkeys(range(40), 1)
    assert max(row["probe_gap"] for row in scene.rows(run) if "probe_gap" in row) < 1e-4


def test_L7_megatron_and_vllm_learn_although_an_engine_dies_between_prepare_and_commit(
    forks: Forks, tmp_path: Path
) -> None:
    """GRPO of two tensor parallel ranks under Ray, and of the torch engines, on the same task."""
    text = grpo(
        model=SCRATCH.replace("hidden_size = 32", "hidden_size = 64").replace("value_heads = 1", "value_heads = 2"),
        top="""
train_steps = 30
prompts_per_step = 8
answers_per_prompt = 8
max_staleness = 2
off_policy = "decoupled"
""",
    )
    name, run = scene.write(tmp_path, text), tmp_path / "run"
    assert forks.start(tmp_path, name, "run_dir=torch").wait(PATIENCE) == 0
    others = ("backend=megatron", "device=cpu", "tensor_parallel=2")
    policy, rollout = [f"groups.policy.{key}" for key in others], "groups.rollout.backend=vllm"
    place = "asyncrlhf.groups.rollout:RolloutGroup.commit#6"
    child = forks.start(tmp_path, name, "runtime=ray", "observe.console=plain", *policy, rollout, halt_at=place)
    assert child.until((tmp_path / HALTED).exists, PATIENCE), child.text
    killed = process(run, "rollout/0")
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    (tmp_path / GO).touch()
    assert child.wait(PATIENCE) == 0, child.text
    assert f"group 'rollout', rank 0: actor of process {killed} is lost" in child.text
    assert "engine rollout/0 is back" in child.text
    rows = scene.rows(run)
    assert [row["train_step"] for row in rows] == list(range(30))
    assert max(row["probe_gap"] for row in rows if "probe_gap" in row) < 1e-4
    assert {e.rank for e in scene.events(run) if isinstance(e, EngineBusy) and e.group == "policy"} == {0, 1}
    for directory in (run, tmp_path / "torch"):
        reward = scene.summary(directory)["reward"]
        assert reward["last"] - reward["first"] > 0.4, directory
