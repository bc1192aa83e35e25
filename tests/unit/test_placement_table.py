"""[placement]: which sets, pools and sizes follow from a strategy, what wins over them, and what contradicts them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncrlhf import launch
from asyncrlhf.backends.vllm.options import VllmOptions
from asyncrlhf.build import build_groups, ledger_rules, places
from asyncrlhf.config.derive import overlaps
from asyncrlhf.config.load import load
from asyncrlhf.errors import ConfigError
from asyncrlhf.flow.gate import Gate
from asyncrlhf.flow.ledger import Ledger
from asyncrlhf.groups import Group, TrainGroup
from asyncrlhf.groups.follower import Follower
from asyncrlhf.observe import EventLog
from asyncrlhf.placement.arrange import set_lines
from asyncrlhf.stages import Stage, prepare
from asyncrlhf.testing.runtime import FakeRuntime
from asyncrlhf.testing.sources import FakeRows
from tests.integration.tiny import SCRATCH
from tests.unit.virtual import virtual

CONFIG = f"""
algorithm = "algorithms.ppo:PPO"
run_dir = "run"
train_steps = 2
prompts_per_step = 8
[data]
source = "asyncrlhf.data.tasks:reverse"
options = {{ length = 2, alphabet = "abc" }}
{SCRATCH}
{SCRATCH.replace("policy", "critic")}
[groups.reference]
[groups.reward]
backend = "torch"
model = "judge"
[groups.rollout]
max_tokens = 6
"""


SHARED_SHADOW = ("placement.strategy=separation", "placement.shared_shadow=true")


@pytest.fixture(autouse=True)
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "ppo.toml").write_text(CONFIG)


def placed(*overrides: str) -> Stage:
    return prepare(load("ppo.toml", overrides))


def sets_of(stage: Stage) -> dict[str, tuple[str, bool]]:
    """Name -> first letters of the members (c: critic, f: reference, p, o: rollout, s: shadow, w: reward), turns."""
    letters = {"reference": "f", "rollout": "o", "reward": "w"}
    assert stage.arrangement is not None
    return {
        part.name: ("".join(sorted(letters.get(name, name[0]) for name in part.members)), part.turns)
        for part in stage.arrangement.sets
    }


@pytest.mark.parametrize(
    ("strategy", "sets"),
    [
        ("colocate", {"shared": ("cfopw", True)}),
        ("flattening", {"shared": ("cfopw", True)}),
        ("alternating", {"shared": ("cfopw", True)}),
        ("interleaving", {"shared": ("cfopw", True)}),
        ("split", {"shared": ("fop", True), "critic": ("cw", False)}),
        ("async", {"generation": ("o", False), "training": ("cfpw", False)}),
        (
            "standalone",
            {"shared": ("op", True), "critic": ("c", False), "reference": ("f", False), "reward": ("w", False)},
        ),
        (
            "separation",
            {
                "generation": ("o", False),
                "training": ("p", False),
                "shadow_critic": ("s", False),
                "critic": ("c", False),
                "reference": ("f", False),
                "reward": ("w", False),
            },
        ),
    ],
)
def test_a_strategy_is_sets_of_groups_with_pools(strategy: str, sets: dict[str, tuple[str, bool]]) -> None:
    stage = placed(f"placement.strategy={strategy}")
    assert sets_of(stage) == sets
    assert stage.config.pools.keys() == sets.keys()
    assert all(stage.config.groups[n]["pool"] == s.name for s in stage.arrangement.sets for n in s.members)  # type: ignore[union-attr]
    again = prepare(stage.config)
    assert again.config == stage.config, "what follows from it follows again"
    assert again.arrangement == stage.arrangement


@pytest.mark.parametrize("strategy", ["colocate", "split"])
def test_memory_moves_on_gpus_unless_the_table_says_otherwise(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so it does again, from the configuration beside the run."""
    for device, usual in (("auto", "always"), ("cpu", "never")):
        devices = [f"groups.{name}.device={device}" for name in ("policy", "critic", "rollout", "reference", "reward")]
        for words, expected in (
            ([], usual),
            (["placement.offload=always"], "always"),
            (["placement.offload=never"], "never"),
        ):
            stage = placed(f"placement.strategy={strategy}", *devices, *words)
            assert stage.config.placement.offload == expected
            assert prepare(stage.config).config == stage.config
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert placed(f"placement.strategy={strategy}").config.placement.offload == "never"


