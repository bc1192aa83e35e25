"""Engines in processes of their own: kill -9 of each of them, rewards that hold the interpreter, and nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from asyncrlhf.abc import EngineSpec
from asyncrlhf.errors import EngineLost
from asyncrlhf.runtimes.local import LocalRuntime, ProcessEngine
from asyncrlhf.testing.conformance.engines import PlainOptions
from tests.faults import scene
from tests.faults.forks import Child, Forks
from tests.faults.halting import GO, HALTED

pytestmark = pytest.mark.timeout(600)
LOCAL = scene.BASE.replace('runtime = "inproc"', 'runtime = "local"')
DATA = LOCAL.replace("train_steps = 6\n", "").replace("rows = 48", "rows = 40").replace("tasks:graded", "tasks:slow")
DATA += "[groups.reference]\n"
PATIENCE = 400.0
PLAIN = "asyncrlhf.testing.conformance.engines"


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


def named() -> set[str]:
    """All that has a name in shared memory."""
    return set(os.listdir("/dev/shm"))


def left() -> set[str]:
    """What has a name in shared memory and nobody who uses it; weights have none, and are freed with the last process
    that holds them."""
    names, used = named(), ""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            used += path.read_text()
    return {name for name in names if f"/dev/shm/{name}" not in used}


def gone(there: dict[str, int]) -> bool:
    return wait_for(lambda: not any(alive(pid) for pid in there.values()))


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
    before = named()  # also what others use now and may leave
    name, run = scene.write(tmp_path, DATA), tmp_path / "run"
    child = forks.start(tmp_path, name)
    killed: list[int] = []
    for step, engine in ((1, "rollout/0"), (4, "reference/0"), (7, "reward/0"), (11, "policy/0")):
        killed.append(kill_at(child, run, step, engine))
    there = engines(child.pid)
    assert set(there) >= {"rollout/0", "reference/0", "reward/0"}
    assert child.wait(PATIENCE) == 0, child.text
    assert gone(there)
    assert scene.lineage(run).consumed == dict.fromkeys(range(80), 1)
    assert [row["train_step"] for row in scene.rows(run)] == list(range(20))
    assert scene.summary(run)["status"] == "completed"
    rollout, reference, reward, policy = killed
    assert f"group 'rollout', rank 0: process {rollout} was ended by SIGKILL (signal 9)" in child.text
    assert f"group 'policy', rank 0: process {policy} was ended by SIGKILL (signal 9)" in child.text, child.text
    assert "limits.max_restarts: 1 of 3" in child.text
    for engine in ("rollout", "reference", "reward"):
        assert f"engine {engine}/0 is back" in child.text
    assert not any(alive(pid) for pid in (reference, reward))
    assert wait_for(lambda: left() <= before), left() - before


@pytest.mark.parametrize("engine", ["rollout/0", "policy/0"])
def test_L12_an_engine_is_killed_before_it_has_its_first_weights(forks: Forks, tmp_path: Path, engine: str) -> None:
    name, run = scene.write(tmp_path, LOCAL), tmp_path / "run"
    child = forks.start(tmp_path, name, halt_at="asyncrlhf.control.fencing:Fencing.launch")
    assert child.until((tmp_path / HALTED).exists, PATIENCE), child.text
    pid = engines(child.pid)[engine]
    os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: not alive(pid))
    (tmp_path / GO).touch()
    assert child.wait(PATIENCE) == 0, child.text
    group = engine.partition("/")[0]
    assert f"group '{group}', rank 0: process {pid} was ended by SIGKILL (signal 9)" in child.text
    assert ("going on from run/checkpoints" in child.text) is (group == "policy")
    assert scene.lineage(run).consumed == dict.fromkeys(range(24), 1)


def test_a_trainer_that_is_lost_too_often_fails_the_run_and_names_the_signal(forks: Forks, tmp_path: Path) -> None:
    """Also where engines ask it for its weights."""
    name, run = scene.write(tmp_path, LOCAL), tmp_path / "run"
    child = forks.start(tmp_path, name, "limits.max_restarts=0", "publish.transport=collective")
    assert child.until(lambda: len(engines(child.pid)) == 3, PATIENCE)
    there = engines(child.pid)
    pid = kill_at(child, run, 1, "policy/0")
    assert child.wait(PATIENCE) == 1
    said = scene.summary(run)
    assert (said["status"], said["reason"]) == ("failed", "EngineLost")
    assert f"group 'policy', rank 0: process {pid} was ended by SIGKILL (signal 9)" in said["message"]
    assert "by gloo" in (run / "logs" / "rollout-0.log").read_text()
    assert gone(there)


@pytest.mark.parametrize("resume", ["never", "run/checkpoints/step-000002"])
def test_a_lost_trainer_goes_on_from_the_newest_checkpoint_whatever_resume_says(
    forks: Forks, tmp_path: Path, resume: str
) -> None:
    name, run = scene.write(tmp_path, LOCAL.replace("train_steps = 6", "train_steps = 12")), tmp_path / "run"
    if resume != "never":
        assert forks.start(tmp_path, name, "train_steps=2", "runtime=inproc").wait(PATIENCE) == 0
    child = forks.start(tmp_path, name, f"resume={resume}", "checkpoint.keep=9")
    kill_at(child, run, 7, "policy/0")
    assert child.wait(PATIENCE) == 0, child.text
    resumed = [step for step in scene.lineage(run).resumed_from if step is not None]
    assert resumed[-1] >= 6
    assert scene.lineage(run).consumed == dict.fromkeys(range(48), 1)


def test_a_signal_while_a_lost_trainer_comes_back_stops_the_run(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path, LOCAL.replace("train_steps = 6", "train_steps = 400")), tmp_path / "run"
    child = forks.start(tmp_path, name, "data.epochs=100")
    kill_at(child, run, 3, "policy/0")
    assert child.until(lambda: "going on from" in child.text, PATIENCE)
    child.signal(signal.SIGINT)
    assert child.wait(PATIENCE) == 130, child.text
    said = scene.summary(run)
    assert (said["status"], said["reason"]) == ("stopped", "SIGINT")
    assert said["train_steps"] < 400


def test_sigusr1_names_the_engine_whose_process_stands_still(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path, DATA), tmp_path / "run"
    child = forks.start(tmp_path, name)
    assert child.until(lambda: (run / "metrics.jsonl").exists() and scene.rows(run), PATIENCE), child.text
    stopped = engines(child.pid)["rollout/0"]
    os.kill(stopped, signal.SIGSTOP)
    said = re.compile(r"^(the publish|prompt uid \d+ .*) waits \d+\.\d s for rollout/0(: \w+)?$", re.MULTILINE)

    def asked() -> bool:
        child.signal(signal.SIGUSR1)
        time.sleep(0.1)
        return said.search(child.text) is not None

    assert child.until(asked), child.text
    os.kill(stopped, signal.SIGCONT)
    assert child.wait(PATIENCE) == 0, child.text
    assert scene.lineage(run).consumed == dict.fromkeys(range(80), 1)


def test_a_full_disk_ends_a_run_with_engines_in_processes(forks: Forks, tmp_path: Path) -> None:
    name = scene.write(tmp_path, LOCAL.replace("train_steps = 6", "train_steps = 400"))
    child = forks.start(tmp_path, name, "data.epochs=100", "checkpoint.every=0", file_bytes=60_000)
    assert child.wait(PATIENCE) == 1, child.text
    assert "File too large" in child.text


def test_what_a_reward_function_starts_ends_with_it(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path, LOCAL.replace("tasks:graded", "tasks:starts_a_process")), tmp_path / "run"
    child = forks.start(tmp_path, name)
    assert child.until((tmp_path / "started").exists, PATIENCE)
    kill_at(child, run, 0, "reward/0")
    assert child.wait(PATIENCE) == 0, child.text
    started = [int(pid) for pid in (tmp_path / "started").read_text().split()]
    assert started
    assert wait_for(lambda: not any(alive(pid) for pid in started))


def test_a_reward_function_can_terminate_what_it_has_started(forks: Forks, tmp_path: Path) -> None:
    name, run = scene.write(tmp_path, LOCAL.replace("tasks:graded", "tasks:terminates_a_process")), tmp_path / "run"
    child = forks.start(tmp_path, name)
    assert child.wait(PATIENCE) == 0, child.text
    assert scene.summary(run)["leases"]["failed"] == 0


def test_a_column_that_cannot_travel_fails_its_prompt_by_name(forks: Forks, tmp_path: Path) -> None:
    text = LOCAL.replace('"asyncrlhf.data.tasks:reverse"', '"tests.faults.tasks:odd_rows"')
    text = text.replace('options = { length = 3, alphabet = "abcdefgh", rows = 48 }\n', "")
    child = forks.start(tmp_path, scene.write(tmp_path, text))
    assert child.wait(PATIENCE) == 1
    assert "cannot be sent to another process (TypeError: cannot pickle" in child.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_no_engine_outlives_its_run(forks: Forks, tmp_path: Path, number: signal.Signals) -> None:
    before = named()  # also what others use now and may leave
    name, run = scene.write(tmp_path, LOCAL.replace("tasks:graded", "tasks:slow")), tmp_path / "run"
    child = forks.start(tmp_path, name)
    assert child.until(lambda: (run / "metrics.jsonl").exists() and scene.rows(run), PATIENCE)
    there = engines(child.pid)
    assert set(there) == {"policy/0", "rollout/0", "reward/0"}
    child.signal(number)
    assert child.wait(PATIENCE) == (130 if number is signal.SIGINT else -9)
    assert gone(there)
    assert wait_for(lambda: left() <= before), left() - before


def test_L6_a_reward_that_holds_the_interpreter_fails_its_own_prompt_only(forks: Forks, tmp_path: Path) -> None:
    text = LOCAL.replace("tasks:graded", "tasks:holds").replace("\ntimeout = 20.0", "\ntimeout = 3.0")
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


def test_calls_to_a_process_that_has_just_ended_fail_as_lost_on_uvloop(tmp_path: Path) -> None:
    """Also those made after the socket has closed, and before anybody knows how the process ended."""
    known = threading.Event()

    async def calls() -> list[BaseException | Any]:
        runtime = LocalRuntime(tmp_path)
        engine = await runtime.spawn(
            EngineSpec(group="plain", rank=0, engine=f"{PLAIN}:Plain", options=PlainOptions()), lambda events: None
        )
        assert isinstance(engine, ProcessEngine)
        last_words = engine._last_words

        def later() -> str:
            assert known.wait(30.0)
            return last_words()

        engine._last_words = later
        os.kill(engine.host.process.pid, signal.SIGKILL)
        engine.host.process.wait()
        made: list[asyncio.Task[Any]] = []
        for number in range(4):
            made.append(asyncio.create_task(engine.call("echo", number)))
            await asyncio.sleep(0.02)
        made[-1].cancel()
        await asyncio.wait(made[-1:])
        known.set()
        async with asyncio.timeout(30.0):
            found = await asyncio.gather(*made, return_exceptions=True)
        await runtime.close()
        return found

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        *lost, cancelled = runner.run(calls())
    assert [type(error) for error in lost] == [EngineLost] * 3
    assert isinstance(cancelled, asyncio.CancelledError)
