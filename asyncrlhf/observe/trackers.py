"""Experiment trackers, fed with the metrics rows: TensorBoard and Weights & Biases. Loaded only when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol
from uuid import uuid4

from asyncrlhf.errors import ConfigError
from asyncrlhf.observe.events import Event, RunEnded, RunStarted
from asyncrlhf.observe.log import View
from asyncrlhf.observe.metrics import Row, RowView

__all__ = ("TensorBoard", "Tracker", "TrackerName", "WandB", "make_tracker")

TrackerName = Literal["tensorboard", "wandb"]


class Tracker(View, RowView, Protocol):
    """View of the log (start and end) and of the rows."""


def make_tracker(name: TrackerName, directory: Path, config: Mapping[str, Any] | None = None) -> Tracker:
    """A tracker that writes below `directory`; `config` is what it shows as the run's settings.

    Raises ConfigError when its package is not installed.
    """
    return TensorBoard(directory) if name == "tensorboard" else WandB(directory, config or {})


class TensorBoard:
    """Scalars in `<directory>/tensorboard`, one point per train step. A resume writes the kept rows again and replaces
    the files of the earlier run, so that no step has two points."""

    def __init__(self, directory: Path) -> None:
        self._module = _load("tensorboard.summary", "tensorboard")
        self._directory = directory / "tensorboard"
        self._writer: Any = None

    def see(self, event: Event, *, live: bool) -> None:
        if isinstance(event, RunEnded) and live:
            self.close()

    def see_row(self, row: Row, *, live: bool) -> None:
        """Raises OSError when the disk fails."""
        if self._writer is None:
            for stale in self._directory.glob("events.out.tfevents.*"):
                stale.unlink()
            self._writer = self._module.Writer(str(self._directory))
        step = row["train_step"]
        for name, value in row.items():
            if isinstance(value, int | float) and name != "train_step":
                self._writer.add_scalar(name, value, step)
        if live:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB:
    """One wandb run for one run directory: a resume continues it. The variables WANDB_MODE ("offline" needs neither
    network nor account), WANDB_PROJECT and WANDB_ENTITY mean what they mean to wandb."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        self._module = _load("wandb", "wandb")
        self._directory, self._config = directory, config
        self._run: Any = None

    def see(self, event: Event, *, live: bool) -> None:
        """Raises ConfigError when wandb refuses to start."""
        if not live:
            return
        if isinstance(event, RunStarted):
            self._start(event)
        elif isinstance(event, RunEnded) and self._run is not None:
            self._run.finish(exit_code=int(event.status == "failed"))
            self._run = None

    def see_row(self, row: Row, *, live: bool) -> None:
        if live and self._run is not None:
            self._run.log({name: value for name, value in row.items() if value is not None})

    def close(self) -> None:
        """The run ends without a RunEnded: it has failed."""
        if self._run is not None:
            self._run.finish(exit_code=1)
            self._run = None

    def _start(self, event: RunStarted) -> None:
        name_file = self._directory / "wandb-run-id"
        if event.resumed_from is None or not name_file.exists():
            name_file.parent.mkdir(parents=True, exist_ok=True)
            name_file.write_text(uuid4().hex[:12])
        try:
            self._run = self._module.init(
                id=name_file.read_text(),
                name=self._directory.name,
                dir=str(self._directory),
                config=dict(self._config),
                resume="allow",
            )
        except self._module.errors.Error as error:
            raise ConfigError(
                f"wandb does not start: {error}; log in with `wandb login`, or set WANDB_MODE=offline"
            ) from error
        self._run.define_metric("*", step_metric="train_step")


def _load(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"observe.trackers has {package!r}, but the package is not there ({error}); install asyncrlhf[trackers], "
            "or take it out of observe.trackers"
        ) from error
