"""metrics.jsonl: the event log folded into one row per train step that counted. Waits for nobody."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Protocol

from asyncrlhf.observe.busy import BusyMeter, BusyShares
from asyncrlhf.observe.events import (
    Checkpointed,
    EngineBusy,
    Evaluated,
    Event,
    Measured,
    Number,
    OptimizerStep,
    Popped,
    Published,
    RunEnded,
    RunStarted,
    Scored,
    Settled,
    StepEnded,
    TurnTaken,
    encode_json,
    finite,
)
from asyncrlhf.observe.files import LineFile

__all__ = ("Cell", "Metrics", "Row", "RowView")

Cell = float | str | None
Row = Mapping[str, Cell]
"""One line of metrics.jsonl; None (null) is a number that was not finite or does not exist."""


class RowView(Protocol):
    """Takes the rows of metrics.jsonl as they are made."""

    def see_row(self, row: Row, *, live: bool) -> None:
        """`live` False: the row was written before a resume."""
        ...


class Metrics:
    """View: one row per train step that was not void, in metrics.jsonl and to the row views.

    All times are in seconds. `time/step` is the length of the step, `time/void` what void attempts before it took,
    `time/switch` what groups took to leave devices that they share, and others to come.
    `busy/<group>` is in seconds (mean over its engines), `busy/generate` and `busy/train` are shares of `time/step`,
    and so are what else the two pools did: `wait/generate` and `wait/train` (nothing; for a batch), `sync/generate`
    (taking weights, a part of its busy share) and `sync/train` (publishing them).
    For a reward function (backend "rules") it is 0: its calls mostly wait, and what they compute is not measured; a run
    that waits for rewards shows in `leases/scoring`.
    `tokens/*`, `leases/*`, `staleness/expired`, `staleness/dropped` (leases), `optimizer_steps`, `rejected_steps`
    (applied and rejected optimizer steps of every group), `void_steps` and `nonfinite_values` count from the run's
    start. `loss/<metric>` is the policy's mean over the applied optimizer steps of the step; without a policy, that of
    the first trained group. Other groups have `<group>/<metric>`, for example `critic/loss`, `critic/grad_norm`,
    `critic/learning_rate`; <metric> may be a measure of the group's loss (`loss/clip_fraction`, `critic/clip_fraction`,
    `loss/accuracy`) or of a transform computed beside it (`critic/explained_variance`, `critic/scaled_reward`).
    `publish_count` and `published_version` leave out a publish that goes on beside the next step, whose row has its
    `time/publish` and `time/exposed_sync`.
    `state/<field>` are the numbers in the algorithm's state (PPO: `state/kl` to the reference in nats per answer,
    `state/kl_coefficient`, `state/rewards/mean`). `probe_gap` is the largest difference between a rollout engine and
    its trainer right after a publish, on fixed tokens, in nats. A mean over anything not finite is null. An evaluation
    is in the row of the next step to end.
    """

    def __init__(self, directory: Path | None) -> None:
        self._file = LineFile(None if directory is None else directory / "metrics.jsonl")
        self._views: list[RowView] = []
        self._busy = BusyMeter()
        self._counts: dict[str, int] = dict.fromkeys(
            ("optimizer_steps", "rejected_steps", "void_steps", "nonfinite_values", "expired", "dropped"), 0
        )
        self._popped: Popped | None = None
        self._steps: list[OptimizerStep | Measured] = []
        self._evaluated: Evaluated | None = None
        self._times = self._no_times()
        self._probe_gap: float | None = None

    def subscribe(self, *views: RowView) -> None:
        self._views += views

    @property
    def counts(self) -> Mapping[str, int]:
        """Since the run's start: optimizer_steps, rejected_steps, void_steps, nonfinite_values, expired, dropped."""
        return self._counts

    def offset(self) -> int:
        """Bytes of metrics.jsonl written so far, safely on disk: what a checkpoint stores."""
        return self._file.offset()

    def check(self, offset: int) -> None:
        """Raises CheckpointError, and changes nothing, when `truncate` would refuse this offset."""
        self._file.check(offset)

    def truncate(self, offset: int) -> None:
        """Forget the rows after a checkpoint; the numbers themselves come back from the replayed events.

        Raises CheckpointError when metrics.jsonl does not fit the offset.
        """
        self._file.truncate(offset)

    def close(self) -> None:
        self._file.close()

    def see(self, event: Event, *, live: bool) -> None:
        """Raises OSError when the disk fails."""
        match event:
            case EngineBusy():
                self._busy.add(event)
            case Settled():
                self._counts["expired"] += event.state == "dropped(expired)"
                self._counts["dropped"] += event.state.startswith("dropped")
            case Scored():
                self._count_nonfinite(event.rewards)
            case Popped():
                self._popped = event
            case OptimizerStep():
                self._optimizer_step(event)
            case Measured():
                self._count_nonfinite(event.metrics.values())
                self._steps.append(event)
            case Published():
                self._times["time/publish"] += event.seconds
                self._times["time/exposed_sync"] += event.exposed
                self._probe_gap = event.probe_gap
            case Checkpointed():
                self._times["time/checkpoint"] += event.seconds
            case TurnTaken():
                self._times["time/switch"] += event.seconds
            case Evaluated():
                self._count_nonfinite((event.reward_mean, *event.judges.values()))
                self._evaluated = event
            case StepEnded():
                self._step_ended(event, live)
            case RunStarted():
                self._busy.declare(event.groups)
                self._popped, self._steps, self._times = None, [], self._no_times()
                if live:
                    self._file.begin()
            case RunEnded():
                if live:
                    self._file.flush()
            case _:
                pass

    def _optimizer_step(self, event: OptimizerStep) -> None:
        self._busy.trains(event.group)
        self._counts["optimizer_steps" if event.applied else "rejected_steps"] += 1
        self._count_nonfinite(event.metrics.values())
        self._steps.append(event)

    def _step_ended(self, event: StepEnded, live: bool) -> None:
        busy = self._busy.close(event.t, event.seconds)
        if event.void:
            self._counts["void_steps"] += 1
            self._times["time/void"] += event.seconds
            self._popped, self._steps = None, []
            return
        row: dict[str, Cell] = {
            "train_step": event.train_step,
            "policy_version": event.policy_version,
            "published_version": event.published_version,
            "publish_count": event.publish_count,
            **_popped_cells(self._popped),
            "staleness/expired": self._counts["expired"],
            "staleness/dropped": self._counts["dropped"],
            "time/step": event.seconds,
            **self._times,
            **{f"busy/{group}": seconds for group, seconds in busy.groups.items()},
            "busy/generate": busy.generate,
            "busy/train": busy.train,
            **_pool_shares(busy, event.seconds, self._times["time/exposed_sync"], self._popped),
            **{f"tokens/{kind}": count for kind, count in event.tokens.items()},
            **{f"leases/{state}": count for state, count in event.leases.items()},
            **_metric_cells(self._steps, self._busy.policy()),
            **({} if self._probe_gap is None else {"probe_gap": self._probe_gap}),
            **{name: self._counts[name] for name in ("optimizer_steps", "rejected_steps", "void_steps")},
            "nonfinite_values": self._counts["nonfinite_values"],
            **_evaluation_cells(self._evaluated),
        }
        row = {name: cell if isinstance(cell, str | int) else finite(cell) for name, cell in row.items()}
        self._popped, self._steps, self._evaluated, self._times = None, [], None, self._no_times()
        if live:
            self._file.append(encode_json(row))
            self._file.flush()
        for view in self._views:
            view.see_row(row, live=live)

    def _count_nonfinite(self, values: Iterable[Number]) -> None:
        self._counts["nonfinite_values"] += sum(finite(value) is None for value in values)

    @staticmethod
    def _no_times() -> dict[str, float]:
        return dict.fromkeys(("time/void", "time/publish", "time/exposed_sync", "time/checkpoint", "time/switch"), 0.0)


