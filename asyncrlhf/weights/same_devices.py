"""Which rank of a trainer each process of the rollout engines shares its device with, from the two groups' tables.

Where as many processes sample as ranks train, on the same devices and in turn, each is put on the rank that
HybridFlow's grouping says (zero_redundancy.py): it takes what that rank holds from it, and only the rest from others of
its data parallel copy; experts that several copies divide among them come from all of these. Torch-free.

Example: megatron with tensor_parallel = 4 and vLLM with replicas = 2, tensor_parallel = 2: engine 0 is on ranks 0 and
2, engine 1 on ranks 1 and 3.
"""

from __future__ import annotations

from asyncrlhf.config.groups import MegatronTrain, RolloutTable, TorchTrain, Trained, VllmRollout
from asyncrlhf.errors import ConfigError
from asyncrlhf.messages.samples import Message
from asyncrlhf.weights.zero_redundancy import Regrouping

__all__ = ("SameDevices", "on_the_same_devices")


class SameDevices(Message, frozen=True):
    """Of a rollout group."""

    follows: str
    """The group whose ranks its processes are on."""
    regrouping: Regrouping
    by_rank: bool
    """Ranks put parts, of which a process takes those of its own rank first; False: rank 0 puts everything, as replicas
    without sharding do, or the engines read whole parameters."""


def on_the_same_devices(trained: Trained, name: str, rollout: RolloutTable, *, gpus: bool) -> SameDevices | None:
    """`name`: of the rollout group, which follows `trained`; `gpus`: whether device = "auto" may find one. None: its
    processes are not as many as the ranks, or only one of the two computes on CPUs. Raises ConfigError if the sizes do
    not divide."""
    width = rollout.tensor_parallel if isinstance(rollout, VllmRollout) else 1
    on_cpu = [table.device == "cpu" or (table.device == "auto" and not gpus) for table in (trained, rollout)]
    if rollout.replicas * width != trained.ranks or on_cpu[0] != on_cpu[1]:
        return None
    by_rank = isinstance(rollout, VllmRollout)
    if isinstance(trained, MegatronTrain):
        pipeline, tensor = trained.pipeline_parallel, trained.tensor_parallel
        if tensor % width:
            fits = [size for size in range(1, tensor + 1) if tensor % size == 0]
            sizes = " or ".join(f"{size} (replicas = {trained.ranks // size})" for size in fits)
            raise ConfigError(
                f"groups.{name}.tensor_parallel = {width} does not divide groups.{rollout.follows}.tensor_parallel = "
                f"{tensor}, on whose {trained.ranks} devices its engines take turns; use {sizes}"
            )
    elif isinstance(trained, TorchTrain) and trained.sharding == "full":
        pipeline, tensor = 1, trained.ranks
    else:
        pipeline, tensor, by_rank = 1, width, False
    regrouping = Regrouping(
        pipeline=pipeline,
        tensor=tensor,
        data=trained.ranks // (pipeline * tensor),
        generate_pipeline=1,
        generate_tensor=width,
    )
    return SameDevices(rollout.follows, regrouping, by_rank)
