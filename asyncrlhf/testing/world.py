"""A whole run on fakes: the real gate, queues, groups and coordinator round an Algorithm, under a virtual clock.

`simulate` runs to the end; `build_run` gives the parts to whoever wants to look at them on the way.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from asyncrlhf.abc import EngineSpec
from asyncrlhf.algorithm import Algorithm, cause_of, run_algorithm
from asyncrlhf.control.checkpoint import FORMAT, Manifest
from asyncrlhf.control.coordinator import Coordinator
from asyncrlhf.control.evaluation import Evaluator
from asyncrlhf.flow.experience import ExperienceQueue
from asyncrlhf.flow.gate import Gate, Popped
from asyncrlhf.flow.ledger import Ledger, LedgerRules
from asyncrlhf.flow.prompts import PromptSource, StageQueue
from asyncrlhf.groups import CriticGroup, Group, PolicyGroup, ReferenceGroup, RewardGroup, RolloutGroup, TrainGroup
from asyncrlhf.groups.rollout import Sampling
from asyncrlhf.messages import Experience, pack, unpack
from asyncrlhf.observe import Checkpointed, Event, EventLog, GroupShape, RunStarted, StepEnded
from asyncrlhf.testing.clock import run_virtual
from asyncrlhf.testing.runtime import FakeRuntime, Fault, Timing
from asyncrlhf.testing.sampler import FakeSamplerOptions
from asyncrlhf.testing.sources import FakeReward, FakeRows
from asyncrlhf.testing.trainer import FakeTrainerOptions
from asyncrlhf.wiring import GROUP_ROLES

__all__ = ("Run", "Saved", "Scenario", "build_run", "simulate")

A = typing.TypeVar("A", bound=Algorithm)
Watch = Callable[["Run[Any]", Event], None]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run in small: the knobs of a configuration under their own names, the workload, and what goes wrong."""

    seed: int = 0
    timing: Timing = field(default_factory=lambda: Timing(verbs={"step": 5.0, "commit": 1.0, "spawn": 2.0}, jitter=0.5))
    prompts_per_step: int = 2
    answers_per_prompt: int = 2
    max_staleness: int = 0
    lookahead: int | None = None
    """None: half of max_staleness, rounded up, as in a configuration."""
    at_deadline: Literal["mask", "wait", "drop"] = "mask"
    order: Literal["ready", "admission"] = "ready"
    train_steps: int | None = None
    last: Literal["train", "drop"] = "train"
    publish_every: int = 1
    publish_mode: Literal["in_flight", "drain"] = "in_flight"
    publish_timeout: float = 300.0
    kv: Literal["rebuild", "keep"] = "rebuild"
    byte_limit: int | None = None
    max_attempts: int = 3
    max_filtered: int | None = None
    max_void_steps: int = 10
    min_answers: int | None = None
    lease_timeout: float = 900.0
    wait_timeout: float = 60.0
    stall_timeout: float = 1800.0
    max_restarts: int = 3

    rows: int | None = 12
    """Rows of the data set; None: without end, which needs train_steps."""
    epochs: int = 1
    unusable: float = 0.0
    """Share of rows that cannot be encoded."""
    counted: bool = True
    """Whether the ledger knows from the start how many rows there are."""

    replicas: int = 2
    sampler: FakeSamplerOptions = FakeSamplerOptions()
    trainer: FakeTrainerOptions = FakeTrainerOptions()
    max_tokens: int = 1000
    optional: tuple[str, ...] = ()
    """Groups to build for fields that may be None."""
    reward: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of FakeReward."""
    faults: Sequence[Fault] = ()
    zombies: bool = False
    """Engines that were closed work on, and what they say still arrives."""

    checkpoint_every: int = 0
    """Train steps between two checkpoints, kept in memory; 0: none but that of the start."""
    payloads: bool = True
    evaluation_every: int = 0
    evaluation_prompts: int = 2
    evaluation_max_hold: float = 60.0

    @property
    def ahead(self) -> int:
        """D."""
        return (self.max_staleness + 1) // 2 if self.lookahead is None else self.lookahead

    @property
    def capacity(self) -> int:
        """Leases that may be live: B (D + 1)."""
        return self.prompts_per_step * (self.ahead + 1)

    def rules(self) -> LedgerRules:
        return LedgerRules(
            prompts_per_step=self.prompts_per_step,
            max_staleness=self.max_staleness,
            lookahead=self.ahead,
            publish_every=self.publish_every,
            byte_limit=self.byte_limit,
            at_deadline=self.at_deadline,
            order=self.order,
            answers_per_prompt=self.answers_per_prompt,
            max_attempts=self.max_attempts,
            max_filtered=self.max_filtered,
            max_void_steps=self.max_void_steps,
            last=self.last,
            train_steps=self.train_steps,
        )


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint in memory: the bytes that files would hold, and what a test has counted until then."""

    manifest: bytes
    payloads: bytes
    files: Mapping[str, Mapping[str, bytes]]
    batches: tuple[tuple[int, tuple[int, ...]], ...]


