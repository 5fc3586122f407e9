# SPDX-License-Identifier: Apache-2.0
"""Damage to the weights of a checkpoint in the layout of diffusers."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

import numpy as np

from wanjax.checkpoints.files import load_safetensors, save_safetensors

WEIGHTS = "diffusion_pytorch_model.safetensors"


def unchecked() -> AbstractContextManager[object]:
    """Allow to write files with numbers that are not finite, as other programs do."""
    return patch("wanjax.checkpoints.files.check_finite")


def rewrite(file: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> None:
    with unchecked():
        save_safetensors(file, change({key: value.copy() for key, value in load_safetensors(file).items()}))


def delete_a_shard(folder: Path) -> None:
    tensors = load_safetensors(folder / "transformer" / WEIGHTS)
    names = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weight_map = {key: names[i % 2] for i, key in enumerate(tensors)}
    for name in names:
        save_safetensors(folder / "transformer" / name, {k: v for k, v in tensors.items() if weight_map[k] == name})
    (folder / "transformer" / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "transformer" / WEIGHTS).unlink()
    (folder / "transformer" / names[1]).unlink()


def truncate(folder: Path) -> None:
    file = folder / "vae" / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])


def corrupt(folder: Path) -> None:
    file = folder / "text_encoder" / "model.safetensors"
    file.write_bytes(b"\xff" * 16 + file.read_bytes()[16:])


def rename_keys(folder: Path) -> None:
    def change(tensors):
        del tensors["blocks.0.attn1.to_q.weight"], tensors["proj_out.bias"]
        tensors["blocks.1.ffn.net.2.bias"] = np.zeros(7, np.float32)
        return tensors | {"extra.weight": np.zeros(3, np.float32), "more.bias": np.zeros(3, np.float32)}

    rewrite(folder / "transformer" / WEIGHTS, change)


def write_nan(folder: Path) -> None:
    rewrite(
        folder / "transformer" / WEIGHTS, lambda tensors: tensors | {"proj_out.bias": tensors["proj_out.bias"] * np.nan}
    )
