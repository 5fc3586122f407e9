# SPDX-License-Identifier: Apache-2.0
"""The library and the commands refuse to denoise or decode a video of another shape than the encoded one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import wanjax
from tests.support.commands import refused, succeeded
from tests.support.commands import wanjax as run
from tests.support.quick import quick
from tests.support.tiny import (
    tiny_checkpoint,
    tiny_cogvideox_checkpoint,
    tiny_control_checkpoint,
    tiny_experts_checkpoint,
    tiny_hunyuan_checkpoint,
    tiny_image_checkpoint,
    tiny_residual_checkpoint,
)
from tests.support.words import has_line_with_words, line_with_words
from wanjax.checkpoints.files import load_safetensors, save_safetensors
from wanjax.errors import WanjaxError, WanjaxWarning
from wanjax.media import stage_files
from wanjax.media.metadata import load_settings
from wanjax.pipelines.video_shape import VideoShape, encoded_shape

pytestmark = pytest.mark.usefixtures("cached_programs")
PICTURE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
CLIP = np.stack([np.roll(PICTURE, i, axis=1) for i in range(5)])


class Case(NamedTuple):
    make: Callable[..., Path]
    options: dict[str, Any]
    inputs: dict[str, Any]


CASES = {
    "text": Case(tiny_checkpoint, {}, {"video": CLIP}),
    "image": Case(tiny_image_checkpoint, {}, {"image": PICTURE}),
    "last": Case(tiny_image_checkpoint, {"last": True}, {"image": PICTURE, "last_image": PICTURE}),
    "experts": Case(tiny_experts_checkpoint, {}, {"video": CLIP}),
    "first": Case(tiny_residual_checkpoint, {}, {"image": PICTURE}),
    "control": Case(tiny_control_checkpoint, {}, {"references": [PICTURE, 255 - PICTURE]}),
    "masked": Case(tiny_control_checkpoint, {}, {"video": CLIP, "mask": CLIP}),
    "cogvideox": Case(tiny_cogvideox_checkpoint, {"in_channels": 8}, {"image": PICTURE}),
    "cogvideox clip": Case(tiny_cogvideox_checkpoint, {}, {"video": CLIP}),
    "hunyuan": Case(tiny_hunyuan_checkpoint, {"pictured": True}, {"image": PICTURE}),
}


@pytest.mark.parametrize("name", quick(["text"], CASES))  # the test of the commands has a quick one with references
def test_every_family_refuses_another_shape(tmp_path, name):
    case = CASES[name]
    pipe = wanjax.load(str(case.make(tmp_path, **case.options)))
    pipe.progress = False
    conditioning = pipe.encode("a", size=(32, 32), frames=5, steps=2, **case.inputs)
    video_shape = encoded_shape(conditioning)
    assert video_shape == VideoShape(5, 32, 32, len(case.inputs.get("references", ())))
    for changes in ({"frames": 9}, {"size": (32, 64)}, {"width": 64}, {"frames": 1}):
        with pytest.raises(WanjaxError, match=line_with_words("32x32 5 frames encode")):
            pipe.denoise(conditioning, steps=2, **changes)
    shape = pipe.model.spec.latent_shape(pipe.settings(size=(32, 32), frames=5))
    latents = pipe.denoise(conditioning, steps=2, seed=0, size=(32, 32), frames=5)
    latents_by_encoded_size = pipe.denoise(conditioning, steps=2, seed=0)
    assert latents.shape == shape
    np.testing.assert_array_equal(latents, latents_by_encoded_size)


def test_conditioning_of_only_a_prompt_fits_any_shape(tmp_path):
    pipe = wanjax.load(str(tiny_checkpoint(tmp_path)))
    conditioning = pipe.encode("a", size=(32, 32), frames=5)
    assert encoded_shape(conditioning) is None
    assert pipe.denoise(conditioning, steps=1, size=(16, 32), frames=9).shape == (1, 4, 3, 2, 4)


@pytest.fixture(scope="module")
def control(tmp_path_factory) -> str:
    return str(tiny_control_checkpoint(tmp_path_factory.mktemp("control")))


INVALID_SHAPES = [np.int32([[5, 32, 32, 1]]), np.int32([5, 32]), np.float32([[5, 32, 32, 2]])]


@pytest.mark.parametrize("shape", INVALID_SHAPES, ids=str)
def test_an_invalid_or_different_shape_is_refused(control, shape):
    pipe = wanjax.load(control)
    conditioning = pipe.encode("a", size=(32, 32), frames=5, references=[PICTURE, PICTURE])
    with pytest.raises(WanjaxError, match="encode the pictures again"):
        pipe.denoise(conditioning._replace(video_shape=shape), steps=1)


def test_the_commands_refuse_another_shape(control, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from PIL import Image

    Image.fromarray(PICTURE).save("picture.png")
    references = ("--reference", "picture.png", "--reference", "picture.png")
    options = ("encode", "a", "--model", control, "--size", "32x32", "--frames", "5", "--dir", "made")
    succeeded(run(*options, *references))
    file = Path("made") / stage_files.EMBEDDINGS_FILE
    assert "video_shape" not in load_safetensors(file)  # the settings in the file have the shape
    for arguments in (("--frames", "9"), ("--frames", "13"), ("--size", "48x32"), ("--height", "48")):
        assert has_line_with_words(
            refused("denoise", "--dir", "made", *arguments), "32x32 5 frames 2 references encode"
        )
    folder = Path(shutil.copytree("made", "without"))
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**config, "references": None}))
    assert has_line_with_words(refused("denoise", "--dir", "without"), "references encode")
    succeeded(run("denoise", "--dir", "made", "--steps", "1"))
    latents = load_safetensors(Path("made") / stage_files.LATENTS_FILE)["latents"]
    assert latents.shape == (1, 4, 2, 4, 4)
    metadata = {"settings": json.dumps(load_settings(Path("made")))}
    save_safetensors(Path("made") / stage_files.LATENTS_FILE, {"latents": latents[:, :, :1]}, metadata)
    assert has_line_with_words(
        refused("decode", "--dir", "made"), "[1, 4, 1, 4, 4] 32x32 5 frames [1, 4, 2, 4, 4] denoise"
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_latents_that_are_not_finite_are_not_decoded(control, bad):
    pipe = wanjax.load(control)
    latents = np.zeros((1, 4, 2, 4, 4), np.float32)
    latents[0, 1, 1, 2, 3] = bad
    for decode in (pipe.decode, lambda x: list(pipe.decode_chunks(x))):
        with pytest.raises(WanjaxError, match="not finite"):
            decode(latents)
    assert pipe.decode(np.zeros_like(latents)).shape == (5, 32, 32, 3)


def test_a_picture_with_a_clip_is_reported(tmp_path, control):
    """TI2V models and VACE accept a picture together with a clip."""
    pipe = wanjax.load(str(tiny_residual_checkpoint(tmp_path)))
    with pytest.warns(WanjaxWarning, match="first frame.*clip"):
        pictures, _ = pipe.prepare(image=PICTURE, video=CLIP, size=(32, 32), frames=5)
    assert list(pictures) == ["image", "video"]
    with pytest.warns(WanjaxWarning, match="picture is the first frame.*guided by the clip"):
        pictures, _ = wanjax.load(control).prepare(image=PICTURE, video=CLIP)
    assert "video" in pictures
