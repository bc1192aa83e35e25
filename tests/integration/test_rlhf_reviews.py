"""The RLHF demo as a user runs it: four stages from one command, PPO with four networks, and judges it never saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)
def test_ppo_learns_what_people_like_and_the_judge_agrees(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncrlhf", str(ROOT / "configs/rlhf_reviews/ppo.toml")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = tmp_path / "runs/rlhf_reviews"
    assert {path.name for path in runs.iterdir()} == {"sft", "reward", "gold", "ppo"}

    pairs = [json.loads(line) for line in (runs / "reward/metrics.jsonl").read_text().splitlines()]
    assert sum(row["loss/accuracy"] for row in pairs[:5]) / 5 < 0.6
    assert sum(row["loss/accuracy"] for row in pairs[-5:]) / 5 > 0.7

    summary = json.loads((runs / "ppo/summary.json").read_text())
    assert summary["status"] == "completed"
    assert abs(summary["reward"]["first"]) < 0.4
    assert max(summary["reward"]["last"], summary["evaluation"]["last"]) >= 0.8
    judges = summary["evaluation"]["judges"]
    assert judges["gold"]["last"] - judges["gold"]["first"] >= 0.4
    assert judges["lexicon"]["last"] > judges["lexicon"]["first"]
    assert len(summary["evaluation"]["samples"]["last"]) == 3
    assert 0 < summary["staleness"]["max_token_lag"] <= summary["staleness"]["bound"] == 2

    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert "completed run of 60 train steps" in again.stdout
