"""The event log and the metrics rows: what is written, cut back and continued."""

import errno
import json
import math
import os
from io import FileIO
from pathlib import Path

import numpy as np
import pytest

from asyncrlhf.errors import CheckpointError
from asyncrlhf.observe import (
    Answered,
    Checkpointed,
    EngineBusy,
    Evaluated,
    Event,
    EventLog,
    Granted,
    GroupShape,
    Measured,
    Observer,
    OptimizerStep,
    RunEnded,
    Scored,
    Settled,
    StepEnded,
    Warned,
    decode_event,
    encode_json,
    read_events,
)
from asyncrlhf.observe.busy import BusyMeter
from tests.unit.observe_scene import FakeClock, Scene, flat


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[Event, bool]] = []
        self.closed = False

    def see(self, event: Event, *, live: bool) -> None:
        self.seen.append((event, live))

    def close(self) -> None:
        self.closed = True


def test_log_stamps_seconds_since_the_start_and_never_goes_back(tmp_path: Path) -> None:
    clock, view = FakeClock(), Recorder()
    log = EventLog(tmp_path, clock)
    log.subscribe(view)
    clock.now = 1002.5
    log.emit(Granted(uid=1, attempt=1, version=0))
    clock.now = 1001.0
    log.emit(Granted(uid=2, attempt=1, version=0))
    assert [event.t for event, _ in view.seen] == [2.5, 2.5]
    assert log.elapsed(1004.0) == 4.0
    log.close()
    assert view.closed
    assert list(read_events(tmp_path / "events.jsonl")) == [event for event, _ in view.seen]


def test_log_is_flushed_at_milestones_and_every_second(tmp_path: Path) -> None:
    clock = FakeClock()
    log = EventLog(tmp_path, clock)
    path = tmp_path / "events.jsonl"

    def lines() -> int:
        return path.read_bytes().count(b"\n") if path.exists() else 0

    log.emit(Warned(message="a"))
    assert lines() == 0
    log.emit(Checkpointed(train_step=1, path="p", seconds=0.1))
    assert lines() == 2
    clock.now += 0.9
    log.emit(Warned(message="b"))
    assert lines() == 2
    clock.now += 0.2
    log.emit(Warned(message="c"))
    assert lines() == 4
    log.emit(Warned(message="d"))
    assert log.offset() == path.stat().st_size
    assert lines() == 5
    log.close()


def test_log_without_a_directory_feeds_its_views() -> None:
    log, view = EventLog(None), Recorder()
    log.subscribe(view)
    log.emit(RunEnded(status="completed", reason="", message=""))
    log.truncate(0)
    assert (log.offset(), len(view.seen)) == (0, 1)
    log.close()


def test_events_come_back_as_they_were_and_not_finite_as_null() -> None:
    step = OptimizerStep(
        group="policy",
        train_step=3,
        optimizer_step=5,
        applied=False,
        reason="not_finite",
        metrics={"loss": math.nan, "grad_norm": math.inf, "entropy": np.float32(0.5)},  # type: ignore[dict-item]
        seconds=0.5,
    )
    line = encode_json(step)
    assert b"NaN" not in line
    assert json.loads(line)["metrics"] == {"loss": None, "grad_norm": None, "entropy": 0.5}
    back = decode_event(line)
    assert isinstance(back, OptimizerStep)
    assert back.metrics["loss"] is None
    with pytest.raises(TypeError, match="no place in an event"):
        encode_json({"x": object()})


def test_truncate_replays_what_is_kept_and_time_goes_on(tmp_path: Path) -> None:
    clock = FakeClock()
    log = EventLog(tmp_path, clock)
    clock.now = 1005.0
    log.emit(Warned(message="kept"))
    offset = log.offset()
    clock.now = 1009.0
    log.emit(Warned(message="lost"))
    log.close()

    clock, view = FakeClock(50.0), Recorder()
    log = EventLog(tmp_path, clock)
    log.subscribe(view)
    log.truncate(offset)
    assert view.seen == [(Warned(message="kept", t=5.0), False)]
    clock.now = 51.0
    log.emit(Warned(message="new"))
    assert view.seen[-1] == (Warned(message="new", t=6.0), True)
    log.close()
    assert [e.t for e in read_events(tmp_path / "events.jsonl")] == [5.0, 6.0]


def test_a_new_run_replaces_the_files_of_an_older_one(tmp_path: Path) -> None:
    Scene(tmp_path, steps=3).end()
    assert (tmp_path / "summary.json").exists()
    scene = Scene(tmp_path)
    assert not (tmp_path / "summary.json").exists()
    assert scene.rows() == []
    scene.step()
    scene.end()
    assert len(scene.rows()) == 1
    assert sum(isinstance(e, StepEnded) for e in read_events(tmp_path / "events.jsonl")) == 1


