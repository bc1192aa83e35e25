"""Waiting: whom a publish waits for beside its calls to engines, for whoever asks why nothing moves."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ("Waiting",)


class Waiting(dict[tuple[str, str], float]):
    """(whom, for what) -> loop time since when."""

    @contextmanager
    def on(self, whom: str, what: str) -> Generator[None]:
        """Within this it waits for `whom`."""
        self[whom, what] = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self.pop((whom, what), None)