class Run(typing.Generic[A]):
    """The parts of a run, and what happened to them."""

    def __init__(self, scenario: Scenario, watch: Watch | None, keep: bool) -> None:
        self.scenario = scenario
        self.events: list[Event] = []
        self.batches: list[tuple[int, tuple[int, ...]]] = []
        """(train step, uids) of every batch that was trained on, along the restored lineage."""
        self.popped: list[Popped] = []
        """What the trainer was given, void batches included."""
        self.reason = ""
        """How the run ended: the ledger's reason, or the class name of what ended it."""
        self.error: BaseException | None = None
        self.saved: Saved | None = None
        self.crashed = False
        self.groups: dict[str, Group] = {}
        self._watch, self._keep = watch, keep
        self._watch_error: Exception | None = None
        self._last: Popped | None = None
        self.runtime: FakeRuntime
        self.rows: FakeRows
        self.scorer: FakeReward
        self.log: EventLog
        self.gate: Gate
        self.coordinator: Coordinator
        self.algorithm: A

    @property
    def ledger(self) -> Ledger:
        return self.gate.ledger

    def events_of(self, kind: type[Any]) -> list[Any]:
        """The events of one type."""
        return [event for event in self.events if isinstance(event, kind)]

    def trainer(self, group: str = "policy") -> Any:
        """The FakeTrainer of a group."""
        return self.runtime.engine(group)

    async def main(self) -> str:
        """Run to the end and say how it ended. Errors that end a run are kept in `error`; those of `watch` are raised."""
        scenario = self.scenario
        queues = [value for value in vars(self.algorithm).values() if isinstance(value, StageQueue)]
        closes: list[Callable[[], None]] = [self.coordinator.close]
        closes += [group.close for group in self.groups.values()] + [queue.close for queue in queues]
        try:
            await run_algorithm(
                self.algorithm,
                self.gate,
                workers=scenario.capacity,
                services=[self.coordinator.serve, *(group.serve for group in self.groups.values())],
                start=self._launch,
                finish=self.coordinator.finish,
                close=closes,
                stall_timeout=scenario.stall_timeout,
            )
            self.reason = self.gate.ledger.reason or ("stopped" if self.gate.stopping else "train() returned")
        except Exception as error:
            self.error = cause_of(error)
            self.reason = type(self.error).__name__
        finally:
            await self.runtime.close()
        if self._watch_error is not None:
            raise self._watch_error
        return self.reason

    async def _launch(self) -> None:
        await self.coordinator.start()
        self.runtime.launched_at = asyncio.get_running_loop().time()

    # ---- as a view of the event log, and as what the coordinator awaits after each step ----------------------------
    def see(self, event: Event, *, live: bool) -> None:
        if self._keep:
            self.events.append(event)
        if isinstance(event, StepEnded) and not event.void and self._last is not None:
            self.batches.append((event.train_step, tuple(lease.uid for lease in self._last.batch.leases)))
        if self._watch is not None:
            try:
                self._watch(self, event)
            except Exception as error:
                self._watch_error = self._watch_error or error
                raise

    def close(self) -> None:
        pass

    def take_popped(self, popped: Popped) -> None:
        self._last = popped
        if self._keep:
            self.popped.append(popped)

    async def after_step(self, version: int) -> None:
        every = self.scenario.checkpoint_every
        if every and version % every == 0:
            await self.save(version)

    async def save(self, version: int, *, groups: bool = True) -> None:
        """One checkpoint, as the launcher's: through the bytes of its files."""
        trained = {n: g for n, g in self.groups.items() if isinstance(g, TrainGroup)} if groups else {}
        state = getattr(self.algorithm, "state", None)
        live = self.gate.ledger.live
        ready = [e for uid, e in self.gate.payloads.items() if uid in live] if self.scenario.payloads else []
        manifest = Manifest(
            format=FORMAT,
            algorithm=type(self.algorithm).__name__,
            train_step=version,
            publish_count=self.coordinator.publish_count,
            optimizer_steps={name: group.optimizer_steps for name, group in trained.items()},
            groups=tuple(trained),
            events_offset=len(self.events),
            metrics_offset=0,
            state=None if state is None else pack(state),
            ledger=self.gate.ledger.snapshot(),
            payload_count=len(ready),
            fixed={},
        )
        payloads, batches = msgspec.msgpack.encode(ready), tuple(self.batches)
        files: dict[str, Mapping[str, bytes]] = {}
        for name, group in trained.items():
            with tempfile.TemporaryDirectory() as directory:
                await group.save(Path(directory))
                files[name] = {path.name: path.read_bytes() for path in Path(directory).iterdir()}
        if self.crashed:
            return
        self.saved = Saved(manifest=msgspec.json.encode(manifest), payloads=payloads, files=files, batches=batches)
        self.log.emit(Checkpointed(train_step=version, path="memory", seconds=0.0))


