"""A whole run on fakes: the real gate, queues, groups and coordinator round an Algorithm, under a virtual clock.

`simulate` runs to the end; `build_run` gives the parts to whoever wants to look at them on the way.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from asyncrlhf.abc import EngineSpec
from asyncrlhf.algorithm import Algorithm, state_numbers
from asyncrlhf.control.checkpoint import Manifest
from asyncrlhf.control.coordinator import Coordinator
from asyncrlhf.control.evaluation import Evaluator
from asyncrlhf.control.turns import take_turns
from asyncrlhf.flow.experience import ExperienceQueue
from asyncrlhf.flow.ledger import Ledger
from asyncrlhf.flow.prompts import PromptSource, StageQueue
from asyncrlhf.groups import (
    CriticGroup,
    PolicyGroup,
    ReferenceGroup,
    RewardGroup,
    RolloutGroup,
    ShadowGroup,
    TrainGroup,
)
from asyncrlhf.groups.follower import Follower
from asyncrlhf.groups.frozen import FrozenEngine
from asyncrlhf.groups.rollout import Sampling
from asyncrlhf.groups.scorers import ModelScorer
from asyncrlhf.messages import Experience, unpack
from asyncrlhf.observe import EventLog, GroupShape, RunStarted
from asyncrlhf.testing.clock import run_virtual
from asyncrlhf.testing.run import RecordingGate, Run, Saved, Watch
from asyncrlhf.testing.runtime import FakeRuntime
from asyncrlhf.testing.scenario import Scenario
from asyncrlhf.testing.sources import FakeReward, FakeRows
from asyncrlhf.wiring import GROUP_ROLES

__all__ = ("Run", "Saved", "Scenario", "build_run", "simulate")

A = typing.TypeVar("A", bound=Algorithm)


async def build_run(
    algorithm: type[A],
    scenario: Scenario,
    *,
    resume: Saved | None = None,
    watch: Watch | None = None,
    keep: bool = True,
    log: EventLog | None = None,
    **settings: Any,
) -> Run[A]:
    """Compose a run on the running event loop, as the launcher does. `settings` are further fields of the algorithm.

    `resume`: go on from the checkpoint of another run. `watch(run, event)` is called after every event. `keep` False:
    keep neither events nor batches, for long runs. `log`: one with views of its own, on the loop's clock; None: no
    files.
    """
    run: Run[A] = Run(scenario, watch, keep)
    loop = asyncio.get_running_loop()
    run.log = EventLog(None, loop.time) if log is None else log
    run.log.subscribe(run)
    run.runtime = FakeRuntime(scenario.timing, scenario.faults, zombies=scenario.zombies)
    run.runtime.launched_at = None
    run.rows = FakeRows(scenario.rows, epochs=scenario.epochs, unusable=scenario.unusable, seed=scenario.seed)
    run.scorer = FakeReward(seed=scenario.seed, timing=scenario.timing.seed, **scenario.reward)
    hints = typing.get_type_hints(algorithm)
    experience = _experience_type(algorithm, hints)
    manifest, payloads = _loaded(resume, experience)
    ledger = _ledger(scenario, run.rows, manifest, payloads)
    run.gate = RecordingGate(
        ledger,
        run.rows,
        run.log.emit,
        lease_timeout=scenario.lease_timeout,
        wait_timeout=scenario.wait_timeout,
    )
    run.gate.on_popped = run.take_popped
    run.gate.payloads.update({e.prompt.uid: e for e in payloads if e.prompt.uid in ledger.live})
    _build_groups(run, algorithm, hints)
    sets = {f"set {number}": members for number, members in enumerate(scenario.together)}
    run.turns = take_turns(sets, run.groups, run.gate, run.log, offload=scenario.offload)
    trained = [group for group in run.groups.values() if isinstance(group, TrainGroup)]
    followers = [group for group in run.groups.values() if isinstance(group, Follower)]
    names = [{group.name for group in kind} for kind in (trained, followers)]
    in_turn = any(all(kind.intersection(dict(members)) for kind in names) for members in scenario.together)
    followers.sort(key=lambda follower: isinstance(follower, RolloutGroup))
    run.coordinator = Coordinator(
        run.gate,
        trained,
        followers,
        run.log,
        mode=scenario.publish_mode,
        rolling=scenario.publish_rolling,
        overlap=scenario.publish_overlap and not in_turn,
        timeout=scenario.publish_timeout,
        probe_gap=scenario.probe_gap,
        evaluator=_evaluator(run),
        after_step=run.after_step,
        state=lambda: state_numbers(run.algorithm.state),
    )
    fields: dict[str, Any] = {**settings, **{n: g for n, g in run.groups.items() if not isinstance(g, ShadowGroup)}}
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

    def frozen(group: str) -> FrozenEngine:
        engine = spec(group, "trainer:FakeScorer", scenario.trainer)
        patience = scenario.stall_timeout / 2
        return FrozenEngine(log, runtime, engine, call_timeout=patience, max_restarts=scenario.max_restarts)

    fields = dataclasses.fields(cast(Any, algorithm))
    policy = next((item.name for item in fields if hints[item.name] is PolicyGroup), "policy")
    for item in fields:
        kinds = [k for k in typing.get_args(hints[item.name]) or (hints[item.name],) if k in GROUP_ROLES]
        optional = item.default is not dataclasses.MISSING and item.name not in scenario.optional
        if not kinds or optional:
            continue
        kind: Any = kinds[0]
        if issubclass(kind, TrainGroup):
            assert kind in (PolicyGroup, CriticGroup)
            options = msgspec.structs.replace(scenario.trainer, seed=scenario.seed + (kind is CriticGroup))
            engine = spec(item.name, "trainer:FakeTrainer", options)
            run.groups[item.name] = kind(item.name, log, runtime, [engine], call_timeout=scenario.stall_timeout)
        elif kind is ReferenceGroup:
            run.groups[item.name] = kind(item.name, log, frozen(item.name))
        elif kind is RewardGroup:
            scorer = ModelScorer(frozen(item.name)) if scenario.reward_model else run.scorer
            run.groups[item.name] = kind(item.name, log, scorer)
        elif kind is RolloutGroup:
            ranks = range(scenario.replicas)
            specs = [spec(item.name, "sampler:FakeSampler", scenario.sampler, rank) for rank in ranks]
            run.groups[item.name] = _rollout_group(run, item.name, specs, policy)
    critics = [group for group in run.groups.values() if isinstance(group, CriticGroup)]
    if scenario.shadows:
        specs = [spec("shadow_critic", "shadow:FakeShadow", scenario.trainer, rank) for rank in range(scenario.shadows)]
        shadow = ShadowGroup("shadow_critic", log, runtime, specs, follows=critics[0].name)
        run.groups[shadow.name] = critics[0].shadow = shadow


def _rollout_group(run: Run[Any], name: str, specs: Sequence[EngineSpec], follows: str) -> RolloutGroup:
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
        follows=follows,
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
            if isinstance(group, TrainGroup | Follower | ReferenceGroup | RewardGroup):
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
        run.algorithm.state = unpack(manifest.state)
