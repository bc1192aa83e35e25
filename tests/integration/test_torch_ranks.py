"""Several ranks train one model: an objective, weights, columns and files that their number cannot change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.crew import Crew
from tests.integration.torch_scene import (
    ConstantLoss,
    EntropyLoss,
    PolicyLoss,
    SequenceMeanLoss,
    SequenceRatioLoss,
    distance,
    gradients,
    make_batch,
    make_model,
    trainer,
)

pytestmark = pytest.mark.timeout(180)
SHARDINGS = ["none", "full"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew(4)
    yield crew
    crew.close()


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_n6_gradients_do_not_depend_on_the_ranks(crew: Crew, model: str, ranks: int, sharding: str) -> None:
    batch = make_batch()
    cuts: list[dict[str, Any]] = [
        {"micro_batch_rows": 1},
        {"micro_batch_rows": 2},
        {"micro_batch_rows": 8, "layout": "shared"},
        {"layout": "packed", "gradient_checkpointing": True},
    ]
    expected = {
        kind: gradients(trainer(model, micro_batch_rows=100), batch, kind())
        for kind in (PolicyLoss, SequenceMeanLoss, ConstantLoss, SequenceRatioLoss, EntropyLoss)
    }
    for cut in cuts:
        crew.become(model, ranks, sharding=sharding, **cut)
        for kind, whole in expected.items():
            assert distance(crew.gradients(batch, kind()), whole) < 1e-5, (kind, cut)
