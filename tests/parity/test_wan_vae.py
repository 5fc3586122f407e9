# SPDX-License-Identifier: Apache-2.0
"""The video autoencoder against diffusers' AutoencoderKLWan, float32, on the same small random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from tests.parity.references import channels_last, randomise, relative_l2, wan_vae

FRAMES = [1, 5, 17, 33]


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    reference = AutoencoderKLWan(base_dim=8, z_dim=4, num_res_blocks=1, latents_mean=[0.1, -0.2, 0.3, 0.0],
                                 latents_std=[1.5, 0.7, 2.0, 1.0]).eval()  # fmt: skip
    randomise(reference, seed=1)
    return reference, wan_vae(reference)


@pytest.mark.parametrize("frames", FRAMES)
def test_encode(models, frames):
    reference, vae = models
    video = torch.rand(2, 3, frames, 48, 32, generator=torch.Generator().manual_seed(frames)) * 2 - 1
    with torch.no_grad():
        mean = reference.encode(video).latent_dist.mode()
    expected = (channels_last(mean) - np.array(vae.config.latents_mean)) / np.array(vae.config.latents_std)
    assert relative_l2(jax.jit(vae.encode)(jnp.asarray(channels_last(video))), expected) <= 1e-5


@pytest.mark.parametrize("frames", FRAMES)
def test_decode(models, frames):
    reference, vae = models
    latents = torch.randn(2, 4, (frames + 3) // 4, 6, 4, generator=torch.Generator().manual_seed(frames))
    raw = latents * torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1) + torch.tensor(
        vae.config.latents_mean
    ).view(1, -1, 1, 1, 1)
    with torch.no_grad():
        expected = channels_last(reference.decode(raw).sample)
    assert relative_l2(jax.jit(vae.decode)(jnp.asarray(channels_last(latents))), expected) <= 1e-5
