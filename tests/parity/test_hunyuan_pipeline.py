# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo's pipelines against diffusers': checkpoints that diffusers wrote, the same prompts, pictures, noise."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor
from PIL import Image

import wanjax
from tests.parity.hunyuan_references import CHANNELS, SIDE, image_to_video, text_to_video
from tests.parity.references import MAX_LATENT_ERROR, largest_error, psnr, relative_l2
from wanjax.pipelines.hunyuanvideo.conditioning import LENGTHS, candidate_sizes, size_for_image

pytestmark = pytest.mark.usefixtures("cached_programs")

PROMPT, NEGATIVE, QUOTED = "a cat plays the piano", "a blue dog", 'a sign that says "hello" and “你好”'
HEIGHT, WIDTH, FRAMES, STEPS = 48, 64, 5, 3
LANDSCAPE, PORTRAIT = (52, 77), (60, 33)  # the former's video is of HEIGHT × WIDTH


def random_noise(height: int, width: int) -> torch.Tensor:
    shape = (1, CHANNELS, (FRAMES - 1) // 4 + 1, height // 16, width // 16)
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def expected_video(pipe: Any, noise: torch.Tensor, **arguments: Any) -> tuple[list[np.ndarray], np.ndarray]:
    """Return diffusers' latents [1 C T H W] after every step, and its frames."""
    latents: list[np.ndarray] = []

    def step(*args: Any, **options: Any) -> Any:
        (x,) = FlowMatchEulerDiscreteScheduler.step(pipe.scheduler, *args, **options)
        latents.append(x.numpy())
        return (x,)

    pipe.scheduler.step = step
    options = {"num_frames": FRAMES, "num_inference_steps": STEPS, "latents": noise, "output_type": "np"}
    frames = pipe(**{"prompt": PROMPT, "negative_prompt": NEGATIVE} | options | arguments).frames[0]
    return latents, frames


def make_video(folder: Path, noise: torch.Tensor, prompt: str, image: Any = None, **settings: Any) -> Any:
    """Return the latents after every step, and the frames."""
    pipe = wanjax.load(folder / "checkpoint")
    settings |= {"steps": STEPS, "frames": FRAMES}
    # the size that is computed without this setting too, but without a message
    size = {} if image is None else {"size": size_for_image(image.shape, SIDE, 16)}
    encoded = pipe.encode(prompt, NEGATIVE, image=image, **size, **settings)
    latents: list[np.ndarray] = []
    final_latents = pipe.denoise(
        encoded, noise=jnp.asarray(noise.numpy()), callback=lambda step: latents.append(np.asarray(step.latents)),
        **settings,
    )  # fmt: skip
    np.testing.assert_array_equal(final_latents, latents[-1])
    return latents, pipe.decode(final_latents, jnp.float32)


def compare(video: Any, reference_video: tuple[list[np.ndarray], np.ndarray]) -> None:
    assert len(video[0]) == len(reference_video[0]) == STEPS
    assert largest_error(video[0], reference_video[0]) <= MAX_LATENT_ERROR
    assert video[1].shape == reference_video[1].shape
    assert psnr(video[1], reference_video[1]) >= 60


@pytest.mark.slow  # a video from a picture, below, runs the same code, and its prompt has a quotation
@pytest.mark.parametrize("prompt", [PROMPT, QUOTED])
def test_text_to_video_equals_diffusers(tmp_path, prompt):
    noise, size = random_noise(HEIGHT, WIDTH), {"height": HEIGHT, "width": WIDTH}
    pipe = text_to_video(tmp_path)
    expected_unquoted, expected_quoted = (
        expected_video(pipe, noise, prompt=options, **size) for options in (PROMPT, QUOTED)
    )
    assert relative_l2(expected_unquoted[0][-1], expected_quoted[0][-1]) > 1e-2
    compare(make_video(tmp_path, noise, prompt, **size), expected_unquoted if prompt == PROMPT else expected_quoted)


@pytest.mark.slow
def test_text_to_video_without_guidance_equals_diffusers(tmp_path):
    noise, size = random_noise(HEIGHT, WIDTH), {"height": HEIGHT, "width": WIDTH}
    expected = expected_video(text_to_video(tmp_path, 1.0), noise, prompt=QUOTED, **size)
    compare(make_video(tmp_path, noise, QUOTED, **size), expected)


def random_picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def test_image_to_video_equals_diffusers(tmp_path):
    image = random_picture(*LANDSCAPE)
    height, width = size_for_image(image.shape, SIDE, 16)
    noise = random_noise(height, width)
    expected = expected_video(image_to_video(tmp_path), noise, prompt=QUOTED, image=Image.fromarray(image))
    assert expected[1].shape[1:3] == (height, width)
    compare(make_video(tmp_path, noise, QUOTED, image), expected)


@pytest.mark.slow  # test_hunyuan_transformer.py has a quick test of the next timestep, and a video is made above
@pytest.mark.parametrize(("height", "width"), [LANDSCAPE, PORTRAIT])
def test_a_distilled_model_equals_diffusers(tmp_path, height, width):
    """Test a network with the next timestep as input, without guidance."""
    image = random_picture(height, width)
    noise = random_noise(*size_for_image(image.shape, SIDE, 16))
    expected = expected_video(image_to_video(tmp_path, 1.0, use_meanflow=True), noise, image=Image.fromarray(image))
    compare(make_video(tmp_path, noise, PROMPT, image), expected)


@pytest.mark.parametrize("side", [640, 960])
def test_the_size_for_a_picture_equals_that_of_diffusers(side):
    """Test both the list of sizes and the choice from it."""
    processor = HunyuanVideo15ImageProcessor()
    for height, width in [(9, 16), (16, 9), (1, 1), (720, 1283), (1000, 999), (999, 1000), (100, 1), (1, 100), (3, 4)]:
        expected = processor.calculate_default_height_width(height, width, side)
        assert size_for_image((height, width, 3), side, 16) == expected, (height, width)
    random = np.random.default_rng(side)
    for height, width in random.integers(200, 3000, (50, 2)).tolist():
        assert size_for_image((height, width, 3), side, 16) == processor.calculate_default_height_width(
            height, width, side
        )
    assert (max(candidate_sizes(side, 16))[0], LENGTHS[-1]) == (2 * side, 1000)
