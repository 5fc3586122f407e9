# SPDX-License-Identifier: Apache-2.0
"""Train a tiny decoder for nano, and measure its loss of quality compared with nano's decoder.

    python -m benchmarks.tiny_decoder --steps 600 tae_nano.safetensors

The tiny decoder has TAEHV's architecture. It is trained on latents of nano's training clips to reproduce the frames of
nano's decoder, and is written in the format of TAEHV's files. Then, for prompts that nano's training never saw, the
benchmark prints the PSNR of its frames against those of nano's decoder from the same latents, and the seconds of both.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import wanjax
from benchmarks.quality import NANO, nano_prompts, psnr
from wanjax.checkpoints import modules
from wanjax.converters import taehv
from wanjax.models.taehv import TinyDecoder, TinyDecoderConfig

BATCH, LEARNING_RATE = 4, 3e-3
TRAIN_FRAMES = 3  # training uses the first latent frames of a clip


def clips(count: int, frames: int, size: int) -> np.ndarray:
    """Return training clips of nano [N T H W 3], from 0 to 1."""
    sys.path.insert(0, str(NANO))
    from clips import draw, sample_specs

    random = np.random.default_rng(0)
    return draw(sample_specs(random, count), frames, size, random) * 0.5 + 0.5


def decoder_pairs(pipe: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return latents [N T H W C] of clips, and the frames [N T H W 3], from 0 to 1, that the VAE makes of them."""
    training_clips = clips(count, pipe.defaults.frames, pipe.defaults.height)
    latents = np.stack([np.asarray(pipe.encode_video(clip))[0] for clip in training_clips])
    frames = np.stack([pipe.decode(latent[None], jnp.float32) for latent in latents])
    return np.moveaxis(latents, 1, -1), frames


def train(config: TinyDecoderConfig, latents: np.ndarray, frames: np.ndarray, steps: int) -> TinyDecoder:
    """Train a decoder for `steps` steps of Adam on the mean squared error."""
    decoder = TinyDecoder(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    graphdef, weights = nnx.split(decoder)
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Any, state: Any, z: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            outputs, _ = nnx.merge(graphdef, weights).decode_chunk(z, None)
            return jnp.mean(jnp.square(outputs - (2 * x - 1)))

        value, gradient = jax.value_and_grad(loss)(weights)
        change, state = optimizer.update(gradient, state)
        return optax.apply_updates(weights, change), state, value

    state, random = optimizer.init(weights), np.random.default_rng(1)
    for number in range(steps):
        batch_indices = random.choice(len(latents), BATCH, replace=False)
        z, x = (
            latents[batch_indices, :TRAIN_FRAMES],
            frames[batch_indices, : (TRAIN_FRAMES - 1) * config.temporal_factor + 1],
        )
        weights, state, value = step(weights, state, z, x)
        if number % 50 == 0 or number + 1 == steps:
            print(f"step {number + 1}: mean squared error {float(value):.5f}", flush=True)
    return nnx.merge(graphdef, weights)


def time_decoding(pipe: Any, latents: Any) -> tuple[np.ndarray, float]:
    """Return frames, and the seconds of a second decoding."""
    pipe.decode(latents)
    start = perf_counter()
    return pipe.decode(latents), perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE", help="the decoder: .safetensors")
    parser.add_argument("--steps", type=int, default=600, help="steps of training (default: 600)")
    parser.add_argument("--clips", type=int, default=128, help="clips to train on (default: 128)")
    parser.add_argument("--widths", type=int, nargs=4, default=(24, 16, 12, 12), metavar="N", help="channels of levels")
    parser.add_argument("--limit", type=int, default=8, help="videos to compare (default: 8)")
    options = parser.parse_args(arguments)
    pipe = wanjax.load("nano")
    pipe.progress = False
    config = TinyDecoderConfig(pipe.model.vae.latent_channels, tuple(options.widths), 1, (1, 2, 2))
    tiny_network = train(config, *decoder_pairs(pipe, options.clips), options.steps)
    modules.export(tiny_network, taehv.rules(), options.file)
    tiny = wanjax.load("nano", decoder=options.file)
    tiny.progress = False
    rows = []
    for prompt, _ in nano_prompts()[0][: options.limit]:
        latents = np.asarray(pipe.denoise(pipe.encode(prompt)))
        (frames, seconds), (tiny_frames, tiny_seconds) = time_decoding(pipe, latents), time_decoding(tiny, latents)
        rows.append((psnr(tiny_frames, frames), seconds, tiny_seconds))
    decibels, seconds, tiny_seconds = np.median(np.array(rows), axis=0)
    print(f"PSNR {decibels:.1f} dB against nano's own decoder, {len(rows)} videos (median)")
    print(f"a video is decoded in {tiny_seconds:.2f} s, by nano's own decoder in {seconds:.2f} s")


if __name__ == "__main__":
    main()
