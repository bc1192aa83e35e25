"""Policy and rollout on the same devices, in turn: which process is on which rank, and what it takes of whom."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from asyncrlhf.abc import Beside
from asyncrlhf.backends.vllm.slices import FIRST, HERE, Slices
from asyncrlhf.build import places as engine_places
from asyncrlhf.config.load import load
from asyncrlhf.errors import ConfigError, PublishRefused
from asyncrlhf.launch import check
from asyncrlhf.messages import WeightHandle
from asyncrlhf.pools import beside
from asyncrlhf.stages import prepare
from asyncrlhf.weights.assemble import AssembledTransfer
from asyncrlhf.weights.layout import Layout, Place, places
from asyncrlhf.weights.megatron_layout import MegatronParallel, megatron_layout
from asyncrlhf.weights.parts import joined
from asyncrlhf.weights.plan import make_plan
from asyncrlhf.weights.pull import require_whole
from asyncrlhf.weights.regions import allocate
from asyncrlhf.weights.torch_layout import fsdp_layout
from asyncrlhf.weights.vllm_layout import VllmParallel, vllm_layout
from asyncrlhf.weights.whereabouts import machine
from asyncrlhf.weights.zero_redundancy import Regrouping, regrouped_layout
from tests.integration.reshard_scene import DENSE, ShardTrainer, held, same_bits, weights
from tests.integration.tiny import grpo

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}
TOP = """
train_steps = 2
prompts_per_step = 4
answers_per_prompt = 4
[placement]
strategy = "colocate"
"""
MEGATRON = ("groups.policy.backend=megatron", "groups.policy.sequence_parallel=false")
VLLM = ("groups.rollout.backend=vllm",)


@pytest.fixture(autouse=True)
def eight_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b,c,d,e,f,g,h")
    monkeypatch.setattr("asyncrlhf.stages.require_vllm", lambda key, runtime: None)
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(MODEL))
    text = grpo(top=TOP, model='[groups.policy]\nmodel = "model"\n')
    Path("run.toml").write_text(text.replace('runtime = "inproc"', 'runtime = "local"'))


def sized(**sizes: int) -> list[str]:
    """rollout_replicas=2 is groups.rollout.replicas=2."""
    return [f"groups.{key.replace('_', '.', 1)}={size}" for key, size in sizes.items()]


def hosts(*overrides: str) -> dict[str, list[Beside]]:
    stage = prepare(load("run.toml", overrides))
    return beside(stage.config, stage.wiring)


def test_engines_are_on_the_ranks_that_the_grouping_says() -> None:
    four = sized(policy_tensor_parallel=4, rollout_replicas=2, rollout_tensor_parallel=2)
    assert hosts(*MEGATRON, *VLLM, *four) == {
        "rollout": [
            Beside("policy", (0, 2), ((0, 1), (2, 3))),
            Beside("policy", (1, 3), ((1, 0), (3, 2))),
        ]
    }
    staged = sized(policy_pipeline_parallel=2, policy_data_parallel=2, rollout_replicas=4)
    assert [(on.ranks, on.takes) for on in hosts(*MEGATRON, *VLLM, *staged)["rollout"]] == [
        ((0,), ((0, 2),)),
        ((2,), ((2, 0),)),
        ((1,), ((1, 3),)),
        ((3,), ((3, 1),)),
    ], "of two stages, and of one data parallel copy"
    context = sized(policy_tensor_parallel=2, policy_context_parallel=2, rollout_replicas=4)
    assert [on.takes for on in hosts(*MEGATRON, *VLLM, *context)["rollout"]] == [
        ((0, 1),),
        ((1, 0),),
        ((2, 3),),
        ((3, 2),),
    ]


def test_torch_ranks_too_and_what_is_put_whole_is_as_near_for_all() -> None:
    pair = sized(policy_data_parallel=4, rollout_replicas=2, rollout_tensor_parallel=2)
    assert hosts("groups.policy.sharding=full", *VLLM, *pair)["rollout"] == [
        Beside("policy", (0, 2), ((0, 1), (2, 3))),
        Beside("policy", (1, 3), ((1, 0), (3, 2))),
    ]
    assert hosts(*VLLM, *pair)["rollout"] == [Beside("policy", (0, 1)), Beside("policy", (2, 3))]
    whole = sized(policy_tensor_parallel=2, rollout_replicas=2)
    assert hosts(*MEGATRON, *whole)["rollout"] == [Beside("policy", (0,)), Beside("policy", (1,))]


@pytest.mark.parametrize(
    "overrides",
    [
        sized(policy_tensor_parallel=2),
        [*sized(policy_tensor_parallel=2, rollout_replicas=2), "placement.turns=none"],
        [*sized(policy_tensor_parallel=2, rollout_replicas=2), "placement.strategy=async"],
        [*sized(policy_tensor_parallel=2, rollout_replicas=2), "groups.policy.device=cpu"],
    ],
)
def test_others_are_on_no_rank_s_device(overrides: list[str]) -> None:
    assert hosts(*MEGATRON, *VLLM, *overrides) == {}


def test_without_gpus_a_device_that_is_chosen_at_the_start_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sizes = (*MEGATRON, *VLLM, *sized(policy_tensor_parallel=2, rollout_replicas=2), "groups.policy.device=cpu")
    assert [place.ranks for place in hosts(*sizes)["rollout"]] == [(0,), (1,)]


def test_check_says_how_many_would_be() -> None:
    said = check(load("run.toml", [*MEGATRON, *VLLM, *sized(policy_tensor_parallel=2)])).splitlines()
    assert "  rollout".ljust(25) + "1 in all, beside 2 ranks of policy; replicas = 2 puts one on each" in said


def test_processes_see_the_gpus_of_their_ranks() -> None:
    def seen(*overrides: str) -> dict[str, list[tuple[str, ...] | None]]:
        stage = prepare(load("run.toml", [*MEGATRON, *VLLM, *overrides]))
        check(stage.config)
        found = engine_places(stage.config, stage.wiring)
        return {name: [place.gpus for place in found[name]] for name in ("policy", "rollout")}

    ranks = [("a",), ("b",), ("c",), ("d",)]
    four = sized(policy_tensor_parallel=4, rollout_replicas=2, rollout_tensor_parallel=2)
    assert seen(*four) == {"policy": ranks, "rollout": [("a", "c"), ("b", "d")]}
    staged = sized(policy_pipeline_parallel=2, policy_data_parallel=2, rollout_replicas=4)
    assert seen(*staged) == {"policy": ranks, "rollout": [("a",), ("c",), ("b",), ("d",)]}


def test_a_cluster_is_asked_for_the_ranks_cores_and_engines_take_turns_on_them() -> None:
    far = ("runtime=ray", "ray.address=far:1", "pools.shared.cores=2", "pools.shared.devices=2")
    far = (*far, "pools.shared.engines_per_device=2", "groups.reward.pool=shared")
    text = check(load("run.toml", [*MEGATRON, *VLLM, *far, *sized(policy_tensor_parallel=2, rollout_replicas=2)]))
    assert "2 devices and 6 cores, to be found in the cluster: rollout x 2, reward, policy x 2" in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            sized(policy_tensor_parallel=2, policy_data_parallel=2, rollout_tensor_parallel=4),
            "groups.rollout.tensor_parallel = 4 does not divide groups.policy.tensor_parallel = 2, on whose 4 devices "
            r"its engines take turns; use 1 \(replicas = 4\) or 2 \(replicas = 2\)",
        ),
        (
            sized(policy_tensor_parallel=4, rollout_tensor_parallel=2),
            "groups.rollout.tensor_parallel = 2: .* share no GPUs with policy unless there is a process for each of "
            "the 4 ranks of policy, and there are 2; use replicas = 2, or devices of its own",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_check_too(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(load("run.toml", [*MEGATRON, *VLLM, *overrides]))


def test_check_says_who_is_where_and_holds_the_bytes_against_the_formula() -> None:
    four = sized(policy_tensor_parallel=4, rollout_replicas=2, rollout_tensor_parallel=2)
    lines = [line.split() for line in check(load("run.toml", [*MEGATRON, *VLLM, *four])).splitlines()]
    start = next(number for number, line in enumerate(lines) if line[:2] == ["publish", "of"])
    assert " ".join(lines[start]).endswith("whose processes are on the devices of the ranks:")
    rows = lines[start + 2 : start + 6]
    assert [row[:6] for row in rows] == [
        ["0", "0", "0", "0", "0", "0"],
        ["1", "0", "1", "0", "1", "0"],
        ["2", "0", "2", "0", "0", "1"],
        ["3", "0", "3", "0", "1", "1"],
    ]
    assert "(4 - 2) / (2 * 4) of" in " ".join(lines[start + 6])
    assert [row[8:10] for row in rows[1:3]] == [row[10:12] for row in rows[1:3]], "as much from others as to others"


def test_check_counts_the_experts_that_other_copies_have() -> None:
    """Two ranks with two of four experts each, and a process on each that needs all: half of the experts are sent."""
    mixture = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    Path("model/config.json").write_text(json.dumps(MODEL | mixture | {"decoder_sparse_step": 1}))
    two = sized(policy_data_parallel=2, policy_expert_parallel=2, rollout_replicas=2)
    text = check(load("run.toml", [*MEGATRON, *VLLM, *two]))
    lines = [line.split() for line in text.splitlines()]
    start = next(number for number, line in enumerate(lines) if line[:2] == ["publish", "of"])
    half = 4 * 2 * 3 * 64 * 96 * 4 / (1 << 10)
    assert [" ".join(row[8:10]) for row in lines[start + 2 : start + 4]] == [f"{half:.1f} KiB"] * 2
    assert "experts are divided among data parallel copies too, and come from all of them" in text


def test_the_example_of_the_readme() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (block,) = (part.partition("```")[0] for part in text.split("```text\n") if "whose processes are on" in part)
    sizes = {"hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128, "num_hidden_layers": 36}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936}
    Path("model/config.json").write_text(json.dumps(MODEL | {"model_type": "qwen3"} | sizes | heads))
    four = sized(policy_tensor_parallel=4, rollout_replicas=2, rollout_tensor_parallel=2)
    printed = check(load("run.toml", [*MEGATRON, *VLLM, *four, "groups.policy.dtype=bfloat16"]))
    assert block in f"{printed}\n"


def put(source: Layout, version: int) -> tuple[ShardTrainer, WeightHandle]:
    """The ranks, which hold what they have put while they live, and what they announce."""
    trainer = ShardTrainer(source, replicas=True)
    return trainer, joined(trainer.export(version, weights(DENSE, version)))


SIZES = [(1, 2, 1, 1), (1, 2, 2, 1), (2, 1, 2, 1), (2, 2, 1, 2), (1, 2, 2, 2)]
"""p, t, d and t_g; p_g is 1."""


@pytest.mark.parametrize("sizes", SIZES)
def test_every_process_takes_from_its_rank_what_that_has_and_the_rest_from_its_group(
    sizes: tuple[int, int, int, int],
) -> None:
    p, t, d, tg = sizes
    regrouping = Regrouping(pipeline=p, tensor=t, data=d, generate_pipeline=1, generate_tensor=tg)
    where = places(regrouping.rank_count)
    source = megatron_layout(DENSE, MegatronParallel(tensor=t, pipeline=p), where)
    near = {rank: regrouping.nearest(rank) for rank in range(regrouping.rank_count)}
    plan = make_plan(source, regrouped_layout(DENSE, regrouping, where), cap=1 << 30, near=near)
    traffic = {row.rank: row for row in plan.traffic()}
    given = Counter[int]()
    for move in plan.moves:
        assert move.source in near[move.target]
        given[move.source] += move.byte_count if move.source != move.target else 0
    (_ranks, handle), model = put(source, 3), weights(DENSE, 3)
    for ranks in regrouping.engines():
        layout = vllm_layout(DENSE, VllmParallel(tensor=tg), [Place(rank) for rank in ranks])
        receipts = []
        for rank, holding in zip(ranks, layout.holdings, strict=True):
            staged = allocate(holding)
            receipts.append(Slices(layout, rank, near).receive(handle, staged))
            assert same_bits(staged, held(holding, model))
            own, others = traffic[rank].copied, traffic[rank].received
            assert (receipts[-1].own_byte_count, receipts[-1].byte_count) == (own, own + others)
        require_whole(receipts, handle)
    matrices = {q.name: q.byte_count for q in DENSE.parameters() if q.layer >= 0 and len(q.shape) > 1}
    for rank in range(regrouping.rank_count):
        moved = [m for m in plan.moves if m.target == rank != m.source and m.parameter in matrices]
        assert sum(m.byte_count for m in moved) == regrouping.received_fraction * sum(matrices.values())


def test_parts_of_fsdp_are_taken_from_their_rank_first() -> None:
    where = places(4)
    source = fsdp_layout(DENSE, where)
    regrouping = Regrouping(pipeline=1, tensor=4, data=1, generate_pipeline=1, generate_tensor=2)
    near = {rank: regrouping.nearest(rank) for rank in range(4)}
    (_ranks, handle), model = put(source, 2), weights(DENSE, 2)
    rows = {p.name for p in DENSE.parameters() if p.name.endswith(("gate_proj.weight", "up_proj.weight"))}
    for ranks in regrouping.engines():
        layout = vllm_layout(DENSE, VllmParallel(tensor=2), [Place(rank) for rank in ranks])
        plan = make_plan(source, layout, cap=1 << 30, near=near)
        assert all(m.source in near[m.target] for m in plan.moves if m.parameter in rows)
        for rank, holding in zip(ranks, layout.holdings, strict=True):
            staged = allocate(holding)
            receipt = Slices(layout, rank, near).receive(handle, staged)
            assert same_bits(staged, held(holding, model))
            assert 0 < receipt.own_byte_count < receipt.byte_count


def test_replicas_count_once_in_the_checksum() -> None:
    source = megatron_layout(DENSE, MegatronParallel(tensor=2), places(4))
    model = weights(DENSE, 1)
    once, all_of_them = (joined(ShardTrainer(source, replicas=kind).export(1, model)) for kind in (False, True))
    assert once.checksum == all_of_them.checksum
    assert once.byte_count == all_of_them.byte_count
    counts = [
        sum(len(holding.slices) for holding in msgspec.msgpack.decode(each.payload["layout"], type=Layout).holdings)
        for each in (once, all_of_them)
    ]
    assert counts[0] < counts[1] == sum(len(holding.slices) for holding in source.holdings)


def test_what_several_ranks_have_put_is_read_on_the_machine_of_the_reader() -> None:
    """The ranks of another machine are not asked for what those of this one have."""
    source = megatron_layout(DENSE, MegatronParallel(tensor=2), places(4))
    (_ranks, handle), model = put(source, 1), weights(DENSE, 1)
    gone = [{**shard, "machine": "another", "key": "none"} for shard in handle.payload["shards"][:2]]
    here = [{**shard, "machine": machine()} for shard in handle.payload["shards"][2:]]
    payload = {**handle.payload, "shards": (*gone, *here)}
    assert same_bits(dict(AssembledTransfer().receive(payload)), model)
    layout = vllm_layout(DENSE, VllmParallel(), [Place(FIRST, HERE)])
    staged = allocate(layout.holdings[0])
    Slices(layout, FIRST, {}).receive(msgspec.structs.replace(handle, payload=payload), staged)
    assert same_bits(staged, held(layout.holdings[0], model))
    everywhere = {**payload, "shards": (*gone, *gone)}
    with pytest.raises(PublishRefused, match="are gone"):
        dict(AssembledTransfer().receive(everywhere))
