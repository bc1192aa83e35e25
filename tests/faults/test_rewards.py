"""Rewards, engines and data that fail: counted and named while something is left, an end with a name when not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrlhf.observe.events import Settled
from tests.faults import scene
from tests.faults.forks import Forks
from tests.faults.tasks import kind

REWARD = "groups.reward.function=tests.faults.tasks:"


def failures(run: Path) -> list[str]:
    return [event.error for event in scene.events(run) if isinstance(event, Settled) and event.state == "failed"]


def test_L6_a_reward_that_hangs_frees_its_place_and_the_run_goes_on(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path), tmp_path / "run"
    child = forks.start(tmp_path, name, REWARD + "hangs", "groups.reward.timeout=0.2", "train_steps=8")
    assert child.wait() == 0
    assert scene.summary(run)["failed_leases"] == len(failures(run)) > 0
    assert all("ran longer than groups.reward.timeout = 0.2 s" in error for error in failures(run))
    assert "prompt" in child.text
    assert scene.summary(run)["train_steps"] == 8


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("nothing", "gave None; return a number"),
        ("not_a_number", "gave nan; return a finite number"),
        ("fails", "order"),
    ],
)
def test_N8_A2_a_reward_that_always_fails_ends_the_run_and_names_the_failure(
    forks: Forks, tmp_path: Path, function: str, words: str
) -> None:
    name, run = scene.write(tmp_path), tmp_path / "run"
    child = forks.start(tmp_path, name, REWARD + function, "limits.max_filtered=20")
    assert child.wait() == 1
    said = scene.summary(run)
    assert (said["status"], said["reason"], said["train_steps"]) == ("failed", "Exhausted", 0)
    assert "20 prompts in a row were filtered, failed or timed out (limits.max_filtered = 20)" in said["message"]
    assert "the last failure was SampleError: prompt " in said["message"]
    assert words in said["message"]
    assert child.left == []
    assert f"error: Exhausted: {said['message']}" in child.text
    assert "Traceback" not in child.text


def test_A2_data_that_ends_before_one_train_step_is_no_success(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path), tmp_path / "run"
    child = forks.start(tmp_path, name, REWARD + "fails", "data.options.rows=3", "data.epochs=1")
    assert child.wait() == 1
    assert scene.summary(run)["reason"] == "Exhausted"
    assert "the data has ended before one train step was done" in child.text
    assert "'failed': 3" in child.text
    assert "the grader is out of order" in child.text


def test_N8_bad_rewards_name_their_prompt_and_are_never_averaged(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path), tmp_path / "run"
    child = forks.start(tmp_path, name, REWARD + "mixed", "train_steps=8", "limits.max_filtered=200")
    assert child.wait() == 0
    errors = failures(run)
    for words in ("raised ValueError: no grade for ", "gave None; return a number", "gave nan; return a finite"):
        assert any(words in error for error in errors), words
    assert all(error.startswith("SampleError: prompt ") for error in errors)
    assert all(row["reward/mean"] is not None for row in scene.rows(run))
    assert scene.rows(run)[-1]["leases/failed"] <= len(errors) == scene.summary(run)["failed_leases"]


def test_a_failed_run_keeps_its_train_steps_and_goes_on(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path), tmp_path / "run"
    child = forks.start(tmp_path, name, REWARD + "fails_later", "checkpoint.every=0", "limits.max_filtered=12")
    assert child.wait() == 1
    said = scene.summary(run)
    assert said["reason"] == "Exhausted"
    assert 0 < said["train_steps"] < 6
    assert scene.steps_on_disk(run)[-1] == said["train_steps"]
    assert f"the same command goes on from run/checkpoints/step-{said['train_steps']:06d}" in child.text
    assert forks.start(tmp_path, name).wait() == 0
    assert [row["train_step"] for row in scene.rows(run)] == list(range(6))


def test_a_prompt_that_does_not_fit_fails_alone(forks: Forks, tmp_path: Path) -> None:
    words = ["abc", "abcdefghabcdefgh", "cde", "fgh", "bcd", "hgf", "gfe", "fed"]
    lines = [json.dumps({"prompt": f"{word}>", "answer": word[::-1]}) for word in words]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    source = scene.BASE[scene.BASE.index("source =") : scene.BASE.index("epochs =")]
    name, run = scene.write(tmp_path, scene.BASE.replace(source, 'path = "rows.jsonl"\n')), tmp_path / "run"
    assert forks.start(tmp_path, name, "train_steps=3").wait() == 0
    assert scene.summary(run)["failed_leases"] == len(failures(run)) > 0
    assert all("the engine said: " in error for error in failures(run))


@pytest.mark.parametrize(("last", "rollouts"), [("train", [4, 4, 2]), ("drop", [4, 4])])
def test_L2_the_end_of_the_data_has_a_name(forks: Forks, tmp_path: Path, last: str, rollouts: list[int]) -> None:
    name, run = scene.write(tmp_path), tmp_path / "run"
    child = forks.start(tmp_path, name, "data.options.rows=10", "data.epochs=1", "train_steps=100", f"data.last={last}")
    assert child.wait() == 0
    said = scene.summary(run)
    assert (said["status"], said["reason"]) == ("completed", "data")
    assert [row["rollouts"] for row in scene.rows(run)] == rollouts
    assert said["leases"].get("dropped(end)", 0) == 0, "counted after the last train step"
    ended = scene.manifest(run)["ledger"]["books"]["ended"]
    assert ended["consumed"] == sum(rollouts)
    child = forks.start(tmp_path, name, "data.options.rows=10", "data.epochs=1", "train_steps=100", f"data.last={last}")
    assert child.wait() == 0
    assert "holds a completed run" in child.text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["off_policy="], "off_policy is not chosen and max_staleness = 2 trains on older versions"),
        (["groups.rollout.top_p=0.9"], "groups.rollout.top_p = 0.9 would cut the distribution"),
        (["groups.rollout.top_k=5"], "groups.rollout.top_k = 5 would cut the distribution"),
        (["publish.every=3"], "publish.every = 3 is above lookahead + 1 = 2"),
        (["groups.rollout.stop=['ab']"], "groups.rollout.stop: 'ab' is 2 tokens for this model; it must be 1"),
        (
            ["groups.rollout.max_sequence_tokens=99"],
            "max_sequence_tokens = 99, and the model's max_position",
        ),
        (["groups.policy.scratch.config.hidden_sise=4"], "groups.policy.scratch: qwen2 has no configuration field"),
        (["algorithm=tests.faults.tasks:Demanding"], "settings.beta is missing; tests.faults.tasks:Demanding has no"),
        (["data.chat=true"], "data.chat = true, but the tokenizer has no chat template"),
        (["groups.reward.function=tests.faults.tasks:grade"], "groups.reward.function = "),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_N3_N4_a_run_that_cannot_be_right_is_refused_and_writes_nothing(
    forks: Forks, tmp_path: Path, overrides: list[str], words: str
) -> None:
    name = scene.write(tmp_path)
    child = forks.start(tmp_path, name, *overrides)
    assert child.wait() == 2
    assert child.text.startswith("error: ")
    assert words in child.text
    assert child.text.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_scene_has_prompts_of_every_kind() -> None:
    letters = "abcdefgh"
    assert {kind(f"{a}{b}{c}>") for a in letters for b in letters for c in letters} == set(range(9))
