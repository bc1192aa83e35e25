"""Whether and when an engine that failed is started again. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ("RestartBudget",)


@dataclass(slots=True, kw_only=True)
class RestartBudget:
    """At most `limit` restarts within `window` seconds; the first at once, each further one after twice the delay, and
    again at once for an engine that has served for `calm` seconds since.

    Example: with limit = 4, failures at 0, 10, 20 and 30 s give the delays 0, 1, 2 and 4 s. A fifth one within the hour
    gives None, however well it has served. At 3600 s the first is forgotten, so that it gives 4 s, or 0 after ten
    minutes of service.
    """

    limit: int
    """0: never start again."""
    delay: float = 1.0
    """Seconds before the second restart."""
    longest: float = 30.0
    """Seconds before any restart, at most."""
    window: float = 3600.0
    """Seconds after which a failure is forgotten."""
    calm: float = 600.0
    """Seconds of service after which what failed before no longer delays."""
    failures: list[float] = field(default_factory=list[float])
    """When it failed, within the window."""
    due: float = 0.0
    """When it is to be started again: the last failure and its delay."""
    _serves_since: float | None = None
    _calm_since: float = 0.0
    """Failures before this one no longer delay."""

    def failed(self, now: float) -> float | None:
        """Seconds to wait before the next restart; None: give up."""
        self.failures = [*(at for at in self.failures if now - at < self.window), now]
        if self._serves_since is not None and now - self._serves_since >= self.calm:
            self._calm_since = now
        self._serves_since = None
        if len(self.failures) > self.limit:
            return None
        count = sum(at >= self._calm_since for at in self.failures)
        delay = 0.0 if count == 1 else min(self.longest, self.delay * 2 ** (count - 2))
        self.due = now + delay
        return delay

    def serves(self, now: float) -> None:
        """It has been started again."""
        self._serves_since = now

    def forgive(self, at: float) -> None:
        """The failure of this time was not its own: it no longer counts."""
        if at in self.failures:
            self.failures.remove(at)

    def when(self, now: float) -> str:
        """When it starts again, in words, for one that has failed; "" for one that has not."""
        if not self.failures:
            return ""
        starts = f"starts again in {self.due - now:.1f} s" if self.due > now else "is being started again"
        return f"{starts}, try {len(self.failures)} of {self.limit}"
