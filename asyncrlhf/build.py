"""From validated tables to engines and groups: runtime, models, tokenizer, engine specifications."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from asyncrlhf.abc import EngineSpec, Place, Runtime
from asyncrlhf.backends.rules import RuleOptions
from asyncrlhf.backends.torch.options import SamplerOptions, ScorerOptions, TrainerOptions
from asyncrlhf.config.convert import convert
from asyncrlhf.config.groups import Compute, Rules, TorchReward, TorchRollout, TorchScore, TorchTrain
from asyncrlhf.config.load import import_named
from asyncrlhf.config.schema import Config
from asyncrlhf.control.checkpoint import flush_tree
from asyncrlhf.control.rundir import LOGS
from asyncrlhf.errors import ConfigError
from asyncrlhf.flow.gate import Gate
from asyncrlhf.flow.ledger import LedgerRules
from asyncrlhf.groups import CriticGroup, Group, PolicyGroup, ReferenceGroup, RewardGroup, RolloutGroup, TrainGroup
from asyncrlhf.groups.frozen import FrozenEngine
from asyncrlhf.groups.rollout import Sampling
from asyncrlhf.groups.scorers import ModelScorer, RuleScorer
from asyncrlhf.observe import EventLog
from asyncrlhf.wiring import Wiring

__all__ = ("Models", "build_groups", "ledger_rules", "make_runtime", "places", "starters")

TRAINER = "asyncrlhf.backends.torch.train:TorchTrainer"
SAMPLER = "asyncrlhf.backends.torch.sample:TorchSampler"
SCORER = "asyncrlhf.backends.torch.score:TorchScorer"
RULES = "asyncrlhf.backends.rules:RuleEngine"
SILENCE = 1.0
"""Seconds beyond a reward function's own time-out after which its engine is asked for a sign of life."""
DEFAULT_PROMPT_TOKENS = 1024

