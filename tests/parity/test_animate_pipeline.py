# SPDX-License-Identifier: Apache-2.0
"""Videos of Wan Animate 2 equal those of diffusers with the same checkpoint, prompts and noise."""

from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.modular_pipelines.wan_animate_2 import WanAnimate2Blocks, WanAnimate2DistilledBlocks, denoise
from PIL import Image

import wanjax
from tests.parity.animate_references import animate_networks, save_checkpoint, uncompiled_mask
from tests.parity.references import MAX_LATENT_ERROR, NEGATIVE_PROMPT, PROMPT, relative_l2
from tests.support.quick import quick

pytestmark = [
    pytest.mark.usefixtures("cached_programs"),
    pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:guidance is off"),  # the reference needs a negative prompt without guidance too
]
CLIP_PROMPT = "a person  walks &amp; waves"
AREA = (48, 64)
RANDOM = np.random.default_rng(0)


class Case(NamedTuple):
    """The settings of a video.

    Attributes:
        distilled: Whether the weights are distilled.
        clip_frames: The number of frames of the driving clip.
        overlap: The number of frames that two windows share.
        steps: The number of steps of each window.
        segments: The expected number of windows.
        picture: The height and width of the picture.
        clip: The height and width of the clip.
    """

    distilled: bool
    clip_frames: int
    overlap: int
    steps: int
    segments: int
    picture: tuple[int, int] = (100, 70)
    clip: tuple[int, int] = (60, 90)


LENGTH, LAYERS = 9, 11
CASES = {
    "base": Case(False, LENGTH, 1, 6, 1),
    "base, two segments": Case(False, 11, 5, 3, 2, picture=(61, 97), clip=(80, 40)),
    "distilled, three segments": Case(True, 22, 1, 2, 3, picture=(64, 48)),
}


@pytest.fixture(scope="module")
def networks(tmp_path_factory) -> dict[str, Any]:
    return animate_networks(tmp_path_factory.mktemp("tokenizer"), LAYERS)


@pytest.fixture(params=quick(["base, two segments"], CASES))
def case(request) -> Case:
    return CASES[request.param]


def scheduler(case: Case) -> Any:
    if case.distilled:
        return FlowMatchEulerDiscreteScheduler(shift=5.0)
    return DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)


def random_clip(frames: int, size: tuple[int, int]) -> np.ndarray:
    """Return a random clip with smooth frames, so that filters do not only see noise."""
    height, width = size
    coarse = RANDOM.integers(0, 256, (frames, 5, 7, 3), dtype=np.uint8)
    return np.stack([np.asarray(Image.fromarray(x).resize((width, height), Image.Resampling.BICUBIC)) for x in coarse])


@torch.no_grad()
def expected_video(
    networks: dict[str, Any], case: Case, picture: np.ndarray, clip: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return diffusers' frames in [0, 1], and the latents of each window without the picture's frame."""
    pipe: Any = (WanAnimate2DistilledBlocks() if case.distilled else WanAnimate2Blocks()).init_pipeline()
    pipe.update_components(scheduler=scheduler(case), **networks)
    latents, decode = [], denoise.decode_vae

    def decode_and_record(vae: Any, x: torch.Tensor) -> torch.Tensor:
        latents.append(x.numpy().copy())
        return decode(vae, x)

    with uncompiled_mask(), mock.patch.object(denoise, "decode_vae", decode_and_record):
        frames = pipe(
            prompt=PROMPT, negative_prompt=NEGATIVE_PROMPT, prompt_ref=CLIP_PROMPT, image=Image.fromarray(picture),
            driving_video=list(map(Image.fromarray, clip)), height=AREA[0], width=AREA[1],
            segment_frame_length=LENGTH, prev_segment_conditioning_frames=case.overlap,
            num_inference_steps=case.steps, generator=torch.Generator().manual_seed(7), output="videos",
        )  # fmt: skip
    return np.asarray(frames[0]), latents


def test_every_window_and_every_frame_equal_those_of_diffusers(networks, case, tmp_path):
    save_checkpoint(tmp_path, networks, scheduler(case))
    [picture], clip = random_clip(1, case.picture), random_clip(case.clip_frames, case.clip)
    frames, exact = expected_video(networks, case, picture, clip)
    assert len(exact) == case.segments
    generator = torch.Generator().manual_seed(7)
    shape = (exact[0].shape[0], exact[0].shape[1] + 1, *exact[0].shape[2:])
    noise = np.stack([torch.randn(shape, generator=generator).numpy() for _ in exact])
    pipe, latents = wanjax.load(tmp_path, scheduler="euler" if case.distilled else None), []
    video = pipe(
        PROMPT, negative_prompt=NEGATIVE_PROMPT, clip_prompt=CLIP_PROMPT, image=picture, video=clip, size=AREA,
        frames=LENGTH, overlap=case.overlap, steps=case.steps, follow="diffusers", noise=noise,
        callback=lambda step: latents.append(np.asarray(step.latents)),
    )  # fmt: skip
    last_steps = latents[case.steps - 1 :: case.steps]
    for number, (result, reference) in enumerate(zip(last_steps, exact, strict=True)):
        error = relative_l2(result[0, :, 1:], reference)
        print(f"window {number}: {error:.1e}")
        assert error <= MAX_LATENT_ERROR
    assert video.frames.shape == frames.shape
    assert np.abs(video.frames / 255 - frames).max() <= 0.5 / 255 + 1e-5  # bytes are rounded
