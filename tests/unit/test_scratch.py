"""Models from nothing: a directory that transformers loads, with a tokenizer of one id per character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from asyncrlhf.backends.torch.scratch import ScratchOptions, write_model
from asyncrlhf.errors import ConfigError

CHARACTERS = "0123456789+=abcdefghijklmnopqrstuvwxyz>-*()/ "
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def write(directory: Path, **changes: Any) -> Path:
    options = {"characters": CHARACTERS, "config": SMALL | {"num_key_value_heads": 1, "vocab_size": 64}} | changes
    return write_model(directory, **options)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_text_goes_there_and_back_one_id_per_character(tmp_path: Path, model_type: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(write(tmp_path, model_type=model_type))
    assert tokenizer.encode("ab>") == [14, 15, 40]
    assert tokenizer.encode("") == []
    text = "a+b = (c  d)/z> "
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, 0], skip_special_tokens=True) == text
    assert tokenizer.decode([14, 63]) == "a<unused16>"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0)
    assert tokenizer.encode("aÄb\n")[:1] == [14]
    if model_type != "qwen2":  # transformers loads its own class for qwen2, which leaves out what it does not know
        assert tokenizer.encode("a\nb") == [14, 1, 15]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt_neox"])
def test_words_go_there_and_back_one_id_each(tmp_path: Path, model_type: str) -> None:
    from transformers import AutoTokenizer

    words = ("the", "end", "isn't", ".", ",")
    options = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    directory = write_model(tmp_path, model_type=model_type, words=words, config=options | {"vocab_size": 9})
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.encode("the  end , isn't") == [2, 3, 6, 4]
    assert tokenizer.encode("the start .") == [2, 1, 5]
    assert tokenizer.decode([2, 3, 5, 0], skip_special_tokens=True) == "the end ."


def test_the_same_arguments_give_the_same_bytes_and_leave_the_random_state(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    one, two, other = (write(tmp_path / str(i), seed=seed) for i, seed in enumerate((5, 5, 6)))
    assert torch.equal(torch.get_rng_state(), before)
    first, second, third = ((d / "model.safetensors").read_bytes() for d in (one, two, other))
    assert first == second != third
    assert write(tmp_path / "hf", initializer="huggingface", seed=5).is_dir()
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() != first


def test_options_are_the_arguments(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    options = ScratchOptions(characters="abc", config=SMALL, chat_template="{{ messages[0]['content'] }}")
    directory = write_model(tmp_path, **msgspec.structs.asdict(options))
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.vocab_size == 5
    assert model.generation_config.eos_token_id == 0
    assert (tmp_path / "chat_template.jinja").read_text() == options.chat_template


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"characters": "abca"}, "characters repeats 'a'"),
        ({"words": ("a", "b", "a")}, "words repeats 'a'"),
        ({"words": ("the", "end")}, 'Qwen2Tokenizer, which .* use another model_type, such as "llama"'),
        ({"config": SMALL | {"vocab_size": 20}}, "vocab_size = 20 is too small for 45 characters"),
        ({"model_type": "qwen22"}, "model_type = 'qwen22'"),
        ({"config": SMALL | {"hiden_size": 3}}, "qwen2 has no configuration field hiden_size"),
        ({"characters": "abä"}, "does not read 'ä' as one id each"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write(tmp_path, **changes)
    assert not list(tmp_path.iterdir())
