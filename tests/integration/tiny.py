"""A task and a model small enough that a real run takes seconds: configurations as text, for tests that start one."""

from __future__ import annotations

from random import Random
from typing import Any

__all__ = ("SCRATCH", "graded", "grpo", "preferences")

SCRATCH = """
[groups.policy.scratch]
characters = "abcdefgh>"
config = { vocab_size = 16, hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 2, \
num_key_value_heads = 1, max_position_embeddings = 64, tie_word_embeddings = true }
"""


def graded(prompt: str, response: str, ground_truth: str) -> float:
    """A reward that an untrained model earns some of: letters in their right place, and few others."""
    hits = sum(a == b for a, b in zip(response, ground_truth, strict=False))
    return hits / len(ground_truth) - abs(len(response) - len(ground_truth)) / 10


def preferences(rows: int, prompt: str = "") -> list[dict[str, Any]]:
    """Pairs of words, of which the one with more a's is preferred."""
    found: list[dict[str, Any]] = []
    for row in range(rows):
        random = Random(row)
        words = {"".join(random.choices("abc", k=random.randint(1, 5))) for _ in range(2)}
        worse, better = min(words, key=lambda w: w.count("a")), max(words, key=lambda w: w.count("a"))
        if worse.count("a") < better.count("a"):
            found.append({"prompt": prompt, "chosen": better, "rejected": worse})
    return found


def grpo(
    *, top: str = "", groups: str = "", rows: str = "", model: str = SCRATCH, algorithm: str = "algorithms.grpo:GRPO"
) -> str:
    """TOML of a GRPO run on short words; `top`, `groups` and `rows` are added where they belong."""
    return f"""
algorithm = "{algorithm}"
run_dir = "run"
runtime = "inproc"
{top}
[data]
source = "asyncrlhf.data.tasks:reverse"
options = {{ length = 2, alphabet = "abc" {rows} }}
{model}
[groups.policy.optimizer]
learning_rate = 3e-3
[groups.rollout]
max_tokens = 4
max_sequence_tokens = 8
concurrency = 64
[groups.reward]
function = "tests.integration.tiny:graded"
[observe]
console = "off"
trace = false
{groups}
"""
