"""How a Struct travels when the receiver does not know its type: (import path, msgpack). Losses and transforms do."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec

from asyncrlhf.messages.samples import Message

__all__ = ("Packed", "import_object", "pack", "unpack")


class Packed(Message, frozen=True, kw_only=True):
    """A frozen Struct as (import path, msgpack), e.g. Packed(path="algorithms.grpo:GRPOLoss", data=b"...")."""

    path: str
    data: bytes


def pack(value: msgspec.Struct) -> Packed:
    """Raises TypeError when the type cannot be imported by name where it arrives (a class inside a function)."""
    kind = type(value)
    if "<locals>" in kind.__qualname__:
        raise TypeError(f"{kind.__qualname__} cannot travel: define it at the top of a module that workers can import")
    return Packed(path=f"{kind.__module__}:{kind.__qualname__}", data=msgspec.msgpack.encode(value))


def unpack(packed: Packed) -> Any:
    """The value again. Raises ImportError, AttributeError or msgspec.ValidationError."""
    return msgspec.msgpack.decode(packed.data, type=import_object(packed.path))


def import_object(path: str) -> Any:
    """Import "package.module:name" (nested names with dots). Raises ValueError, ImportError or AttributeError."""
    module, separator, name = path.partition(":")
    if not separator or not module or not name:
        raise ValueError(f"{path!r} is not an import path; write it as 'package.module:name'")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
