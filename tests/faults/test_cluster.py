"""A Ray of three nodes on this machine, told apart by labels: where engines lie, and what the loss of a node costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import scene
from tests.faults.forks import ROOT, Forks
from tests.faults.halting import GO, HALTED
from tests.faults.test_local import DATA, PATIENCE
from tests.faults.test_ray import process

pytestmark = pytest.mark.timeout(600)
POOLS = """
[pools.training]
cores = 1
labels = { pool = "training" }
[pools.generation]
cores = 1
labels = { pool = "generation" }
"""
SLOW = DATA.replace("tasks:slow", "tasks:until_told").replace("timeout = 20.0\n", "timeout = 120.0\n", 1)


class Three:
    """A head for training, two nodes for generation."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 3, "include_dashboard": False, "labels": {"pool": "training"}}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.head: Any = self._cluster.head_node
        self.generation = [self.add(), self.add()]
        self.address: str = self._cluster.address

    def add(self) -> Any:
        return self._cluster.add_node(num_cpus=1, labels={"pool": "generation"})

    def remove(self, node: Any) -> None:
        self._cluster.remove_node(node)

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def three() -> Iterator[Three]:
    cluster = Three()
    yield cluster
    cluster.close()


def configured(three: Three, directory: Path, text: str) -> str:
    ray = f'\n[ray]\naddress = "{three.address}"\npatience = 100.0\n'
    return scene.write(directory, text.replace('runtime = "local"', 'runtime = "ray"') + POOLS + ray)


def lies_on(node: Any, run: Path, engine: str) -> bool:
    """Whether the process of an engine was started by a node's raylet."""
    raylet = node.all_processes["raylet"][0].process.pid
    return int(Path(f"/proc/{process(run, engine)}/stat").read_text().rpartition(")")[2].split()[1]) == raylet


def test_l11_a_pool_that_the_cluster_cannot_hold_is_refused_before_any_actor_starts(
    three: Three, forks: Forks, tmp_path: Path
) -> None:
    child = forks.start(tmp_path, configured(three, tmp_path, DATA), "groups.rollout.replicas=3")
    assert child.wait() == 2
    theirs = 'the 2 of 3 nodes of the cluster with pool = "generation" have 2'
    assert f"pools.generation needs 3 cores, {theirs}" in child.text
    assert not (tmp_path / "run").exists()


def test_ranks_lie_on_one_node_or_follow_the_nodes(three: Three) -> None:
    command = [sys.executable, "-m", "tests.faults.reserving", three.address]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True).stdout
    found = json.loads(said.splitlines()[-1])
    assert found["one"] == found["free"] == [found["head"]] * 3
    assert sorted(found["spread"].count(node) for node in set(found["spread"])) == [1, 1, 3]
    assert found["spread"] == sorted(found["spread"])
    assert len(set(found["labelled"])) == 2
    assert found["head"] not in found["labelled"]
    assert "pools.p: 0 devices and 2 cores for group 'g' have not been free within ray.patience = 1 s" in found["late"]
    assert "free are 0 devices and 1 core on " in found["late"]


def test_L7_an_engine_on_another_node_is_killed_in_a_publish_and_the_others_go_on(
    three: Three, forks: Forks, tmp_path: Path
) -> None:
    """The bytes go by a group of each engine and the trainer."""
    name, run = configured(three, tmp_path, SLOW.replace("until_told", "until_back")), tmp_path / "run"
    place = "asyncrlhf.groups.rollout:RolloutGroup.commit#5"
    child = forks.start(tmp_path, name, "groups.rollout.replicas=2", halt_at=place)
    assert child.until((tmp_path / HALTED).exists, PATIENCE), child.text
    pid = process(run, "rollout/0")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    (tmp_path / GO).touch()
    assert child.until(lambda: "engine rollout/0 is back" in child.text, PATIENCE), child.text
    (tmp_path / "back").touch()
    assert child.wait(PATIENCE) == 0, child.text
    assert f"group 'rollout', rank 0: actor of process {pid} is lost" in child.text
    assert scene.lineage(run).consumed == dict.fromkeys(range(80), 1)
    for engine, times in (("rollout-0", 2), ("rollout-1", 1)):
        assert (run / "logs" / f"{engine}.log").read_text().count("by gloo") >= times


def test_a_lost_node_costs_no_prompt(three: Three, forks: Forks, tmp_path: Path) -> None:
    name, run = configured(three, tmp_path, SLOW), tmp_path / "run"
    child = forks.start(tmp_path, name, "groups.rollout.replicas=2")

    def steps() -> int:
        return len(scene.rows(run)) if (run / "metrics.jsonl").exists() else 0

    assert child.until(lambda: steps() >= 2, PATIENCE), child.text
    assert all(lies_on(three.head, run, engine) for engine in ("policy/0", "reward/0", "reference/0"))
    lost = next(node for node in three.generation if lies_on(node, run, "rollout/0"))
    kept = next(node for node in three.generation if node is not lost)
    assert lies_on(kept, run, "rollout/1")
    three.remove(lost)
    three.generation = [kept]
    assert child.until(lambda: steps() >= 5, PATIENCE), child.text
    assert f"joined the Ray at {three.address} (ray.address = " in child.text
    assert "engine rollout/0 is out of service" in child.text
    assert "node has died" in child.text
    three.generation.append(three.add())
    assert child.until(lambda: "engine rollout/0 is back" in child.text, PATIENCE), child.text
    assert lies_on(three.generation[-1], run, "rollout/0")
    (tmp_path / "go").touch()
    assert child.wait(PATIENCE) == 0, child.text
    assert scene.lineage(run).consumed == dict.fromkeys(range(80), 1)
    for row in scene.rows(run):
        spent = sum(row[f"tokens/{kind}"] for kind in ("trained", "masked", "dropped", "open"))
        assert row["tokens/generated"] == spent, row
