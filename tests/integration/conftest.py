"""One process of vLLM for each module that asks for it: starting it takes seconds."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.integration.vllm_host import VllmHost


@pytest.fixture(scope="module")
def vllm_process() -> Generator[VllmHost]:
    host = VllmHost()
    yield host
    host.close()


@pytest.fixture
def host(vllm_process: VllmHost) -> Generator[VllmHost]:
    """It has no sampler so far."""
    yield vllm_process
    vllm_process.clear()
