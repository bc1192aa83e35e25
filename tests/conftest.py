"""One compute thread per test process, no model hub, and transformers works beside a torchvision for another torch."""

from __future__ import annotations

import os
from collections.abc import Generator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import settings

from asyncrlhf.backends.torch.guard import guard_companions

guard_companions()

settings.register_profile("explore", deadline=None)
"""By hand: `pytest --hypothesis-profile=explore` draws other examples each time."""
settings.register_profile("any machine", deadline=None, derandomize=True)
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def here() -> Generator[None]:
    """A test may go elsewhere; the next one begins where this one did."""
    before = os.getcwd()
    yield
    os.chdir(before)
