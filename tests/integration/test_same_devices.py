"""Policy and rollout in turn on the same devices, in processes of their own: megatron's ranks and vLLM's engines."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from asyncrlhf.config.load import load
from asyncrlhf.launch import check, run
from asyncrlhf.observe import EngineBusy, TurnTaken, read_events
from asyncrlhf.weights.layout import places
from asyncrlhf.weights.megatron_layout import MegatronParallel, megatron_layout
from asyncrlhf.weights.plan import make_plan
from asyncrlhf.weights.shapes import model_shape
from asyncrlhf.weights.zero_redundancy import Regrouping, regrouped_layout
from tests.integration.tiny import grpo

pytestmark = pytest.mark.timeout(600)

MODEL = """
[groups.policy.scratch]
characters = "abcdefgh>"
config = { vocab_size = 16, hidden_size = 64, intermediate_size = 128, num_hidden_layers = 2, num_attention_heads = 2, \
num_key_value_heads = 2, max_position_embeddings = 64, tie_word_embeddings = true }
[groups.policy]
backend = "megatron"
device = "cpu"
tensor_parallel = 2
"""
TOP = """
train_steps = 2
prompts_per_step = 2
answers_per_prompt = 4
max_staleness = 0
[placement]
strategy = "colocate"
"""
ROLLOUT = """
[groups.rollout]
backend = "vllm"
device = "cpu"
replicas = 2
max_tokens = 4
max_sequence_tokens = 8
concurrency = 8
"""


@pytest.mark.parametrize("offload", ["always", "never"])
def test_each_engine_takes_what_its_rank_holds_from_it_and_the_rest_from_the_other(
    offload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, _, rest = grpo(top=TOP, model=MODEL).replace('"inproc"', '"local"').partition("[groups.rollout]")
    Path("run.toml").write_text(first + ROLLOUT + rest[rest.index("[groups.reward]") :])
    config = load("run.toml", [f"placement.offload={offload}"])
    said = [line.split() for line in check(config).splitlines()]
    assert ["0", "0", "0", "0", "0", "0"] in said, "rank 0 is beside process 0 of engine 0"
    assert ["1", "0", "1", "0", "1", "0"] in said, "and rank 1 beside that of engine 1"
    assert run(config) == 0

    model = json.loads(Path("run/initial/policy/config.json").read_text())
    for rank, (own, others) in enumerate(expected(model)):
        said_by = Path(f"run/logs/rollout-{rank}.log").read_text()
        lines = [line for line in said_by.splitlines() if line.startswith("weights: ")]
        assert lines == [f"weights: {own} bytes of rank {rank}, on its device, and {others} of others"]
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["train_step"] for row in rows] == [0, 1]
    assert max(max(row["logprob_gap"], row["probe_gap"]) for row in rows) < 1e-4
    require_turns(moves=offload == "always")


def expected(config: dict[str, object]) -> list[tuple[int, int]]:
    """By rank: bytes of its own, and of others. Of what every layer divides they are the formula's."""
    shape, where = model_shape(config, "float32"), places(2)
    regrouping = Regrouping(pipeline=1, tensor=2, data=1, generate_pipeline=1, generate_tensor=1)
    source = megatron_layout(shape, MegatronParallel(tensor=2, padded_vocab=256), where)
    plan = make_plan(source, regrouped_layout(shape, regrouping, where), cap=1 << 30)
    divided = {p.name: p.byte_count for p in shape.parameters() if p.layer >= 0 and len(p.shape) > 1}
    for rank in range(2):
        moved = [m for m in plan.moves if m.target == rank != m.source and m.parameter in divided]
        assert sum(move.byte_count for move in moved) == regrouping.received_fraction * sum(divided.values())
    return [(row.copied, row.received) for row in plan.traffic()]


def require_turns(*, moves: bool) -> None:
    """The two groups take turns, and never compute at once. Taking and giving up answers is no computing. `moves`:
    with their memory."""
    events = list(read_events(Path("run/events.jsonl")))
    turns = [event.group for event in events if isinstance(event, TurnTaken)]
    assert len(turns) >= 4
    assert set(turns) == {"policy", "rollout"}
    assert all(one != other for one, other in pairwise(turns))
    busy = [event for event in events if isinstance(event, EngineBusy) and event.work not in ("add", "abort")]
    assert ({"sleep", "wake", "offload", "onload"} <= {event.work for event in busy}) == moves
    assert ({"pause", "go_on"} <= {event.work for event in busy}) != moves
    policy, rollout = ([event for event in busy if event.group == name] for name in ("policy", "rollout"))
    assert {event.rank for event in policy} == {event.rank for event in rollout} == {0, 1}
    assert not [(a, b) for a in policy for b in rollout if a.start < b.end and b.start < a.end]
