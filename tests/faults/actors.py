"""Kill -9 of engines, one after another, while a run of PPO with all five kinds of them goes on. See drill.py."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path

from tests.faults import scene
from tests.faults.forks import Forks
from tests.faults.test_local import alive, engines
from tests.faults.test_ray import process

PROMPTS = 480
ENGINES = ("policy/0", "critic/0", "rollout/0", "rollout/1", "reference/0", "reward/0")
PATIENCE = 300.0
OVERRIDES = (
    "groups.rollout.replicas=2",
    "limits.max_restarts=1000",
    *(f"groups.{name}.max_restarts=1000" for name in ("rollout", "reference", "reward")),
)


def text(runtime: str) -> str:
    """PPO on short words, every prompt once."""
    model = scene.BASE[scene.BASE.index("[groups.policy.scratch]") : scene.BASE.index("[groups.policy.optimizer]")]
    return (
        scene.BASE.replace("grpo:GRPO", "ppo:PPO")
        .replace("train_steps = 6\n", "")
        .replace('runtime = "inproc"', f'runtime = "{runtime}"')
        .replace("rows = 48", f"rows = {PROMPTS}")
        .replace("epochs = 2", "epochs = 1")
        .replace("tasks:graded", "tasks:slow")
        .replace("\ntimeout = 20.0", "\ntimeout = 60.0")
        + model.replace("groups.policy", "groups.critic")
        + "[groups.reference]\n"
    )


def kill_engines(
    forks: Forks, directory: Path, runtime: str, kills: int, seed: int, chosen: Sequence[str] = ENGINES
) -> list[tuple[str, int]]:
    """Kill `kills` engines, each a few train steps after the last, then let the run end: (engine, train step) of each
    kill. Raises AssertionError if a prompt was lost, or trained twice, or the tokens do not add up."""
    name, run, moments = scene.write(directory, text(runtime)), directory / "run", random.Random(seed)
    child = forks.start(directory, name, *OVERRIDES)
    done: list[tuple[str, int]] = []

    def steps() -> int:
        return len(scene.rows(run)) if (run / "metrics.jsonl").exists() else 0

    def found(engine: str) -> int | None:
        pid = engines(child.pid).get(engine) if runtime == "local" else process(run, engine)
        return pid if pid is not None and alive(pid) else None

    while len(done) < kills:
        engine, wanted = moments.choice(chosen), steps() + moments.randrange(1, 5)
        if not child.until(lambda engine=engine, wanted=wanted: steps() >= wanted and found(engine), PATIENCE):
            break  # it has come to its end before
        pid = found(engine)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            done.append((engine, steps()))
    assert child.wait(PATIENCE) == 0, child.text
    found = scene.lineage(run)
    wrong = {uid: (found.last.get(uid), found.consumed[uid]) for uid in range(PROMPTS) if found.consumed[uid] != 1}
    assert not wrong, f"uid -> where it was seen last, train steps that it was in: {wrong}; killed {done}"
    rows = scene.rows(run)
    assert [row["train_step"] for row in rows] == list(range(PROMPTS // 4))
    for row in rows:
        spent = sum(row[f"tokens/{kind}"] for kind in ("trained", "masked", "dropped", "open"))
        assert row["tokens/generated"] == spent, row
    return done
