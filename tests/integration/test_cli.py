"""The command line as a user meets it: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import importlib
import json
import os
import pty
import re
import resource
import select
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLANS = sorted((ROOT / "configs").glob("plan_*.toml"))
CONFIGS = sorted({*(ROOT / "configs").glob("*.toml")} - {*PLANS})
SCRATCH = """{ characters = "abc>", config = { vocab_size = 8, hidden_size = 16, num_attention_heads = 2 } }"""
TINY = """
algorithm = "algorithms.grpo:GRPO"
train_steps = 6
prompts_per_step = 4
answers_per_prompt = 2
run_dir = "runs/tiny"
runtime = "inproc"
max_staleness = 2
off_policy = "decoupled"
[settings.loss]
kl = 0.01
[data]
source = "asyncrlhf.data.tasks:reverse"
options = { length = 2, alphabet = "abc" }
[evaluation]
every = 2
source = "asyncrlhf.data.tasks:reverse"
options = { length = 2, alphabet = "abc", rows = 4 }
[groups.policy.scratch]
characters = "abc>"
config = { vocab_size = 8, hidden_size = 16, intermediate_size = 32, num_hidden_layers = 1, num_attention_heads = 2, \
num_key_value_heads = 1, max_position_embeddings = 32, tie_word_embeddings = true }
[groups.rollout]
max_tokens = 4
max_sequence_tokens = 8
[groups.reference]
[groups.reward]
function = "tests.integration.tiny:graded"
[checkpoint]
every = 4
"""
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
FILES = {
    *("config.toml", "events.jsonl", "metrics.jsonl", "summary.json", "trace.json"),
    *("checkpoints", "initial", "final", ".lock"),
}


def asyncrlhf(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m asyncrlhf *arguments` in `directory`, with pipes for its output."""
    command = [sys.executable, "-m", "asyncrlhf", *arguments]
    return subprocess.run(command, cwd=directory, env=ENVIRONMENT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run that has ended, and what it printed."""
    directory = tmp_path_factory.mktemp("tiny")
    (directory / "tiny.toml").write_text(TINY)
    done = asyncrlhf(directory, "tiny.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "runs/tiny", done


# ---- check -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_check_says_what_follows_from_a_configuration(path: Path, tmp_path: Path) -> None:
    done = asyncrlhf(tmp_path, "check", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    text, _, facts = done.stdout.partition("\nsamples per train step")
    table = tomllib.loads(text)
    assert table["run_dir"] == tomllib.loads(path.read_text())["run_dir"]
    assert "policy" in table["groups"]
    assert "live rollouts" in facts
    assert "lag" in facts
    assert not list(tmp_path.iterdir()), "check writes nothing"

    resolved = tmp_path / "resolved.toml"
    resolved.write_text(text)
    assert asyncrlhf(tmp_path, "check", "resolved.toml").stdout == done.stdout, "the resolved file says the same"


@pytest.mark.parametrize(
    ("path", "model"),
    [("gsm8k/qwen_1.5b.toml", "Qwen2.5-1.5B-Instruct"), ("smollm2/grpo.toml", "SmolLM2-135M-Instruct")],
)
def test_check_validates_runs_of_pretrained_models_where_their_weights_and_gpus_are_not(
    path: str, model: str, tmp_path: Path
) -> None:
    """Stand-ins for what a user brings: the model's config.json, and a row of the data."""
    directory, data = tmp_path / "models" / model, tmp_path / "data/gsm8k"
    directory.mkdir(parents=True)
    data.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    for name in ("train", "test"):
        (data / f"{name}.jsonl").write_text('{"question": "How much is 2 + 3?", "answer": "2 + 3 = 5\\n#### 5"}\n')
    done = asyncrlhf(tmp_path, "check", str(ROOT / "configs" / path))
    assert (done.returncode, done.stderr) == (0, "")
    assert tomllib.loads(done.stdout.partition("\nsamples per train step")[0])["groups"]["rollout"]["backend"] == "vllm"


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("so there are 1,234 eggs.", "2 * 617 = 1234\n#### 1234", 1.0),
        ("that is \\boxed{18}, not 17", "#### 18", 1.0),
        ("that is \\boxed{18}", "#### 18", 1.0),
        ("it costs $3.50", "#### 3.5", 1.0),
        ("minus -4 degrees", "#### -4", 1.0),
        ("I do not know", "#### 5", 0.0),
    ],
)
def test_the_gsm8k_reward_compares_last_numbers(
    response: str, answer: str, reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "configs/gsm8k")
    assert importlib.import_module("gsm8k").verify("", response, answer) == reward


