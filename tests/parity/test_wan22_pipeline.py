# SPDX-License-Identifier: Apache-2.0
"""Pipelines with two experts, with a clean first frame, and with an input video, against those of diffusers."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVideoToVideoPipeline,
)
from PIL import Image
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

import wanjax
from tests.parity.references import (
    MAX_LATENT_ERROR,
    NEGATIVE_PROMPT,
    PROMPT,
    emphasise_mlps,
    largest_error,
    psnr,
    randomise,
)
from tests.support.toy_tokenizer import save_tokenizer
from wanjax.pipelines.observers import Switch
from wanjax.pipelines.pipeline import Pipeline as OurPipeline

pytestmark = pytest.mark.usefixtures("cached_programs")

HEIGHT, WIDTH, FRAMES, STEPS, SHIFT = 32, 64, 5, 6, 5.0
STATISTICS = {"z_dim": 4, "latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 0.7, 2.0, 1.0]}
VAE = {"base_dim": 8, "num_res_blocks": 1, **STATISTICS}
RESIDUAL_VAE = {
    **VAE, "is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16,
}  # fmt: skip
RANDOM = np.random.default_rng(0)
IMAGE = RANDOM.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
VIDEO = RANDOM.integers(0, 256, (FRAMES, HEIGHT, WIDTH, 3), dtype=np.uint8)


def transformer(seed: int, channels_in: int = 4) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    network = WanTransformer3DModel(
        num_attention_heads=3, attention_head_dim=32, in_channels=channels_in, out_channels=4, text_dim=48, freq_dim=64,
        ffn_dim=160, num_layers=2,
    ).eval()  # fmt: skip
    randomise(network, seed)
    emphasise_mlps(network)
    return network


@pytest.fixture(scope="module")
def common(tmp_path_factory) -> dict[str, Any]:
    """Return the components that all the pipelines share."""
    torch.manual_seed(0)
    config = UMT5Config(
        vocab_size=512, d_model=48, d_kv=16, d_ff=96, num_layers=1, num_heads=2,
        relative_attention_num_buckets=16, relative_attention_max_distance=40, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return {
        "text_encoder": UMT5EncoderModel(config).eval(),
        "tokenizer": PreTrainedTokenizerFast.from_pretrained(save_tokenizer(tmp_path_factory.mktemp("tokenizer"))),
        "scheduler": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT),
    }


def vae(settings: dict[str, Any]) -> AutoencoderKLWan:
    torch.manual_seed(0)
    network = AutoencoderKLWan(**settings).eval()
    randomise(network, seed=1)
    return network


def noise(factor: int) -> torch.Tensor:
    shape = (1, 4, (FRAMES + 3) // 4, HEIGHT // factor, WIDTH // factor)
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def expected_video(pipe: Any, **options: Any) -> tuple[list[np.ndarray], np.ndarray]:
    """Return diffusers' latents after every step, and its frames."""
    latents = []
    pipe.set_progress_bar_config(disable=True)
    frames = pipe(
        prompt=PROMPT, negative_prompt=NEGATIVE_PROMPT, height=HEIGHT, width=WIDTH, num_inference_steps=STEPS,
        callback_on_step_end=lambda pipe, i, t, values: latents.append(values["latents"].numpy()) or {}, **options,
    ).frames[0]  # fmt: skip
    return latents, frames


def make_latents(
    folder: Path, noise: torch.Tensor, pictures: dict[str, Any], **settings: Any
) -> tuple[OurPipeline, list, Any, list]:
    """Return the pipeline, its latents after every step, the last latents and the switches."""
    pipe = wanjax.load(folder)
    settings |= {"size": (HEIGHT, WIDTH), "frames": FRAMES, "steps": STEPS, "flow_shift": SHIFT, "sigmas": "diffusers"}
    latents, switches = [], []
    final_latents = pipe.denoise(
        pipe.encode(PROMPT, NEGATIVE_PROMPT, **pictures, **settings), noise=jnp.asarray(noise.numpy()),
        callback=lambda step: latents.append(np.asarray(step.latents)), switched=switches.append, **settings,
    )  # fmt: skip
    return pipe, latents, final_latents, switches


