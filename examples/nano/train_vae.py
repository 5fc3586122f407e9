# SPDX-License-Identifier: Apache-2.0
"""Train the small video autoencoder on crops of drawn clips, with a reconstruction loss and a small KL divergence."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from clips import draw, sample_specs
from flax import nnx
from loop import ClipTrainer
from recipe import DECODER_PHASES, FRAMES, SIZE, VAE_PHASES, Phase

from wanjax.layers.conv import CausalConv
from wanjax.models.wan.vae import ResBlock, WanVAE

ABSOLUTE_WEIGHT = 0.03
KL_WEIGHT = 2e-5
PEAK_LEARNING_RATE = 2e-3
DECODER_LEARNING_RATE = 1e-3
LOG_VARIANCE = -6.0  # initial value for the latents; with more noise the decoder learns slowly


def crops(phase: Phase, rng: np.random.Generator) -> np.ndarray:
    """Draw clips and return a batch of random crops of them, in space and time: [B T H W 3] in [-1, 1]."""
    clips = draw(sample_specs(rng, phase.batch), FRAMES, SIZE, rng)
    corners = rng.integers(
        0, np.array([FRAMES - phase.frames, SIZE - phase.size, SIZE - phase.size]) + 1, (phase.batch, 3)
    )
    t, h, w = np.array([phase.frames, phase.size, phase.size])
    return np.stack([clip[a : a + t, b : b + h, c : c + w] for clip, (a, b, c) in zip(clips, corners, strict=True)])


def posteriors(vae: WanVAE, video: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Return mean and log-variance of the latents of the first frame and, if there are more, of all other frames."""
    mean, log_variance, cache = vae.posterior(video[:, :1], None)
    if video.shape[1] == 1:
        return [(mean, log_variance)]
    return [(mean, log_variance), vae.posterior(video[:, 1:], cache)[:2]]


def sample(mean: jax.Array, log_variance: jax.Array, key: jax.Array) -> jax.Array:
    """Draw latents from the posterior."""
    return mean + jnp.exp(0.5 * log_variance) * jax.random.normal(key, mean.shape)


def reconstruction(vae: WanVAE, z: jax.Array) -> jax.Array:
    """Return the decoder's frames without clipping, so that values out of range have a gradient."""
    first, cache = vae.decoder(vae.post_quant(z[:, :1]), None)
    if z.shape[1] == 1:
        return first
    return jnp.concatenate([first, vae.decoder(vae.post_quant(z[:, 1:]), cache)[0]], axis=1)


def loss(vae: WanVAE, video: jax.Array, key: jax.Array) -> tuple[jax.Array, dict]:
    """Return the absolute and squared error of the reconstruction plus the latents' divergence from a unit normal."""
    mean, log_variance = (jnp.concatenate(parts, axis=1) for parts in zip(*posteriors(vae, video), strict=True))
    error = reconstruction(vae, sample(mean, log_variance, key)) - video
    squared = jnp.mean(error**2)
    divergence = 0.5 * jnp.mean(mean**2 + jnp.exp(log_variance) - 1.0 - log_variance)
    total = squared + ABSOLUTE_WEIGHT * jnp.mean(jnp.abs(error)) + KL_WEIGHT * divergence
    return total, {"psnr": 10.0 * jnp.log10(4.0 / squared), "divergence": divergence}


def inflate(vae: WanVAE) -> None:
    """Initialise the video autoencoder as an image autoencoder that is applied to every frame.

    Residual blocks are the identity, convolutions see only the current frame, temporal downsampling averages frames,
    temporal upsampling repeats them, and the latents have little noise. So colours and positions are learnt first.
    """
    for _, module in nnx.iter_graph(vae):
        if isinstance(module, CausalConv) and module.kernel.shape[:2] == (3, 3):
            module.kernel[...] = module.kernel[...].at[:2].set(0.0) * 3**0.5
        elif isinstance(module, CausalConv):
            channels, out = module.kernel.shape[-2:]
            identity = jnp.tile(jnp.eye(channels), (1, out // channels))
            taps = jnp.array([0.0, 0.0, 1.0] if out > channels else [0.0, 0.5, 0.5])
            module.kernel[...] = (taps[:, None, None] * identity[None])[:, None, None]
    for _, module in nnx.iter_graph(vae):
        if isinstance(module, ResBlock):
            module.conv2.kernel[...] = jnp.zeros_like(module.conv2.kernel[...])
    channels = vae.config.latent_channels
    bias: Any = vae.quant.bias
    bias[...] = bias[...].at[channels:].set(LOG_VARIANCE)


def decoder_loss(vae: WanVAE, video: jax.Array, key: jax.Array) -> tuple[jax.Array, dict]:
    """Return the error with a fixed encoder, so that only the decoder is trained and the latents do not change."""
    mean, log_variance = (
        jax.lax.stop_gradient(jnp.concatenate(parts, axis=1)) for parts in zip(*posteriors(vae, video), strict=True)
    )
    error = reconstruction(vae, sample(mean, log_variance, key)) - video
    squared = jnp.mean(error**2)
    return squared + ABSOLUTE_WEIGHT * jnp.mean(jnp.abs(error)), {"psnr": 10.0 * jnp.log10(4.0 / squared)}


def train_vae(vae: WanVAE, workdir: Path, seed: int) -> WanVAE:
    """Train the autoencoder, or resume its training, and return it."""
    inflate(vae)
    vae = _train("vae", vae, loss, VAE_PHASES, PEAK_LEARNING_RATE, workdir, seed)
    return _train("decoder", vae, decoder_loss, DECODER_PHASES, DECODER_LEARNING_RATE, workdir, seed + 1)


def _train(
    name: str, vae: WanVAE, loss: Callable, phases: Sequence[Phase], learning_rate: float, workdir: Path, seed: int
) -> WanVAE:
    steps = sum(phase.steps for phase in phases)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, 100, steps, learning_rate / 100)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.99))
    trainer = ClipTrainer(name, vae, loss, optimizer, workdir, seed)
    last = 0
    for phase in phases:
        last += phase.steps
        trainer.train(last, lambda rng, phase=phase: crops(phase, rng))
    return trainer.model()


def latent_statistics(vae: WanVAE, seed: int, clips: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of each latent channel, over new clips of the training combinations."""
    rng = np.random.default_rng([seed, 1])
    encode = nnx.jit(lambda vae, video: vae.encode_chunk(video, None)[0])
    latents = np.concatenate(
        [np.asarray(encode(vae, draw(sample_specs(rng, 16), FRAMES, SIZE, rng))) for _ in range(clips // 16)]
    )
    return latents.mean(axis=(0, 1, 2, 3)), latents.std(axis=(0, 1, 2, 3))
