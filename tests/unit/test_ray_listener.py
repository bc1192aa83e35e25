"""Whatever ends what is heard of an actor ends its engine: nobody waits for it any more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from ray.exceptions import ObjectLostError

from asyncrlhf.abc import EngineSpec
from asyncrlhf.errors import EngineLost
from asyncrlhf.runtimes.actor import Said
from asyncrlhf.runtimes.ray import ActorEngine


class Actor:
    """Says that it is ready, and fails as it is told to once it is asked something."""

    def __init__(self, failure: Exception) -> None:
        self._failure, self._said, self._asked = failure, [[Said("ready")]], asyncio.Event()
        for name in ("whereabouts", "start", "listen", "put", "stop"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    async def _whereabouts(self) -> tuple[int, str]:
        return 1, "127.0.0.1"

    async def _start(self, *arguments: object) -> None: ...

    async def _listen(self) -> list[Said]:
        if self._said:
            return self._said.pop()
        await self._asked.wait()
        raise self._failure

    def _put(self, *arguments: object) -> None:
        self._asked.set()

    def _stop(self) -> None: ...


@pytest.mark.parametrize(
    "failure", [ObjectLostError("f" * 56, None, ""), TypeError("cannot be unpickled here")], ids=["lost", "unreadable"]
)
async def test_what_is_heard_of_an_actor_cannot_be_read(failure: Exception, tmp_path: Path) -> None:
    spec = EngineSpec(group="rollout", rank=0, engine="none:None", options=msgspec.defstruct("Nothing", [])())
    engine = ActorEngine(spec, Actor(failure), tmp_path / "log", lambda events: None, inline_bytes=0)
    await engine.start()
    with pytest.raises(EngineLost, match=f"rollout.*is lost: {type(failure).__name__}"):
        await asyncio.wait_for(engine.call("probe"), 10)
    await engine.close(at_once=True)
