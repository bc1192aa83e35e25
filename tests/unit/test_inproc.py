"""A mistake of the configuration that only an engine can see keeps its type, unless it was built before."""

from __future__ import annotations

import asyncio

import pytest

from asyncrlhf.abc import EngineSpec
from asyncrlhf.backends.rules import RuleOptions
from asyncrlhf.errors import ConfigError, GroupError
from asyncrlhf.messages import ScoreRequest
from asyncrlhf.runtimes.inproc import InprocRuntime
from asyncrlhf.testing.conformance.engines import Plain, PlainOptions

built = 0


class Once(Plain):
    """Can be built once."""

    def __init__(self, options: PlainOptions) -> None:
        global built
        built += 1
        if built > 1:
            raise ConfigError("no window of this kind")
        super().__init__(options)


@pytest.mark.parametrize(("before", "expected"), [(1, ConfigError), (0, GroupError)])
def test_a_config_error_of_an_engine(before: int, expected: type[Exception]) -> None:
    async def main() -> None:
        global built
        built = before
        runtime = InprocRuntime(grace=0.2)
        spec = EngineSpec(group="g", rank=0, engine=f"{__name__}:Once", options=PlainOptions())
        if not before:
            await (await runtime.spawn(spec, lambda events: None)).close()
        with pytest.raises(expected) as caught:
            await runtime.spawn(spec, lambda events: None)
        message = "no window of this kind"
        assert str(caught.value) == (message if before else f"group 'g', rank 0: {message}")
        await runtime.close()

    asyncio.run(main())


async def slow(prompt: str, response: str, ground_truth: str) -> float:
    await asyncio.sleep(0.01)
    return 1.0


def test_rewards_that_wait_are_not_busy() -> None:
    async def main() -> None:
        runtime, events = InprocRuntime(grace=0.2), list[object]()
        options = RuleOptions(function=f"{__name__}:slow", concurrency=1)
        spec = EngineSpec(group="reward", rank=0, engine="asyncrlhf.backends.rules:RuleEngine", options=options)
        engine = await runtime.spawn(spec, events.extend)
        requests = [ScoreRequest(uid=i, prompt="", responses=("a", "b"), ground_truth="", columns={}) for i in range(4)]
        assert await asyncio.gather(*(engine.call("score", request) for request in requests)) == [(1.0, 1.0)] * 4
        await runtime.close()
        assert events == []

    asyncio.run(main())
