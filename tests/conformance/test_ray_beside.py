"""Engines on the devices of others' ranks, under Ray: the node and the GPUs of those ranks, in their order."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from asyncrlhf.abc import Beside, Engine, EngineSpec, Needs, Place
from asyncrlhf.errors import ConfigError
from asyncrlhf.messages import Message

pytestmark = pytest.mark.timeout(600)
ENGINE = f"{__name__}:Seeing"


class Seeing(Engine):
    """Says where it is."""

    Options = Message

    def __init__(self, options: Message) -> None:
        pass

    def devices(self) -> tuple[str, list[str]]:
        """Its node, and the GPUs that it sees."""
        return os.environ["ASYNCRLHF_NODE"], [
            gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu
        ]


def places(*, gpus: bool) -> list[Place]:
    """Two ranks, an engine with a process on each, in the opposite order, and one on the second alone."""
    needs = Needs(pool="shared", devices=0.3333, together=True) if gpus else None
    ranks = [Place(group="policy", rank=rank, engine=ENGINE, needs=needs) for rank in range(2)]
    hosts = ((1, 0), (1,))
    engines = [
        Place(group=f"rollout{number}", rank=0, engine=ENGINE, needs=needs, beside=Beside("policy", on))
        for number, on in enumerate(hosts)
    ]
    return [*engines, *ranks]


@pytest.mark.parametrize("gpus", [True, False])
def test_engines_see_the_gpus_of_the_ranks_that_they_are_beside(
    gpus: bool, tmp_path: Path, ray_cluster: Any, ray_here: None
) -> None:
    from asyncrlhf.runtimes.ray import RayRuntime

    node = ray_cluster.add_node(num_cpus=1, num_gpus=2) if gpus else None
    runtime = RayRuntime(tmp_path / "logs", address="auto", grace=2.0)

    async def main() -> list[tuple[str, list[str]]]:
        found: list[tuple[str, list[str]]] = []
        expected = places(gpus=gpus)
        runtime.expect(expected)
        for place in expected:
            spec = EngineSpec(**{name: getattr(place, name) for name in place.__struct_fields__}, options=Message())
            engine = await runtime.spawn(spec, lambda events: None)
            found.append(await engine.call("devices"))
        await runtime.close()
        return found

    try:
        wide, narrow, first, second = asyncio.run(main())
    finally:
        runtime.kill()
        if node is not None:
            ray_cluster.remove_node(node)
    assert len({where for where, _ in (wide, first, second)}) == 1
    assert narrow[0] == second[0]
    if gpus:
        assert sorted(first[1] + second[1]) == ["0", "1"], "a rank holds its engines' share, too"
        assert wide[1] == [*second[1], *first[1]]
        assert narrow[1] == second[1]


def test_ranks_of_one_engine_have_to_be_on_one_node(tmp_path: Path) -> None:
    from asyncrlhf.runtimes.ray import RayRuntime

    runtime = RayRuntime(tmp_path / "logs")
    runtime._hosts = {("policy", 0): ("a", "0"), ("policy", 1): ("b", "0")}
    with pytest.raises(ConfigError, match=r"2 processes .* ranks \(0, 1\) of policy, which Ray has put on 2 nodes"):
        runtime._beside(Beside("policy", (0, 1)))


class Unstarted:
    """An actor whose process does not tell where it is."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.devices = SimpleNamespace(remote=lambda: self)


@pytest.mark.parametrize("nodes", [["a"], ["a", "b"]], ids=["one never starts", "on two nodes"])
def test_what_was_started_is_ended_when_not_all_can_be(
    nodes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank does not start, or starts on another node."""
    from asyncrlhf.runtimes import ray as module

    killed: list[Place] = []
    patiences: list[float] = []

    def actor(self: Any, place: Place) -> Unstarted:
        if place.beside is not None:
            self._beside(place.beside)
        return Unstarted(place)

    def get(asked: Unstarted, *, timeout: float) -> tuple[str, str | None]:
        patiences.append(timeout)
        if asked.place.rank < len(nodes):
            return nodes[asked.place.rank], None
        raise GetTimeoutError("not yet")

    monkeypatch.setattr(module.RayRuntime, "_connect", lambda self: None)
    monkeypatch.setattr(module.Reservation, "take", lambda self, places: None)
    monkeypatch.setattr(module.RayRuntime, "_actor", actor)
    monkeypatch.setattr(module.ray, "get", get)
    monkeypatch.setattr(module, "_kill", lambda actor: killed.append(actor.place))
    runtime = module.RayRuntime(tmp_path / "logs")
    expected = places(gpus=False)
    with pytest.raises(ConfigError, match="group 'policy', rank 1 has not started" if len(nodes) == 1 else "2 nodes"):
        runtime.expect(expected)
    runtime.kill()
    assert killed == [place for place in expected if place.beside is None]
    assert patiences == sorted(patiences, reverse=True)
    assert max(patiences) <= module.STARTING
