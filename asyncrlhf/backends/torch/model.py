"""A Hugging Face causal language model as the engines use it: loaded, checked, and asked about response tokens only."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from asyncrlhf.backends.torch.attention import ATTENTION
from asyncrlhf.backends.torch.away import Away
from asyncrlhf.backends.torch.guard import guard_companions
from asyncrlhf.backends.torch.layout import Cut
from asyncrlhf.backends.torch.options import Attention, Dtype, ScorerOptions
from asyncrlhf.backends.torch.world import World, gathered, replicate, shard
from asyncrlhf.errors import ConfigError, GroupError
from asyncrlhf.ops import TokenStats

guard_companions()
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification  # noqa: E402
from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
)
from transformers.utils import logging as transformers_logging  # noqa: E402
from transformers.utils.import_utils import is_flash_attn_2_available  # noqa: E402

__all__ = ("Model", "pick_device", "read_config", "require_full_attention")

FLASH = "flash_attention_2"
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Model:
    """A causal language model, or a critic (the same trunk under a scalar head), whose head sees chosen positions only.

    `trained`: float32 master weights, gradients on, bfloat16 as autocast; otherwise the weights themselves are of
    `dtype` and frozen. The module is in evaluation mode either way, hence without dropout: log-probs of trainer and
    sampler must agree.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        dtype: Dtype = "float32",
        device: str = "auto",
        head: Literal["lm", "value"] = "lm",
        new_head: bool = False,
        packed: bool = False,
        attention: Attention = "auto",
        trained: bool = False,
        headless: bool = False,
        alone: bool = True,
    ) -> None:
        """`new_head`: start the value head at 0 even if the directory has one. `alone` False: the weights stay on the
        CPU until `spread`. Raises ConfigError: no such directory or device, an architecture without plain full
        attention, missing weights (those of a value head that is to be trained, or may be missing since weights
        are yet to come (`headless`), start at 0)."""
        self.directory = Path(directory)
        if not (self.directory / "config.json").is_file():
            raise ConfigError(f"model = {str(directory)!r} has no config.json; give a Hugging Face model directory")
        self.device = pick_device(device)
        self.head = head
        able = packed and self.device.type == "cuda" and dtype == "bfloat16" and is_flash_attn_2_available()
        self.uses_flash = able and attention != "sdpa"
        """Whether packed rows go through variable-length flash attention (arXiv 2307.08691) instead of a mask."""
        if attention == FLASH and not self.uses_flash:
            raise ConfigError(
                f'attention = "{FLASH}" needs packed rows, bfloat16, a GPU and the package flash-attn, not packed = '
                f"{packed}, {dtype}, {self.device.type} and flash-attn = {is_flash_attn_2_available()}"
            )
        self.compute_dtype = DTYPES[dtype]
        """What matrix products are computed in."""
        self._autocasts = trained and self.compute_dtype != torch.float32
        self.module = _load(
            self.directory,
            DTYPES["float32" if trained else dtype],
            head,
            FLASH if self.uses_flash else ATTENTION,
            headless=trained or headless,
        )
        if new_head:
            _zero(self.module.score, [name for name, _ in self.module.score.named_parameters()])
        self.world = World()
        self._sharded = False
        self._runner: nn.Module = self.module
        self.module.to(self.device if alone else "cpu").requires_grad_(trained).eval()
        self.vocabulary_size = int(self.module.config.get_text_config().vocab_size)
        self._away: Away | None = None
        self._selected: Tensor | None = None
        output = self.module.get_output_embeddings() if head == "lm" else self.module.score
        output.register_forward_pre_hook(self._select)

    def checkpoint_gradients(self) -> None:
        """Keep only what goes into each layer, and compute the layer again in the backward pass."""
        self.module.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in self._layers():
            _disable_dropout(layer)
            layer.training = True  # only such layers are checkpointed; what is inside stays in evaluation mode

    def spread(self, world: World, device: torch.device, *, sharded: bool) -> None:
        """Be one of several ranks that train one model: whole on each, or a part of every parameter on each."""
        self.world, self.device, self._sharded = world, device, sharded
        if sharded:
            shard(self.module, self._layers(), self.device, world.size)
        self.module.to(self.device)
        if not sharded:
            self._runner = replicate(self.module)

    def offload(self) -> None:
        """Move parameters and buffers to the host, where they are on a device; no forward until `onload`."""
        if self._away is None:
            tensors = (*self.module.parameters(), *self.module.buffers())
            self._away = Away(tensor.detach() for tensor in tensors if tensor.device.type != "cpu")

    def onload(self) -> None:
        if self._away is not None:
            self._away.back()
            self._away = None

    def rounds(self, count: int) -> int:
        """How many forwards to make where `count` are asked for: ranks that keep parts of each other's layers make
        them together, and those that share gradients make at least one."""
        if self._sharded:
            return max(self.world.everyones(count))
        return max(count, 1) if self.world.size > 1 and torch.is_grad_enabled() else count

    def last_of_step(self, last: bool) -> AbstractContextManager[Any]:
        """Round one forward and backward pass of a step: replicas share their gradients in the last one."""
        if last or not isinstance(self._runner, DistributedDataParallel):
            return nullcontext()
        return self._runner.no_sync()

    def whole(self) -> dict[str, Tensor]:
        """Every parameter once, in name order. Where ranks keep parts of them, all ranks ask together, one parameter
        after another is put together, and rank 0 gets them, in the memory of its CPU."""
        kept = {name: self.kept(parameter.detach()) for name, parameter in self.parameters().items()}
        return {name: tensor for name, tensor in kept.items() if tensor is not None}

    def kept(self, tensor: Tensor) -> Tensor | None:
        """A tensor of which ranks have parts, put together: on the CPU for rank 0, nothing for the others. Any other
        tensor as it is."""
        if not isinstance(tensor, DTensor):
            return tensor
        whole = gathered(tensor)
        return whole.cpu() if self.world.rank == 0 else None

    def cut(self, options: ScorerOptions) -> Cut:
        """How this model cuts batches into micro-batches."""
        config = self.module.config.get_text_config()
        embeddings = self.module.get_input_embeddings().weight.numel()
        per_layer = sum(p.numel() for p in self.parameters().values()) - embeddings
        return Cut(
            tokens=options.micro_batch_tokens,
            rows=options.micro_batch_rows,
            layout=options.layout,
            pairs_per_token=per_layer / (2 * config.num_hidden_layers * config.hidden_size),
        )

    def forward(self, input_ids: Tensor, hidden_index: Tensor, **inputs: Any) -> Tensor:
        """Head output at chosen positions: [T, V] logits, or [T, 1] values for a critic.

        `input_ids` int64 [R, L]; `hidden_index` int64 [T] into the R * L positions, row after row. Only those pass
        through the head, so that the logits of prompt tokens never exist.
        """
        self.require_loaded()
        self._selected = hidden_index
        with self._precision():
            run = self._runner if torch.is_grad_enabled() else self.module
            output = run(input_ids=input_ids, **inputs)
        return output.logits[0]

    def token_stats(
        self,
        input_ids: Tensor,
        hidden_index: Tensor,
        targets: Tensor,
        *,
        temperature: float,
        entropy: bool = False,
        **inputs: Any,
    ) -> TokenStats:
        """What the model says about the tokens `targets` (int64 [T]) that follow the positions `hidden_index`.

        Log-probs and entropy are float32 [T] of the distribution softmax(logits / temperature); a critic gives values.
        """
        output = self.forward(input_ids, hidden_index, use_cache=False, **inputs)
        if self.head == "value":
            values = output[:, 0].float()
            return TokenStats(logprobs=values.new_empty(0), values=values)
        logits = output.float()
        if temperature != 1.0:
            logits = logits / temperature
        total = torch.logsumexp(logits, dim=-1)
        logprobs = logits.gather(1, targets[:, None])[:, 0] - total
        return TokenStats(logprobs=logprobs, entropy=_entropy(logits, total) if entropy else None)

    @torch.no_grad()
    def probe(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-prob of every token but the first, at temperature 1, in one plain forward."""
        ids = torch.tensor([token_ids], device=self.device)
        places = torch.arange(len(token_ids) - 1, device=self.device)
        stats = self.token_stats(ids[:, :-1], places, ids[0, 1:], temperature=1.0)
        return tuple(stats.logprobs.tolist())

    @torch.no_grad()
    def likely_tokens(self, count: int) -> tuple[int, ...]:
        """Tokens that the model itself would choose, one after another: greedy decoding from the middle of its
        vocabulary, without a cache."""
        tokens = [self.vocabulary_size // 2]
        while len(tokens) < count:
            ids = torch.tensor([tokens], device=self.device)
            logits = self.forward(ids, torch.tensor([len(tokens) - 1], device=self.device), use_cache=False)
            tokens.append(int(logits[0].argmax()))
        return tuple(tokens)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter once (tied ones under their first name), in name order."""
        self.require_loaded()
        return dict(sorted(self.module.named_parameters()))

    def require_loaded(self) -> None:
        if self._away is not None:
            raise GroupError(
                f"model = {str(self.directory)!r} is offloaded, and was asked for something; onload it first"
            )

    def _layers(self) -> list[nn.Module]:
        return [layer for layer in self.module.modules() if isinstance(layer, GradientCheckpointingLayer)]

    def _select(self, _: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self._selected is not None
        hidden = arguments[0]
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._selected)[None],)

    def _precision(self) -> AbstractContextManager[Any]:
        """A cache of cast weights would keep whole layers that ranks are to keep parts of."""
        if not self._autocasts:
            return nullcontext()
        return torch.autocast(self.device.type, self.compute_dtype, cache_enabled=not self._sharded)


