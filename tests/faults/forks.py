"""Real processes that start in a moment: a server imports torch once, and every run is a fork of it.

`python -m tests.faults.forks` reads one JSON object a line, forks, and writes the exit code of each child beside its
log. A test kills, signals and awaits its child like any other process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

__all__ = ("Child", "Forks")

ROOT = Path(__file__).parents[2]
POLL_SECONDS = 0.005
PATIENCE = 120.0
"""Seconds that a child has, on a machine that others use, too."""
CHILD = "ASYNCRLHF_TEST_CHILD"
"""Set in a child and in all that it starts, to the path of its log."""


class Child:
    """One `python -m asyncrlhf ...`, its output and its exit code."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self.log = pid, log

    @property
    def text(self) -> str:
        """What it has written to standard output and standard error."""
        return self.log.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        """Exit code; minus the signal that killed it; None while it runs."""
        path = self.log.with_suffix(".code")
        return int(path.read_text()) if path.exists() else None

    @property
    def descendants(self) -> set[int]:
        """Processes that it has started, or that these have, wherever they belong to now."""
        mark, found = f"{CHILD}={self.log}".encode(), set[int]()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                if mark in path.read_bytes().split(b"\0"):
                    found.add(int(path.parent.name))
        return found

    @property
    def left(self) -> list[str]:
        """Threads that ran on, and files that were still open, two seconds after the end of the run."""
        return json.loads(self.log.with_suffix(".left").read_text())

    def signal(self, number: signal.Signals) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, seconds: float = PATIENCE) -> int:
        """The exit code. A child that outlives the deadline is killed, and the test fails with what it said."""
        deadline = time.monotonic() + seconds
        while (code := self.code) is None:
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                raise AssertionError(f"still running after {seconds} s:\n{self.text}")
            time.sleep(POLL_SECONDS)
        return code

    def until(self, happened: Callable[[], object], seconds: float = PATIENCE) -> bool:
        """Wait for something that the child does. False if it has ended before."""
        deadline = time.monotonic() + seconds
        while not happened():
            if self.code is not None:
                return bool(happened())
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                raise AssertionError(f"it did not happen within {seconds} s:\n{self.text}")
            time.sleep(POLL_SECONDS)
        return True


class Forks:
    """The server, as a test sees it."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.forks"],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._logs = tempfile.TemporaryDirectory()
        self._number = 0

    def start(
        self, directory: Path, *arguments: str, file_bytes: int | None = None, halt_at: str = "", break_at: str = ""
    ) -> Child:
        """`python -m asyncrlhf *arguments` in `directory`. `file_bytes`: no file may grow beyond. `halt_at`,
        `break_at`: see `tests.faults.halting`."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._number += 1
        log = Path(self._logs.name) / f"{self._number}.log"
        order = {
            "arguments": arguments,
            "directory": str(directory),
            "log": str(log),
            "file_bytes": file_bytes,
            "halt_at": halt_at,
            "break_at": break_at,
        }
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return Child(int(self._server.stdout.readline()), log)

    def close(self) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(30)
        self._server.stdout.close()
        self._logs.cleanup()


def _serve() -> None:
    """Until the end of standard input; then children that still run are killed."""
    children: dict[int, Path] = {}
    buffered = b""
    while True:
        readable, _, _ = select.select([0], [], [], POLL_SECONDS)
        if readable:
            chunk = os.read(0, 65536)
            if not chunk:
                break
            buffered += chunk
        while b"\n" in buffered:
            line, _, buffered = buffered.partition(b"\n")
            order = json.loads(line)
            log = Path(order["log"])
            log.touch()
            pid = os.fork()
            if not pid:
                _run(order)
            children[pid] = log
            os.write(1, b"%d\n" % pid)
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                log = children.pop(pid)
                draft = log.with_suffix(".draft")
                draft.write_text(str(os.waitstatus_to_exitcode(status)))
                draft.replace(log.with_suffix(".code"))
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _run(order: dict[str, Any]) -> NoReturn:
    """The child. At the end it waits for threads as an interpreter does, and leaves the rest to the system."""
    from asyncrlhf.__main__ import main
    from tests.faults.halting import break_once, halt

    os.setsid()
    log = os.environ[CHILD] = order["log"]
    for target, path, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY), (2, log, os.O_WRONLY)):
        descriptor = os.open(path, flags | os.O_APPEND)
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(order["directory"])
    if limit := order["file_bytes"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    code = 70
    try:
        if order["halt_at"]:
            halt(order["halt_at"])
        if order["break_at"]:
            break_once(order["break_at"])
        code = main(order["arguments"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    deadline = time.monotonic() + 2
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()) if thread.daemon else None)
    left = [thread.name for thread in others if thread.is_alive()]
    opened = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)]
    left += [path for path in opened if path.startswith(order["directory"])]
    Path(log).with_suffix(".left").write_text(json.dumps(left))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def _preload() -> None:
    from asyncrlhf.backends.torch.guard import guard_companions

    guard_companions()
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen2.tokenization_qwen2  # noqa: F401

    import asyncrlhf.backends.torch.sample
    import asyncrlhf.backends.torch.score
    import asyncrlhf.backends.torch.scratch
    import asyncrlhf.backends.torch.train
    import asyncrlhf.launch  # noqa: F401


if __name__ == "__main__":
    _preload()
    gc.freeze()
    _serve()
