"""Publishing beside training on real engines: the trainer steps on while an engine prepares, and if it dies in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrlhf import build
from asyncrlhf.config.groups import TorchRollout, TorchTrain
from asyncrlhf.config.load import load
from asyncrlhf.launch import run
from asyncrlhf.observe import read_events
from asyncrlhf.observe.events import Fenced, Popped, Published
from tests.integration.patient import ANSWERS, DEATH, STEPS
from tests.integration.tiny import grpo

RUN = f"""
train_steps = {STEPS}
prompts_per_step = 4
answers_per_prompt = {ANSWERS // 4}
max_staleness = 2
lookahead = 1
off_policy = "decoupled"
"""
PATIENT = """
[publish]
timeout = 220.0
[limits]
lease_timeout = 230.0
stall_timeout = 240.0
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_L7_the_trainer_steps_on_while_an_engine_prepares_and_when_it_dies(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepare ends only after the next train step: were the trainer to wait for it, neither would."""
    monkeypatch.setitem(build.ENGINES, TorchRollout, "tests.integration.patient:PatientSampler")
    monkeypatch.setitem(build.ENGINES, TorchTrain, "tests.integration.patient:TellingTrainer")
    monkeypatch.chdir(tmp_path)
    Path("config.toml").write_text(grpo(top=RUN, groups=PATIENT).replace('"inproc"', f'"{runtime}"'))
    assert run(load("config.toml")) == 0
    log = read_events(Path("run/events.jsonl"))
    events = [event for event in log if isinstance(event, Popped | Published | Fenced)]
    published = {event.version: n for n, event in enumerate(events) if isinstance(event, Published)}
    assert sorted(published) == list(range(1, STEPS + 1))
    popped = {event.train_step: n for n, event in enumerate(events) if isinstance(event, Popped)}
    assert all(popped[version] < published[version] for version in range(1, STEPS))
    (fenced,) = [n for n, e in enumerate(events) if isinstance(e, Fenced)]
    death = events[published[DEATH]]
    assert isinstance(death, Published)
    assert death.fenced == ("rollout/0",)
    assert published[DEATH - 1] < fenced < published[DEATH]
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["status"], summary["train_steps"]) == ("completed", STEPS)
    assert summary["staleness"]["max_token_lag"] <= 2
    tokens = summary["tokens"]
    assert tokens["generated"] == tokens["trained"] + tokens["masked"] + tokens["dropped"] + tokens["open"]
