"""Engines without a model, for the runtime suite: what they do is visible from any process."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from asyncrlhf.abc import Engine
from asyncrlhf.errors import SampleError
from asyncrlhf.messages import EngineEvent, GenerateRequest, Message, Progress, WeightHandle
from asyncrlhf.testing.sampler import FakeSampler, FakeSamplerOptions

__all__ = ("LATCH", "Plain", "PlainOptions", "Ticking", "TickingOptions")

LATCH = threading.Event()
"""What `Plain.wait` waits for: an engine in this process hangs until somebody sets it."""


class PlainOptions(Message, frozen=True, kw_only=True):
    name: str = "plain"
    journal: str = ""
    """A file to which the engine writes a line when it is built and when it is closed."""
    broken: bool = False
    """Cannot be built."""


class Plain(Engine):
    """Says back what it is told."""

    Options = PlainOptions

    def __init__(self, options: PlainOptions) -> None:
        if options.broken:
            raise ZeroDivisionError(f"{options.name} cannot be built")
        self.options = options
        self.calls = 0
        self._listener: socket.socket | None = None
        self._note("built")

    def echo(self, *arguments: object) -> tuple[object, ...]:
        self.calls += 1
        return (self.options.name, self.calls, *arguments)

    def refuse(self, reason: str) -> None:
        raise SampleError(reason)

    def breaks(self, reason: str) -> None:
        raise ZeroDivisionError(reason)

    def listen(self, host: str) -> int:
        """A port at which this engine can be reached."""
        self._listener = socket.create_server((host, 0))
        return int(self._listener.getsockname()[1])

    def reach(self, host: str, port: int) -> None:
        """Raises OSError if nobody listens there."""
        socket.create_connection((host, port), timeout=10.0).close()

    def wait(self) -> None:
        LATCH.wait()

    def is_garbage_collectable(self) -> bool:
        """Whether the garbage collector looks at this engine."""
        return any(found is self for found in gc.get_objects())

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._note("closed")

    def _note(self, what: str) -> None:
        if self.options.journal:
            with Path(self.options.journal).open("a") as journal:
                journal.write(f"{self.options.name} {what}\n")


class TickingOptions(FakeSamplerOptions, frozen=True, kw_only=True):
    breaks_at: int = -1
    """The step, counted from 0, that raises; -1: none."""
    version: int = 0


class Ticking(FakeSampler):
    """A fake sampler with weights from the start; `add` and `commit` report, and a step may break."""

    Options = TickingOptions

    def __init__(self, options: TickingOptions) -> None:
        super().__init__(options)
        self.steps, self._breaks_at = 0, options.breaks_at

    def step(self) -> Sequence[EngineEvent]:
        if self.steps == self._breaks_at:
            raise ZeroDivisionError("the step broke")
        self.steps += 1
        return super().step()

    def add(self, requests: Sequence[GenerateRequest]) -> Sequence[EngineEvent]:
        noted = [Progress(request_id=r.request_id, version=self.version, token_count=0) for r in requests]
        return [*noted, *super().add(requests)]

    def prepare(self, weights: WeightHandle) -> None:
        self._prepared = weights
