"""The runtime suite over the in-process runtime, with real threads, and over the fake one, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from asyncrlhf.abc import EngineSpec, Runtime
from asyncrlhf.errors import GroupError
from asyncrlhf.messages import Message
from asyncrlhf.runtimes.inproc import InprocRuntime
from asyncrlhf.runtimes.local import LocalRuntime
from asyncrlhf.testing import FakeRuntime, Fault, Timing, run_virtual
from asyncrlhf.testing.conformance import RUNTIME
from asyncrlhf.testing.conformance.engines import LATCH, Plain, PlainOptions

ENGINE = "asyncrlhf.testing.conformance.engines:Plain"

checks = pytest.mark.parametrize("check", RUNTIME, ids=lambda check: check.__name__)


@pytest.fixture(autouse=True)
def latch() -> Generator[None]:
    """Threads that hang are let go when the test is over."""
    LATCH.clear()
    yield
    LATCH.set()


@checks
def test_inproc(check: Any, tmp_path: Path) -> None:
    asyncio.run(check(InprocRuntime(grace=0.2), tmp_path))


@checks
def test_local(check: Any, tmp_path: Path) -> None:
    asyncio.run(check(LocalRuntime(tmp_path / "logs", grace=2.0), tmp_path))


@checks
def test_ray(check: Any, tmp_path: Path, ray_here: None) -> None:
    from asyncrlhf.runtimes.ray import RayRuntime

    asyncio.run(check(RayRuntime(tmp_path / "logs", address="auto", grace=2.0), tmp_path))


def test_a_process_whose_log_is_on_a_full_disk_says_what_broke_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrlhf.runtimes.local.last_lines", lambda log, start: "")  # /dev/full is read without end

    async def main() -> None:
        runtime = LocalRuntime(tmp_path, grace=2.0)
        handle = await runtime.spawn(
            EngineSpec(group="plain", rank=0, engine=ENGINE, options=PlainOptions()), lambda events: None
        )
        with pytest.raises(GroupError, match="no attribute 'missing'"):
            await handle.call("missing")
        await runtime.close()

    (tmp_path / "plain-0.log").symlink_to("/dev/full")
    asyncio.run(main())


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_the_garbage_collector_of_a_process_leaves_its_engine_alone(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async def main(runtime: Runtime) -> None:
        spec = EngineSpec(group="plain", rank=0, engine=ENGINE, options=PlainOptions())
        handle = await runtime.spawn(spec, lambda events: None)
        assert not await handle.call("is_garbage_collectable")
        await runtime.close()

    if kind == "local":
        asyncio.run(main(LocalRuntime(tmp_path / "logs", grace=2.0)))
    else:
        request.getfixturevalue("ray_here")
        from asyncrlhf.runtimes.ray import RayRuntime

        asyncio.run(main(RayRuntime(tmp_path / "logs", address="auto", grace=2.0)))


@checks
@pytest.mark.parametrize("latency", [0.0, 0.7])
def test_fake(check: Any, latency: float, tmp_path: Path) -> None:
    hangs = Fault(group="plain", verb="wait", kind="hang")
    timing = Timing(latency=latency, jitter=1.0, verbs={"echo": 0.3, "add": 0.1})

    async def main() -> None:
        await check(FakeRuntime(timing, [hangs]), tmp_path)

    run_virtual(main())


class Unclosable(Plain):
    def close(self) -> None:
        raise ZeroDivisionError("it will not close")


@pytest.mark.parametrize("kind", ["inproc", "fake"])
def test_an_engine_that_cannot_be_closed_is_logged_and_ends_all_the_same(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        runtime = InprocRuntime() if kind == "inproc" else FakeRuntime()
        options: Message = PlainOptions()
        spec = EngineSpec(group="g", rank=0, engine=f"{__name__}:Unclosable", options=options)
        await runtime.spawn(spec, lambda events: None)
        await runtime.close()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert "g/0 could not be closed" in caplog.text
    assert "it will not close" in caplog.text
