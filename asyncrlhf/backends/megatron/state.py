"""What a megatron model writes to disk: a Hugging Face directory for others, and a state from which the next step is
exact, in this or another layout. All ranks take part."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from queue import Queue, SimpleQueue
from typing import Any

import torch
from safetensors.torch import save_file

from asyncrlhf.backends.megatron.cpu import calling, import_quietly
from asyncrlhf.backends.megatron.exchange import INDEX, SINGLE, Catalogue, put_together, weights_of
from asyncrlhf.backends.megatron.model import Model
from asyncrlhf.backends.megatron.optimizer import Optimizer
from asyncrlhf.backends.torch.state import copy_tokenizer, sync_tree
from asyncrlhf.errors import CheckpointError

__all__ = ("load_state", "save_model", "save_state")

STATE_DIRECTORY = "megatron"
FORMAT = "fully_reshardable"
"""Of the optimizer's part: any layout can read it."""


def save_model(model: Model, catalogue: Catalogue, directory: Path) -> None:
    """Write config, weights and tokenizer; every rank writes the tensors that are put together on it, about the same
    number of values each. Durable on return."""
    world = model.standing.world
    directory.mkdir(parents=True, exist_ok=True)
    targets = catalogue.spread()
    own = dict(put_together(catalogue, world.rank, weights_of(model), targets.__getitem__))
    writers = sorted(set(targets.values()))
    files = {
        rank: SINGLE if len(writers) == 1 else f"model-{number:05d}-of-{len(writers):05d}.safetensors"
        for number, rank in enumerate(writers, 1)
    }
    if own:
        save_file(own, directory / files[world.rank], metadata={"format": "pt"})
    sizes = world.everyones(sum(tensor.nbytes for tensor in own.values()))
    if world.rank == 0:
        if len(writers) > 1:
            names = {name: files[targets[name]] for name in catalogue.names}
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": names}
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        _as_saved(model).save_pretrained(directory)
        copy_tokenizer(model.directory, directory)
        sync_tree(directory)
    world.everyones(None)


def _as_saved(model: Model) -> Any:
    """The Hugging Face configuration of what is written."""
    config = copy.deepcopy(model.config)
    config.dtype = torch.bfloat16 if model.options.dtype == "bfloat16" else torch.float32
    if model.options.head == "value":
        from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

        config.architectures = [MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES[config.model_type]]
        config.num_labels = 1
    return config


def save_state(model: Model, optimizer: Optimizer, directory: Path) -> None:
    """Write weights, main parameters and moments with megatron-core's distributed checkpoints. Durable on return."""
    target = directory / STATE_DIRECTORY
    if model.standing.world.rank == 0:
        target.mkdir(parents=True, exist_ok=True)
    model.standing.world.everyones(None)
    checkpointing = import_quietly("megatron.core.dist_checkpointing")
    _write_in_process()
    with calling():
        checkpointing.save(_state(model, optimizer, loading=False), str(target), validate_access_integrity=True)
    if model.standing.world.rank == 0:
        sync_tree(directory)
    model.standing.world.everyones(None)


@torch.no_grad()
def load_state(model: Model, optimizer: Optimizer, directory: Path) -> None:
    """Restore what `save_state` wrote in any layout. Raises CheckpointError if it is missing, torn, or of another
    model."""
    target = directory / STATE_DIRECTORY
    checkpointing = import_quietly("megatron.core.dist_checkpointing")
    _load_without_step()
    with calling():
        try:
            found = checkpointing.load(_state(model, optimizer, loading=True), str(target))
        except (OSError, RuntimeError, KeyError, ValueError, checkpointing.core.CheckpointingException) as error:
            raise CheckpointError(f"{target} cannot be read: {str(error).partition(chr(10))[0]}") from error
        for number, chunk in enumerate(model.chunks):
            chunk.load_state_dict(found["model"][str(number)])
        for number, part in enumerate(optimizer.inner.chained_optimizers):
            state = part.state_dict()
            for group in state["optimizer"]["param_groups"]:
                group["step"] = found["step"]
            moments = {"param_state": found["optimizer"][str(number)], "param_state_sharding_type": FORMAT}
            part.load_state_dict(state | moments)
    for adamw in optimizer.adamws():
        for state in adamw.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()  # megatron-core gives all parameters one and the same


