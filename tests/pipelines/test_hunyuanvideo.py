# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo's pipeline on small checkpoints: stages and their files, lengths of text, and refused inputs."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import wanjax
from tests.support.commands import succeeded
from tests.support.commands import wanjax as run
from tests.support.compare import error
from tests.support.programs import init_state
from tests.support.quick import quick
from tests.support.tiny import tiny_hunyuan_checkpoint
from tests.support.words import line_with_words
from wanjax.checkpoints.files import load_safetensors
from wanjax.errors import WanjaxError
from wanjax.media.stage_files import EMBEDDINGS_FILE, LATENTS_FILE, VIDEO_SHAPE_TENSOR
from wanjax.pipelines.hunyuanvideo.conditioning import (
    GLYPH_LENGTHS,
    LENGTHS,
    HunyuanVideoConditioning,
    Text,
    used_lengths,
)
from wanjax.registry import find_checkpoint, model_description
from wanjax.schedulers import one_step

pytestmark = [
    pytest.mark.usefixtures("cached_programs"),
    # the tiny model's sizes crop much of a picture, which gives a warning
    pytest.mark.filterwarnings("ignore:the video has .* of the .* picture is cut off"),
]
QUOTED = 'a cat says "hello"'
LONG_PROMPT = "a blue dog " * 60


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_hunyuan_checkpoint(folder / name, pictured=name == "image") for name in ("text", "image")}


@pytest.fixture(scope="module")
def picture() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (30, 80, 3), np.uint8)


@pytest.fixture(scope="module")
def pipes(models) -> dict[str, Any]:
    return {name: wanjax.load(folder) for name, folder in models.items()}


def test_defaults_come_from_the_scheduler_and_the_guider(models):
    defaults = wanjax.load(models["text"]).defaults
    assert (defaults.flow_shift, defaults.guidance_scale, defaults.size, defaults.fps) == (9.0, 3.0, (32, 48), 24)


