"""What a publish of a 90M-parameter model costs, beside one memcpy of its bytes in the same run.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.publish [vllm|torch]

A trainer exports to shared memory; a sampler in a process of its own, which is answering, takes the weights over.
`export` is the trainer's time; `pause` is how long the sampler gives no token: prepare, commit, and the step that
computes its answers' KV cache anew, less a step without a publish. Compare numbers of one run only: on a machine that
does other things the best of several turns counts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from asyncrlhf.backends.torch.options import SamplerOptions, TrainerOptions
from asyncrlhf.backends.torch.sample import TorchSampler
from asyncrlhf.backends.torch.scratch import write_model
from asyncrlhf.backends.torch.train import TorchTrainer
from asyncrlhf.messages import GenerateRequest
from asyncrlhf.weights.shared import SharedMemoryTransfer
from tests.integration.vllm_host import SHARED, VllmHost

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 9,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
TURNS = 9
ANSWERS = 8


def milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


def main() -> None:
    kind = sys.argv[1] if len(sys.argv) > 1 else "vllm"
    torch.set_num_threads(1)
    with TemporaryDirectory() as directory:
        model = str(write_model(Path(directory), characters="abcdefghij>", config=SHAPE))
        trainer = TorchTrainer(TrainerOptions(model=model, device="cpu", transport=SHARED))
        host = VllmHost() if kind == "vllm" else None
        engine: Any = TorchSampler(SamplerOptions(model=model, device="cpu", slots=ANSWERS, max_sequence_tokens=256))
        if host is not None:
            engine = host.make(model, slots=ANSWERS, max_sequence_tokens=256)
        measure(trainer, engine)
        engine.close()
        if host is not None:
            host.close()


def measure(trainer: TorchTrainer, engine: Any) -> None:
    weights = trainer._model.parameters()
    size = sum(parameter.nbytes for parameter in weights.values())
    here, there = torch.zeros(size // 8, dtype=torch.int64), torch.zeros(size // 8, dtype=torch.int64)
    sender = SharedMemoryTransfer()
    turns: list[dict[str, float]] = []
    for version in range(TURNS + 1):
        with torch.no_grad():
            for parameter in weights.values():
                parameter.mul_(1.0001)
        found = {"memcpy": min(milliseconds(lambda: there.copy_(here)) for _ in range(3))}
        started = time.perf_counter()
        handle = trainer.export(version)
        found["export"] = 1e3 * (time.perf_counter() - started)
        found["  of it probe"] = milliseconds(trainer._probe)
        found["  of it copy"] = milliseconds(lambda v=version: sender.send(v, weights))
        if version:
            engine.step()
            found["step"] = milliseconds(engine.step)
        else:
            engine.prepare(handle)
            engine.commit(0, "rebuild")
            engine.add([request(number) for number in range(ANSWERS)])
            continue
        found["prepare"] = milliseconds(lambda h=handle: engine.prepare(h))
        found["commit"] = milliseconds(lambda v=version: engine.commit(v, "rebuild"))
        rebuilt = milliseconds(engine.step)
        found["publish"] = found["prepare"] + found["commit"]
        found["pause"] = found["publish"] + rebuilt - found["step"]
        turns.append(found)
    best = {name: min(turn[name] for turn in turns) for name in turns[0]}
    print(f"{size / 4e6:.0f}M parameters, {size / 1e6:.0f} MB, {type(engine).__name__}")
    for name, value in best.items():
        print(f"  {name:14s} {value:8.1f} ms   x{value / best['memcpy']:.2f} of memcpy")
    print(f"  pause beyond memcpy {best['pause'] - best['memcpy']:.1f} ms")


def request(number: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_token_ids=(2 + number, 3, 4),
        max_tokens=200,
        temperature=1.0,
        stop_token_ids=(),
        seed=number,
    )


if __name__ == "__main__":
    main()
