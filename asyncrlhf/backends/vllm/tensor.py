"""The processes of a tensor parallel engine, which vLLM starts by itself: they too have to be prepared before vLLM is
imported there. Importing this module does that; a process imports it to find what it shall run."""

from __future__ import annotations

from typing import Any

from asyncrlhf.backends.vllm import environment as environment

__all__ = ("prepare_workers", "worker_main")


def worker_main(*arguments: Any, **options: Any) -> None:
    """A worker's life."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    WorkerProc.worker_main(*arguments, **options)


def prepare_workers() -> None:
    """Have workers that are started from now on run `worker_main`."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    WorkerProc.worker_main = staticmethod(worker_main)  # type: ignore[method-assign]
