"""RunDirectory: whether a run starts, goes on, or is already complete, and who may write into its directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tomllib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from asyncrlhf.config.schema import Config
from asyncrlhf.control.checkpoint import (
    Checkpoints,
    Manifest,
    TornCheckpoint,
    load_checkpoint,
    load_manifest,
    step_of,
)
from asyncrlhf.errors import ConfigError
from asyncrlhf.messages import Experience
from asyncrlhf.observe.files import write_atomically

__all__ = ("ITS_OWN_END", "LOGS", "Resume", "RunDirectory")

LOGS = "logs"
"""Directory of what the engines' processes print."""
ITS_OWN_END = "train() returned"
"""The reason of a run that its algorithm has ended."""

NOT_THE_RUN = ("directory", "observe", "resume", "run_dir")
"""Keys that do not change what a run computes."""


class Resume(NamedTuple):
    """What a run goes on from."""

    path: Path
    manifest: Manifest
    payloads: list[Experience]
    own: bool
    """A checkpoint of this run directory, whose log files go on; else a new run begins with it."""
    warnings: tuple[str, ...]


class RunDirectory:
    """The directory of one run. `resolved` is the configuration's TOML text, `fixed` what a resume may not change.

    Besides the files of the run it holds `.lock`, `initial/<group>` (a model written from scratch), `logs` (what the
    engines' processes print) and `final` (a link to the trained model of the checkpoint that the run ended with).
    """

    def __init__(self, config: Config, resolved: str, fixed: dict[str, Any], prompt_count: int | None) -> None:
        """`prompt_count`: prompts of the data over all epochs, None if that is not known."""
        self.path = Path(config.run_dir)
        self.checkpoints = Checkpoints(self.path / "checkpoints", keep=config.checkpoint.keep)
        self.fixed = msgspec.to_builtins(fixed)
        self._config, self._resolved, self._prompt_count = config, resolved, prompt_count
        self._begun = False

    @property
    def final(self) -> Path:
        """The trained model: a link to a Hugging Face directory."""
        return self.path / "final"

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Hold the directory; if the run does not get as far as `begin`, leave nothing that was not there.

        Raises ConfigError if another process holds it, or if it cannot be written.
        """
        there = {self.path / name: (self.path / name).exists() for name in (".lock", "initial", LOGS)}
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            _remove_empty(made)
            raise ConfigError(f'run_dir = "{self.path}" cannot be written: {error.strerror}; use another one') from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f'run_dir = "{self.path}" is in use by another process; wait for it or use another run_dir'
                ) from None
            try:
                yield
            finally:
                if not self._begun:
                    for name in ("initial", LOGS):
                        if not there[self.path / name]:
                            shutil.rmtree(self.path / name, ignore_errors=True)
                    if not there[self.path / ".lock"]:
                        (self.path / ".lock").unlink(missing_ok=True)
                    _remove_empty(made)
        finally:
            os.close(descriptor)

    # ---- is there anything to do -----------------------------------------------------------------------------------
    def completed(self) -> str | None:
        """Why nothing is left to do, in one line; None if something is.

        Raises ConfigError when the configuration has changed in what the run that lies here cannot change.
        """
        summary, complete, resume = self._summary(), self.checkpoints.complete(), self._config.resume
        if summary.get("status") != "completed" or not complete or not self.final.exists():
            return None
        if resume == "never" or self.checkpoints.owns(Path(resume)):
            return None
        try:
            manifest = load_manifest(complete[-1])
        except TornCheckpoint:
            return None
        if resume != "auto" and manifest.origin != str(Path(resume).resolve()):
            return None
        self._require_fits(complete[-1], manifest)
        steps, wanted, reason = manifest.train_step, self._config.train_steps, str(summary.get("reason"))
        if reason == ITS_OWN_END:
            if next(self._differences(), None) is not None:
                return None
        elif (wanted is None or wanted > steps) and not (reason != "train_steps" and self._data_is_used_up(manifest)):
            return None
        way = {"train_steps": "raise train_steps", ITS_OWN_END: "change what its train() ends at in [settings]"}
        return (
            f"{self.path} holds a completed run of {steps} train steps; its policy is {self.final}. To train on, "
            f"{way.get(reason, 'raise data.epochs')}; to start anew, set another run_dir"
        )

    def require_usable(self) -> None:
        """Raises ConfigError when another run cannot build on this one: a complete one was made with another
        configuration, or an incomplete one cannot go on."""
        if self.completed() is None:
            self.resume_path()
            return
        different = next(self._differences(), None)
        if different is not None:
            key, before, now = different
            raise ConfigError(
                f'run_dir = "{self.path}" was made with another configuration: {key} was {before!r} and is {now!r} '
                "now; remove it to run this stage again, or use another run_dir"
            )

    # ---- where it goes on --------------------------------------------------------------------------------------------
    def resume_path(self) -> Path | None:
        """The checkpoint that the configuration asks for; None for a fresh start. Looks only at names.

        Raises ConfigError when resume = "never" would overwrite a run, when a run has train steps behind it and no
        complete checkpoint to go on from, and when a checkpoint of another run would replace the run that lies here.
        """
        resume, complete = self._config.resume, self.checkpoints.complete()
        newest, steps = (complete[-1] if complete else None), self._logged_steps()
        if resume == "never":
            if newest is not None or steps:
                raise ConfigError(
                    f'resume = "never", but run_dir = "{self.path}" holds a run of {steps} train steps; use another '
                    'run_dir, or resume = "auto" to go on'
                )
            return None
        if resume == "auto":
            if newest is None and steps:
                raise ConfigError(
                    f'resume = "auto": run_dir = "{self.path}" holds {steps} train steps and no complete checkpoint; '
                    "use another run_dir, or remove this one to start anew"
                )
            return newest
        path = Path(resume)
        if not (path / "manifest.json").exists():
            raise ConfigError(f'resume = "{resume}" is not a complete checkpoint: it has no manifest.json')
        if self.checkpoints.owns(path) or not (newest or steps):
            return path
        if newest is None or load_manifest(newest).origin != str(path.resolve()):
            raise ConfigError(
                f'resume = "{resume}" is a checkpoint of another run, and run_dir = "{self.path}" holds a run of its '
                f'own, of {steps} train steps; use another run_dir, or resume = "auto" to go on with the one here'
            )
        return newest

    def resume(self, experience: type[Experience]) -> Resume | None:
        """Read the checkpoint to go on from; of this directory's own the newest that is not torn.

        Raises ConfigError as `resume_path` does and when the configuration has changed in what a resume cannot
        change, CheckpointError when no checkpoint can be read.
        """
        path = self.resume_path()
        return None if path is None else self._read(path, experience, alone=path == Path(self._config.resume))

    def newest(self, experience: type[Experience]) -> Resume:
        """Read this directory's newest checkpoint that is not torn, whatever `resume` says: the run itself goes on from
        there. Raises as `resume` does."""
        return self._read(self.checkpoints.complete()[-1], experience, alone=False)

    def _read(self, path: Path, experience: type[Experience], *, alone: bool) -> Resume:
        """A checkpoint, or if it is torn and not to be taken `alone`, the newest older one of this directory."""
        own = self.checkpoints.owns(path)
        older = [p for p in reversed(self.checkpoints.complete()) if not alone and step_of(p) < step_of(path)]
        torn: list[str] = []
        for candidate in (path, *older):
            try:
                manifest, payloads, misfits = load_checkpoint(candidate, experience)
            except TornCheckpoint as problem:
                torn.append(str(problem))
                continue
            self._require_fits(candidate, manifest)
            warnings = [f"{problem}; going on from {candidate.name} instead" for problem in torn]
            return Resume(candidate, manifest, payloads, own, (*warnings, *misfits[:3]))
        raise ConfigError(
            f'resume = "{self._config.resume}": no checkpoint can be read: {"; ".join(torn)}; put the file back, or '
            "use another run_dir"
        )

    def begin(self, resumed: Resume | None) -> None:
        """From here on the directory is this run's: write its configuration, remove what it does not go on from."""
        self._begun = True
        self.checkpoints.begin(resumed.manifest.train_step if resumed is not None and resumed.own else None)
        if not self.final.exists():
            self.final.unlink(missing_ok=True)
        write_atomically(self.path / "config.toml", self._resolved.encode())

    def link_final(self, checkpoint: Path, group: str) -> None:
        """Point `final` at a group's directory of a checkpoint, atomically; one of the very start has none."""
        if not (checkpoint / group).is_dir():
            return
        draft = self.path / ".final.partial"
        draft.unlink(missing_ok=True)
        draft.symlink_to(Path(os.path.relpath(checkpoint / group, self.path)))
        draft.replace(self.final)

    @property
    def linked(self) -> Path | None:
        """The checkpoint that `final` leads to, which has to stay."""
        return self.final.resolve().parent if self.final.exists() else None

    @property
    def way_on(self) -> str:
        """The command that goes on with this run, in words."""
        back = self.checkpoints.owns(Path(self._config.resume))
        return 'the same command with resume = "auto"' if back else "the same command"

    # ---- what lies here ----------------------------------------------------------------------------------------------
    def _require_fits(self, checkpoint: Path, manifest: Manifest) -> None:
        for key, value in self.fixed.items():
            if key in manifest.fixed and _set(manifest.fixed[key]) != _set(value):
                raise ConfigError(
                    f"{key} was {manifest.fixed[key]!r} when {checkpoint} was made and is {value!r} now; a resume "
                    "cannot change it: set it back or use another run_dir"
                )

    def _data_is_used_up(self, manifest: Manifest) -> bool:
        """Is the data no longer than when it ended the run? Where its length is not known, equal configurations say."""
        if self._prompt_count is None or manifest.ledger.data_count is None:
            return next(self._differences(), None) is None
        return self._prompt_count <= manifest.ledger.data_count

    def _differences(self) -> Iterator[tuple[str, Any, Any]]:
        """(dotted key, value then, value now) where the configuration that lies here is another. Raises ConfigError."""
        path = self.path / "config.toml"
        try:
            before = _flat(tomllib.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        now = _flat(tomllib.loads(self._resolved))
        for key in sorted(before.keys() | now.keys()):
            if key.split(".")[0] not in NOT_THE_RUN and before.get(key) != now.get(key):
                yield key, before.get(key), now.get(key)

    def _summary(self) -> dict[str, Any]:
        try:
            found: object = json.loads((self.path / "summary.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return cast(dict[str, Any], found) if isinstance(found, dict) else {}

    def _logged_steps(self) -> int:
        try:
            with open(self.path / "metrics.jsonl", "rb") as file:
                return sum(1 for _ in file)
        except OSError:
            return 0


def _flat(table: dict[str, Any], where: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        inner = cast(dict[str, Any], value) if isinstance(value, dict) else None
        flat |= {f"{where}{key}": value} if inner is None else _flat(inner, f"{where}{key}.")
    return flat


def _set(value: Any) -> Any:
    """A table without the keys that are left out: one written before a key existed is the same."""
    if not isinstance(value, dict):
        return value
    return {key: _set(inner) for key, inner in cast(dict[str, Any], value).items() if inner is not None}


def _remove_empty(directories: list[Path]) -> None:
    """Innermost first."""
    for directory in directories:
        with contextlib.suppress(OSError):
            directory.rmdir()
