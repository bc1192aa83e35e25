"""What megatron-core computes in many layouts, against the torch engine, which is transformers in float32.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.megatron_parity

Takes four processes and some minutes. One line per layout: the largest difference of a log-prob; of a gradient, by its
tensor's norm, for the PPO and the GRPO loss; of loss, entropy and gradient norm, by their size; and of a weight after
one AdamW step, by its tensor's norm and as it is, with a learning rate of 1e-3. Ends with 1 if one of log-probs or
gradients differs by more than 1e-5.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.integration.megatron_crew import EXPERTS, LOSSES, Crew, Reference, gap, reference, spread
from tests.integration.torch_scene import distance, make_batch, make_model

BOUND = 1e-5
VOCABULARY = 200
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"num_key_value_heads": 4},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 4},
    "llama": {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": False},
    "qwen3_moe": EXPERTS,
}
LAYOUTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("1 rank", "qwen2", {}),
    ("1 rank", "qwen3", {}),
    ("1 rank", "llama", {}),
    ("1 rank", "qwen3_moe", {}),
    ("1 rank, a row at a time", "qwen2", {"micro_batch_tokens": 1}),
    ("1 rank, all rows packed", "qwen2", {"micro_batch_tokens": 10_000}),
    ("1 rank, full recomputation", "qwen2", {"recompute": "full"}),
    ("TP2", "qwen2", {"tensor_parallel": 2}),
    ("TP2", "llama", {"tensor_parallel": 2}),
    ("TP2 + SP", "qwen2", {"tensor_parallel": 2, "sequence_parallel": True}),
    ("TP2 + SP", "qwen3", {"tensor_parallel": 2, "sequence_parallel": True}),
    ("TP4 + SP", "qwen2", {"tensor_parallel": 4, "sequence_parallel": True}),
    ("PP2", "qwen2", {"pipeline_parallel": 2}),
    ("PP2", "llama", {"pipeline_parallel": 2}),
    ("PP2 x VPP2", "qwen2", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    ("PP4", "qwen2", {"pipeline_parallel": 4}),
    ("DP2, distributed optimizer", "qwen2", {"data_parallel": 2}),
    ("DP4, distributed optimizer", "qwen2", {"data_parallel": 4}),
    ("CP2", "qwen2", {"context_parallel": 2}),
    ("CP4", "qwen2", {"context_parallel": 4}),
    ("TP2 x PP2", "qwen2", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    (
        "TP2 x PP2 x VPP2 + SP",
        "qwen3",
        {
            "tensor_parallel": 2,
            "pipeline_parallel": 2,
            "virtual_pipeline": 2,
            "sequence_parallel": True,
        },
    ),
    ("TP2 x DP2", "qwen2", {"tensor_parallel": 2, "data_parallel": 2}),
    ("TP2 x CP2 + SP", "qwen2", {"tensor_parallel": 2, "context_parallel": 2, "sequence_parallel": True}),
    ("PP2 x CP2", "qwen2", {"pipeline_parallel": 2, "context_parallel": 2}),
    ("EP2 (DP2)", "qwen3_moe", {"data_parallel": 2, "expert_parallel": 2}),
    ("EP2 (CP2)", "qwen3_moe", {"context_parallel": 2, "expert_parallel": 2}),
    ("TP2 + SP, EP2", "qwen3_moe", {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}),
    ("EP4 (DP4)", "qwen3_moe", {"data_parallel": 4, "expert_parallel": 4}),
    (
        "TP2 + SP x EP2 (DP2)",
        "qwen3_moe",
        {
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "data_parallel": 2,
            "expert_parallel": 2,
        },
    ),
    ("PP2 x EP2 (DP2)", "qwen3_moe", {"pipeline_parallel": 2, "data_parallel": 2, "expert_parallel": 2}),
)


def measured(crew: Crew, batch: Any, expected: Reference) -> list[float]:
    """The numbers of a line."""
    found = [gap(crew.call("logprobs", batch), expected.logprobs)]
    found += [distance(crew.gradients(batch, LOSSES[name]), expected.gradients[name]) for name in ("ppo", "grpo")]
    metrics, wanted = crew.step(batch, LOSSES["ppo"]).metrics, expected.metrics
    found += [abs(metrics[name] / wanted[name] - 1) for name in ("loss", "entropy", "grad_norm")]
    stepped = crew.weights()
    found.append(distance(stepped, expected.stepped))
    found.append(max(float((stepped[name] - weight).abs().max()) for name, weight in expected.stepped.items()))
    return found


def main() -> int:
    batch, worst = spread(make_batch(), VOCABULARY), 0.0
    with TemporaryDirectory() as directory:
        models = {
            name: make_model(Path(directory) / name, num_hidden_layers=4, vocab_size=VOCABULARY, **changes)
            for name, changes in MODELS.items()
        }
        expected = {name: reference(model, batch) for name, model in models.items()}
        crew = Crew(4)
        titles = ("log-prob", "grad ppo", "grad grpo", "loss", "entropy", "grad norm", "weights", "weight")
        print(f"{'layout':28}{'model':11}", *(f"{title:>10}" for title in titles), flush=True)
        try:
            for layout, model, sizes in LAYOUTS:
                numbers = measured(crew.become(models[model], **sizes), batch, expected[model])
                worst = max(worst, *numbers[:3])
                print(f"{layout:28}{model:11}", *(f"{number:10.1e}" for number in numbers), flush=True)
        finally:
            crew.close()
    print(f"largest difference of log-probs and gradients: {worst:.1e}")
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
