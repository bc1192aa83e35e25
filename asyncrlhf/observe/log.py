"""The event log: stamps events, writes them to events.jsonl, then hands them to the views. Nothing waits here.

Use it from one thread only, the event loop's: there is no lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from asyncrlhf.errors import CheckpointError
from asyncrlhf.observe.events import (
    AnyEvent,
    Checkpointed,
    Event,
    RunEnded,
    RunStarted,
    StepEnded,
    decode_event,
    encode_json,
)
from asyncrlhf.observe.files import LineFile

__all__ = ("EventLog", "View", "read_events")

FLUSH_SECONDS = 1.0
"""Events older than this are on disk as soon as another event follows."""


class View(Protocol):
    """A fold over the events of a run, e.g. Metrics, Summary, Trace or Console."""

    def see(self, event: Event, *, live: bool) -> None:
        """Take one event. `live` False: it was kept from before a resume; fold it in, but write and show nothing."""
        ...

    def close(self) -> None:
        """Release files and the terminal; harmless when repeated, also in the middle of a run."""
        ...


class EventLog:
    """The truth about a run. `directory` None keeps nothing on disk and still feeds the views.

    What an earlier run left in the directory is replaced when RunStarted comes, or continued after `truncate`; a start
    that fails before either leaves it as it was.

    Example: log = EventLog(run_dir); log.subscribe(metrics); log.emit(Granted(uid=70, attempt=1, version=3)).
    """

    def __init__(self, directory: Path | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._file = LineFile(None if directory is None else directory / "events.jsonl")
        self._clock = clock
        self._origin = clock()
        self._last = 0.0
        self._flushed_at = 0.0
        self._begun = False
        self._views: list[View] = []

    def subscribe(self, *views: View) -> None:
        """Views see events in the order of subscription; subscribe all of them before `truncate` and `emit`."""
        self._views += views

    def elapsed(self, reading: float | None = None) -> float:
        """Seconds since the run's start, now or at a `reading` of the clock."""
        return (self._clock() if reading is None else reading) - self._origin

    def emit(self, event: Event) -> None:
        """Stamp, write, then show. Only on the event loop's thread.

        Raises OSError when the disk fails, before any view has seen the event, and TypeError when it holds a value
        that JSON cannot.
        """
        self._last = max(self._last, self.elapsed())
        event = msgspec.structs.replace(event, t=self._last)
        self._file.append(encode_json(event))
        self._begun = self._begun or isinstance(event, RunStarted) or self._file.is_empty()
        milestone = isinstance(event, StepEnded | Checkpointed | RunEnded)
        if self._begun and (milestone or self._last - self._flushed_at >= FLUSH_SECONDS):
            self._file.flush()
            self._flushed_at = self._last
        for view in self._views:
            view.see(event, live=True)

    def offset(self) -> int:
        """Bytes of events.jsonl written so far, safely on disk: what a checkpoint stores. 0 without a directory."""
        return self._file.offset() if self._begun else 0

    def check(self, offset: int) -> None:
        """Raises CheckpointError, and changes nothing, when `truncate` would refuse this offset."""
        self._file.check(offset)

    def truncate(self, offset: int) -> None:
        """Forget what followed a checkpoint, replay the rest to the views and go on from its last `t`.

        Raises CheckpointError when events.jsonl does not fit the offset or cannot be read.
        """
        self._file.truncate(offset)
        self._begun = True
        self._last = 0.0
        for event in _decode(self._file.lines(), "events.jsonl"):
            self._last = max(self._last, event.t)
            for view in self._views:
                view.see(event, live=False)
        self._origin = self._clock() - self._last
        self._flushed_at = self._last

    def close(self) -> None:
        """Close the views, then the file."""
        for view in self._views:
            view.close()
        if not self._begun:
            self._file.discard()
        self._file.close()


def read_events(path: Path) -> Iterator[AnyEvent]:
    """The events of an events.jsonl, one at a time. Raises CheckpointError at a line that is not an event."""
    return _decode(LineFile(path).lines(), str(path))


def _decode(lines: Iterator[bytes], name: str) -> Iterator[AnyEvent]:
    for number, line in enumerate(lines, 1):
        try:
            event = decode_event(line)
        except msgspec.DecodeError as error:
            raise CheckpointError(f"line {number} of {name} is not an event: {error}") from error
        yield event
