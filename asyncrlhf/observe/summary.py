"""summary.json: what a run did and what asynchrony cost it, from the event log and the metrics rows."""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from asyncrlhf.observe.events import (
    Evaluated,
    Event,
    Number,
    Popped,
    Published,
    RunEnded,
    RunStarted,
    Settled,
    StepEnded,
    TurnTaken,
    encode_json,
    finite,
)
from asyncrlhf.observe.files import write_atomically
from asyncrlhf.observe.metrics import Metrics, Row

__all__ = ("Summary",)

TOKENS = ("generated", "trained", "masked", "dropped", "open")
COUNTS = ("optimizer_steps", "rejected_steps", "void_steps", "nonfinite_values")
OUTCOMES = {"reward": "reward/mean", "loss": "loss/loss", "accuracy": "loss/accuracy"}
"""What a run comes to, by name: a key of metrics.jsonl; but for the reward only where there is one."""
REWARD_STEPS = 3
SERIES = ("step", "lost", "trained", "samples", "generate", "swap", "train", "wait", "exposed")


class Summary:
    """View and row view: writes summary.json when the run ends, however it ends, and removes an older one when the
    run starts. It subscribes itself to `metrics`; subscribe it to the log after them.

    `result()` is what the file holds. Rates and shares are of the steady state: the train steps without their first
    fifth. A share or a rate that does not exist (no step yet) is null. Keys beyond the contract: `masked_by_position`
    and `masked_by_length` split `masked_fraction` (over age, of all model tokens popped) into ten deciles each;
    `speedup_bound` = (g + r) / max(g, r) with g and r the busy seconds
    per step of the two pools; `exposed_sync_s` is per step. Void attempts count in the seconds of the rates only.
    `publishes` are those that brought other weights, `switches` those of devices that groups share, both of the whole
    run. All of `staleness` is since the resume that changed `max_staleness`, `since_step`, or since the start;
    `expired_fraction` is of the leases settled since then.
    """

    def __init__(self, directory: Path | None, metrics: Metrics) -> None:
        metrics.subscribe(self)
        self._metrics = metrics
        self.path = None if directory is None else directory / "summary.json"
        self._started: RunStarted | None = None
        self._ended: RunEnded | None = None
        self._last: StepEnded | None = None
        self._popped: Popped | None = None
        self._evaluations: list[Evaluated] = []
        self._evaluation_count = 0
        self._first = {name: list[Number]() for name in OUTCOMES}
        self._recent = {name: deque[Number](maxlen=REWARD_STEPS) for name in OUTCOMES}
        self._failed_leases = 0
        self._publishes: dict[str, float] = {"count": 0, "seconds": 0.0, "exposed": 0.0}
        self._switches: dict[str, float] = {"count": 0, "seconds": 0.0}
        self._begin_staleness(0)
        self._series = {name: array("d") for name in SERIES}

    def close(self) -> None:
        """Nothing to release: the file is written whole when the run ends."""

    def see(self, event: Event, *, live: bool) -> None:
        """Raises OSError when the disk fails."""
        match event:
            case RunStarted():
                if self._started is not None and event.max_staleness != self._started.max_staleness:
                    self._begin_staleness(event.resumed_from or 0)
                self._started = event
                if live and self.path is not None:
                    self.path.unlink(missing_ok=True)
            case Settled():
                self._settled[event.state] += event.state != "consumed"
                self._failed_leases += event.state == "failed"
            case Popped():
                self._popped = event
            case Published() if event.changed:
                _tally(self._publishes, seconds=event.seconds, exposed=event.exposed)
            case TurnTaken():
                _tally(self._switches, seconds=event.seconds)
            case StepEnded():
                self._last = event
                if not event.void:
                    self._series["trained"].append(self._consume(self._popped) if self._popped else 0)
                self._popped = None
            case Evaluated():
                self._evaluations = [*self._evaluations[:1], event]
                self._evaluation_count += 1
            case RunEnded():
                self._ended = event
                if live and self.path is not None:
                    write_atomically(self.path, msgspec.json.format(encode_json(self.result()), indent=2) + b"\n")
            case _:
                pass

    def _begin_staleness(self, train_step: int) -> None:
        """Lags, masks and how leases end are counted from here, under one bound."""
        self._since_step = train_step
        self._settled: Counter[str] = Counter()
        self._lags: dict[str, Counter[int]] = {name: Counter() for name in ("token", "masked", "head", "queue")}
        self._untrainable = 0
        self._by_position, self._by_length = [0] * 10, [0] * 10

    def _consume(self, popped: Popped) -> int:
        """A batch that was trained on; returns its trained tokens."""
        self._settled["consumed"] += len(popped.uids)
        self._lags["token"].update(popped.trained_by_lag)
        self._lags["masked"].update(popped.masked_by_lag)
        self._lags["head"].update(popped.head_lags)
        self._lags["queue"].update(popped.queue_lags)
        self._untrainable += popped.masked_untrainable
        self._by_position = _add(self._by_position, popped.masked_by_position)
        self._by_length = _add(self._by_length, popped.masked_by_length)
        return sum(popped.trained_by_lag.values())

    def see_row(self, row: Row, *, live: bool) -> None:
        """Raises KeyError if the row is not one of Metrics."""
        del live
        for name, key in OUTCOMES.items():
            value = row.get(key)
            assert not isinstance(value, str)
            if len(self._first[name]) < REWARD_STEPS:
                self._first[name].append(value)
            self._recent[name].append(value)
        step = _number(row["time/step"])
        values = {
            "step": step,
            "lost": _number(row["time/void"]),
            "samples": _number(row.get("samples")),
            "generate": _number(row["busy/generate"]) * step,
            "swap": _number(row["sync/generate"]) * step,
            "train": _number(row["busy/train"]) * step,
            "wait": _number(row.get("time/wait_batch")),
            "exposed": _number(row["time/exposed_sync"]),
        }
        for name, value in values.items():
            self._series[name].append(value)

    def result(self) -> dict[str, Any]:
        """The summary as of now; status "running" until the run has ended."""
        ended, last, started = self._ended, self._last, self._started
        tokens = self._tokens()
        step_count = last.policy_version if last else (started.resumed_from or 0) if started else 0
        return {
            "status": ended.status if ended else "running",
            "reason": ended.reason if ended else "",
            "message": ended.message if ended else "",
            "algorithm": started.algorithm if started else "",
            "is_sampled": started is None or started.is_sampled,
            "is_scored": started is None or started.is_scored,
            "train_steps": step_count,
            "wall_s": ended.t if ended else last.t if last else 0.0,
            **{
                name: {"first": _mean(self._first[name]), "last": _mean(self._recent[name])}
                for name in OUTCOMES
                if name == "reward" or any(value is not None for value in self._recent[name])
            },
            "evaluation": self._evaluation(),
            "tokens": tokens,
            "useful_token_fraction": _ratio(tokens["trained"], tokens["generated"]),
            "staleness": self._staleness(),
            **self._steady(),
            "publishes": {**self._publishes},
            "switches": {**self._switches},
            "leases": {**(last.leases if last else {})},
            "failed_leases": self._failed_leases,
            **{name: self._metrics.counts[name] for name in COUNTS},
        }

    def _tokens(self) -> dict[str, int]:
        counts = (self._ended.tokens if self._ended else {}) or (self._last.tokens if self._last else {})
        return {kind: counts.get(kind, 0) for kind in TOKENS}

    def _evaluation(self) -> dict[str, Any]:
        first, last = self._evaluations[:1], self._evaluations[-1:]
        return {
            "first": finite(first[0].reward_mean) if first else None,
            "last": finite(last[0].reward_mean) if last else None,
            "label": last[0].label if last else None,
            "count": self._evaluation_count,
            "judges": {
                name: {"first": finite(first[0].judges.get(name, math.nan)), "last": finite(score)}
                for name, score in (last[0].judges.items() if last else ())
            },
            "samples": {
                which: [msgspec.structs.asdict(answer) for answer in found[0].samples] if found else []
                for which, found in (("first", first), ("last", last))
            },
        }

    def _staleness(self) -> dict[str, Any]:
        token = self._lags["token"]
        trained, over_age = token.total(), self._lags["masked"].total()
        popped = trained + over_age + self._untrainable
        return {
            "bound": self._started.max_staleness if self._started else None,
            "lookahead": self._started.lookahead if self._started else None,
            "since_step": self._since_step,
            "max_token_lag": max((lag for lag, count in token.items() if count), default=None),
            "mean_token_lag": _ratio(sum(lag * count for lag, count in token.items()), trained),
            "expired_fraction": _ratio(self._settled["dropped(expired)"], self._settled.total()),
            "masked_fraction": _ratio(over_age, popped),
            "untrainable_fraction": _ratio(self._untrainable, popped),
            "masked_by_position": [_ratio(count, popped) for count in self._by_position],
            "masked_by_length": [_ratio(count, popped) for count in self._by_length],
            "histograms": {name: dict(sorted(counts.items())) for name, counts in self._lags.items()},
        }

    def _steady(self) -> dict[str, Any]:
        """Rates and shares over the train steps after the first fifth."""
        count = len(self._series["step"])
        skipped = count // 5
        total = {name: sum(values[skipped:]) for name, values in self._series.items()}
        length, elapsed = total["step"], total["step"] + total["lost"]
        generate, train = total["generate"], total["train"]
        swap_share, wait_share = _ratio(total["swap"], length), _ratio(total["wait"], length)
        idle = None if not length else max(0.0, 1 - generate / length)
        return {
            "rates": {
                "steps_s": _ratio(count - skipped, elapsed),
                "trained_tokens_s": _ratio(total["trained"], elapsed),
                "samples_s": _ratio(total["samples"], elapsed),
            },
            "busy": {"generate": _ratio(generate, length), "train": _ratio(train, length)},
            "overlap_efficiency": _ratio(max(generate, train), length),
            "speedup_bound": _ratio(generate + train, max(generate, train)),
            "exposed_sync_s": _ratio(total["exposed"], count - skipped),
            "shares": {
                "generate": {"busy": _ratio(generate, length), "sync": swap_share, "wait": idle},
                "train": {
                    "busy": _ratio(train, length),
                    "sync": _ratio(total["exposed"], length),
                    "wait": wait_share,
                },
            },
            "steady_state": {"skipped_steps": skipped, "steps": count - skipped, "seconds": elapsed},
        }


def _number(cell: float | str | None) -> float:
    return cell if isinstance(cell, int | float) else 0.0


def _ratio(part: float, whole: float) -> Number:
    return part / whole if whole else None


def _tally(total: dict[str, float], **more: float) -> None:
    total["count"] += 1
    for name, value in more.items():
        total[name] += value


def _mean(values: Iterable[Number]) -> Number:
    """None for no values, and when one of them is None."""
    found = list(values)
    numbers = [value for value in found if value is not None]
    return fmean(numbers) if numbers and len(numbers) == len(found) else None


def _add(counts: list[int], more: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(counts, more, strict=True)]