def test_a_start_that_fails_leaves_the_lines_of_the_run_before(tmp_path: Path) -> None:
    scene = Scene(tmp_path, steps=2)
    offsets = scene.observer.offsets()
    scene.end()
    files = {name: (tmp_path / name).read_bytes() for name in ("events.jsonl", "metrics.jsonl", "trace.json")}
    for wrong in (offsets | {"metrics": 10**9}, offsets | {"events": 10**9}, {"events": 0}, None):
        observer = Observer(tmp_path, console="off")
        if wrong is not None:
            with pytest.raises(CheckpointError):
                observer.truncate(wrong)
        observer.emit(RunEnded(status="failed", reason="CheckpointError", message="does not fit"))
        assert observer.log.offset() == 0
        observer.close()
        assert {name: (tmp_path / name).read_bytes() for name in files} == files
        assert scene.json("summary.json")["reason"] == "CheckpointError"


def test_offsets_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    scene = Scene(tmp_path, steps=2)
    offsets = scene.observer.offsets()
    scene.end()
    with pytest.raises(CheckpointError, match=r"holds \d+ bytes"):
        EventLog(tmp_path).truncate(10**9)
    log = EventLog(tmp_path)
    with pytest.raises(CheckpointError, match="not the end of a line"):
        log.truncate(offsets["events"] - 1)
    log.close()
    (tmp_path / "events.jsonl").write_bytes(b"{}\n")
    log = EventLog(tmp_path)
    with pytest.raises(CheckpointError, match=r"line 1 of events\.jsonl"):
        log.truncate(3)
    log.close()


def test_a_failing_disk_raises_as_it_is_and_leaves_whole_lines(tmp_path: Path) -> None:
    log, view = EventLog(tmp_path, FakeClock()), Recorder()
    log.subscribe(view)
    log.emit(Warned(message="first"))
    kept = log.offset()
    whole = FileIO.write
    seen = len(view.seen)

    class FullDisk(FileIO):
        def write(self, data: memoryview) -> int:  # type: ignore[override]
            if self.tell() > kept:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return whole(self, data[:5])

    disk = log._file._file  # pyright: ignore[reportPrivateUsage]
    assert disk is not None
    log._file._file = FullDisk(disk.name, "r+")  # pyright: ignore[reportPrivateUsage]
    log._file._file.seek(kept)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(OSError, match="No space left"):
        log.emit(Checkpointed(train_step=1, path="p", seconds=0.0))
    assert len(view.seen) == seen
    assert (tmp_path / "events.jsonl").stat().st_size == kept
    log._file._file.close()  # pyright: ignore[reportPrivateUsage]
    log._file._file = disk  # pyright: ignore[reportPrivateUsage]
    disk.seek(kept)
    log.close()
    assert [type(e).__name__ for e in read_events(tmp_path / "events.jsonl")] == ["Warned", "Checkpointed"]


