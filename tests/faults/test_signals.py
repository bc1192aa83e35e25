"""Ctrl-C and SIGTERM: the train step is finished and saved, a second signal ends at once, and nothing is lost."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from asyncrlhf.observe import WaitsSeen
from tests.faults import scene
from tests.faults.forks import Forks

SAVE = "asyncrlhf.backends.torch.train:TorchTrainer.save_state"
STEP = "asyncrlhf.backends.torch.train:TorchTrainer.step"
BUILD = "asyncrlhf.backends.torch.train:TorchTrainer.__init__"
OPEN = "asyncrlhf.data.tasks:SizedReverse.__init__"
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_a_signal_finishes_the_train_step_and_saves_it(forks: Forks, tmp_path: Path, number: signal.Signals) -> None:
    name, run = scene.write(tmp_path), tmp_path / "run"
    child = forks.start(tmp_path, name, halt_at=STEP)
    child.until((tmp_path / "halted").exists)
    child.signal(number)
    child.until(lambda: "finishing the train step" in child.text)
    (tmp_path / "go").touch()
    assert child.wait() == CODES[number]
    said = scene.summary(run)
    assert (said["status"], said["reason"], said["train_steps"]) == ("stopped", number.name, 1)
    assert scene.steps_on_disk(run) == [0, 1]
    assert "saved at train step 1; the same command goes on from there" in child.text
    assert (run / "final" / "config.json").exists()
    assert child.left == []

    again = forks.start(tmp_path, name)
    assert again.wait() == 0
    assert again.left == []
    assert [row["train_step"] for row in scene.rows(run)] == list(range(6))
    assert scene.lineage(run).resumed_from == [None, 1]


def test_sigusr1_says_who_waits_for_whom_and_the_run_goes_on(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path), tmp_path / "run"
    child = forks.start(tmp_path, name, halt_at=STEP)
    child.until((tmp_path / "halted").exists)
    child.signal(signal.SIGUSR1)
    child.until(lambda: re.search(r"^train step 0 waits \d+\.\d s for policy/0: step$", child.text, re.MULTILINE))
    (tmp_path / "go").touch()
    assert child.wait() == 0
    assert [row["train_step"] for row in scene.rows(run)] == list(range(6))
    (seen,) = (event for event in scene.events(run) if isinstance(event, WaitsSeen))
    assert any(line.endswith("for policy/0: step") for line in seen.lines)


def test_a_signal_before_a_run_has_begun_leaves_nothing(forks: Forks, tmp_path: Path) -> None:
    name = scene.write(tmp_path)
    child = forks.start(tmp_path, name, halt_at=OPEN)
    child.until((tmp_path / "halted").exists)
    child.signal(signal.SIGTERM)
    assert child.wait() == 143
    assert "stopped before run began" in child.text
    assert "Traceback" not in child.text
    assert not (tmp_path / "run").exists()


def test_a_signal_while_engines_start_stops_before_the_first_step(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path), tmp_path / "run"
    child = forks.start(tmp_path, name, halt_at=BUILD)
    child.until((tmp_path / "halted").exists)
    child.signal(signal.SIGINT)
    child.until(lambda: "SIGINT" in child.text)
    (tmp_path / "go").touch()
    assert child.wait() == 130
    assert scene.summary(run)["train_steps"] == 0
    assert scene.summary(run)["status"] == "stopped"
    assert not (run / "final").is_symlink(), "nothing has been trained"
    assert forks.start(tmp_path, name).wait() == 0


def test_a_signal_during_a_checkpoint_lets_it_be_completed(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path), tmp_path / "run"
    child = forks.start(tmp_path, name, halt_at=SAVE)
    child.until((tmp_path / "halted").exists)
    child.signal(signal.SIGTERM)
    child.until(lambda: "SIGTERM" in child.text)
    (tmp_path / "go").touch()
    assert child.wait() == 143
    assert scene.steps_on_disk(run) == [0, 2]
    assert scene.summary(run)["train_steps"] == 2


def test_a_signal_during_an_evaluation_ends_the_run(forks: Forks, tmp_path: Path) -> None:
    evaluation = """
[evaluation]
every = 2
source = "asyncrlhf.data.tasks:reverse"
options = { length = 4, alphabet = "abcdefgh", rows = 8 }
prompts = 8
max_hold = 20.0
"""
    name, run = scene.write(tmp_path, scene.BASE + evaluation), tmp_path / "run"
    function = "groups.reward.function=tests.faults.tasks:marks_long_words"
    child = forks.start(tmp_path, name, function, "train_steps=60")
    child.until((tmp_path / "evaluating").exists)
    child.signal(signal.SIGINT)
    assert child.wait() == 130
    assert scene.summary(run)["status"] == "stopped"
    assert scene.summary(run)["train_steps"] == scene.steps_on_disk(run)[-1]


def test_a_second_signal_ends_at_once(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path), tmp_path / "run"
    child = forks.start(tmp_path, name, halt_at=SAVE)
    child.until((tmp_path / "halted").exists)
    child.signal(signal.SIGINT)
    child.until(lambda: "SIGINT" in child.text)
    child.signal(signal.SIGINT)
    assert child.wait(20) == 130
    assert "stopped at once; the newest checkpoint is kept" in child.text
    assert scene.steps_on_disk(run) == [0]
    assert forks.start(tmp_path, name).wait() == 0
    assert scene.steps_on_disk(run) == [4, 6]
    assert not list((run / "checkpoints").glob(".*")), "what the first process left unfinished is gone"


def test_two_signals_end_a_run_whose_event_loop_is_blocked(forks: Forks, tmp_path: Path) -> None:
    name = scene.write(tmp_path)
    child = forks.start(tmp_path, name, "groups.reward.function=tests.faults.tasks:blocks_the_loop")
    child.until((tmp_path / "blocked").exists)
    child.signal(signal.SIGINT)
    child.until(lambda: "once more ends at once" in child.text)
    child.signal(signal.SIGTERM)
    assert child.wait(20) == 143
