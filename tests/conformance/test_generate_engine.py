"""The sampler suite over the samplers of torch and vLLM, on a tiny model, and over the fake one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrlhf.backends.torch.options import SamplerOptions, TrainerOptions
from asyncrlhf.backends.torch.sample import TorchSampler
from asyncrlhf.backends.torch.scratch import write_model
from asyncrlhf.backends.torch.train import TorchTrainer
from asyncrlhf.messages import GenerateRequest
from asyncrlhf.testing import FakeSampler, FakeSamplerOptions, FakeTrainer, FakeTrainerOptions, fake_logprobs
from asyncrlhf.testing.conformance import GENERATE_ENGINE, GenerateSubject
from tests.integration.vllm_host import SHARED, VllmHost

checks = pytest.mark.parametrize("check", GENERATE_ENGINE, ids=lambda check: check.__name__)
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # of size 32, the smallest that vLLM serves on CPUs
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,  # vLLM pads it to 32 on CPUs
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "head_dim": 32,
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("sampler"), characters="abcdefghijklmnopqrstuvwxyz>", config=SHAPE)


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, characters = tmp_path_factory.mktemp("experts"), "abcdefghijklmnopqrstuvwxyz>"
    return write_model(directory, model_type="qwen3_moe", characters=characters, config=SHAPE | EXPERTS)


@pytest.fixture(scope="module")
def vllm_host() -> Generator[VllmHost]:
    host = VllmHost()
    yield host
    host.close()


@pytest.fixture
def torch_subject(model: Path) -> GenerateSubject:
    def make() -> TorchSampler:
        return TorchSampler(SamplerOptions(model=str(model), device="cpu", slots=4, max_sequence_tokens=48))

    return trained_subject(model, make)


@pytest.fixture
def vllm_subject(model: Path, vllm_host: VllmHost) -> Generator[GenerateSubject]:
    yield trained_subject(model, lambda: vllm_host.make(str(model)), transport=SHARED)
    vllm_host.clear()


@pytest.fixture(scope="module")
def experts_host() -> Generator[VllmHost]:
    """Where vLLM has begun with a model without experts it cannot go on with one that has them."""
    host = VllmHost()
    yield host
    host.close()


@pytest.fixture
def experts_subject(experts: Path, experts_host: VllmHost) -> Generator[GenerateSubject]:
    yield trained_subject(experts, lambda: experts_host.make(str(experts)), transport=SHARED)
    experts_host.clear()


def trained_subject(model: Path, make: Callable[[], Any], **options: Any) -> GenerateSubject:
    """Behind a torch trainer; log-probs are held against those of transformers."""
    trainer = TorchTrainer(TrainerOptions(model=str(model), device="cpu", **options))
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    exported: dict[int, dict[str, torch.Tensor]] = {}
    random = torch.Generator().manual_seed(1)

    def parameters() -> dict[str, torch.Tensor]:
        return trainer._model.parameters()

    def train() -> None:
        with torch.no_grad():
            for parameter in parameters().values():
                parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=random))

    def export(version: int) -> Any:
        exported[version] = {name: parameter.detach().clone() for name, parameter in parameters().items()}
        return trainer.export(version)

    @torch.no_grad()
    def logprobs(version: int, request: GenerateRequest, tokens: Sequence[int]) -> Sequence[float]:
        plain.load_state_dict(exported[version], strict=False)
        ids = torch.tensor([[*request.prompt_token_ids, *tokens]])
        logits = plain(ids).logits[0, len(request.prompt_token_ids) - 1 : -1]
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()

    return subject(make, train, export, logprobs, tolerance=2e-5, unknown=29, longest=48)


@pytest.fixture
def fake_subject() -> GenerateSubject:
    trainer = FakeTrainer(FakeTrainerOptions(seed=1))

    def train() -> None:
        trainer.weights["w"][0] += 0.5

    def logprobs(version: int, request: GenerateRequest, tokens: Sequence[int]) -> Sequence[float]:
        return fake_logprobs(trainer.exported[version], request.prompt_token_ids, tokens)

    def make() -> FakeSampler:
        return FakeSampler(FakeSamplerOptions(slots=4, length=7.0, sigma=0.5, vocabulary=29, max_sequence_tokens=48))

    return subject(make, train, trainer.export, logprobs, tolerance=0.0, unknown=29, longest=48)


def subject(
    make: Callable[[], Any],
    train: Callable[[], None],
    export: Callable[[int], Any],
    logprobs: Any,
    *,
    tolerance: float,
    unknown: int,
    longest: int,
) -> GenerateSubject:
    return GenerateSubject(
        engine=make(),
        another=make,
        train=train,
        export=export,
        logprobs=logprobs,
        tolerance=tolerance,
        prompt=(9, 12, 28),
        stop_token_ids=(0, 5, 6, 7),
        unknown_token=unknown,
        longest=longest,
    )


@checks
def test_torch(check: Any, torch_subject: GenerateSubject) -> None:
    check(torch_subject)


@pytest.mark.timeout(600)
@checks
def test_vllm(check: Any, vllm_subject: GenerateSubject) -> None:
    check(vllm_subject)


@pytest.mark.timeout(600)
@checks
def test_vllm_with_experts(check: Any, experts_subject: GenerateSubject) -> None:
    check(experts_subject)


@checks
def test_fake(check: Any, fake_subject: GenerateSubject) -> None:
    check(fake_subject)
