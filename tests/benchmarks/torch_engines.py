"""Tokens per CPU second of the torch engines on one core, beside what transformers does by itself.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.torch_engines

Compare numbers of one run only: all variants take turns, and the best of several turns counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from asyncrlhf import ops
from asyncrlhf.backends.torch.options import SamplerOptions, TrainerOptions
from asyncrlhf.backends.torch.sample import TorchSampler
from asyncrlhf.backends.torch.scratch import write_model
from asyncrlhf.backends.torch.train import TorchTrainer
from asyncrlhf.messages import ArrayColumn, Finished, GenerateRequest, TrainBatch, pack

CHARACTERS = "0123456789+=abcdefghijklmnopqrstuvwxyz>-*()/ "
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
TURNS = 5
RANDOM = np.random.default_rng(0)


class Loss(ops.Loss, frozen=True):
    def __call__(self, new: ops.TokenStats, batch: ops.MicroBatch) -> torch.Tensor:
        ratio = (new.logprobs - batch.anchor_logprobs).exp()
        return -batch.weight * ops.clipped_gain(ratio, batch.advantages, 0.2, 0.28)


def in_turns(title: str, variants: dict[str, Callable[[], int]]) -> None:
    """Print tokens per CPU second of each variant; each gives the tokens it worked on."""
    best = dict.fromkeys(variants, 0.0)
    for _ in range(TURNS):
        for name, variant in variants.items():
            started = time.process_time()
            count = variant()
            best[name] = max(best[name], count / (time.process_time() - started))
    first = next(iter(best.values()))
    print(title)
    for name, rate in best.items():
        print(f"  {name:34s} {rate:8.0f} tokens/s  x{rate / first:.2f}")


def sampling(model: str, answers_per_prompt: int, max_tokens: int) -> None:
    """64 prompts of 6 tokens, 8 answers each, or 512 different prompts."""
    count = 512 // answers_per_prompt
    prompts = [tuple(p) for p in RANDOM.integers(2, 60, (count, 6)).tolist() for _ in range(answers_per_prompt)]
    engine = TorchSampler(SamplerOptions(model=model, device="cpu", slots=512, max_sequence_tokens=128, version=0))
    module = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.tensor(prompts)

    def ours() -> int:
        events = list(
            engine.add(
                [
                    GenerateRequest(
                        request_id=str(i),
                        prompt_token_ids=prompt,
                        max_tokens=max_tokens,
                        temperature=1.0,
                        stop_token_ids=(0,),
                        seed=i,
                    )
                    for i, prompt in enumerate(prompts)
                ]
            )
        )
        while engine.has_work:
            events += engine.step()
        return sum(len(e.sample.token_ids) for e in events if isinstance(e, Finished))

    @torch.inference_mode()
    def theirs() -> int:
        output = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=True,
            top_k=0,
            eos_token_id=0,
            pad_token_id=0,
        )[:, 6:]
        ended = (output == 0).long()
        return int((ended.cumsum(1) - ended == 0).sum())

    title = f"sampling, 512 answers, {answers_per_prompt} to a prompt, up to {max_tokens} tokens"
    in_turns(title, {"transformers generate": theirs, "TorchSampler": ours})


def make_batch(prompts: np.ndarray, lengths: np.ndarray) -> TrainBatch:
    def per_token(draw: Callable[[int], np.ndarray]) -> ArrayColumn:
        return ArrayColumn("token", tuple(draw(int(n)).astype(np.float32) for n in lengths))

    return TrainBatch(
        train_step=0,
        prompt_lengths=(prompts.shape[1],) * len(lengths),
        response_lengths=tuple(lengths.tolist()),
        unmasked=tuple(lengths.tolist()),
        rollouts=tuple(i // 8 for i in range(len(lengths))),
        columns={
            "token_ids": ArrayColumn(
                "sequence",
                tuple(
                    np.concatenate([prompts[i // 8], RANDOM.integers(2, 60, n)]).astype(np.int32)
                    for i, n in enumerate(lengths)
                ),
            ),
            "behaviour_logprobs": per_token(lambda n: RANDOM.normal(-4, 0.1, n)),
            "advantages": per_token(lambda n: RANDOM.normal(0, 1, n)),
            "mask": per_token(np.ones),
            "versions": per_token(np.zeros),
            "rewards": ArrayColumn("sample", tuple(np.zeros(1, np.float32) for _ in lengths)),
        },
    )


def training(title: str, model: str, batch: TrainBatch, minibatches: int) -> None:
    settings = {
        "one padded batch": {"micro_batch_rows": len(batch)},
        "padded, 1024 tokens": {"micro_batch_tokens": 1024},
        "padded, 2048 tokens": {"micro_batch_tokens": 2048},
        "packed, 512 tokens": {"micro_batch_tokens": 512, "layout": "packed"},
        "shared, 1024 tokens": {"micro_batch_tokens": 1024, "layout": "shared"},
        "shared, 2048 tokens": {"micro_batch_tokens": 2048, "layout": "shared"},
    }
    engines = {
        name: TorchTrainer(TrainerOptions(model=model, device="cpu", **options)) for name, options in settings.items()
    }

    def step(engine: TorchTrainer) -> int:
        for part in batch.minibatches(minibatches):
            engine.step(part, pack(Loss()))
        return batch.token_count

    in_turns(title, {name: lambda engine=engine: step(engine) for name, engine in engines.items()})


def main() -> None:
    torch.set_num_threads(1)
    with TemporaryDirectory() as directory:
        model = str(write_model(directory, characters=CHARACTERS, config=CONFIG))
        sampling(model, 8, 7)
        sampling(model, 1, 7)
        sampling(model, 8, 64)
        lengths = np.full(512, 6)
        batch = make_batch(RANDOM.integers(2, 60, (64, 6)), lengths)
        training("training, 512 answers of 6 tokens to 64 prompts of 6, 4 optimizer steps", model, batch, 4)
        lengths = np.clip(np.exp(RANDOM.normal(np.log(24), 1.0, 128)).astype(int), 1, 256)
        batch = make_batch(RANDOM.integers(2, 60, (16, 16)), lengths)
        training("training, 128 answers of log-normal length (median 24) to 16 prompts of 16", model, batch, 1)


if __name__ == "__main__":
    main()