def _pool_shares(busy: BusyShares, seconds: float, exposed: float, popped: Popped | None) -> dict[str, Cell]:
    """What the pools did beside their work: nothing, or moving weights. Shares of the step, beside busy/*."""
    waited = 0.0 if popped is None else popped.waited

    def share(of: float) -> float:
        return min(1.0, of / seconds) if seconds > 0 else 0.0

    return {
        "wait/generate": busy.idle,
        "sync/generate": busy.swap,
        "wait/train": share(waited),
        "sync/train": share(exposed),
    }


def _popped_cells(popped: Popped | None) -> dict[str, Cell]:
    """What the pop decided; nothing for a step without one."""
    if popped is None:
        return {}
    trained, over_age = sum(popped.trained_by_lag.values()), sum(popped.masked_by_lag.values())
    total = trained + over_age + popped.masked_untrainable
    lags = popped.trained_by_lag
    return {
        "reward/mean": popped.reward_mean,
        "reward/std": popped.rewards_std,
        "staleness/token_lag_mean": sum(lag * count for lag, count in lags.items()) / trained if trained else None,
        "staleness/token_lag_max": max((lag for lag, count in lags.items() if count), default=None),
        "staleness/head_lag_max": max(popped.head_lags, default=None),
        "staleness/queue_lag_mean": fmean(popped.queue_lags) if popped.queue_lags else None,
        "staleness/masked_fraction": over_age / total if total else None,
        "staleness/untrainable_fraction": popped.masked_untrainable / total if total else None,
        "response_length/mean": fmean(popped.response_lengths) if popped.response_lengths else None,
        "response_length/max": max(popped.response_lengths, default=None),
        "rollouts": len(popped.uids),
        "samples": len(popped.response_lengths),
        "time/wait_batch": popped.waited,
    }


def _metric_cells(steps: list[OptimizerStep | Measured], policy: str) -> dict[str, Cell]:
    """Means over the applied optimizer steps, and what else was measured; null where no step was applied or one value
    was not finite."""
    values: dict[str, list[Number]] = {}
    for step in steps:
        for metric, value in step.metrics.items():
            own = values.setdefault(_cell_name(step.group, metric, policy), [])
            if isinstance(step, Measured) or step.applied:
                own.append(finite(value))
    cells: dict[str, Cell] = {"logprob_gap": None}
    for name, found in values.items():
        numbers = [value for value in found if value is not None]
        cells[name] = fmean(numbers) if numbers and len(numbers) == len(found) else None
    return cells


def _cell_name(group: str, metric: str, policy: str) -> str:
    if group != policy:
        return f"{group}/{metric}"
    return metric if metric == "logprob_gap" else f"loss/{metric}"


def _evaluation_cells(evaluated: Evaluated | None) -> dict[str, Cell]:
    if evaluated is None:
        return {}
    return {
        "eval/reward": evaluated.reward_mean,
        **{f"eval/{name}": score for name, score in evaluated.judges.items()},
        "eval/label": evaluated.label,
        "eval/train_step": evaluated.train_step,
        "eval/count": evaluated.count,
        "eval/seconds": evaluated.seconds,
    }
