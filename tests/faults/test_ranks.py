"""kill -9 of one rank of a trained model: all of them end, the rank is named, and the run goes on."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.faults import scene
from tests.faults.forks import Forks
from tests.faults.test_local import LOCAL, PATIENCE, engines, gone, kill_at

pytestmark = pytest.mark.timeout(600)


def test_L12_one_rank_is_killed_and_the_run_goes_on_from_a_checkpoint(forks: Forks, tmp_path: Path) -> None:
    text = LOCAL.replace("train_steps = 6", "train_steps = 12")
    text += '[groups.policy]\ndata_parallel = 2\nsharding = "full"\n'
    name, run = scene.write(tmp_path, text), tmp_path / "run"
    child = forks.start(tmp_path, name)
    assert child.until(lambda: {"policy/0", "policy/1"} <= set(engines(child.pid)), PATIENCE), child.text
    there = engines(child.pid)
    pid = kill_at(child, run, 3, "policy/1")
    assert child.until(lambda: "going on from run/checkpoints" in child.text, PATIENCE), child.text
    assert gone(there)
    assert child.wait(PATIENCE) == 0, child.text
    assert f"group 'policy', rank 1: process {pid} was ended by SIGKILL (signal 9)" in child.text
    assert "limits.max_restarts: 1 of 3" in child.text
    assert scene.lineage(run).consumed == dict.fromkeys(range(48), 1)
    assert [row["train_step"] for row in scene.rows(run)] == list(range(12))


def test_L12_a_megatron_rank_is_killed_in_a_step_and_the_run_goes_on_from_a_checkpoint(
    forks: Forks, tmp_path: Path
) -> None:
    """It stands still first, so that the other rank waits for it inside the step."""
    text = LOCAL.replace("train_steps = 6", "train_steps = 12")
    text = text.replace("num_key_value_heads = 1", "num_key_value_heads = 2")
    text += '[groups.policy]\nbackend = "megatron"\ndevice = "cpu"\ntensor_parallel = 2\n'
    name, run = scene.write(tmp_path, text), tmp_path / "run"
    child = forks.start(tmp_path, name)
    assert child.until(lambda: (run / "metrics.jsonl").exists() and len(scene.rows(run)) >= 3, PATIENCE), child.text
    there = engines(child.pid)
    pid = there["policy/1"]
    os.kill(pid, signal.SIGSTOP)
    within = re.compile(r"waits \d+\.\d s for policy/1: step$", re.MULTILINE)

    def asked() -> bool:
        child.signal(signal.SIGUSR1)
        time.sleep(0.2)
        if within.search(child.text) is not None:
            return True
        os.kill(pid, signal.SIGCONT)  # it was at something else
        time.sleep(0.02)
        os.kill(pid, signal.SIGSTOP)
        return False

    assert child.until(asked, PATIENCE), child.text
    os.kill(pid, signal.SIGKILL)
    assert child.until(lambda: "going on from run/checkpoints" in child.text, PATIENCE), child.text
    assert gone(there)
    assert child.wait(PATIENCE) == 0, child.text
    assert f"group 'policy', rank 1: process {pid} was ended by SIGKILL (signal 9)" in child.text
    assert scene.lineage(run).consumed == dict.fromkeys(range(48), 1)
    assert [row["train_step"] for row in scene.rows(run)] == list(range(12))
