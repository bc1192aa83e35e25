"""Garbage collection that leaves alone what is there for good: libraries, models, configuration.

Looking through all of it takes a fifth of a second where torch is loaded, and comes every few seconds as messages come
and go. Meanwhile a process does nothing else: engines wait for their controller, or sampling stands still.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ("leave_alone", "left_alone")


def leave_alone() -> None:
    """Whatever lives now is not looked at again: for a process that ends with its engine. What is garbage by now goes
    first; what is freed by its count of references is still freed. What an engine makes later is looked at: its
    optimizer too where its ranks join first."""
    gc.collect()
    gc.freeze()


@contextmanager
def left_alone() -> Generator[None]:
    """As `leave_alone`, until the end of this block, for a process that goes on after it. What the process has frozen
    itself stays so, and then also what lives now."""
    had_frozen = gc.get_freeze_count() > 0
    leave_alone()
    try:
        yield
    finally:
        if not had_frozen:  # there is no unfreezing a part
            gc.unfreeze()