@pytest.mark.slow  # tests/pipelines/test_from_pictures.py has a quick test of Wan
def test_the_stages_and_the_library_make_the_same_latents(models, picture, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(picture).save("picture.png")
    succeeded(run("encode", QUOTED, "--model", str(models["image"]), "--image", "picture.png", "--dir", "three"))
    succeeded(run("denoise", "--seed", "3", "--dir", "three"))
    succeeded(run("decode", "--dir", "three", "--out", "video.mp4"))
    tensors = load_safetensors(Path("three") / EMBEDDINGS_FILE)
    assert tensors.keys() == {*HunyuanVideoConditioning._fields} - {VIDEO_SHAPE_TENSOR}
    assert {len(x) for x in tensors.values()} == {1}
    assert tensors["prompt_embeds"].shape == (1, 1000, 24)
    assert tensors["prompt_embeds_2"].shape == (1, 256, 16)
    assert tensors["image_embeds"].shape == (1, 4, 16)
    assert tensors["prompt_embeds_mask"].dtype == bool
    pipe = wanjax.load(models["image"])
    conditioning = pipe.encode(QUOTED, image=picture)
    latents = pipe.denoise(conditioning, seed=3)
    assert latents.shape == (1, 4, 2, 2, 4)  # the model's size of the nearest proportions: 32 × 64
    np.testing.assert_array_equal(load_safetensors(Path("three") / LATENTS_FILE)["latents"], latents)


@pytest.mark.parametrize("prompt", quick([QUOTED], ["a cat", QUOTED]))
def test_prompts_of_different_lengths_share_a_batch(pipes, prompt):
    """The negative prompt is longer, and has no quoted text."""
    pipe = pipes["text"]
    conditioning = pipe.encode(prompt, LONG_PROMPT)
    separate, in_one_batch = (
        np.asarray(pipe.denoise(conditioning, batch_guidance=batched)) for batched in (False, True)
    )
    assert error(in_one_batch, separate.astype(np.float64)) <= 1e-5


@pytest.mark.slow  # tests/parity/test_hunyuan_transformer.py has a quick test of the network on a mesh
def test_eight_devices_agree_with_one(models, picture):
    one_device, eight_devices = (wanjax.load(models["image"], mesh=mesh) for mesh in (None, "dp=2,sp=2,tp=2"))
    conditioning = one_device.encode(QUOTED, image=picture)
    for name, array in eight_devices.encode_prompts(QUOTED)._asdict().items():
        if array is not None:
            np.testing.assert_allclose(np.float32(array), np.float32(getattr(conditioning, name)), atol=1e-5)
    latents, eight_device_latents = (
        np.asarray(pipe.denoise(conditioning, seed=3)) for pipe in (one_device, eight_devices)
    )
    assert error(eight_device_latents, latents.astype(np.float64)) <= 1e-5


def test_quoted_text_and_masks_of_a_prompt_matter(pipes):
    pipe = pipes["text"]
    conditioning = pipe.encode(QUOTED, LONG_PROMPT)
    latents = np.asarray(pipe.denoise(conditioning), np.float64)
    changed_padding = jnp.where(conditioning.prompt_embeds_mask[:, :, None], conditioning.prompt_embeds, 100.0)
    float_masks = {
        name: getattr(conditioning, name).astype(jnp.float32) for name in conditioning._fields if "mask" in name
    }
    assert (
        error(np.asarray(pipe.denoise(conditioning._replace(prompt_embeds=changed_padding, **float_masks))), latents)
        <= 1e-6
    )
    without_quote = conditioning._replace(prompt_embeds_mask_2=jnp.zeros_like(conditioning.prompt_embeds_mask_2))
    assert error(np.asarray(pipe.denoise(without_quote)), latents) > 1e-3


def make_text(tokens: int, glyphs: int, dtype: Any = bool) -> Text:
    masks = [(np.arange(length) < count)[None].astype(dtype) for length, count in ((1000, tokens), (256, glyphs))]
    return Text(np.zeros((1, 1000, 2)), masks[0], np.zeros((1, 256, 3)), masks[1])


@pytest.mark.parametrize(
    ("tokens", "length"), [(1, 128), (128, 128), (129, 256), (256, 256), (512, 512), (513, 1000), (1000, 1000)]
)
def test_texts_are_cut_to_the_shortest_allowed_length(tokens, length):
    for dtype in (bool, np.float32):
        text, long_text = make_text(tokens, 0, dtype), make_text(140, 1, dtype)
        [lengths] = used_lengths([text], batched=False)
        cut_text = lengths.cut(text)
        assert (cut_text.embeds.shape, cut_text.glyphs.shape) == ((1, length, 2), (1, 0, 3))
        assert (int(cut_text.mask.sum()), cut_text.mask.dtype) == (tokens, bool)
        lengths_of_texts = used_lengths([text, long_text], batched=True)
        cut_texts = [lengths.cut(text) for lengths, text in zip(lengths_of_texts, (text, long_text), strict=True)]
        assert {text.embeds.shape for text in cut_texts} == {(1, max(length, 256), 2)}
        assert {text.glyph_mask.shape for text in cut_texts} == {(1, 256)}
    assert (LENGTHS[-1], GLYPH_LENGTHS) == (1000, (0, 256))


def test_the_distilled_network_gets_the_next_timestep(tmp_path, picture):
    pipe = wanjax.load(tiny_hunyuan_checkpoint(tmp_path, pictured=True, use_meanflow=True))
    conditioning, settings = pipe.encode("a cat", image=picture), pipe.settings(size=(32, 64))
    schedule, _ = init_state(pipe, conditioning, settings)
    denoiser = pipe.model.denoiser
    for index, next_timestep in enumerate([*schedule.timesteps[1:], 0.0]):
        timestep, result_next = denoiser.timesteps(one_step(schedule, index))
        assert (float(timestep), float(result_next)) == (
            float(schedule.timesteps[index]),
            pytest.approx(float(next_timestep)),
        )


def test_truncated_prompts_and_quotations_are_reported(models):
    pipe = wanjax.load(models["text"])
    assert pipe.truncations(QUOTED) == ()
    truncated = [cut.name for cut in pipe.truncations(f'a cat says "{"meow " * 400}"')]
    assert truncated == ["prompt", "quoted text"]


TOO_LONG = np.zeros((133, 32, 32, 3), np.uint8)
TEXT_MODEL_ERRORS = [  # calls of a text-to-video model, and words of the message
    (lambda pipe: pipe.settings(frames=133), "133 frames 129"),
    (lambda pipe: pipe.encode_video(TOO_LONG), "133 frames 129"),
    (lambda pipe: pipe.decode(latents_with_frames(pipe, 34)), "133 frames 129"),
    (lambda pipe: next(pipe.decode_chunks(latents_with_frames(pipe, 34))), "133 frames 129"),
    (lambda pipe: pipe.settings(flow_shift=0.0), "flow_shift 0.0 finite number 0"),
    (lambda pipe: pipe.encode("a cat", image=TOO_LONG[0]), "text video image"),
    (
        lambda pipe: pipe.denoise(change_conditioning(pipe, "prompt_embeds", lambda x: x.prompt_embeds[..., :5])),
        "prompt_embeds float32 [1, 1000, 5] encode prompt",
    ),
    (
        lambda pipe: pipe.denoise(change_conditioning(pipe, "prompt_embeds_mask_2", lambda x: x.prompt_embeds_mask)),
        "prompt_embeds_mask_2 bool encode prompt",
    ),
]


def latents_with_frames(pipe, count):
    return np.zeros((1, pipe.model.vae.latent_channels, count, 2, 2), np.float32)


def change_conditioning(pipe, name, change):
    """Return the conditioning of a prompt, with one entry changed."""
    conditioning = pipe.encode("a cat")
    return conditioning._replace(**{name: change(conditioning)})


@pytest.mark.parametrize(("call", "words"), TEXT_MODEL_ERRORS)
def test_unusable_inputs_of_a_text_model_are_refused(pipes, call, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        call(pipes["text"])


def with_another_guider(t2v_pipe, i2v_pipe, picture, folder):
    guider = tiny_hunyuan_checkpoint(folder) / "guider" / "guider_config.json"
    guider.write_text(json.dumps({"guidance_scale": 6.0, "guidance_rescale": 0.7}))
    return wanjax.load(folder)


PICTURE_ERRORS = {  # words of the message, and a call with a text-to-video and an image-to-video pipeline
    "image video": lambda t2v_pipe, i2v_pipe, *_: i2v_pipe.encode("a cat"),
    "image_embeds missing needs": lambda t2v_pipe, i2v_pipe, *_: i2v_pipe.denoise(t2v_pipe.encode("a cat")),
    "image_embeds text video not use": (
        lambda t2v_pipe, i2v_pipe, picture, _: t2v_pipe.denoise(i2v_pipe.encode("a cat", image=picture))
    ),
    "64x32 48x32 encode size": (
        lambda t2v_pipe, i2v_pipe, picture, _: i2v_pipe.denoise(i2v_pipe.encode("a cat", image=picture), size=(32, 48))
    ),
    "guidance_rescale 0.7 0.0": with_another_guider,
}


@pytest.mark.parametrize("words", PICTURE_ERRORS)
def test_unusable_inputs_of_an_image_model_are_refused(pipes, picture, tmp_path, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        PICTURE_ERRORS[words](pipes["text"], pipes["image"], picture, tmp_path)


def test_published_checkpoints_have_two_names():
    for name in ("HunyuanVideo-1.5-Diffusers-720p_i2v", "HunyuanVideo-1.5-720p_i2v"):
        description = model_description(f"hunyuanvideo-community/{name}")
        settings = description.settings
        assert settings.model == "hunyuanvideo1.5-720p-i2v"
        assert (settings.flow_shift, settings.guidance_scale, settings.size) == (7.0, 6.0, (720, 1280))
        networks = {"text_encoder", "text_encoder_2", "image_encoder", "transformer", "vae"}
        assert description.model.spec.networks.keys() == networks
    with pytest.raises(WanjaxError, match=line_with_words("hunyuanvideo1.5-")):
        find_checkpoint("hunyuanvideo1.5-720p-ti2v")
