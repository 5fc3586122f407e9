# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's pipelines give diffusers' videos, from the same checkpoints, prompts, pictures and noise."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import CogVideoXVideoToVideoPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.schedulers import scheduling_dpm_cogvideox
from PIL import Image

import wanjax
from tests.parity.cogvideox_references import CHANNELS, HEIGHT, LATENTS, WIDTH, reference
from tests.parity.references import MAX_LATENT_ERROR, largest_error, psnr
from tests.support.quick import quick

pytestmark = pytest.mark.usefixtures("cached_programs")

PROMPT, NEGATIVE = "a red circle moving right", "a blue cat"
STEPS, GUIDANCE = 6, 6.0


def noise_for(frames: int, padded: bool, pictures: str = "") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    count = (frames - 1) // 4 + 1
    count += padded * (count % 2)
    shape = (1, CHANNELS, count, *LATENTS)
    noise = {"noise": torch.randn(shape, generator=generator)}
    noise["step_noise"] = torch.randn((STEPS, *shape), generator=generator)
    if pictures:
        shape = (1, CHANNELS, 1 if pictures == "image" else (frames - 1) // 4 + 1, *LATENTS)
        noise[f"{pictures}_noise"] = torch.randn(shape, generator=generator)
    return noise


@torch.no_grad()
def expected_video(
    pipe: Any, noise: dict[str, torch.Tensor], monkeypatch, **options
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return diffusers' latents [1 C T H W] after every step, and its frames. `noise` replaces all random draws."""
    latents: list[np.ndarray] = []

    def next_noise(shape, **_):  # from the second step on, there are two draws, and only the last is used
        return noise["step_noise"][len(latents)].transpose(1, 2)

    def sample(posterior, generator=None):
        (sample_noise,) = (noise[name] for name in ("image_noise", "video_noise") if name in noise)
        return posterior.mean + posterior.std * sample_noise

    monkeypatch.setattr(scheduling_dpm_cogvideox, "randn_tensor", next_noise)
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", sample)
    frames = pipe(
        prompt=PROMPT, negative_prompt=NEGATIVE, height=HEIGHT, width=WIDTH, num_inference_steps=STEPS,
        max_sequence_length=12, output_type="np",
        callback_on_step_end=lambda pipe, i, t, v: latents.append(v["latents"].transpose(1, 2).numpy()) or {},
        **{"guidance_scale": GUIDANCE} | options,
    ).frames[0]  # fmt: skip
    return latents, frames


def make_video(folder: Path, noise: dict[str, torch.Tensor], **options) -> tuple[list[np.ndarray], np.ndarray]:
    pipe = wanjax.load(folder / "checkpoint")
    settings = {
        "size": (HEIGHT, WIDTH),
        "steps": STEPS,
        "guidance_scale": GUIDANCE,
        "follow": "diffusers",
    } | options
    frames = settings["frames"]
    pictures = {name: settings.pop(name) for name in ("image", "video") if name in settings}
    inputs = pictures | {"resize": "stretch"} if pictures else {}
    conditioning = pipe.encode(PROMPT, NEGATIVE, **inputs, **settings)
    latents: list[np.ndarray] = []
    noise_shapes = pipe.draws(pipe.settings(**settings))
    used_noise = {
        n: jnp.asarray(x.numpy()) for n, x in noise.items() if n in noise_shapes or n.startswith(("image", "video"))
    }
    last = pipe.denoise(
        conditioning, noise=used_noise, callback=lambda step: latents.append(np.asarray(step.latents)), **settings
    )
    assert last.shape[2] == (frames - 1) // 4 + 1
    np.testing.assert_array_equal(last, latents[-1][:, :, -last.shape[2] :])
    return latents, pipe.decode(last, jnp.float32)


def compare(video: tuple[list[np.ndarray], np.ndarray], reference_video: tuple[list[np.ndarray], np.ndarray]) -> None:
    assert len(video[0]) == len(reference_video[0])
    assert largest_error(video[0], reference_video[0]) <= MAX_LATENT_ERROR
    assert video[1].shape == reference_video[1].shape
    assert psnr(video[1], reference_video[1]) >= 60


@pytest.mark.parametrize(
    ("name", "solver", "frames", "options"),
    [
        pytest.param("cogvideox1.5-5b", "ddim", 17, {}, marks=pytest.mark.slow),
        pytest.param("cogvideox1.5-5b", "dpm", 17, {}, marks=pytest.mark.slow),
        ("cogvideox1.5-5b", "dpm", 13, {"guidance_scale": 1.0}),
        pytest.param("cogvideox-2b", "ddim", 9, {}, marks=pytest.mark.slow),  # test_torch_noise.py has it with DPM
        pytest.param("cogvideox-5b", "dpm", 9, {}, marks=pytest.mark.slow),
    ],
)
def test_text_to_video_equals_diffusers(tmp_path, monkeypatch, name, solver, frames, options):
    noise = noise_for(frames, "1.5" in name)
    pipe = reference(name, solver, tmp_path)
    reference_video = expected_video(
        pipe, noise, monkeypatch, num_frames=frames, latents=noise["noise"].transpose(1, 2), **options
    )
    compare(make_video(tmp_path, noise, frames=frames, **options), reference_video)


def test_dynamic_guidance_equals_diffusers(tmp_path, monkeypatch):
    noise = noise_for(9, True)
    pipe = reference("cogvideox1.5-5b", "ddim", tmp_path)
    begin = {"num_frames": 9, "latents": noise["noise"].transpose(1, 2)}
    reference_video = expected_video(pipe, noise, monkeypatch, use_dynamic_cfg=True, **begin)
    compare(make_video(tmp_path, noise, frames=9, dynamic_guidance=True), reference_video)


@pytest.mark.parametrize("name", quick(["cogvideox1.5-5b-i2v"], ["cogvideox1.5-5b-i2v", "cogvideox-5b-i2v"]))
def test_image_to_video_equals_diffusers(tmp_path, monkeypatch, name):
    frames = 9
    noise = noise_for(frames, "1.5" in name, "image")
    # the proportions differ from the video's
    picture = np.random.default_rng(0).integers(0, 256, (52, 61, 3), np.uint8)
    pipe = reference(name, "ddim", tmp_path)
    begin = {"num_frames": frames, "latents": noise["noise"].transpose(1, 2), "image": Image.fromarray(picture)}
    reference_video = expected_video(pipe, noise, monkeypatch, **begin)
    compare(make_video(tmp_path, noise, frames=frames, image=picture), reference_video)


@pytest.mark.slow  # test_torch_noise.py has a quick test from a video
@pytest.mark.parametrize(("name", "frames"), [("cogvideox1.5-5b", 13), ("cogvideox-2b", 9)])
def test_video_to_video_equals_diffusers(tmp_path, monkeypatch, name, frames):
    noise = noise_for(frames, "1.5" in name, "video")
    clip = np.random.default_rng(0).integers(0, 256, (frames, 40, 48, 3), np.uint8)
    pipe = CogVideoXVideoToVideoPipeline(**reference(name, "ddim", tmp_path).components)
    pipe.set_progress_bar_config(disable=True)
    module = "diffusers.pipelines.cogvideo.pipeline_cogvideox_video2video.randn_tensor"
    monkeypatch.setattr(module, lambda shape, **_: noise["noise"].transpose(1, 2))
    reference_video = expected_video(pipe, noise, monkeypatch, video=[Image.fromarray(x) for x in clip], strength=0.6)
    compare(make_video(tmp_path, noise, frames=frames, video=clip, strength=0.6), reference_video)
