"""One run: its parts, and how they start, save and end. With build.py the only module that sees all.

A signal stops the gate, so that the train step under way is finished and saved. When the process of a trained model is
lost, so is what it held: the session ends, for another one to go on from the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from asyncrlhf.abc import Runtime
from asyncrlhf.algorithm import Algorithm, cause_of, run_algorithm, state_numbers
from asyncrlhf.build import build_groups, ledger_rules, starters
from asyncrlhf.config.derive import one_evaluation, overlaps
from asyncrlhf.config.groups import Compute
from asyncrlhf.control.checkpoint import FORMAT, Manifest, encode_payloads
from asyncrlhf.control.coordinator import Coordinator
from asyncrlhf.control.evaluation import Evaluator
from asyncrlhf.control.rundir import ITS_OWN_END, Resume
from asyncrlhf.control.signals import StopSignals
from asyncrlhf.control.turns import take_turns
from asyncrlhf.control.waits import waits_of
from asyncrlhf.errors import (
    AsyncRLHFError,
    CheckpointError,
    ConfigError,
    EngineLost,
    Exhausted,
    GroupError,
    PublishRefused,
    SampleError,
)
from asyncrlhf.flow.experience import ExperienceQueue
from asyncrlhf.flow.gate import Gate
from asyncrlhf.flow.ledger import Ledger
from asyncrlhf.flow.prompts import PromptSource, StageQueue
from asyncrlhf.groups import RewardGroup, RolloutGroup, TrainGroup
from asyncrlhf.groups.follower import Follower
from asyncrlhf.groups.supervisor import RestartBudget
from asyncrlhf.messages import Prompt, pack, unpack
from asyncrlhf.models import Models
from asyncrlhf.observe import Checkpointed, GroupShape, Observer, RunEnded, RunStarted, WaitsSeen, Warned
from asyncrlhf.stages import Stage

__all__ = ("Session",)

NEWLINE = "\n"
START_PATIENCE = 10.0
"""Seconds that engines may take to start when the user wants an end."""


class Session:
    """One run: its parts, and how they start, save and end."""

    def __init__(
        self,
        stage: Stage,
        models: Models,
        signals: StopSignals,
        runtime: Runtime,
        restarts: RestartBudget,
        note: str = "",
    ) -> None:
        """`restarts`: how often the run may go on from a checkpoint when the process of a trained model is lost.
        `note`: why it does so this time."""
        self.config, self.wiring, self.directory = stage.config, stage.wiring, stage.directory
        self.stage, self.models, self.signals = stage, models, signals
        self.runtime, self.restarts = runtime, restarts
        self.origin = ""
        self.warnings: list[str] = [note] if note else []
        self.stopping = asyncio.Event()
        self.started = self.left_out = False

    async def run(self, resumed: Resume | None) -> int | str:
        """Build, train, save; gives the exit code, or why the run is to go on from its newest checkpoint.

        Whatever ends it, summary.json says so and nothing is left running. Raises ConfigError, DataError or
        CheckpointError before anything is written.
        """
        loop, observe = asyncio.get_running_loop(), self.config.observe
        self.observer = Observer(
            self.directory.path,
            console=observe.console,
            trace=observe.trace,
            trackers=tuple(observe.trackers),
            config=msgspec.to_builtins(self.config),
        )
        with self.signals.asking(lambda: loop.call_soon_threadsafe(self._stop), self._last_words):
            try:
                self._prepare(resumed)
            except BaseException:
                self.observer.close()
                raise
            with self.signals.reporting(lambda: loop.call_soon_threadsafe(self._say_waits)):
                ended = await self._run(resumed)
            if isinstance(ended, str):
                self.observer.close()
                return ended
            return self._report(ended)

    async def _run(self, resumed: Resume | None) -> RunEnded | str:
        try:
            self._begin(resumed)
            if await self._start_unless_stopped(resumed):
                await self._train()
            return await self._finish()
        except Exception as problem:  # whatever it is, the run directory says how the run ended
            error = cause_of(problem)
            if not isinstance(error, AsyncRLHFError | OSError):
                traceback.print_exception(error)
            if isinstance(error, EngineLost) and self.directory.checkpoints.complete():
                if note := await self._may_go_on(error):
                    return note
                if self.signals.received is not None:
                    first = str(error).partition(NEWLINE)[0]
                    way = f"{first}; {self.directory.way_on} goes on from the newest checkpoint"
                    return self._ended("stopped", self.signals.received.name, way)
            await self._save_after(error)
            message = str(error)
            if isinstance(error, OSError) and not isinstance(error, AsyncRLHFError):
                message = f"{error.filename or self.directory.path}: {error.strerror or error}"
            return self._ended("failed", type(error).__name__, message)
        finally:
            await self.runtime.close()

    # ---- building ------------------------------------------------------------------------------------------------
    def _prepare(self, resumed: Resume | None) -> None:
        """Build everything that can be refused; nothing is written and no engine started."""
        config, wiring, observer = self.config, self.wiring, self.observer
        if resumed is not None:
            self.warnings += resumed.warnings
            if resumed.own:
                observer.log.check(resumed.manifest.events_offset)
                observer.metrics.check(resumed.manifest.metrics_offset)
                self.origin = resumed.manifest.origin
            else:
                self.origin = str(resumed.path.resolve())
        ledger = self._ledger(resumed)
        self.gate = Gate(
            ledger,
            self.models.stream(self.stage.dataset, config.data, lambda text: observer.emit(Warned(message=text))),
            observer.log.emit,
            lease_timeout=config.limits.lease_timeout,
            wait_timeout=config.limits.wait_timeout,
        )
        payloads = [] if resumed is None else resumed.payloads
        self.gate.payloads.update({e.prompt.uid: e for e in payloads if e.prompt.uid in ledger.live})
        self.groups = build_groups(config, wiring, self.models, self.runtime, self.gate, observer.log)
        shared = {} if self.stage.arrangement is None else self.stage.arrangement.turns
        self.turns = take_turns(
            shared, self.groups, self.gate, observer.log, offload=config.placement.offload != "never"
        )
        self.trained = {name: group for name, group in self.groups.items() if isinstance(group, TrainGroup)}
        followers = [group for group in self.groups.values() if isinstance(group, Follower)]
        self.coordinator = Coordinator(
            self.gate,
            list(self.trained.values()),
            sorted(followers, key=lambda follower: isinstance(follower, RolloutGroup)),  # those wake last, and stay so
            observer.log,
            mode=config.publish.mode,
            rolling=config.publish.rolling,
            overlap=overlaps(config, self.stage.in_turn),
            timeout=config.publish.timeout,
            probe_gap=config.publish.probe_gap,
            evaluator=self._evaluator(),
            after_step=self._after_step,
            state=lambda: state_numbers(self.algorithm.state),
        )
        self.algorithm = self._algorithm()
        if resumed is not None and resumed.manifest.state is not None:
            try:
                self.algorithm.state = unpack(resumed.manifest.state)
            except (ImportError, AttributeError, msgspec.ValidationError) as error:
                raise ConfigError(f"{resumed.path}: the algorithm's state cannot be restored: {error}") from error

    def _begin(self, resumed: Resume | None) -> None:
        """From here on the run directory is this run's."""
        config = self.config
        self.directory.begin(resumed)
        if resumed is not None and resumed.own:
            manifest = resumed.manifest
            self.observer.truncate({"events": manifest.events_offset, "metrics": manifest.metrics_offset})
        self.observer.emit(
            RunStarted(
                resumed_from=None if resumed is None else resumed.manifest.train_step,
                algorithm=config.algorithm,
                seed=config.seed,
                max_staleness=config.max_staleness,
                lookahead=config.lookahead or 0,
                prompts_per_step=config.prompts_per_step,
                answers_per_prompt=config.answers_per_prompt,
                train_steps=config.train_steps,
                groups={name: GroupShape(self.wiring.role(name), self._ranks(name)) for name in self.groups},
            )
        )
        if few := one_evaluation(config):
            self.warnings.append(few)
        if self.stage.dataset.report.malformed_count:
            self.warnings.append(str(self.stage.dataset.report))
        for message in self.warnings:
            self.observer.emit(Warned(message=message))

    async def _start_unless_stopped(self, resumed: Resume | None) -> bool:
        """Start; False if the user wants an end and the engines take longer than START_PATIENCE to be there."""
        start, stop = asyncio.ensure_future(self._start(resumed)), asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait([start, stop], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([start], timeout=START_PATIENCE)
            if not start.done():
                return False
            start.result()
            return True
        finally:
            for task in (start, stop):
                task.cancel()
            await asyncio.wait([start, stop])

    async def _start(self, resumed: Resume | None) -> None:
        """Start the engines and restore what they held; a run without a checkpoint of its own gets one."""
        async with asyncio.TaskGroup() as tasks:
            for start in starters(self.groups):
                tasks.create_task(start())
        if resumed is not None:
            manifest = resumed.manifest
            self.coordinator.publish_count = manifest.publish_count
            for name, group in self.trained.items():
                group.optimizer_steps = manifest.optimizer_steps.get(name, 0)
                if name in manifest.groups:
                    await group.load(resumed.path / name)
        if resumed is None or not resumed.own:
            await self._save(groups=resumed is not None and bool(resumed.manifest.groups))
        self.started = True
        self.restarts.serves(time.monotonic())

    def _ledger(self, resumed: Resume | None) -> Ledger:
        rules, dataset = ledger_rules(self.config), self.stage.dataset
        if resumed is None:
            return Ledger(rules, dataset.count)
        ledger = Ledger.restore(rules, resumed.manifest.ledger, {e.prompt.uid for e in resumed.payloads})
        ledger.data_count = dataset.count
        dataset.resume(ledger.cursor, {*ledger.again, *ledger.live})
        return ledger

    def _evaluator(self) -> Evaluator | None:
        evaluation, dataset = self.config.evaluation, self.stage.held_out
        if dataset is None:
            return None
        stream = self.models.stream(dataset, evaluation.rows(self.config.data))
        prompts: list[Prompt] = []
        for uid in range(evaluation.prompts):
            if not stream.has(uid):
                break
            try:
                prompt = stream.prompt(uid, 1, 0)
            except SampleError as error:
                self.warnings.append(f"evaluation: {error}")
                continue
            prompts.append(
                Prompt(**{name: getattr(prompt, name) for name in prompt.__struct_fields__} | {"uid": -1 - uid})
            )
        rollout = next(g for g in self.groups.values() if isinstance(g, RolloutGroup))
        reward = self.groups[self.wiring.of_role("reward")[0]]
        assert isinstance(reward, RewardGroup)
        judges = {name: group for name, group in self.groups.items() if name in self.wiring.judges}
        return Evaluator(
            rollout,
            reward,
            prompts,
            self.observer.log,
            every=evaluation.every,
            temperature=evaluation.temperature,
            max_hold=evaluation.max_hold,
            judges=judges,
            decode=self.models.decode,
            show=evaluation.show,
        )

    def _algorithm(self) -> Algorithm:
        wiring, gate = self.wiring, self.gate
        capacity = self.config.prompts_per_step * ((self.config.lookahead or 0) + 1)
        fields: dict[str, Any] = {
            **wiring.settings,
            **{name: self.groups[name] for name in wiring.roles},
            **{name: StageQueue(capacity, kind, gate, name=name) for name, kind in wiring.stage_queues.items()},
            wiring.prompts: PromptSource(gate),
            wiring.coordinator: self.coordinator,
            wiring.experience: ExperienceQueue(wiring.experience_type, gate, self.observer.emit),
        }
        return wiring.algorithm(**fields)

    def _ranks(self, name: str) -> int:
        group = self.groups[name]
        if isinstance(group, Follower):
            return len(group.replicas)
        table = self.wiring.engines[name]
        return table.ranks if isinstance(table, Compute) else 1

    # ---- running -------------------------------------------------------------------------------------------------
    async def _train(self) -> None:
        closes: list[Callable[[], None]] = [self.coordinator.close]
        closes += [group.close for group in self.groups.values()] + [queue.close for queue in self._queues()]
        try:
            await run_algorithm(
                self.algorithm,
                self.gate,
                workers=self.config.prompts_per_step * ((self.config.lookahead or 0) + 1),
                services=[self.coordinator.serve, *(group.serve for group in self.groups.values())],
                start=self.coordinator.start,
                finish=self.coordinator.finish,
                close=closes,
                stall_timeout=self.config.limits.stall_timeout,
                waits=self._waits,
            )
        except EngineLost:
            raise
        except (PublishRefused, GroupError) as error:  # weights that engines were to read end with their trainer
            for failure in (group.failure for group in self.trained.values()):
                if failure is not None:
                    raise failure from error
            raise

    def _queues(self) -> list[StageQueue[Any]]:
        return [value for value in vars(self.algorithm).values() if isinstance(value, StageQueue)]

    def _waits(self) -> list[str]:
        """Who waits for whom, a line each."""
        now, calls = asyncio.get_running_loop().time(), self.runtime.in_flight()
        return waits_of(self.gate, self.coordinator, self.groups, self._queues(), calls, now, self.turns)

    def _say_waits(self) -> None:
        """To standard error and to the event log."""
        lines = self._waits()
        print("\n".join(lines), file=sys.stderr, flush=True)
        self.observer.emit(WaitsSeen(lines=tuple(lines)))

    async def _after_step(self, version: int) -> None:
        if self.config.checkpoint.every and version % self.config.checkpoint.every == 0:
            await self._save()

    async def _finish(self) -> RunEnded:
        """Training is over: save, and say how it ended."""
        if not self.started and self.signals.received is not None:
            return self._ended("stopped", self.signals.received.name, "stopped while its engines started")
        await self._save()
        version, reason = self.coordinator.version, self.gate.ledger.reason
        if self.signals.received is not None and reason is None:
            self._link()
            way = f"saved at train step {version}; {self.directory.way_on} goes on from there"
            return self._ended("stopped", self.signals.received.name, way)
        if reason != "train_steps" and not version:
            ended = "the data has ended" if reason else "train() has returned"
            counts = {state: count for state, count in self.gate.ledger.account().counts.items() if count}
            last = f"; the last failure was {self.gate.last_error}" if self.gate.last_error else ""
            raise Exhausted(f"{ended} before one train step was done: prompts {counts}{last}")
        self._link()
        if reason == "completed":
            return self._ended("completed", "data", f"every prompt is used up after {version} train steps")
        return self._ended("completed", reason or ITS_OWN_END, "")

    # ---- saving and ending -----------------------------------------------------------------------------------------
    async def _save(self, *, groups: bool = True) -> None:
        """One checkpoint; `groups` False: of the start, whose weights are where the configuration says."""
        await self.coordinator.settled()
        started, version = time.perf_counter(), self.coordinator.version
        gate, checkpoints = self.gate, self.directory.checkpoints
        if checkpoints.path(version) in checkpoints.complete():
            return
        ready = [e for uid, e in gate.payloads.items() if uid in gate.ledger.live and self.config.checkpoint.payloads]
        offsets, state, ledger = self.observer.offsets(), self.algorithm.state, gate.ledger.snapshot()
        payloads, problems = await asyncio.to_thread(encode_payloads, ready)
        if problems and not self.left_out:
            self.left_out = True
            self.observer.emit(Warned(message=f"not in checkpoints, and sampled again after a resume: {problems[0]}"))
        manifest = Manifest(
            format=FORMAT,
            algorithm=self.config.algorithm,
            train_step=version,
            publish_count=self.coordinator.publish_count,
            optimizer_steps={name: group.optimizer_steps for name, group in self.trained.items()},
            groups=tuple(self.trained) if groups else (),
            events_offset=offsets["events"],
            metrics_offset=offsets["metrics"],
            state=None if state is None else pack(state),
            ledger=ledger,
            payload_count=len(payloads),
            fixed=self.directory.fixed,
            origin=self.origin,
        )
        savers = {name: group.save for name, group in self.trained.items()} if groups else {}
        path = await checkpoints.save(manifest, payloads, savers, protect=self.directory.linked)
        self.observer.emit(Checkpointed(train_step=version, path=str(path), seconds=time.perf_counter() - started))

    async def _may_go_on(self, error: EngineLost) -> str:
        """Waits as the restart policy says, and gives what to tell the user; empty if the run has to end. Until another
        session has begun, summary.json says that this one has failed."""
        delay = None if self.signals.received is not None else self.restarts.failed(time.monotonic())
        if delay is None:
            return ""
        newest, count = self.directory.checkpoints.complete()[-1], len(self.restarts.failures)
        self.observer.summary.see(self._ended("failed", type(error).__name__, str(error)), live=True)
        await asyncio.sleep(delay)
        if self.signals.received is not None:
            return ""
        return f"{error}\ngoing on from {newest} (limits.max_restarts: {count} of {self.restarts.limit})"

    async def _save_after(self, error: BaseException) -> None:
        """A run that fails between two train steps loses none of them, unless its weights or its disk are bad."""
        bad = isinstance(error, PublishRefused | OSError | EngineLost) or self.gate.ledger.training is not None
        if self.started and not bad:
            with contextlib.suppress(CheckpointError, GroupError, TimeoutError):
                async with asyncio.timeout(self.config.limits.stall_timeout):
                    await self._save()

    def _link(self) -> None:
        policy = next(iter(self.trained))
        self.directory.link_final(self.directory.checkpoints.path(self.coordinator.version), policy)

    def _ended(self, status: Literal["completed", "stopped", "failed"], reason: str, message: str) -> RunEnded:
        tokens = msgspec.structs.asdict(self.gate.ledger.account().tokens)
        return RunEnded(status=status, reason=reason, message=message, tokens=tokens)

    def _report(self, ended: RunEnded) -> int:
        """Write the end of the run, and give its exit code."""
        code = {"completed": 0, "failed": 1}.get(ended.status, self.signals.exit_code)
        try:
            self.observer.emit(ended)
        except OSError as problem:
            code = code or 1
            print(f"error: the end of the run cannot be written: {problem}", file=sys.stderr)
            with contextlib.suppress(OSError):
                self.observer.summary.see(ended, live=True)
        finally:
            with contextlib.suppress(OSError):
                self.observer.close()
        if ended.status == "failed":
            print(f"error: {ended.reason}: {ended.message}", file=sys.stderr)
            complete = self.directory.checkpoints.complete()
            if complete:
                print(f"{self.directory.way_on} goes on from {complete[-1]}", file=sys.stderr)
        return code

    def _stop(self) -> None:
        self.stopping.set()
        self.coordinator.stop()

    def _last_words(self) -> None:
        """Give the terminal back."""
        self.observer.console.close()
