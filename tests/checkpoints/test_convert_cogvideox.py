# SPDX-License-Identifier: Apache-2.0
"""`wanjax convert` of CogVideoX's checkpoints: exact to the bit in both directions, with equal latents."""

import json

import numpy as np
import pytest

import wanjax
from tests.support.conversion import convert_command, tensors
from tests.support.quick import quick
from tests.support.tiny import tiny_cogvideox_checkpoint

pytestmark = pytest.mark.usefixtures("cached_shapes")
CONFIG_1_0 = {"patch_size_t": None, "patch_bias": True, "sample_height": 4, "sample_width": 6}
LEARNED = {"use_learned_positional_embeddings": True, "in_channels": 8}
MODELS = {
    "1.5": {},
    "1.5 from a picture": {"in_channels": 8, "ofs_embed_dim": 24},
    "2b": CONFIG_1_0 | {"use_rotary_positional_embeddings": False},
    "5b": CONFIG_1_0,
    "5b from a picture": CONFIG_1_0 | LEARNED,
}


@pytest.mark.parametrize("model", quick(["1.5", "5b from a picture"], MODELS))
def test_a_conversion_and_back_is_equal_bit_for_bit(model, tmp_path):
    source_folder = tiny_cogvideox_checkpoint(tmp_path / "original", **MODELS[model])
    (source_folder / "tokenizer" / "tokenizer.json").unlink()
    (source_folder / "tokenizer" / "spiece.model").write_bytes(b"\n\x05\n\x03abc")
    assert convert_command(source_folder, tmp_path / "converted")[0] == 0
    assert convert_command(tmp_path / "converted", tmp_path / "back", "--to", "diffusers")[0] == 0
    assert tensors(tmp_path / "back") == tensors(source_folder)
    assert len(tensors(source_folder)) > 250
    for file in source_folder.rglob("*"):
        back = tmp_path / "back" / file.relative_to(source_folder)
        if file.suffix == ".json":
            assert json.loads(back.read_bytes()) == json.loads(file.read_bytes())
        elif file.is_file() and file.suffix != ".safetensors":
            assert back.read_bytes() == file.read_bytes()


@pytest.mark.slow  # tests/checkpoints/test_convert.py has a quick test with Wan
def test_a_converted_checkpoint_makes_the_same_latents(tmp_path):
    source_folder = tiny_cogvideox_checkpoint(tmp_path / "original", **MODELS["1.5 from a picture"])
    assert convert_command(source_folder, tmp_path / "converted")[0] == 0
    settings = {"size": (32, 48), "frames": 9, "steps": 2, "guidance_scale": 4.0}
    latents = []
    for folder in (source_folder, tmp_path / "converted"):
        pipe = wanjax.load(folder)
        conditioning = pipe.encode("a red circle", "a blue cat", image=np.full((32, 48, 3), 90, np.uint8), **settings)
        latents.append(np.asarray(pipe.denoise(conditioning, seed=3, **settings)))
    assert latents[0].std() > 0.1
    np.testing.assert_array_equal(*latents)
