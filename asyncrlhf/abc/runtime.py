"""The seam to where engines live (threads, processes): spawn one, call it, hear its events, end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from asyncrlhf.messages import EngineEvent, Message

__all__ = ("Beside", "EngineHandle", "EngineSpec", "InFlight", "Needs", "OnEvents", "Place", "Runtime")


class Needs(Message, frozen=True, kw_only=True):
    """What an engine asks a cluster for. Example: Needs(pool="generation", devices=1.0, cores=2, labels={"gpu": "a"})
    is one GPU and two logical CPUs of a node with the label gpu=a."""

    pool: str
    devices: float = 0.0
    """GPUs; below 1: a share of one; 0: it sees none."""
    cores: int = 0
    """Logical CPUs."""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    """Of the node."""
    together: bool = False
    """Engines of its group talk to each other all the time: on one node where they fit, else on whole nodes."""


class Beside(Message, frozen=True):
    """Ranks of another group, with which an engine takes turns: it has a process on the device of each, in this order.
    Example: Beside("policy", (0, 2), ((0, 1), (2, 3))) has two processes, on the devices of ranks 0 and 2."""

    group: str
    ranks: tuple[int, ...]
    takes: tuple[tuple[int, ...], ...] = ()
    """For each process the ranks from which it takes weights before it asks others; empty: all are as near."""


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
    gpus: tuple[str, ...] | None = None
    """The GPUs of this machine that it sees, as CUDA_VISIBLE_DEVICES names them; None: whatever is there."""
    needs: Needs | None = None
    """What it asks a cluster for; None: nothing."""
    beside: Beside | None = None
    """Whose devices it is on; None: on any that are free."""


class EngineSpec(Place, frozen=True, kw_only=True):
    """How to build one engine. Example: EngineSpec(group="rollout", rank=0, engine="asyncrlhf.backends.torch.sample:
    TorchSampler", options=SamplerOptions(...))."""

    options: msgspec.Struct

    @property
    def place(self) -> Place:
        """The same without its options."""
        return Place(**{name: getattr(self, name) for name in Place.__struct_fields__})


OnEvents = Callable[[Sequence[EngineEvent]], None]
"""Called on the event loop with what an engine reports, in order."""


class InFlight(NamedTuple):
    """A call that an engine has not answered. Example: InFlight("policy/0", "step", 1234.5)."""

    engine: str
    verb: str
    since: float
    """Time of the event loop."""


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

    def in_flight(self) -> list[InFlight]:
        """The calls that have not been answered yet."""
        ...

    async def close(self) -> None:
        """End every engine spawned here."""
        ...

    def kill(self) -> None:
        """End whatever is left at once; needs no event loop."""
        ...
