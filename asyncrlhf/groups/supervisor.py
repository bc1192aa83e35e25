"""Whether and when an engine that failed is started again. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ("RestartBudget",)


@dataclass(slots=True, kw_only=True)
class RestartBudget:
    """At most `limit` restarts within `window` seconds; the first at once, each further one after twice the delay.

    Example: with limit = 3, failures at 0, 10, 20 and 30 s give the delays 0, 1 and 2 s, and then None.
    """

    limit: int
    """0: never start again."""
    delay: float = 1.0
    """Seconds before the second restart."""
    longest: float = 30.0
    """Seconds before any restart, at most."""
    window: float = 3600.0
    """Seconds after which a failure is forgotten."""
    failures: list[float] = field(default_factory=list[float])
    """When it failed, within the window."""

    def failed(self, now: float) -> float | None:
        """Seconds to wait before the next restart; None: give up."""
        self.failures = [*(at for at in self.failures if now - at < self.window), now]
        count = len(self.failures)
        if count > self.limit:
            return None
        return 0.0 if count == 1 else min(self.longest, self.delay * 2 ** (count - 2))

    def forgive(self, at: float) -> None:
        """The failure of this time was not its own: it no longer counts."""
        if at in self.failures:
            self.failures.remove(at)