class _RecordingGate(Gate):
    """Tells the run what it popped."""

    on_popped: Callable[[Popped], None]

    async def pop(self) -> Popped | None:
        popped = await super().pop()
        if popped is not None:
            self.on_popped(popped)
        return popped


async def build_run(
    algorithm: type[A],
    scenario: Scenario,
    *,
    resume: Saved | None = None,
    watch: Watch | None = None,
    keep: bool = True,
    **settings: Any,
) -> Run[A]:
    """Compose a run on the running event loop, as the launcher does. `settings` are further fields of the algorithm.

    `resume`: go on from the checkpoint of another run. `watch(run, event)` is called after every event. `keep` False:
    keep neither events nor batches, for long runs.
    """
    run: Run[A] = Run(scenario, watch, keep)
    loop = asyncio.get_running_loop()
    run.log = EventLog(None, loop.time)
    run.log.subscribe(run)
    run.runtime = FakeRuntime(scenario.timing, scenario.faults, zombies=scenario.zombies)
    run.runtime.launched_at = None
    run.rows = FakeRows(scenario.rows, epochs=scenario.epochs, unusable=scenario.unusable, seed=scenario.seed)
    run.scorer = FakeReward(seed=scenario.seed, timing=scenario.timing.seed, **scenario.reward)
    hints = typing.get_type_hints(algorithm)
    experience = _experience_type(algorithm, hints)
    manifest, payloads = _loaded(resume, experience)
    ledger = _ledger(scenario, run.rows, manifest, payloads)
    run.gate = _RecordingGate(
        ledger,
        run.rows,
        run.log.emit,
        lease_timeout=scenario.lease_timeout,
        wait_timeout=scenario.wait_timeout,
    )
    run.gate.on_popped = run.take_popped
    run.gate.payloads.update({e.prompt.uid: e for e in payloads if e.prompt.uid in ledger.live})
    _build_groups(run, algorithm, hints)
    trained = [group for group in run.groups.values() if isinstance(group, TrainGroup)]
    followers = [group for group in run.groups.values() if isinstance(group, RolloutGroup)]
    run.coordinator = Coordinator(
        run.gate,
        trained,
        followers,
        run.log,
        mode=scenario.publish_mode,
        timeout=scenario.publish_timeout,
        evaluator=_evaluator(run),
        after_step=run.after_step,
    )
    fields: dict[str, Any] = {**settings, **run.groups}
    for name, hint in hints.items():
        origin = typing.get_origin(hint) or hint
        if origin is StageQueue:
            fields[name] = StageQueue(scenario.capacity, typing.get_args(hint)[0], run.gate, name=name)
        elif origin is ExperienceQueue:
            fields[name] = ExperienceQueue(experience, run.gate, run.log.emit)
        elif origin is PromptSource:
            fields[name] = PromptSource(run.gate)
        elif origin is Coordinator:
            fields[name] = run.coordinator
    run.algorithm = algorithm(**fields)
    await _start(run, trained, manifest, resume)
    return run


