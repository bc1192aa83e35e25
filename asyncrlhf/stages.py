"""A run and the runs it builds on (`after`), checked before any of them begins. Torch-free, writes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from asyncrlhf.backends.rules import require_function
from asyncrlhf.backends.vllm.options import require_vllm
from asyncrlhf.config.groups import Rules, VllmRollout
from asyncrlhf.config.load import load, resolved
from asyncrlhf.config.schema import Config
from asyncrlhf.control.rundir import RunDirectory
from asyncrlhf.data.source import Dataset, open_dataset
from asyncrlhf.errors import ConfigError
from asyncrlhf.models import Models
from asyncrlhf.placement.arrange import Arrangement, arrange, filled, with_shadows
from asyncrlhf.placement.chosen import chosen
from asyncrlhf.pools import engines_are_here, visible_gpus
from asyncrlhf.wiring import Wiring, wire

__all__ = ("Stage", "prepare")


class Stage(NamedTuple):
    """One run: what its configuration names outside itself has been found."""

    config: Config
    wiring: Wiring
    text: str
    """The resolved configuration."""
    directory: RunDirectory
    dataset: Dataset
    held_out: Dataset | None
    arrangement: Arrangement | None
    """Which groups share devices."""
    after: tuple[Stage, ...]
    """Stages that have to be complete first."""

    @property
    def in_turn(self) -> bool:
        """Whether a trained model and engines that follow share devices in turn."""
        return self.arrangement is not None and self.arrangement.in_turn is not None

    def all_after(self) -> Iterator[Stage]:
        """`after`, and what those build on."""
        for stage in self.after:
            yield stage
            yield from stage.all_after()


def prepare(config: Config, chain: tuple[str, ...] = ()) -> Stage:
    """Raises ConfigError or DataError for anything that can be seen to be wrong. `chain`: files that lead here."""
    config, wiring, arrangement = _placed(config)
    evaluation = config.evaluation
    dataset = open_dataset(config.data, config.seed)
    held_out = open_dataset(evaluation.rows(config.data), config.seed, "evaluation") if evaluation.every else None
    for name, table in wiring.engines.items():
        if isinstance(table, Rules):
            require_function(wiring.key(name), table.function)
        elif isinstance(table, VllmRollout):
            require_vllm(wiring.key(name), config.runtime)
    after: list[Stage] = []
    for path in config.after:
        if path in chain:
            raise ConfigError(f"after: {path} comes after itself; take it out of one of the files")
        after.append(prepare(load(path), (*chain, path)))
    text = resolved(config, {**wiring.tables, **wiring.shadows}, wiring.judges)
    directory = RunDirectory(config, text, _fixed(config, wiring, dataset), dataset.count)
    stage = Stage(config, wiring, text, directory, dataset, held_out, arrangement, tuple(after))
    own = directory.path.resolve()
    for other in stage.all_after():
        if other.directory.path.resolve() == own:
            raise ConfigError(f'run_dir = "{config.run_dir}" is also that of a stage in `after`; give each its own')
    Models.require(wiring, [other.directory.path for other in stage.all_after()])
    return stage


def _placed(config: Config) -> tuple[Config, Wiring, Arrangement | None]:
    """The configuration with what `[placement]` implies."""
    wiring, written = wire(config), config
    gpus = len(visible_gpus()) if engines_are_here(config) else config.placement.devices
    planned = ""
    if config.placement.strategy == "auto":
        roles = {name: wiring.role(name) for name in wiring.engines}
        config, planned = chosen(config, roles, wiring.engines, gpus, os.cpu_count() or 1)
    config = with_shadows(config, wiring.roles, wiring.shadows)
    if config is not written:
        wiring = wire(config)
    roles = {name: wiring.role(name) for name in wiring.engines}
    arrangement = arrange(config, roles, wiring.engines)
    if arrangement is None:
        return config, wiring, None
    arrangement = replace(arrangement, planned=planned)
    config = filled(config, arrangement, wiring.engines, roles, gpus)
    return config, wire(config), arrangement


def _fixed(config: Config, wiring: Wiring, dataset: Dataset) -> dict[str, object]:
    """What a resume may not change."""
    data = config.data
    fixed: dict[str, object] = {
        "algorithm": config.algorithm,
        "seed": config.seed,
        "data.path": data.path,
        "data.source": data.source,
        "data.options": data.options,
        "data.shuffle": data.shuffle,
        "the number of data rows": dataset.report.row_count,
    }
    for name in wiring.of_role("policy", "critic"):
        table = wiring.tables[name]
        fixed[f"groups.{name}.backend"] = type(table).__struct_config__.tag
        for key in ("model", "scratch"):
            fixed[f"groups.{name}.{key}"] = getattr(table, key)
    return fixed
