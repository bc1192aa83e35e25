"""Summary, timeline, console and trackers: what they make of the same events."""

import errno
import io
import json
import math
import sys
import tracemalloc
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from asyncrlhf.errors import ConfigError
from asyncrlhf.observe import (
    EngineBusy,
    Fenced,
    Granted,
    GroupShape,
    Metrics,
    Observer,
    Restarted,
    RunStarted,
    Settled,
    Summary,
    Trace,
    TurnTaken,
    Warned,
    make_tracker,
    report_lines,
    write_atomically,
)
from asyncrlhf.observe.panel import Panel
from asyncrlhf.observe.stretch import sparkline
from tests.unit.observe_scene import Scene, flat


def test_summary_by_hand(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for uid, state in enumerate(("dropped(expired)", "failed", "filtered", "filtered", "consumed")):
        scene.observer.emit(Settled(uid=100 + uid, attempt=1, state=state, token_count=0))
    for _ in range(10):
        scene.step()
    scene.end()
    tenths = [0.0] * 9
    assert flat(scene.json("summary.json")) == pytest.approx(
        flat(
            {
                "status": "completed",
                "reason": "",
                "message": "",
                "algorithm": "algorithms.grpo:GRPO",
                "is_sampled": True,
                "is_scored": True,
                "train_steps": 10,
                "wall_s": 20.0,
                "reward": {"first": 0.1, "last": 0.8},
                "loss": {"first": 1.0, "last": 1.0},
                "evaluation": {"first": None, "last": None, "label": None, "count": 0},
                "tokens": {"generated": 1007, "trained": 900, "masked": 100, "dropped": 0, "open": 7},
                "useful_token_fraction": 900 / 1007,
                "staleness": {
                    "bound": 2,
                    "lookahead": 1,
                    "since_step": 0,
                    "max_token_lag": 2,
                    "mean_token_lag": 2 / 3,
                    "expired_fraction": 1 / 24,
                    "masked_fraction": 0.06,
                    "untrainable_fraction": 0.04,
                    "masked_by_position": [0.06, *tenths],
                    "masked_by_length": [*tenths, 0.06],
                    "histograms": {
                        "token": {"0": 400, "1": 400, "2": 100},
                        "masked": {"3": 60},
                        "head": {"1": 10, "3": 10},
                        "queue": {"0": 10, "1": 10},
                    },
                },
                "rates": {"steps_s": 0.5, "trained_tokens_s": 45.0, "samples_s": 2.0},
                "busy": {"generate": 0.9, "train": 0.6},
                "overlap_efficiency": 0.9,
                "speedup_bound": 1.5 / 0.9,
                "exposed_sync_s": 0.1,
                "shares": {
                    "generate": {"busy": 0.9, "sync": 0.1, "wait": 0.1},
                    "train": {"busy": 0.6, "sync": 0.05, "wait": 0.25},
                },
                "steady_state": {"skipped_steps": 2, "steps": 8, "seconds": 16.0},
                "publishes": {"count": 10, "seconds": 2.0, "exposed": 1.0},
                "switches": {"count": 0, "seconds": 0.0},
                "leases": {"running": 2, "scoring": 0, "ready": 1, "consumed": 20, "dropped": 0},
                "failed_leases": 1,
                "optimizer_steps": 10,
                "rejected_steps": 0,
                "void_steps": 0,
                "nonfinite_values": 0,
            }
        )
    )


def test_the_report_names_what_moved_and_leaves_out_what_nothing_did() -> None:
    scene = Scene(None, steps=4)
    scene.observer.emit(TurnTaken(devices="d", group="policy", seconds=2.0))
    report = report_lines(scene.observer.summary.result(), None)
    assert "publishes   4 in 0.8 s, 50.0% of it exposed" in report
    assert "switches    1 of shared devices in 2.0 s, 25.0% of the run" in report
    scene = Scene(None)
    scene.start(groups={"policy": GroupShape("policy", 1)})
    supervised = report_lines(scene.observer.summary.result(), None)
    assert not any(line.startswith(("overlap", "publishes", "switches")) for line in supervised)


def test_lags_are_those_under_one_bound() -> None:
    scene = Scene(None, steps=3)
    for uid, state in enumerate(("dropped(expired)", "failed")):
        scene.observer.emit(Settled(uid=100 + uid, attempt=1, state=state, token_count=0))
    scene.start(resumed_from=3)
    report = report_lines(scene.observer.summary.result(), None)
    assert any(line.endswith(" + 7 open; useful 87.9%") for line in report), report
    assert any("bound 2; over age 6.0%, no signal 4.0%, expired 12.5%; lags" in line for line in report), report
    assert scene.observer.summary.result()["staleness"]["max_token_lag"] == 2
    scene.start(resumed_from=3, max_staleness=1)
    staleness = scene.observer.summary.result()["staleness"]
    assert (staleness["bound"], staleness["max_token_lag"], staleness["since_step"]) == (1, None, 3)
    summary = scene.observer.summary.result()
    report = report_lines(summary, None)
    assert (
        "staleness   since train step 3: lag - mean, - max, bound 1; over age -, no signal -, expired -; lags -"
        in report
    )
    assert any(line.startswith("tokens      307 generated = 270 trained + 30 masked + 0 dropped") for line in report)
    assert summary["failed_leases"] == 1, "of the whole run"
    for uid, state in enumerate(("dropped(expired)", "filtered")):
        scene.observer.emit(Settled(uid=200 + uid, attempt=1, state=state, token_count=0))
    scene.step()
    report = report_lines(scene.observer.summary.result(), None)
    assert any("since train step 3: " in line and "expired 25.0%" in line for line in report), report
    assert any(line.startswith("over age    since train step 3: by position") for line in report)


def test_summary_leaves_the_warm_up_out(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.clock.now += 100.0
    for _ in range(5):
        scene.step()
    scene.end()
    summary = scene.json("summary.json")
    assert summary["steady_state"] == {"skipped_steps": 1, "steps": 4, "seconds": 8.0}
    assert summary["wall_s"] == 110.0


def test_summary_of_a_failure_without_a_step(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.end("failed", "Exhausted", "no prompt of 40 gave anything to train on")
    summary = scene.json("summary.json")
    assert (summary["status"], summary["reason"], summary["train_steps"]) == ("failed", "Exhausted", 0)
    assert summary["reward"] == {"first": None, "last": None}
    assert summary["tokens"] == {"generated": 0, "trained": 0, "masked": 0, "dropped": 0, "open": 0}
    assert summary["rates"] == {"steps_s": None, "trained_tokens_s": None, "samples_s": None}
    assert summary["overlap_efficiency"] is None
    assert "failed (Exhausted): 0 train steps" in scene.output.getvalue()


def test_summary_before_a_run_has_started_is_complete_too() -> None:
    result = Summary(None, Metrics(None)).result()
    assert result["status"] == "running"
    assert report_lines(result, None)


def test_a_reward_that_is_not_finite_is_null_everywhere(tmp_path: Path) -> None:
    scene = Scene(tmp_path, steps=2)
    scene.step(reward=math.nan)
    scene.step(reward=math.inf)
    scene.end()
    assert [row["reward/mean"] for row in scene.rows()] == [0.0, 0.1, None, None]
    assert scene.json("summary.json")["reward"] == {"first": None, "last": None}
    assert "reward -" in scene.output.getvalue()
    for path in tmp_path.iterdir():
        text = path.read_text()
        assert "NaN" not in text, path.name
        assert "Infinity" not in text, path.name


def test_files_are_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "summary.json"
    write_atomically(path, b"old")

    def fail(self: Path, target: Path) -> Path:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="broken disk"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in path.parent.iterdir()] == ["summary.json"]


def tracks(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["ph"] == "M" and "thread" in e["name"]
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in trace["traceEvents"]:
        if event["ph"] in "Xi":
            found[names[event["pid"], event["tid"]]].append(event)
    return found


def test_trace_has_a_track_per_engine_and_the_run_beside_them(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.observer.emit(Fenced(group="rollout", rank=0, incarnation=1, reason="deadline"))
    scene.observer.emit(Restarted(group="rollout", rank=0, incarnation=1))
    scene.step()
    scene.step(void=True)
    scene.end()
    trace = scene.json("trace.json")
    found = tracks(trace)
    assert set(found) == {"train steps", "publishes", "evaluations", "rollout 0", "policy 0"}
    assert [e["name"] for e in found["policy 0"]] == ["step", "step"]
    assert [e["name"] for e in found["rollout 0"]][:2] == ["fenced: deadline", "restarted as 1"]
    assert [e["name"] for e in found["train steps"]] == [
        "wait for a batch",
        "step 0",
        "wait for a batch",
        "step 1 (void: not_finite)",
    ]
    step = found["train steps"][1]
    assert (step["ts"], step["dur"]) == pytest.approx((0.5e6, 1.5e6))
    assert [(e["name"], e["ph"]) for e in found["publishes"]] == [("publish v1", "X"), ("v1", "i")]
    counters = [e for e in trace["traceEvents"] if e["ph"] == "C"]
    assert [e["name"] for e in counters] == ["live leases", "token lag", "live leases"]
    assert counters[0]["args"] == {"running": 2, "scoring": 0, "ready": 1, "training": 0}
    assert counters[1]["args"] == {"mean": pytest.approx(2 / 3), "max": 2}
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"} == {
        "run",
        "rollout",
        "policy",
    }
    assert trace["otherData"] == {"left_out": 0}


def busy(start: float, end: float, work: str = "generate", tokens: int = 1) -> EngineBusy:
    return EngineBusy(group="r", rank=0, start=start, end=end, work=work, token_count=tokens)


def test_trace_merges_slices_that_touch() -> None:
    trace = Trace(None)
    for slice_ in (busy(0, 1), busy(1.0005, 2), busy(2.1, 3), busy(3, 4, "swap"), busy(4, 5)):
        trace.see(slice_, live=True)
    slices = [e for e in json.loads(trace.dump())["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"], e["args"]["tokens"]) for e in slices] == [
        ("generate", 0.0, 2e6, 2),
        ("generate", 2.1e6, 0.9e6, 1),
        ("swap", 3e6, 1e6, 1),
        ("generate", 4e6, 1e6, 1),
    ]


def test_trace_keeps_the_beginning_and_the_end_and_says_what_is_missing() -> None:
    trace = Trace(None, capacity=4)
    for start in range(10):
        trace.see(busy(start, start + 0.5), live=True)
    written = json.loads(trace.dump())
    assert [e["ts"] / 1e6 for e in written["traceEvents"] if e["ph"] == "X"] == [0, 1, 8, 9]
    assert written["otherData"] == {"left_out": 6, "left_out_from_s": 2, "left_out_to_s": 7}


def test_plain_console(tmp_path: Path) -> None:
    scene = Scene(tmp_path, steps=3)
    scene.observer.emit(Warned(message="log-prob gap 0.3 at lag 0"))
    for uid in range(8):
        scene.observer.emit(Settled(uid=uid, attempt=1, state="failed", token_count=0, error="no answer"))
    scene.observer.emit(Fenced(group="rollout", rank=1, incarnation=2, reason="missed the deadline"))
    scene.step(void=True)
    scene.end()
    lines = scene.output.getvalue().splitlines()
    pools = "gen 90% (sync 10%)  train 60% (waits 25%, sync 5%)"
    step = f"step 1/10  reward 0.00  lag 0.7/2  over age 6.0%  {pools}  0.5 steps/s"
    assert lines[:3] == [step, step.replace("1/10", "2/10").replace("0.00", "0.10"), lines[2]]
    assert lines[3] == "warning: log-prob gap 0.3 at lag 0"
    assert lines[4:9] == [f"prompt {uid} failed: no answer" for uid in range(5)]
    assert lines[9] == "engine rollout/1 is out of service: missed the deadline"
    assert lines[10] == "train step 3 is void: not_finite"
    assert lines[11] == "3 more failed leases, see events.jsonl"
    report = lines[12:]
    assert report[0] == "completed: 3 train steps in 8.0 s"
    assert report[1] == "reward      0.1 -> 0.1"
    assert report[4].endswith("lags 0:44% 1:44% 2:11%")
    assert str(tmp_path) in report[-1]
    assert len(report) <= 11


def test_plain_console_prints_every_two_seconds_and_the_last_step() -> None:
    scene = Scene(None)
    for _ in range(5):
        scene.step()
        scene.clock.now -= 1.5
    scene.end()
    shown = [line.split()[1] for line in scene.output.getvalue().splitlines() if line.startswith("step ")]
    assert shown[0] == "1/10"
    assert shown[-1] == "5/10"
    assert len(shown) < 5


def test_console_off_is_silent_and_keeps_nothing() -> None:
    scene = Scene(None, steps=3, mode="off")
    assert not scene.observer.console._stretch.rows  # pyright: ignore[reportPrivateUsage]
    scene.end()
    assert scene.output.getvalue() == ""


def test_console_whose_reader_has_gone_does_not_end_the_run(tmp_path: Path) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    observer = Observer(tmp_path, console="plain", stream=Gone())
    observer.emit(Warned(message="nobody reads this"))
    observer.emit(Warned(message="nor this"))
    observer.close()
    assert (tmp_path / "events.jsonl").read_text().count("\n") == 2


class FakeTerminal(io.StringIO):
    encoding = "utf-8"  # pyright: ignore[reportAssignmentType]

    def isatty(self) -> bool:
        return True


def test_panel_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    scene = Scene(None, mode="auto", output=FakeTerminal())
    scene.observer.emit(Warned(message="odd"))
    for _ in range(4):
        scene.step()
    shown = scene.output.getvalue()
    for text in ("algorithms.grpo:GRPO", "waiting for the first batch", "4/10", "to go", "▁", "90%", "warning: odd"):
        assert text in shown, text
    scene.end()
    assert "completed: 4 train steps" in scene.output.getvalue()
    assert not Panel.fits(io.StringIO())


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([9.0, 0.0, 0.5, 1.0], width=3) == "▁▅█"


def test_a_missing_tracker_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"asyncrlhf\[trackers\]"):
        make_tracker("wandb", tmp_path)
    with pytest.raises(ConfigError, match="run_dir"):
        Observer(None, trackers=("wandb",))


class FakeWriter:
    points: list[tuple[str, float, int]] = []  # noqa: RUF012

    def __init__(self, directory: str) -> None:
        FakeWriter.points = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        FakeWriter.points.append((name, value, step))

    def flush(self) -> None: ...

    def close(self) -> None: ...


def test_tensorboard_has_one_point_per_step_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("tensorboard.summary")
    module.Writer = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "tensorboard.summary", module)
    folder = tmp_path / "tensorboard"
    folder.mkdir()
    (folder / "events.out.tfevents.1").write_bytes(b"old")
    scene = Scene(tmp_path, steps=2)
    offsets = scene.observer.offsets()
    scene.step()
    scene.end("stopped")

    observer = Observer(tmp_path, console="off", trackers=("tensorboard",))
    observer.truncate(offsets)
    observer.close()
    assert not list(folder.iterdir())
    assert [(v, s) for n, v, s in FakeWriter.points if n == "reward/mean"] == [(0.0, 0), (0.1, 1)]
    assert all(isinstance(value, int | float) for _, value, _ in FakeWriter.points)


