"""The composition root: configuration -> runtime -> groups -> queues -> algorithm. With build.py the only module that
sees all.

A signal stops the gate, so that the train step under way is finished and saved; a second one ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asyncrlhf.algorithm import Algorithm, cause_of, run_algorithm
from asyncrlhf.backends.rules import RewardRunner
from asyncrlhf.build import Models, build_groups, reward_runners, starters
from asyncrlhf.config.derive import derive
from asyncrlhf.config.load import load, resolved
from asyncrlhf.config.schema import Config, Data
from asyncrlhf.control.checkpoint import FORMAT, Manifest
from asyncrlhf.control.coordinator import Coordinator
from asyncrlhf.control.evaluation import Evaluator
from asyncrlhf.control.rundir import RunDirectory
from asyncrlhf.data.prompts import PromptEncoder
from asyncrlhf.data.source import Dataset, open_dataset
from asyncrlhf.data.stream import PromptStream
from asyncrlhf.errors import AsyncRLHFError, SampleError
from asyncrlhf.flow.experience import ExperienceQueue
from asyncrlhf.flow.gate import Gate
from asyncrlhf.flow.ledger import Ledger, LedgerRules
from asyncrlhf.flow.prompts import PromptSource, StageQueue
from asyncrlhf.groups import RewardGroup, RolloutGroup, TrainGroup
from asyncrlhf.messages import Experience, Prompt, pack, unpack
from asyncrlhf.observe import Checkpointed, GroupShape, Observer, RunEnded, RunStarted, Warned
from asyncrlhf.runtimes.inproc import InprocRuntime
from asyncrlhf.wiring import Wiring, wire

__all__ = ("check", "run")


def check(config: Config) -> str:
    """The resolved configuration and what follows from it, as text. Raises ConfigError, DataError. Loads no torch."""
    wiring = wire(config)
    _open(config, wiring)
    return f"{resolved(config, wiring.tables)}\n" + "\n".join(derive(config).lines())


def run(config: Config) -> int:
    """Run to the end. 0: completed; 1: failed; 128 + signal: stopped. Raises ConfigError before anything is written."""
    wiring = wire(config)
    opened = _open(config, wiring)
    for path in config.after:
        code = _run_first(load(path))
        if code:
            return code
    directory = _directory(config, wiring)
    if (done := directory.completed()) is not None:
        print(done)
        return 0
    Models.require(config, wiring)
    with directory.locked():
        return _run(config, wiring, directory, opened)


class Opened(NamedTuple):
    """What a configuration names outside itself, found and checked."""

    dataset: Dataset
    held_out: Dataset | None
    rewards: Mapping[str, RewardRunner]


def _open(config: Config, wiring: Wiring) -> Opened:
    """Open the data and import the reward functions. Raises ConfigError or DataError."""
    evaluation = config.evaluation
    return Opened(
        open_dataset(config.data, config.seed),
        open_dataset(evaluation.rows(config.data), config.seed, "evaluation") if evaluation.every else None,
        reward_runners(wiring),
    )


def _run_first(config: Config) -> int:
    """A run that another one builds on; one that is complete is not run again."""
    directory = _directory(config, wire(config))
    if directory.completed() is not None:
        directory.require_same_configuration()
        print(f"{config.run_dir}: complete, reused")
        return 0
    return run(config)


def _directory(config: Config, wiring: Wiring) -> RunDirectory:
    trained = {
        f"groups.{name}.{key}": getattr(wiring.tables[name], key)
        for name in wiring.of_role("policy", "critic")
        for key in ("model", "scratch")
    }
    data = config.data
    fixed = {
        "algorithm": config.algorithm,
        "seed": config.seed,
        "data.path": data.path,
        "data.source": data.source,
        "data.options": data.options,
        "data.shuffle": data.shuffle,
        **trained,
    }
    return RunDirectory(config, resolved(config, wiring.tables), fixed)


def _run(config: Config, wiring: Wiring, directory: RunDirectory, opened: Opened) -> int:
    threads = max((getattr(table, "threads", 1) for table in wiring.tables.values()), default=1)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # read when torch is imported
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    resumed = directory.resume_from()
    models = Models.prepare(config, wiring, directory.path)
    runner: Callable[[Any], int] = asyncio.run
    with contextlib.suppress(ImportError):
        import uvloop

        runner = uvloop.run
    session = Session(config, wiring, directory, models, opened)
    return runner(session.run(resumed))


class Session:
    """One run: its parts, and how they start, save and end."""

    def __init__(
        self,
        config: Config,
        wiring: Wiring,
        directory: RunDirectory,
        models: Models,
        opened: Opened,
    ) -> None:
        self.config, self.wiring, self.directory, self.models = config, wiring, directory, models
        self.dataset, self.held_out, self.rewards = opened
        self.stopped_by: signal.Signals | None = None
        self.saved: Path | None = None

    async def run(self, resumed: Path | None) -> int:
        """Build, train, save. Whatever ends it, summary.json says so and nothing is left running."""
        config = self.config
        self.observer = Observer(
            self.directory.path, console=config.observe.console, trackers=tuple(config.observe.trackers)
        )
        self.runtime = InprocRuntime()
        status, reason, message, code = "completed", "", "", 0
        try:
            with self._signals():
                await self._build(resumed)
                await self._train()
                await self._save(self.coordinator.version)
                policy = self.wiring.of_role("policy", "critic")[0]
                self.directory.link_final(self.directory.checkpoints.path(self.coordinator.version), policy)
                reason = self.gate.ledger.reason or "train() returned"
                if self.stopped_by is not None:
                    status, reason, code = "stopped", self.stopped_by.name, 128 + self.stopped_by
                    message = f"saved at train step {self.coordinator.version}; the same command goes on from there"
        except Exception as problem:  # whatever it is, the run directory says how the run ended
            error = cause_of(problem)
            status, reason, message, code = "failed", type(error).__name__, str(error), 1
            if not isinstance(error, AsyncRLHFError | OSError):
                traceback.print_exception(error)
        finally:
            await self.runtime.close()
        ended = RunEnded(status=status, reason=reason, message=message)  # pyright: ignore[reportArgumentType]
        try:
            self.observer.emit(ended)
        finally:
            self.observer.close()
        if code == 1:
            print(f"error: {reason}: {message}", file=sys.stderr)
        return code

    # ---- building ------------------------------------------------------------------------------------------------
    async def _build(self, resumed: Path | None) -> None:
        config, wiring = self.config, self.wiring
        manifest: Manifest | None = None
        payloads: list[Experience] = []
        if resumed is not None:
            manifest, payloads = self.directory.checkpoints.load(resumed, wiring.experience_type)
            self.directory.require_fits(manifest)
            self.observer.truncate({"events": manifest.events_offset, "metrics": manifest.metrics_offset})
        self.directory.write_config()
        ledger = self._ledger(manifest, payloads)
        log = self.observer.log
        self.gate = Gate(
            ledger,
            self._stream(self.dataset, config.data),
            log.emit,
            lease_timeout=config.limits.lease_timeout,
            wait_timeout=config.limits.wait_timeout,
        )
        self.gate.payloads.update({e.prompt.uid: e for e in payloads if e.prompt.uid in ledger.live})
        self.groups = build_groups(config, wiring, self.models, self.rewards, self.runtime, self.gate, log)
        shapes = {name: GroupShape(role, self._ranks(name)) for name, role in wiring.roles.items()}
        log.emit(
            RunStarted(
                resumed_from=None if manifest is None else manifest.train_step,
                algorithm=config.algorithm,
                seed=config.seed,
                max_staleness=config.max_staleness,
                lookahead=config.lookahead or 0,
                prompts_per_step=config.prompts_per_step,
                answers_per_prompt=config.answers_per_prompt,
                train_steps=config.train_steps,
                groups=shapes,
            )
        )
        if self.dataset.report.malformed_count:
            log.emit(Warned(message=str(self.dataset.report)))
        trained = [g for g in self.groups.values() if isinstance(g, TrainGroup)]
        self.coordinator = Coordinator(
            self.gate,
            trained,
            [g for g in self.groups.values() if isinstance(g, RolloutGroup)],
            log,
            mode=config.publish.mode,
            timeout=config.publish.timeout,
            evaluator=self._evaluator(),
            after_step=self._after_step,
        )
        self.algorithm = self._algorithm()
        async with asyncio.TaskGroup() as tasks:
            for start in starters(self.groups):
                tasks.create_task(start())
        if manifest is not None and resumed is not None:
            self.coordinator.publish_count = manifest.publish_count
            for group in trained:
                group.optimizer_steps = manifest.optimizer_steps.get(group.name, 0)
                if group.name in manifest.groups:
                    await group.load(resumed / group.name)
            if manifest.state is not None:
                self.algorithm.state = unpack(manifest.state)
        else:
            await self._save(0, groups=False)
        if self.stopped_by is not None:
            self.gate.stop()

    def _ledger(self, manifest: Manifest | None, payloads: list[Experience]) -> Ledger:
        config = self.config
        rules = LedgerRules(
            prompts_per_step=config.prompts_per_step,
            max_staleness=config.max_staleness,
            lookahead=config.lookahead or 0,
            publish_every=config.publish.every,
            byte_limit=config.limits.byte_limit or None,
            at_deadline=config.at_deadline,
            order=config.order,
            answers_per_prompt=config.answers_per_prompt,
            max_attempts=config.limits.max_attempts,
            max_filtered=config.limits.max_filtered,
            max_void_steps=config.limits.max_void_steps,
            last=config.data.last,
            train_steps=config.train_steps,
        )
        if manifest is None:
            return Ledger(rules, self.dataset.count)
        ledger = Ledger.restore(rules, manifest.ledger, {experience.prompt.uid for experience in payloads})
        ledger.data_count = self.dataset.count
        self.dataset.resume(ledger.cursor, {*ledger.again, *ledger.live})
        return ledger

    def _stream(self, dataset: Dataset, data: Data) -> PromptStream:
        tokenizer = self.models.tokenizer
        encoder = PromptEncoder(tokenizer, data)
        return PromptStream(dataset, encoder, tokenizer, response=data.response, eos=self.models.eos)

    def _evaluator(self) -> Evaluator | None:
        evaluation, dataset = self.config.evaluation, self.held_out
        if dataset is None:
            return None
        stream = self._stream(dataset, evaluation.rows(self.config.data))
        prompts: list[Prompt] = []
        for uid in range(evaluation.prompts):
            if not stream.has(uid):
                break
            try:
                prompt = stream.prompt(uid, 1, 0)
            except SampleError as error:
                self.observer.emit(Warned(message=f"evaluation: {error}"))
                continue
            prompts.append(
                Prompt(**{name: getattr(prompt, name) for name in prompt.__struct_fields__} | {"uid": -1 - uid})
            )
        rollout = next(g for g in self.groups.values() if isinstance(g, RolloutGroup))
        reward = next(g for g in self.groups.values() if isinstance(g, RewardGroup))
        return Evaluator(
            rollout,
            reward,
            prompts,
            self.observer.log,
            every=evaluation.every,
            temperature=evaluation.temperature,
            max_hold=evaluation.max_hold,
        )

    def _algorithm(self) -> Algorithm:
        wiring, gate = self.wiring, self.gate
        capacity = self.config.prompts_per_step * ((self.config.lookahead or 0) + 1)
        fields: dict[str, Any] = {
            **wiring.settings,
            **self.groups,
            **{name: StageQueue(capacity, kind, gate, name=name) for name, kind in wiring.stage_queues.items()},
            wiring.prompts: PromptSource(gate),
            wiring.coordinator: self.coordinator,
            wiring.experience: ExperienceQueue(wiring.experience_type, gate, self.observer.emit),
        }
        return wiring.algorithm(**fields)

    def _ranks(self, name: str) -> int:
        group = self.groups[name]
        return len(group.replicas) if isinstance(group, RolloutGroup) else 1

    # ---- running -------------------------------------------------------------------------------------------------
    async def _train(self) -> None:
        queues = [value for value in vars(self.algorithm).values() if isinstance(value, StageQueue)]
        closes: list[Callable[[], None]] = [self.coordinator.close]
        closes += [group.close for group in self.groups.values()] + [queue.close for queue in queues]
        await run_algorithm(
            self.algorithm,
            self.gate,
            workers=self.config.prompts_per_step * ((self.config.lookahead or 0) + 1),
            services=[self.coordinator.serve, *(group.serve for group in self.groups.values())],
            start=self.coordinator.start,
            finish=self.coordinator.finish,
            close=closes,
            stall_timeout=self.config.limits.stall_timeout,
        )

    async def _after_step(self, version: int) -> None:
        if self.config.checkpoint.every and version % self.config.checkpoint.every == 0:
            await self._save(version)

    async def _save(self, version: int, *, groups: bool = True) -> None:
        """One checkpoint; `groups` False: of the start, whose weights are where the configuration says."""
        started = time.perf_counter()
        gate, config = self.gate, self.config
        state = self.algorithm.state
        ready = [e for uid, e in gate.payloads.items() if uid in gate.ledger.live] if config.checkpoint.payloads else []
        trained = {name: g for name, g in self.groups.items() if isinstance(g, TrainGroup)}
        offsets = self.observer.offsets()
        manifest = Manifest(
            format=FORMAT,
            algorithm=config.algorithm,
            train_step=version,
            publish_count=self.coordinator.publish_count,
            optimizer_steps={name: group.optimizer_steps for name, group in trained.items()},
            groups=tuple(trained) if groups else (),
            events_offset=offsets["events"],
            metrics_offset=offsets["metrics"],
            state=None if state is None else pack(state),
            ledger=gate.ledger.snapshot(),
            payload_count=len(ready),
            fixed=self.directory.fixed,
        )
        savers = {name: group.save for name, group in trained.items()} if groups else {}
        path = await self.directory.checkpoints.save(manifest, ready, savers)
        self.observer.emit(Checkpointed(train_step=version, path=str(path), seconds=time.perf_counter() - started))

    @contextlib.contextmanager
    def _signals(self) -> Generator[None]:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def stop(number: signal.Signals) -> None:
            if self.stopped_by is not None:
                print("\nstopped at once; the newest checkpoint is kept", file=sys.stderr, flush=True)
                os._exit(128 + number)
            self.stopped_by = number
            print(f"\n{number.name}: finishing the train step; once more ends at once", file=sys.stderr, flush=True)
            if hasattr(self, "gate"):
                self.gate.stop()

        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, stop, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
