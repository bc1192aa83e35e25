"""Weights read part by part from safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncrlhf.backends.megatron.exchange import Reader
from asyncrlhf.backends.megatron.families import Piece
from asyncrlhf.errors import ConfigError

WEIGHT = torch.arange(24.0).view(6, 4)


def test_a_piece_is_a_part_of_a_tensor(tmp_path: Path) -> None:
    save_file({"a": WEIGHT}, tmp_path / "model.safetensors")
    reader = Reader(tmp_path)
    assert "a" in reader
    assert "b" not in reader
    assert torch.equal(reader.read(Piece("a", 0, 2, 5)), WEIGHT[2:5])
    assert torch.equal(reader.read(Piece("a", 1, 1, 3)), WEIGHT[:, 1:3])
    with pytest.raises(ConfigError, match="lacks weight 'b'"):
        reader.read(Piece("b", 0, 0, 1))


def test_tensors_may_lie_in_several_files(tmp_path: Path) -> None:
    save_file({"a": WEIGHT}, tmp_path / "one.safetensors")
    save_file({"b": WEIGHT + 1}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(Reader(tmp_path).read(Piece("b", 0, 1, 2)), WEIGHT[1:2] + 1)


def test_experts_may_be_one_tensor(tmp_path: Path) -> None:
    names = ["gate_proj", "up_proj", "down_proj"]
    shapes = {"gate_proj": (3, 4), "up_proj": (3, 4), "down_proj": (4, 3)}
    apart = {f"mlp.experts.{e}.{name}.weight": torch.randn(shapes[name]) for e in range(11) for name in names}
    of = [[apart[f"mlp.experts.{e}.{name}.weight"] for name in names] for e in range(11)]
    fused = {
        "mlp.experts.gate_up_proj": torch.stack([torch.cat([gate, up]) for gate, up, _ in of]),
        "mlp.experts.down_proj": torch.stack([down for _, _, down in of]),
    }
    save_file(fused, tmp_path / "model.safetensors")
    reader = Reader(tmp_path)
    for name, tensor in apart.items():
        assert torch.equal(reader.read(Piece(name, 0, 1, 3)), tensor[1:3]), name
        assert torch.equal(reader.read(Piece(name, 1, 0, 2)), tensor[:, :2]), name


def test_files_that_are_not_safetensors_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        Reader(tmp_path)
