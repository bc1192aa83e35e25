"""A frozen engine's process that stands still or is killed, in the local runtime: another takes its place."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import cast

import pytest

from asyncrlhf.abc import EngineSpec
from asyncrlhf.groups.frozen import FrozenEngine
from asyncrlhf.observe import EventLog
from asyncrlhf.runtimes.local import LocalRuntime, ProcessEngine
from asyncrlhf.testing.conformance.engines import PlainOptions

LIMIT = 10.0
"""Seconds that a call may take; a start, of a process that imports numpy, may take twice as long."""


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=lambda number: number.name)
def test_a_process_that_gives_no_answer_is_replaced(tmp_path: Path, number: signal.Signals) -> None:
    async def main() -> None:
        runtime = LocalRuntime(tmp_path)
        engine = "asyncrlhf.testing.conformance.engines:Plain"
        spec = EngineSpec(group="reference", rank=0, engine=engine, options=PlainOptions())
        frozen = FrozenEngine(EventLog(None, time.perf_counter), runtime, spec, call_timeout=LIMIT)
        try:
            await frozen.start()
            async with frozen.supervised():
                assert list(await frozen.call("echo", 1)) == ["plain", 1, 1]
                process = cast("ProcessEngine", (await frozen.serving()).handle).host.process
                os.kill(process.pid, number)
                found = await asyncio.gather(*(frozen.call("echo", i) for i in range(3)))
                assert [list(said)[2] for said in found] == [0, 1, 2]
                assert frozen.incarnation == 1
                assert process.returncode == -signal.SIGKILL
        finally:
            await runtime.close()

    asyncio.run(main())
