"""What an algorithm's fields ask for, held against a configuration. Torch-free, builds nothing."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from asyncrlhf.algorithm import Algorithm
from asyncrlhf.config.convert import convert
from asyncrlhf.config.groups import ROLES, Compute, MegatronCritic, TorchShadow, Trained, VllmRollout
from asyncrlhf.config.load import import_named
from asyncrlhf.config.rollouts import LOWEST_TEMPERATURE
from asyncrlhf.config.schema import Config
from asyncrlhf.control.coordinator import Coordinator
from asyncrlhf.errors import ConfigError
from asyncrlhf.flow.batching import experience_columns
from asyncrlhf.flow.experience import ExperienceQueue
from asyncrlhf.flow.prompts import PromptSource, StageQueue
from asyncrlhf.groups import CriticGroup, PolicyGroup, ReferenceGroup, RewardGroup, RolloutGroup
from asyncrlhf.messages import Experience
from asyncrlhf.ops import KLControl, Loss

__all__ = ("Wiring", "wire")

GROUP_ROLES: Mapping[type, str] = {
    PolicyGroup: "policy",
    CriticGroup: "critic",
    RolloutGroup: "rollout",
    ReferenceGroup: "reference",
    RewardGroup: "reward",
}


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """The algorithm class and, by field name, what each field becomes."""

    algorithm: type[Algorithm]
    roles: Mapping[str, str]
    """Group fields that will be built -> their role."""
    tables: Mapping[str, msgspec.Struct]
    """Group fields -> their validated table."""
    judges: Mapping[str, msgspec.Struct]
    """Judges of the evaluation -> their validated table."""
    shadows: Mapping[str, TorchShadow]
    """Groups that follow a critic and stand for it -> their validated table."""
    experience: str
    """Field of the experience queue."""
    experience_type: type[Experience]
    stage_queues: Mapping[str, type]
    """Fields of further queues -> what they carry."""
    prompts: str
    coordinator: str
    settings: Mapping[str, Any]
    """Everything else that the configuration sets."""

    @property
    def engines(self) -> Mapping[str, msgspec.Struct]:
        """Tables of all groups that have engines, judges and shadows included."""
        return {**self.tables, **self.shadows, **self.judges}

    def role(self, name: str) -> str:
        """Of any group that has engines: one of ROLES, or "judge"."""
        return self.roles.get(name, "shadow" if name in self.shadows else "judge")

    def key(self, name: str) -> str:
        """Where the table of a group lies in the configuration."""
        return f"evaluation.judges.{name}" if name in self.judges else f"groups.{name}"

    def of_role(self, *roles: str) -> list[str]:
        """Fields of these roles, in the algorithm's order."""
        return [name for name, role in self.roles.items() if role in roles]