def simulate(
    algorithm: type[A],
    scenario: Scenario,
    *,
    resume: Saved | None = None,
    watch: Watch | None = None,
    keep: bool = True,
    **settings: Any,
) -> Run[A]:
    """Run an algorithm on fakes to its end, in no time, and give the run to look at.

    >>> from algorithms.grpo import GRPO
    >>> from asyncrlhf.testing import Scenario, simulate
    >>> run = simulate(GRPO, Scenario(prompts_per_step=4, max_staleness=2, train_steps=3, rows=100))
    >>> run.reason, run.ledger.version
    ('train_steps', 3)
    >>> [len(uids) for _, uids in run.batches]
    [4, 4, 4]
    >>> lags = [step - segment.version for step, popped in enumerate(run.popped)
    ...         for e in popped.experiences for sample in e.rollout.samples for segment in sample.segments]
    >>> max(lags) <= 2
    True

    Raises Deadlock when everybody waits for everybody.
    """

    async def main() -> Run[A]:
        run = await build_run(algorithm, scenario, resume=resume, watch=watch, keep=keep, **settings)
        await run.main()
        return run

    return run_virtual(main())


def _experience_type(algorithm: type[Algorithm], hints: Mapping[str, Any]) -> type[Experience]:
    for hint in hints.values():
        if typing.get_origin(hint) is ExperienceQueue:
            return typing.get_args(hint)[0]
    raise TypeError(f"{algorithm.__name__} has no field of type ExperienceQueue[...]")


def _loaded(resume: Saved | None, kind: type[Experience]) -> tuple[Manifest | None, list[Experience]]:
    if resume is None:
        return None, []
    raw = msgspec.msgpack.decode(resume.payloads, type=list[msgspec.Raw])
    payloads = [msgspec.msgpack.decode(item, type=kind) for item in raw]
    return msgspec.json.decode(resume.manifest, type=Manifest), payloads


def _ledger(scenario: Scenario, rows: FakeRows, manifest: Manifest | None, payloads: Sequence[Experience]) -> Ledger:
    count = rows.count if scenario.counted else None
    if manifest is None:
        return Ledger(scenario.rules(), count)
    ledger = Ledger.restore(scenario.rules(), manifest.ledger, {e.prompt.uid for e in payloads})
    ledger.data_count = count
    return ledger


