"""The composition root: a configuration file becomes a run, after the runs that it builds on.

A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from asyncrlhf.build import make_runtime, places
from asyncrlhf.config.derive import derive, transport_line
from asyncrlhf.config.groups import Compute
from asyncrlhf.config.schema import Config
from asyncrlhf.control.rundir import Resume
from asyncrlhf.control.signals import StoppedEarly, StopSignals
from asyncrlhf.errors import AsyncRLHFError, CheckpointError, ConfigError
from asyncrlhf.groups.supervisor import RestartBudget
from asyncrlhf.models import Models
from asyncrlhf.placement.advice import warnings
from asyncrlhf.placement.arrange import set_lines
from asyncrlhf.placement.earlier import facts_before
from asyncrlhf.placement.fits import device_memory, memory_warnings
from asyncrlhf.pools import (
    asks,
    engines_are_here,
    pool_lines,
    require_gpus,
    require_pools,
    same_devices,
    sleepers,
)
from asyncrlhf.runtimes.garbage import left_alone
from asyncrlhf.session import Session
from asyncrlhf.stages import Stage, prepare
from asyncrlhf.weights.preview import plan_lines

__all__ = ("check", "run")


def check(config: Config) -> str:
    """The resolved configuration and what follows from it, as text. Raises ConfigError, DataError. Loads no torch."""
    stage = prepare(config)
    config = stage.config
    engines = [place for group in places(config, stage.wiring).values() for place in group]
    require_pools(config, engines)
    require_gpus(config, stage.wiring)
    facts = facts_before(
        stage.directory.path,
        lookahead=config.lookahead or 0,
        max_staleness=config.max_staleness,
        engines=stage.wiring.engines.values(),
    )
    moved = plan_lines(stage.wiring.engines, same_devices(config, stage.wiring))
    shared = stage.arrangement
    sleep = sleepers(config, stage.wiring)
    in_turn = {} if shared is None else {part.name: sleep.intersection(part.members) for part in shared.sets}
    have = device_memory() if engines_are_here(config) else None
    memory = memory_warnings(config.pools, stage.wiring.engines, in_turn, have)
    advice = [f"warning: {text}" for text in (*warnings(facts), *memory)]
    kept = config.placement.offload == "never"
    sets = [] if shared is None else set_lines(shared, stage.wiring.engines, config.lookahead or 0, kept=kept)
    ways = [transport_line(config)] if stage.wiring.of_role("rollout") else []
    derived = derive(config, in_turn=stage.in_turn).lines()
    facts_lines = [*derived, *ways, *sets, *pool_lines(config, engines), *moved, *advice]
    return f"{stage.text}\n" + "\n".join(facts_lines)


def run(config: Config) -> int:
    """Run to the end. 0: completed; 1: failed; 128 + signal: stopped. Raises ConfigError or DataError, and has then
    written nothing."""
    signals = StopSignals()
    with signals.installed():
        try:
            stage = prepare(config)
            for other in stage.all_after():
                other.directory.require_usable()
            stages = [stage, *stage.all_after()]
            _set_threads(stages)
            for each in stages:
                if each.directory.completed() is None:
                    engines = [place for group in places(each.config, each.wiring).values() for place in group]
                    require_pools(each.config, engines)
                    if engines_are_here(each.config):
                        Models.require_devices(each.wiring)
            return _run(stage, signals)
        except StoppedEarly:
            print(f"\nstopped before {config.run_dir} began", file=sys.stderr)
            return signals.exit_code
        except CheckpointError as problem:
            raise ConfigError(str(problem)) from problem


def _run(stage: Stage, signals: StopSignals, *, first: bool = False) -> int:
    """`first`: another run builds on this one."""
    directory = stage.directory
    if (done := directory.completed()) is not None:
        print(f"{directory.path}: complete, reused" if first else done)
        return 0
    directory.resume_path()
    with directory.locked():
        for other in stage.after:
            if code := _run(other, signals, first=True):
                return code
        Models.require(stage.wiring)
        return _train(stage, signals)


def _set_threads(stages: Iterable[Stage]) -> None:
    """Before torch is imported, which reads this."""
    tables = [table for each in stages for table in each.wiring.engines.values()]
    threads = max((table.threads for table in tables if isinstance(table, Compute)), default=1)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _train(stage: Stage, signals: StopSignals) -> int:
    runner: Callable[[Any], int | str] = asyncio.run
    with contextlib.suppress(ImportError):
        import uvloop

        runner = uvloop.run
    restarts = RestartBudget(limit=stage.config.limits.max_restarts)
    resumed = stage.directory.resume(stage.wiring.experience_type)
    ended = _session(stage, signals, restarts, resumed, runner)
    with signals.asking(_nothing, _nothing):  # between two sessions a signal is noted, for the next one to see
        while isinstance(ended, str):
            try:
                stage = prepare(stage.config)  # a data set is read once
                resumed = stage.directory.newest(stage.wiring.experience_type)
                ended = _session(stage, signals, restarts, resumed, runner, ended)
            except (AsyncRLHFError, OSError) as error:
                print(f"error: the run cannot go on from {stage.directory.path}: {error}", file=sys.stderr)
                delay = restarts.failed(time.monotonic()) if isinstance(error, ConfigError) else None
                if delay is None or signals.received is not None:
                    return 1  # as summary.json says since the process was lost
                print(f"trying again in {delay:g} s", file=sys.stderr)  # a cluster may be given another node
                time.sleep(delay)
    return ended


def _session(
    stage: Stage,
    signals: StopSignals,
    restarts: RestartBudget,
    resumed: Resume | None,
    runner: Callable[[Any], int | str],
    note: str = "",
) -> int | str:
    """One session on engines of its own: its exit code, or why another one has to go on. `note`: why this one does."""
    anew = resumed is None or not resumed.own
    engines = [place for group in places(stage.config, stage.wiring).values() for place in group]
    runtime = make_runtime(stage.config, stage.directory.path, asks(stage.config, engines))
    try:
        runtime.expect(engines)
        models = Models.prepare(stage.config, stage.wiring, stage.directory.path, anew=anew)
        with left_alone():  # while the engines start
            return runner(Session(stage, models, signals, runtime, restarts, note).run(resumed))
    finally:
        runtime.kill()


def _nothing() -> None:
    pass
