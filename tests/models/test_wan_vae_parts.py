# SPDX-License-Identifier: Apache-2.0
"""Wan's autoencoder computes a chunk in parts that fit the device's memory, and the result does not depend on them."""

import jax.numpy as jnp
import numpy as np
import pytest

from wanjax.kernels.target import Target
from wanjax.models.wan import vae
from wanjax.models.wan.config import VAE_2_1


@pytest.mark.parametrize("frames", [1, 4])
@pytest.mark.parametrize("latents", [0, 1, 2, 3, 5, 6])
@pytest.mark.parametrize("has_cache", [False, True])
def test_parts_are_computed_and_joined_in_order(frames, latents, has_cache):
    """The parts are the first frame, pairs of latent frames and the remaining frames; each gets the sum before it."""
    if has_cache and not latents:
        return
    x = jnp.arange(1.0, 1 + frames * latents + (not has_cache)).reshape(1, -1, 1, 1, 1)
    part_sizes = []

    def process(part, before):
        part_sizes.append(part.shape[1])
        before = jnp.zeros((), x.dtype) if before is None else before
        return part * 0 + before, before + part.sum()

    y, total = vae.process_in_parts(process, x, jnp.zeros(()) if has_cache else None, 2 * frames)
    assert total == x.sum()
    single, pairs, remaining = int(not has_cache), latents // 2 * 2 * frames, latents % 2 * frames
    starts = (
        [0] * single + [single + i // (2 * frames) * 2 * frames for i in range(pairs)] + [single + pairs] * remaining
    )
    np.testing.assert_array_equal(y.ravel(), [float(x.ravel()[:start].sum()) for start in starts])
    assert set(part_sizes) == {size for size, count in ((1, single), (2 * frames, pairs), (frames, remaining)) if count}


@pytest.mark.parametrize(
    ("platform", "size", "num_frames"),
    [
        ("cpu", (60, 104), 1),
        ("gpu", (60, 104), 1),
        ("tpu", (60, 104), 2),
        ("tpu", (90, 160), 1),
        ("tpu", (180, 320), 1),
    ],
)
def test_frames_decoded_at_once_fit_the_memory_of_a_tpu(monkeypatch, platform, size, num_frames):
    monkeypatch.setattr(vae, "target", lambda x: Target(platform, "some kind"))
    z = jnp.zeros((1, 2, *size, VAE_2_1.latent_channels))
    assert vae.latent_frames_per_part(z, VAE_2_1.spatial_factor, VAE_2_1.decoder_width) == num_frames


def test_even_numbers_of_frames_are_decoded_in_pairs():
    assert [VAE_2_1.decode_lengths(frames) for frames in (1, 2, 3, 21, 31)] == [(1, 2), (1, 1), (1, 2), (1, 2), (1, 2)]
    assert [VAE_2_1.encode_lengths(frames) for frames in (1, 5, 9, 81)] == [(1, 8), (1, 4), (1, 8), (1, 8)]
