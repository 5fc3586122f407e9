# SPDX-License-Identifier: Apache-2.0
"""Videos with a clip, a mask and reference pictures equal those of diffusers' WanVACEPipeline."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import WanVACEPipeline, WanVACETransformer3DModel
from PIL import Image

import wanjax
from tests.parity.references import (
    MAX_LATENT_ERROR,
    NEGATIVE_PROMPT,
    PROMPT,
    emphasise_mlps,
    largest_error,
    psnr,
    randomise,
    relative_l2,
    small_components,
)

pytestmark = pytest.mark.usefixtures("cached_programs")

HEIGHT, WIDTH, FRAMES, STEPS, GUIDANCE = 32, 48, 9, 3, 5.0
RANDOM = np.random.default_rng(0)
CLIP = RANDOM.integers(0, 256, (FRAMES, HEIGHT, WIDTH, 3), dtype=np.uint8)
MASK = RANDOM.choice(np.array([0, 100, 200, 255], np.uint8), (FRAMES, HEIGHT, WIDTH, 1)).repeat(3, axis=-1)
REFERENCES = [RANDOM.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((64, 40), (16, 56))]


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> WanVACEPipeline:
    torch.manual_seed(0)
    components = small_components(tmp_path_factory.mktemp("tokenizer"))
    transformer = WanVACETransformer3DModel(
        num_attention_heads=3, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=48, freq_dim=64,
        ffn_dim=160, num_layers=4, vace_layers=[0, 2], vace_in_channels=2 * 4 + 64,
    ).eval()  # fmt: skip
    randomise(transformer, seed=1)
    emphasise_mlps(transformer)
    pipe = WanVACEPipeline(transformer=transformer, **components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    reference.save_pretrained(folder)
    return folder


def images(pictures: np.ndarray | list[np.ndarray]) -> list[Image.Image]:
    return [Image.fromarray(picture) for picture in pictures]


@torch.no_grad()
def condition(pipe: WanVACEPipeline, **options: list[Image.Image] | None) -> np.ndarray:
    names = ("video", "mask", "reference_images")
    clip, mask, references = pipe.preprocess_conditions(
        *(options.get(name) for name in names), 1, HEIGHT, WIDTH, FRAMES, torch.float32, None
    )
    latents = pipe.prepare_video_latents(clip, mask, references)
    return torch.cat([latents, pipe.prepare_masks(mask, references)], dim=1).numpy()


def test_conditions_equal_those_of_diffusers(reference, folder):
    """Compare the conditions of all inputs and of no input. diffusers takes references in the opposite order."""
    pipe = wanjax.load(folder)
    settings = {"size": (HEIGHT, WIDTH), "frames": FRAMES}
    inputs = {"video": CLIP, "mask": MASK, "references": REFERENCES}
    reference_inputs = {"video": images(CLIP), "mask": images(MASK), "reference_images": images(REFERENCES[::-1])}
    for options, reference_options in (
        (inputs, reference_inputs),
        ({}, {}),
        ({"video": CLIP}, {"video": images(CLIP)}),
    ):
        video_condition = pipe.model.encode_inputs(pipe.runtime, *pipe.prepare(**options, **settings))["condition"]
        assert relative_l2(video_condition, condition(reference, **reference_options)) <= 1e-5


@torch.no_grad()
def test_every_step_and_every_frame_equal_those_of_diffusers(reference, folder):
    noise = torch.randn(1, 4, 2 + 3, HEIGHT // 8, WIDTH // 8, generator=torch.Generator().manual_seed(7))
    exact, latents = [], []
    frames = reference(
        PROMPT, NEGATIVE_PROMPT, images(CLIP), images(MASK), images(REFERENCES[::-1]), height=HEIGHT, width=WIDTH,
        num_frames=FRAMES, num_inference_steps=STEPS, guidance_scale=GUIDANCE, latents=noise,
        callback_on_step_end=lambda pipe, i, t, values: exact.append(values["latents"].numpy()) or {},
    ).frames[0]  # fmt: skip
    pipe = wanjax.load(folder)
    settings = {"size": (HEIGHT, WIDTH), "frames": FRAMES}
    embeddings = pipe.encode(PROMPT, NEGATIVE_PROMPT, video=CLIP, mask=MASK, references=REFERENCES, **settings)
    last = pipe.denoise(
        embeddings, steps=STEPS, guidance_scale=GUIDANCE, flow_shift=3.0, sigmas="diffusers",
        noise=jnp.asarray(noise.numpy()), callback=lambda step: latents.append(np.asarray(step.latents)), **settings,
    )  # fmt: skip
    assert largest_error(latents, exact) <= MAX_LATENT_ERROR
    np.testing.assert_array_equal(last, latents[-1][:, :, 2:])
    assert psnr(pipe.decode(last, jnp.float32), frames) >= 60
