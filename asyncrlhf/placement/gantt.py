"""A picture of the first train steps of a placement (extra: matplotlib)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from asyncrlhf.errors import ConfigError
from asyncrlhf.placement.schedule import Schedule

__all__ = ("draw",)

COLOURS = {"rollout": "tab:blue", "reads": "tab:olive", "trains": "tab:red", "sync": "tab:gray"}


def draw(schedule: Schedule, title: str, path: Path, steps: int = 4) -> None:
    """Who computes when, one row per set of devices. Raises ConfigError without matplotlib, or for a path that cannot
    be written or has an ending that is no picture's."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ConfigError(
            f"--gantt {path} takes matplotlib, which is not installed; pip install 'asyncrlhf[plot]', or leave it out"
        ) from None
    places = sorted({place for piece in schedule.slices for place in piece.places})
    figure = figures.Figure(figsize=(11, 1.2 + 0.5 * len(places)))
    axes = figure.add_subplot()
    for piece in schedule.slices:
        if piece.step < steps and piece.end > piece.start:
            kind = piece.task.rpartition(" ")[2]
            for place in piece.places:
                row = places.index(place)
                axes.barh(
                    row, piece.end - piece.start, left=piece.start, color=COLOURS.get(kind, "tab:green"), ec="white"
                )
                axes.text(
                    (piece.start + piece.end) / 2,
                    row,
                    f"{piece.task} {piece.step}",
                    ha="center",
                    va="center",
                    fontsize=6,
                    clip_on=True,
                )
    axes.set_yticks(range(len(places)), places)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as problem:
        raise ConfigError(f"--gantt {path}: the picture cannot be written ({problem})") from None
