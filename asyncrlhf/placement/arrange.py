"""From `[placement]` to sets of groups that share devices: their pools, whether they take turns, what sizes follow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import asdict, replace

from asyncrlhf.config.groups import Compute, RolloutTable, TorchShadow, Trained, VllmRollout
from asyncrlhf.config.schema import Config, Pool
from asyncrlhf.errors import ConfigError

__all__ = ("READING", "Arrangement", "DeviceSet", "arrange", "filled", "set_lines", "with_shadows")

EVERYWHERE = ("colocate", "flattening", "interleaving", "alternating")
"""Strategies with one set."""
READING = ("reference", "reward", "judge")
"""Roles of models that read answers: with "interleaving" they divide the devices among them."""
TRAINED, FOLLOWING = ("policy", "critic"), ("rollout", "shadow")


@dataclass(frozen=True, slots=True)
class DeviceSet:
    """Groups that share devices."""

    name: str
    """Of their pool."""
    members: tuple[str, ...]
    turns: bool
    """One of them computes at a time."""
    lanes: Mapping[str, str] = field(default_factory=dict[str, str])
    """Members that divide the devices among them and compute at once (interleaving)."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Example: "async" is Arrangement("async", (DeviceSet("generation", ("rollout",), False), ...))."""

    strategy: str
    sets: tuple[DeviceSet, ...]
    in_turn: tuple[str, str] | None = None
    """A trained group and one that follows which take turns, if there are such: no publish goes on beside training."""
    planned: str = ""
    """What the planner said, if it was asked."""
    left_out: tuple[str, ...] = ()
    """Groups that `placement.sets` does not name: each has a set of its own."""

    @property
    def turns(self) -> dict[str, list[tuple[str, str]]]:
        """Sets whose members take turns, as control/turns.py takes them."""
        return {each.name: [(m, each.lanes.get(m, "")) for m in each.members] for each in self.sets if each.turns}


def with_shadows(config: Config, roles: Mapping[str, str], shadows: Mapping[str, TorchShadow]) -> Config:
    """The configuration with the copies that "separation" implies: of each critic, computing as it does where its own
    table says nothing."""
    if config.placement.strategy != "separation":
        return config
    kept = ("dtype", "device", "threads", "micro_batch_tokens")
    tables: dict[str, dict[str, Any]] = {}
    for critic in (name for name, role in roles.items() if role == "critic"):
        name = next((name for name, table in shadows.items() if table.follows == critic), f"shadow_{critic}")
        like = {key: value for key, value in config.groups[critic].items() if key in kept}
        tables[name] = {**like, "follows": critic, **config.groups.get(name, {})}
    return replace(config, groups={**config.groups, **tables})


def arrange(config: Config, roles: Mapping[str, str], tables: Mapping[str, object]) -> Arrangement | None:
    """The sets of a run whose groups have these roles and tables; None: the configuration does not say. Raises
    ConfigError, with both values, where pools contradict it."""
    wanted = config.placement
    models = {name: table for name, table in tables.items() if isinstance(table, Compute)}
    left_out: tuple[str, ...] = ()
    said = f'placement.strategy = "{wanted.strategy}"' if wanted.strategy else "placement.sets"
    if wanted.sets:
        for name in (name for part in wanted.sets for name in part):
            if name not in models:
                raise ConfigError(
                    f'placement.sets has "{name}", which is no group with a model; such groups: {", ".join(models)}'
                )
        listed = {name for part in wanted.sets for name in part}
        left_out = tuple(name for name in models if name not in listed)
        sets = [*map(tuple, wanted.sets), *((name,) for name in left_out)]
    elif wanted.strategy is None:
        return None
    else:
        if wanted.shared_shadow and "shadow" not in roles.values():
            raise ConfigError(
                f"placement.shared_shadow = true, and {config.algorithm} has no critic to copy among its groups "
                f"({', '.join(models)}); remove it"
            )
        sets = [part for part in _sets_of(wanted.strategy, models, roles, wanted.shared_shadow) if part]
    names = _pool_names(config, sets, models, roles, said)
    lanes: dict[str, str] = {}
    if wanted.strategy == "interleaving":
        reading = [name for name in models if roles[name] in READING]
        if len(reading) < 2:
            raise ConfigError(
                f"{said} has models that read answers compute at once, and there are {len(reading)} "
                f'({", ".join(reading) or "none"}) where it takes 2; use "colocate"'
            )
        lanes = {name: name for name in reading}
    _check_sizes(config, models, roles, said)
    found = [
        DeviceSet(name, part, _take_turns(config, part, roles), {m: lanes[m] for m in part if m in lanes})
        for name, part in zip(names, sets, strict=True)
    ]
    in_turn = next((pair for part in found if part.turns and (pair := _in_turn(part, roles))), None)
    if in_turn is not None and config.publish.overlap:
        raise ConfigError(
            f"publish.overlap = true, and {said} has {' and '.join(in_turn)} share devices in turn, so the first "
            "cannot train while the second takes weights; remove the key, or give them devices of their own"
        )
    return Arrangement(wanted.strategy or "sets", tuple(found), in_turn, left_out=left_out)


