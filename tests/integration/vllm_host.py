"""vLLM samplers in a process of their own, as runtimes have them, for tests that call their verbs one by one.

vLLM changes torch for all of a process, so that it must not be imported into that of the tests. One process hosts many
samplers, one after another or side by side; what vLLM has built for one that was closed is used by the next one with
the same options, since building it takes seconds.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from asyncrlhf.abc import GenerateEngine
from asyncrlhf.backends.vllm.options import VllmOptions
from asyncrlhf.messages import EngineEvent, GenerateRequest, WeightHandle
from asyncrlhf.weights.shared import SharedMemoryTransfer

__all__ = ("ENGINES_ONLY", "SHARED", "EnginesOnly", "Hosted", "VllmHost")

SHARED = "asyncrlhf.weights.shared:SharedMemoryTransfer"
ENGINES_ONLY = "tests.integration.vllm_host:EnginesOnly"


class EnginesOnly(SharedMemoryTransfer):
    """A transport that, like Ray's, cannot be used in the processes that vLLM starts."""

    def receive(self, payload: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        assert not multiprocessing.current_process().name.startswith("VllmWorker")
        return super().receive(payload)


class VllmHost:
    """The process. It waits for a call, answers it, and ends with this object."""

    def __init__(self) -> None:
        """Waits until vLLM is imported there: seconds, or a minute where many processes share a core."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()
        self._connection.recv()
        self._made: list[Hosted] = []

    def make(self, model: str, **options: Any) -> Hosted:
        """A sampler of this model with 4 slots that can sleep. Raises what its constructor raises."""
        usual = {"device": "cpu", "slots": 4, "max_sequence_tokens": 48, "transport": SHARED, "sleeps": True}
        settings = usual | options
        made = Hosted(self, self.call(-1, "make", VllmOptions(model=model, **settings)))
        self._made.append(made)
        return made

    def start_without_room(self, options: VllmOptions) -> None:
        """Build vLLM where no memory is left once it has loaded its weights. Raises what that raises."""
        self.call(-1, "start_without_room", options)

    def start_without_packing(self, options: VllmOptions) -> None:
        """Build vLLM where the weights of experts are loaded a second time, and stay as they came. Raises what that
        raises."""
        self.call(-1, "start_without_packing", options)

    def call(self, number: int, verb: str, *arguments: Any) -> Any:
        self._connection.send((number, verb, arguments))
        error, result = self._connection.recv()
        if error is not None:
            raise error
        return result

    def memory(self, what: str) -> int:
        """Bytes that its line of /proc/PID/status says: "RssAnon", "VmHWM"."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{what}:"))

    def forget_peak(self) -> None:
        """ "VmHWM" begins anew."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def clear(self) -> None:
        """Close all samplers."""
        for engine in self._made:
            engine.close()
        self._made.clear()

    def close(self) -> None:
        self._connection.close()
        self._process.join(10.0)
        self._process.kill()
        self._process.join()


class Hosted(GenerateEngine):
    """One sampler of a host."""

    def __init__(self, host: VllmHost, number: int) -> None:
        self._host, self._number = host, number

    def _call(self, verb: str, *arguments: Any) -> Any:
        return self._host.call(self._number, verb, *arguments)

    @property
    def version(self) -> int:  # type: ignore[override]
        return self._call("version")

    @property
    def has_work(self) -> bool:
        return self._call("has_work")

    def add(self, requests: Sequence[GenerateRequest]) -> Sequence[EngineEvent]:
        return self._call("add", requests)

    def step(self) -> Sequence[EngineEvent]:
        return self._call("step")

    def abort(self, request_ids: Sequence[str]) -> Sequence[GenerateRequest]:
        return self._call("abort", request_ids)

    def prepare(self, weights: WeightHandle) -> None:
        self._call("prepare", weights)

    def commit(self, version: int, kv: str) -> Sequence[EngineEvent]:
        return self._call("commit", version, kv)

    def probe(self, token_ids: Sequence[int]) -> Sequence[float]:
        return self._call("probe", token_ids)

    @property
    def bytes_read(self) -> tuple[int, ...]:
        return self._call("bytes_read")

    @property
    def bytes_own(self) -> tuple[int, ...]:
        return self._call("bytes_own")

    @property
    def asleep(self) -> bool:  # type: ignore[override]
        return self._call("asleep")

    def sleep(self) -> Sequence[EngineEvent]:
        return self._call("sleep")

    def wake(self, weights: WeightHandle) -> None:
        self._call("wake", weights)

    def close(self) -> None:
        self._call("close")


def _serve(connection: Connection) -> None:
    from asyncrlhf.backends.vllm import engine, worker
    from asyncrlhf.backends.vllm.experts import Experts

    built: dict[VllmOptions, list[Any]] = {}
    make_core: Any = engine.Core

    def core(options: VllmOptions) -> Any:
        free = built.setdefault(options, [])
        return free.pop() if free else make_core(options)

    def close(sampler: Any) -> None:
        used = sampler._core
        used.abort(sampler._running)
        used.forget_cache()
        built[sampler.options].append(used)

    engine.Core = core  # type: ignore[misc, assignment]
    engine.VllmSampler.use_threads(1)
    samplers: list[Any] = []
    connection.send("ready")
    while True:
        try:
            number, verb, arguments = connection.recv()
        except EOFError:
            os._exit(0)  # Triton would complain about what an interpreter leaves to the system
        try:
            if verb == "make":
                samplers.append(engine.VllmSampler(*arguments))
                result: Any = len(samplers) - 1
            elif verb == "start_without_room":
                with patch.object(worker, "Arrivals", side_effect=torch.OutOfMemoryError("1 GiB is free")):
                    result = make_core(*arguments)
            elif verb == "start_without_packing":
                with patch.object(Experts, "pack"):
                    result = make_core(*arguments)
            elif verb == "close":
                result = close(samplers[number])
            else:
                found = getattr(samplers[number], verb)
                result = found(*arguments) if callable(found) else found
        except Exception as error:  # the boundary of the process
            connection.send((error, None))
        else:
            connection.send((None, result))