def _build_groups(run: Run[Any], algorithm: type[Algorithm], hints: Mapping[str, Any]) -> None:
    scenario, log, runtime = run.scenario, run.log, run.runtime

    def spec(group: str, engine: str, options: msgspec.Struct, rank: int = 0) -> EngineSpec:
        return EngineSpec(group=group, rank=rank, engine=f"asyncrlhf.testing.{engine}", options=options)

    for item in dataclasses.fields(cast(Any, algorithm)):
        kinds = [k for k in typing.get_args(hints[item.name]) or (hints[item.name],) if k is not type(None)]
        kind = kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) else None
        optional = item.default is not dataclasses.MISSING and item.name not in scenario.optional
        if kind not in GROUP_ROLES or optional:
            continue
        if issubclass(kind, TrainGroup):
            assert kind in (PolicyGroup, CriticGroup)
            options = msgspec.structs.replace(scenario.trainer, seed=scenario.seed + (kind is CriticGroup))
            run.groups[item.name] = kind(item.name, log, runtime, spec(item.name, "trainer:FakeTrainer", options))
        elif kind is ReferenceGroup:
            options = scenario.trainer
            run.groups[item.name] = kind(item.name, log, runtime, spec(item.name, "trainer:FakeScorer", options))
        elif kind is RewardGroup:
            run.groups[item.name] = kind(item.name, log, run.scorer)
        elif kind is RolloutGroup:
            ranks = range(scenario.replicas)
            specs = [spec(item.name, "sampler:FakeSampler", scenario.sampler, rank) for rank in ranks]
            run.groups[item.name] = _rollout_group(run, item.name, specs)


def _rollout_group(run: Run[Any], name: str, specs: Sequence[EngineSpec]) -> RolloutGroup:
    scenario = run.scenario
    answers, least = scenario.answers_per_prompt, scenario.min_answers
    sampling = Sampling(
        answers_per_prompt=answers,
        min_answers=answers if least is None else least,
        max_tokens=scenario.max_tokens,
        temperature=1.0,
        stop_token_ids=(0,),
        seed=scenario.seed,
    )
    return RolloutGroup(
        name,
        run.log,
        run.runtime,
        specs,
        sampling,
        run.gate,
        kv=scenario.kv,
        max_restarts=scenario.max_restarts,
        reply_timeout=scenario.publish_timeout,
    )


def _evaluator(run: Run[Any]) -> Evaluator | None:
    scenario = run.scenario
    if not scenario.evaluation_every:
        return None
    rollout = next(group for group in run.groups.values() if isinstance(group, RolloutGroup))
    reward = next(group for group in run.groups.values() if isinstance(group, RewardGroup))
    held_out = FakeRows(None, seed=scenario.seed)
    prompts = [
        msgspec.structs.replace(held_out.prompt(uid, 1, 0), uid=-1 - uid) for uid in range(scenario.evaluation_prompts)
    ]
    return Evaluator(
        rollout,
        reward,
        prompts,
        run.log,
        every=scenario.evaluation_every,
        temperature=0.0,
        max_hold=scenario.evaluation_max_hold,
    )


async def _start(run: Run[Any], trained: Sequence[TrainGroup], manifest: Manifest | None, resume: Saved | None) -> None:
    """Spawn the engines, load what was saved, and take the first checkpoint."""
    scenario = run.scenario
    run.log.emit(
        RunStarted(
            resumed_from=None if manifest is None else manifest.train_step,
            algorithm=type(run.algorithm).__name__,
            seed=scenario.seed,
            max_staleness=scenario.max_staleness,
            lookahead=scenario.ahead,
            prompts_per_step=scenario.prompts_per_step,
            answers_per_prompt=scenario.answers_per_prompt,
            train_steps=scenario.train_steps,
            groups={name: GroupShape(name, 1) for name in run.groups},
        )
    )
    async with asyncio.TaskGroup() as tasks:
        for group in run.groups.values():
            if isinstance(group, TrainGroup | RolloutGroup | ReferenceGroup):
                tasks.create_task(group.start())
    if manifest is None or resume is None:
        await run.save(0, groups=False)
        return
    run.batches = list(resume.batches)
    run.saved = resume
    run.coordinator.publish_count = manifest.publish_count
    for group in trained:
        group.optimizer_steps = manifest.optimizer_steps.get(group.name, 0)
        if group.name in resume.files:
            with tempfile.TemporaryDirectory() as directory:
                for name, content in resume.files[group.name].items():
                    (Path(directory) / name).write_bytes(content)
                await group.load(Path(directory))
    if manifest.state is not None:
        cast(Any, run.algorithm).state = unpack(manifest.state)
