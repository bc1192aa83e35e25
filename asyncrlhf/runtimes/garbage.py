"""Garbage collection that leaves alone what is there for good: libraries, models, configuration.

Looking through all of it takes a fifth of a second where torch is loaded, and comes every few seconds as messages come
and go. Meanwhile a process does nothing else: engines wait for their controller, or sampling stands still.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ("leave_alone", "left_alone")

YOUNG = 10_000
"""New objects, less those that are gone, before the next look at them. Python's 700 are a few rollouts of a controller,
and after some of these looks comes one at everything: with ten thousand live leases a third of a second."""


def leave_alone() -> None:
    """Whatever lives now is not looked at again: for a process that ends with its engine. What is garbage by now goes
    first; what is freed by its count of references is still freed. What an engine makes later is looked at: its
    optimizer too where its ranks join first."""
    gc.collect()
    gc.freeze()


@contextmanager
def left_alone() -> Generator[None]:
    """As `leave_alone`, until the end of this block, for a process that goes on after it, and that holds no large
    arrays in cycles: what is new is looked at less often. What the process has frozen itself stays so, and then also
    what lives now."""
    had_frozen, (young, *older) = gc.get_freeze_count() > 0, gc.get_threshold()
    leave_alone()
    if young:  # 0: somebody does without
        gc.set_threshold(max(young, YOUNG), *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
        if not had_frozen:  # there is no unfreezing a part
            gc.unfreeze()
