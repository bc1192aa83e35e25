"""A mistake of the configuration that only an engine can see keeps its type, unless it was built before."""

from __future__ import annotations

import asyncio

import pytest

from asyncrlhf.abc import EngineSpec
from asyncrlhf.errors import ConfigError, GroupError
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
