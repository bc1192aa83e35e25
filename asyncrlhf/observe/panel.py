"""The live panel on a terminal, redrawn only when something happens, at most four times a second between steps."""

from __future__ import annotations

import sys
from collections import deque
from typing import TextIO

import rich.box
from rich.console import Console as Terminal
from rich.live import Live
from rich.panel import Panel as Frame
from rich.table import Table
from rich.text import Text

from asyncrlhf.observe.events import RunStarted
from asyncrlhf.observe.metrics import Row
from asyncrlhf.observe.report import percent, rate, short
from asyncrlhf.observe.stretch import Stretch, fixed, sparkline, steps_done

__all__ = ("Panel",)

DRAW_SECONDS, DRAW_STEP_SECONDS = 0.25, 0.05
RECENT_STEPS = 20
BAR_WIDTH = 24


class Panel:
    """Draws the last train steps; `print` puts lines above it, and `close` takes it away."""

    def __init__(self, stream: TextIO) -> None:
        self._terminal = Terminal(file=stream, highlight=False, emoji=False, markup=False)
        self._live: Live | None = None
        self._closed = False
        self._recent: deque[Row] = deque(maxlen=RECENT_STEPS)
        self._rewards: deque[float] = deque(maxlen=200)
        self._drawn_at = -DRAW_SECONDS

    @staticmethod
    def fits(stream: TextIO) -> bool:
        """Can a panel be drawn on `stream`?"""
        terminal = Terminal(file=stream)
        return terminal.is_terminal and not terminal.is_dumb_terminal and "utf" in terminal.encoding

    def add(self, row: Row, *, live: bool) -> None:
        """A train step; one from before a resume only continues the reward curve."""
        reward = row.get("reward/mean")
        if isinstance(reward, int | float):
            self._rewards.append(reward)
        if live:
            self._recent.append(row)

    def draw(self, started: RunStarted | None, now: float, *, step_ended: bool) -> None:
        """`now` in seconds since the run's start."""
        if self._closed or now - self._drawn_at < (DRAW_STEP_SECONDS if step_ended else DRAW_SECONDS):
            return
        self._drawn_at = now
        if self._live is None:
            ours = self._terminal.file is sys.stdout
            self._live = Live(
                console=self._terminal,
                auto_refresh=False,
                transient=True,
                redirect_stdout=ours,
                redirect_stderr=ours and sys.stderr.isatty(),
            )
            self._live.start()
        self._live.update(self.frame(started, now), refresh=True)

    def print(self, text: str) -> None:
        self._terminal.print(Text(text))

    def close(self) -> None:
        self._closed = True
        if self._live is not None:
            self._live.stop()
            self._live = None

    def frame(self, started: RunStarted | None, now: float) -> Frame:
        """What is drawn: one line each for progress, reward, staleness, speed and the two pools."""
        recent = Stretch(list(self._recent))
        grid = Table.grid(padding=(0, 2))
        for name, value in _lines(recent, started, list(self._rewards), now):
            grid.add_row(Text(name, style="dim"), Text(value))
        title = started.algorithm if started else "asyncrlhf"
        return Frame(grid, title=Text(title), title_align="left", box=rich.box.ROUNDED, expand=False)


def _lines(recent: Stretch, started: RunStarted | None, rewards: list[float], now: float) -> list[tuple[str, str]]:
    if not recent.rows:
        return [("step", f"{steps_done(recent, started)}  waiting for the first batch, {now:.0f} s")]
    bound = "-" if started is None else str(started.max_staleness)
    lag = fixed(recent.mean("staleness/token_lag_mean"), 2)
    steps, tokens = rate(recent.steps_per_second()), rate(recent.tokens_per_second())
    generate, train = recent.share("busy/generate"), recent.share("busy/train")
    waits = recent.total("time/wait_batch") / (recent.total("time/step") or 1.0)
    return [
        ("step", f"{steps_done(recent, started)}  {_clock(now)} elapsed{_remaining(recent, started)}"),
        ("reward", f"{fixed(recent.number('reward/mean'), 3)}  {sparkline(rewards)}"),
        ("lag", f"{lag} mean, {short(recent.maximum('staleness/token_lag_max'))} max, bound {bound}"),
        ("over age", f"{percent(recent.mean('staleness/masked_fraction'))} of the tokens, masked"),
        ("speed", f"{steps} steps/s, {tokens} trained tokens/s"),
        ("generate", f"{_bar(generate)} {percent(generate, 0)}"),
        ("train", f"{_bar(train)} {percent(train, 0)}  waits {percent(waits, 0)}"),
    ]


def _remaining(recent: Stretch, started: RunStarted | None) -> str:
    speed, done = recent.steps_per_second(), recent.number("policy_version")
    if started is None or started.train_steps is None or not speed or done is None:
        return ""
    return f", {_clock(max(0.0, started.train_steps - done) / speed)} to go"


def _bar(share: float | None) -> str:
    full = round(BAR_WIDTH * min(1.0, share or 0.0))
    return "█" * full + "░" * (BAR_WIDTH - full)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
