"""Ctrl-C and SIGTERM. The first one asks the run to stop; a second one ends the process at once. SIGUSR1 asks who waits
for whom, and changes nothing.

Handlers run between two bytecodes of the main thread, so that they work also while the event loop is blocked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType

__all__ = ("StopSignals", "StoppedEarly")

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StoppedEarly(KeyboardInterrupt):
    """A signal came while nobody was there to stop in an orderly way: nothing has begun."""


class StopSignals:
    """What came, and whom it asks."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._ask: Callable[[], None] | None = None
        self._last_words: Callable[[], None] | None = None
        self._report: Callable[[], None] | None = None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number; 0 if none came."""
        return 0 if self.received is None else 128 + self.received

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Handle the signals inside; outside the main thread they are somebody else's."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {**dict.fromkeys(NUMBERS, self._handle), signal.SIGUSR1: self._handle_report}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextlib.contextmanager
    def asking(self, ask: Callable[[], None], last_words: Callable[[], None]) -> Generator[None]:
        """Inside, the first signal calls `ask`, also one that has come already, and a second one `last_words`, just
        before the end."""
        before = self._ask, self._last_words
        self._ask, self._last_words = ask, last_words
        if self.received is not None:
            ask()
        try:
            yield
        finally:
            self._ask, self._last_words = before

    @contextlib.contextmanager
    def reporting(self, report: Callable[[], None]) -> Generator[None]:
        """Inside, SIGUSR1 calls `report`."""
        self._report = report
        try:
            yield
        finally:
            self._report = None

    def _handle_report(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._report is None:
            _say("SIGUSR1: no engine is at work yet, or any more")
        else:
            self._report()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.received is not None:
            if self._last_words is not None:
                with contextlib.suppress(Exception):
                    self._last_words()
            _say("stopped at once; the newest checkpoint is kept")
            os._exit(128 + number)
        self.received = signal.Signals(number)
        if self._ask is None:
            raise StoppedEarly
        self._ask()
        _say(f"{self.received.name}: finishing the train step; once more ends at once")


def _say(text: str) -> None:
    """Past every buffer, whose owner may be the one that is interrupted."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