@pytest.mark.parametrize("words", [(), ("placement.strategy=colocate", "placement.turns=none")])
def test_to_offload_takes_groups_that_take_turns(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match='offload = "always" is for groups that take turns'):
        placed(*words, "placement.offload=always")


def test_sizes_follow_where_all_devices_are_shared() -> None:
    stage = placed("placement.strategy=colocate", "placement.devices=4")
    assert stage.config.groups["rollout"]["replicas"] == 4
    assert stage.config.groups["policy"]["data_parallel"] == stage.config.groups["critic"]["data_parallel"] == 4
    shared = stage.config.pools["shared"]
    assert (shared.devices, shared.engines_per_device) == (4, 4), "14 engines"
    own = placed("placement.strategy=colocate", "placement.devices=4", "groups.rollout.replicas=2")
    assert own.config.groups["rollout"]["replicas"] == 2, "an explicit key wins"
    worker = placed("placement.strategy=alternating", "groups.policy.data_parallel=2")
    assert worker.config.groups["rollout"]["replicas"] == 2


def test_check_says_which_groups_no_set_names(tmp_path: Path) -> None:
    sets = 'placement.sets=[["rollout", "policy"], ["critic", "reward"]]'
    judged = ["evaluation.every=1", "evaluation.path=rows.jsonl", "evaluation.judges.other.model=judge"]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab>", "answer": "ba"}\n')
    stage = placed(sets, *judged, "evaluation.judges.other.backend=torch")
    assert stage.arrangement is not None
    assert stage.arrangement.left_out == ("reference", "other")
    lines = set_lines(stage.arrangement, stage.wiring.engines, 0)
    named = [line.split()[1] for line in lines if line.endswith("as placement.sets does not name it")]
    assert named == ["reference", "other"]


def test_turns_and_sets_can_be_chosen() -> None:
    assert sets_of(placed("placement.strategy=split", "placement.turns=all"))["critic"] == ("cw", True)
    assert sets_of(placed("placement.strategy=colocate", "placement.turns=none"))["shared"] == ("cfopw", False)
    own = placed('placement.sets=[["rollout", "critic"], ["policy", "reward"]]', "groups.reward.pool=mine")
    assert sets_of(own) == {
        "rollout": ("co", True),
        "mine": ("pw", False),
        "reference": ("f", False),
    }
    assert placed().arrangement is None
    lanes = placed("placement.strategy=interleaving", "groups.rollout.replicas=2").arrangement
    assert lanes is not None
    assert dict(lanes.turns["shared"])["reference"] != dict(lanes.turns["shared"])["reward"]
    beside = placed("placement.strategy=separation", "placement.shared_shadow=true")
    assert sets_of(beside)["rollout"] == ("os", True)


def test_a_critic_s_copy_computes_as_the_critic_unless_its_table_says_more() -> None:
    stage = placed("placement.strategy=separation", "groups.critic.dtype=bfloat16", "groups.shadow_critic.replicas=3")
    shadow = stage.wiring.shadows["shadow_critic"]
    assert (shadow.follows, shadow.dtype, shadow.replicas) == ("critic", "bfloat16", 3)
    assert placed("groups.copy.follows=critic").wiring.shadows["copy"].follows == "critic"


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_resolved_configuration_is_a_configuration(layout: str) -> None:
    stage = placed("placement.strategy=separation", f"groups.critic.layout={layout}", "groups.critic.attention=sdpa")
    Path("resolved.toml").write_text(stage.text)
    again = prepare(load("resolved.toml"))
    assert (again.text, again.arrangement) == (stage.text, stage.arrangement)


