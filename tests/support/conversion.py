# SPDX-License-Identifier: Apache-2.0
"""Helpers that run `wanjax convert`, and read checkpoints of either layout for comparison."""

import json
import re
from pathlib import Path

import numpy as np
from click.testing import CliRunner

from tests.support.harm import WEIGHTS
from wanjax.checkpoints.files import SafetensorsFolder, load_safetensors, save_safetensors
from wanjax.cli import main

COMPONENTS = ("text_encoder", "transformer", "vae")


def convert_command(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["convert", *map(str, arguments)], prog_name="wanjax")
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def refused(*arguments: str | Path, status: int = 2) -> str:
    """Run a conversion that must fail, and return its error message. The status is 1 for a full disk."""
    code, out, err = convert_command(*arguments)
    messages = re.findall(r"^wanjax: (.*)$", err, re.MULTILINE)
    assert (code, out, len(messages)) == (status, "", 1), err
    return messages[0]


def split(folder: Path) -> None:
    tensors = {key: np.array(x) for key, x in load_safetensors(folder / WEIGHTS).items()}
    names = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weight_map = {key: names[i % 2] for i, key in enumerate(tensors)}
    for name in names:
        save_safetensors(folder / name, {k: v for k, v in tensors.items() if weight_map[k] == name})
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / WEIGHTS).unlink()


def tensors(folder: Path) -> dict[str, tuple]:
    """Return the dtype, the shape and the bytes of all tensors of a folder in the layout of diffusers."""
    present = (name for name in (*COMPONENTS, "transformer_2", "image_encoder") if (folder / name).exists())
    weights = {name: SafetensorsFolder(folder / name) for name in present}
    return {
        f"{name}.{key}": (*spec, reader.read(key).tobytes())
        for name, reader in weights.items()
        for key, spec in reader.specs.items()
    }


def checksums(folder: Path) -> dict:
    return json.loads((folder / "wanjax.json").read_text())["networks"]


def flip_a_bit(transformer: Path) -> Path:
    [file] = (path for path in (transformer / "weights" / "proj_out.kernel" / "c").rglob("*") if path.is_file())
    contents = bytearray(file.read_bytes())
    contents[7] ^= 1
    file.write_bytes(contents)
    return file
