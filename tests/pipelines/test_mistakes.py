# SPDX-License-Identifier: Apache-2.0
"""Mistakes in calls of the library: each ends at once, in one sentence that names the right thing."""

import io
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import wanjax
from tests.support.types import unchecked
from wanjax.errors import WanjaxError

LATENTS = np.zeros((1, 16, 5, 8, 8), np.float32)  # of nano
CLIP = np.zeros((5, 64, 64, 3), np.uint8)


@pytest.fixture(scope="module")
def pipe():
    return wanjax.load("nano")


def refused(call, *arguments: Any, **keywords: Any) -> str:
    """Returns the message of the WanjaxError that a call raises."""
    with unchecked(), pytest.raises(WanjaxError) as caught:
        call(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"prompt": 3}, "prompt is given as 3 where one text is right"),
        ({"prompt": ["a", ["b"]]}, "prompt is given as ['b'] where one text is right"),
        ({"negative_prompt": ["a"]}, "negative_prompt is given as ['a'] where one text is right"),
        ({"steps": 2.0}, "steps is given as 2.0 where a whole number such as 20 is right"),
        ({"steps": "2"}, "steps is given as '2' where a whole number such as 20 is right"),
        ({"frames": True}, "frames is given as True where a whole number such as 17 is right"),
        ({"guidance_scale": "high"}, "guidance_scale is given as 'high' where a number such as 3.0 is right"),
        ({"guidance_scale": jnp.ones(3)}, "guidance_scale is given as"),
        ({"size": "64x64"}, "size is given as '64x64' where (height, width) such as (480, 832) is right"),
        ({"size": 64}, "size is given as 64 where (height, width)"),
        ({"size": (64.0, 64)}, "size is given as (64.0, 64) where (height, width)"),
        ({"size": (64, 64), "height": 64}, "size is given beside height or width: one way is enough"),
        ({"image": io.BytesIO()}, "a BytesIO is given as a picture where the path of a file, a PIL image or uint8"),
        ({"image": [CLIP[0]]}, "a list is given as a picture where the path of a file"),
        ({"video": Image.new("RGB", (64, 64))}, "an Image is given as a clip where the path of a file or folder"),
        ({"video": io.BytesIO()}, "a BytesIO is given as a clip where"),
        ({"references": "a.png"}, "the references are given as 'a.png' where a list of pictures is right"),
        ({"noise": [0.0]}, "the noise is given as [0.0] where an array [1, 16, 5, 8, 8] is right"),
        ({"noise": LATENTS[0]}, "the noise has the shape [16, 5, 8, 8] where this video needs [1, 16, 5, 8, 8]"),
        ({"noise": LATENTS.astype(int)}, "the noise is int64 where floats are right"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_call(pipe, given, sentence):
    assert sentence in refused(pipe, **{"prompt": "a red circle"} | given)


def test_whole_numbers_of_numpy_are_whole_numbers(pipe):
    with unchecked():
        settings = pipe.settings(frames=np.int64(17), size=[np.int32(64), 64], guidance_scale=np.float32(2))
    assert (settings.frames, settings.size, settings.guidance_scale) == (17, (64, 64), 2.0)
    assert {type(settings.frames), type(settings.height)} == {int}
    assert type(settings.guidance_scale) is float


@pytest.mark.parametrize(
    ("latents", "sentence"),
    [
        (
            np.repeat(LATENTS, 2, axis=0),
            "the latents have the shape [2, 16, 5, 8, 8] where one video's [1, 16, T, H, W]",
        ),
        (LATENTS[0], "the latents have the shape [16, 5, 8, 8] where one video's [1, 16, T, H, W] is right"),
        (LATENTS[:, :3], "the latents have the shape [1, 3, 5, 8, 8] where one video's [1, 16, T, H, W] is right"),
        (LATENTS[:, :, :0], "the latents have the shape [1, 16, 0, 8, 8] where"),
        (LATENTS.astype(int), "the latents are int64 where floats are right"),
        (LATENTS.tolist(), "the latents are given as a list where one video's [1, 16, T, H, W] is right"),
        ("latents.safetensors", "the latents are given as 'latents.safetensors' where"),
    ],
)
def test_latents(pipe, latents, sentence):
    for decode in (pipe.decode, lambda latents: next(pipe.decode_chunks(latents))):
        assert sentence in refused(decode, latents)


def test_a_tiling_is_no_flag(pipe):
    assert refused(pipe.decode, LATENTS, tiling=True) == ("the tiling is given as True where wanjax.Tiling() is right")


@pytest.mark.parametrize("encoded", ["a red circle", ("a", "b"), LATENTS, None], ids=["text", "pair", "array", "None"])
def test_what_is_not_encoded_cannot_be_denoised(pipe, encoded):
    assert "is given to denoise where the WanEncoded of `encode` is right" in refused(pipe.denoise, encoded)


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        (Path("clip.mp4"), "is given as frames where uint8 [T, H, W, 3], or floats from 0 to 1, are right"),
        ([], "[] is given as frames where"),
        (CLIP[0], "uint8 [64, 64, 3] is given as frames where"),
        (CLIP.astype(np.int32), "int32 [5, 64, 64, 3] is given as frames where"),
        ([CLIP[0], CLIP[0, :32]], "the frames have different sizes"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_frames(pipe, frames, sentence):
    assert sentence in refused(pipe.encode_video, frames)


def test_a_mesh_is_not_a_number():
    assert "the mesh is given as 8 where wanjax.make_mesh" in refused(wanjax.load, "nano", mesh=8)


def test_a_lora_may_be_a_path():
    with pytest.raises(WanjaxError, match=r"no\.safetensors"):
        wanjax.load("nano", lora=Path("no.safetensors"))
