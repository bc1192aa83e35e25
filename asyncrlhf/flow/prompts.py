"""PromptSource and StageQueue: what workers iterate over. Each iterator holds one lease at a time.

Asking for the next item settles a lease that was neither put on nor lost as filtered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar

from asyncrlhf.errors import QueueClosed
from asyncrlhf.flow.gate import Gate, Holder
from asyncrlhf.flow.queue import Queue
from asyncrlhf.messages import Experience, Prompt, Rollout

__all__ = ("Carrier", "PromptSource", "StageQueue", "prompt_of")

Carrier = Prompt | Rollout | Experience
"""Messages that carry a lease."""

T = TypeVar("T", bound=Carrier)


def prompt_of(item: Carrier) -> Prompt:
    """The prompt, and with it the lease, that a message carries."""
    return item if isinstance(item, Prompt) else item.prompt


class PromptSource:
    """`async for prompt in prompts`: waits at the staleness gate, ends when the run does."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __aiter__(self) -> AsyncIterator[Prompt]:
        return _Prompts(self._gate)


class _Prompts(Holder, AsyncIterator[Prompt]):
    __slots__ = ("_gate",)

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    async def __anext__(self) -> Prompt:
        prompt = await self._gate.next_prompt(self)
        if prompt is None:
            raise StopAsyncIteration
        return prompt


class StageQueue(Queue[T]):
    """A queue between two stages of one lease's life: `put` hands the lease over, iterating takes it up.

    A worker that waits for room still holds its lease. Items whose lease was lost while they waited are left out.
    Raises LeaseLost on a put of a lost lease.
    """

    def __init__(self, capacity: int, item_type: type[T], gate: Gate, *, name: str = "queue") -> None:
        super().__init__(capacity, item_type, name=name)
        self._gate = gate

    async def put(self, item: T) -> None:
        self._check(item)
        self._gate.require_current(prompt_of(item))
        await super().put(item)
        self._gate.hand_over(prompt_of(item))

    def __aiter__(self) -> AsyncIterator[T]:
        return _Items(self, self._gate)


class _Items(Holder, AsyncIterator[T]):
    __slots__ = ("_gate", "_queue")

    def __init__(self, queue: StageQueue[T], gate: Gate) -> None:
        super().__init__()
        self._queue, self._gate = queue, gate

    async def __anext__(self) -> T:
        self._gate.release(self)
        while True:
            try:
                item = await self._queue.get()
            except QueueClosed:
                raise StopAsyncIteration from None
            if self._gate.is_current(prompt_of(item)):
                self._gate.hold(prompt_of(item), self)
                return item
