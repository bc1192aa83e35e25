"""A run that takes a second, and what its files say about it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrlhf.observe import read_events
from asyncrlhf.observe.events import AnyEvent, Granted, Popped, RunStarted, Settled, StepEnded

__all__ = ("Lineage", "contents", "events", "lineage", "manifest", "rows", "steps_on_disk", "summary", "write")

BASE = """
algorithm = "algorithms.grpo:GRPO"
train_steps = 6
prompts_per_step = 4
answers_per_prompt = 2
run_dir = "run"
runtime = "inproc"
max_staleness = 2
off_policy = "decoupled"

[data]
source = "asyncrlhf.data.tasks:reverse"
options = { length = 3, alphabet = "abcdefgh", rows = 48 }
epochs = 2

[groups.policy.scratch]
characters = "abcdefgh>"
config = { vocab_size = 16, hidden_size = 16, intermediate_size = 32, num_hidden_layers = 1, num_attention_heads = 2, \
num_key_value_heads = 1, max_position_embeddings = 32, tie_word_embeddings = true }

[groups.policy.optimizer]
learning_rate = 1e-3

[groups.rollout]
max_tokens = 5
max_sequence_tokens = 12
concurrency = 32

[groups.reward]
function = "tests.faults.tasks:graded"
timeout = 20.0

[checkpoint]
every = 2

[limits]
lease_timeout = 100.0
stall_timeout = 220.0
"""


def write(directory: Path, text: str = BASE, name: str = "run.toml") -> str:
    """A configuration file; gives its name."""
    (directory / name).write_text(text)
    return name


def rows(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_bytes())


def events(run: Path) -> list[AnyEvent]:
    return list(read_events(run / "events.jsonl"))


def steps_on_disk(run: Path) -> list[int]:
    """Train steps of the complete checkpoints."""
    return sorted(int(p.parent.name[5:]) for p in (run / "checkpoints").glob("step-*/manifest.json"))


def manifest(run: Path, step: int | None = None) -> dict[str, Any]:
    """That of a checkpoint, the newest unless told."""
    step = steps_on_disk(run)[-1] if step is None else step
    return json.loads((run / f"checkpoints/step-{step:06d}/manifest.json").read_bytes())


@dataclass
class Lineage:
    """What happened to every prompt, from the event log as resumes have cut it."""

    consumed: Counter[int] = field(default_factory=Counter[int])
    """uid -> train steps that it was part of and that were not void."""
    last: dict[int, str] = field(default_factory=dict[int, str])
    """uid -> where it was seen last: "granted", "training", "consumed", or the state it settled in."""
    step_ends: list[StepEnded] = field(default_factory=list[StepEnded])
    resumed_from: list[int | None] = field(default_factory=list[int | None])


def lineage(run: Path) -> Lineage:
    """Folds events.jsonl."""
    found, training = Lineage(), tuple[int, ...]()
    for event in events(run):
        match event:
            case RunStarted():
                found.resumed_from.append(event.resumed_from)
            case Granted():
                found.last[event.uid] = "granted"
            case Settled():
                found.last[event.uid] = event.state
            case Popped():
                training = event.uids
                found.last.update(dict.fromkeys(training, "training"))
            case StepEnded():
                found.step_ends.append(event)
                if not event.void:
                    found.consumed.update(training)
                    found.last.update(dict.fromkeys(training, "consumed"))
            case _:
                pass
    return found


def contents(directory: Path) -> dict[str, bytes | str]:
    """Every file and link below a directory, to see that nothing has changed."""
    found: dict[str, bytes | str] = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = path.read_bytes()
    return found
