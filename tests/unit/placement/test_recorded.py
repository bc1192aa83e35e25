"""Runs that were measured, and what is predicted from one of each workload for the others: the arithmetic of
calibration and simulation against numbers of a real machine. Nothing is timed here.

recorded/*.json are written by `python -m tests.benchmarks.predict --workload <name> --record FILE` (2 cores of an AMD
EPYC, other processes beside it at a hundredth of its weight): a calibration at K = 1, and the median steady step of
every other setting of that round. turns.json is of `common`, too, later, with `--settings K=0 alternating
alternating+offload`. Of it and of `tails` nothing was used to make the simulator, but what a change of turns takes
where memory stays; the other usual costs of a change and of a decode step were chosen with runs of `common`, the
recorded one among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrlhf.placement.measured import MeasuredRun
from asyncrlhf.placement.predict import predictions
from asyncrlhf.placement.turning import usual_turning
from tests.benchmarks.predict import changes, ranking

WEIGHTS = 2_430_000
"""Bytes of the model that was trained."""
CLASS = 0.15
"""What is promised for this kind of machine."""


@dataclass(frozen=True)
class Recorded:
    run: dict[str, Any]
    measured_median_s: dict[str, float]


@pytest.mark.parametrize(("workload", "settings"), [("common", 8), ("turns", 4), ("tails", 7)])
def test_other_settings_are_predicted_within_the_class(workload: str, settings: int) -> None:
    content = (Path(__file__).parent / "recorded" / f"{workload}.json").read_bytes()
    recorded = msgspec.json.decode(content, type=Recorded)
    usual = {"turning": usual_turning(WEIGHTS, offload=False), "weight_bytes": WEIGHTS}
    run = msgspec.convert({**usual, **recorded.run}, MeasuredRun)
    measured = recorded.measured_median_s
    assert len(measured) == settings
    predicted = {setting: predictions(run, {**changes(setting), "steps": 40})[1].result.median for setting in measured}
    for setting, seconds in measured.items():
        assert predicted[setting] == pytest.approx(seconds, rel=CLASS), setting
    assert not [line for line in ranking(measured, predicted) if line.startswith("ranked wrongly")]
