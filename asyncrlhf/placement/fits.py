"""Whether the groups of a pool fit the memory of its GPUs, by the least that each is known to hold: a budget per group.

Says nothing about what is not known: a model without files yet, a GPU without nvidia-smi.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Collection, Iterator, Mapping

from asyncrlhf.config.groups import Compute, RolloutTable, TorchShadow, VllmRollout
from asyncrlhf.config.schema import Pool
from asyncrlhf.placement.cluster import GIB
from asyncrlhf.placement.earlier import least_bytes, shape_in

__all__ = ("device_memory", "memory_warnings")

PATIENCE = 10.0
"""Seconds that nvidia-smi may take."""


def device_memory() -> float | None:
    """Bytes of this machine's smallest GPU; None: nobody says."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    words = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout.split()
        return min((float(word) for word in said), default=math.nan) * (1 << 20) if said else None
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def memory_warnings(
    pools: Mapping[str, Pool],
    tables: Mapping[str, object],
    in_turn: Mapping[str, Collection[str]],
    have: float | None,
) -> Iterator[str]:
    """For pools whose groups do not fit a GPU of `have` bytes. `in_turn`: pool -> groups of it that are never there at
    once."""
    for name, pool in pools.items():
        if not pool.devices or have is None:
            continue
        needs: dict[str, float] = {}
        for group, table in tables.items():
            if isinstance(table, Compute) and table.pool == name and (need := _on_device(table, pool.devices, have)):
                needs[group] = need
        turns = {group: need for group, need in needs.items() if group in in_turn.get(name, ())}
        need = sum(needs.values()) - sum(turns.values()) + max(turns.values(), default=0.0)
        if need <= have:
            continue
        each = ", ".join(f"{group} {size / GIB:.1f}" for group, size in needs.items())
        how = "one at a time" if turns and len(turns) == len(needs) else "side by side"
        fractions = [g for g in needs if isinstance(table := tables[g], VllmRollout) and not table.kv_cache_bytes]
        ways = "more devices, larger parallel sizes or a smaller dtype"
        if not turns and len(needs) > 1:
            ways = f'placement.sets that take turns with placement.offload = "always", {ways}'
        if fractions and len(needs) > 1 and not turns:
            left = max(0.05, (have - sum(need for g, need in needs.items() if g not in fractions)) / have)
            ways = f"groups.{fractions[0]}.gpu_memory_utilization = {math.floor(left * 100) / 100:g} or less, {ways}"
        yield (
            f"pools.{name}: its groups need at least {need / GIB:.1f} GiB of a GPU {how} ({each}), and a GPU has "
            f"{have / GIB:.1f} GiB; use {ways}"
        )


def _on_device(table: Compute, devices: int, have: float) -> float:
    """Bytes of a group's engines on the fullest device; 0: not known."""
    if isinstance(table, VllmRollout) and not table.kv_cache_bytes:
        return table.gpu_memory_utilization * have
    shape = shape_in(table)
    if shape is None or table.device == "cpu":
        return 0.0
    count = table.replicas if isinstance(table, RolloutTable | TorchShadow) else table.ranks
    extra = float(table.kv_cache_bytes) if isinstance(table, VllmRollout) else 0.0
    return (least_bytes(table, shape) / count + extra) * math.ceil(count / devices)