def test_a_resolved_configuration_can_be_run_without_overlap() -> None:
    """Nobody has set publish.overlap: the file says nothing of it, and it follows anew."""
    stage = placed("max_staleness=2", "off_policy=none")
    assert "overlap" not in stage.text
    Path("resolved.toml").write_text(stage.text)
    again = prepare(load("resolved.toml", ["max_staleness=0", "lookahead=0"]))
    assert [overlaps(each.config, each.in_turn) for each in (stage, again)] == [True, False]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["placement.strategy=colocate"], False),
        (["placement.strategy=colocate", "placement.turns=none", "publish.overlap=true"], True),
        (["placement.strategy=separation", "placement.shared_shadow=true", "publish.overlap=true"], True),
        (['placement.sets=[["rollout", "reference"], ["policy"]]', "publish.overlap=true"], True),
        (['placement.sets=[["critic", "copy"]]', "placement.turns=all", "groups.copy.follows=critic"], False),
    ],
)
def test_publishes_overlap_unless_a_trained_model_takes_turns_with_one_that_follows(
    overrides: list[str], expected: bool
) -> None:
    ahead = ("max_staleness=2", "off_policy=none", *overrides)
    stage = placed(*ahead)
    assert overlaps(stage.config, stage.in_turn) is expected
    assert ("every train step, while the next one trains" in launch.check(load("ppo.toml", ahead))) is expected


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (1, 3)])
def test_models_that_read_at_once_are_on_gpus_of_their_own(sizes: tuple[int, int]) -> None:
    megatron = ("backend=megatron", "device=cuda", "sequence_parallel=false")
    readers = [f"groups.{n}.{key}" for n in ("reference", "reward") for key in megatron]
    ranks = [f"groups.{n}.data_parallel={size}" for n, size in zip(("reference", "reward"), sizes, strict=True)]
    stage = placed("placement.strategy=interleaving", *readers, *ranks)
    found = places(stage.config, stage.wiring)
    seen = [place.gpus for name in ("reference", "reward") for place in found[name]]
    assert len(seen) == len({*seen}) == sum(sizes) == stage.config.pools["shared"].devices


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["placement.strategy=colocate", "publish.overlap=true", "max_staleness=2", "off_policy=none"],
            'publish.overlap = true, and placement.strategy = "colocate" has policy and rollout share devices in turn',
        ),
        (
            ["groups.critic.backend=megatron", "groups.critic.device=cpu", "groups.shadow_critic.replicas=2"],
            'groups.critic.backend = "megatron" and groups.shadow_critic.backend = "torch": the copy cannot take',
        ),
        (
            ["groups.critic.backend=megatron", "groups.critic.device=cpu", "placement.strategy=separation"],
            r'"torch" \(placement.strategy = "separation" implies it\): the copy cannot take weights from megatron',
        ),
        (['placement.sets=[["rollout"], []]'], r"sets = \[\['rollout'\], \[\]\] has a set without groups; remove it"),
        (["placement.turns=all"], 'placement.turns = "all", and neither strategy nor sets says which groups share'),
        (["placement.devices=4"], "placement.devices = 4, and neither strategy nor sets says which groups share"),
        (
            ["algorithm=algorithms.grpo:GRPO", "groups.critic=", *SHARED_SHADOW],
            "placement.shared_shadow = true, and algorithms.grpo:GRPO has no critic to copy among its groups",
        ),
        (
            ["placement.strategy=colocate", "groups.rollout.pool=a", "groups.policy.pool=b"],
            'groups.rollout.pool = "a" and groups.policy.pool = "b", and placement.strategy = "colocate" has them',
        ),
        (
            ["placement.strategy=async", "groups.rollout.pool=a", "groups.policy.pool=a"],
            'groups.rollout.pool and groups.policy.pool are both "a", and placement.strategy = "async" gives them dev',
        ),
        (
            ["placement.strategy=separation", "placement.devices=4"],
            "placement.devices = 4, and its sets need 6 .*shadow_critic 1.*; raise it, or lower the sizes",
        ),
        (
            ["placement.strategy=alternating", "groups.rollout.replicas=2"],
            'replicas = 2 and the policy has 1 ranks, and placement.strategy = "alternating" has each worker',
        ),
        (
            ["placement.strategy=colocate", 'placement.sets=[["rollout"]]'],
            r"placement.strategy = \"colocate\" and sets = \[\['rollout'\]\] both say who shares; set one",
        ),
        (['placement.sets=[["rollout"], ["rollout"]]'], 'has "rollout" twice; a group is in one set'),
        (['placement.sets=[["rolout"]]'], 'has "rolout", which is no group with a model; such groups: .*rollout'),
        (["placement.shared_shadow=true"], 'shared_shadow = true and strategy = "None"'),
        (["placement.strategy=colocat"], r'placement.strategy = "colocat"'),
        (
            ["placement.strategy=colocate", "publish.mode=drain", "max_staleness=2", "off_policy=none"],
            'publish.mode = "drain" and lookahead = 1: answers of rollout are interrupted',
        ),
        (
            ["placement.strategy=auto"],
            'has to know what kind the 8 GPUs are; set placement.node, for example to "H100"',
        ),
        (
            ["groups.shadow_critic.follows=policy"],
            'groups.shadow_critic.follows = "policy" is not a critic; use one of crit',
        ),
        (
            ["groups.a.follows=critic", "groups.b.follows=critic"],
            "groups.b and groups.a both follow .*one shadow: use repl",
        ),
        (
            ["placement.strategy=split", "placement.node=H100"],
            'node = "H100" is for strategy = "auto", and it is "split"',
        ),
    ],
)
def test_what_contradicts_it_is_refused_with_both_values(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        placed(*overrides)


def built(stage: Stage) -> dict[str, Group]:
    """On the event loop."""
    models: Any = SimpleNamespace(
        directories=dict.fromkeys(stage.wiring.engines, "m"), decode=str, stop_token_ids=(), longest=None
    )
    log = EventLog(None)
    gate = Gate(Ledger(ledger_rules(stage.config)), FakeRows(1), log.emit)
    return build_groups(stage.config, stage.wiring, models, FakeRuntime(), gate, log)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], False),
        (["placement.strategy=async"], False),
        (["placement.strategy=colocate"], True),
        (["placement.strategy=colocate", "placement.turns=none"], False),
        (["placement.strategy=colocate", "placement.offload=never"], False),
        (['placement.sets=[["rollout", "reference"], ["policy", "critic"]]'], True),
        (['placement.sets=[["rollout"], ["policy", "critic"]]', "placement.turns=all"], False),
    ],
)
def test_engines_of_vllm_can_sleep_where_others_have_a_turn_on_their_devices(
    overrides: list[str], expected: bool
) -> None:
    stage = placed("groups.rollout.backend=vllm", *overrides)

    @virtual
    async def main() -> None:
        rollout = built(stage)["rollout"]
        assert isinstance(rollout, Follower)
        options = [replica.spec.options for replica in rollout.replicas]
        assert [isinstance(each, VllmOptions) and each.sleeps for each in options] == [expected]

    main()


