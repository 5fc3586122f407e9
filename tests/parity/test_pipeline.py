# SPDX-License-Identifier: Apache-2.0
"""The whole pipeline against diffusers' WanPipeline: one checkpoint that diffusers wrote, one prompt, one noise."""

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
from tests.parity.references import randomise, relative_l2
from tests.tiny import compile_cache
from tests.toy_tokenizer import save_tokenizer
from wanjax.models.wan import transformer

PROMPT, NEGATIVE_PROMPT = "a red circle moving right &amp;  up", "色调艳丽, a blue cat"
HEIGHT, WIDTH, FRAMES, STEPS, GUIDANCE, SHIFT = 32, 48, 9, 8, 5.0, 3.0
BAR = 2e-5  # relative L2 of the latents of every step

UNIPC = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT)
EULER = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
OFFICIAL = {  # the levels as the schedulers take them, which shift them
    UNIPC: np.linspace(np.float32(0.999), 0, STEPS + 1)[:-1],
    EULER: np.linspace(1, 0, STEPS + 1)[:-1],
}


@pytest.fixture(scope="module", autouse=True)
def _compile_cache(tmp_path_factory):
    with compile_cache(tmp_path_factory.getbasetemp() / "xla"):
        yield


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


@torch.no_grad()
def emphasise_mlps(network: WanTransformer3DModel) -> None:
    """MLPs that shape the answer as a trained model's do; fresh ones hardly leave the linear part of their GELU."""
    for block in network.blocks:
        block.ffn.net[0].proj.weight.mul_(3)
        block.scale_shift_table[:, 5].add_(1)  # the MLP's gate
    network.proj_out.weight.mul_(3)


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    reference.save_pretrained(folder)
    return folder


NOISE = torch.randn(1, 4, (FRAMES + 3) // 4, HEIGHT // 8, WIDTH // 8, generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def expected(pipe: WanPipeline, scheduler, sigmas: str) -> tuple[list[np.ndarray], np.ndarray]:
    """The latents after every step, and the frames."""
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


def answer(folder: Path, sigmas: str) -> tuple[list[np.ndarray], np.ndarray]:
    """The same of ours."""
    pipe = wanjax.load(folder)
    embeddings = pipe.encode(PROMPT, NEGATIVE_PROMPT)
    latents = []
    last = pipe.denoise(
        embeddings, size=(HEIGHT, WIDTH), frames=FRAMES, steps=STEPS, guidance_scale=GUIDANCE, flow_shift=SHIFT,
        sigmas=sigmas, noise=jnp.asarray(NOISE.numpy()), callback=lambda step: latents.append(np.asarray(step.latents)),
    )  # fmt: skip
    np.testing.assert_array_equal(last, latents[-1])
    return latents, pipe.decode(last, jnp.float32)


def largest_error(latents: list[np.ndarray], exact: list[np.ndarray]) -> float:
    """Of the latents of any step, relative; `pytest -rP` shows it."""
    error = max(relative_l2(*pair) for pair in zip(latents, exact, strict=True))
    print(f"latents {error:.1e}")
    return error


@pytest.mark.parametrize("sigmas", ["diffusers", "official"])
@pytest.mark.parametrize("scheduler", OFFICIAL, ids=lambda scheduler: type(scheduler).__name__)
def test_every_step_and_every_frame(reference, folder, scheduler, sigmas):
    scheduler.save_pretrained(folder / "scheduler")
    latents, frames = answer(folder, sigmas)
    exact_latents, exact_frames = expected(reference, scheduler, sigmas)
    assert len(latents) == STEPS
    assert largest_error(latents, exact_latents) <= BAR
    assert frames.shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert psnr(frames, exact_frames) >= 60


def psnr(frames: np.ndarray, exact: np.ndarray) -> float:
    """Decibels, of frames in [0, 1]; `pytest -rP` shows them."""
    decibels = -10 * np.log10(np.mean((frames - exact) ** 2))
    print(f"frames {decibels:.0f} dB")
    return decibels


def test_the_bar_is_below_what_another_gelu_does(reference, folder, monkeypatch):
    UNIPC.save_pretrained(folder / "scheduler")
    monkeypatch.setattr(transformer, "gelu_tanh", partial(jax.nn.gelu, approximate=False))
    latents, _ = answer(folder, "diffusers")
    exact, _ = expected(reference, UNIPC, "diffusers")
    assert largest_error(latents, exact) > BAR
