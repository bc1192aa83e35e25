"""max_staleness = 0 is the synchronous loop: the same batches and weights as one written by hand."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from algorithms.grpo import GRPOLoss
from asyncrlhf.backends.torch.options import OptimizerOptions, SamplerOptions, TrainerOptions
from asyncrlhf.backends.torch.sample import TorchSampler
from asyncrlhf.backends.torch.train import TorchTrainer
from asyncrlhf.config.load import load
from asyncrlhf.data.tasks import reverse
from asyncrlhf.groups.rollout import answer_seed
from asyncrlhf.launch import run
from asyncrlhf.messages import ArrayColumn, Finished, GenerateRequest, Sample, TrainBatch, pack
from tests.integration.tiny import graded, grpo

STEPS, PROMPTS, ANSWERS = 6, 4, 4


@pytest.fixture
def in_directory(tmp_path: Path) -> Callable[[str], Path]:
    """Write a configuration where it is to run, and go there."""

    def write(text: str) -> Path:
        os.chdir(tmp_path)
        (tmp_path / "config.toml").write_text(text)
        return tmp_path / "config.toml"

    return write


def by_hand(model: Path, minibatches: int) -> tuple[list[float], dict[str, torch.Tensor], list[list[int]]]:
    """Sample, score, train, publish, repeat. Mean reward of every step, final weights, and the uids of each step."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    sampler = TorchSampler(SamplerOptions(model=str(model), slots=64, max_sequence_tokens=8))
    optimizer = OptimizerOptions(learning_rate=3e-3, betas=(0.9, 0.95), min_ratio=0.0, total_steps=STEPS)
    trainer = TorchTrainer(
        TrainerOptions(model=str(model), optimizer=optimizer, micro_batch_tokens=2048, max_response_tokens=4)
    )
    task = reverse(length=2, alphabet="abc")
    rewards: list[float] = []
    uids: list[list[int]] = []
    for step in range(STEPS):
        weights = trainer.export(step)
        sampler.prepare(weights)
        sampler.commit(step, "rebuild")
        uids.append(list(range(step * PROMPTS, (step + 1) * PROMPTS)))
        rows = [task[uid] for uid in uids[-1]]
        prompts = [tuple(tokenizer.encode(row["prompt"])) for row in rows]
        requests = [
            GenerateRequest(
                request_id=f"{uid}.{number}",
                prompt_token_ids=prompt,
                max_tokens=4,
                temperature=1.0,
                stop_token_ids=(tokenizer.eos_token_id,),
                seed=answer_seed(0, uid, 1, number),
            )
            for uid, prompt in zip(uids[-1], prompts, strict=True)
            for number in range(ANSWERS)
        ]
        sampler.add(requests)
        done: dict[str, Sample] = {}
        while sampler.has_work:
            done |= {e.request_id: e.sample for e in sampler.step() if isinstance(e, Finished)}
        samples = [done[request.request_id] for request in requests]
        scores = [
            graded("", tokenizer.decode(s.token_ids, skip_special_tokens=True), rows[i // ANSWERS]["answer"])
            for i, s in enumerate(samples)
        ]
        rewards.append(fmean(scores))
        advantages: list[float] = []
        for start in range(0, len(scores), ANSWERS):
            group = scores[start : start + ANSWERS]
            advantages += [(score - fmean(group)) / (pstdev(group) + 1e-4) for score in group]
        trainable = [any(advantages[i - i % ANSWERS : i - i % ANSWERS + ANSWERS]) for i in range(len(samples))]
        lengths = tuple(len(s.token_ids) for s in samples)
        masks = tuple(np.full(n, t, np.float32) for n, t in zip(lengths, trainable, strict=True))
        columns = {
            "token_ids": ArrayColumn(
                "sequence",
                tuple(np.array(prompts[i // ANSWERS] + s.token_ids, np.int32) for i, s in enumerate(samples)),
            ),
            "behaviour_logprobs": ArrayColumn("token", tuple(np.array(s.logprobs, np.float32) for s in samples)),
            "versions": ArrayColumn("token", tuple(np.full(n, step, np.int32) for n in lengths)),
            "mask": ArrayColumn("token", masks),
            "rewards": ArrayColumn("sample", tuple(np.array([score], np.float32) for score in scores)),
            "advantages": ArrayColumn("sample", tuple(np.array([a], np.float32) for a in advantages)),
        }
        batch = TrainBatch(
            train_step=step,
            prompt_lengths=tuple(len(prompts[i // ANSWERS]) for i in range(len(samples))),
            response_lengths=lengths,
            unmasked=tuple(int(mask.sum()) for mask in masks),
            rollouts=tuple(i // ANSWERS for i in range(len(samples))),
            columns=columns,
        )
        for part in batch.minibatches(minibatches):
            trainer.step(part, pack(GRPOLoss()))
    trainer.save_model(model.parent / "by_hand")
    return rewards, load_file(model.parent / "by_hand" / "model.safetensors"), uids


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("runtime", "minibatches"), [("inproc", 1), ("inproc", 2), ("local", 2), ("ray", 2), ("by reference", 2)]
)
def test_zero_staleness_equals_the_synchronous_loop(
    in_directory: Callable[[str], Path], runtime: str, minibatches: int
) -> None:
    """Invariant 7, with the real engines, wherever they live; case A6. The weights are the same up to float32: where a
    buffer begins in memory decides how torch adds up, and where a gradient is 0 but for that, Adam makes steps of it.
    """
    config = in_directory(
        grpo(
            top=f"train_steps = {STEPS}\nprompts_per_step = {PROMPTS}\nanswers_per_prompt = {ANSWERS}\n"
            f"[settings]\nminibatches = {minibatches}"
        )
    )
    by_reference = ["runtime=ray", "ray.inline_bytes=0"]
    assert run(load(str(config), by_reference if runtime == "by reference" else [f"runtime={runtime}"])) == 0
    rewards, weights, uids = by_hand(config.parent / "run/initial/policy", minibatches)
    rows = [json.loads(line) for line in (config.parent / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["reward/mean"] for row in rows] == rewards
    assert len(set(rewards)) > 1
    events = [json.loads(line) for line in (config.parent / "run/events.jsonl").read_text().splitlines()]
    assert [e["uids"] for e in events if e["type"] == "Popped"] == uids
    assert all(set(e["trained_by_lag"]) <= {"0"} for e in events if e["type"] == "Popped")
    trained = load_file(config.parent / "run/final/model.safetensors")
    assert trained.keys() == weights.keys()
    start = load_file(config.parent / "run/initial/policy/model.safetensors")
    way, gap = (
        sum(float((trained[n] - other[n]).square().sum()) for n in weights) ** 0.5 for other in (start, weights)
    )
    assert way > 0.1
    assert gap < 1e-3 * way, f"{gap:.3g} away after {way:.3g}"
