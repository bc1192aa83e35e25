"""ExperienceQueue[T]: where generation ends and training begins. `put` never waits; `batches()` waits for the pop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

from asyncrlhf.errors import WrongItem
from asyncrlhf.flow.batching import build_batch, popped_event
from asyncrlhf.flow.gate import Gate
from asyncrlhf.messages import Experience, TrainBatch
from asyncrlhf.observe.events import Event

__all__ = ("ExperienceQueue",)

T = TypeVar("T", bound=Experience)


class ExperienceQueue(Generic[T]):
    """The queue whose pop checks the staleness bound.

    The ledger keeps at most `prompts_per_step * (lookahead + 1)` leases live, which is its capacity: a put always
    finds room.
    """

    def __init__(self, item_type: type[T], gate: Gate, emit: Callable[[Event], None]) -> None:
        self.item_type = item_type
        self._gate, self._emit = gate, emit

    async def put(self, item: T) -> None:
        """Make the lease ready. Raises WrongItem for another type, LeaseLost if its lease is gone."""
        if not isinstance(item, self.item_type):
            raise WrongItem(
                f"the experience queue carries {self.item_type.__name__}, not {type(item).__name__}; put a "
                f"{self.item_type.__name__} or annotate the field as ExperienceQueue[{type(item).__name__}]"
            )
        self._gate.ready(item)

    async def batches(self) -> AsyncIterator[TrainBatch]:
        """`prompts_per_step` rollouts at a time, masked at the bound; ends when the run does.

        The body must end with `await self.coordinator.publish(...)`, which closes the train step.
        """
        while (popped := await self._gate.pop()) is not None:
            batch = build_batch(popped, self._gate.ledger.rules.max_staleness)
            self._emit(popped_event(popped, batch, self._gate.ledger.rules.max_staleness))
            yield batch
            del popped, batch  # what it refers to need not wait for the next one
