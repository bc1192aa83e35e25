"""From validated tables to engines and groups: runtime, places, engine specifications."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from asyncrlhf.abc import EngineSpec, Needs, Place, Runtime
from asyncrlhf.backends.megatron.options import MegatronOptions
from asyncrlhf.backends.rules import RuleOptions
from asyncrlhf.backends.torch.options import SamplerOptions, ScorerOptions, ShadowOptions, TrainerOptions
from asyncrlhf.backends.vllm.options import VllmOptions
from asyncrlhf.config.convert import convert
from asyncrlhf.config.groups import (
    Compute,
    Frozen,
    MegatronFrozen,
    MegatronReward,
    MegatronTrain,
    RolloutTable,
    Rules,
    TorchReward,
    TorchRollout,
    TorchShadow,
    TorchTrain,
    Trained,
    VllmRollout,
)
from asyncrlhf.config.schema import Config, Data
from asyncrlhf.control.rundir import LOGS
from asyncrlhf.data.source import open_dataset
from asyncrlhf.errors import ConfigError, DataError, SampleError
from asyncrlhf.flow.gate import Gate
from asyncrlhf.flow.ledger import LedgerRules
from asyncrlhf.groups import (
    CriticGroup,
    Group,
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
from asyncrlhf.groups.scorers import ModelScorer, RuleScorer
from asyncrlhf.messages import ParallelLayout, Rollout
from asyncrlhf.models import Models
from asyncrlhf.observe import EventLog
from asyncrlhf.pools import beside, needs, pinned_to_gpus, sleepers, visible_gpus
from asyncrlhf.runtimes.feasible import Ask
from asyncrlhf.wiring import Wiring

__all__ = ("build_groups", "ledger_rules", "make_runtime", "places", "starters")

TRAINER = "asyncrlhf.backends.torch.train:TorchTrainer"
MEGATRON = "asyncrlhf.backends.megatron.train:MegatronTrainer"
MEGATRON_SCORER = "asyncrlhf.backends.megatron.score:MegatronScorer"
SAMPLER = "asyncrlhf.backends.torch.sample:TorchSampler"
VLLM = "asyncrlhf.backends.vllm.engine:VllmSampler"
SHADOW = "asyncrlhf.backends.torch.shadow:TorchShadow"
SCORER = "asyncrlhf.backends.torch.score:TorchScorer"
RULES = "asyncrlhf.backends.rules:RuleEngine"
ENGINES = {
    TorchTrain: TRAINER,
    MegatronTrain: MEGATRON,
    MegatronFrozen: MEGATRON_SCORER,
    TorchRollout: SAMPLER,
    VllmRollout: VLLM,
    TorchShadow: SHADOW,
}
"""Table -> the engines it describes; others score."""
TRANSPORTS = {
    "shared": "asyncrlhf.weights.shared:SharedMemoryTransfer",
    "collective": "asyncrlhf.weights.collective:CollectiveTransfer",
    "objects": "asyncrlhf.weights.objects:ObjectTransfer",
}
"""publish.transport -> its WeightTransfer; "auto" leaves it to the runtime."""
SILENCE = 1.0
"""Seconds beyond a reward function's own time-out after which its engine is asked for a sign of life."""
DEFAULT_PROMPT_TOKENS = 1024

Options = TypeVar("Options", bound=msgspec.Struct)