def pick_device(name: str) -> torch.device:
    """The device called "auto", "cpu", "cuda" or "cuda:3". Raises ConfigError if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f'need {name}, have {torch.cuda.device_count()} GPUs; use another one, or "cpu"')
    return device


def require_full_attention(config: Any) -> None:
    """Raises ConfigError for an architecture in which a layer is anything but plain full attention."""
    text = config.get_text_config()
    layer_types = getattr(text, "layer_types", None)
    if layer_types is None and getattr(text, "sliding_window", None) is not None:
        layer_types = ["sliding_attention"]
    others = sorted({kind for kind in layer_types or () if kind != "full_attention"})
    if config.is_encoder_decoder or others:
        kind = "is an encoder-decoder" if config.is_encoder_decoder else f"has layers of type {', '.join(others)}"
        raise ConfigError(
            f"{config.model_type} {kind}; the torch backend serves decoders whose layers are all full attention. Turn "
            "sliding windows off in config.json if the model allows it, or use another backend"
        )


def read_config(directory: str | Path, head: Literal["lm", "value"] = "lm") -> Any:
    """The Hugging Face configuration in `directory`. Raises ConfigError for an architecture that cannot be served."""
    try:
        config: Any = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (ValueError, ImportError, OSError, KeyError) as error:
        raise ConfigError(f"model = {str(directory)!r}: {_first_line(error)}") from error
    require_full_attention(config)
    known, what = (
        (MODEL_FOR_CAUSAL_LM_MAPPING, "causal language model")
        if head == "lm"
        else (MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, "model with a value per token")
    )
    if type(config) not in known:
        raise ConfigError(f"model = {str(directory)!r}: transformers has no {what} of type {config.model_type}")
    return config


def _load(directory: Path, dtype: torch.dtype, head: Literal["lm", "value"], attention: str, *, headless: bool) -> Any:
    read_config(directory, head)
    try:
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention, "local_files_only": True}
        kind: Any = AutoModelForCausalLM
        if head == "value":
            kind, options["num_labels"] = AutoModelForTokenClassification, 1
        with _quiet():
            module, report = kind.from_pretrained(directory, output_loading_info=True, **options)
    except (ValueError, ImportError, OSError) as error:
        raise ConfigError(f"model = {str(directory)!r}: {_first_line(error)}") from error
    except KeyError as error:
        raise ConfigError(
            f"model = {str(directory)!r} does not take the attention function {error}, as older architectures of "
            "transformers do not; use another backend for it"
        ) from error
    missing = set(report["missing_keys"])
    if head == "value":  # models that classify sequences have no bias
        new = [name for name in ("weight", "bias") if f"score.{name}" in missing and (headless or name == "bias")]
        _zero(module.score, new)
        missing -= {f"score.{name}" for name in new}
    if missing:
        raise ConfigError(
            f"model = {str(directory)!r} lacks {len(missing)} weights of {type(module).__name__}, among them "
            f"{min(missing)!r}; give the directory of a "
            f"{'language model' if head == 'lm' else 'model with a value head, such as a trained reward model'}"
        )
    with torch.no_grad():  # out of the file's mapping: the same alignment, hence the same bits, in every process
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.clone()
    return module


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


@contextmanager
def _quiet() -> Generator[None]:
    """transformers without progress bars and without its report of missing weights, which `_load` reads itself."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


@torch.no_grad()
def _zero(head: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        head.get_parameter(name).zero_()


def _disable_dropout(module: nn.Module) -> None:
    for name, value in vars(module).items():
        if "dropout" in name and isinstance(value, float):
            setattr(module, name, 0.0)


def _entropy(logits: Tensor, total: Tensor) -> Tensor:
    probabilities = torch.exp(logits - total[:, None])
    return total - (probabilities * logits).sum(-1)
