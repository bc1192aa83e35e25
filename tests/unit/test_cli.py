"""The command line: what it accepts, how it refuses, and that it stays light."""

from __future__ import annotations

import resource
import subprocess
import sys
import types
from pathlib import Path

import pytest

import asyncrlhf
from asyncrlhf.__main__ import main
from asyncrlhf.config.schema import Config
from asyncrlhf.errors import DataError

ROOT = Path(__file__).parents[2]
TEXT = """
algorithm = "algorithms.grpo:GRPO"
train_steps = 10
prompts_per_step = 4
run_dir = "runs/never-made"
data = {source = "asyncrlhf.data.tasks:reverse"}
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Config]]:
    """What the command line asks of a launcher that does nothing."""
    calls: list[tuple[str, Config]] = []
    launch = types.ModuleType("asyncrlhf.launch")

    def run(config: Config) -> int:
        calls.append(("run", config))
        if config.seed == 13:
            raise DataError("rows.jsonl is empty")
        return config.seed

    def check(config: Config) -> str:
        calls.append(("check", config))
        return "facts"

    launch.run, launch.check = run, check  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "asyncrlhf.launch", launch)
    monkeypatch.setattr(asyncrlhf, "launch", launch, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return calls


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(TEXT)
    return "run.toml"


def test_a_run_gives_the_exit_code_of_the_launcher(asked: list[tuple[str, Config]], path: str) -> None:
    assert main([path, "seed=1", "settings.clip=0.3"]) == 1
    assert main([path]) == 0
    (verb, config), _ = asked
    assert verb == "run"
    assert (config.seed, config.settings) == (1, {"clip": 0.3})


def test_check_prints_and_runs_nothing(
    asked: list[tuple[str, Config]], path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", path, "seed=1"]) == 0
    assert [verb for verb, _ in asked] == ["check"]
    assert capsys.readouterr().out == "facts\n"


@pytest.mark.parametrize("command", [[], ["check"]])
def test_a_refused_configuration_is_one_line_exit_2_and_nothing_written(
    asked: list[tuple[str, Config]], path: str, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    before = sorted(Path().rglob("*"))
    assert main([*command, path, "promts_per_step=4"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "error: run.toml: promts_per_step is not a key; did you mean prompts_per_step?\n"
    assert main([*command, "absent.toml"]) == 2
    assert capsys.readouterr().err.startswith("error: absent.toml: there is no such file (looked in /")
    assert asked == []
    assert sorted(Path().rglob("*")) == before


def test_data_that_cannot_be_read_is_one_line_too(
    asked: list[tuple[str, Config]], path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([path, "seed=13"]) == 2
    assert capsys.readouterr().err == "error: rows.jsonl is empty\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--help"], 0, "usage: python -m asyncrlhf [-h] [--version] CONFIG [key=value ...]"),
        (["check", "--help"], 0, "usage: python -m asyncrlhf check [-h] CONFIG [key=value ...]"),
        (["--version"], 0, "asyncrlhf 0."),
        ([], 2, "the following arguments are required: CONFIG"),
        (["check"], 2, "the following arguments are required: CONFIG"),
        (["run.toml", "--fast"], 2, "unrecognized arguments: --fast"),
    ],
)
def test_usage(arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    said = capsys.readouterr()
    assert caught.value.code == code
    assert words in said.out + said.err


def test_help_names_the_exit_codes_and_check(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "check CONFIG ..." in said
    assert "0 complete, 1 failed, 2 refused, 130 or 143 stopped" in said


@pytest.mark.parametrize("arguments", [["-c", "import asyncrlhf"], ["-m", "asyncrlhf", "--help"]])
def test_import_and_help_take_less_than_half_a_second(arguments: list[str]) -> None:
    """Of processor time, so that a busy machine changes nothing."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.5


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--help"], 0), (["--version"], 0), (["absent.toml"], 2), (["configs", "seed=1"], 2)]
)
def test_nothing_heavy_is_loaded_before_a_run(arguments: list[str], code: int) -> None:
    script = (
        "import sys, asyncrlhf\n"
        "from asyncrlhf.__main__ import main\n"
        "try:\n"
        f"    code = main({arguments})\n"
        "except SystemExit as end:\n"
        "    code = end.code\n"
        "heavy = {'torch', 'transformers', 'ray', 'vllm'} & sys.modules.keys()\n"
        f"assert (code, heavy) == ({code}, set()), (code, heavy)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, capture_output=True)
