"""A guard for companions of torch that were built for another torch: it must run before transformers is imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys

__all__ = ("guard_companions",)

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def guard_companions() -> tuple[str, ...]:
    """Hide companions that cannot be imported, since transformers would fail with them; gives their names.

    Those of the package index beside a CPU build of torch fail with "operator torchvision::nms does not exist", or
    look for a library of CUDA. Language models need nothing of them.
    """
    return tuple(name for name in COMPANIONS if _hidden(name))


def _hidden(name: str) -> bool:
    if name in sys.modules or importlib.util.find_spec(name) is None:
        return False
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError, OSError, AttributeError):
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[module]
        sys.modules[name] = None  # type: ignore[assignment]
        return True
    return False
