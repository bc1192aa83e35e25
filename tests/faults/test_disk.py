"""A disk that is full, and a directory that cannot be written: said clearly, with the older checkpoint still whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import scene
from tests.faults.forks import Forks

RUN = "run.toml"


def test_a_checkpoint_that_does_not_fit_on_the_disk(forks: Forks, trained: Path) -> None:
    run = trained / "run"
    model = (run / "checkpoints/step-000004/policy/model.safetensors").stat().st_size
    state = (run / "checkpoints/step-000004/policy/trainer.pt").stat().st_size
    child = forks.start(trained, RUN, file_bytes=(model + state) // 2)
    assert child.wait() == 1
    said = scene.summary(run)
    assert (said["status"], said["reason"], said["train_steps"]) == ("failed", "CheckpointError", 6)
    assert "error: CheckpointError: cannot write run/checkpoints/step-000006: " in child.text
    assert "the newest complete checkpoint is step-000004; make room on the disk" in child.text
    assert "Traceback" not in child.text
    assert scene.steps_on_disk(run) == [2, 4]
    assert not list((run / "checkpoints").glob(".*")), "the space is given back"
    assert forks.start(trained, RUN).wait() == 0
    assert scene.lineage(run).resumed_from == [None, 4]
    assert [row["train_step"] for row in scene.rows(run)] == list(range(6))


@pytest.mark.parametrize("room", [0, 3000])
def test_log_files_that_do_not_fit_on_the_disk(forks: Forks, trained: Path, room: int) -> None:
    run = trained / "run"
    size = (run / "events.jsonl").stat().st_size
    child = forks.start(trained, RUN, file_bytes=size + room)
    assert child.wait() == 1
    assert "error: OSError: " in child.text
    assert "File too large" in child.text
    assert "the same command goes on from run/checkpoints/step-000004" in child.text
    assert "Traceback" not in child.text
    assert scene.summary(run)["status"] == "failed"
    assert (run / "events.jsonl").read_bytes().endswith(b"\n"), "no half line"
    assert forks.start(trained, RUN).wait() == 0
    assert [row["train_step"] for row in scene.rows(run)] == list(range(6))


def test_a_new_model_that_does_not_fit_on_the_disk(forks: Forks, tmp_path: Path) -> None:
    name = scene.write(tmp_path)
    child = forks.start(tmp_path, name, file_bytes=5000)
    assert child.wait() == 2
    assert "error: groups.policy.scratch: no model can be written to run/initial/policy: " in child.text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["file/run", "file", "/proc/nowhere/run"])
def test_a_run_directory_that_cannot_be_written(forks: Forks, tmp_path: Path, place: str) -> None:
    name = scene.write(tmp_path)
    (tmp_path / "file").write_text("not a directory")
    before = scene.contents(tmp_path)
    child = forks.start(tmp_path, name, f"run_dir={place}")
    assert child.wait() == 2
    assert f'error: run_dir = "{place}" cannot be written: ' in child.text
    assert scene.contents(tmp_path) == before
