"""A stretch of train steps seen as one: what a progress line shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from asyncrlhf.observe.events import RunStarted
from asyncrlhf.observe.metrics import Row
from asyncrlhf.observe.report import percent, rate

__all__ = ("Stretch", "progress_line", "sparkline")

BARS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class Stretch:
    """Rows of consecutive train steps; empty means nothing to show."""

    rows: list[Row] = field(default_factory=list[Row])

    def add(self, row: Row) -> None:
        self.rows.append(row)

    def number(self, name: str) -> float | None:
        """The newest row's number."""
        value = self.rows[-1].get(name) if self.rows else None
        return value if isinstance(value, int | float) else None

    def mean(self, name: str) -> float | None:
        """Over the rows; None where one is null or lacks it."""
        values = [value for row in self.rows if isinstance(value := row.get(name), int | float)]
        return fmean(values) if values and len(values) == len(self.rows) else None

    def share(self, name: str) -> float | None:
        """A share of the step, weighted by the steps' lengths."""
        seconds = self.total("time/step")
        parts = (_number(row, name) * _number(row, "time/step") for row in self.rows)
        return sum(parts) / seconds if seconds else None

    def maximum(self, name: str) -> float | None:
        return max((value for row in self.rows if isinstance(value := row.get(name), int | float)), default=None)

    def total(self, name: str) -> float:
        return sum(_number(row, name) for row in self.rows)

    def seconds(self) -> float:
        """Wall time, void attempts included."""
        return self.total("time/step") + self.total("time/void")

    def steps_per_second(self) -> float | None:
        seconds = self.seconds()
        return len(self.rows) / seconds if seconds else None

    def tokens_per_second(self) -> float | None:
        """Trained tokens; None for a single row, since rows count them from the run's start."""
        first, last = _number(self.rows[0], "tokens/trained"), _number(self.rows[-1], "tokens/trained")
        seconds = self.seconds() - _number(self.rows[0], "time/step") - _number(self.rows[0], "time/void")
        return (last - first) / seconds if seconds > 0 else None


def progress_line(stretch: Stretch, started: RunStarted | None) -> str:
    """Example: "step 40/200  reward 0.61  lag 0.9/2  over age 1.2%  gen 83% (sync 2%)  train 91% (waits 3%, sync 1%)
    1.9 steps/s", in one line.

    `lag` is the mean token lag of the trained tokens over the bound. Means are over the steps since the last line.
    """
    bound = started.max_staleness if started else None
    parts = [
        f"step {steps_done(stretch, started)}",
        learning(stretch, started),
        f"lag {fixed(stretch.mean('staleness/token_lag_mean'), 1)}/{'-' if bound is None else bound}",
        f"over age {percent(stretch.mean('staleness/masked_fraction'))}",
        f"gen {percent(stretch.share('busy/generate'), 0)} (sync {percent(stretch.share('sync/generate'), 0)})",
        f"train {percent(stretch.share('busy/train'), 0)} (waits {percent(stretch.share('wait/train'), 0)}, "
        f"sync {percent(stretch.share('sync/train'), 0)})",
        f"{rate(stretch.steps_per_second())} steps/s",
    ]
    return "  ".join(parts)


def learning(stretch: Stretch, started: RunStarted | None) -> str:
    """Example: "reward 0.61", or "loss 1.204" where nothing is scored."""
    if started is not None and not started.is_scored:
        return f"loss {fixed(stretch.mean('loss/loss'), 3)}"
    return f"reward {fixed(stretch.mean('reward/mean'), 2)}"


def steps_done(stretch: Stretch, started: RunStarted | None) -> str:
    """Example: "40/200", or "40" for a run without an end."""
    done = stretch.number("policy_version")
    total = started.train_steps if started else None
    return f"{0 if done is None else int(done)}" + ("" if total is None else f"/{total}")


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """The last `width` values as bars between their lowest and their highest."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)


def fixed(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _number(row: Row, name: str) -> float:
    value = row.get(name)
    return value if isinstance(value, int | float) else 0.0
