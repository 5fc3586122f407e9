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
from tests.support.words import says
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
        ({"prompt": 3}, "prompt 3 text"),
        ({"prompt": ["a", ["b"]]}, "prompt ['b'] text"),
        ({"negative_prompt": ["a"]}, "negative_prompt ['a'] text"),
        ({"steps": 2.0}, "steps 2.0 whole number 1"),
        ({"steps": "2"}, "steps '2' whole number 1"),
        ({"frames": True}, "frames True whole number"),
        ({"guidance_scale": "high"}, "guidance_scale 'high' number 5"),
        ({"guidance_scale": jnp.ones(3)}, "guidance_scale"),
        ({"size": "64x"}, "size '64x' 64p square 64x64"),
        ({"prompt": None}, "prompt None"),
        ({"prompt": b"a cat"}, "prompt b'a cat' text"),
        ({"seeds": 3}, "seeds 3 range(3) [7]"),
        ({"seeds": "3"}, "seeds '3' range(3)"),
        ({"sampler_name": "euler"}, "'sampler_name' pipe.scheduler"),
        ({"prompt": ["a", None]}, "prompt None"),
        ({"size": 64}, "size 64 (height, width)"),
        ({"size": (64.0, 64)}, "size (64.0, 64) (height, width)"),
        ({"size": (64, 64), "height": 64}, "size height width"),
        ({"image": io.BytesIO()}, "BytesIO picture PIL image uint8"),
        ({"image": [CLIP[0]]}, "list picture"),
        ({"video": Image.new("RGB", (64, 64))}, "Image clip"),
        ({"video": io.BytesIO()}, "BytesIO clip"),
        ({"references": "a.png"}, "nano reference images"),
        ({"noise": [0.0]}, "noise [0.0] [1, 16, 5, 8, 8]"),
        ({"noise": LATENTS[0]}, "noise [16, 5, 8, 8] video [1, 16, 5, 8, 8]"),
        ({"noise": LATENTS.astype(int)}, "noise int64 floats"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_call(pipe, given, sentence):
    assert says(refused(pipe, **{"prompt": "a red circle"} | given), sentence)


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
            "latents [2, 16, 5, 8, 8] [1, 16, T, H, W]",
        ),
        (LATENTS[0], "latents [16, 5, 8, 8] [1, 16, T, H, W]"),
        (LATENTS[:, :3], "latents [1, 3, 5, 8, 8] [1, 16, T, H, W]"),
        (LATENTS[:, :, :0], "latents [1, 16, 0, 8, 8]"),
        (LATENTS.astype(int), "latents int64 floats"),
        (LATENTS.tolist(), "latents list [1, 16, T, H, W]"),
        ("latents.safetensors", "latents 'latents.safetensors'"),
    ],
)
def test_latents(pipe, latents, sentence):
    for decode in (pipe.decode, lambda latents: next(pipe.decode_chunks(latents))):
        assert says(refused(decode, latents), sentence)


def test_a_tiling_is_no_flag(pipe):
    assert says(refused(pipe.decode, LATENTS, tiling=True), "tiling True wanjax.Tiling()")


@pytest.mark.parametrize(
    ("tiling", "sentence"),
    [
        ((4, 4), "size tiles 4 multiple 8"),
        ((0, 0), "size tiles 0 multiple 8"),
        ((32, 12), "stride tiles 12 multiple 8"),
        (((32, 20), 16), "size tiles (32, 20) multiple 8"),
        (((32,), 24), "size tiles (32,) height width"),
        (("a", 8), "size tiles 'a'"),
        ((32, 64), "tiles 32 64 gaps stride"),
        ((32, None), "tiles 32 192 gaps stride"),
        (((64, 32), (32, 40)), "tiles (64, 32) (32, 40) gaps"),
    ],
)
def test_tiles_that_do_not_fit(pipe, tiling, sentence):
    """A stride larger than its tile would leave pixels out."""
    frames = np.zeros((1, 64, 64, 3), np.uint8)
    for use, given in ((pipe.decode, LATENTS), (pipe.encode_video, frames), (pipe, "a red circle")):
        assert says(refused(use, given, tiling=wanjax.Tiling(*tiling)), sentence)


@pytest.mark.parametrize("encoded", ["a red circle", ("a", "b"), LATENTS, None], ids=["text", "pair", "array", "None"])
def test_what_is_not_encoded_cannot_be_denoised(pipe, encoded):
    assert says(refused(pipe.denoise, encoded), "denoise WanEncoded encode")


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        (Path("clip.mp4"), "frames uint8 [T, H, W, 3] floats 0 1"),
        ([], "[] frames"),
        (CLIP[0], "uint8 [64, 64, 3] frames"),
        (CLIP.astype(np.int32), "int32 [5, 64, 64, 3] frames"),
        ([CLIP[0], CLIP[0, :32]], "frames different sizes"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_frames(pipe, frames, sentence):
    assert says(refused(pipe.encode_video, frames), sentence)


def test_what_is_no_model_and_no_callback(pipe):
    assert says(refused(wanjax.load, None), "model None 'nano'")
    assert says(refused(pipe, "a", callback=3), "callback 3 function")


def test_a_name_that_there_is_not(pipe):
    for value, name, right in (
        (pipe, "transfomer", "transformer"),
        (pipe, "from_pretrained", "wanjax.load"),
        (wanjax.Pipeline, "from_pretrained", "wanjax.load"),
    ):
        with pytest.raises(AttributeError, match=right):
            getattr(value, name)
    assert not hasattr(pipe, "xyzzy")


def test_a_component_that_there_is_not_is_not_freed(pipe):
    assert says(refused(pipe.free, "transformers"), "'transformers' transformer")


@pytest.mark.parametrize("name", ["", 5, None])
def test_a_video_is_saved_under_a_name(name):
    assert says(refused(wanjax.Video(CLIP, 8, {}).save, name), f"{name!r} file folder")


@pytest.mark.parametrize(
    ("given", "sentence"), [({"offload": "yes"}, "offload 'yes' True"), ({"lora": 5}, "LoRA 5 'style.safetensors:0.8'")]
)
def test_a_pipeline_is_not_loaded_otherwise_than_asked(given, sentence):
    assert says(refused(wanjax.load, "nano", **given), sentence)


def test_an_empty_picture_is_told(pipe, tmp_path):
    (tmp_path / "empty.png").touch()
    assert says(refused(pipe, "a red circle", image=tmp_path / "empty.png"), "empty.png empty")


def test_the_length_of_an_axis_is_a_whole_number():
    assert says(refused(wanjax.make_mesh, "dp=2"), "dp 'dp=2' make_mesh(dp=2, tp=4)")


def test_a_mesh_is_not_a_number():
    assert says(refused(wanjax.load, "nano", mesh=8), "mesh 8 wanjax.make_mesh")


def test_a_lora_may_be_a_path():
    with pytest.raises(WanjaxError, match=r"no\.safetensors"):
        wanjax.load("nano", lora=Path("no.safetensors"))
