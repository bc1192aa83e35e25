"""Which pool every group is in, what its engines ask for, and which GPUs of this machine they see. Torch-free."""

from __future__ import annotations

import difflib
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from asyncrlhf.abc import Beside, Needs, Place
from asyncrlhf.config.groups import Compute, Frozen, MegatronFrozen, MegatronTrain, RolloutTable, Trained, VllmRollout
from asyncrlhf.config.schema import Config, Pool
from asyncrlhf.errors import ConfigError
from asyncrlhf.placement.arrange import READING, arrange
from asyncrlhf.runtimes.feasible import Ask, Node, amounts, shortage
from asyncrlhf.weights.same_devices import SameDevices, on_the_same_devices
from asyncrlhf.wiring import Wiring

__all__ = (
    "asks",
    "beside",
    "engines_are_here",
    "needs",
    "pinned_to_gpus",
    "pool_lines",
    "require_gpus",
    "require_pools",
    "same_devices",
    "sleepers",
    "visible_gpus",
)

GENERATION, TRAINING = "generation", "training"
SHARES = 10_000
"""A cluster counts devices in parts of this size."""


def engines_are_here(config: Config) -> bool:
    """Whether every engine lives on this machine; else in a cluster, whose nodes may have what this one has not."""
    return config.runtime != "ray" or config.ray.address is None


def _pool_of(config: Config, wiring: Wiring, name: str) -> str | None:
    """The pool that a group is in; None: in none. Raises ConfigError for one that is not there."""
    chosen: str | None = getattr(wiring.engines[name], "pool", None)
    if chosen is None:
        usual = GENERATION if wiring.roles.get(name) == "rollout" else TRAINING
        return usual if usual in config.pools else None
    if chosen not in config.pools:
        near = difflib.get_close_matches(chosen, config.pools, 1)
        known = f"pools there: {', '.join(config.pools)}" if config.pools else f"add a table [pools.{chosen}]"
        hint = f'did you mean "{near[0]}"?' if near else known
        raise ConfigError(f'{wiring.key(name)}.pool = "{chosen}" is not a pool; {hint}')
    return chosen


def same_devices(config: Config, wiring: Wiring) -> dict[str, SameDevices]:
    """By rollout group: the ranks on whose devices its processes are, where the two take turns and are as many. Raises
    ConfigError for sizes that do not divide."""
    roles = {name: wiring.role(name) for name in wiring.engines}
    arrangement, found = arrange(config, roles, wiring.engines), dict[str, SameDevices]()
    for part in () if arrangement is None else arrangement.sets:
        for name in part.members if part.turns else ():
            table = wiring.engines[name]
            if isinstance(table, RolloutTable) and table.follows in part.members:
                trained = wiring.engines[table.follows]
                assert isinstance(trained, Trained)
                gpus = not engines_are_here(config) or bool(visible_gpus())
                if (shared := on_the_same_devices(trained, name, table, gpus=gpus)) is not None:
                    found[name] = shared
    return found


def sleepers(config: Config, wiring: Wiring) -> frozenset[str]:
    """Groups that take turns on their devices, and whose engines sleep while others compute there."""
    if config.placement.offload == "never":
        return frozenset()
    arrangement = arrange(config, {name: wiring.role(name) for name in wiring.engines}, wiring.engines)
    return frozenset(name for part in (arrangement.turns.values() if arrangement else ()) for name, _ in part)


def beside(config: Config, wiring: Wiring) -> dict[str, list[Beside]]:
    """Engine by engine, for the groups of `same_devices`: on whose devices it is, and whose weights it takes first."""
    found: dict[str, list[Beside]] = {}
    for name, shared in same_devices(config, wiring).items():
        nearest = shared.regrouping.nearest if shared.by_rank else None
        found[name] = [
            Beside(shared.follows, ranks, () if nearest is None else tuple(map(nearest, ranks)))
            for ranks in shared.regrouping.engines()
        ]
    return found


