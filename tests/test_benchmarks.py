# SPDX-License-Identifier: Apache-2.0
"""The benchmarks can be imported and asked for help; what of them is quick does its work."""

import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from benchmarks import convert
from tests.support.tiny import tiny_checkpoint, tiny_cogvideox_checkpoint
from wanjax.checkpoints.files import load_safetensors, save_safetensors

FOLDER = Path(__file__).parents[1] / "benchmarks"
COMMANDS = [path.stem for path in sorted(FOLDER.glob("*.py")) if "__main__" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        import_module(f"benchmarks.{name}").main()
    assert end.value.code == 0
    assert f"usage: {name}" in capsys.readouterr().out


def test_the_benchmarks_are_found():
    assert {"against_diffusers", "attention", "convert", "memory"} <= set(COMMANDS)


@pytest.mark.parametrize("checkpoint", [tiny_checkpoint, tiny_cogvideox_checkpoint])
def test_a_conversion_is_compared_bit_for_bit(checkpoint, tmp_path):
    source, target = checkpoint(tmp_path / "source"), tmp_path / "target"
    figures = {part: convert.PARTS[part](source, target) for part in ("convert", "verify", "compare")}
    files = [file for file in source.rglob("*.safetensors")]
    assert figures["compare"]["tensors"] == sum(len(load_safetensors(file)) for file in files)
    tensors = {name: np.array(x) for name, x in load_safetensors(files[0]).items()}
    next(iter(tensors.values())).view(np.uint8).flat[0] ^= 1
    save_safetensors(files[0], tensors)
    with pytest.raises(AssertionError):
        convert.compare(source, target)
