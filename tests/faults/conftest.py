"""One fork server for all fault tests of a session, and one run of four train steps to copy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import scene
from tests.faults.forks import Forks


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    server = Forks()
    yield server
    server.close()


@pytest.fixture(scope="session")
def four_steps(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("four")
    child = forks.start(directory, scene.write(directory), "train_steps=4")
    assert child.wait() == 0, child.text
    return directory


@pytest.fixture
def trained(four_steps: Path, tmp_path: Path) -> Path:
    """A directory with run.toml, for six train steps, and in `run` a completed run of four."""
    shutil.copytree(four_steps, tmp_path, symlinks=True, dirs_exist_ok=True)
    return tmp_path
