"""What goes to an actor and comes back, as bytes where plain pickle can write it: for many small messages that takes a
fraction of the time that Ray's own serializer does, which asks about every object.

Ray has to see what refers to its store, or it would free that; and it moves large arrays without a copy. Such messages
stay as they are, as does what only Ray's serializer can write.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any

from asyncrlhf.runtimes.frames import OUT_OF_BAND
from asyncrlhf.runtimes.lots import RayLot

__all__ = ("Parcel", "opened", "packed")

Parcel = Any
"""Bytes, or the thing itself, which is never bytes."""


def packed(thing: Any) -> Parcel:
    """`thing` on its way; never raises."""
    written = io.BytesIO()
    pickler = pickle.Pickler(written, protocol=5, buffer_callback=_require_small)
    pickler.dispatch_table = {**copyreg.dispatch_table, RayLot: _unclaimed}
    try:
        pickler.dump(thing)
    except Exception:  # Ray's serializer says what is wrong, if it cannot either
        return thing
    return written.getvalue()


def opened(parcel: Parcel) -> Any:
    """What was packed. Raises whatever unpickling raises."""
    return pickle.loads(parcel) if isinstance(parcel, bytes) else parcel


def _require_small(buffer: pickle.PickleBuffer) -> bool:
    if buffer.raw().nbytes >= OUT_OF_BAND:
        raise BufferError("large")
    return True  # into the pickle itself


def _unclaimed(lot: RayLot) -> tuple[Any, ...]:
    if lot.reference is not None:
        raise TypeError("Ray counts this reference")
    return RayLot, (lot.number,)
