"""A guard for a torchvision that was built for another torch: it must run before transformers is imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys

__all__ = ("guard_torchvision",)


def guard_torchvision() -> bool:
    """Hide a torchvision that cannot be imported, since transformers would fail with it; True if one was hidden.

    A torchvision of the package index beside a CPU build of torch fails with "operator torchvision::nms does not
    exist". Language models need nothing of it.
    """
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return False
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError, AttributeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules["torchvision"] = None  # type: ignore[assignment]
        return True
    return False