def wire(config: Config) -> Wiring:
    """Raises ConfigError: an algorithm that cannot be imported, a group without a table, a table without a group, a
    setting of the wrong type."""
    kind = _algorithm(config)
    hints = _hints(kind)
    roles: dict[str, str] = {}
    found: dict[str, str] = {}
    stage_queues: dict[str, type] = {}
    experience_type: type[Experience] = Experience
    setting_types: dict[str, Any] = {}
    required: list[str] = []
    for field in dataclasses.fields(cast(Any, kind)):
        hint, optional = _without_none(hints[field.name])
        origin = typing.get_origin(hint) or hint
        if origin in GROUP_ROLES:
            if field.name in config.groups:
                roles[field.name] = GROUP_ROLES[origin]
            elif not optional:
                raise ConfigError(
                    f"groups: {config.algorithm} needs a {GROUP_ROLES[origin]} group; add a table [groups.{field.name}]"
                )
        elif origin is ExperienceQueue:
            found["experience"], experience_type = field.name, typing.get_args(hint)[0]
        elif origin is StageQueue:
            stage_queues[field.name] = typing.get_args(hint)[0]
        elif origin is PromptSource:
            found["prompts"] = field.name
        elif origin is Coordinator:
            found["coordinator"] = field.name
        else:
            setting_types[field.name] = hints[field.name]
            if field.default is field.default_factory is dataclasses.MISSING and field.name != "state":
                required.append(field.name)
    for part, annotation in (
        ("experience", "rl.ExperienceQueue[...]"),
        ("prompts", "rl.PromptSource"),
        ("coordinator", "rl.Coordinator"),
    ):
        if part not in found:
            raise ConfigError(f'algorithm = "{config.algorithm}" has no field of type {annotation}; give it one')
    shadows = _shadows(config, roles)
    for name in config.groups:
        if name not in roles and name not in shadows:
            raise ConfigError(
                f"groups.{name}: {config.algorithm} has no such group; it has {', '.join(sorted(roles)) or 'none'}"
                f"{_nearest(name, roles)}"
            )
    try:
        experience_columns(experience_type)
    except TypeError as error:
        raise ConfigError(f'algorithm = "{config.algorithm}": {error}') from None
    tables = {name: convert(config.groups[name], ROLES[role], f"groups.{name}") for name, role in roles.items()}
    if config.evaluation.judges and not config.evaluation.every:
        raise ConfigError(
            "evaluation.judges are set and evaluation.every = 0, so nobody asks them; set it to 1 or more"
        )
    judges: dict[str, msgspec.Struct] = {}
    for name, table in config.evaluation.judges.items():
        if name in roles or name == "reward":
            raise ConfigError(f"evaluation.judges.{name}: a group has that name already; use another one")
        judges[name] = convert(table, ROLES["reward"], f"evaluation.judges.{name}")
    wiring = Wiring(
        algorithm=kind,
        roles=roles,
        tables=tables,
        judges=judges,
        shadows=shadows,
        experience_type=experience_type,
        stage_queues=stage_queues,
        settings=_settings(config, setting_types, required),
        **found,
    )
    _check(config, wiring)
    return wiring


def _shadows(config: Config, roles: Mapping[str, str]) -> dict[str, TorchShadow]:
    """Groups that no field asks for and that follow another: critics' copies."""
    found: dict[str, TorchShadow] = {}
    critics = [name for name, role in roles.items() if role == "critic"]
    for name, table in config.groups.items():
        named = name.removeprefix("shadow_")
        if name not in roles and ("follows" in table or (named != name and named in critics)):
            shadow = convert({"follows": named, **table}, TorchShadow, f"groups.{name}")
            if shadow.follows not in critics:
                known = f"use one of {', '.join(critics)}" if critics else f"{config.algorithm} has none"
                raise ConfigError(f'groups.{name}.follows = "{shadow.follows}" is not a critic; {known}')
            backend = config.groups[shadow.follows].get("backend")
            if backend == MegatronCritic.__struct_config__.tag:
                implied = ' (placement.strategy = "separation" implies it)'
                raise ConfigError(
                    f'groups.{shadow.follows}.backend = "{backend}" and groups.{name}.backend = "torch"'
                    f"{implied if config.placement.strategy == 'separation' else ''}: the copy cannot take weights "
                    'from megatron ranks; train the critic with backend = "torch", or have no copy'
                )
            twin = next((other for other, each in found.items() if each.follows == shadow.follows), None)
            if twin is not None:
                raise ConfigError(
                    f'groups.{name} and groups.{twin} both follow "{shadow.follows}"; a critic has one shadow: use '
                    "replicas"
                )
            found[name] = shadow
    return found


def _algorithm(config: Config) -> type[Algorithm]:
    kind = import_named("algorithm", config.algorithm)
    if not (isinstance(kind, type) and issubclass(kind, Algorithm) and dataclasses.is_dataclass(kind)):
        raise ConfigError(
            f'algorithm = "{config.algorithm}" is not a dataclass that subclasses asyncrlhf.Algorithm; '
            'name one, for example "algorithms.grpo:GRPO"'
        )
    return kind


