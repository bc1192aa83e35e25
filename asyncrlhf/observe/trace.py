"""trace.json: the timeline of a run in Chrome trace format, for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path

from asyncrlhf.observe.events import (
    Checkpointed,
    EngineBusy,
    Evaluated,
    Event,
    Fenced,
    Popped,
    Published,
    Restarted,
    RunEnded,
    StepEnded,
    encode_json,
)
from asyncrlhf.observe.files import write_atomically

__all__ = ("Trace",)

MERGE_SECONDS = 1e-3
LIVE_STATES = ("running", "scoring", "ready", "training")
RUN = 1
"""Process id of the run's own tracks; engines follow, one process per group."""
STEPS, PUBLISHES, EVALUATIONS = 1, 2, 3


class Trace:
    """View: keeps at most `capacity` trace events in memory (about 250 bytes each) and writes trace.json at the end.

    A longer run keeps its beginning and its end; the file names the gap. One track per engine, whose slices of one
    kind of work are merged when less than 1 ms apart, tracks for train steps, publishes and evaluations, and
    counters for live leases and token lag. A run in which nothing happened writes no file.
    """

    def __init__(self, directory: Path | None, *, capacity: int = 100_000) -> None:
        self.path = None if directory is None else directory / "trace.json"
        self._head: list[bytes] = []
        self._tail: deque[tuple[float, bytes]] = deque()
        self._capacity = capacity
        self._left_out = 0
        self._gap = (0.0, 0.0)
        self._open: dict[tuple[str, int], EngineBusy] = {}
        self._groups: dict[str, int] = {}
        self._engines: set[tuple[str, int]] = set()
        self._popped: Popped | None = None

    def close(self) -> None:
        """Nothing to release: the file is written whole when the run ends."""

    def see(self, event: Event, *, live: bool) -> None:
        """Raises OSError when the disk fails."""
        match event:
            case EngineBusy():
                self._engine_busy(event)
            case Popped():
                self._popped = event
                self._slice("wait for a batch", (RUN, STEPS), event.t - event.waited, event.t)
            case StepEnded():
                self._step_ended(event)
            case Published():
                args = {"bytes": event.byte_count, "exposed_s": event.exposed, "changed": event.changed}
                self._slice(f"publish v{event.version}", (RUN, PUBLISHES), event.t - event.seconds, event.t, args)
                self._instant(f"v{event.version}", (RUN, PUBLISHES), event.t)
            case Checkpointed():
                self._slice("checkpoint", (RUN, STEPS), event.t - event.seconds, event.t, {"path": event.path})
            case Evaluated():
                args = {"reward": event.reward_mean, "count": event.count}
                self._slice(f"eval {event.label}", (RUN, EVALUATIONS), event.t - event.seconds, event.t, args)
            case Fenced():
                self._instant(f"fenced: {event.reason}", (self._process(event.group), event.rank), event.t)
            case Restarted():
                self._instant(f"restarted as {event.incarnation}", (self._process(event.group), event.rank), event.t)
            case RunEnded():
                if live and self.path is not None and (self._head or self._open):
                    write_atomically(self.path, self.dump())
            case _:
                pass

    def dump(self) -> bytes:
        """The text of trace.json as of now."""
        for slice_ in self._open.values():
            self._engine_slice(slice_)
        self._open.clear()
        events = [*self._names(), *self._head, *(line for _, line in self._tail)]
        other = {"left_out": self._left_out}
        if self._left_out:
            other |= {"left_out_from_s": self._gap[0], "left_out_to_s": self._gap[1]}
        return b'{"displayTimeUnit":"ms","otherData":%b,"traceEvents":[\n%b\n]}\n' % (
            encode_json(other),
            b",\n".join(events),
        )

    def _engine_busy(self, event: EngineBusy) -> None:
        key = (event.group, event.rank)
        last = self._open.get(key)
        if last is not None:
            if last.work == event.work and last.start <= event.start < last.end + MERGE_SECONDS:
                event = EngineBusy(
                    group=event.group,
                    rank=event.rank,
                    start=last.start,
                    end=max(last.end, event.end),
                    work=event.work,
                    token_count=last.token_count + event.token_count,
                )
            else:
                self._engine_slice(last)
        self._engines.add(key)
        self._open[key] = event

    def _engine_slice(self, event: EngineBusy) -> None:
        track = (self._process(event.group), event.rank)
        args = {"tokens": event.token_count} if event.token_count else None
        self._slice(event.work, track, event.start, event.end, args)

    def _step_ended(self, event: StepEnded) -> None:
        popped, self._popped = self._popped, None
        name = f"step {event.train_step}" + (f" (void: {event.reason})" if event.void else "")
        start = popped.t if popped else event.t - event.seconds
        reward = {"reward": popped.reward_mean} if popped else {}
        self._slice(name, (RUN, STEPS), start, event.t, {"policy_version": event.policy_version, **reward})
        self._counter("live leases", event.t, {state: event.leases.get(state, 0) for state in LIVE_STATES})
        trained = {lag: count for lag, count in popped.trained_by_lag.items() if count} if popped else {}
        if trained and not event.void:
            mean = sum(lag * count for lag, count in trained.items()) / sum(trained.values())
            self._counter("token lag", event.t, {"mean": mean, "max": max(trained)})

    def _process(self, group: str) -> int:
        return self._groups.setdefault(group, RUN + 1 + len(self._groups))

    def _slice(
        self, name: str, track: tuple[int, int], start: float, end: float, args: Mapping[str, object] | None = None
    ) -> None:
        line: dict[str, object] = {"name": name, "ph": "X", "pid": track[0], "tid": track[1]}
        line |= {"ts": _micros(start), "dur": _micros(end - start)}
        self._keep(start, line | {"args": args} if args else line)

    def _instant(self, name: str, track: tuple[int, int], at: float) -> None:
        self._keep(at, {"name": name, "ph": "i", "s": "t", "pid": track[0], "tid": track[1], "ts": _micros(at)})

    def _counter(self, name: str, at: float, values: Mapping[str, float]) -> None:
        self._keep(at, {"name": name, "ph": "C", "pid": RUN, "tid": 0, "ts": _micros(at), "args": values})

    def _keep(self, at: float, line: Mapping[str, object]) -> None:
        encoded = encode_json(line)
        if len(self._head) < self._capacity // 2:
            self._head.append(encoded)
            return
        self._tail.append((at, encoded))
        if len(self._tail) > self._capacity - self._capacity // 2:
            lost, _ = self._tail.popleft()
            self._gap = (self._gap[0] if self._left_out else lost, lost)
            self._left_out += 1

    def _names(self) -> list[bytes]:
        """Metadata: the names of processes and tracks."""
        tracks = {(RUN, STEPS): "train steps", (RUN, PUBLISHES): "publishes", (RUN, EVALUATIONS): "evaluations"}
        tracks |= {(self._groups[group], rank): f"{group} {rank}" for group, rank in sorted(self._engines)}
        processes = {RUN: "run", **{pid: group for group, pid in self._groups.items()}}
        named = [_metadata("process_name", pid, 0, name) for pid, name in processes.items()]
        return named + [_metadata("thread_name", pid, tid, name) for (pid, tid), name in tracks.items()]


def _metadata(kind: str, pid: int, tid: int, name: str) -> bytes:
    return encode_json({"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 1)
