"""`plan` as a user meets it: text, JSON, tables to paste, a picture, and refusals of one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from asyncrlhf.__main__ import main
from asyncrlhf.build import places
from asyncrlhf.config.groups import MegatronTrain
from asyncrlhf.config.load import load
from asyncrlhf.placement.scaling import as_text, curve
from asyncrlhf.placement.workload import Workload
from asyncrlhf.pools import asks
from asyncrlhf.wiring import wire
from tests.unit.placement.scene import problem

ROOT = Path(__file__).parents[3]
SMALL = [
    'cluster.pools=[{node="A100", nodes=2}]',
    "models.policy.name=llama-7b",
    "models.reference.name=llama-7b",
    "workload={prompts_per_step=128, max_staleness=2}",
]


def test_flags_alone_are_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--explain"]) == 0
    text = capsys.readouterr().out
    assert "policy     llama-7b: 6.74e9 parameters, 512 KiB of KV cache per token" in text
    assert re.search(r"memory [\d.]+ of 73.6 GiB, fullest while \w+ computes: .*policy optimizer", text)
    assert "split            no: there is neither a critic nor a reward model" in " ".join(text.split("\n"))


def test_json_holds_what_the_text_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    best = plan["plans"][0]
    assert plan["exhaustive"]
    assert best["step_s"] == min(plan["strategies"].values())
    assert set(best["groups"]) == {"rollout", "policy", "reference"}
    for group in best["groups"].values():
        assert group["tensor_parallel"] * group["pipeline_parallel"] * group["data_parallel"] == group["devices"]
    for part in best["sets"]:
        assert 0 <= part["bubble"] <= 1
        assert sum(part["memory"]["items"].values()) == pytest.approx(part["memory"]["peak"])
    assert plan["simulated"]["token_lag_max"] <= 2
    assert any("split" in each["strategy"] for each in plan["rejected"])


RUN = """
algorithm = "algorithms.grpo:GRPO"
run_dir = "run"
train_steps = 1
prompts_per_step = 2
answers_per_prompt = 2
off_policy = "decoupled"
[data]
source = "asyncrlhf.data.tasks:reverse"
[groups.policy]
model = "m"
[groups.rollout]
max_tokens = 4
[groups.reference]
[groups.reward]
function = "tests.integration.tiny:graded"
"""


def merged(run: dict[str, Any], tables: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: merged(run[key], value) if isinstance(value, dict) and key in run else value
        for key, value in tables.items()
    }
    return {**run, **both}


@pytest.mark.parametrize("strategy", ["async", "colocate", "standalone"])
@pytest.mark.parametrize("training", [(1, 1), (2, 4)])
def test_tables_to_paste_are_those_of_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, strategy: str, training: tuple[int, int]
) -> None:
    tp, pp = training
    sizes = f"{{policy={{tensor_parallel={tp}, pipeline_parallel={pp}}}, rollout={{tensor_parallel=1}}}}"
    assert main(["plan", *SMALL, f'strategies=["{strategy}"]', f"layouts={sizes}", "--toml"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"# {strategy}: ")
    table = tomllib.loads(text)
    assert (table["max_staleness"], table["lookahead"]) == (2, 1)
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(merged(tomllib.loads(RUN), table)))
    config = load(str(path))
    wiring = wire(config)
    found = asks(config, [place for group in places(config, wiring).values() for place in group])
    assert {ask.pool: ask.devices for ask in found} == {n: pool["devices"] for n, pool in table["pools"].items()}
    policy = wiring.engines["policy"]
    assert isinstance(policy, MegatronTrain)
    assert (policy.tensor_parallel, policy.pipeline_parallel) == training
    pool = policy.pool
    assert config.pools[pool or ""].engines_per_device == [group["pool"] for group in table["groups"].values()].count(
        pool
    )


def test_a_critic_s_copy_is_a_table_that_follows_it(capsys: pytest.CaptureFixture[str]) -> None:
    critic = "models.critic={name='qwen2.5-7b'}"
    one = "{tensor_parallel=1}"
    sizes = f"layouts={{rollout={one}, shadow_critic={one}}}"
    assert main(["plan", *SMALL, critic, sizes, 'strategies=["separation"]', "--toml"]) == 0
    text = capsys.readouterr().out
    table = tomllib.loads(text)
    shadow = table["groups"]["shadow_critic"]
    assert shadow["follows"] == "critic"
    assert shadow["replicas"] >= 1
    alone = not text.startswith("# separation, shared")
    assert (shadow["pool"] == table["groups"]["rollout"]["pool"]) is not alone
    assert ("placement" in table) is not alone


def test_a_placement_that_a_run_has_no_keys_for_is_not_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    wide = "layouts={rollout={tensor_parallel=2}}"
    assert main(["plan", *SMALL, 'strategies=["colocate", "async"]', wide, "--toml"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# async: ")
    assert tomllib.loads(text)["groups"]["rollout"]["tensor_parallel"] == 2
    assert main(["plan", *SMALL, 'strategies=["colocate"]', wide, "--toml"]) != 0
    assert "engines of rollout with tensor_parallel = 2 share no GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["absent.toml"], "error: absent.toml: there is no such file"),
        (
            [*SMALL, "models.policy.name=llama-8b"],
            'error: models.policy.name = "llama-8b" is not a known shape; did you',
        ),
        ([*SMALL, 'cluster.pools=[{node="A100", nodes=0}]'], "error: cluster.pools[0].nodes = 0: 0 devices"),
        (["--calibrate", "absent"], "error: absent is not the directory of a run"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_exit_2(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(says)
    assert said.err.count("\n") == 1


def test_a_picture(tmp_path: Path) -> None:
    assert main(["plan", *SMALL, "--gantt", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plan", *SMALL, "--gantt", str(tmp_path / "plan.unknown")]) == 2


def test_scaling_names_what_limits_it() -> None:
    """A mixture of experts of 400e9 parameters: more devices help less and less, and the table says why."""
    work = Workload(prompts_per_step=256, answers_per_prompt=16, max_staleness=2)
    asked = problem(
        2048, "moe-400b", roles=("policy", "reference"), node="H200", strategies=("colocate", "async"), work=work
    )
    points = curve(asked, points=4)
    steps = [point.candidate.step for point in points if point.candidate is not None]
    assert [point.devices for point in points] == [256, 512, 1024, 2048]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] > steps[0] / 8, "not linear"
    lines = as_text(points).splitlines()
    assert len(lines) == 5
    assert all("pool" in line or "leases" in line or "generation" in line for line in lines[1:])


def test_the_readme_shows_what_plan_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"<!-- command: plan -->\n```bash\n(.+?)\n```\n\n```text\n(.+?)\n```", readme, re.DOTALL)
    assert found is not None
    assert main(found[1].split()[3:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in found[2].splitlines() if line not in printed] == ["..."]


def test_planning_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom asyncrlhf.__main__ import main\n"
        f"assert main(['plan', {str(ROOT / 'configs/plan_async.toml')!r}]) == 0\n"
        "print(sorted({'torch', 'transformers', 'ray', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
