"""The event log with all its views, as a run uses them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from asyncrlhf.errors import CheckpointError, ConfigError
from asyncrlhf.observe.console import Console, ConsoleMode
from asyncrlhf.observe.events import Event
from asyncrlhf.observe.log import EventLog
from asyncrlhf.observe.metrics import Metrics
from asyncrlhf.observe.summary import Summary
from asyncrlhf.observe.trace import Trace
from asyncrlhf.observe.trackers import TrackerName, make_tracker

__all__ = ("Observer",)


class Observer:
    """Writes events.jsonl, metrics.jsonl, and at the end summary.json and trace.json into `directory` (None: no files).

    Example: observer = Observer(run_dir, trackers=("tensorboard",)); observer.emit(RunStarted(...)).
    Raises ConfigError when a tracker is not installed or has no directory to write to.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        console: ConsoleMode = "auto",
        trace: bool = True,
        trackers: Sequence[TrackerName] = (),
        config: Mapping[str, Any] | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if trackers and directory is None:
            raise ConfigError(f"observe.trackers = {list(trackers)} needs a run directory; set run_dir")
        tracked = [make_tracker(name, directory, config) for name in trackers] if directory is not None else []
        self.log = EventLog(directory, clock)
        self.metrics = Metrics(directory)
        self.summary = Summary(directory, self.metrics)
        self.trace = Trace(directory if trace else None)
        self.console = Console(self.summary, directory, mode=console, stream=stream)
        self.metrics.subscribe(self.console, *tracked)
        self.log.subscribe(self.metrics, self.summary, self.trace, *tracked, self.console)

    def emit(self, event: Event) -> None:
        """As EventLog.emit: on the event loop's thread only; raises OSError when the disk fails."""
        self.log.emit(event)

    def elapsed(self, reading: float | None = None) -> float:
        """Seconds since the run's start, now or at a `reading` of the clock (for EngineBusy)."""
        return self.log.elapsed(reading)

    def offsets(self) -> dict[str, int]:
        """What a checkpoint stores, in bytes, e.g. {"events": 81234, "metrics": 5678}; the lines are safely on disk."""
        return {"events": self.log.offset(), "metrics": self.metrics.offset()}

    def truncate(self, offsets: Mapping[str, int]) -> None:
        """Go on from a checkpoint of this directory: cut both files there and continue every count. Call it before
        the first `emit`. Raises CheckpointError, with both files as they were, when one does not fit."""
        if missing := {"events", "metrics"} - offsets.keys():
            raise CheckpointError(
                f"the checkpoint stores no offset for {sorted(missing)}; it is torn or of another kind"
            )
        self.log.check(offsets["events"])
        self.metrics.truncate(offsets["metrics"])
        self.log.truncate(offsets["events"])

    def close(self) -> None:
        """Close files, trackers and the terminal; harmless when repeated."""
        self.log.close()
