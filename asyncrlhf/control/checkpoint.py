"""Checkpoints: one manifest at a train-step boundary, complete or absent.

Everything is written into a hidden directory, flushed to disk, and renamed; a directory without its manifest is never
chosen. What was trained along the restored lineage is the ledger's to say, not a cursor's.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrlhf.errors import CheckpointError, DataLost, EngineLost, GroupError
from asyncrlhf.flow.leases import LedgerState
from asyncrlhf.messages import Experience, Stored
from asyncrlhf.messages.wire import Packed

__all__ = (
    "Checkpoints",
    "Manifest",
    "TornCheckpoint",
    "encode_payloads",
    "flush_tree",
    "load_checkpoint",
    "load_manifest",
)

FORMAT = 1
MANIFEST, PAYLOADS = "manifest.json", "payloads.msgpack"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds. `groups` lists the trained groups, each a sub-directory in Hugging Face format."""

    format: int
    algorithm: str
    train_step: int
    """Train steps applied; equals the policy version."""
    publish_count: int
    optimizer_steps: Mapping[str, int]
    groups: tuple[str, ...]
    events_offset: int
    """Bytes of events.jsonl, in the run directory the checkpoint lies in, that belong to this lineage."""
    metrics_offset: int
    state: Packed | None
    """The algorithm's own state."""
    ledger: LedgerState
    payload_count: int
    fixed: Mapping[str, Any]
    """Configuration values that must be the same on resume, because prompts are counted by them."""
    origin: str = ""
    """The checkpoint of another run directory that this run began with."""
    files: Mapping[str, int] = {}
    """Every other file of the checkpoint, with its size in bytes."""


