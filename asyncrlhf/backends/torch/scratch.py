"""A new Hugging Face directory from nothing: a randomly initialised model, and a tokenizer of characters or words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import nn

from asyncrlhf.backends.torch.guard import guard_companions
from asyncrlhf.backends.torch.options import ScratchOptions as ScratchOptions
from asyncrlhf.errors import ConfigError

guard_companions()
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

__all__ = ("ScratchOptions", "character_tokenizer", "word_tokenizer", "write_model")

EOS_ID = 0
OPTIONAL_FIELDS = ("head_dim", "sliding_window")
"""Fields that architectures read if they are there, although their default configuration lacks them."""
RESIDUAL_OUTPUTS = ("o_proj", "down_proj", "out_proj", "c_proj", "dense_4h_to_h", "fc2")
"""Last names of the modules whose output is added to the residual stream, across architectures."""


def write_model(
    directory: Path | str,
    *,
    model_type: str = "qwen2",
    characters: str = "",
    words: Sequence[str] = (),
    config: Mapping[str, Any],
    seed: int = 0,
    initializer: Literal["scaled", "huggingface"] = "scaled",
    chat_template: str = "",
) -> Path:
    """Write config.json, model.safetensors and the tokenizer files; the arguments are the fields of ScratchOptions.

    The vocabulary is <eos> (0), <unk> (1), then `characters` or `words`; a larger `config["vocab_size"]` is filled up
    with <unused0>, <unused1>, ... The same arguments give the same bytes, and the global random state is left as it
    was. Raises ConfigError for repeated characters or words, a vocabulary that is too small, an unknown architecture or
    field, or one whose tokenizer cannot read them.
    """
    directory = Path(directory)
    transformers_logging.disable_progress_bar()
    size = int(config.get("vocab_size", len(words or characters) + 2))
    make = word_tokenizer if words else character_tokenizer
    tokenizer = make(words or characters, size, chat_template)  # type: ignore[arg-type]
    fields = {**config, "vocab_size": size, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID, "bos_token_id": None}
    try:
        architecture = AutoConfig.for_model(model_type, **fields)
    except ValueError as error:
        raise ConfigError(f"model_type = {model_type!r}: {error}") from error
    usual = type(architecture)()
    unknown = sorted(name for name in config if not hasattr(usual, name) and name not in OPTIONAL_FIELDS)
    if unknown:
        raise ConfigError(f"{model_type} has no configuration field {', '.join(unknown)}")
    _verify_tokenizer(architecture, tokenizer, words or characters)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(architecture, dtype=torch.float32)
        if initializer == "scaled":
            _initialize_scaled(model, architecture.num_hidden_layers)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = EOS_ID
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def character_tokenizer(characters: str, size: int, chat_template: str = "") -> PreTrainedTokenizerFast:
    """One id per ASCII character, no inserted spaces: byte-level BPE without a merge, which every class can load.

    A character it does not know reads as <unk>; the class that transformers insists on for qwen2 leaves it out.

    Raises ConfigError if a character is repeated or `size` ids are too few.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = [byte_level.pre_tokenize_str(character)[0][0] for character in characters]
    vocabulary = _vocabulary("characters", characters, symbols, size)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = byte_level
    inner.decoder = decoders.ByteLevel()
    return _wrapped(inner, chat_template)


def word_tokenizer(words: Sequence[str], size: int, chat_template: str = "") -> PreTrainedTokenizerFast:
    """One id per word, where white space separates words; decoded text has a space between them.

    Raises ConfigError if a word is repeated or `size` ids are too few.
    """
    inner = Tokenizer(models.WordLevel(vocab=_vocabulary("words", words, words, size), unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrapped(inner, chat_template)


def _vocabulary(what: str, named: Sequence[str], symbols: Sequence[str], size: int) -> dict[str, int]:
    """Symbol -> id, with the special ones first and unused ones up to `size`."""
    if repeated := sorted(symbol for symbol, count in Counter(named).items() if count > 1):
        raise ConfigError(f"{what} repeats {', '.join(map(repr, repeated[:9]))}; name every one once")
    if size < len(symbols) + 2:
        raise ConfigError(
            f"vocab_size = {size} is too small for {len(symbols)} {what}, <eos> and <unk>; it takes at least "
            f"{len(symbols) + 2}"
        )
    unused = [f"<unused{i}>" for i in range(size - len(symbols) - 2)]
    return {symbol: i for i, symbol in enumerate(["<eos>", "<unk>", *symbols, *unused])}


def _wrapped(inner: Tokenizer, chat_template: str) -> PreTrainedTokenizerFast:
    options: dict[str, Any] = {"chat_template": chat_template} if chat_template else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<eos>",
        pad_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        **options,
    )


def _verify_tokenizer(architecture: Any, written: PreTrainedTokenizerFast, symbols: Sequence[str]) -> None:
    """transformers may load the files with a class of the architecture's own: what counts is what that one reads."""
    with TemporaryDirectory() as directory:
        architecture.save_pretrained(directory)
        written.save_pretrained(directory)
        tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    whole = symbols if isinstance(symbols, str) else " ".join(symbols)
    wrong = [c for i, c in enumerate(symbols, 2) if tokenizer.encode(c, add_special_tokens=False) != [i]]
    if wrong or tokenizer.decode(tokenizer.encode(whole, add_special_tokens=False)) != whole:
        fix = "name ASCII characters only" if isinstance(symbols, str) else 'use another model_type, such as "llama"'
        raise ConfigError(
            f"{type(tokenizer).__name__}, which transformers loads for this model_type, does not read "
            f"{', '.join(map(repr, wrong[:9])) or 'this text'} as one id each; {fix}"
        )


@torch.no_grad()
def _initialize_scaled(model: nn.Module, layer_count: int) -> None:
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            if name.endswith("bias"):
                parameter.zero_()
        elif id(parameter) in embeddings:
            parameter.normal_(0, 0.02)
        else:
            parameter.normal_(0, 0.8 / math.sqrt(parameter.shape[-1]))
            if name.removesuffix(".weight").rpartition(".")[2] in RESIDUAL_OUTPUTS:
                parameter.div_(math.sqrt(2 * layer_count))
