"""What importing costs: options load no torch, and transformers works beside a torchvision made for another torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.tiny import grpo

ROOT = Path(__file__).parents[2]


def python(code: str, *path: Path) -> str:
    """Standard output of a fresh interpreter."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def test_options_layouts_and_corrections_load_no_torch() -> None:
    code = """
import sys
import asyncrlhf.backends.torch.options, asyncrlhf.backends.torch.layout
import asyncrlhf.ops.corrections, asyncrlhf.ops.advantages
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""
    assert python(code) == "[]"


def test_processes_of_engines_start_before_torch_is_imported_here(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(grpo(top="train_steps = 1\nprompts_per_step = 1\nanswers_per_prompt = 2\n"))
    code = f"""
import os, sys
os.chdir({str(tmp_path)!r})
from asyncrlhf.runtimes import local
start = local.Host.__init__
def noted(host, place, logs):
    print(place.group, "torch" in sys.modules)
    start(host, place, logs)
local.Host.__init__ = noted
from asyncrlhf.config.load import load
from asyncrlhf.launch import run
print(run(load("run.toml", ["runtime=local"])))
"""
    assert python(code).splitlines() == ["rollout False", "reward False", "policy False", "0"]


@pytest.mark.parametrize(
    ("error", "hidden"),
    [
        ("RuntimeError('operator torchvision::nms does not exist')", True),
        ("ImportError('libtorch.so')", True),
        ("", False),
    ],
)
@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_a_broken_companion_of_torch_is_hidden(tmp_path: Path, name: str, error: str, hidden: bool) -> None:
    for other in {"torchvision", "torchaudio", "torchcodec"} - {name}:
        (tmp_path / f"{other}.py").write_text("")
    package = tmp_path / name
    package.mkdir()
    (package / "part.py").write_text("")
    (package / "__init__.py").write_text(f"import {name}.part\n" + (f"raise {error}\n" if error else ""))
    code = f"""
import importlib.util, sys
from asyncrlhf.backends.torch.guard import guard_companions
print(*guard_companions(), importlib.util.find_spec("{name}") is None, "{name}.part" in sys.modules)
print(*guard_companions())
"""
    assert python(code, tmp_path).split("\n") == [f"{name if hidden else ''} {hidden} {not hidden}".strip()]