def _in_turn(part: DeviceSet, roles: Mapping[str, str]) -> tuple[str, str] | None:
    """The first trained group of a set, and the first that follows."""
    first = [next((name for name in part.members if roles[name] in of), None) for of in (TRAINED, FOLLOWING)]
    return None if first[0] is None or first[1] is None else (first[0], first[1])


def _sets_of(
    strategy: str, models: Mapping[str, Compute], roles: Mapping[str, str], shared_shadow: bool
) -> list[tuple[str, ...]]:
    of = {role: tuple(name for name in models if roles[name] == role) for role in {*roles.values()}}
    rollout, policy = of.get("rollout", ()), of.get("policy", ())
    critics, shadows = of.get("critic", ()), of.get("shadow", ())
    reference, reward = of.get("reference", ()), (*of.get("reward", ()), *of.get("judge", ()))
    alone = [(name,) for name in (*critics, *reference, *reward)]
    if strategy in EVERYWHERE:
        return [(*rollout, *policy, *critics, *shadows, *reference, *reward)]
    if strategy == "separation":
        beside = shadows if shared_shadow else ()
        apart = [] if shared_shadow else [(name,) for name in shadows]
        return [(*rollout, *beside), *((name,) for name in policy), *apart, *alone]
    if strategy == "standalone":
        return [(*rollout, *policy), *((name,) for name in shadows), *alone]
    if strategy == "split":
        return [(*rollout, *policy, *reference), (*critics, *shadows, *reward)]
    return [rollout, (*policy, *critics, *shadows, *reference, *reward)]


def _take_turns(config: Config, part: Sequence[str], roles: Mapping[str, str]) -> bool:
    turns = config.placement.turns
    if len(part) == 1 or turns == "none":
        return False
    samples = any(roles[name] == "rollout" for name in part)
    if samples and config.publish.mode == "drain" and config.lookahead:
        raise ConfigError(
            f'publish.mode = "drain" and lookahead = {config.lookahead}: answers of {part[0]} are interrupted for '
            'training on the same devices, so they cannot end first; use publish.mode = "in_flight", or lookahead = 0'
        )
    return samples or turns == "all"


def _pool_names(
    config: Config,
    sets: Sequence[Sequence[str]],
    models: Mapping[str, Compute],
    roles: Mapping[str, str],
    said: str,
) -> list[str]:
    """One for each set: what its members say, else what they are for."""
    names: list[str] = []
    for part in sets:
        chosen = {name: pool for name in part if (pool := models[name].pool) is not None}
        if len({*chosen.values()}) > 1:
            one, pool = next(iter(chosen.items()))
            two, other = next(pair for pair in chosen.items() if pair[1] != pool)
            raise ConfigError(
                f'groups.{one}.pool = "{pool}" and groups.{two}.pool = "{other}", and {said} has them share devices; '
                "name the same pool, or leave it out"
            )
        duties = {roles[name] for name in part}
        usual = "training" if "policy" in duties else "generation" if duties == {"rollout"} else part[0]
        usual = "shared" if {"policy", "rollout"} <= duties else usual
        name = next(iter(chosen.values()), usual)
        if name in names:
            first = sets[names.index(name)][0]
            raise ConfigError(
                f'groups.{first}.pool and groups.{part[0]}.pool are both "{name}", and {said} gives them devices of '
                "their own; name two pools, or leave it out"
            )
        names.append(name)
    return names


