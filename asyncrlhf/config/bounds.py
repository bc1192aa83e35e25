"""What every table is made of: its base, the bounded types of its fields, the check of an import path. Torch-free."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from asyncrlhf.errors import ConfigError

__all__ = ("Amount", "Count", "Decay", "Fraction", "Name", "Positive", "PositiveAmount", "Table", "require_import_path")

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0)]
PositiveAmount = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
Name = Annotated[str, Meta(min_length=1)]


class Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table: immutable, and a key it does not know is an error."""


def require_import_path(key: str, path: str, example: str) -> None:
    """Raises ConfigError unless `path` reads "module:name"; imports nothing."""
    module, separator, name = path.partition(":")
    if not (separator and module and name):
        raise ConfigError(f'{key} = "{path}" is not an import path; write it as "module:name", for example "{example}"')
