"""One compute thread per test process, no model hub, and transformers works beside a torchvision for another torch."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import settings

from asyncrlhf.backends.torch.guard import guard_companions

guard_companions()

settings.register_profile("explore", deadline=None)
"""Other examples each time: where EXAMPLES asks for a number of them, and for `pytest --hypothesis-profile=explore`."""
settings.register_profile("any machine", deadline=None, derandomize=True)
settings.load_profile("explore" if "EXAMPLES" in os.environ else "any machine")

PURE = tuple(Path(__file__).parent / name for name in ("unit", "contract"))
"""Of tests none of which takes long."""
PURE_SECONDS = 120.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One that waits for ever is to end before its caller does; others have the timeout of pyproject.toml."""
    for item in items:
        if any(item.path.is_relative_to(pure) for pure in PURE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PURE_SECONDS))


@pytest.fixture(autouse=True)
def here() -> Generator[None]:
    """A test may go elsewhere; the next one begins where this one did."""
    before = os.getcwd()
    yield
    os.chdir(before)