Options = TypeVar("Options", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class Models:
    """Where each group's model lies before training, and the tokenizer they share."""

    directories: dict[str, str]
    tokenizer: Any
    eos: int | None
    stop_token_ids: tuple[int, ...]
    longest: int | None
    """Tokens a sequence may have, from the model's configuration."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer, without special tokens and without the token that stopped it."""
        stopped = token_ids and token_ids[-1] in self.stop_token_ids
        return self.tokenizer.decode(token_ids[:-1] if stopped else token_ids, skip_special_tokens=True)

    @classmethod
    def require(cls, wiring: Wiring, to_come: Sequence[Path] = ()) -> None:
        """Raises ConfigError for a model directory that is not there, unless it lies below a run directory `to_come`;
        writes nothing."""
        below = [directory.resolve() for directory in to_come]
        for name, table in wiring.tables.items():
            model = getattr(table, "model", None)
            if model is not None and not any(directory in Path(model).resolve().parents for directory in below):
                _require_model(f"groups.{name}.model", model)

    @staticmethod
    def require_devices(wiring: Wiring) -> None:
        """Raises ConfigError for a GPU that is not there. Loads torch if one is named."""
        for name, table in wiring.tables.items():
            device: str = getattr(table, "device", "cpu")
            if device.startswith("cuda"):
                from asyncrlhf.backends.torch.model import pick_device

                _under(f'groups.{name}.device = "{device}"', pick_device, device)

    @classmethod
    def prepare(cls, config: Config, wiring: Wiring, run_dir: Path, *, anew: bool) -> Models:
        """Find every directory, write models that start from scratch (`anew`: again), load the tokenizer. Raises
        ConfigError, also for an architecture that the engines do not serve."""
        from asyncrlhf.backends.torch.model import read_config

        directories: dict[str, str] = {}
        for name in wiring.of_role("policy", "critic"):
            directories[name] = _trained_directory(config, name, wiring.tables[name], run_dir, anew=anew)
        first = directories[wiring.of_role("policy", "critic")[0]]
        for name, table in wiring.tables.items():
            if isinstance(table, TorchRollout | TorchScore | TorchReward):
                directories[name] = table.model or directories.get(getattr(table, "follows", ""), first)
        for name, directory in directories.items():
            _under(f"groups.{name}", read_config, directory, getattr(wiring.tables[name], "head", "lm"))
        tokenizer, shape = _tokenizer(first), json.loads((Path(first) / "config.json").read_bytes())
        for name in wiring.of_role("critic", "reference", "reward"):
            other = directories.get(name, first)
            if other != first and _tokenizer(other).get_vocab() != tokenizer.get_vocab():
                raise ConfigError(
                    f"groups.{name}.model = {other!r} has another vocabulary than {first!r}, and is given token ids of "
                    "the latter; use models that share a tokenizer"
                )
        return cls(
            directories=directories,
            tokenizer=tokenizer,
            eos=tokenizer.eos_token_id,
            stop_token_ids=_stop_tokens(Path(first), tokenizer),
            longest=shape.get("max_position_embeddings"),
        )


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


def make_runtime(config: Config, run_dir: Path) -> Runtime:
    """The runtime that the configuration names; nothing is started yet."""
    if config.runtime == "inproc":
        from asyncrlhf.runtimes.inproc import InprocRuntime

        return InprocRuntime()
    from asyncrlhf.runtimes.local import LocalRuntime

    return LocalRuntime(run_dir / LOGS)


def places(config: Config, wiring: Wiring) -> dict[str, tuple[Place, ...]]:
    """Every engine of every group, where it will live. In processes of their own, on CPUs, and if there are no more
    of them than cores, engines with a model get a core each unless their tables say which."""
    models = {name: table for name, table in wiring.tables.items() if isinstance(table, Compute)}
    count = sum(getattr(table, "replicas", 1) * table.threads for table in models.values())
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    pinned = config.runtime == "local" and count <= len(cores) and not any(_on_gpu(t) for t in models.values())
    free = [core for core in cores if core not in {table.core for table in models.values()}]
    found: dict[str, tuple[Place, ...]] = {}
    for name, role in wiring.roles.items():
        table = models.get(name)
        if table is None:
            found[name] = (Place(group=name, rank=0, engine=RULES),)
            continue
        engine = {"rollout": SAMPLER, "reference": SCORER, "reward": SCORER}.get(role, TRAINER)
        found[name] = tuple(
            Place(
                group=name,
                rank=rank,
                engine=engine,
                threads=table.threads,
                core=table.core + rank
                if table.core is not None
                else free.pop(0)
                if free and pinned and table.threads == 1
                else None,
            )
            for rank in range(getattr(table, "replicas", 1))
        )
    return found


def build_groups(
    config: Config, wiring: Wiring, models: Models, runtime: Runtime, gate: Gate, log: EventLog
) -> dict[str, Group]:
    """The groups by field name, not yet started. Raises ConfigError."""
    rollouts = [wiring.tables[name] for name in wiring.of_role("rollout")]
    sampled = next((table for table in rollouts if isinstance(table, TorchRollout)), None)
    temperature = sampled.temperature if sampled else 1.0
    where = places(config, wiring)
    patience = config.limits.stall_timeout
    groups: dict[str, Group] = {}
    for name, role in wiring.roles.items():
        table = wiring.tables[name]
        if isinstance(table, TorchTrain):
            kind = PolicyGroup if role == "policy" else CriticGroup
            options = _options(
                TrainerOptions,
                name,
                table,
                model=models.directories[name],
                temperature=temperature,
                optimizer={**msgspec.to_builtins(table.optimizer), "total_steps": config.train_steps or 0},
                max_response_tokens=sampled.max_tokens if sampled else 0,
                off_policy=config.off_policy,
                off_policy_cap=config.off_policy_cap,
                transport=runtime.transport,
            )
            groups[name] = kind(
                name,
                log,
                runtime,
                _spec(where[name][0], options),
                needs_proximal=role == "policy" and config.off_policy != "none",
                gap_alarm=config.limits.logprob_gap,
                call_timeout=patience,
            )
        elif isinstance(table, TorchRollout):
            groups[name] = _rollout_group(config, name, table, where[name], models, runtime, gate, log)
        elif isinstance(table, TorchScore | TorchReward):
            options = _options(
                ScorerOptions,
                name,
                table,
                model=models.directories[name],
                temperature=temperature,
                head=table.head,
            )
            frozen = FrozenEngine(
                log, runtime, _spec(where[name][0], options), call_timeout=patience, max_restarts=table.max_restarts
            )
            if role == "reward":
                groups[name] = RewardGroup(name, log, ModelScorer(frozen))
            else:
                groups[name] = ReferenceGroup(name, log, frozen)
        elif isinstance(table, Rules):
            options = _options(RuleOptions, name, table, where=f"groups.{name}")
            frozen = FrozenEngine(log, runtime, _spec(where[name][0], options), max_restarts=table.max_restarts)
            groups[name] = RewardGroup(name, log, RuleScorer(frozen, models.decode, silence=table.timeout + SILENCE))
    return groups


def _spec(place: Place, options: msgspec.Struct) -> EngineSpec:
    return EngineSpec(**msgspec.structs.asdict(place), options=options)


def _on_gpu(table: Compute) -> bool:
    """Whether it may compute on a GPU: asking torch would load it."""
    return table.device.startswith("cuda") or (table.device == "auto" and Path("/dev/nvidia0").exists())


def starters(groups: dict[str, Group]) -> list[Callable[[], Any]]:
    """The `start` of every group that has engines."""
    kinds = TrainGroup | RolloutGroup | ReferenceGroup | RewardGroup
    return [group.start for group in groups.values() if isinstance(group, kinds)]


def _rollout_group(
    config: Config,
    name: str,
    table: TorchRollout,
    where: Sequence[Place],
    models: Models,
    runtime: Runtime,
    gate: Gate,
    log: EventLog,
) -> RolloutGroup:
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
        SamplerOptions,
        name,
        table,
        model=models.directories[name],
        slots=table.concurrency,
        max_sequence_tokens=longest,
        transport=runtime.transport,
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
    )


