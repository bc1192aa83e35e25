"""What a resume goes on from, what it may change, and what it must not touch."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import msgspec
import pytest

from asyncrlhf.messages import unpack
from asyncrlhf.messages.wire import Packed
from tests.faults import scene
from tests.faults.forks import Forks
from tests.faults.tasks import Steps

RUN = "run.toml"


def test_L13_a_checkpoint_at_the_end_of_an_epoch_resumes_with_the_next(forks: Forks, tmp_path: Path) -> None:
    text = (
        scene.BASE.replace("train_steps = 6\n", "").replace("epochs = 2", "epochs = 1").replace("rows = 48", "rows = 8")
    )
    name, run = scene.write(tmp_path, text), tmp_path / "run"
    child = forks.start(tmp_path, name)
    assert child.wait() == 0
    assert (scene.summary(run)["status"], scene.summary(run)["train_steps"]) == ("completed", 2)
    assert "every prompt is used up after 2 train steps" in child.text
    child = forks.start(tmp_path, name)
    assert child.wait() == 0
    assert child.text.startswith(
        "run holds a completed run of 2 train steps; its policy is run/final. To train on, raise"
    )

    assert forks.start(tmp_path, name, "data.epochs=2").wait() == 0
    assert scene.summary(run)["train_steps"] == 4
    assert scene.lineage(run).consumed == dict.fromkeys(range(16), 1)
    assert forks.start(tmp_path, name, "data.epochs=", "train_steps=5").wait() == 0
    assert [row["train_step"] for row in scene.rows(run)] == list(range(5))
    assert scene.lineage(run).consumed == dict.fromkeys(range(20), 1)


def test_a_completed_run_trains_on_with_more_train_steps(forks: Forks, trained: Path) -> None:
    run = trained / "run"
    before, rows_before = scene.contents(run), scene.rows(run)
    child = forks.start(trained, RUN, "train_steps=4")
    assert child.wait() == 0
    assert (
        "run holds a completed run of 4 train steps; its policy is run/final. To train on, raise train_steps"
        in child.text
    )
    assert scene.contents(run) == before
    assert forks.start(trained, RUN).wait() == 0
    rows = scene.rows(run)
    assert [row["train_step"] for row in rows] == list(range(6))
    assert rows[:4] == rows_before
    assert (run / "final").resolve() == (run / "checkpoints/step-000006/policy").resolve()
    assert scene.steps_on_disk(run) == [4, 6]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed=1", "seed was 0 when run/checkpoints/step-000004 was made and is 1 now"),
        ("algorithm=algorithms.variants:RLOO", "algorithm was 'algorithms.grpo:GRPO' when"),
        ("data.options.rows=44", "'rows': 48} when run/checkpoints/step-000004 was made and is {"),
        ("data.shuffle=false", "data.shuffle was True when run/checkpoints/step-000004 was made and is False now"),
        ("groups.policy.scratch.config.hidden_size=32", "groups.policy.scratch was {"),
        ("seed=2 train_steps=4", "seed was 0 when"),
    ],
)
def test_what_a_resume_cannot_change_is_refused_with_both_values(
    forks: Forks, trained: Path, override: str, words: str
) -> None:
    before = scene.contents(trained / "run")
    child = forks.start(trained, RUN, *override.split())
    assert child.wait() == 2
    assert words in child.text
    assert child.text.count("\n") == 1
    assert scene.contents(trained / "run") == before


def test_a_data_set_that_has_grown_is_refused(forks: Forks, tmp_path: Path) -> None:
    text = scene.BASE.replace(
        'source = "asyncrlhf.data.tasks:reverse"\noptions = { length = 3, alphabet = "abcdefgh", rows = 48 }',
        'path = "rows.jsonl"',
    )
    line = '{"prompt": "abc>", "answer": "cba"}\n'
    (tmp_path / "rows.jsonl").write_text(line * 16)
    name = scene.write(tmp_path, text)
    assert forks.start(tmp_path, name, "train_steps=1").wait() == 0
    (tmp_path / "rows.jsonl").write_text(line * 17)
    child = forks.start(tmp_path, name)
    assert child.wait() == 2
    assert "the number of data rows was 16 when run/checkpoints/step-000001 was made and is 17 now" in child.text


def test_batch_size_and_lookahead_may_change_on_a_resume(forks: Forks, trained: Path) -> None:
    run = trained / "run"
    changes = ("prompts_per_step=3", "lookahead=2", "max_staleness=4", "train_steps=", "off_policy=truncated_is")
    assert forks.start(trained, RUN, *changes).wait() == 0
    assert scene.lineage(run).consumed == dict.fromkeys(range(96), 1)
    rows = scene.rows(run)
    assert [row["rollouts"] for row in rows] == [4] * 4 + [3] * 26 + [2]
    assert [row["train_step"] for row in rows] == list(range(31))
    assert max(row["staleness/token_lag_max"] or 0 for row in rows) <= 4
    for end in scene.lineage(run).step_ends[4:]:
        assert sum(end.leases[state] for state in ("running", "scoring", "ready")) <= 3 * (2 + 1)


def test_going_back_to_an_older_checkpoint_forgets_what_came_after(forks: Forks, trained: Path) -> None:
    run = trained / "run"
    back = "resume=run/checkpoints/step-000002"
    assert forks.start(trained, RUN, back, "train_steps=3").wait() == 0
    assert scene.lineage(run).resumed_from == [None, 2]
    assert [row["train_step"] for row in scene.rows(run)] == [0, 1, 2]
    assert scene.steps_on_disk(run) == [2, 3]
    assert (run / "final").resolve() == (run / "checkpoints/step-000003/policy").resolve()
    assert forks.start(trained, RUN).wait() == 0
    assert scene.lineage(run).consumed == dict.fromkeys(range(24), 1)


def test_a_new_run_may_begin_with_the_checkpoint_of_another(forks: Forks, trained: Path) -> None:
    before, origin = scene.contents(trained / "run"), "resume=run/checkpoints/step-000004"
    assert forks.start(trained, RUN, origin, "run_dir=branch").wait() == 0
    branch = trained / "branch"
    assert scene.contents(trained / "run") == before, "the other run is left alone"
    assert [row["train_step"] for row in scene.rows(branch)] == [4, 5]
    assert scene.lineage(branch).resumed_from == [4]
    assert scene.manifest(branch)["ledger"]["books"]["ended"]["consumed"] == 24
    assert [row["publish_count"] for row in scene.rows(branch)] == [4, 5], "the last is under way"
    assert scene.manifest(branch)["publish_count"] == 6

    child = forks.start(trained, RUN, origin, "run_dir=branch", "train_steps=8")
    assert child.wait() == 0, "the same command goes on with the branch"
    assert [row["train_step"] for row in scene.rows(branch)] == [4, 5, 6, 7]
    assert scene.lineage(branch).resumed_from == [4, 6]
    child = forks.start(trained, RUN, origin, "run_dir=branch", "train_steps=8")
    assert child.wait() == 0
    assert "branch holds a completed run of 8 train steps" in child.text


def test_a_checkpoint_of_another_run_does_not_replace_the_run_that_is_there(forks: Forks, trained: Path) -> None:
    shutil.copytree(trained / "run", trained / "other", symlinks=True)
    before = scene.contents(trained)
    child = forks.start(trained, RUN, "resume=other/checkpoints/step-000002")
    assert child.wait() == 2
    assert 'run_dir = "run" holds a run of its own, of 4 train steps' in child.text
    assert scene.contents(trained) == before


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("resume=never", 'resume = "never", but run_dir = "run" holds a run of 4 train steps'),
        ("resume=run/checkpoints/step-000003", "is not a complete checkpoint: it has no manifest.json"),
        ("resume=yes", 'resume = "yes" is not a complete checkpoint'),
    ],
)
def test_a_resume_that_is_not_possible_is_refused(forks: Forks, trained: Path, override: str, words: str) -> None:
    before = scene.contents(trained / "run")
    child = forks.start(trained, RUN, override)
    assert child.wait() == 2
    assert words in child.text
    child = forks.start(trained, RUN, "resume=nowhere/step-000001", "run_dir=new/deep/run")
    assert child.wait() == 2
    assert not (trained / "new").exists()
    assert scene.contents(trained / "run") == before


def test_log_files_that_are_not_those_of_the_checkpoint_are_refused(forks: Forks, trained: Path) -> None:
    run = trained / "run"
    (run / "events.jsonl").write_text("")
    before = scene.contents(run)
    child = forks.start(trained, RUN)
    assert child.wait() == 2
    assert "events.jsonl holds 0 bytes, the checkpoint was taken at" in child.text
    assert scene.contents(run) == before


def test_a_link_to_the_final_model_never_dangles(forks: Forks, trained: Path) -> None:
    """Checkpoints are pruned while a completed run trains on; the one that `final` leads to stays until it moves."""
    run, often = trained / "run", ("checkpoint.every=1", "checkpoint.keep=1", "data.epochs=")
    child = forks.start(trained, RUN, "train_steps=100000", *often)
    child.until(lambda: scene.steps_on_disk(run)[-1] > 6)
    child.kill()
    first, *_, newest = scene.steps_on_disk(run)
    assert first == 4
    assert (run / "final/config.json").exists()
    assert forks.start(trained, RUN, f"train_steps={newest + 2}", *often).wait() == 0
    assert (run / "final").resolve() == (run / f"checkpoints/step-{newest + 2:06d}/policy").resolve()


def test_R4_the_state_of_an_algorithm_goes_on(forks: Forks, tmp_path: Path) -> None:
    name, run, counting = scene.write(tmp_path), tmp_path / "run", "algorithm=tests.faults.tasks:Counting"
    child = forks.start(tmp_path, name, counting, halt_at="asyncrlhf.backends.torch.train:TorchTrainer.step#4")
    child.until((tmp_path / "halted").exists)
    child.kill()
    assert forks.start(tmp_path, name, counting).wait() == 0
    assert scene.lineage(run).resumed_from == [None, 2]
    state = msgspec.convert(scene.manifest(run)["state"], Packed)
    assert unpack(state) == Steps(6)


def test_rollouts_that_no_file_can_hold_are_left_out_of_checkpoints(forks: Forks, tmp_path: Path) -> None:
    start, end = scene.BASE.index("source ="), scene.BASE.index("epochs =")
    text = scene.BASE[:start] + 'source = "tests.faults.tasks:odd_rows"\n' + scene.BASE[end:]
    name, run, scores = (
        scene.write(tmp_path, text.replace("epochs = 2", "epochs = 20")),
        tmp_path / "run",
        tmp_path / "scores",
    )
    counted = "groups.reward.function=tests.faults.tasks:counted"
    child = forks.start(tmp_path, name, counted, halt_at="asyncrlhf.backends.torch.train:TorchTrainer.step")
    child.until(lambda: scores.exists() and scores.stat().st_size == 2 * 4 * (1 + 1))
    child.signal(signal.SIGINT)
    child.until(lambda: "finishing the train step" in child.text)
    time.sleep(0.3)  # for the event loop to see it
    (tmp_path / "go").touch()
    assert child.wait() == 130
    assert scene.manifest(run, 1)["payload_count"] == 0
    assert "not in checkpoints, and sampled again after a resume: the rollout of prompt " in child.text
    assert forks.start(tmp_path, name, counted).wait() == 0
    assert [row["train_step"] for row in scene.rows(run)] == list(range(6))
    assert scene.lineage(run).consumed == dict.fromkeys(range(24), 1)


def test_ready_rollouts_are_kept_and_not_sampled_again(forks: Forks, tmp_path: Path) -> None:
    name, run, scores = scene.write(tmp_path), tmp_path / "run", tmp_path / "scores"
    counted = "groups.reward.function=tests.faults.tasks:counted"
    child = forks.start(tmp_path, name, counted, halt_at="asyncrlhf.backends.torch.train:TorchTrainer.step")
    child.until(lambda: scores.exists() and scores.stat().st_size == 2 * 4 * (1 + 1))
    child.signal(signal.SIGINT)
    child.until(lambda: "finishing the train step" in child.text)
    time.sleep(0.3)  # for the event loop to see it
    (tmp_path / "go").touch()
    assert child.wait() == 130
    assert scene.manifest(run, 1)["payload_count"] == 4
    assert forks.start(tmp_path, name, counted).wait() == 0
    assert scene.lineage(run).consumed == dict.fromkeys(range(24), 1)
    assert scores.stat().st_size == 2 * 24, "every answer has been scored once"
