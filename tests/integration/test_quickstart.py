"""The README's first command, as a user runs it: the quickstart learns within its bound, from one command; then the
same task with vLLM, shorter, from the warm-up that is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs of this module are: configurations name run directories relative to the current one."""
    return tmp_path_factory.mktemp("quickstart")


def asyncrlhf(directory: Path, *arguments: str) -> str:
    """What the command line prints."""
    run = subprocess.run(
        [sys.executable, "-m", "asyncrlhf", *arguments],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def results(run: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Summary, and the rows of all train steps."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return json.loads((run / "summary.json").read_text()), rows


@pytest.mark.timeout(900)
def test_quickstart_learns_with_bounded_staleness(directory: Path) -> None:
    config = str(ROOT / "configs" / "quickstart.toml")
    asyncrlhf(directory, config)
    summary, rows = results(directory / "runs/quickstart")
    assert summary["status"] == "completed"
    assert summary["train_steps"] == 200
    assert summary["reward"]["first"] < 0.5
    assert summary["reward"]["last"] >= 0.75
    assert summary["staleness"]["bound"] == 4
    assert 0 < summary["staleness"]["max_token_lag"] <= 4
    tokens = summary["tokens"]
    assert tokens["generated"] == tokens["trained"] + tokens["masked"] + tokens["dropped"] + tokens["open"]
    assert [row["train_step"] for row in rows] == list(range(200))
    assert max(row["reward/mean"] for row in rows) >= 0.8

    assert "completed run of 200 train steps" in asyncrlhf(directory, config)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory / "runs/quickstart/final")
    model = AutoModelForCausalLM.from_pretrained(directory / "runs/quickstart/final")
    prompt = tokenizer("hello>", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=7, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "olleh"


@pytest.mark.timeout(900)
def test_quickstart_learns_with_vllm_too(directory: Path) -> None:
    """A fifth of its steps; the warm-up is the one that the run above has left, or is made here."""
    asyncrlhf(directory, str(ROOT / "configs" / "quickstart_vllm.toml"), "train_steps=40")
    summary, rows = results(directory / "runs/quickstart-vllm")
    assert summary["status"] == "completed"
    rewards = [row["reward/mean"] for row in rows]
    assert len(rewards) == 40
    assert sum(rewards[-10:]) / 10 > sum(rewards[:5]) / 5 + 0.12, rewards
    assert 0 < summary["staleness"]["max_token_lag"] <= 2
    assert max(row["probe_gap"] for row in rows if "probe_gap" in row) < 1e-4
    tokens = summary["tokens"]
    assert tokens["generated"] == tokens["trained"] + tokens["masked"] + tokens["dropped"] + tokens["open"]
