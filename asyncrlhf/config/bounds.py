"""What every table is made of: its base, the bounded types of its fields, the check of an import path. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from asyncrlhf.errors import ConfigError

__all__ = (
    "PATTERNS",
    "Amount",
    "Attention",
    "Cap",
    "Correction",
    "Count",
    "Decay",
    "Device",
    "Dtype",
    "Fraction",
    "Head",
    "Label",
    "Layout",
    "Name",
    "Positive",
    "PositiveAmount",
    "Recompute",
    "Sharding",
    "Share",
    "Table",
    "require_import_path",
    "require_one_source",
)

DEVICE = "^(auto|cpu|cuda(:(0|[1-9][0-9]?))?)$"
LABEL = r"^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$"
PATTERNS: Mapping[str, str] = {
    DEVICE: 'a device; use "auto", "cpu", "cuda" or one GPU, such as "cuda:1"',
    LABEL: "a label of a node; use letters, digits, and -, _ and . between them",
}
"""A pattern of a field's type -> what it stands for, for messages."""

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0)]
PositiveAmount = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Share = Annotated[float, Meta(gt=0, le=1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
Cap = Annotated[float, Meta(gt=1)]
Name = Annotated[str, Meta(min_length=1)]
Device = Annotated[str, Meta(pattern=DEVICE)]
Label = Annotated[str, Meta(pattern=LABEL)]
Dtype = Literal["float32", "bfloat16"]
Head = Literal["lm", "value"]
Layout = Literal["padded", "packed", "shared"]
Sharding = Literal["none", "full"]
Recompute = Literal["none", "selective", "full"]
Attention = Literal["auto", "sdpa", "flash_attention_2"]
Correction = Literal["none", "truncated_is", "masked_is", "decoupled"]


class Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table: immutable, and a key it does not know is an error."""


def require_import_path(key: str, path: str, example: str) -> None:
    """Raises ConfigError unless `path` reads "module:name"; imports nothing."""
    module, separator, name = path.partition(":")
    if not (separator and module and name):
        raise ConfigError(f'{key} = "{path}" is not an import path; write it as "module:name", for example "{example}"')


def require_one_source(path: str | None, source: str | None, options: Mapping[str, Any]) -> None:
    """Raises ConfigError unless exactly one of `path` (a .jsonl file) and `source` (a factory) is set, and options only
    with the latter."""
    if (path is None) == (source is None):
        given = "both are set" if path is not None else "neither is set"
        raise ConfigError(f"path, source: {given}; set exactly one: path to a .jsonl file or source to a factory")
    if path is not None and not path.endswith(".jsonl"):
        raise ConfigError(f'path = "{path}" is not a .jsonl file; convert it, or read it in a source of your own')
    if path is not None and options:
        raise ConfigError("options are the arguments of a source, and path is set; remove one of the two")
    if source is not None:
        require_import_path("source", source, "asyncrlhf.data.tasks:reverse")