# ---- plan ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.name)
def test_plan_says_where_models_should_compute(path: Path, tmp_path: Path) -> None:
    done = asyncrlhf(tmp_path, "plan", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("GiB", "bound by", "bubble", "simulated on the ledger", "strategies, best placement of each"):
        assert part in done.stdout
    assert not list(tmp_path.iterdir()), "plan writes nothing"


def test_plan_calibrates_from_a_run(tiny: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    done = asyncrlhf(tiny[0].parents[1], "plan", "--calibrate", "runs/tiny", "max_staleness=4")
    assert (done.returncode, done.stderr) == (0, "")
    assert "as it ran" in done.stdout
    assert "max_staleness=4" in done.stdout


def test_check_knows_of_the_run_before(tiny: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """Its facts are read, whatever they are: a run of 6 tiny steps says nothing that could be relied on."""
    done = asyncrlhf(tiny[0].parents[1], "check", "tiny.toml", "lookahead=0", "max_staleness=0", "off_policy=none")
    assert (done.returncode, done.stderr) == (0, "")
    assert "warning: overlap" not in done.stdout, "nothing overlaps with lookahead = 0"


def test_check_takes_less_than_a_second_and_loads_nothing_heavy(tmp_path: Path) -> None:
    """Of processor time, so that a busy machine changes nothing."""
    script = (
        "import sys\n"
        "from asyncrlhf.__main__ import main\n"
        f"assert main(['check', {str(ROOT / 'configs/quickstart.toml')!r}]) == 0\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'safetensors', 'ray', 'vllm'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    seconds: list[float] = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-c", script], check=True, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 1.0


@pytest.mark.parametrize("verb", [[], ["check"]], ids=["run", "check"])
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("groups.reward.function=tests.integration.tiny:grated", "groups.reward.function = "),
        ("groups.reward.functoin=x", "groups.reward.functoin is not a key; did you mean groups.reward.function?"),
        ("algorithm=algorithms.grpo:GRBO", 'algorithm = "algorithms.grpo:GRBO" cannot be imported'),
        ("groups.policy={model = 'nowhere'}", 'groups.policy.model = "nowhere" is not a Hugging Face directory'),
        ("data.source=asyncrlhf.data.tasks:revers", "data.source = "),
        ("data.options.length=0", "length = 0 leaves nothing to reverse"),
        ("data={source = 'os:listdir', options = {path = 'x'}}", 'data.source = "os:listdir" raised FileNotFoundError'),
        ("groups.rollout.device=gpu", 'groups.rollout.device = "gpu" is not a device'),
        (
            "groups.policy.optimizer={schedule = 'cosine', warmup_steps = 6}",
            'optimizer.warmup_steps = 6 leaves no step for schedule = "cosine", which ends at train_steps = 6',
        ),
        ("after=['first.toml']", "first.toml: there is no such file"),
        ("settings.minibatches=two", "settings.minibatches"),
        ("max_staleness=1", ""),
    ],
)
def test_a_refusal_is_one_line_on_stderr_exit_2_and_leaves_nothing(
    tmp_path: Path, verb: list[str], override: str, words: str
) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    more = ["lookahead=2"] if not words else []
    done = asyncrlhf(tmp_path, *verb, "tiny.toml", override, *more)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.toml"]


def refused(tmp_path: Path, override: str) -> str:
    """What a run says that is refused although `check` sees nothing wrong."""
    (tmp_path / "tiny.toml").write_text(TINY)
    assert asyncrlhf(tmp_path, "check", "tiny.toml", override).returncode == 0
    done = asyncrlhf(tmp_path, "tiny.toml", override)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()
    return done.stderr


@pytest.mark.parametrize("group", ["policy", "rollout", "reference"])
def test_l11_a_gpu_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path, group: str) -> None:
    more = f", scratch = {SCRATCH}" if group == "policy" else ", max_tokens = 4" if group == "rollout" else ""
    said = refused(tmp_path, f"groups.{group}={{device = 'cuda:99'{more}}}")
    assert re.match(rf'error: groups\.{group}\.device = "cuda:99": need cuda:99, have \d+ GPUs; ', said)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["sliding_attention"], "sliding_window": 4}, "qwen2 has layers of type sliding_attention"),
        ({"model_type": "clip"}, "transformers has no causal language model of type clip"),
        ({"model_type": "nonsense"}, "nonsense"),
    ],
    ids=["sliding", "no-lm", "unknown"],
)
def test_an_architecture_that_is_not_served_is_refused(
    tiny: tuple[Path, Any], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    said = refused(tmp_path, f"groups.reference.model={_changed(tiny[0], tmp_path, changes)}")
    assert said.startswith("error: groups.reference: ")
    assert words in said


def test_what_only_an_engine_can_see_is_one_line(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    model = _changed(tiny[0], tmp_path, {})
    (model / "model.safetensors").unlink()
    done = asyncrlhf(tmp_path, "tiny.toml", f"groups.reference.model={model}", "observe.console=off")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ConfigError: group 'reference': model = ")
    assert done.stderr.count("\n") == 1
    assert json.loads((tmp_path / "runs/tiny/summary.json").read_bytes())["reason"] == "ConfigError"


def _changed(run: Path, directory: Path, changes: dict[str, Any]) -> Path:
    """A copy of the model that `run` began with, but for `changes` in its config.json."""
    model = shutil.copytree(run / "initial/policy", directory / "model")
    config = json.loads((model / "config.json").read_bytes())
    (model / "config.json").write_text(json.dumps(config | changes))
    return model


# ---- the run directory -----------------------------------------------------------------------------------------------
def test_a_run_directory_holds_the_files_of_the_contract(tiny: tuple[Path, Any]) -> None:
    run, _ = tiny
    assert {path.name for path in run.iterdir()} == FILES
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    for checkpoint in (run / "checkpoints").iterdir():
        assert {path.name for path in checkpoint.iterdir()} == {"manifest.json", "payloads.msgpack", "policy"}
    assert [path.name for path in (run / "initial").iterdir()] == ["policy"]
    assert (run / "final").readlink() == Path("checkpoints/step-000006/policy")
    assert tomllib.loads((run / "config.toml").read_text())["lookahead"] == 1


def test_summary_json_has_the_keys_of_the_contract(tiny: tuple[Path, Any]) -> None:
    said = json.loads((tiny[0] / "summary.json").read_bytes())
    assert (said["status"], said["reason"], said["train_steps"]) == ("completed", "train_steps", 6)
    assert said["wall_s"] > 0
    keys = {
        "reward": {"first", "last"},
        "tokens": {"generated", "trained", "masked", "dropped", "open"},
        "staleness": {"bound", "max_token_lag", "mean_token_lag"},
        "rates": {"steps_s", "trained_tokens_s", "samples_s"},
        "busy": {"generate", "train"},
    }
    for key, names in keys.items():
        assert names <= said[key].keys(), key
    assert 0 < said["overlap_efficiency"] <= 1.001
    tokens = said["tokens"]
    assert tokens["generated"] == tokens["trained"] + tokens["masked"] + tokens["dropped"] + tokens["open"]
    assert said["staleness"]["max_token_lag"] <= said["staleness"]["bound"] == 2


def test_metrics_jsonl_has_the_keys_of_the_contract(tiny: tuple[Path, Any]) -> None:
    rows = [json.loads(line) for line in (tiny[0] / "metrics.jsonl").read_text().splitlines()]
    assert [row["train_step"] for row in rows] == list(range(6))
    keys = {
        *("train_step", "policy_version", "reward/mean", "staleness/token_lag_mean", "staleness/token_lag_max"),
        *("staleness/masked_fraction", "staleness/expired", "time/step", "busy/generate", "busy/train"),
        *("time/exposed_sync", "loss/loss", "logprob_gap"),
        *(f"tokens/{kind}" for kind in ("generated", "trained", "masked", "dropped", "open")),
    }
    for row in rows:
        assert keys <= row.keys()
        parts = (row[f"tokens/{kind}"] for kind in ("trained", "masked", "dropped", "open"))
        assert row["tokens/generated"] == sum(parts)
    assert any("eval/reward" in row for row in rows)


def test_trace_json_loads(tiny: tuple[Path, Any]) -> None:
    trace = json.loads((tiny[0] / "trace.json").read_bytes())
    assert {"ph", "pid", "name"} <= trace["traceEvents"][0].keys()


# ---- what is printed -------------------------------------------------------------------------------------------------
def test_output_that_is_no_terminal_is_plain_lines(tiny: tuple[Path, Any]) -> None:
    _, done = tiny
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    lines = done.stdout.splitlines()
    assert any(re.match(r"step \d+/6  reward ", line) for line in lines)
    (ended,) = (line for line in lines if line.startswith("completed"))
    assert re.fullmatch(r"completed: 6 train steps in [\d.]+ s", ended)
    assert lines[-1].startswith("files       runs/tiny: summary.json, metrics.jsonl, events.jsonl, trace.json")


def test_a_terminal_shows_a_panel_and_is_given_back(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "asyncrlhf", "tiny.toml"]
    environment = ENVIRONMENT | {"TERM": "xterm-256color", "LANG": "C.UTF-8", "COLUMNS": "100", "LINES": "30"}
    run = subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + 100
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # the other end has closed
                break
        elif run.poll() is not None:
            break
    os.close(ours)
    assert run.wait(50) == 0, shown
    text = shown.decode()
    assert "╭" in text, "a frame"
    assert "algorithms.grpo:GRPO" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"
    assert "completed: 6 train steps in " in text