def _check_sizes(config: Config, models: Mapping[str, Compute], roles: Mapping[str, str], said: str) -> None:
    if config.placement.strategy != "alternating":
        return
    ranks = next(table.ranks for name, table in models.items() if roles[name] in ("policy", "critic"))
    for name, table in models.items():
        if isinstance(table, RolloutTable) and "replicas" in config.groups[name] and table.replicas != ranks:
            raise ConfigError(
                f"groups.{name}.replicas = {table.replicas} and the policy has {ranks} ranks, and {said} has each "
                "worker generate and train its share; make them the same, or leave the first out"
            )


# ---- what follows for groups and pools -----------------------------------------------------------------------------
def filled(
    config: Config, arrangement: Arrangement, tables: Mapping[str, object], roles: Mapping[str, str], gpus: int
) -> Config:
    """The configuration with sizes and pools that were left out, and "always" or "never" for offload = "auto". `gpus`:
    those that "auto" devices would find. Raises ConfigError if the sets need more devices than `placement.devices`."""
    groups = {name: dict(table) for name, table in config.groups.items()}
    models = {name: table for name, table in tables.items() if isinstance(table, Compute)}
    if arrangement.strategy in EVERYWHERE and config.placement.devices:
        for name, table in models.items():
            if name in groups:
                groups[name] = {**_sizes(table, config.placement.devices, groups[name]), **groups[name]}
    if arrangement.strategy == "alternating" and not config.placement.devices:
        ranks = next(table.ranks for name, table in models.items() if roles[name] in ("policy", "critic"))
        for name, table in models.items():
            if isinstance(table, RolloutTable):
                groups[name].setdefault("replicas", ranks)
    sized = {name: _with(table, groups.get(name, {})) for name, table in models.items()}
    widths = {each.name: _width(each, sized) for each in arrangement.sets}
    have = config.placement.devices
    if have and sum(widths.values()) > have:
        each = ", ".join(f"{name} {count}" for name, count in widths.items())
        raise ConfigError(
            f"placement.devices = {have}, and its sets need {sum(widths.values())} ({each}); raise it, or lower the "
            "sizes of their groups"
        )
    pools = dict(config.pools)
    judges = {name: dict(table) for name, table in config.evaluation.judges.items()}
    for each in arrangement.sets:
        pool = pools.get(each.name) or _pool(each, sized, widths[each.name], gpus)
        if pool is not None:
            pools[each.name] = pool
            for name in each.members:
                (groups[name] if name in groups else judges[name]).setdefault("pool", each.name)
    placement = config.placement
    if placement.offload == "auto" and (in_turn := [each.name for each in arrangement.sets if each.turns]):
        on_gpu = any(pools[name].devices for name in in_turn if name in pools)
        placement = replace(placement, offload="always" if on_gpu else "never")
    return replace(
        config, groups=groups, pools=pools, evaluation=replace(config.evaluation, judges=judges), placement=placement
    )


