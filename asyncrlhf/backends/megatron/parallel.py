"""The process groups of one megatron model, and where a rank stands in them. Whatever is asked here is asked by all
ranks at once, and waits for the slowest."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from asyncrlhf.backends.megatron.cpu import import_quietly
from asyncrlhf.backends.megatron.options import MegatronOptions
from asyncrlhf.backends.torch.world import BACKENDS, World
from asyncrlhf.errors import ConfigError

__all__ = ("Standing", "leave", "stand", "start_alone")

SEED = 1234
"""Of megatron-core's own random states; nothing here is drawn from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a rank stands in the layout of its model, and with whom it shares what."""

    world: World
    tensor: Any
    """Process group of the ranks that have the other parts of this rank's layers."""
    expert_tensor: Any
    context: Any
    data: Any
    """Process group of the ranks that have the same part of other data parallel copies."""
    expert: Any
    pipeline: Any

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank() == self.pipeline.size() - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank is the one of its data parallel copy that has its results: the first of the last stage."""
        return self.is_last_stage and self.tensor.rank() == self.context.rank() == 0


def start_alone(device: torch.device) -> World:
    """The world of a model on a single rank. Raises ConfigError beside a model of several ranks in this process."""
    if not dist.is_initialized():
        dist.init_process_group(BACKENDS[device.type], store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() > 1:
        raise ConfigError('megatron ranks take processes of their own; use runtime = "local" or "ray"')
    return World()


def stand(options: MegatronOptions, world: World, timeout: float) -> Standing:
    """Make the process groups of `options`' layout. Raises ConfigError if it takes another number of ranks."""
    if options.ranks != world.size:
        raise ConfigError(f"the layout takes {options.ranks} ranks, and {world.size} are here")
    state = import_quietly("megatron.core.parallel_state")
    random = import_quietly("megatron.core.tensor_parallel.random")
    if not state.is_initialized():
        state.initialize_model_parallel(
            tensor_model_parallel_size=options.tensor_parallel,
            pipeline_model_parallel_size=options.pipeline_parallel,
            virtual_pipeline_model_parallel_size=options.virtual_pipeline if options.virtual_pipeline > 1 else None,
            context_parallel_size=options.context_parallel,
            expert_model_parallel_size=options.expert_parallel,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=max(1, round(min(timeout, timedelta(days=30).total_seconds()) / 60)),
        )
        outside = torch.get_rng_state()
        random.model_parallel_cuda_manual_seed(SEED)
        torch.set_rng_state(outside)
    return Standing(
        world=world,
        tensor=state.get_tensor_model_parallel_group(),
        expert_tensor=state.get_expert_tensor_parallel_group(),
        context=state.get_context_parallel_group(),
        data=state.get_data_parallel_group(),
        expert=state.get_expert_model_parallel_group(),
        pipeline=state.get_pipeline_model_parallel_group(),
    )


def leave(world: World) -> None:
    """End the process groups of several ranks. A rank alone keeps its own: other models of the process may be alone,
    too."""
    if world.size > 1:
        import_quietly("megatron.core.parallel_state").destroy_model_parallel()
        world.leave()