def _options(kind: type[Options], name: str, table: msgspec.Struct, **more: Any) -> Options:
    """Options of an engine of group `name`, with their bounds checked: the keys that its table shares with them, and
    `more`. Raises ConfigError."""
    shared = {key: value for key, value in msgspec.to_builtins(table).items() if key in kind.__struct_fields__}
    return convert({**shared, **more}, kind, f"groups.{name}")


def _trained_directory(config: Config, name: str, table: Any, run_dir: Path, *, anew: bool) -> str:
    if table.scratch is None:
        return table.model
    directory = run_dir / "initial" / name
    if anew or not (directory / "config.json").exists():
        from asyncrlhf.backends.torch.scratch import write_model

        scratch, draft = table.scratch, directory.with_name(f".{name}.partial")
        shutil.rmtree(draft, ignore_errors=True)
        try:
            write_model(
                draft,
                model_type=scratch.model_type,
                characters=scratch.characters or "",
                words=() if scratch.words is None else import_named(f"groups.{name}.scratch.words", scratch.words)(),
                config=scratch.config,
                seed=config.seed,
            )
            flush_tree(draft)
            shutil.rmtree(directory, ignore_errors=True)
            draft.rename(directory)
            flush_tree(directory.parent)
        except ConfigError as error:
            raise ConfigError(f"groups.{name}.scratch: {error}") from error
        except Exception as error:  # whatever the disk or a field of the model's configuration raises
            raise ConfigError(
                f"groups.{name}.scratch: no model can be written to {directory}: {type(error).__name__}: "
                f"{_first_line(error)}"
            ) from error
    return str(directory)


def _tokenizer(directory: str) -> Any:
    """Raises ConfigError if it cannot be loaded."""
    from asyncrlhf.backends.torch.guard import guard_torchvision

    guard_torchvision()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory}: the tokenizer cannot be loaded: {_first_line(error)}") from error


def _require_model(key: str, model: str) -> None:
    if not (Path(model) / "config.json").exists():
        raise ConfigError(
            f'{key} = "{model}" is not a Hugging Face directory: {Path(model) / "config.json"} is missing; give a '
            "directory with config.json, weights and tokenizer"
        )


def _under(key: str, function: Callable[..., object], *arguments: object) -> None:
    """Call it; a ConfigError begins with `key`."""
    try:
        function(*arguments)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _stop_tokens(directory: Path, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence ids of the tokenizer and of generation_config.json."""
    stops: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    generation = directory / "generation_config.json"
    if generation.exists():
        more = json.loads(generation.read_bytes()).get("eos_token_id")
        stops += more if isinstance(more, list) else [] if more is None else [more]
    return tuple(dict.fromkeys(stops))
