"""What cannot be planned is refused in one line that names the key, both numbers, and the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from asyncrlhf.config.load import read_table
from asyncrlhf.errors import ConfigError
from asyncrlhf.placement.inputs import problem_of
from asyncrlhf.placement.search import search

Table = Callable[..., dict[str, Any]]

BASE: dict[str, Any] = {
    "cluster": {"pools": [{"node": "A100", "nodes": 2}]},
    "models": {"policy": {"name": "llama-7b"}, "reference": {"name": "llama-7b"}},
    "workload": {"prompts_per_step": 64},
}


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """BASE, with overrides as on the command line."""
    path = tmp_path / "plan.toml"
    path.write_text(tomli_w.dumps(BASE))
    return lambda *overrides: read_table(str(path), overrides)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["cluster.pools=[]"], "cluster.pools is empty: 0 devices, and a plan needs at least 1"),
        (['cluster.pools=[{node="A100", nodes=0}]'], r"cluster.pools\[0\].nodes = 0: 0 devices"),
        (['cluster.pools=[{node="A10"}]'], r'cluster.pools\[0\].node = "A10" is not a node type; did you mean "A100"?'),
        (
            ['cluster.pools=[{node="A100", devices_per_node=16}]'],
            "devices_per_node = 16 is more than the 8 devices of A100",
        ),
        (
            ['cluster.pools=[{node="A100", nodes=2, devices_per_node=4}]'],
            "4 of 8 devices on each of 2 nodes cannot form aligned blocks",
        ),
        (
            ["layouts.rollout.tensor_parallel=3"],
            "layouts.rollout.tensor_parallel = 3 does not divide 32 heads and 32 key/value heads; use 1, 2, 4, 8",
        ),
        (
            ["layouts.policy.tensor_parallel=16"],
            "layouts.policy.tensor_parallel = 16 is more than the 8 devices that nvlink joins",
        ),
        (
            ["layouts.policy.pipeline_parallel=64", 'cluster.pools=[{node="A100", nodes=16}]'],
            "layouts.policy.pipeline_parallel = 64 is more than its 32 layers",
        ),
        (
            ["layouts.policy={tensor_parallel=8, devices=12}"],
            r"layouts.policy: tensor_parallel \* pipeline_parallel = 8 \* 1 = 8 does not tile its 12 devices",
        ),
        (
            ["layouts.policy={tensor_parallel=1, devices=16}", "workload.prompts_per_step=8"],
            "layouts.policy: an optimizer step has 8 sequences for a data parallel size of 16; raise",
        ),
        (["layouts.policy.devices=32"], "layouts.policy.devices: need 32, have 16"),
        (
            ["layouts.policy={tensor_parallel=8, pipeline_parallel=4}"],
            r"layouts.policy: tensor_parallel \* pipeline_parallel = 32: need 32 devices, have 16",
        ),
        (["layouts.critic.devices=8"], "layouts.critic is not a unit; units here: rollout, policy, reference"),
        (["workload.minibatches=65"], "workload.minibatches = 65 of a batch of 64 sequences"),
        (["workload={max_staleness=1, lookahead=2}"], "lookahead = 2 is above max_staleness = 1"),
        (['strategies=["colocated"]'], 'strategies: "colocated" is not a strategy; use some of colocate'),
        (["models.policy.name="], "models.policy: no shape set; set one of name, directory, shape"),
        (['models.judge.name="llama-7b"'], "models.judge has no role; name the table one of policy, critic"),
        (["models={reference={name='llama-7b'}}"], "models has 0 with the role policy"),
        (['objective="price"'], "price = 0"),
        (["workload.promts_per_step=3"], "workload.promts_per_step is not a key; did you mean"),
    ],
)
def test_l11_what_cannot_be_is_named_with_both_numbers(table: Table, overrides: list[str], says: str) -> None:
    """verl 7381: more devices asked for than exist, found before anything starts; and its neighbours."""
    with pytest.raises(ConfigError, match=says) as refused:
        problem_of(table(*overrides))
    assert "\n" not in str(refused.value)


def test_a_batch_smaller_than_every_data_parallel_size_narrows_the_search(table: Table) -> None:
    """Without sizes of the user's own, layouts with idle ranks are left out, not an error."""
    best = search(problem_of(table("workload.prompts_per_step=2", 'strategies=["auto"]'))).candidates[0]
    layouts = [layout for part in best.sets for name, layout in part.layouts.items() if name != "rollout"]
    assert all(layout.dp <= 2 for layout in layouts)


def test_sizes_of_the_users_own_are_kept(table: Table) -> None:
    overrides = ["layouts.policy={tensor_parallel=4, devices=8}", "layouts.rollout.tensor_parallel=2"]
    overrides += ['strategies=["async"]', "workload.max_staleness=1"]
    best = search(problem_of(table(*overrides))).candidates[0]
    engine, trainer = best.sets
    assert engine.layouts["rollout"].tp == 2
    assert (trainer.layouts["policy"].tp, trainer.devices) == (4, 8)


def test_node_types_of_your_own(table: Table) -> None:
    mine = "nodes.mine={memory_gib=48, tflops=180, hbm_tb_s=0.9, nvlink_gb_s=32, nic_gb_s=12, devices=4}"
    problem = problem_of(table(mine, 'cluster.pools=[{node="mine", nodes=3}]'))
    assert problem.cluster.devices == 12
    assert problem.cluster.sizes(0) == [1, 2, 4, 8, 12]
    with pytest.raises(ConfigError, match="nodes.mine.memory_gib = 0 must be > 0"):
        problem_of(table(mine.replace("memory_gib=48", "memory_gib=0")))
