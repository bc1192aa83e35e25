"""Asynchronous tests under a virtual clock, and experiences out of nothing."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from asyncrlhf.flow.gate import Gate
from asyncrlhf.flow.ledger import Ledger, LedgerRules
from asyncrlhf.messages import Experience, Prompt, Rollout, Sample, Segment
from asyncrlhf.observe import Event
from asyncrlhf.testing import FakeRows, run_virtual


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test as a function that runs under a virtual clock."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        run_virtual(test(*arguments, **named))

    return run


async def settle() -> None:
    """Let everybody run until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


class Scene:
    """A gate over fake rows whose engines serve version 0, and what it has logged."""

    def __init__(
        self,
        B: int = 2,
        K: int = 0,
        D: int = 0,
        *,
        rows: Any = 100,
        counted: bool = True,
        lease_timeout: float = 0.0,
        wait_timeout: float = 60.0,
        **rules: Any,
    ) -> None:
        self.rows = FakeRows(rows) if rows is None or isinstance(rows, int) else rows
        self.events: list[Event] = []
        ledger = Ledger(
            LedgerRules(prompts_per_step=B, max_staleness=K, lookahead=D, **rules), self.rows.count if counted else None
        )
        self.gate = Gate(ledger, self.rows, self.events.append, lease_timeout=lease_timeout, wait_timeout=wait_timeout)

    @property
    def ledger(self) -> Ledger:
        return self.gate.ledger

    def kinds(self, *names: str) -> list[tuple[str, int, int]]:
        """(event or settled state, uid, attempt) of everything logged about leases."""
        found: list[tuple[str, int, int]] = []
        for event in self.events:
            name = getattr(event, "state", type(event).__name__)
            if hasattr(event, "uid") and (not names or name in names):
                found.append((name, event.uid, event.attempt))  # type: ignore[attr-defined]
        return found


def experience(prompt: Prompt, *versions: int, tokens: int = 4, source: Any = "model") -> Experience:
    """One answer of `tokens` tokens of each version, rewarded with 1."""
    segments = tuple(Segment(version=v, token_count=tokens, source=source) for v in versions or (prompt.version,))
    count = tokens * len(segments)
    sample = Sample(token_ids=(9,) * count, logprobs=(-1.0,) * count, segments=segments, finish_reason="stop")
    return Experience(rollout=Rollout(prompt=prompt, samples=(sample,)), rewards=(1.0,))
