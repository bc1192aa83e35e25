"""Torch engines that break or hang under a real run: it goes on without them, or ends with a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrlhf.observe.events import Fenced, Restarted
from tests.faults import scene
from tests.faults.forks import Forks

SAMPLER, TRAINER = "asyncrlhf.backends.torch.sample:TorchSampler", "asyncrlhf.backends.torch.train:TorchTrainer"


def test_L7_a_sampler_that_breaks_is_replaced(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path), tmp_path / "run"
    child = forks.start(tmp_path, name, break_at=f"{SAMPLER}.step")
    assert child.wait() == 0, child.text
    kinds = [type(event) for event in scene.events(run) if isinstance(event, Fenced | Restarted)]
    assert kinds == [Fenced, Restarted]
    assert "TorchSampler.step broke, as the test has asked for" in child.text
    assert scene.lineage(run).consumed == dict.fromkeys(scene.lineage(run).consumed, 1)
    assert scene.summary(run)["train_steps"] == 6


@pytest.mark.parametrize("algorithm", ["algorithms.grpo:GRPO", "tests.faults.tasks:Refused"])
def test_L10_a_trainer_that_breaks_ends_the_run_with_the_original_traceback(
    forks: Forks, tmp_path: Path, algorithm: str
) -> None:
    """Also when what its weights were read for fails first."""
    name, run = scene.write(tmp_path, scene.BASE.replace("algorithms.grpo:GRPO", algorithm)), tmp_path / "run"
    child = forks.start(tmp_path, name, break_at=f"{TRAINER}.step")
    assert child.wait() == 1
    said = scene.summary(run)
    assert (said["status"], said["reason"], said["train_steps"]) == ("failed", "GroupError", 1)
    assert f"group 'policy', rank 0: OSError: {TRAINER}.step broke, as the test has asked for" in said["message"]
    assert "halting.py" in said["message"], "the traceback"
    assert forks.start(tmp_path, name).wait() == 0
    assert [row["train_step"] for row in scene.rows(run)] == list(range(6))


def test_L1_a_sampler_that_hangs_ends_the_run_as_stalled(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path), tmp_path / "run"
    child = forks.start(tmp_path, name, "limits.lease_timeout=0", "limits.stall_timeout=8", halt_at=f"{SAMPLER}.step")
    assert child.wait() == 1, child.text
    assert scene.summary(run)["reason"] == "Stalled"
    assert "the oldest lease is uid " in child.text
    assert "running at rollout/0" in child.text