def test_a_critic_s_copy_gets_weights_as_all_others_do() -> None:
    stage = placed("placement.strategy=separation", "publish.transport=collective")

    @virtual
    async def main() -> None:
        groups = built(stage)
        found = {name: group.specs for name, group in groups.items() if isinstance(group, TrainGroup)}
        found |= {n: [each.spec for each in g.replicas] for n, g in groups.items() if isinstance(g, Follower)}
        assert found.keys() == {"policy", "critic", "rollout", "shadow_critic"}
        assert {cast(Any, spec.options).transport for specs in found.values() for spec in specs} == {
            "asyncrlhf.weights.collective:CollectiveTransfer"
        }

    main()


def test_engines_of_several_processes_share_no_gpus() -> None:
    wide = ("groups.rollout.backend=vllm", "groups.rollout.tensor_parallel=2", "groups.rollout.device=cuda")
    with pytest.raises(
        ConfigError, match="tensor_parallel = 2: engines of several processes share no GPUs with policy"
    ):
        placed("placement.strategy=standalone", *wide)


def test_check_prints_the_sets_and_what_the_planner_said(monkeypatch: pytest.MonkeyPatch) -> None:
    text = launch.check(load("ppo.toml", ["placement.strategy=split"]))
    assert "placement                split, 2 sets of devices\n" in text
    assert "  set shared             rollout, policy, reference on 1 device, in turn\n" in text
    assert "  set critic             critic, reward on 1 device, side by side\n" in text
    text = launch.check(load("ppo.toml", ["placement.strategy=split", "placement.offload=never"]))
    assert "rollout, policy, reference on 1 device, in turn, all of them in memory\n" in text
    text = launch.check(load("ppo.toml", ["placement.strategy=async"]))
    assert 'warning: placement.strategy = "async" and lookahead = 0: the two pools wait' in text
    shape = '{"model_type": "qwen2", "vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, '
    shape += '"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": true}'
    Path("judge/config.json").write_text(shape)
    text = launch.check(load("ppo.toml", ["placement.strategy=auto", "placement.node=H100", "placement.devices=8"]))
    assert "  auto                   " in text
    assert "an estimate that nothing was measured for" in text
    assert "plan --calibrate RUN_DIR" in text
    stage = placed("placement.strategy=auto", "placement.node=H100", "placement.devices=8")
    assert stage.config.placement.offload == "never", "the plan that was found has all of them in memory"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert placed(
        "placement.strategy=auto", "placement.devices=2", "placement.offload=always"
    ).config.placement.offload == ("always")
    stage = placed("placement.strategy=auto", "placement.devices=2")
    assert stage.arrangement is not None
    assert stage.arrangement.planned
    assert not stage.config.pools, "on CPUs there is nothing to ask for"
