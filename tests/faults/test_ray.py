"""Engines as Ray actors: kill -9 of each of them, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.faults import scene
from tests.faults.forks import Child, Forks
from tests.faults.test_local import DATA, LOCAL, PATIENCE, alive, wait_for

pytestmark = pytest.mark.timeout(900)
RAY = LOCAL.replace('runtime = "local"', 'runtime = "ray"')


def process(run: Path, engine: str) -> int | None:
    """The newest process of an engine, as its log says."""
    log = run / "logs" / f"{engine.replace('/', '-')}.log"
    found = re.findall(r"^process (\d+) on ", log.read_text(), re.MULTILINE) if log.exists() else []
    return int(found[-1]) if found else None


def kill_at(child: Child, run: Path, step: int, engine: str) -> int:
    """kill -9 of an engine once so many train steps are done; gives its process id."""

    def there() -> bool:
        path = run / "metrics.jsonl"
        pid = process(run, engine)
        return path.exists() and len(scene.rows(run)) >= step and pid is not None and alive(pid)

    assert child.until(there, PATIENCE), child.text
    pid = process(run, engine)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def test_L12_every_actor_is_killed_once_and_every_prompt_is_trained_once(forks: Forks, tmp_path: Path) -> None:
    """Answers and log-probs go by reference."""
    text = DATA.replace('runtime = "local"', 'runtime = "ray"') + "[ray]\ninline_bytes = 0\n"
    name, run = scene.write(tmp_path, text), tmp_path / "run"
    child = forks.start(tmp_path, name)
    for step, engine in ((1, "rollout/0"), (4, "reference/0"), (7, "reward/0"), (11, "policy/0")):
        kill_at(child, run, step, engine)
    assert child.descendants, "else there is nothing that could be left"
    assert child.wait(PATIENCE) == 0, child.text
    assert scene.lineage(run).consumed == dict.fromkeys(range(80), 1)
    assert [row["train_step"] for row in scene.rows(run)] == list(range(20))
    assert re.search(r"group 'rollout', rank 0: actor of process \d+ is lost", child.text)
    assert re.search(r"group 'policy', rank 0: actor of process \d+ is lost", child.text)
    for engine in ("rollout", "reference", "reward"):
        assert f"engine {engine}/0 is back" in child.text
    assert wait_for(lambda: not child.descendants, 60.0), child.descendants


def test_a_stopped_run_leaves_no_ray_behind(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path, RAY.replace("tasks:graded", "tasks:slow")), tmp_path / "run"
    child = forks.start(tmp_path, name, "publish.transport=objects")
    assert child.until(lambda: (run / "metrics.jsonl").exists() and scene.rows(run), PATIENCE)
    assert child.descendants
    child.signal(signal.SIGTERM)  # which Ray would handle by a dump
    assert child.wait(PATIENCE) == 143, child.text
    assert scene.summary(run)["status"] == "stopped"
    assert wait_for(lambda: not child.descendants, 60.0), child.descendants