class TornCheckpoint(CheckpointError):
    """A part is missing, or is not what was written: an older checkpoint may still do."""


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        """`keep`: newest complete checkpoints that stay."""
        self.directory = directory
        self._keep = keep

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = (path.parent for path in self.directory.glob(f"step-*/{MANIFEST}"))
        return sorted((path for path in found if re.fullmatch(r"step-\d+", path.name)), key=step_of)

    def path(self, train_step: int) -> Path:
        return self.directory / f"step-{train_step:06d}"

    def owns(self, path: Path) -> bool:
        """Is `path` one of this run directory's?"""
        return path.resolve().parent == self.directory.resolve()

    async def save(
        self,
        manifest: Manifest,
        payloads: Sequence[bytes],
        groups: Mapping[str, Callable[[Path], Awaitable[None]]],
        *,
        protect: Path | None = None,
    ) -> Path:
        """Write one, atomically, and remove those beyond `keep`, but not `protect`. Raises CheckpointError; the older
        ones then stay.

        `groups`: name -> coroutine that fills the group's sub-directory. `payloads`: as `encode_payloads` gives them.
        """
        target = self.path(manifest.train_step)
        draft = self.directory / f".{target.name}.partial"
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            for name, fill in groups.items():
                (draft / name).mkdir()
                await fill(draft / name)
            (draft / PAYLOADS).write_bytes(msgspec.msgpack.encode([msgspec.Raw(item) for item in payloads]))
            sizes = {str(path.relative_to(draft)): path.stat().st_size for path in _files(draft)}
            text = msgspec.json.encode(msgspec.structs.replace(manifest, files=sizes))
            (draft / MANIFEST).write_bytes(msgspec.json.format(text, indent=1))
            flush_tree(draft)
            shutil.rmtree(target, ignore_errors=True)
            draft.rename(target)
            _flush(self.directory)
            _flush(self.directory.parent)
        except EngineLost:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        except (OSError, GroupError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            found = self.complete()
            raise CheckpointError(
                f"cannot write {target}: {_first_line(error)}; the newest complete checkpoint is "
                f"{found[-1].name if found else 'none'}; make room on the disk, then give the same command again"
            ) from error
        self._prune(protect)
        return target

    def begin(self, train_step: int | None) -> None:
        """A run goes on from `train_step` (None: from nothing): remove what a crash left unfinished, and checkpoints
        that are newer than that, whose lines are cut out of the log files."""
        for path in self.directory.glob(".step-*.partial"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.directory.glob("step-*"):
            if re.fullmatch(r"step-\d+", path.name) and not (path / MANIFEST).exists():
                shutil.rmtree(path, ignore_errors=True)
        for path in self.complete():
            if train_step is None or step_of(path) > train_step:
                _remove(path)

    def _prune(self, protect: Path | None) -> None:
        for path in self.complete()[: -self._keep]:
            if protect is None or path.resolve() != protect.resolve():
                _remove(path)


def step_of(path: Path) -> int:
    """Train steps contained in the checkpoint at this path, by its name."""
    return int(path.name.removeprefix("step-"))


def encode_payloads(experiences: Iterable[Experience]) -> tuple[list[bytes], list[str]]:
    """Ready rollouts as bytes, and why some cannot be (a data row may hold any Python object): those are left out,
    and their prompts answered again after a resume. Waits for stored columns: call it in a thread."""
    encoded: list[bytes] = []
    problems: list[str] = []
    for experience in experiences:
        try:
            encoded.append(msgspec.msgpack.encode(experience, enc_hook=_fetched))
        except (TypeError, OverflowError, RecursionError, DataLost) as error:
            problems.append(f"the rollout of prompt {experience.prompt.uid}: {error}")
    return encoded, problems


def _fetched(value: object) -> Sequence[float]:
    if isinstance(value, Stored):
        return value.values()
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


def load_manifest(path: Path) -> Manifest:
    """Raises TornCheckpoint, and CheckpointError when it cannot be read at all or is of another format."""
    content = _read(path / MANIFEST)
    try:
        found = msgspec.json.decode(content, type=_Format).format
        if found != FORMAT:
            raise CheckpointError(f"{path} has format {found}, and this version reads format {FORMAT}")
        return msgspec.json.decode(content, type=Manifest)
    except msgspec.DecodeError as error:
        raise TornCheckpoint(f"{path / MANIFEST} is torn: {error}") from error


def load_checkpoint(path: Path, experience: type[Experience]) -> tuple[Manifest, list[Experience], list[str]]:
    """The manifest, the ready rollouts, and why some of those do not fit `experience` (the algorithm has changed):
    their prompts are answered again. Raises as `load_manifest` does."""
    manifest = load_manifest(path)
    content = _read(path / PAYLOADS)
    try:
        raw = msgspec.msgpack.decode(content, type=list[msgspec.Raw])
    except msgspec.DecodeError as error:
        raise TornCheckpoint(f"{path / PAYLOADS} is torn: {error}") from error
    if manifest.payload_count != len(raw):
        raise TornCheckpoint(f"{path} has {len(raw)} payloads, and its manifest names {manifest.payload_count}")
    payloads: list[Experience] = []
    problems: list[str] = []
    for item in raw:
        try:
            payloads.append(msgspec.msgpack.decode(item, type=experience))
        except msgspec.ValidationError as error:
            problems.append(f"a saved rollout does not fit {experience.__name__} and is left out: {error}")
        except msgspec.DecodeError as error:
            raise TornCheckpoint(f"{path / PAYLOADS} is torn: {error}") from error
    found = {str(file.relative_to(path)): file.stat().st_size for file in _files(path)}
    for name, size in manifest.files.items():
        if found.get(name) != size:
            raise TornCheckpoint(f"{path / name} has {found.get(name, 'no')} bytes, and its manifest names {size}")
    return manifest, payloads, problems


class _Format(msgspec.Struct):
    format: int


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise TornCheckpoint(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _remove(path: Path) -> None:
    """Manifest first: whenever this is interrupted, the rest is no longer complete."""
    (path / MANIFEST).unlink()
    shutil.rmtree(path, ignore_errors=True)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def flush_tree(directory: Path) -> None:
    """What is below `directory` survives a power cut."""
    for path, _, files in os.walk(directory, topdown=False):
        for name in files:
            _flush(Path(path) / name)
        _flush(Path(path))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
