"""The weights that were announced last, by trained group: as they are published, and whole for engines without any."""

from __future__ import annotations

from msgspec.structs import replace

from asyncrlhf.messages import WeightHandle

__all__ = ("Announced",)


class Announced:
    """Waits for nobody."""

    def __init__(self) -> None:
        self.last: dict[str, WeightHandle] = {}
        """Maybe a header only, for engines that hold the version before."""
        self._whole: dict[str, WeightHandle] = {}

    def take(self, group: str, weights: WeightHandle) -> None:
        """Newer ones."""
        self.last[group] = weights
        if weights.changed or group not in self._whole:
            self._whole[group] = replace(weights, changed=True)

    def whole(self, group: str) -> WeightHandle | None:
        """All bytes of the newest version; None: nothing has been exported yet."""
        found = self._whole.get(group)
        return None if found is None else replace(found, version=self.last[group].version)
