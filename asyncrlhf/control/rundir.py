"""RunDirectory: whether a run starts, goes on, or is already complete, and who may write into its directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec

from asyncrlhf.config.schema import Config
from asyncrlhf.control.checkpoint import Checkpoints, Manifest
from asyncrlhf.errors import CheckpointError, ConfigError

__all__ = ("RunDirectory",)


class RunDirectory:
    """The directory of one run. `resolved` is the configuration's TOML text, `fixed` what a resume may not change."""

    def __init__(self, config: Config, resolved: str, fixed: dict[str, Any]) -> None:
        self.path = Path(config.run_dir)
        self.checkpoints = Checkpoints(self.path / "checkpoints", keep=config.checkpoint.keep)
        self.fixed = msgspec.to_builtins(fixed)
        self._config, self._resolved = config, resolved

    @property
    def final(self) -> Path:
        """The final policy: a link to the newest checkpoint's Hugging Face directory."""
        return self.path / "final"

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Hold the directory. Raises ConfigError if another process does, or if it cannot be made."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ConfigError(f'run_dir = "{self.path}" cannot be written: {error.strerror}; use another one') from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f'run_dir = "{self.path}" is in use by another process; wait for it or use another run_dir'
                ) from None
            yield
        finally:
            os.close(descriptor)

    def completed(self) -> str | None:
        """Why nothing is left to do, in one line; None if something is."""
        try:
            summary = json.loads((self.path / "summary.json").read_bytes())
        except (OSError, ValueError):
            return None
        newest = self.checkpoints.latest()
        if summary.get("status") != "completed" or newest is None or not self.final.exists():
            return None
        if self._config.resume not in ("auto",):
            return None
        steps = int(newest.name.removeprefix("step-"))
        if self._config.train_steps is not None and self._config.train_steps > steps:
            return None
        return (
            f"{self.path} holds a completed run of {steps} train steps; its policy is {self.final}. To train on, raise "
            "train_steps; to start anew, set another run_dir"
        )

    def require_same_configuration(self) -> None:
        """Raises ConfigError when the run that lies here was made with another configuration."""
        try:
            before = (self.path / "config.toml").read_text()
        except OSError as error:
            raise ConfigError(f"{self.path / 'config.toml'} cannot be read: {error.strerror}") from None
        if before != self._resolved:
            old, new = before.splitlines(), self._resolved.splitlines()
            pairs = [(a, b) for a, b in zip(old, new, strict=False) if a != b] or [(f"{len(old)} lines", f"{len(new)}")]
            raise ConfigError(
                f'run_dir = "{self.path}" was made with another configuration ({pairs[0][0]}, now {pairs[0][1]}); '
                "remove it to run this stage again, or use another run_dir"
            )

    def resume_from(self) -> Path | None:
        """The checkpoint to go on from; None for a fresh start.

        Raises ConfigError when resume = "never" would overwrite a run, and when a run has train steps behind it and
        no complete checkpoint to go on from.
        """
        resume = self._config.resume
        if resume not in ("auto", "never"):
            path = Path(resume)
            if not (path / "manifest.json").exists():
                raise ConfigError(f'resume = "{resume}" is not a complete checkpoint: it has no manifest.json')
            return path
        newest = self.checkpoints.latest()
        steps = self._logged_steps()
        if resume == "never":
            if newest is not None or steps:
                raise ConfigError(
                    f'resume = "never", but run_dir = "{self.path}" holds a run of {steps} train steps; use another '
                    'run_dir, or resume = "auto" to go on'
                )
            return None
        if newest is None and steps:
            raise ConfigError(
                f'resume = "auto": run_dir = "{self.path}" holds {steps} train steps and no complete checkpoint; use '
                "another run_dir, or remove this one to start anew"
            )
        return newest

    def require_fits(self, manifest: Manifest) -> None:
        """Raises CheckpointError when the configuration changed in what a resume may not change."""
        for key, value in self.fixed.items():
            if key in manifest.fixed and manifest.fixed[key] != value:
                raise CheckpointError(
                    f"{key} was {manifest.fixed[key]!r} when {self.path} was made and is {value!r} now; a resume "
                    "cannot change it: set it back or use another run_dir"
                )

    def write_config(self) -> None:
        """Write the resolved configuration beside the run."""
        (self.path / "config.toml").write_text(self._resolved)

    def link_final(self, checkpoint: Path, group: str) -> None:
        """Point `final` at a group's directory of a checkpoint, atomically."""
        draft = self.path / ".final.partial"
        draft.unlink(missing_ok=True)
        draft.symlink_to(Path(os.path.relpath(checkpoint / group, self.path)))
        draft.replace(self.final)

    def _logged_steps(self) -> int:
        try:
            with open(self.path / "metrics.jsonl", "rb") as file:
                return sum(1 for _ in file)
        except OSError:
            return 0