def test_metrics_row_of_a_step(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.observer.emit(Settled(uid=90, attempt=1, state="dropped(expired)", token_count=3))
    scene.observer.emit(Settled(uid=91, attempt=1, state="dropped(fenced)", token_count=3))
    scene.observer.emit(Settled(uid=92, attempt=1, state="filtered", token_count=3))
    scene.step(reward=0.5)
    scene.end()
    (row,) = scene.rows()
    assert {key: row.pop(key) for key in list(row) if key.startswith(("tokens/", "leases/"))} == {
        "tokens/generated": 107,
        "tokens/trained": 90,
        "tokens/masked": 10,
        "tokens/dropped": 0,
        "tokens/open": 7,
        "leases/running": 2,
        "leases/scoring": 0,
        "leases/ready": 1,
        "leases/consumed": 2,
        "leases/dropped": 0,
    }
    assert row == pytest.approx(
        {
            "train_step": 0,
            "policy_version": 1,
            "published_version": 1,
            "publish_count": 1,
            "reward/mean": 0.5,
            "reward/std": 0.25,
            "staleness/token_lag_mean": 60 / 90,
            "staleness/token_lag_max": 2,
            "staleness/head_lag_max": 3,
            "staleness/queue_lag_mean": 0.5,
            "staleness/masked_fraction": 0.06,
            "staleness/untrainable_fraction": 0.04,
            "staleness/expired": 1,
            "staleness/dropped": 2,
            "rollouts": 2,
            "samples": 4,
            "response_length/mean": 25.0,
            "response_length/max": 40,
            "time/step": 2.0,
            "time/void": 0.0,
            "time/wait_batch": 0.5,
            "time/publish": 0.2,
            "time/exposed_sync": 0.1,
            "time/checkpoint": 0.0,
            "time/switch": 0.0,
            "busy/rollout": 1.8,
            "busy/reward": 0.0,
            "busy/policy": 1.2,
            "busy/generate": 0.9,
            "busy/train": 0.6,
            "wait/generate": pytest.approx(0.1),
            "sync/generate": 0.1,
            "wait/train": 0.25,
            "sync/train": 0.05,
            "loss/loss": 1.0,
            "logprob_gap": 0.01,
            "optimizer_steps": 1,
            "rejected_steps": 0,
            "void_steps": 0,
            "nonfinite_values": 0,
        }
    )


def test_losses_are_means_over_applied_steps_and_nothing_bad_is_averaged_away(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.pop()
    scene.optimize(loss=1.0, entropy=2.0)
    scene.optimize(loss=3.0, entropy=math.nan)
    scene.optimize(applied=False, loss=100.0, grad_norm=math.inf)
    scene.optimize(group="critic", loss=7.0)
    scene.observer.emit(Scored(uid=0, attempt=1, rewards=(0.0, math.nan), seconds=0.1))
    scene.step()
    scene.end()
    (row,) = scene.rows()
    assert row["loss/loss"] == pytest.approx((1 + 3 + 1) / 3)
    assert row["loss/entropy"] is None
    assert row["loss/grad_norm"] is None
    assert row["critic/loss"] == 7.0
    assert (row["optimizer_steps"], row["rejected_steps"], row["nonfinite_values"]) == (4, 1, 3)
    assert "NaN" not in (tmp_path / "events.jsonl").read_text()


def test_measures_of_transforms_and_numbers_of_the_state_are_in_the_row(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for metrics in ({"explained_variance": 0.25, "scaled_reward": math.inf}, {"explained_variance": 0.75}):
        scene.observer.emit(Measured(group="critic", train_step=0, metrics=metrics))
    scene.observer.emit(Measured(group="state", train_step=0, metrics={"kl": 1.5, "rewards/mean": 2.0}))
    scene.step()
    scene.step()
    scene.end()
    first, second = scene.rows()
    assert first["critic/explained_variance"] == 0.5
    assert first["critic/scaled_reward"] is None
    assert (first["state/kl"], first["state/rewards/mean"], first["nonfinite_values"]) == (1.5, 2.0, 1)
    assert not any(name.startswith(("state/", "critic/")) for name in second)


def test_void_steps_write_no_row_and_are_counted(tmp_path: Path) -> None:
    scene = Scene(tmp_path, steps=1)
    scene.step(void=True)
    scene.step(void=True)
    scene.step()
    scene.step(void=True)
    scene.end()
    rows = scene.rows()
    assert [row["train_step"] for row in rows] == [0, 1]
    assert rows[1]["void_steps"] == 2
    assert rows[1]["rejected_steps"] == 2
    assert rows[1]["time/void"] == 4.0
    for row in rows:
        parts = ("tokens/trained", "tokens/masked", "tokens/dropped", "tokens/open")
        assert row["tokens/generated"] == sum(row[part] for part in parts)
    summary = scene.json("summary.json")
    assert (summary["void_steps"], summary["rejected_steps"]) == (3, 3)
    assert summary["rates"]["steps_s"] == pytest.approx(2 / 8)
    assert summary["staleness"]["histograms"]["head"] == {"1": 2, "3": 2}


def test_evaluation_is_in_the_row_of_the_next_step_and_in_the_summary(tmp_path: Path) -> None:
    scene = Scene(tmp_path, steps=1)
    for train_step, label, reward in ((0, "v1", 0.25), (1, "mixed(v1..v2)", 0.75)):
        gold = 2 * reward - 1
        answered = Answered("ab>", f"x{train_step}", {"reward": reward, "gold": gold})
        scene.observer.emit(
            Evaluated(
                train_step=train_step,
                label=label,
                reward_mean=reward,
                count=8,
                token_count=80,
                seconds=0.3,
                judges={"gold": gold},
                samples=(answered,),
            )
        )
        if train_step == 0:
            scene.step()
    scene.end()
    first, second = scene.rows()
    assert "eval/reward" not in first
    assert (second["eval/reward"], second["eval/label"], second["eval/train_step"]) == (0.25, "v1", 0)
    assert scene.json("summary.json")["evaluation"] == {
        "first": 0.25,
        "last": 0.75,
        "label": "mixed(v1..v2)",
        "count": 2,
        "judges": {"gold": {"first": -0.5, "last": 0.5}},
        "samples": {
            "first": [{"prompt": "ab>", "response": "x0", "scores": {"reward": 0.25, "gold": -0.5}}],
            "last": [{"prompt": "ab>", "response": "x1", "scores": {"reward": 0.75, "gold": 0.5}}],
        },
    }
    assert second["eval/gold"] == -0.5
    assert "sample      'ab>': 'x0' -> 'x1'" in scene.output.getvalue()


def test_counters_continue_exactly_over_a_resume(tmp_path: Path) -> None:
    whole = Scene(tmp_path / "whole", steps=2)
    whole.step(void=True)
    for _ in range(4):
        whole.step()
    whole.end()

    cut = Scene(tmp_path / "cut", steps=2)
    cut.step(void=True)
    cut.step()
    offsets = cut.observer.offsets()
    cut.step()
    cut.step(void=True)
    cut.end("stopped", "SIGTERM")

    resumed = Scene(tmp_path / "cut", resume=offsets)
    resumed.done, resumed.voids, resumed.optimizer_steps = cut.done - 1, cut.voids - 1, cut.optimizer_steps - 1
    for _ in range(3):
        resumed.step()
    resumed.end()
    assert resumed.rows() == [pytest.approx(row) for row in whole.rows()]
    events = list(read_events(tmp_path / "cut" / "events.jsonl"))
    assert [e.t for e in events] == sorted(e.t for e in events)
    assert flat(resumed.json("summary.json")) == pytest.approx(flat(whole.json("summary.json")))


def test_busy_seconds_are_cut_at_step_ends_and_never_exceed_the_step() -> None:
    meter = BusyMeter()

    def busy(start: float, end: float, rank: int = 0, group: str = "rollout", work: str = "generate") -> None:
        meter.add(EngineBusy(group=group, rank=rank, start=start, end=end, work=work, token_count=0))

    meter.declare({"rollout": GroupShape("rollout", 2)})
    busy(0.0, 3.0)
    shares = meter.close(2.0, 2.0)
    assert shares.groups["rollout"] == pytest.approx(1.0)  # the second engine idles
    assert shares.generate == pytest.approx(0.5)
    busy(2.0, 3.0)  # reported twice: the union counts
    busy(3.5, 4.0, work="swap")
    shares = meter.close(4.0, 2.0)
    assert (shares.generate, shares.swap) == pytest.approx((1.5 / 4, 0.5 / 4))
    assert meter.close(6.0, 2.0).generate == 0.0
    busy(4.0, 7.0)  # reported late: one second is due after this step too
    assert meter.close(6.5, 0.5).groups["rollout"] == pytest.approx(0.25)
    assert meter.close(8.5, 2.0).groups["rollout"] == pytest.approx(1.0)
    assert meter.close(10.5, 2.0).groups["rollout"] == pytest.approx(0.25)


def test_what_engines_do_between_steps_counts_in_no_step() -> None:
    """They start before the first one, and save between two."""
    meter = BusyMeter()
    meter.declare({"policy": GroupShape("policy", 1)})

    def busy(start: float, end: float, work: str = "step") -> None:
        meter.add(EngineBusy(group="policy", rank=0, start=start, end=end, work=work, token_count=0))

    busy(0.0, 5.0, "join")
    busy(10.0, 11.0)
    assert meter.close(12.0, 3.0).groups["policy"] == pytest.approx(1.0)
    busy(11.5, 14.0, "save_state")
    busy(14.0, 15.0)
    assert meter.close(16.0, 2.0).groups["policy"] == pytest.approx(1.5)


def test_undeclared_groups_are_judged_by_what_they_do() -> None:
    meter = BusyMeter()
    for group, work in (("sampler", "generate"), ("actor", "step"), ("judge", "score")):
        meter.add(EngineBusy(group=group, rank=0, start=0.0, end=1.0, work=work, token_count=0))
    assert meter.policy() == "policy"
    meter.trains("critic")
    meter.trains("actor")
    assert meter.policy() == "critic"
    shares = meter.close(2.0, 2.0)
    assert (shares.generate, shares.train) == (0.5, 0.5)
    assert shares.groups == {"sampler": 1.0, "actor": 1.0, "judge": 1.0}
    meter.declare({"actor": GroupShape("policy", 1), "judge": GroupShape("reward", 1)})
    assert meter.policy() == "actor"


def test_a_meter_without_train_steps_stays_small() -> None:
    meter = BusyMeter()
    for index in range(20_000):
        meter.add(EngineBusy(group="r", rank=0, start=index, end=index + 0.5, work="generate", token_count=1))
    engine = meter._engines["r"][0]  # pyright: ignore[reportPrivateUsage]
    assert len(engine.slices) <= 4096
    assert meter.close(20_000.0, 20_000.0).groups["r"] == pytest.approx(10_000.0)
