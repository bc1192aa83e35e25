"""An algorithm is short: mathematics included, no plumbing."""

from __future__ import annotations

from pathlib import Path

import pytest

import algorithms


@pytest.mark.parametrize(("name", "most"), [("grpo", 90), ("ppo", 110), ("sft", 90), ("reward_model", 90)])
def test_an_algorithm_has_no_more_lines_than_this(name: str, most: int) -> None:
    assert len((Path(algorithms.__path__[0]) / f"{name}.py").read_text().splitlines()) <= most
