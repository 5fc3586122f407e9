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
from tests.parity.references import BAR, largest_error, psnr, relative_l2
from tests.support.quick import quick
from wanjax.pipelines.hunyuanvideo.conditioning import LENGTHS, candidate_sizes, size_for_image

pytestmark = pytest.mark.usefixtures("cached_programs")

PROMPT, NEGATIVE, QUOTED = "a cat plays the piano", "a blue dog", 'a sign that says "hello" and “你好”'
HEIGHT, WIDTH, FRAMES, STEPS = 48, 64, 5, 3
LANDSCAPE, PORTRAIT = (52, 77), (60, 33)  # the former's video is of HEIGHT × WIDTH


def noise_for(height: int, width: int) -> torch.Tensor:
    shape = (1, CHANNELS, (FRAMES - 1) // 4 + 1, height // 16, width // 16)
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def expected(pipe: Any, noise: torch.Tensor, **arguments: Any) -> tuple[list[np.ndarray], np.ndarray]:
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


def answer(folder: Path, noise: torch.Tensor, prompt: str, image: Any = None, **settings: Any) -> Any:
    """Return our latents after every step, and our frames."""
    pipe = wanjax.load(folder / "checkpoint")
    settings |= {"steps": STEPS, "frames": FRAMES}
    size = {} if image is None else {"size": size_for_image(image.shape, SIDE, 16)}  # that of no size, without a note
    encoded = pipe.encode(prompt, NEGATIVE, image=image, **size, **settings)
    latents: list[np.ndarray] = []
    last = pipe.denoise(
        encoded, noise=jnp.asarray(noise.numpy()), callback=lambda step: latents.append(np.asarray(step.latents)),
        **settings,
    )  # fmt: skip
    np.testing.assert_array_equal(last, latents[-1])
    return latents, pipe.decode(last, jnp.float32)


def compare(ours: Any, theirs: tuple[list[np.ndarray], np.ndarray]) -> None:
    assert len(ours[0]) == len(theirs[0]) == STEPS
    assert largest_error(ours[0], theirs[0]) <= BAR
    assert ours[1].shape == theirs[1].shape
    assert psnr(ours[1], theirs[1]) >= 60


@pytest.mark.slow  # a video from a picture, below, goes the same way, and its prompt quotes
@pytest.mark.parametrize("prompt", [PROMPT, QUOTED])
def test_text_to_video(tmp_path, prompt):
    noise, size = noise_for(HEIGHT, WIDTH), {"height": HEIGHT, "width": WIDTH}
    pipe = text_to_video(tmp_path)
    unquoted, quoted = (expected(pipe, noise, prompt=options, **size) for options in (PROMPT, QUOTED))
    assert relative_l2(unquoted[0][-1], quoted[0][-1]) > 1e-2
    compare(answer(tmp_path, noise, prompt, **size), unquoted if prompt == PROMPT else quoted)


@pytest.mark.slow
def test_text_to_video_without_guidance(tmp_path):
    noise, size = noise_for(HEIGHT, WIDTH), {"height": HEIGHT, "width": WIDTH}
    theirs = expected(text_to_video(tmp_path, 1.0), noise, prompt=QUOTED, **size)
    compare(answer(tmp_path, noise, QUOTED, **size), theirs)


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def test_image_to_video(tmp_path):
    image = picture(*LANDSCAPE)
    height, width = size_for_image(image.shape, SIDE, 16)
    noise = noise_for(height, width)
    theirs = expected(image_to_video(tmp_path), noise, prompt=QUOTED, image=Image.fromarray(image))
    assert theirs[1].shape[1:3] == (height, width)
    compare(answer(tmp_path, noise, QUOTED, image), theirs)


@pytest.mark.parametrize(("tall", "wide"), quick([LANDSCAPE], [LANDSCAPE, PORTRAIT]))
def test_few_steps(tmp_path, tall, wide):
    """A network with the next timestep as input, without guidance."""
    image = picture(tall, wide)
    noise = noise_for(*size_for_image(image.shape, SIDE, 16))
    theirs = expected(image_to_video(tmp_path, 1.0, use_meanflow=True), noise, image=Image.fromarray(image))
    compare(answer(tmp_path, noise, PROMPT, image), theirs)


@pytest.mark.parametrize("side", [640, 960])
def test_sizes_of_pictures(side):
    """The reference's list of sizes, and its choice for a picture."""
    processor = HunyuanVideo15ImageProcessor()
    for height, width in [(9, 16), (16, 9), (1, 1), (720, 1283), (1000, 999), (999, 1000), (100, 1), (1, 100), (3, 4)]:
        theirs = processor.calculate_default_height_width(height, width, side)
        assert size_for_image((height, width, 3), side, 16) == theirs, (height, width)
    random = np.random.default_rng(side)
    for height, width in random.integers(200, 3000, (50, 2)).tolist():
        assert size_for_image((height, width, 3), side, 16) == processor.calculate_default_height_width(
            height, width, side
        )
    assert (max(candidate_sizes(side, 16))[0], LENGTHS[-1]) == (2 * side, 1000)