class FakeWandB:
    class errors:
        class Error(Exception):
            pass

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.exits: list[int] = []
        self.refuse = False

    def init(self, **settings: Any) -> SimpleNamespace:
        if self.refuse:
            raise self.errors.Error("api_key not configured (no-tty)")
        self.inits.append(settings)
        return SimpleNamespace(
            log=self.rows.append,
            define_metric=lambda *_, **__: None,
            finish=lambda exit_code: self.exits.append(exit_code),
        )


def run_started(resumed_from: int | None) -> RunStarted:
    return RunStarted(
        resumed_from=resumed_from,
        algorithm="algorithms.grpo:GRPO",
        seed=0,
        max_staleness=1,
        lookahead=1,
        prompts_per_step=1,
        answers_per_prompt=1,
        train_steps=None,
    )


def test_wandb_continues_its_run_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for resumed_from in (None, 3, None):
        tracker = make_tracker("wandb", tmp_path, {"seed": 0})
        tracker.see_row({"train_step": 0}, live=False)
        tracker.see(run_started(resumed_from), live=True)
        tracker.see_row({"train_step": 1, "loss/loss": None}, live=True)
        tracker.close()
    first, second, third = (settings["id"] for settings in wandb.inits)
    assert first == second != third
    assert wandb.rows == [{"train_step": 1}] * 3
    assert wandb.exits == [1, 1, 1]
    wandb.refuse = True
    with pytest.raises(ConfigError, match="WANDB_MODE=offline"):
        tracker.see(run_started(None), live=True)


def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    scene = Scene(tmp_path, mode="off")
    scene.observer.trace._capacity = 1000  # pyright: ignore[reportPrivateUsage]

    def run(steps: int) -> int:
        for step in range(steps):
            for index in range(40):
                scene.observer.emit(Granted(uid=40 * step + index, attempt=1, version=scene.done))
                scene.busy("rollout", index * 0.01, index * 0.01 + 0.005, "generate", 3)
            for index in range(12):
                scene.observer.emit(Settled(uid=index, attempt=1, state="consumed", token_count=4))
            scene.step()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = run(100)
        after = run(900)
    finally:
        tracemalloc.stop()
    scene.end()
    assert (tmp_path / "events.jsonl").read_text().count("\n") > 97_000
    assert after - before < 1_000_000
    assert scene.json("trace.json")["otherData"]["left_out"] > 1000
