"""One run directory, one process; a start that did not get far leaves nothing that misleads; stages in `after`."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.faults import scene
from tests.faults.forks import Forks

BUILD = "asyncrlhf.backends.torch.train:TorchTrainer.__init__"
TOKENIZER = "transformers:PreTrainedTokenizerFast.save_pretrained"


def stages(directory: Path, *, model: str = "first/final") -> str:
    """A run of two stages: `second.toml` goes on with the model of `first.toml`."""
    scene.write(
        directory, scene.BASE.replace('"run"', '"first"').replace("train_steps = 6", "train_steps = 2"), "first.toml"
    )
    start, end = scene.BASE.index("[groups.policy.scratch]"), scene.BASE.index("[groups.policy.optimizer]")
    text = scene.BASE[:start] + f'[groups.policy]\nmodel = "{model}"\n' + scene.BASE[end:]
    text = text.replace("[data]", 'after = ["first.toml"]\n[data]').replace('"run"', '"second"')
    return scene.write(directory, text, "second.toml")


def test_a_second_process_in_a_run_directory_is_refused(forks: Forks, tmp_path: Path) -> None:
    name = scene.write(tmp_path)
    first = forks.start(tmp_path, name, halt_at=BUILD)
    first.until((tmp_path / "halted").exists)
    second = forks.start(tmp_path, name)
    assert second.wait() == 2
    assert 'error: run_dir = "run" is in use by another process; wait for it or use another run_dir' in second.text
    (tmp_path / "go").touch()
    assert first.wait() == 0
    assert scene.summary(tmp_path / "run")["train_steps"] == 6


def test_a_model_written_from_scratch_is_whole_or_absent(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path), tmp_path / "run"
    child = forks.start(tmp_path, name, halt_at=TOKENIZER)
    child.until((tmp_path / "halted").exists)
    child.kill()
    assert not (run / "initial/policy").exists()
    wider = "groups.policy.scratch.config.hidden_size=32"
    assert forks.start(tmp_path, name, wider).wait() == 0
    assert '"hidden_size": 32' in (run / "initial/policy/config.json").read_text()
    assert not list((run / "initial").glob(".*"))


def test_a_run_goes_on_though_a_key_is_newer_than_its_checkpoint(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path), tmp_path / "run"
    assert forks.start(tmp_path, name, "train_steps=2").wait() == 0
    (path,) = run.glob("checkpoints/step-*2/manifest.json")
    manifest = json.loads(path.read_bytes())
    del manifest["fixed"]["groups.policy.scratch"]["words"]
    path.write_text(json.dumps(manifest))
    assert forks.start(tmp_path, name, "train_steps=3").wait() == 0
    assert scene.summary(run)["train_steps"] == 3
    summary = (run / "summary.json").read_bytes()
    megatron = forks.start(
        tmp_path, name, "train_steps=4", "groups.policy.backend=megatron", "groups.policy.device=cpu"
    )
    assert megatron.wait() == 2
    assert "groups.policy.backend was 'torch' when" in megatron.text
    assert (run / "summary.json").read_bytes() == summary
    other = forks.start(tmp_path, name, "train_steps=4", "groups.policy.scratch.config.hidden_size=32")
    assert other.wait() == 2
    assert "a resume cannot change it" in other.text


def test_a_model_of_a_start_that_failed_is_not_taken_for_that_of_the_next(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path), tmp_path / "run"
    child = forks.start(tmp_path, name, halt_at=BUILD)
    child.until((tmp_path / "halted").exists)
    child.kill()
    assert '"hidden_size": 16' in (run / "initial/policy/config.json").read_text()
    (tmp_path / "halted").unlink()
    assert forks.start(tmp_path, name, "groups.policy.scratch.config.hidden_size=32", "train_steps=1").wait() == 0
    assert '"hidden_size": 32' in (run / "final/config.json").read_text()


def test_a_stage_that_others_build_on_runs_first_and_is_reused(forks: Forks, tmp_path: Path) -> None:
    name = stages(tmp_path)
    assert forks.start(tmp_path, name, "train_steps=2").wait() == 0
    assert scene.summary(tmp_path / "first")["train_steps"] == 2
    before = scene.contents(tmp_path / "first")
    child = forks.start(tmp_path, name, "train_steps=3")
    assert child.wait() == 0
    assert "first: complete, reused" in child.text
    assert scene.contents(tmp_path / "first") == before
    child = forks.start(tmp_path, name, "train_steps=3")
    assert child.wait() == 0
    assert child.text.startswith("second holds a completed run of 3 train steps")

    text = (tmp_path / "first.toml").read_text()
    scene.write(tmp_path, text.replace("learning_rate = 1e-3", "learning_rate = 2e-3"), "first.toml")
    child = forks.start(tmp_path, name)
    assert child.wait() == 2
    assert 'run_dir = "first" was made with another configuration: groups.policy.optimizer.learning_rate' in child.text
    assert "was 0.001 and is 0.002 now" in child.text


def test_stopping_a_stage_stops_what_builds_on_it(forks: Forks, tmp_path: Path) -> None:
    name = stages(tmp_path)
    child = forks.start(tmp_path, name, halt_at=BUILD)
    child.until((tmp_path / "halted").exists)
    child.signal(signal.SIGINT)
    child.until(lambda: "SIGINT" in child.text)
    (tmp_path / "go").touch()
    assert child.wait() == 130
    assert scene.summary(tmp_path / "first")["status"] == "stopped"
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["groups.policy.model=elsewhere"], 'groups.policy.model = "elsewhere" is not a Hugging Face directory'),
        (["run_dir=first"], 'run_dir = "first" is also that of a stage in `after`'),
        (["after=['second.toml']"], 'run_dir = "second" is also that of a stage in `after`'),
        (["after=['third.toml']"], "third.toml: there is no such file"),
        (["resume=nowhere"], 'resume = "nowhere" is not a complete checkpoint'),
        (["run_dir=second.toml/run"], 'run_dir = "second.toml/run" cannot be written'),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_refusal_comes_before_the_first_stage(forks: Forks, tmp_path: Path, overrides: list[str], words: str) -> None:
    name = stages(tmp_path)
    child = forks.start(tmp_path, name, *overrides)
    assert child.wait() == 2
    assert words in child.text
    assert not (tmp_path / "first").exists()
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("tasks:graded", "tasks:grated", "tests.faults.tasks:grated"),
        ("[data]", "after = ['second.toml']\n[data]", "first.toml comes after itself; take it out of one of the files"),
    ],
)
def test_a_mistake_in_a_stage_is_found_before_it_runs(
    forks: Forks, tmp_path: Path, old: str, new: str, words: str
) -> None:
    name = stages(tmp_path)
    scene.write(tmp_path, (tmp_path / "first.toml").read_text().replace(old, new), "first.toml")
    child = forks.start(tmp_path, name)
    assert child.wait() == 2
    assert words in child.text
    assert not (tmp_path / "first").exists()
