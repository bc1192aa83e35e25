"""What goes to an actor and comes back, as bytes where plain pickle can write it: for many small messages that takes a
fraction of the time that Ray's own serializer does, which asks about every object.

Ray has to see what refers to its store or its actors, or it would free that; and it moves large arrays without a copy.
Such messages stay as they are, as does what only Ray's serializer can write, or send by value: classes and functions of
the program's main module, which another process has not.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any, NoReturn

from ray import ObjectRef
from ray.actor import ActorHandle

from asyncrlhf.runtimes.frames import OUT_OF_BAND
from asyncrlhf.runtimes.lots import RayLot

__all__ = ("Parcel", "opened", "packed")

Parcel = Any
"""Bytes, or the thing itself, which is never bytes."""
MAIN = b"__main__"
"""Also in the text of a message; that goes by Ray's serializer, too, and arrives as well."""


def packed(thing: Any) -> Parcel:
    """`thing` on its way; never raises."""
    written = io.BytesIO()
    pickler = pickle.Pickler(written, protocol=5, buffer_callback=_require_small)
    pickler.dispatch_table = copyreg.dispatch_table | {RayLot: _unclaimed, ObjectRef: _counted, ActorHandle: _counted}
    try:
        pickler.dump(thing)
    except Exception:  # Ray's serializer says what is wrong, if it cannot either
        return thing
    parcel = written.getvalue()
    return thing if MAIN in parcel else parcel


def opened(parcel: Parcel) -> Any:
    """What was packed. Raises whatever unpickling raises."""
    return pickle.loads(parcel) if isinstance(parcel, bytes) else parcel


def _require_small(buffer: pickle.PickleBuffer) -> bool:
    if buffer.raw().nbytes >= OUT_OF_BAND:
        raise BufferError("large")
    return True  # into the pickle itself


def _unclaimed(lot: RayLot) -> tuple[Any, ...]:
    return _counted(lot) if lot.reference is not None else (RayLot, (lot.number,))


def _counted(reference: object) -> NoReturn:
    raise TypeError("Ray counts this reference")