def _hints(kind: type[Algorithm]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except NameError as error:
        raise ConfigError(
            f"algorithm {kind.__name__}: {error}; field annotations must be importable (not only under TYPE_CHECKING)"
        ) from None


def _without_none(hint: Any) -> tuple[Any, bool]:
    """(the type, whether None is allowed too)."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if len(options) == 1:
            return options[0], True
    return hint, False


def _settings(config: Config, kinds: Mapping[str, Any], required: Iterable[str]) -> dict[str, Any]:
    """The `[settings]` table, converted field by field; only what it sets."""
    for name in required:
        if name not in config.settings:
            raise ConfigError(f"settings.{name} is missing; {config.algorithm} has no default for it")
    fields = [(name, kind, msgspec.UNSET) for name, kind in kinds.items() if name != "state"]
    table = msgspec.defstruct("settings", fields, kw_only=True, forbid_unknown_fields=True)
    values = convert(config.settings, table, "settings")
    return {name: getattr(values, name) for name in config.settings}


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1)
    return f'; did you mean "{near[0]}"?' if near else ""


def _check(config: Config, wiring: Wiring) -> None:
    """Rules between tables."""
    trained = wiring.of_role("policy", "critic")
    if not trained:
        raise ConfigError(f'algorithm = "{config.algorithm}" trains nothing: it has no PolicyGroup or CriticGroup')
    for name in wiring.of_role("rollout"):
        follows = cast(Any, wiring.tables[name]).follows
        if follows not in trained:
            raise ConfigError(
                f'groups.{name}.follows = "{follows}" is not a trained group; use one of {", ".join(trained)}'
            )
    for key in wiring.algorithm.requires:
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if value is None:
            raise ConfigError(f"{key} is missing; {config.algorithm} needs it")
    if config.evaluation.every and not (wiring.of_role("rollout") and wiring.of_role("reward")):
        raise ConfigError(
            f"evaluation.every = {config.evaluation.every} needs a rollout and a reward group, and {config.algorithm} "
            f"has {', '.join(wiring.roles)}; set evaluation.every = 0"
        )
    if config.evaluation.every and 0 < config.evaluation.temperature < LOWEST_TEMPERATURE:
        for name in wiring.of_role("rollout"):
            if isinstance(wiring.tables[name], VllmRollout):
                raise ConfigError(
                    f'evaluation.temperature = {config.evaluation.temperature:g}, and groups.{name}.backend = "vllm" '
                    f"samples at {LOWEST_TEMPERATURE} at least; raise it, or use 0: greedy"
                )
    for name, table in wiring.engines.items():
        if isinstance(table, Compute) and table.ranks > 1 and config.runtime == "inproc":
            raise ConfigError(
                f'{wiring.key(name)}.{table.many} takes {table.ranks} processes, and runtime = "inproc" is 1; use '
                'runtime = "local" or "ray", or sizes of 1'
            )
    for name in wiring.of_role("policy", "critic"):
        optimizer = cast(Trained, wiring.tables[name]).optimizer
        if optimizer.schedule == "constant":
            continue
        if config.train_steps is None:
            raise ConfigError(
                f'groups.{name}.optimizer.schedule = "{optimizer.schedule}" ends at train_steps, which is not '
                'set; set train_steps or use schedule = "constant"'
            )
        if optimizer.warmup_steps >= config.train_steps:
            raise ConfigError(
                f"groups.{name}.optimizer.warmup_steps = {optimizer.warmup_steps} leaves no step for schedule = "
                f'"{optimizer.schedule}", which ends at train_steps = {config.train_steps}; lower the first or raise '
                "the second"
            )
    for name, value in _coefficients(wiring):
        if isinstance(value, Loss) and value.level != "token" and config.at_deadline == "mask" and config.max_staleness:
            raise ConfigError(
                f'at_deadline = "mask" cuts tokens out of rollouts, and settings.{name} of {config.algorithm} works on '
                f'whole sequences; use at_deadline = "wait" or "drop", or max_staleness = 0, not {config.max_staleness}'
            )
        for group in value.needs_groups:
            if group not in wiring.roles:
                raise ConfigError(
                    f"settings.{name} needs a group {group!r} with these coefficients, and there is none; add "
                    f"[groups.{group}] or change them"
                )


def _coefficients(wiring: Wiring) -> Iterator[tuple[str, Loss | KLControl]]:
    """The algorithm's losses and KL penalties by field name, as configured or by default."""
    for field in dataclasses.fields(cast(Any, wiring.algorithm)):
        value: object = wiring.settings.get(field.name, field.default)
        if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        if isinstance(value, Loss | KLControl):
            yield field.name, value
