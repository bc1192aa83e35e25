"""The seam to where engines live (threads, processes): spawn one, call it, hear its events, end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from asyncrlhf.messages import EngineEvent, Message

__all__ = ("EngineHandle", "EngineSpec", "OnEvents", "Place", "Runtime")


class Place(Message, frozen=True, kw_only=True):
    """An engine that will be spawned: enough to start its process and to import its code."""

    group: str
    rank: int
    engine: str
    """Import path "module:Class" of an Engine."""
    threads: int = 1
    """Compute threads of this engine."""
    core: int | None = None
    """Pin it to this core, if the operating system can."""


class EngineSpec(Place, frozen=True, kw_only=True):
    """How to build one engine. Example: EngineSpec(group="rollout", rank=0, engine="asyncrlhf.backends.torch.sample:
    TorchSampler", options=SamplerOptions(...))."""

    options: msgspec.Struct

    @property
    def place(self) -> Place:
        """The same without its options."""
        return Place(group=self.group, rank=self.rank, engine=self.engine, threads=self.threads, core=self.core)


OnEvents = Callable[[Sequence[EngineEvent]], None]
"""Called on the event loop with what an engine reports, in order."""


class EngineHandle(Protocol):
    """A live engine, somewhere. After `close`, or once the engine has failed, every call raises GroupError."""

    @property
    def spec(self) -> EngineSpec: ...

    @property
    def address(self) -> str:
        """Address at which other engines of this runtime reach the machine it is on."""
        ...

    async def call(self, verb: str, *arguments: Any) -> Any:
        """Run one method of the engine and give its result. Events a method returns go to `on_events` instead.
        Raises what the method raised, if that is an asyncrlhf error; else GroupError with the traceback."""
        ...

    async def close(self, *, at_once: bool = False) -> None:
        """End the engine; calls in flight raise GroupError. One that hangs is killed, or left behind where that cannot
        be done, after a while or `at_once`."""
        ...


class Runtime(Protocol):
    """Where engines live."""

    transport: str
    """Import path of the WeightTransfer that moves weights between engines spawned here."""

    def expect(self, places: Sequence[Place]) -> None:
        """Engines that will be spawned: the runtime may start their processes meanwhile. Needs no event loop."""
        ...

    async def spawn(self, spec: EngineSpec, on_events: OnEvents) -> EngineHandle:
        """Build the engine and wait until it can be called. Raises GroupError with the original traceback."""
        ...

    async def close(self) -> None:
        """End every engine spawned here."""
        ...

    def kill(self) -> None:
        """End whatever is left at once; needs no event loop."""
        ...
