# SPDX-License-Identifier: Apache-2.0
"""Whole videos of Wan Animate against diffusers' pipeline, with the same checkpoint, prompt and noise."""

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanAnimatePipeline
from diffusers.pipelines.wan import pipeline_wan_animate
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import wanjax
from tests.parity.animate_references import animate_networks
from tests.parity.pose_references import pose_transformer
from tests.parity.references import MAX_LATENT_ERROR, NEGATIVE_PROMPT, PROMPT, relative_l2
from tests.support.quick import quick

pytestmark = [
    pytest.mark.usefixtures("cached_programs"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:guidance is off"),  # the reference needs a negative prompt without guidance too
]
SIZE, FACE_SIZE = (48, 80), 32
RANDOM = np.random.default_rng(0)


class Case(NamedTuple):
    """The clips, segments and settings of a video."""

    replaces: bool
    frames: int
    length: int
    overlap: int
    steps: int
    segments: int
    guidance_scale: float = 1.0
    picture: tuple[int, int] = (100, 71)
    clip: tuple[int, int] = SIZE


CASES = {
    "animate": Case(False, 9, 9, 1, 5, 1),
    "animate, two segments": Case(False, 20, 13, 1, 3, 2, picture=(61, 130), clip=(60, 90)),
    "animate, guided, five carried frames": Case(False, 16, 13, 5, 2, 2, guidance_scale=3.0),
    "replace": Case(True, 9, 9, 1, 5, 1, clip=(60, 90)),
    "replace, two segments": Case(True, 20, 13, 5, 2, 2, picture=(61, 130)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def reference(folder, tmp_path_factory) -> Any:
    """Return diffusers' pipeline, which is saved in the folder."""
    components = animate_networks(tmp_path_factory.mktemp("tokenizer"), layers=2)
    components |= {"transformer": pose_transformer(image_dim=1280)}
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
    processor: Any = CLIPImageProcessorPil(size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224})
    pipe = WanAnimatePipeline(**components, scheduler=scheduler, image_processor=processor)
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe


QUICK = ["animate, guided, five carried frames", "replace, two segments"]  # of the same length, so of the same programs


@pytest.fixture(params=quick(QUICK, CASES))
def case(request) -> Case:
    return CASES[request.param]


def random_clip(frames: int, size: tuple[int, int]) -> np.ndarray:
    """Return a random clip whose frames are smooth, so that filters do not process only noise."""
    height, width = size
    coarse = RANDOM.integers(0, 256, (frames, 5, 7, 3), dtype=np.uint8)
    return np.stack([np.asarray(Image.fromarray(x).resize((width, height), Image.Resampling.BICUBIC)) for x in coarse])


def inputs_of(case: Case) -> dict[str, Any]:
    """Return the inputs by name; the mask has grey levels and colours, and the face another size."""
    inputs: dict[str, Any] = {"image": random_clip(1, case.picture)[0], "video": random_clip(case.frames, case.clip)}
    inputs["face"] = random_clip(case.frames - 2, (40, 40))  # shorter than the pose clip
    if case.replaces:
        inputs |= {"background": random_clip(case.frames, case.clip), "mask": random_clip(case.frames, case.clip)}
    return inputs


@torch.no_grad()
def expected_video(
    pipe: Any, case: Case, inputs: dict[str, Any], noise: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return diffusers' frames in [0, 1], and the latents of each segment, with the picture's frame."""
    latents, next_noises = [], iter(torch.from_numpy(noise))
    clips = {name: list(map(Image.fromarray, x)) for name, x in inputs.items() if x.ndim == 4}

    def next_noise(shape: Any, **options: Any) -> torch.Tensor:
        return next(next_noises).reshape(shape)

    def record_latents(pipe: Any, step: int, t: Any, state: dict[str, Any]) -> dict[str, Any]:
        latents.append(state["latents"].numpy().copy())
        return state

    with mock.patch.object(pipeline_wan_animate, "randn_tensor", next_noise):
        frames = pipe(
            image=Image.fromarray(inputs["image"]), pose_video=clips["video"], face_video=clips["face"],
            background_video=clips.get("background"), mask_video=clips.get("mask"), prompt=PROMPT,
            negative_prompt=NEGATIVE_PROMPT, height=SIZE[0], width=SIZE[1], segment_frame_length=case.length,
            num_inference_steps=case.steps, mode="replace" if case.replaces else "animate",
            prev_segment_conditioning_frames=case.overlap, guidance_scale=case.guidance_scale,
            callback_on_step_end=record_latents,
        ).frames[0]  # fmt: skip
    return np.asarray(frames), latents


def make_video(
    folder: Path, case: Case, inputs: dict[str, Any], noise: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the frames, and the latents of each step."""
    latents: list[np.ndarray] = []
    video = wanjax.load(folder)(
        PROMPT, negative_prompt=NEGATIVE_PROMPT, **inputs, size=SIZE, frames=case.length, overlap=case.overlap,
        steps=case.steps, guidance_scale=case.guidance_scale, follow="diffusers", noise=noise,
        callback=lambda step: latents.append(np.asarray(step.latents)),
    )  # fmt: skip
    return video.frames, latents


def noise_of(case: Case) -> np.ndarray:
    shape = (case.segments, 16, (case.length - 1) // 4 + 2, SIZE[0] // 8, SIZE[1] // 8)
    return RANDOM.normal(size=shape).astype(np.float32)


def test_every_segment_and_every_frame_equal_those_of_diffusers(reference, folder, case):
    inputs, noise = inputs_of(case), noise_of(case)
    exact_frames, exact = expected_video(reference, case, inputs, noise)
    assert len(exact) == case.segments * case.steps
    frames, latents = make_video(folder, case, inputs, noise)
    for number, (result, exact_latents) in enumerate(zip(latents, exact, strict=True)):
        error = relative_l2(result, exact_latents)
        print(f"step {number}: {error:.1e}")
        assert error <= MAX_LATENT_ERROR
    assert frames.shape == exact_frames.shape == (case.frames, *SIZE, 3)
    assert np.abs(frames / 255 - exact_frames).max() <= 0.5 / 255 + 1e-5  # bytes are rounded


def test_every_input_changes_the_latents(reference, folder):
    case = CASES["replace"]
    inputs, noise = inputs_of(case), noise_of(case)
    _, latents = make_video(folder, case, inputs, noise)
    for name, values in inputs.items():
        _, changed = make_video(folder, case, inputs | {name: 255 - values}, noise)
        change = relative_l2(changed[-1], latents[-1])
        print(f"{name}: {change:.1e}")
        assert change > 50 * MAX_LATENT_ERROR, name
