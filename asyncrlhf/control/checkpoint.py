"""Checkpoints: one manifest at a train-step boundary, complete or absent.

Everything is written into a hidden directory, flushed to disk, and renamed; a directory without its manifest is never
chosen. What was trained along the restored lineage is the ledger's to say, not a cursor's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrlhf.errors import CheckpointError
from asyncrlhf.flow.leases import LedgerState
from asyncrlhf.messages import Experience
from asyncrlhf.messages.wire import Packed

__all__ = ("Checkpoints", "Manifest")

FORMAT = 1


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
    """Bytes of events.jsonl that belong to this lineage."""
    metrics_offset: int
    state: Packed | None
    """The algorithm's own state."""
    ledger: LedgerState
    payload_count: int
    fixed: Mapping[str, Any]
    """Configuration values that must be the same on resume, because prompts are counted by them."""


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        """`keep`: newest complete checkpoints that stay (0: all of them)."""
        self.directory = directory
        self._keep = keep

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path.parent for path in self.directory.glob("step-*/manifest.json"))

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        found = self.complete()
        return found[-1] if found else None

    def path(self, train_step: int) -> Path:
        return self.directory / f"step-{train_step:06d}"

    async def save(
        self,
        manifest: Manifest,
        payloads: list[Experience],
        groups: Mapping[str, Callable[[Path], Awaitable[None]]],
    ) -> Path:
        """Write one, atomically, and remove those beyond `keep`. Raises CheckpointError; the older ones stay.

        `groups`: name -> coroutine that fills the group's sub-directory.
        """
        target = self.path(manifest.train_step)
        if (target / "manifest.json").exists():
            return target
        draft = self.directory / f".{target.name}.partial"
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            for name, fill in groups.items():
                (draft / name).mkdir()
                await fill(draft / name)
            (draft / "payloads.msgpack").write_bytes(msgspec.msgpack.encode(payloads))
            (draft / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
            _flush_tree(draft)
            shutil.rmtree(target, ignore_errors=True)
            draft.rename(target)
            _flush(self.directory)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            newest = self.latest()
            raise CheckpointError(
                f"cannot write {target}: {error}; the newest complete checkpoint is "
                f"{newest.name if newest else 'none'}; free disk space or set another run_dir, then start again"
            ) from error
        self._prune()
        return target

    def load(self, path: Path, experience: type[Experience]) -> tuple[Manifest, list[Experience]]:
        """Read one back. Raises CheckpointError when it is missing, torn, or of another format."""
        try:
            manifest = msgspec.json.decode((path / "manifest.json").read_bytes(), type=Manifest)
            raw = msgspec.msgpack.decode((path / "payloads.msgpack").read_bytes(), type=list[msgspec.Raw])
            payloads = [msgspec.msgpack.decode(item, type=experience) for item in raw]
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is not a complete checkpoint: {error.filename} is missing") from error
        except msgspec.DecodeError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if manifest.format != FORMAT or manifest.payload_count != len(payloads):
            raise CheckpointError(
                f"{path} has format {manifest.format} and {len(payloads)} payloads; this version reads format {FORMAT} "
                f"and the manifest names {manifest.payload_count}"
            )
        return manifest, payloads

    def _prune(self) -> None:
        if self._keep:
            for path in self.complete()[: -self._keep]:
                (path / "manifest.json").unlink()
                shutil.rmtree(path, ignore_errors=True)


def _flush_tree(directory: Path) -> None:
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
