"""The README's first command, as a user runs it: the quickstart learns within its bound, from one command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
def test_quickstart_learns_with_bounded_staleness(tmp_path: Path) -> None:
    # The configurations name run directories relative to the current directory: run them in an empty one.
    command = [sys.executable, "-m", "asyncrlhf", str(ROOT / "configs" / "quickstart.toml")]
    run = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    summary = json.loads((tmp_path / "runs/quickstart/summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["train_steps"] == 200
    assert summary["reward"]["first"] < 0.5
    assert summary["reward"]["last"] >= 0.75
    assert summary["staleness"]["bound"] == 4
    assert 0 < summary["staleness"]["max_token_lag"] <= 4
    tokens = summary["tokens"]
    assert tokens["generated"] == tokens["trained"] + tokens["masked"] + tokens["dropped"] + tokens["open"]
    rows = [json.loads(line) for line in (tmp_path / "runs/quickstart/metrics.jsonl").read_text().splitlines()]
    assert [row["train_step"] for row in rows] == list(range(200))
    assert max(row["reward/mean"] for row in rows) >= 0.8

    again = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0
    assert "completed run of 200 train steps" in again.stdout

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "runs/quickstart/final")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/quickstart/final")
    prompt = tokenizer("hello>", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=7, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "olleh"