def _sizes(table: Compute, devices: int, raw: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a group as large as so many devices, unless it says a size itself."""
    if isinstance(table, RolloutTable):
        each = table.tensor_parallel if isinstance(table, VllmRollout) else 1
        return {} if "replicas" in raw else {"replicas": max(1, devices // each)}
    if isinstance(table, TorchShadow):
        return {} if "replicas" in raw else {"replicas": devices}
    if not isinstance(table, Trained) or "data_parallel" in raw or devices % table.ranks:
        return {}
    return {"data_parallel": devices // table.ranks}


def _with(table: Compute, raw: Mapping[str, Any]) -> Compute:
    changed = {key: raw[key] for key in ("replicas", "data_parallel") if key in raw and key in asdict(table)}
    return replace(table, **changed)


def _count(table: Compute) -> tuple[int, int]:
    """(engines, devices of them all)."""
    if isinstance(table, RolloutTable):
        each = table.tensor_parallel if isinstance(table, VllmRollout) else 1
        return table.replicas, table.replicas * each
    if isinstance(table, TorchShadow):
        return table.replicas, table.replicas
    return table.ranks, table.ranks


def _width(part: DeviceSet, tables: Mapping[str, Compute]) -> int:
    """Devices that the set fills: members lie on each other, lanes beside each other."""
    return max(
        sum(_count(tables[name])[1] for name in part.lanes),
        *(_count(tables[name])[1] for name in part.members if name not in part.lanes),
    )


def _pool(part: DeviceSet, tables: Mapping[str, Compute], width: int, gpus: int) -> Pool | None:
    """GPUs for a set; None: it computes on CPUs. Raises ConfigError for engines that cannot share GPUs."""
    devices = {tables[name].device for name in part.members}
    on_gpu = any(device.startswith("cuda") for device in devices) or ("auto" in devices and gpus > 0)
    if not on_gpu:
        return None
    for name in part.members:
        table = tables[name]
        if len(part.members) > 1 and isinstance(table, VllmRollout) and table.tensor_parallel > 1:
            _require_ranks(part, name, table, tables)
    engines = sum(_count(tables[name])[1] for name in part.members)
    return Pool(devices=width, engines_per_device=math.ceil(engines / width))


def _require_ranks(part: DeviceSet, name: str, table: VllmRollout, tables: Mapping[str, Compute]) -> None:
    """Engines of several processes share GPUs with the ranks that they follow, in turn: a process with each."""
    others = ", ".join(other for other in part.members if other != name)
    said = f"groups.{name}.tensor_parallel = {table.tensor_parallel}: engines of several processes share no GPUs"
    if table.follows not in part.members or not part.turns:
        raise ConfigError(f"{said} with {others}; use 1, or devices of its own")
    count, ranks = _count(table)[1], _count(tables[table.follows])[1]
    if count != ranks:
        fix = f"use replicas = {ranks // table.tensor_parallel}" if ranks % table.tensor_parallel == 0 else "use 1"
        raise ConfigError(
            f"{said} with {others} unless there is a process for each of the {ranks} ranks of {table.follows}, and "
            f"there are {count}; {fix}, or devices of its own"
        )


# ---- for people ----------------------------------------------------------------------------------------------------
def set_lines(
    arrangement: Arrangement, tables: Mapping[str, object], ahead: int, *, kept: bool = False
) -> Iterator[str]:
    """What `check` says: set by set, how many engines share how many devices, and who takes turns. `kept`: without
    moving."""
    models = {name: table for name, table in tables.items() if isinstance(table, Compute)}
    count = len(arrangement.sets)
    yield "placement".ljust(25) + f"{arrangement.strategy}, {count} set{'s' if count > 1 else ''} of devices"
    if arrangement.planned:
        yield "  auto".ljust(25) + arrangement.planned
    for part in arrangement.sets:
        width = _width(part, models)
        engines = ", ".join(f"{n} x {c}" if (c := _count(models[n])[0]) > 1 else n for n in part.members)
        text = f"{engines} on {width} device{'s' if width > 1 else ''}"
        if part.turns:
            text += ", in turn" + ", all of them in memory" * kept
            if part.lanes:
                text += f"; {' and '.join(part.lanes)} at once"
        elif len(part.members) > 1:
            text += ", side by side"
        if set(part.members) <= {*arrangement.left_out}:
            text += ", as placement.sets does not name it"
        yield f"  set {part.name}".ljust(25) + text
        yield from _apart(part, models)
    if arrangement.strategy == "async" and not ahead:
        yield 'warning: placement.strategy = "async" and lookahead = 0: the two pools wait for each other all the time'


def _apart(part: DeviceSet, tables: Mapping[str, Compute]) -> Iterator[str]:
    """Rollout groups that take turns with the ranks they follow, and whose processes are not as many."""
    for name in part.members if part.turns else ():
        table = tables[name]
        if not isinstance(table, RolloutTable) or table.follows not in part.members:
            continue
        count, ranks = _count(table)[1], _count(tables[table.follows])[1]
        each = count // table.replicas
        if count != ranks:
            fix = f"; replicas = {ranks // each} puts one on each" if ranks % each == 0 else ""
            yield f"  {name}".ljust(25) + f"{count} in all, beside {ranks} ranks of {table.follows}{fix}"
