"""PPO with five small models under every strategy: the configuration, and what a run of it leaves behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from asyncrlhf.config.load import load
from asyncrlhf.launch import run
from asyncrlhf.observe import EngineBusy, TurnTaken, read_events
from tests.integration.tiny import SCRATCH

__all__ = ("CONFIG", "MODEL", "busy", "finished", "initial", "metrics", "turns", "weights")

MODEL = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
"""As in SCRATCH."""
CONFIG = f"""
algorithm = "algorithms.ppo:PPO"
run_dir = "run"
runtime = "inproc"
train_steps = 6
prompts_per_step = 4
answers_per_prompt = 2
order = "admission"
[settings]
minibatches = 2
[settings.kl]
coefficient = 0.02
[data]
source = "asyncrlhf.data.tasks:reverse"
options = {{ length = 2, alphabet = "abc" }}
{SCRATCH}
[groups.policy.optimizer]
learning_rate = 3e-3
{SCRATCH.replace("policy", "critic")}
[groups.critic.optimizer]
learning_rate = 3e-3
[groups.reference]
[groups.reward]
backend = "torch"
model = "judge"
[groups.rollout]
max_tokens = 6
max_sequence_tokens = 12
[checkpoint]
every = 0
[observe]
console = "off"
trace = false
"""


def finished(*overrides: str) -> None:
    """Run to the end in ./run, anew."""
    shutil.rmtree("run", ignore_errors=True)
    Path("ppo.toml").write_text(CONFIG)
    assert run(load("ppo.toml", overrides)) == 0


def weights() -> dict[str, np.ndarray]:
    """The trained models of the last checkpoint, by group and parameter."""
    return _models(max(Path("run/checkpoints").glob("step-*")))


def initial() -> dict[str, np.ndarray]:
    """The trained models as the run began; a critic's head is 0 then."""
    found = _models(Path("run/initial"))
    width = MODEL["hidden_size"]
    head = {"critic score.weight": np.zeros((1, width), np.float32), "critic score.bias": np.zeros(1, np.float32)}
    return {name: value for name, value in found.items() if "lm_head" not in name} | head


def _models(directory: Path) -> dict[str, np.ndarray]:
    return {
        f"{group} {name}": value
        for group in ("policy", "critic")
        for name, value in load_file(directory / group / "model.safetensors").items()
    }


def metrics() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]


def busy() -> list[EngineBusy]:
    return [event for event in read_events(Path("run/events.jsonl")) if isinstance(event, EngineBusy)]


def turns() -> list[TurnTaken]:
    return [event for event in read_events(Path("run/events.jsonl")) if isinstance(event, TurnTaken)]