def needs(config: Config, wiring: Wiring, name: str, *, shares: bool = False) -> Needs | None:
    """What each engine of a group asks for, `shares`: in each of its processes; None: it is in no pool. Raises
    ConfigError."""
    pool = _pool_of(config, wiring, name)
    if pool is None:
        return None
    table, wanted = wiring.engines[name], config.pools[pool]
    return Needs(
        pool=pool,
        devices=_devices(wiring.key(name), table, pool, wanted, shares),
        cores=wanted.cores,
        labels={} if engines_are_here(config) else wanted.labels,
        together=isinstance(table, Trained | Frozen),
    )


def _devices(key: str, table: msgspec.Struct, name: str, pool: Pool, shares: bool) -> float:
    device = table.device if isinstance(table, Compute) else "cpu"
    if device.startswith("cuda") and not pool.devices:
        raise ConfigError(
            f'{key}.device = "{device}" and pools.{name}.devices = 0; raise the second, or use device = "cpu"'
        )
    if ":" in device:
        raise ConfigError(
            f'{key}.device = "{device}" names a GPU, and pools.{name} gives its engines theirs; use device = "cuda"'
        )
    if device == "cpu" or not pool.devices:
        return 0.0
    if isinstance(table, VllmRollout) and table.tensor_parallel > 1 and not shares:
        return float(table.tensor_parallel)
    return math.floor(SHARES / pool.engines_per_device) / SHARES


def asks(config: Config, places: Iterable[Place]) -> list[Ask]:
    """What every pool asks for. Raises ConfigError for one that nobody uses, or whose groups need more devices than it
    has."""
    engines: dict[str, list[Place]] = {name: [] for name in config.pools}
    for place in places:
        if place.needs is not None:
            engines[place.needs.pool].append(place)
    return [_ask(config, name, found) for name, found in engines.items()]


def _ask(config: Config, name: str, engines: Sequence[Place]) -> Ask:
    pool = config.pools[name]
    if not engines:
        raise ConfigError(f'pools.{name} is used by no group; set groups.<name>.pool = "{name}", or remove the table')
    wanted = [place.needs for place in engines if place.needs is not None]
    users = Counter(place.group for place in engines if place.needs is not None and place.needs.devices)
    least = _least_devices(pool, engines)
    if least > pool.devices:
        each = ", ".join(f"{group} {count}" for group, count in users.items())
        way = "lower the parallel sizes or replicas of its groups"
        if max(users.values()) == 1 and all(need.devices <= 1 for need in wanted):  # ranks of a model cannot share one
            share = math.ceil(users.total() / pool.devices)
            way = f"let engines share: pools.{name}.engines_per_device = {share}"
        raise ConfigError(
            f"pools.{name}.devices = {pool.devices}, and its engines need {least} ({each}); raise it to {least}, or "
            f"{way}"
        )
    return Ask(
        pool=name,
        devices=pool.devices,
        cores=pool.cores * sum(place.beside is None for place in engines),
        labels={} if engines_are_here(config) else pool.labels,
        engine_devices=max(need.devices for need in wanted),
        engine_cores=pool.cores,
    )


def _least_devices(pool: Pool, engines: Sequence[Place]) -> int:
    """Devices that the engines fill, sharing where they may."""
    wanted = [(place.needs.devices, place.beside) for place in engines if place.needs is not None]
    shared = sum(1 if on is None else len(on.ranks) for devices, on in wanted if 0 < devices <= 1)
    return math.ceil(shared / pool.engines_per_device) + sum(int(devices) for devices, _ in wanted if devices > 1)


def require_pools(config: Config, places: Sequence[Place]) -> None:
    """Raises ConfigError as `asks` does, and for what this machine does not have, if engines are to live here; whether
    a cluster has it is seen when the run joins it."""
    found = asks(config, places)
    if engines_are_here(config):
        machine = Node(name="this machine", devices=len(visible_gpus()), cores=os.cpu_count() or 1)
        if problem := shortage(found, [machine], "this machine"):
            raise ConfigError(problem)


