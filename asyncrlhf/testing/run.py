"""Run: the parts of a run on fakes, how it goes to its end, and what it keeps for a test to look at."""

from __future__ import annotations

import asyncio
import tempfile
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncrlhf.algorithm import Algorithm, cause_of, run_algorithm
from asyncrlhf.control.checkpoint import FORMAT, Manifest
from asyncrlhf.control.coordinator import Coordinator
from asyncrlhf.control.turns import Turns
from asyncrlhf.control.waits import waits_of
from asyncrlhf.flow.gate import Gate, Popped
from asyncrlhf.flow.ledger import Ledger
from asyncrlhf.flow.prompts import StageQueue
from asyncrlhf.groups import Group, TrainGroup
from asyncrlhf.messages import pack
from asyncrlhf.observe import Checkpointed, Event, EventLog, StepEnded
from asyncrlhf.testing.runtime import FakeRuntime
from asyncrlhf.testing.scenario import Scenario
from asyncrlhf.testing.sources import FakeReward, FakeRows

__all__ = ("RecordingGate", "Run", "Saved", "Watch")

A = typing.TypeVar("A", bound=Algorithm)
Watch = Callable[["Run[Any]", Event], None]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint in memory: the bytes that files would hold, and what a test has counted until then."""

    manifest: bytes
    payloads: bytes
    files: Mapping[str, Mapping[str, bytes]]
    batches: tuple[tuple[int, tuple[int, ...]], ...]


class Run(typing.Generic[A]):
    """The parts of a run, and what happened to them."""

    def __init__(self, scenario: Scenario, watch: Watch | None, keep: bool) -> None:
        self.scenario = scenario
        self.events: list[Event] = []
        self.batches: list[tuple[int, tuple[int, ...]]] = []
        """(train step, uids) of every batch that was trained on, along the restored lineage."""
        self.popped: list[Popped] = []
        """What the trainer was given, void batches included."""
        self.reason = ""
        """How the run ended: the ledger's reason, or the class name of what ended it."""
        self.error: BaseException | None = None
        self.saved: Saved | None = None
        self.crashed = False
        self.groups: dict[str, Group] = {}
        self.turns: list[Turns] = []
        self._watch, self._keep = watch, keep
        self._watch_error: Exception | None = None
        self._last: Popped | None = None
        self.runtime: FakeRuntime
        self.rows: FakeRows
        self.scorer: FakeReward
        self.log: EventLog
        self.gate: Gate
        self.coordinator: Coordinator
        self.algorithm: A

    @property
    def ledger(self) -> Ledger:
        return self.gate.ledger

    def events_of(self, kind: type[Any]) -> list[Any]:
        """The events of one type."""
        return [event for event in self.events if isinstance(event, kind)]

    def trainer(self, group: str = "policy") -> Any:
        """The FakeTrainer of a group."""
        return self.runtime.engine(group)

    async def main(self) -> str:
        """Run to the end and say how it ended. What ended it is kept in `error`; what `watch` raised is raised."""
        scenario = self.scenario
        fields: list[Any] = list(vars(self.algorithm).values())
        queues: list[StageQueue[Any]] = [value for value in fields if isinstance(value, StageQueue)]
        closes: list[Callable[[], None]] = [self.coordinator.close]
        closes += [group.close for group in self.groups.values()] + [queue.close for queue in queues]
        try:
            await run_algorithm(
                self.algorithm,
                self.gate,
                workers=scenario.capacity,
                services=[self.coordinator.serve, *(group.serve for group in self.groups.values())],
                start=self._launch,
                finish=self.coordinator.finish,
                close=closes,
                stall_timeout=scenario.stall_timeout,
                waits=lambda: self.waits(queues),
            )
            self.reason = self.gate.ledger.reason or ("stopped" if self.gate.stopping else "train() returned")
        except Exception as error:
            self.error = cause_of(error)
            self.reason = type(self.error).__name__
        finally:
            await self.runtime.close()
        if self._watch_error is not None:
            raise self._watch_error
        return self.reason

    def waits(self, queues: Sequence[StageQueue[Any]] = ()) -> list[str]:
        """Who waits for whom now, a line each."""
        now = asyncio.get_running_loop().time()
        calls = self.runtime.in_flight()
        return waits_of(self.gate, self.coordinator, self.groups, queues, calls, now, self.turns)

    async def _launch(self) -> None:
        await self.coordinator.start()
        self.runtime.launched_at = asyncio.get_running_loop().time()

    # ---- as a view of the event log, and as what the coordinator awaits after each step ----------------------------
    def see(self, event: Event, *, live: bool) -> None:
        if self._keep:
            self.events.append(event)
        if isinstance(event, StepEnded) and not event.void and self._last is not None:
            self.batches.append((event.train_step, tuple(lease.uid for lease in self._last.batch.leases)))
        if self._watch is not None:
            try:
                self._watch(self, event)
            except Exception as error:
                self._watch_error = self._watch_error or error
                raise

    def close(self) -> None:
        pass

    def take_popped(self, popped: Popped) -> None:
        self._last = popped
        if self._keep:
            self.popped.append(popped)

    async def after_step(self, version: int) -> None:
        every = self.scenario.checkpoint_every
        if every and version % every == 0:
            await self.save(version)

    async def save(self, version: int, *, groups: bool = True) -> None:
        """One checkpoint, as the launcher's: through the bytes of its files."""
        await self.coordinator.settled()
        trained = {n: g for n, g in self.groups.items() if isinstance(g, TrainGroup)} if groups else {}
        state = getattr(self.algorithm, "state", None)
        live = self.gate.ledger.live
        ready = [e for uid, e in self.gate.payloads.items() if uid in live] if self.scenario.payloads else []
        manifest = Manifest(
            format=FORMAT,
            algorithm=type(self.algorithm).__name__,
            train_step=version,
            publish_count=self.coordinator.publish_count,
            optimizer_steps={name: group.optimizer_steps for name, group in trained.items()},
            groups=tuple(trained),
            events_offset=len(self.events),
            metrics_offset=0,
            state=None if state is None else pack(state),
            ledger=self.gate.ledger.snapshot(),
            payload_count=len(ready),
            fixed={},
        )
        payloads, batches = msgspec.msgpack.encode(ready), tuple(self.batches)
        files: dict[str, Mapping[str, bytes]] = {}
        for name, group in trained.items():
            with tempfile.TemporaryDirectory() as directory:
                await group.save(Path(directory))
                files[name] = _contents(Path(directory))
        if self.crashed:
            return
        self.saved = Saved(manifest=msgspec.json.encode(manifest), payloads=payloads, files=files, batches=batches)
        self.log.emit(Checkpointed(train_step=version, path="memory", seconds=0.0))


def _contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


class RecordingGate(Gate):
    """Tells the run what it popped."""

    on_popped: Callable[[Popped], None]

    async def pop(self) -> Popped | None:
        popped = await super().pop()
        if popped is not None:
            self.on_popped(popped)
        return popped
