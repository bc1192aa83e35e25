"""Engines in processes of their own: kill -9 of each of them, rewards that hold the interpreter, and nothing left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults import scene
from tests.faults.forks import Child, Forks

pytestmark = pytest.mark.timeout(180)
LOCAL = scene.BASE.replace('runtime = "inproc"', 'runtime = "local"').replace("\ntimeout = 5.0", "\ntimeout = 20.0")
DATA = LOCAL.replace("train_steps = 6\n", "").replace("rows = 48", "rows = 40") + "[groups.reference]\n"
PATIENCE = 120.0


def engines(parent: int) -> dict[str, int]:
    """Name -> process id of every engine of a run."""
    found: dict[str, int] = {}
    for pid in _processes():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if "asyncrlhf.runtimes.child" in command and int(status[1]) == parent and status[0] != "Z":
            found[command[5]] = pid
    return found


def _processes() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def kill_at(child: Child, run: Path, step: int, engine: str) -> int:
    """kill -9 of an engine once so many train steps are done; gives its process id."""

    def there() -> bool:
        path = run / "metrics.jsonl"
        return path.exists() and len(scene.rows(run)) >= step and engine in engines(child.pid)

    assert child.until(there, PATIENCE), child.text
    pid = engines(child.pid)[engine]
    os.kill(pid, signal.SIGKILL)
    return pid


def test_L12_every_engine_is_killed_once_and_every_prompt_is_trained_once(forks: Forks, tmp_path: Path) -> None:
    before = shared_memory()
    name, run = scene.write(tmp_path, DATA), tmp_path / "run"
    child = forks.start(tmp_path, name)
    killed: list[int] = []
    for step, engine in ((1, "rollout/0"), (4, "reference/0"), (7, "reward/0"), (11, "policy/0")):
        killed.append(kill_at(child, run, step, engine))
    assert child.wait(PATIENCE) == 0, child.text
    assert scene.lineage(run).consumed == dict.fromkeys(range(80), 1)
    assert [row["train_step"] for row in scene.rows(run)] == list(range(20))
    assert scene.summary(run)["status"] == "completed"
    rollout, reference, reward, policy = killed
    assert f"group 'rollout', rank 0: process {rollout} was ended by SIGKILL (signal 9)" in child.text
    assert f"group 'policy', rank 0: process {policy} was ended by SIGKILL (signal 9)" in child.text
    assert "limits.max_restarts: 1 of 3" in child.text
    for engine in ("rollout", "reference", "reward"):
        assert f"engine {engine}/0 is back" in child.text
    assert reference
    assert reward
    assert engines(child.pid) == {}
    assert shared_memory() == before
    assert not (run / "logs" / "policy-0.log").read_text()


def test_a_trainer_that_is_lost_too_often_fails_the_run_and_names_the_signal(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path, LOCAL), tmp_path / "run"
    child = forks.start(tmp_path, name, "limits.max_restarts=0")
    pid = kill_at(child, run, 1, "policy/0")
    assert child.wait(PATIENCE) == 1
    said = scene.summary(run)
    assert (said["status"], said["reason"]) == ("failed", "EngineLost")
    assert f"group 'policy', rank 0: process {pid} was ended by SIGKILL (signal 9)" in said["message"]
    assert engines(child.pid) == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_no_engine_outlives_its_run(forks: Forks, tmp_path: Path, number: signal.Signals) -> None:
    before = shared_memory()
    name, run = scene.write(tmp_path, LOCAL.replace("tasks:graded", "tasks:slow")), tmp_path / "run"
    child = forks.start(tmp_path, name)
    assert child.until(lambda: (run / "metrics.jsonl").exists() and scene.rows(run), PATIENCE)
    there = engines(child.pid)
    assert set(there) == {"policy/0", "rollout/0", "reward/0"}
    child.signal(number)
    assert child.wait(PATIENCE) == (130 if number is signal.SIGINT else -9)
    assert wait_for(lambda: not any(alive(pid) for pid in there.values()))
    assert shared_memory() == before


def test_L6_a_reward_that_holds_the_interpreter_fails_its_own_prompt_only(forks: Forks, tmp_path: Path) -> None:
    text = LOCAL.replace("tasks:graded", "tasks:holds").replace("\ntimeout = 20.0", "\ntimeout = 0.5")
    name, run = (
        scene.write(tmp_path, text.replace("train_steps = 6\n", "").replace("epochs = 2", "epochs = 1")),
        tmp_path / "run",
    )
    child = forks.start(tmp_path, name)
    assert child.wait(PATIENCE) == 0, child.text
    counts = scene.lineage(run)
    failed = [uid for uid, end in counts.last.items() if end == "failed"]
    assert len(failed) == 1
    assert sum(counts.consumed.values()) == 47
    assert "its reward function took its process down: group 'reward': no sign of life for 5 s" in child.text
