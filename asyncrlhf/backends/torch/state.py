"""What a trainer writes to disk: a Hugging Face directory for others, and a state from which the next step is exact."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from asyncrlhf.backends.torch.model import Model
from asyncrlhf.backends.torch.optimizer import Optimizer
from asyncrlhf.backends.torch.world import spread_like
from asyncrlhf.errors import CheckpointError

__all__ = ("copy_tokenizer", "load_state", "save_model", "save_state", "sync_tree")

STATE_FILE = "trainer.pt"
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
)


def save_model(model: Model, directory: Path) -> None:
    """Write config and weights with transformers, and copy the tokenizer files byte for byte. Durable on return. All
    ranks take part; rank 0 writes."""
    weights = model.whole()
    if model.world.rank:
        return
    directory.mkdir(parents=True, exist_ok=True)
    first_names = {parameter: name for name, parameter in model.parameters().items()}
    named = model.module.named_parameters(remove_duplicate=False)
    state = {name: weights[first_names[parameter]] for name, parameter in named}
    kept = model.module.state_dict().keys() - state.keys()
    state |= {name: buffer for name, buffer in model.module.named_buffers() if name in kept}
    model.module.save_pretrained(directory, state_dict=state)
    copy_tokenizer(model.directory, directory)
    sync_tree(directory)


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy the files of the tokenizer, and of what else belongs to a model, byte for byte."""
    for name in COPIED:
        if (file := source / name).is_file():
            shutil.copyfile(file, directory / name)
    if (templates := source / "additional_chat_templates").is_dir():
        shutil.copytree(templates, directory / templates.name, dirs_exist_ok=True)


def sync_tree(directory: Path) -> None:
    """Make everything in a directory durable."""
    for path in directory.rglob("*"):
        _sync(path)
    _sync(directory)


def save_state(model: Model, optimizer: Optimizer, directory: Path) -> None:
    """Write weights, optimizer and random state into one file, whatever the number of ranks. Durable on return. All
    ranks take part; rank 0 writes."""
    weights, moments = model.whole(), optimizer.state(model.kept)
    if model.world.rank:
        return
    directory.mkdir(parents=True, exist_ok=True)
    state = {
        "weights": weights,
        "optimizer": moments,
        "random": torch.get_rng_state(),
        "random_device": torch.cuda.get_rng_state(model.device) if model.device.type == "cuda" else None,
    }
    with (directory / STATE_FILE).open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    _sync(directory)


@torch.no_grad()
def load_state(model: Model, optimizer: Optimizer, directory: Path) -> None:
    """Restore what `save_state` wrote with any number of ranks, each its part. Raises CheckpointError if it is missing,
    torn, or of another model; the trainer is then unchanged."""
    path = directory / STATE_FILE
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    parameters, weights = model.parameters(), state["weights"]
    saved = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wanted = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if saved != wanted:
        different = sorted(name for name in saved.keys() | wanted.keys() if saved.get(name) != wanted.get(name))
        raise CheckpointError(
            f"{path} is of another model: {len(different)} parameters differ, among them {different[0]!r}, which has "
            f"shape {saved.get(different[0])} there and {wanted.get(different[0])} in {str(model.directory)!r}"
        )
    for name, parameter in parameters.items():
        parameter.copy_(spread_like(weights[name], parameter))
    optimizer.load(state["optimizer"])
    torch.set_rng_state(state["random"])
    if state["random_device"] is not None and model.device.type == "cuda":
        torch.cuda.set_rng_state(state["random_device"], model.device)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
