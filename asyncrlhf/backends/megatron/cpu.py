"""megatron-core on machines without CUDA: what it asks of torch.cuda is answered with the CPU.

`install` changes torch.cuda and some functions of megatron-core for the whole process, so only an engine that was told
`device = "cpu"` calls it, never an import. Redirected devices are per thread: whoever calls megatron-core does so
inside `calling()`.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from asyncrlhf.errors import ConfigError

__all__ = ("calling", "import_quietly", "install", "require_device")

CPU = torch.device("cpu")
CUDA_NAMES = {
    f"torch.{kind}Tensor": f"torch.cuda.{kind}Tensor" for kind in ("Float", "BFloat16", "Half", "Double", "Int", "Long")
}
"""Type names that megatron-core's optimizers compare with."""
_installed: list[str] = []


def import_quietly(name: str) -> Any:
    """A module of megatron-core. Raises ConfigError if that is not installed."""
    with _quiet():
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ConfigError(f'backend = "megatron": {error}; pip install "asyncrlhf[megatron]"') from error


@contextmanager
def calling() -> Generator[None]:
    """What megatron-core is called in: devices called "cuda" are the CPU, in this thread, if `install` was called; and
    nothing is heard of packages and functions that it misses or should not use any more."""
    with _quiet(), _CudaIsCpu() if _installed else nullcontext():
        yield


@contextmanager
def _quiet() -> Generator[None]:
    logger = logging.getLogger("megatron")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)


def require_device(device: str) -> None:
    """Raises ConfigError for "cpu" on a machine with CUDA, and for anything else on one without."""
    if not _installed and torch.cuda.is_available() == (device == "cpu"):
        what, fix = ("a machine without CUDA", "cuda") if device == "cpu" else ("CUDA, which is not here", "cpu")
        raise ConfigError(f'device = "{device}" takes {what}, with backend = "megatron"; set device = "{fix}"')


def install() -> None:
    """Make megatron-core compute on the CPU, for the rest of the process; only on machines without CUDA."""
    if _installed:
        return
    _installed.append("torch.cuda")
    _replace_cuda()
    _replace_random()
    _replace_dispatch()


class _CudaIsCpu(TorchFunctionMode):
    """Redirects every torch function that names a CUDA device."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in (Tensor.cuda, Tensor.pin_memory, Tensor.record_stream):
            return args[0]
        if func is Tensor.type and len(args) == 1 and not options:
            name: str = func(*args)
            return CUDA_NAMES.get(name, name)
        if func is Tensor.to:
            args = tuple(_device(value) if isinstance(value, str | torch.device) else value for value in args)
        if "device" in options:
            options["device"] = _device(options["device"])
        if options.get("pin_memory"):
            options["pin_memory"] = False
        return func(*args, **options)


def _device(wanted: Any) -> Any:
    if isinstance(wanted, int) or (isinstance(wanted, str | torch.device) and str(wanted).startswith("cuda")):
        return CPU
    return wanted


class _Stream:
    """A CUDA stream or event where everything has happened already."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = object.__hash__


def _nothing() -> Callable[..., None]:
    """A function of its own that does nothing: torch.compile refuses to meet one function under two names."""
    return lambda *arguments, **options: None


def _replace(owner: Any, replacements: Mapping[str, Any]) -> None:
    for name, replacement in replacements.items():
        setattr(owner, name, replacement)


def _replace_cuda() -> None:
    stream = _Stream()
    _replace(
        torch.cuda,
        {
            "current_device": lambda: CPU,
            "device_count": lambda: 1,
            "set_device": _nothing(),
            "synchronize": _nothing(),
            "empty_cache": _nothing(),
            "Stream": _Stream,
            "Event": _Stream,
            "current_stream": lambda *a, **k: stream,
            "default_stream": lambda *a, **k: stream,
            "stream": lambda _: nullcontext(),
            "get_rng_state": lambda *a, **k: torch.get_rng_state(),
            "set_rng_state": lambda state, *a, **k: torch.set_rng_state(state),
            "manual_seed": torch.default_generator.manual_seed,
        },
    )
    _replace(torch.cuda.nvtx, {"range_push": _nothing(), "range_pop": _nothing()})
    importlib.import_module("torch._dynamo").config.disable = True  # its fused kernels would be compiled with gcc


def _replace_random() -> None:
    random = import_quietly("megatron.core.tensor_parallel.random")
    _replace(
        random,
        {
            "_get_cuda_rng_state": lambda *a, **k: torch.get_rng_state(),
            "_set_cuda_rng_state": lambda state, *a, **k: torch.set_rng_state(state),
        },
    )
    random.CudaRNGStatesTracker.fork = _forked


@contextmanager
def _forked(tracker: Any, name: str = "model-parallel-rng") -> Generator[None]:
    """CudaRNGStatesTracker.fork on the CPU's generator, for a name that may not have been seeded."""
    if name not in tracker.states_:
        yield
        return
    outside = torch.get_rng_state()
    torch.set_rng_state(tracker.states_[name])
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outside)


def _replace_dispatch() -> None:
    """A place of the expert layers that takes CUDA for granted (0.16.1)."""
    dispatcher = import_quietly("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _as_numbers


def _as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor
