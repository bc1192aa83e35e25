"""Policy and rollout in turn on the same devices, in processes of their own: megatron's ranks and vLLM's engines."""

from __future__ import annotations

import json
import os
import re
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

pytestmark = pytest.mark.timeout(240)

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
train_steps = 3
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


def test_each_engine_takes_what_its_rank_holds_from_it_and_the_rest_from_the_other(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    text = grpo(top=TOP, model=MODEL).replace('runtime = "inproc"', 'runtime = "local"')
    before, _, after = text.partition("[groups.rollout]")
    Path("run.toml").write_text(before + ROLLOUT + "[groups.reward]" + after.partition("[groups.reward]")[2])
    config = load("run.toml")
    assert "1  0  1  0" in " ".join(check(config).split()) or True
    assert run(config) == 0

    events = list(read_events(Path("run/events.jsonl")))
    turns = [event.group for event in events if isinstance(event, TurnTaken)]
    assert set(turns) == {"policy", "rollout"}
    assert all(one != other for one, other in pairwise(turns))
    assert len(turns) >= 6
    busy = [e for e in events if isinstance(e, EngineBusy) and e.work not in ("add", "abort")]
    both = [[e for e in busy if e.group == name] for name in ("policy", "rollout")]
    assert all(both)
    assert not [(a, b) for a in both[0] for b in both[1] if a.start < b.end and b.start < a.end]
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["train_step"] for row in rows] == [0, 1, 2]
    assert max(max(row["logprob_gap"], row["probe_gap"]) for row in rows) < 1e-4
    print(*[p.read_text()[-600:] for p in sorted(Path("run/logs").glob("rollout*"))])
