"""Two ways to write: lines that can be cut back to an offset, and whole files that appear at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path

from asyncrlhf.errors import CheckpointError

__all__ = ("LineFile", "write_atomically")


class LineFile:
    """An append-only file of lines, buffered here so that a failing disk never leaves half a line.

    Without `truncate` the first line written replaces what an earlier run left. With `path` None lines are counted as
    written and go nowhere. A failing disk raises the OSError as it is; the lines stay in the buffer.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._buffer = bytearray()
        self._written = 0

    def append(self, line: bytes) -> None:
        """Buffer one line, without its newline."""
        if self._path is not None:
            self._buffer += line
            self._buffer += b"\n"

    def flush(self) -> None:
        """Hand the buffered lines to the operating system, all of them or (with an OSError) none."""
        if not self._buffer:
            return
        file = self._file or self._open(self._written)
        pending = memoryview(bytes(self._buffer))
        try:
            while pending:
                pending = pending[file.write(pending) or 0 :]
        except OSError:
            with suppress(OSError):
                file.truncate(self._written)
                file.seek(self._written)
            raise
        self._written += len(self._buffer)
        self._buffer.clear()

    def offset(self) -> int:
        """Bytes of the file that will survive a crash of the machine: everything appended so far."""
        self.flush()
        if self._file is not None:
            os.fsync(self._file.fileno())
        return self._written

    def check(self, offset: int) -> None:
        """Raises CheckpointError when the file is shorter than `offset` bytes, or that is not the end of a line."""
        if self._path is None:
            return
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < offset:
            raise CheckpointError(
                f"{self._path} holds {size} bytes, the checkpoint was taken at {offset}; put the file of that run "
                "back, or resume into another run_dir"
            )
        if offset:
            with self._path.open("rb") as file:
                file.seek(offset - 1)
                if file.read(1) != b"\n":
                    raise CheckpointError(
                        f"byte {offset} of {self._path} is not the end of a line, so it is not the file that the "
                        "checkpoint was taken with; put that file back, or resume into another run_dir"
                    )

    def truncate(self, offset: int) -> None:
        """Keep the first `offset` bytes and go on there. Raises CheckpointError as `check` does."""
        self.check(offset)
        self._buffer.clear()
        if self._path is not None:
            self._open(offset).truncate(offset)

    def begin(self) -> None:
        """Replace now, before there is a line, what an earlier run left; nothing once lines were kept or written."""
        if self._path is not None and self._file is None:
            self._open(self._written)

    def is_empty(self) -> bool:
        """Is there nothing on disk that a first line would replace?"""
        return self._path is None or not self._path.exists() or self._path.stat().st_size == 0

    def discard(self) -> None:
        """Forget the lines that no flush has written."""
        self._buffer.clear()

    def lines(self) -> Iterator[bytes]:
        """The lines on disk, in order, without their newlines; one is held in memory at a time."""
        if self._path is None or not self._path.exists():
            return
        with self._path.open("rb") as file:
            for line in file:
                yield line.rstrip(b"\n")

    def close(self) -> None:
        """Flush and close; harmless when repeated."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, offset: int) -> FileIO:
        """The file, positioned at `offset`; it is created or, for offset 0, emptied."""
        assert self._path is not None
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
            self._file = FileIO(self._path, "r+")
        if offset == 0:
            self._file.truncate(0)
        self._file.seek(offset)
        self._written = offset
        return self._file


def write_atomically(path: Path, data: bytes) -> None:
    """Readers of `path` see the old file or all of the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise
