# SPDX-License-Identifier: Apache-2.0
"""The whole pipeline against diffusers' WanPipeline, with the same checkpoint, prompt and noise."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
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
from tests.support.quick import quick
from tests.support.toy_tokenizer import save_tokenizer
from wanjax.checkpoints import network_kinds
from wanjax.models.wan import transformer

pytestmark = pytest.mark.usefixtures("cached_programs")

HEIGHT, WIDTH, FRAMES, STEPS, GUIDANCE, SHIFT = 32, 48, 9, 8, 5.0, 3.0

UNIPC = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT)
EULER = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
OFFICIAL = {  # the noise levels before the schedulers shift them
    UNIPC: np.linspace(np.float32(0.999), 0, STEPS + 1)[:-1],
    EULER: np.linspace(1, 0, STEPS + 1)[:-1],
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> WanPipeline:
    torch.manual_seed(0)
    networks = {
        "text_encoder": UMT5EncoderModel(
            UMT5Config(
                vocab_size=512, d_model=48, d_kv=16, d_ff=96, num_layers=2, num_heads=4,
                relative_attention_num_buckets=16, relative_attention_max_distance=40, feed_forward_proj="gated-gelu",
            )
        ),
        "transformer": WanTransformer3DModel(
            num_attention_heads=3, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=48, freq_dim=64,
            ffn_dim=160, num_layers=3,
        ),
        "vae": AutoencoderKLWan(
            base_dim=8, z_dim=4, num_res_blocks=1, latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 0.7, 2.0, 1.0]
        ),
    }  # fmt: skip
    for seed, network in enumerate(networks.values()):
        randomise(network.eval(), seed)
    emphasise_mlps(networks["transformer"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    pipe = WanPipeline(tokenizer=tokenizer, scheduler=UNIPC, **networks)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    reference.save_pretrained(folder)
    return folder


NOISE = torch.randn(1, 4, (FRAMES + 3) // 4, HEIGHT // 8, WIDTH // 8, generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def expected_video(pipe: WanPipeline, scheduler, sigmas: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Return diffusers' latents after every step, and its frames."""
    pipe.scheduler = type(scheduler).from_config(scheduler.config)
    if sigmas == "official":
        pipe.scheduler.set_timesteps = partial(pipe.scheduler.set_timesteps, sigmas=OFFICIAL[scheduler])
    latents = []
    frames = pipe(
        PROMPT, NEGATIVE_PROMPT, height=HEIGHT, width=WIDTH, num_frames=FRAMES, num_inference_steps=STEPS,
        guidance_scale=GUIDANCE, latents=NOISE,
        callback_on_step_end=lambda pipe, i, t, values: latents.append(values["latents"].numpy()) or {},
    ).frames[0]  # fmt: skip
    return latents, frames


def make_video(folder: Path, sigmas: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the latents after every step, and the frames."""
    pipe = wanjax.load(folder)
    embeddings = pipe.encode(PROMPT, NEGATIVE_PROMPT)
    latents = []
    final_latents = pipe.denoise(
        embeddings, size=(HEIGHT, WIDTH), frames=FRAMES, steps=STEPS, guidance_scale=GUIDANCE, flow_shift=SHIFT,
        sigmas=sigmas, noise=jnp.asarray(NOISE.numpy()), callback=lambda step: latents.append(np.asarray(step.latents)),
    )  # fmt: skip
    np.testing.assert_array_equal(final_latents, latents[-1])
    return latents, pipe.decode(final_latents, jnp.float32)


@pytest.mark.parametrize("sigmas", quick(["diffusers"], ["diffusers", "official"]))
@pytest.mark.parametrize("scheduler", OFFICIAL, ids=lambda scheduler: type(scheduler).__name__)
def test_every_step_and_every_frame_equal_those_of_diffusers(reference, folder, scheduler, sigmas):
    scheduler.save_pretrained(folder / "scheduler")
    latents, frames = make_video(folder, sigmas)
    exact_latents, exact_frames = expected_video(reference, scheduler, sigmas)
    assert len(latents) == STEPS
    assert largest_error(latents, exact_latents) <= MAX_LATENT_ERROR
    assert frames.shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert psnr(frames, exact_frames) >= 60


def test_an_exact_gelu_exceeds_the_bound(reference, folder, monkeypatch):
    # its cache has modules with the right GELU
    monkeypatch.setattr(network_kinds, "_abstract", network_kinds._abstract.__wrapped__)
    UNIPC.save_pretrained(folder / "scheduler")
    monkeypatch.setattr(transformer, "gelu_tanh", partial(jax.nn.gelu, approximate=False))
    latents, _ = make_video(folder, "diffusers")
    exact, _ = expected_video(reference, UNIPC, "diffusers")
    assert largest_error(latents, exact) > MAX_LATENT_ERROR
