"""Pools: which groups are in them, what they ask for, and whether there is as much."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from asyncrlhf import launch
from asyncrlhf.abc import EngineSpec, Needs, Place
from asyncrlhf.build import places
from asyncrlhf.config.load import load
from asyncrlhf.errors import ConfigError
from asyncrlhf.messages import Message
from asyncrlhf.pools import require_pools
from asyncrlhf.runtimes.feasible import Ask, Node, shortage
from asyncrlhf.wiring import wire
from tests.integration.tiny import grpo

TOP = "train_steps = 2\nprompts_per_step = 2\nanswers_per_prompt = 2\n"
BOTH = "[pools.generation]\n[pools.training]\n"


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr("os.cpu_count", lambda: 8)


def engines(directory: Path, *overrides: str, pools: str = BOTH) -> dict[str, tuple[Place, ...]]:
    """The places of a run with a reference, as its command line would have them."""
    path = directory / "config.toml"
    path.write_text(grpo(top=TOP, groups=f"{pools}[groups.reference]\n"))
    config = load(str(path), ["runtime=local", *overrides])
    found = places(config, wire(config))
    require_pools(config, [place for group in found.values() for place in group])
    return found


def pools_of(found: dict[str, tuple[Place, ...]]) -> dict[str, str | None]:
    return {name: group[0].needs and group[0].needs.pool for name, group in found.items()}


def test_rollouts_generate_and_the_others_train(tmp_path: Path) -> None:
    usual = dict.fromkeys(("policy", "reference", "reward"), "training")
    assert pools_of(engines(tmp_path)) == {**usual, "rollout": "generation"}
    chosen = engines(tmp_path, "groups.reference.pool=generation", "groups.reward.pool=generation")
    assert pools_of(chosen) == dict.fromkeys(("rollout", "reference", "reward"), "generation") | {"policy": "training"}
    assert pools_of(engines(tmp_path, pools="[pools.training]\n")) == {**usual, "rollout": None}
    assert set(pools_of(engines(tmp_path, pools="")).values()) == {None}


def test_an_engine_of_several_processes_sees_a_gpu_for_each(tmp_path: Path) -> None:
    wide = ("groups.rollout.backend=vllm", "groups.rollout.tensor_parallel=2")
    found = engines(tmp_path, "pools.generation.devices=2", "pools.training.devices=2", *wide)
    assert [place.gpus for place in found["rollout"]] == [("4", "5")]
    with pytest.raises(ConfigError, match="devices = 1, and its engines need 2"):
        engines(tmp_path, "pools.generation.devices=1", "pools.training.devices=2", *wide)


def test_an_engine_sees_the_gpus_of_its_pool(tmp_path: Path) -> None:
    found = engines(tmp_path, "pools.generation.devices=2", "pools.training.devices=2", "groups.rollout.replicas=2")
    assert {name: [place.gpus for place in group] for name, group in found.items()} == {
        "rollout": [("4",), ("5",)],
        "policy": [("6",)],
        "reference": [("7",)],
        "reward": [()],
    }
    shared = engines(tmp_path, "pools.training.devices=1", "pools.training.engines_per_device=2")
    assert {name: group[0].gpus for name, group in shared.items()} == {
        "rollout": (),
        "policy": ("4",),
        "reference": ("4",),
        "reward": (),
    }
    assert engines(tmp_path, pools="")["policy"][0].gpus is None


def test_ranks_of_a_model_share_gpus_with_others_and_not_with_each_other(tmp_path: Path) -> None:
    pool = ("pools.training.devices=2", "pools.training.engines_per_device=2")
    found = engines(tmp_path, *pool, "groups.policy.data_parallel=2")
    assert {name: [place.gpus for place in found[name]] for name in ("policy", "reference")} == {
        "policy": [("4",), ("5",)],
        "reference": [("4",)],
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["groups.policy.pool=trainin"], 'groups.policy.pool = "trainin" is not a pool; did you mean "training"?'),
        (["pools.spare.devices=1"], "pools.spare is used by no group; .*remove the table"),
        (["groups.policy.device=cuda"], 'device = "cuda" and pools.training.devices = 0; raise the second'),
        (["groups.policy.device=cuda:1", "pools.training.devices=2"], 'names a GPU, .*; use device = "cuda"'),
        (["pools.training.devices=1"], "devices = 1, and its engines need 2 .*raise it to 2, or .*_device = 2"),
        (["pools.training.devices=32"], "pools.training needs 32 devices, this machine has 4; give the pool fewer"),
        (["pools.generation.devices=3", "pools.training.devices=2"], "generation and training need 5 devices together"),
        (["pools.training.cores=3"], "pools.training needs 9 cores, this machine has 8"),
        (["pools.training.cores=-1"], "pools.training.cores = -1 must be >= 0"),
        (["pools.training.core=1"], "pools.training.core is not a key; did you mean pools.training.cores?"),
        (["pools.training.labels.zone=a b"], 'pools.training.labels = {"zone": "a b"} is not a label of a node'),
    ],
)
def test_l11_what_cannot_be_is_refused_with_numbers_and_a_fix(
    overrides: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        engines(tmp_path, *overrides)


def test_check_says_what_pools_come_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    path.write_text(grpo(top=TOP, groups="[pools.training]\ndevices = 2\ncores = 1\n"))
    monkeypatch.chdir(tmp_path)
    text = launch.check(load(str(path)))
    assert "pool training            2 devices and 2 cores: reward, policy" in text
    assert "warning: pools.training.devices = 2, and its engines use 1; lower it" in text
    with pytest.raises(ConfigError, match="needs 32 devices, this machine has 4"):
        launch.check(load(str(path), ["pools.training.devices=32"]))
    far = launch.check(load(str(path), ["pools.training.devices=32", "runtime=ray", "ray.address=far:1"]))
    assert "32 devices and 2 cores, to be found in the cluster" in far


def test_labels_mean_something_in_a_cluster_only(tmp_path: Path) -> None:
    labels = "pools.training.labels={zone='a'}"
    assert engines(tmp_path, labels)["policy"][0].needs == Needs(pool="training", together=True)
    joined = engines(tmp_path, labels, "runtime=ray", "ray.address=auto")["policy"][0].needs
    assert joined == Needs(pool="training", labels={"zone": "a"}, together=True)


def test_a_specification_knows_its_place() -> None:
    place = Place(group="g", rank=1, engine="m:E", threads=2, core=3, gpus=("0",), needs=Needs(pool="p", devices=1.0))
    assert EngineSpec(**{n: getattr(place, n) for n in place.__struct_fields__}, options=Message()).place == place


def test_l11_a_cluster_has_what_pools_need_or_says_what_is_missing() -> None:
    nodes = [Node(name=f"n{i}", devices=8, cores=16, labels={"pool": "a" if i < 2 else "b"}) for i in range(3)]

    def problem(*asks: Ask) -> str:
        return shortage(asks, nodes, "the cluster")

    a, b = {"pool": "a"}, {"pool": "b"}
    assert problem(Ask(pool="x", devices=16, labels=a), Ask(pool="y", devices=8, labels=b)) == ""
    assert problem(Ask(pool="training", devices=32)) == (
        "pools.training needs 32 devices, the cluster has 24; give the pool fewer, or add nodes"
    )
    assert 'the 1 of 3 nodes of the cluster with pool = "b" have 8' in problem(Ask(pool="y", devices=9, labels=b))
    assert 'none of 3 nodes of the cluster has pool = "c"; they have pool = "a", pool = "b"' in problem(
        Ask(pool="y", labels={"pool": "c"})
    )
    assert "none has a label of that name" in problem(Ask(pool="y", labels={"zone": "c"}))
    two = problem(Ask(pool="x", devices=9, labels=a), Ask(pool="y", devices=8, labels=a))
    assert "pools x and y need 17 devices together, their nodes in the cluster have 16" in two
    assert "an engine needs 9 devices and 0 cores of one node" in problem(Ask(pool="x", devices=9, engine_devices=9))
    assert problem(Ask(pool="x", devices=1, cores=1)) == shortage([], [], "the cluster") == ""


def test_l11_what_is_refused_has_no_place_anywhere() -> None:
    """Against every assignment of single-device engines to small nodes."""
    kinds: list[dict[str, Any]] = [{}, {"pool": "a"}, {"pool": "b"}]
    nodes = [Node(name="n", devices=2, labels={"pool": "a"}), Node(name="m", devices=1, labels={"pool": "b"})]
    for counts in product(range(4), repeat=3):
        asks = [Ask(pool=str(i), devices=n, labels=k) for i, (n, k) in enumerate(zip(counts, kinds, strict=True)) if n]
        wanted = [kinds[i] for i, n in enumerate(counts) for _ in range(n)]
        fits = any(
            all(used.count(i) <= nodes[i].devices for i in range(2))
            and all(k.items() <= nodes[i].labels.items() for k, i in zip(wanted, used, strict=True))
            for used in product(range(2), repeat=len(wanted))
        )
        assert (shortage(asks, nodes, "it") == "") == fits, counts
