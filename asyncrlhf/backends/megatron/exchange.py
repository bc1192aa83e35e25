"""Hugging Face tensors of a model whose parts lie on several ranks: read part by part, and put together one at a time.

All ranks call these together, and wait for each other; only the rank that a tensor is put together for has all of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from asyncrlhf.backends.megatron.families import Piece
from asyncrlhf.backends.megatron.model import Model
from asyncrlhf.errors import ConfigError
from asyncrlhf.weights.fused import fused

__all__ = ("Catalogue", "Reader", "load", "put_together", "weights_of")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Reader:
    """The tensors of a Hugging Face directory, of which only what is asked for is read."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError for a directory without safetensors files."""
        self._directory = directory
        if (index := directory / INDEX).is_file():
            files: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        elif (directory / SINGLE).is_file():
            with safe_open(directory / SINGLE, "pt") as file:
                files = dict.fromkeys(file.keys(), SINGLE)
        else:
            raise ConfigError(
                f"model = {str(directory)!r} has neither {SINGLE} nor {INDEX}, which megatron reads weights from; save "
                "the model as safetensors"
            )
        self._files = files
        self._open: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, piece: Piece) -> Tensor:
        """The piece's part of its tensor. Raises ConfigError if there is none."""
        name, expert = piece.name, None
        if name not in self._files:
            name, expert = fused(piece.name)
        if name not in self._files:
            raise ConfigError(
                f"model = {str(self._directory)!r} lacks weight {piece.name!r}; give the directory of a model with all "
                "weights its config.json asks for"
            )
        part = self._file(self._files[name]).get_slice(name)
        if expert is None:
            return part[piece.start : piece.stop] if piece.dim == 0 else part[:, piece.start : piece.stop]
        height = part.get_shape()[1] // (1 if piece.name.endswith("down_proj.weight") else 2)
        top = height if piece.name.endswith("up_proj.weight") else 0
        if piece.dim == 0:
            return part[expert, top + piece.start : top + piece.stop]
        return part[expert, top : top + height, piece.start : piece.stop]

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self._directory / name, "pt")
        return self._open[name]


@torch.no_grad()
def load(model: Model) -> None:
    """Fill this rank's parameters from its model's directory. A value head that is missing, or to be new, starts at
    0. Raises ConfigError if weights are missing."""
    reader = Reader(model.directory)
    for _, parameter, pieces in model.parameters():
        parameter.zero_()
        for piece in pieces:
            if piece.name.startswith("score.") and (model.options.new_head or piece.name not in reader):
                continue
            _local(parameter, piece).copy_(reader.read(piece))


def _local(parameter: Tensor, piece: Piece) -> Tensor:
    return parameter.narrow(piece.dim, piece.local, piece.stop - piece.start)


class Held(NamedTuple):
    """A parameter of some rank, and where it lies in Hugging Face tensors."""

    name: str
    shape: tuple[int, ...]
    pieces: list[Piece]

    def shape_of(self, piece: Piece) -> tuple[int, ...]:
        """Of the part that a piece means."""
        return (*self.shape[: piece.dim], piece.stop - piece.start, *self.shape[piece.dim + 1 :])


class Source(NamedTuple):
    """A part of a Hugging Face tensor that some rank has."""

    rank: int
    piece: Piece
    shape: tuple[int, ...]


class Catalogue:
    """Which rank has which part of which Hugging Face tensor; the same on all ranks."""

    def __init__(self, model: Model) -> None:
        self._world = model.standing.world
        self._own: dict[tuple[str, int, int], tuple[str, Piece]] = {}
        """(tensor, start, stop) -> (parameter, piece) of this rank."""
        own: list[Held] = []
        for name, parameter, pieces in model.parameters():
            own.append(Held(name, tuple(parameter.shape), pieces))
            for piece in pieces:
                self._own[piece.name, piece.start, piece.stop] = name, piece
        self.held = self._world.everyones(own)
        """By rank."""
        self._sources: dict[str, dict[tuple[int, int], Source]] = {}
        for rank, parts in enumerate(self.held):
            for part in parts:
                for piece in part.pieces:
                    self._sources.setdefault(piece.name, {}).setdefault(
                        (piece.start, piece.stop), Source(rank, piece, part.shape_of(piece))
                    )
        self.names = sorted(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        source = next(iter(self._sources[name].values()))
        found = list(source.shape)
        found[source.piece.dim] = max(stop for _, stop in self._sources[name])
        return tuple(found)

    def spread(self) -> dict[str, int]:
        """A rank for each tensor, which has a part of it, so that all ranks come to about the same number of values."""
        loads = [0] * self._world.size
        found: dict[str, int] = {}
        for name in sorted(self.names, key=lambda name: (-_count(self.shape(name)), name)):
            ranks = {source.rank for source in self._sources[name].values()}
            found[name] = min(ranks, key=lambda rank: (loads[rank], rank))
            loads[found[name]] += _count(self.shape(name))
        return found

    def sources(self, name: str) -> list[Source]:
        return [self._sources[name][place] for place in sorted(self._sources[name])]

    def own(self, source: Source, tensors: Mapping[str, Tensor]) -> Tensor:
        """The part that this rank has of a Hugging Face tensor, from `tensors` by parameter."""
        name, piece = self._own[source.piece.name, source.piece.start, source.piece.stop]
        return _local(tensors[name], piece)


def put_together(
    catalogue: Catalogue, rank: int, tensors: Mapping[str, Tensor], target: Callable[[str], int]
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the Hugging Face tensors that are for this rank, on the CPU; `target` says whom each is for.
    `tensors`: of this rank, by the name that `Model.parameters` gives the parameter of the same shape."""
    dtype = next(iter(tensors.values())).dtype
    for name in catalogue.names:
        receiver = target(name)
        found = torch.empty(catalogue.shape(name), dtype=dtype) if receiver == rank else None
        for source in catalogue.sources(name):
            part = catalogue.own(source, tensors).detach() if source.rank == rank else None
            if found is None:
                if part is not None:
                    dist.send(part.cpu().contiguous(), receiver)
                continue
            if part is None:
                part = torch.empty(source.shape, dtype=dtype)
                dist.recv(part, source.rank)
            found.narrow(source.piece.dim, source.piece.start, source.piece.stop - source.piece.start).copy_(part)
        if found is not None:
            yield name, found


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def weights_of(model: Model) -> dict[str, nn.Parameter]:
    """This rank's parameters by name."""
    return {name: parameter for name, parameter, _ in model.parameters()}
