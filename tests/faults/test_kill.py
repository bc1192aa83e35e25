"""kill -9 at any moment, then resume: nothing is trained twice, nothing is lost, every counter goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from asyncrlhf.observe.events import Granted, Popped, RunStarted
from tests.faults import scene
from tests.faults.drill import MODES, check, drill
from tests.faults.forks import Forks

SAVE = "asyncrlhf.backends.torch.train:TorchTrainer.save_state"
SUPERVISED = (
    scene.BASE.replace("algorithms.grpo:GRPO", "algorithms.sft:SFT")
    .replace("epochs = 2", 'epochs = 2\nresponse = "answer"')
    .replace("answers_per_prompt = 2\n", "")
    .replace("train_steps = 6", "train_steps = 20")
    .replace("learning_rate = 1e-3", 'learning_rate = 1e-3\nschedule = "cosine"\nwarmup_steps = 3')
)
SUPERVISED = SUPERVISED[: SUPERVISED.index("[groups.rollout]")] + SUPERVISED[SUPERVISED.index("[checkpoint]") :]


@pytest.mark.parametrize("mode", range(len(MODES)), ids=[" ".join(mode) or "plain" for mode in MODES])
def test_R1_kills_and_every_prompt_of_both_epochs_ends_once(forks: Forks, tmp_path: Path, mode: int) -> None:
    """Three kills, unless the machine is so slow to send them that the run is over before."""
    done = drill(forks, tmp_path, 3, mode, MODES[mode], reach=15_000)
    ends = check(tmp_path / "run")
    assert done.kills
    assert ends["consumed"] > 0
    assert ends["failed"] > 0
    assert ends["filtered"] > 0


PLACES = (
    "asyncrlhf.control.rundir:RunDirectory.begin",
    "asyncrlhf.control.checkpoint:Checkpoints.begin",
    "asyncrlhf.observe.observer:Observer.truncate",
    "asyncrlhf.backends.torch.train:TorchTrainer.load_state",
    "asyncrlhf.backends.torch.train:TorchTrainer.step",
    "asyncrlhf.backends.torch.train:TorchTrainer.step#2",
    "asyncrlhf.backends.torch.train:TorchTrainer.export#2",
    "asyncrlhf.backends.torch.sample:TorchSampler.commit#2",
    "asyncrlhf.control.checkpoint:Checkpoints.save",
    "asyncrlhf.backends.torch.train:TorchTrainer.save_model",
    "asyncrlhf.control.rundir:RunDirectory.link_final",
    "asyncrlhf.observe.summary:Summary.result",
)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.partition(":")[2])
def test_R1_a_kill_at_this_place_loses_and_repeats_nothing(forks: Forks, trained: Path, place: str) -> None:
    run = trained / "run"
    child = forks.start(trained, "run.toml", halt_at=place)
    assert child.until((trained / "halted").exists)
    child.kill()
    child = forks.start(trained, "run.toml")
    assert child.wait() == 0, child.text
    assert [row["train_step"] for row in scene.rows(run)] == list(range(6))
    assert scene.lineage(run).consumed == dict.fromkeys(range(24), 1)
    assert scene.steps_on_disk(run) == [4, 6]
    assert (run / "final").resolve() == (run / "checkpoints/step-000006/policy").resolve()
    assert scene.summary(run)["status"] == "completed"


def test_R4_a_killed_run_computes_what_an_undisturbed_one_does(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path, SUPERVISED), tmp_path / "run"
    assert forks.start(tmp_path, name, "run_dir=whole").wait() == 0
    child = forks.start(tmp_path, name, "checkpoint.every=5", halt_at=f"{SAVE}#2")
    child.until((tmp_path / "halted").exists)
    child.kill()
    assert scene.steps_on_disk(run) == [0, 5]
    assert forks.start(tmp_path, name, "checkpoint.every=5").wait() == 0
    assert scene.lineage(run).resumed_from == [None, 5]
    whole, killed = scene.rows(tmp_path / "whole"), scene.rows(run)
    for key in ("train_step", "policy_version", "publish_count", "optimizer_steps", "tokens/trained"):
        assert [row[key] for row in killed] == [row[key] for row in whole], key
    losses = [[row["loss/loss"] for row in run] for run in (killed, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-6)
    rates = [row["loss/learning_rate"] for row in killed]
    assert rates == [row["loss/learning_rate"] for row in whole]
    assert len(set(rates)) > 15
    trained, expected, start = (
        load_file(tmp_path / directory / "model.safetensors")
        for directory in ("run/final", "whole/final", "whole/initial/policy")
    )
    way, gap = (sum(float(np.square(trained[n] - other[n]).sum()) for n in trained) for other in (start, expected))
    assert gap < 1e-6 * way, f"{gap:.3g} away after {way:.3g}, squared"
    kept = scene.manifest(run)
    assert (kept["train_step"], kept["publish_count"], kept["optimizer_steps"]) == (20, 20, {"policy": 20})


def test_R2_leases_after_a_resume_stay_within_the_bound(forks: Forks, tmp_path: Path) -> None:
    name, run, slow = scene.write(tmp_path), tmp_path / "run", "groups.reward.function=tests.faults.tasks:slow"
    text = (tmp_path / name).read_text()
    scene.write(tmp_path, text.replace("train_steps = 6", "train_steps = 10"))
    child = forks.start(tmp_path, name, slow, "checkpoint.every=1")
    child.until(lambda: 2 in scene.steps_on_disk(run))
    child.kill()
    before = scene.manifest(run)["ledger"]["leases"]
    assert before, "work was in flight when the checkpoint was taken"
    assert forks.start(tmp_path, name, slow, "checkpoint.every=1").wait() == 0
    live, kept = 0, sum(lease["state"] == "ready" for lease in before)
    for event in reversed(scene.events(run)):
        if isinstance(event, RunStarted):
            break
        live = 0 if isinstance(event, Popped) else live + isinstance(event, Granted)
    assert 0 < kept + live <= 4 * (1 + 1), "B * (D + 1) before the first batch is taken"
    for end in scene.lineage(run).step_ends:
        assert sum(end.leases[state] for state in ("running", "scoring", "ready")) <= 8


def test_R3_a_kill_in_the_middle_of_a_checkpoint_leaves_the_one_before(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path), tmp_path / "run"
    assert forks.start(tmp_path, name, "train_steps=2").wait() == 0
    child = forks.start(tmp_path, name, halt_at=SAVE)
    child.until((tmp_path / "halted").exists)
    child.kill()
    assert list((run / "checkpoints").glob(".step-000004.partial/policy/model.safetensors"))
    assert scene.steps_on_disk(run) == [0, 2]
    assert forks.start(tmp_path, name).wait() == 0
    assert scene.lineage(run).resumed_from == [None, 2]
    assert [row["train_step"] for row in scene.rows(run)] == list(range(6))
    assert not list((run / "checkpoints").glob(".*"))


def no_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def half_a_manifest(checkpoint: Path) -> None:
    text = (checkpoint / "manifest.json").read_bytes()
    (checkpoint / "manifest.json").write_bytes(text[: len(text) // 2])


def empty_payloads(checkpoint: Path) -> None:
    (checkpoint / "payloads.msgpack").write_bytes(b"")


def half_a_state(checkpoint: Path) -> None:
    os.truncate(checkpoint / "policy/trainer.pt", 1000)


def no_model(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "policy")


@pytest.mark.parametrize(
    "tear", [no_manifest, half_a_manifest, empty_payloads, half_a_state, no_model], ids=lambda f: f.__name__
)
def test_R3_the_newest_checkpoint_that_is_whole_is_chosen(
    forks: Forks, trained: Path, tear: Callable[[Path], None]
) -> None:
    run = trained / "run"
    assert scene.steps_on_disk(run) == [2, 4]
    tear(run / "checkpoints/step-000004")
    child = forks.start(trained, "run.toml")
    assert child.wait() == 0, child.text
    assert scene.lineage(run).resumed_from == [None, 2]
    assert ("going on from step-000002 instead" in child.text) == (tear is not no_manifest)
    assert [row["train_step"] for row in scene.rows(run)] == list(range(6))
    assert scene.steps_on_disk(run) == [4, 6]


def test_R3_train_steps_without_a_whole_checkpoint_are_no_silent_restart(forks: Forks, trained: Path) -> None:
    run = trained / "run"
    half_a_manifest(run / "checkpoints/step-000002")
    half_a_manifest(run / "checkpoints/step-000004")
    before = scene.contents(run)
    child = forks.start(trained, "run.toml")
    assert child.wait() == 2
    assert "step-000004/manifest.json is torn" in child.text
    assert "step-000002/manifest.json is torn" in child.text
    shutil.rmtree(run / "checkpoints")
    child = forks.start(trained, "run.toml")
    assert child.wait() == 2
    assert 'error: resume = "auto": run_dir = "run" holds 4 train steps and no complete checkpoint' in child.text
    assert scene.contents(run) == {path: text for path, text in before.items() if "checkpoints" not in path}