def ledger_rules(config: Config) -> LedgerRules:
    """The staleness contract's knobs."""
    return LedgerRules(
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


def make_runtime(config: Config, run_dir: Path, pools: Sequence[Ask] = ()) -> Runtime:
    """The runtime that the configuration names; nothing is started yet. `pools`: what they ask a cluster for. Raises
    ConfigError if it is not installed."""
    if config.runtime == "ray":
        try:
            from asyncrlhf.runtimes.ray import RayRuntime
        except ImportError as error:
            raise ConfigError(f'runtime = "ray": {error}; pip install "asyncrlhf[ray]"') from error

        return RayRuntime(
            run_dir / LOGS,
            address=config.ray.address,
            pools=pools,
            patience=config.ray.patience,
            inline_bytes=config.ray.inline_bytes,
        )
    if config.runtime == "inproc":
        from asyncrlhf.runtimes.inproc import InprocRuntime

        return InprocRuntime()
    from asyncrlhf.runtimes.local import LocalRuntime

    return LocalRuntime(run_dir / LOGS)


def places(config: Config, wiring: Wiring) -> dict[str, tuple[Place, ...]]:
    """Every engine of every group, where it will live. In processes of their own, on CPUs, and if there are no more of
    them than cores, engines with a model get a core each unless their tables say which. Raises ConfigError for a pool
    that is not there."""
    models = {name: table for name, table in wiring.engines.items() if isinstance(table, Compute)}
    hosts = beside(config, wiring)
    asked = {name: needs(config, wiring, name, shares=name in hosts) for name in wiring.engines}
    count = sum(_engines(table) * _processes(table) * table.threads for table in models.values())
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    pinned = (
        config.runtime == "local" and count <= len(cores) and not any(_on_gpu(t, asked[n]) for n, t in models.items())
    )
    named = {
        table.core + rank for table in models.values() if table.core is not None for rank in range(_engines(table))
    }
    start = os.getpid() % max(1, len(cores)) if len(cores) > count else 0  # another run may have begun elsewhere
    free = [core for core in (*cores[start:], *cores[:start]) if core not in named]
    found: dict[str, tuple[Place, ...]] = {}
    for name in wiring.engines:
        table = models.get(name)
        if table is None:
            found[name] = (Place(group=name, rank=0, engine=RULES, needs=asked[name]),)
            continue
        engine = next((path for kind, path in ENGINES.items() if isinstance(table, kind)), SCORER)
        found[name] = tuple(
            Place(
                group=name,
                rank=rank,
                engine=engine,
                threads=table.threads,
                core=table.core + rank
                if table.core is not None
                else free.pop(0)
                if free and pinned and table.threads == _processes(table) == 1
                else None,
                needs=asked[name],
                beside=hosts[name][rank] if name in hosts else None,
            )
            for rank in range(_engines(table))
        )
    return pinned_to_gpus(config, wiring, found)


def build_groups(
    config: Config, wiring: Wiring, models: Models, runtime: Runtime, gate: Gate, log: EventLog
) -> dict[str, Group]:
    """The groups by field name, and the judges, not yet started. Raises ConfigError or DataError."""
    rollouts = [wiring.tables[name] for name in wiring.of_role("rollout")]
    sampled = next((table for table in rollouts if isinstance(table, RolloutTable)), None)
    temperature = sampled.temperature if sampled else 1.0
    where = places(config, wiring)
    hosts = {p.beside.group for group in where.values() for p in group if p.beside is not None and p.beside.takes}
    sleep, patience = sleepers(config, wiring), config.limits.stall_timeout
    groups: dict[str, Group] = {}
    for name, table in wiring.engines.items():
        role, key = wiring.role(name), wiring.key(name)
        if isinstance(table, Trained):
            kind = PolicyGroup if role == "policy" else CriticGroup
            options = _options(
                MegatronOptions if isinstance(table, MegatronTrain) else TrainerOptions,
                key,
                table,
                model=models.directories[name],
                temperature=temperature,
                optimizer={**msgspec.to_builtins(table.optimizer), "total_steps": config.train_steps or 0},
                max_response_tokens=sampled.max_tokens if sampled else 0,
                off_policy=config.off_policy,
                off_policy_cap=config.off_policy_cap,
                transport=_transport(config, runtime),
                **({"put_replicas": name in hosts} if isinstance(table, MegatronTrain) else {}),
            )
            groups[name] = kind(
                name,
                log,
                runtime,
                [_spec(place, options) for place in where[name]],
                layout=_layout(table),
                needs_proximal=role == "policy" and config.off_policy != "none",
                gap_alarm=config.limits.logprob_gap,
                call_timeout=patience,
            )
        elif isinstance(table, RolloutTable):
            groups[name] = _rollout_group(
                config, name, table, where[name], models, runtime, gate, log, sleeps=name in sleep
            )
        elif isinstance(table, TorchShadow):
            options = _options(
                ShadowOptions,
                key,
                table,
                model=models.directories[name],
                temperature=temperature,
                head=table.head,
                transport=_transport(config, runtime),
            )
            groups[name] = ShadowGroup(
                name,
                log,
                runtime,
                [_spec(place, options) for place in where[name]],
                follows=table.follows,
                max_restarts=table.max_restarts,
                reply_timeout=patience / 2,
                start_timeout=patience,
            )
        elif isinstance(table, Frozen):
            options = _options(
                MegatronOptions if isinstance(table, MegatronFrozen) else ScorerOptions,
                key,
                table,
                model=models.directories[name],
                temperature=temperature,
                head=cast(Any, table).head,
            )
            frozen = FrozenEngine(
                log,
                runtime,
                *(_spec(place, options) for place in where[name]),
                layout=_layout(table),
                call_timeout=patience / 2,
                max_restarts=table.max_restarts,
            )
            if isinstance(table, TorchReward | MegatronReward):
                answers, warning = _calibration(config, key, table, models)
                groups[name] = RewardGroup(name, log, ModelScorer(frozen, answers, warning=warning))
            else:
                groups[name] = ReferenceGroup(name, log, frozen)
        elif isinstance(table, Rules):
            options = _options(RuleOptions, key, table, where=key)
            frozen = FrozenEngine(log, runtime, _spec(where[name][0], options), max_restarts=table.max_restarts)
            groups[name] = RewardGroup(name, log, RuleScorer(frozen, models.decode, silence=table.timeout + SILENCE))
    for group in groups.values():
        if isinstance(group, ShadowGroup) and isinstance(critic := groups[group.follows], CriticGroup):
            critic.shadow = group
    return groups


def _transport(config: Config, runtime: Runtime) -> str:
    """The WeightTransfer of whoever publishes or follows."""
    return TRANSPORTS.get(config.publish.transport, runtime.transport)


def _engines(table: Compute) -> int:
    """Replicas, or ranks."""
    if isinstance(table, RolloutTable | TorchShadow):
        return table.replicas
    return table.ranks


def _layout(table: Compute) -> ParallelLayout:
    return ParallelLayout(**{key.removesuffix("_parallel"): size for key, size in table.sizes.items()})


def _processes(table: Compute) -> int:
    """Processes of one engine."""
    return table.tensor_parallel if isinstance(table, VllmRollout) else 1


def _spec(place: Place, options: msgspec.Struct) -> EngineSpec:
    if isinstance(options, VllmOptions) and place.beside is not None:
        options = msgspec.structs.replace(options, beside=place.beside.takes)
    return EngineSpec(**msgspec.structs.asdict(place), options=options)


def _on_gpu(table: Compute, asked: Needs | None) -> bool:
    """Whether it may compute on a GPU: asking torch would load it."""
    if asked is not None:
        return asked.devices > 0
    return table.device.startswith("cuda") or (table.device == "auto" and bool(visible_gpus()))


def starters(groups: dict[str, Group]) -> list[Callable[[], Any]]:
    """The `start` of every group that has engines."""
    kinds = TrainGroup | Follower | ReferenceGroup | RewardGroup
    return [group.start for group in groups.values() if isinstance(group, kinds)]


def _rollout_group(
    config: Config,
    name: str,
    table: RolloutTable,
    where: Sequence[Place],
    models: Models,
    runtime: Runtime,
    gate: Gate,
    log: EventLog,
    *,
    sleeps: bool,
) -> RolloutGroup:
    """`sleeps`: its engines take turns with those of other groups on their devices."""
    stops = [*models.stop_token_ids]
    for text in table.stop:
        ids = models.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(f"groups.{name}.stop: {text!r} is {len(ids)} tokens for this model; it must be 1")
        stops += ids
    longest = table.max_sequence_tokens
    if models.longest is not None and table.max_tokens >= models.longest:
        raise ConfigError(
            f"groups.{name}.max_tokens = {table.max_tokens} leaves no room for a prompt: the model's "
            f"max_position_embeddings = {models.longest}; lower the first"
        )
    if longest is None:
        prompt = config.data.max_prompt_tokens or DEFAULT_PROMPT_TOKENS
        longest = min(models.longest or prompt + table.max_tokens, prompt + table.max_tokens)
    if models.longest is not None and longest > models.longest:
        raise ConfigError(
            f"groups.{name}.max_sequence_tokens = {longest}, and the model's max_position_embeddings = "
            f"{models.longest}; lower the first"
        )
    options = _options(
        VllmOptions if isinstance(table, VllmRollout) else SamplerOptions,
        f"groups.{name}",
        table,
        model=models.directories[name],
        slots=table.concurrency,
        max_sequence_tokens=longest,
        transport=_transport(config, runtime),
        **({"sleeps": sleeps} if isinstance(table, VllmRollout) else {}),
    )
    specs = [_spec(place, options) for place in where]
    least = config.limits.min_answers
    sampling = Sampling(
        answers_per_prompt=config.answers_per_prompt,
        min_answers=config.answers_per_prompt if least is None else least,
        max_tokens=table.max_tokens,
        temperature=table.temperature,
        stop_token_ids=tuple(dict.fromkeys(stops)),
        seed=config.seed,
    )
    return RolloutGroup(
        name,
        log,
        runtime,
        specs,
        sampling,
        gate,
        follows=table.follows,
        kv=config.publish.kv,
        max_restarts=table.max_restarts,
        reply_timeout=config.publish.timeout,
        start_timeout=config.limits.stall_timeout,
    )


def _calibration(
    config: Config, key: str, table: TorchReward | MegatronReward, models: Models
) -> tuple[list[Rollout], str]:
    """The answers that a reward model's scores are measured against, their prompts as in training; and a warning about
    rows that had to be left out, or "". Raises ConfigError or DataError."""
    wanted = table.calibrate
    if wanted is None:
        return [], ""
    data = Data(
        path=wanted.path,
        source=wanted.source,
        options=wanted.options,
        prompt=wanted.prompt,
        ground_truth="",
        chat=config.data.chat,
        response=wanted.response,
        epochs=1,
        shuffle=False,
    )
    where = f"{key}.calibrate"
    stream = models.stream(open_dataset(data, config.seed, where), data)
    rollouts: list[Rollout] = []
    problems: list[SampleError] = []
    for uid in itertools.takewhile(stream.has, range(wanted.rows)):
        try:
            rollouts.append(Rollout.from_data(stream.prompt(uid, 1, 0)))
        except SampleError as error:
            problems.append(error)
    left_out = f"{len(problems)} rows were left out, the first for: {problems[0]}" if problems else ""
    if len(rollouts) < 2:
        raise DataError(
            f"{where}: {len(rollouts)} rows have no deviation; give 2 or more{left_out and f' ({left_out})'}"
        )
    return rollouts, left_out and f"{where}: {left_out}"


def _options(kind: type[Options], key: str, table: msgspec.Struct, **more: Any) -> Options:
    """Options of an engine whose table lies at `key`, with their bounds checked: the keys that the table shares with
    them, and `more`. Raises ConfigError."""
    shared = {key: value for key, value in msgspec.to_builtins(table).items() if key in kind.__struct_fields__}
    return convert({**shared, **more}, kind, key)
