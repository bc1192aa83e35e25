"""Live progress: a panel on a terminal, plain lines anywhere else, and a closing report on both. Waits for nobody."""

from __future__ import annotations

import io
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

from asyncrlhf.observe.events import (
    Event,
    Fenced,
    Restarted,
    RunEnded,
    RunStarted,
    Settled,
    StepEnded,
    Warned,
)
from asyncrlhf.observe.metrics import Row
from asyncrlhf.observe.report import report_lines
from asyncrlhf.observe.stretch import Stretch, progress_line
from asyncrlhf.observe.summary import Summary

if TYPE_CHECKING:
    from asyncrlhf.observe.panel import Panel

__all__ = ("Console", "ConsoleMode")

ConsoleMode = Literal["auto", "plain", "off"]
LINE_SECONDS = 2.0
NOTES_SHOWN = 5


class Console:
    """View and row view. `mode` "auto" draws a panel when `stream` is a terminal; "plain" prints a line at most every
    two seconds of the run, the last step's always; "off" prints nothing at all.

    Subscribe it to the log after `summary`, whose numbers it reports. The first five notes of a kind (warnings, failed
    leases, fenced engines, void steps) are lines, the others are counted. When the stream breaks (its reader has gone)
    the console falls silent and the run goes on: everything it would say is in the files.
    """

    def __init__(
        self, summary: Summary, directory: Path | None, *, mode: ConsoleMode = "auto", stream: TextIO | None = None
    ) -> None:
        self._summary, self._directory = summary, directory
        stream = stream or sys.stdout
        self._silent = mode == "off" or not stream  # None: the process was started without a standard output
        self._stream: TextIO = stream or io.StringIO()
        if reconfigure := getattr(self._stream, "reconfigure", None):  # a file, which may not take every character
            reconfigure(errors="backslashreplace")
        self._panel = _panel(self._stream) if mode == "auto" and self._stream.isatty() else None
        self._started: RunStarted | None = None
        self._stretch = Stretch()
        self._printed_at = -LINE_SECONDS
        self._notes: Counter[str] = Counter()

    def close(self) -> None:
        """Give the terminal back."""
        if self._panel is not None:
            try:
                self._panel.close()
            except OSError:
                self._silent = True

    def see_row(self, row: Row, *, live: bool) -> None:
        if self._silent:
            return
        if self._panel is not None:
            self._panel.add(row, live=live)
        elif live:
            self._stretch.add(row)

    def see(self, event: Event, *, live: bool) -> None:
        if isinstance(event, RunStarted):
            self._started = event
        if self._silent or not live:
            return
        try:
            self._say(event)
        except OSError:
            self._silent = True

    def _say(self, event: Event) -> None:
        match event:
            case RunStarted(resumed_from=int(step)):
                self._print(f"going on from train step {step}")
            case Warned():
                self._note("warnings", f"warning: {event.message}")
            case Settled(state="failed"):
                self._note("failed leases", f"prompt {event.uid} failed: {event.error}")
            case Settled(state="dropped(timeout)"):
                self._note("leases that timed out", f"prompt {event.uid} timed out, attempt {event.attempt}")
            case Fenced():
                self._note("fenced engines", f"engine {event.group}/{event.rank} is out of service: {event.reason}")
            case Restarted():
                self._note("restarts", f"engine {event.group}/{event.rank} is back")
            case StepEnded(void=True):
                self._note("void train steps", f"train step {event.train_step} is void: {event.reason}")
            case RunEnded():
                self._ended()
                return
            case _:
                pass
        if self._panel is not None:
            self._panel.draw(self._started, event.t, step_ended=isinstance(event, StepEnded))
        elif self._stretch.rows and event.t - self._printed_at >= LINE_SECONDS:
            self._line()
            self._printed_at = event.t

    def _line(self) -> None:
        self._print(progress_line(self._stretch, self._started))
        self._stretch = Stretch()

    def _ended(self) -> None:
        if self._panel is not None:
            self._panel.close()
        if self._stretch.rows:
            self._line()
        for kind, count in self._notes.items():
            if count > NOTES_SHOWN:
                self._print(f"{count - NOTES_SHOWN} more {kind}, see events.jsonl")
        for line in report_lines(self._summary.result(), self._directory):
            self._print(line)

    def _note(self, kind: str, text: str) -> None:
        self._notes[kind] += 1
        if self._notes[kind] <= NOTES_SHOWN:
            self._print(text)

    def _print(self, text: str) -> None:
        if self._panel is not None:
            self._panel.print(text)
            return
        encoding = self._stream.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)


def _panel(stream: TextIO) -> Panel | None:
    """rich is imported only where there is a terminal to draw on."""
    from asyncrlhf.observe.panel import Panel

    return Panel(stream) if Panel.fits(stream) else None
