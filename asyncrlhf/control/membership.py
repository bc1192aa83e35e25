"""Which engines serve, at which incarnation and version, and so the published version P. Pure: nothing waits here.

A publish has two phases: `prepare(v)`, every serving engine acknowledges that it holds the weights, then each commits.
P is the lowest version among the serving engines and never falls: an engine joins at P, or at v once a publish of v has
begun. Messages of an earlier incarnation are refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

__all__ = ("Membership",)

Engine = TypeVar("Engine", bound=Hashable)


class Membership(Generic[Engine]):
    """The engines that follow one policy. Example: Membership(("rollout/0", "rollout/1"), version=0)."""

    def __init__(self, engines: Iterable[Engine], version: int) -> None:
        """`version`: what every engine serves already (launch or resume)."""
        self._serving: dict[Engine, int] = dict.fromkeys(engines, version)
        self._incarnation: dict[Engine, int] = dict.fromkeys(self._serving, 0)
        self._acknowledged: set[Engine] = set()
        self._published = self._target = version

    @property
    def serving(self) -> Mapping[Engine, int]:
        """Serving engine -> the version it committed last."""
        return MappingProxyType(self._serving)

    @property
    def incarnation(self) -> Mapping[Engine, int]:
        """Every engine ever known -> how often it has been fenced."""
        return MappingProxyType(self._incarnation)

    @property
    def published(self) -> int:
        """P: the newest version that every serving engine has committed; unchanged while none serves."""
        return self._published

    @property
    def target(self) -> int:
        """The version of the publish under way; P between publishes."""
        return self._target

    @property
    def prepared(self) -> bool:
        """Does every serving engine hold the target's weights? False while no engine serves: a publish waits."""
        return bool(self._serving) and self._serving.keys() <= self._acknowledged

    def prepare(self, version: int) -> None:
        """Begin to publish `version`. Raises ValueError if it is older than the last target."""
        if version < self._target:
            raise ValueError(f"cannot publish version {version} after version {self._target}: versions never fall")
        self._target = version
        self._acknowledged.clear()

    def acknowledge(self, engine: Engine, incarnation: int) -> bool:
        """The engine holds the target's weights and has not swapped. False: refused."""
        if not self._is_current(engine, incarnation):
            return False
        self._acknowledged.add(engine)
        return True

    def commit(self, engine: Engine, incarnation: int) -> bool:
        """The engine serves the target. False: refused. Raises ValueError before every serving engine is prepared."""
        if not self._is_current(engine, incarnation):
            return False
        if not self.prepared:
            missing = sorted(str(name) for name in self._serving.keys() - self._acknowledged)
            raise ValueError(
                f"{engine} commits version {self._target}, but {len(missing)} of {len(self._serving)} serving engines "
                f"do not hold it yet: {', '.join(missing)}"
            )
        self._serving[engine] = self._target
        self._raise_published()
        return True

    def fence(self, engine: Engine) -> int:
        """Whatever this incarnation still says is refused from now on; P may rise without it. The next incarnation."""
        self._incarnation[engine] += 1
        self._serving.pop(engine, None)
        self._acknowledged.discard(engine)
        self._raise_published()
        return self._incarnation[engine]

    def join(self, engine: Engine) -> int:
        """The engine, new or fenced before, holds and serves the target: its incarnation.

        Raises ValueError if it serves already.
        """
        if engine in self._serving:
            raise ValueError(f"{engine} serves version {self._serving[engine]} already; fence it before it joins again")
        self._incarnation.setdefault(engine, 0)
        self._serving[engine] = self._target
        self._acknowledged.add(engine)
        self._raise_published()
        return self._incarnation[engine]

    def _is_current(self, engine: Engine, incarnation: int) -> bool:
        return engine in self._serving and self._incarnation[engine] == incarnation

    def _raise_published(self) -> None:
        if self._serving:
            lowest = min(self._serving.values())
            assert lowest >= self._published, f"an engine serves {lowest}, below the published {self._published}"
            self._published = lowest
