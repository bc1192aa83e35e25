"""What the two ends of an engine's socket say to each other: a msgspec header, then a payload of pickle buffers.

A frame is the header's length (4 bytes, little-endian), the header, and the parts of the payload, whose sizes the
header lists. Payloads are trusted: both ends are processes of one run, joined by an anonymous socket. Arrays of
`OUT_OF_BAND` bytes or more travel as parts of their own, without a copy on the sending side (PEP 574).
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any, Literal, cast

import msgspec
import numpy as np

from asyncrlhf.messages.batch import Joined

__all__ = ("LENGTH", "Header", "decode", "encode", "header_length", "read_header")

OUT_OF_BAND = 1 << 15
LENGTH = 4
_LENGTH = struct.Struct("<I")

Kind = Literal["spawn", "call", "cancel", "close", "ready", "result", "error", "events", "failed"]


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    kind: Kind
    key: int = -1
    """Which call."""
    verb: str = ""
    sizes: tuple[int, ...] = ()
    """Bytes of every part of the payload: the pickle, then its buffers."""


def encode(kind: Kind, payload: Any = None, *, key: int = -1, verb: str = "") -> list[bytes | memoryview]:
    """The frame as parts to be written one after another. Raises pickle.PicklingError."""
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND:
            return True  # into the pickle itself
        buffers.append(raw)
        return False

    if isinstance(payload, dict):
        payload = {name: _joined(value) for name, value in cast("dict[Any, Any]", payload).items()}
    body = pickle.dumps(_joined(payload), protocol=5, buffer_callback=keep)
    sizes = (len(body), *(buffer.nbytes for buffer in buffers))
    header = msgspec.msgpack.encode(Header(kind=kind, key=key, verb=verb, sizes=sizes))
    return [_LENGTH.pack(len(header)) + header, body, *buffers]


def _joined(value: Any) -> Any:
    """A list of arrays, one per row of a batch, travels as one array."""
    rows = cast("list[Any]", value) if isinstance(value, list) else []
    alike = {(row.dtype, row.ndim) if isinstance(row, np.ndarray) else None for row in rows}
    return Joined(rows) if len(alike) == 1 and next(iter(alike)) is not None and rows[0].ndim == 1 else value


def header_length(raw: bytes | bytearray) -> int:
    """From the first LENGTH bytes of a frame."""
    return _LENGTH.unpack(raw)[0]


def read_header(raw: bytes | bytearray) -> Header:
    return msgspec.msgpack.decode(raw, type=Header)


def decode(parts: Sequence[bytearray | bytes]) -> Any:
    """The payload; its arrays are writable where the parts are bytearrays. Raises whatever unpickling raises."""
    return pickle.loads(parts[0], buffers=parts[1:])
