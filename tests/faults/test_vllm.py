"""Whole runs with vLLM as rollout engine, one of which loses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import scene
from tests.faults.forks import Forks
from tests.faults.test_local import DATA, gone, kill_at
from tests.faults.test_local import engines as engines_of

pytestmark = pytest.mark.timeout(420)
PATIENCE = 200.0
VLLM = (
    DATA.replace("[groups.reference]\n", "")
    .replace("epochs = 2", "epochs = 1")
    .replace("hidden_size = 16", "hidden_size = 64")  # vLLM's heads on CPUs are of 32 or more
    .replace("[groups.rollout]\n", '[groups.rollout]\nbackend = "vllm"\n')
    .replace("lease_timeout = 20.0\nstall_timeout = 30.0", "lease_timeout = 120.0\nstall_timeout = 240.0")
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
    probes = [row["probe_gap"] for row in scene.rows(run)]
    assert max(gaps) < 1e-4
    assert max(probes) < 1e-4


def test_a_vllm_engine_is_a_ray_actor_too(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path, VLLM.replace('runtime = "local"', 'runtime = "ray"')), tmp_path / "run"
    child = forks.start(tmp_path, name)
    assert child.wait(PATIENCE) == 0, child.text
    assert scene.lineage(run).consumed == dict.fromkeys(range(40), 1)
    assert max(row["probe_gap"] for row in scene.rows(run)) < 1e-4