def compare(pipe: OurPipeline, latents: list, final_latents: Any, exact: list[np.ndarray], frames: np.ndarray) -> None:
    assert len(latents) == len(exact)
    assert largest_error(latents, exact) <= MAX_LATENT_ERROR
    assert psnr(pipe.decode(final_latents, jnp.float32), frames) >= 60


@pytest.mark.parametrize("image", [pytest.param(None, marks=pytest.mark.slow), IMAGE], ids=["text", "image"])
def test_two_experts_equal_those_of_diffusers(common, tmp_path, image):
    """The experts have different guidance scales; in diffusers, the scale at high noise is first."""
    kind = WanPipeline if image is None else WanImageToVideoPipeline
    channels = 4 if image is None else 12
    experts = {"transformer": transformer(1, channels), "transformer_2": transformer(2, channels)}
    reference = kind(**common, **experts, vae=vae(VAE), boundary_ratio=0.875)
    reference.save_pretrained(tmp_path)
    options = {} if image is None else {"image": Image.fromarray(image)}
    exact, frames = expected_video(
        reference, num_frames=FRAMES, guidance_scale=4.0, guidance_scale_2=3.0, latents=noise(8), **options
    )
    pictures = {} if image is None else {"image": image}
    pipe, latents, final_latents, switches = make_latents(
        tmp_path, noise(8), pictures, guidance_scale=4.0, guidance_scale_2=3.0
    )
    compare(pipe, latents, final_latents, exact, frames)
    high = int((reference.scheduler.timesteps >= 875).sum())
    assert 0 < high < STEPS
    assert [switch[:3] for switch in switches] == [Switch("transformer_2", high, STEPS, 0.0)[:3]]


@pytest.mark.slow  # the test below has the same networks, with a picture
def test_text_to_video_of_the_5b_model_equals_diffusers(common, tmp_path):
    """All tokens have the same timestep without a picture; the reference passes it for each token."""
    reference = WanPipeline(**common, transformer=transformer(1), vae=vae(RESIDUAL_VAE), expand_timesteps=True)
    reference.save_pretrained(tmp_path)
    exact, frames = expected_video(reference, num_frames=FRAMES, guidance_scale=5.0, latents=noise(16))
    pipe, latents, final_latents, _ = make_latents(tmp_path, noise(16), {}, guidance_scale=5.0)
    compare(pipe, latents, final_latents, exact, frames)


def test_image_to_video_of_the_5b_model_equals_diffusers(common, tmp_path):
    network = transformer(1)
    published = WanPipeline(**common, transformer=network, vae=vae(RESIDUAL_VAE), expand_timesteps=True)
    published.save_pretrained(tmp_path)  # as a text pipeline; the image pipeline is loaded from the same folder
    reference = WanImageToVideoPipeline.from_pretrained(tmp_path)
    exact, frames = expected_video(
        reference, image=Image.fromarray(IMAGE), num_frames=FRAMES, guidance_scale=5.0, latents=noise(16)
    )
    pipe, latents, final_latents, _ = make_latents(tmp_path, noise(16), {"image": IMAGE}, guidance_scale=5.0)
    compare(pipe, latents, final_latents, exact, frames)


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_video_to_video_equals_diffusers(common, tmp_path, strength):
    networks = {"transformer": transformer(1), "vae": vae(VAE)}
    WanPipeline(**common, **networks).save_pretrained(tmp_path)
    reference = WanVideoToVideoPipeline(**common, **networks)
    generator = torch.Generator().manual_seed(7)  # its first numbers are those of `noise`
    exact, frames = expected_video(
        reference, video=[Image.fromarray(frame) for frame in VIDEO], strength=strength, guidance_scale=5.0,
        generator=generator,
    )  # fmt: skip
    pipe, latents, final_latents, _ = make_latents(
        tmp_path, noise(8), {"video": VIDEO}, guidance_scale=5.0, strength=strength
    )
    compare(pipe, latents, final_latents, exact, frames)