def _state(model: Model, optimizer: Optimizer, *, loading: bool) -> dict[str, Any]:
    """What is written, or to be filled. The number of chunks and of optimizers differs between layouts, and leaves no
    trace in the files: tensors are found by their names in the whole model."""
    sharding = {"distrib_optim_sharding_type": FORMAT, "chained_optim_avoid_prefix": True}
    chunks = {str(number): chunk.sharded_state_dict(metadata=sharding) for number, chunk in enumerate(model.chunks)}
    weights = {"model": chunks["0"]} if len(chunks) == 1 else {f"model{number}": own for number, own in chunks.items()}
    parts: dict[str, Any] = {}
    step = 0
    for number, part in enumerate(optimizer.inner.chained_optimizers):
        with _without_gaps(part):
            state = part.sharded_state_dict(dict(weights), is_loading=loading, metadata=sharding)
        parts[str(number)] = state["param_state"]
        step = max(step, int(state["optimizer"]["param_groups"][0].get("step", 0)))
    return {"model": chunks, "optimizer": parts, "step": step}


@cache
def _write_in_process() -> None:
    """Let checkpoints be written by the process that saves them: megatron-core would fork it, and leave one more behind
    that passes the results on."""
    files = import_quietly("megatron.core.dist_checkpointing.strategies.filesystem_async")

    class Writer(files.FileSystemWriterAsync):
        @staticmethod
        def write_preloaded_data_multiproc(
            transforms: list[Any], remote: bool, rank: int, buckets: list[Any], results: SimpleQueue[Any]
        ) -> None:
            found: dict[int, Any] | Exception = {}
            for number, bucket in enumerate(buckets):
                said, running = SimpleQueue[Any](), Queue[int]()
                running.put(number)
                files.FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, said, running, True)
                result = said.get()[1]
                if isinstance(result, Exception):
                    found = result
                    break
                found[number] = result
            results.put(found)

    files._results_queue = SimpleQueue[Any]()
    import_quietly("megatron.core.dist_checkpointing.strategies.torch").FileSystemWriterAsync = Writer


@cache
def _load_without_step() -> None:
    """Let torch's AdamW, which stands in for Transformer Engine's, be loaded: it has a step count per parameter, which
    checkpoints do not have and megatron-core (0.16.1) looks for."""
    kind = import_quietly("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    original = kind._set_main_param_and_optimizer_states

    def without_step(self: Any, model_param: Any, tensors: Any) -> None:
        group, place = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        step = state.pop("step", None)
        try:
            original(self, model_param, tensors)
        finally:
            if step is not None:
                state["step"] = step

    kind._set_main_param_and_optimizer_states = without_step


@contextmanager
def _without_gaps(part: Any) -> Generator[None]:
    """Inside, an optimizer's parameters are where they are in a copy of its buffers that lacks the padding behind each
    bucket: megatron-core (0.16.1) makes such a copy, but looks at the places in the buffers, and saves what is there
    instead if an embedding that is tied across stages has a bucket of its own."""
    kept = [buffer.param_index_map for buffer in part.buffers]
    for buffer in part.buffers:
        padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
        gaps = [0, *itertools.accumulate(padding)]
        buffer.param_index_map = {
            parameter: (start - gaps[bucket], end - gaps[bucket], bucket)
            for parameter, (start, end, bucket) in buffer.param_index_map.items()
        }
    try:
        yield
    finally:
        for buffer, places in zip(part.buffers, kept, strict=True):
            buffer.param_index_map = places
