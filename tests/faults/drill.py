"""Kill a run again and again, resume it each time, and count what was trained.

`python -m tests.faults.drill --kills 20` prints a line per kill, then what the restored lineage says. With `--engines
ray` (or `local`) not the run is killed but its engines, one after another. By hand; the tests do the same with a few
kills.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrlhf.data.rows import Report
from asyncrlhf.data.source import FiniteRows
from asyncrlhf.data.tasks import reverse
from asyncrlhf.observe.events import OptimizerStep
from tests.faults import scene
from tests.faults.actors import kill_engines
from tests.faults.forks import Forks
from tests.faults.tasks import terminal

ROWS, EPOCHS = 120, 2
MODES = (
    (),
    ("checkpoint.payloads=false", "settings.minibatches=2"),
    ("max_staleness=0", "lookahead=0", "publish.mode=drain"),
    ("at_deadline=drop", "max_staleness=3", "lookahead=2", "publish.every=3"),
    ("at_deadline=wait", "max_staleness=4", "lookahead=1", "checkpoint.every=3"),
    ("order=admission", "checkpoint.every=1", "groups.rollout.replicas=2"),
)
"""Overrides that the runs of a long drill take in turn."""
OPTIONS = {"length": 3, "alphabet": "abcdefgh", "rows": ROWS}
TEXT = (
    scene.BASE.replace("algorithms.grpo:GRPO", "tests.faults.tasks:Picky")
    .replace("tasks:graded", "tasks:mixed")
    .replace("train_steps = 6\n", "")
    .replace("rows = 48", f"rows = {ROWS}")
    .replace("[limits]", "[limits]\nmax_filtered = 1000")
)


@dataclass
class Drill:
    """What a drill did."""

    kills: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """(where the run was, train steps on disk) at each kill."""
    seconds: float = 0.0


def drill(forks: Forks, directory: Path, kills: int, seed: int, overrides: Sequence[str], reach: int) -> Drill:
    """Kill -9 at `kills` random moments, each before `reach` bytes of events have been added, or a little later; then
    let the run end. Raises AssertionError if it does not end well."""
    name, run, moments = scene.write(directory, TEXT), directory / "run", random.Random(seed)
    done, started = Drill(), time.perf_counter()
    while len(done.kills) < kills:
        child = forks.start(directory, name, *overrides)
        size = _size(run)
        moment = moments.choice(("start", "steps", "steps", "draft"))
        grown = moments.randrange(2000, reach)
        if moment == "start":
            pause = moments.uniform(0, 0.9)
        elif moment == "draft":
            child.until(lambda size=size, grown=grown: _size(run) > size + grown)
            child.until(lambda: list(run.glob("checkpoints/.step-*")))
            pause = moments.uniform(0, 0.03)
        else:
            child.until(lambda size=size, grown=grown: _size(run) > size + grown)
            pause = moments.uniform(0, 0.05)
        deadline = time.monotonic() + pause
        child.until(lambda deadline=deadline: time.monotonic() > deadline)
        child.signal(signal.SIGKILL)
        code = child.wait()
        if code != -signal.SIGKILL:
            assert code == 0, f"seed {seed}: exit code {code} after {len(done.kills)} kills:\n{child.text}"
            break
        done.kills.append((moment, (scene.steps_on_disk(run) or [-1])[-1]))
    child = forks.start(directory, name, *overrides)
    assert child.wait() == 0, f"seed {seed}: {done.kills}\n{child.text}"
    done.seconds = time.perf_counter() - started
    return done


def check(run: Path) -> Counter[str]:
    """Every prompt of every epoch has ended once, as its text says; counters have no gap. Gives how many ended how."""
    found, wanted, ends = scene.lineage(run), _wanted(), Counter[str]()
    assert found.last.keys() == wanted.keys()
    for uid, end in wanted.items():
        assert found.last[uid] == end or found.last[uid].startswith("dropped("), (uid, end, found.last[uid])
        assert found.consumed[uid] == (found.last[uid] == "consumed"), (uid, end, found.consumed[uid])
        ends[found.last[uid]] += 1
    rows = scene.rows(run)
    assert [row["train_step"] for row in rows] == list(range(len(rows)))
    assert [row["policy_version"] for row in rows] == list(range(1, len(rows) + 1))
    steps = [end.optimizer_step for end in scene.events(run) if isinstance(end, OptimizerStep) and end.applied]
    assert steps == list(range(1, len(steps) + 1))
    for row in rows:
        spent = sum(row[f"tokens/{kind}"] for kind in ("trained", "masked", "dropped", "open"))
        assert row["tokens/generated"] == spent, row
    for name in ("publish_count", "optimizer_steps", "tokens/trained", "tokens/masked", "tokens/dropped"):
        counted = [row[name] for row in rows]
        assert counted == sorted(counted), name
    said = scene.summary(run)
    assert said["status"] == "completed"
    assert said["train_steps"] == len(rows)
    assert (said["staleness"]["max_token_lag"] or 0) <= said["staleness"]["bound"]
    assert said["leases"]["consumed"] == ends["consumed"]
    return ends


def _wanted() -> dict[int, str]:
    task = FiniteRows(reverse(**OPTIONS), ROWS, Report("", ROWS), epochs=EPOCHS, shuffle=True, seed=0)
    return {uid: terminal(str(task.row(uid).columns["prompt"])) for uid in range(ROWS * EPOCHS)}


def _size(run: Path) -> int:
    path = run / "events.jsonl"
    return path.stat().st_size if path.exists() else 0


def _engines(forks: Forks, runtime: str, kills: int, seed: int) -> int:
    """As many runs as it takes."""
    killed: Counter[str] = Counter()
    try:
        while killed.total() < kills:
            with tempfile.TemporaryDirectory() as directory:
                left = kills - killed.total()
                started, done = (
                    time.perf_counter(),
                    kill_engines(forks, Path(directory), runtime, left, seed + killed.total()),
                )
            assert done, "the run ends before an engine can be killed"
            killed.update(engine for engine, _ in done)
            print(f"killed {done} in {time.perf_counter() - started:.1f} s", flush=True)
    finally:
        forks.close()
    print(f"{killed.total()} kills {dict(killed)}, every prompt trained exactly once, every token accounted for")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", choices=("local", "ray"), help="kill engines under this runtime")
    options = parser.parse_args()
    forks = Forks()
    if options.engines:
        return _engines(forks, options.engines, options.kills, options.seed)
    kills = 0
    try:
        for number in range(options.kills):
            if kills >= options.kills:
                break
            with tempfile.TemporaryDirectory() as directory:
                overrides = MODES[number % len(MODES)]
                done = drill(
                    forks, Path(directory), min(4, options.kills - kills), options.seed + number, overrides, 40_000
                )
                run = Path(directory) / "run"
                ends, steps = check(run), len(scene.rows(run))
            kills += len(done.kills)
            print(f"run {number} {' '.join(overrides)}: killed at {done.kills}, {steps} train steps, {dict(ends)}")
            print(f"    {len(done.kills) + 1} processes in {done.seconds:.1f} s", flush=True)
    finally:
        forks.close()
    print(f"{kills} kills, every prompt of every epoch ended exactly once")
    return 0


if __name__ == "__main__":
    sys.exit(main())