def require_gpus(config: Config, wiring: Wiring) -> None:
    """Raises ConfigError for a megatron group that is to take more GPUs of this machine than there are: without CUDA
    this backend has to be told so. Torch is not asked, and may still find that it cannot use them."""
    count = len(visible_gpus())
    for name, table in wiring.engines.items():
        if not isinstance(table, MegatronTrain | MegatronFrozen) or table.device == "cpu":
            continue
        if engines_are_here(config) and table.ranks > count:
            sizes = f" and {table.many}" if table.many else ""
            fix = "lower the sizes" if count else 'set device = "cpu"'
            raise ConfigError(
                f'{wiring.key(name)}: device = "{table.device}"{sizes} with backend = "megatron" takes {table.ranks} '
                f"GPU{'s' * (table.ranks > 1)}, and this machine has {count}; {fix}"
            )


def pool_lines(config: Config, places: Sequence[Place]) -> Iterator[str]:
    """What the pools come to, one a line."""
    where = "" if engines_are_here(config) else ", to be found in the cluster"
    for ask in asks(config, places):
        mine = [place for place in places if place.needs and place.needs.pool == ask.pool]
        groups = Counter(place.group for place in mine)
        engines = ", ".join(f"{group} x {count}" if count > 1 else group for group, count in groups.items())
        yield f"pool {ask.pool}".ljust(25) + f"{amounts({'device': ask.devices, 'core': ask.cores})}{where}: {engines}"
        used = _least_devices(config.pools[ask.pool], mine)
        if used < ask.devices:
            yield (
                f"warning: pools.{ask.pool}.devices = {ask.devices:g}, and its engines use {used}; lower it, or raise "
                "the sizes of its groups"
            )


def pinned_to_gpus(
    config: Config, wiring: Wiring, places: Mapping[str, Sequence[Place]]
) -> dict[str, tuple[Place, ...]]:
    """The same places; those in a pool see only GPUs of their own, or that they share, in the local runtime: the pools'
    in the order of their tables, the first engines' first, and behind them models that read at once. Those beside
    ranks see the ranks' GPUs."""
    if config.runtime != "local":
        return {name: tuple(group) for name, group in places.items()}
    interleaved = config.placement.strategy == "interleaving"
    order = sorted(places, key=lambda name: interleaved and wiring.role(name) in READING)
    gpus = _gpus_of_engines(config, [p for name in order for p in places[name] if p.beside is None])
    for place in (place for group in places.values() for place in group):
        if (on := place.beside) is not None and place.needs is not None:
            gpus[place.group, place.rank] = tuple(gpu for rank in on.ranks for gpu in gpus[on.group, rank])
    return {
        name: tuple(replace(p, gpus=gpus[p.group, p.rank]) if p.needs is not None else p for p in group)
        for name, group in places.items()
    }


def _gpus_of_engines(config: Config, places: Sequence[Place]) -> dict[tuple[str, int], tuple[str, ...]]:
    """By group and rank, of engines in pools. In a pool those that need whole GPUs come first; those that share take
    turns on the rest, in the order of `places`, so that the ranks of one model are on GPUs of their own where there are
    as many, and so are models that follow each other there."""
    gpus, found, begin = visible_gpus(), dict[tuple[str, int], tuple[str, ...]](), 0
    for name, pool in config.pools.items():
        whole = sharing = 0
        engines = [(p, p.needs) for p in places if p.needs is not None and p.needs.pool == name]
        for place, need in sorted(engines, key=lambda pair: -pair[1].devices):
            first = begin + whole
            if need.devices >= 1:
                whole += int(need.devices)
            elif need.devices:
                first += sharing % (pool.devices - whole)
                sharing += 1
            found[place.group, place.rank] = gpus[first : first + math.ceil(need.devices)]
        begin += pool.devices
    return found


def visible_gpus() -> tuple[str, ...]:
    """NVIDIA GPUs of this machine, as CUDA_VISIBLE_DEVICES names them. Asking torch would load it."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(part for part in named.split(",") if part.strip())
    count = sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))
    return tuple(str(number) for number in range(count))
