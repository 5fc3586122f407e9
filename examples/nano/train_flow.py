# SPDX-License-Identifier: Apache-2.0
"""Trains the small diffusion transformer and its text encoder together, by flow matching on encoded clips.

Flow matching (Lipman et al., 2023; Liu et al., rectified flow, 2023): at noise level s a clip x and noise e are mixed
to (1 - s) x + s e, and the transformer is asked for the velocity e - x.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from captions import caption
from clips import draw, sample_specs
from flax import nnx
from jax import lax
from loop import Trainer
from recipe import CLIPS, FLOW_BATCH, FLOW_STEPS, FRAMES, SIZE
from tokenizer import MAX_LENGTH
from tokenizer import build as build_tokenizer

from wanjax.models.t5 import T5Encoder
from wanjax.models.wan.transformer import WanTransformer
from wanjax.models.wan.vae import WanVAE
from wanjax.pipelines.text import encode_text

PEAK_LEARNING_RATE = 2e-3
WARM_UP = 200  # steps
EMPTY_CAPTIONS = 0.1  # the share trained without a prompt, for guidance
NOISE_MEAN, NOISE_STD = 0.5, 1.0  # of the logit of the noise level


class PromptedTransformer(nnx.Module):
    """The two networks that learn together."""

    def __init__(self, text_encoder: T5Encoder, transformer: WanTransformer):
        self.text_encoder = text_encoder
        self.transformer = transformer


def loss(model: PromptedTransformer, batch: dict, key: jax.Array) -> tuple[jax.Array, dict]:
    """Mean squared error of the velocity at random noise levels."""
    level_key, noise_key = jax.random.split(key)
    x = batch["latents"]
    level = jax.nn.sigmoid(NOISE_MEAN + NOISE_STD * jax.random.normal(level_key, x.shape[:1]))
    s = level[:, None, None, None, None]
    noise = jax.random.normal(noise_key, x.shape)
    text = encode_text(model.text_encoder, batch["ids"], batch["mask"])
    velocity = model.transformer((1.0 - s) * x + s * noise, 1000.0 * level, text)
    return jnp.mean((velocity - (noise - x)) ** 2), {}


def train_flow(model: PromptedTransformer, vae: WanVAE, workdir: Path, seed: int) -> PromptedTransformer:
    """The trained networks; stops and resumes at any step."""
    specs, latents = encoded_clips(vae, workdir, seed)
    tokenizer = build_tokenizer()
    tokenizer.enable_truncation(MAX_LENGTH)
    tokenizer.enable_padding(length=MAX_LENGTH, pad_id=0, pad_token="<pad>")

    def batch(rng: np.random.Generator) -> dict:
        chosen = rng.integers(0, len(specs), FLOW_BATCH)
        words = ["" if rng.random() < EMPTY_CAPTIONS else caption(specs[i], rng) for i in chosen]
        tokens = tokenizer.encode_batch(words)
        return {
            "latents": latents[chosen],
            "ids": np.array([t.ids for t in tokens], np.int32),
            "mask": np.array([t.attention_mask for t in tokens], bool),
        }

    start_as_identity(model.transformer)
    multiply_flat(model)
    decay = FLOW_STEPS * 3 // 10
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, PEAK_LEARNING_RATE, WARM_UP),
            optax.constant_schedule(PEAK_LEARNING_RATE),
            optax.linear_schedule(PEAK_LEARNING_RATE, 0.0, decay),
        ],
        [WARM_UP, FLOW_STEPS - decay],
    )
    optimizer = optax.contrib.muon(
        schedule,
        adam_learning_rate=PEAK_LEARNING_RATE / 2,
        consistent_rms=0.2,
        weight_decay=0.0,
        muon_weight_dimension_numbers=matrices,
    )
    trainer = Trainer("flow", model, loss, optimizer, workdir, seed, average=0.999)
    trainer.run(FLOW_STEPS, batch)
    return trainer.model()


def encoded_clips(vae: WanVAE, workdir: Path, seed: int) -> tuple[list, np.ndarray]:
    """Specs and normalised latents [n T H W C] of the clips of the training; kept in a file for the next start."""
    rng = np.random.default_rng([seed, 2])
    specs = sample_specs(rng, CLIPS)
    file = workdir / "latents.npy"
    if not file.exists():
        encode = nnx.jit(lambda vae, video: vae.encode(video))
        parts = [
            np.asarray(encode(vae, draw(specs[i : i + 32], FRAMES, SIZE, rng)))  #
            for i in range(0, CLIPS, 32)
        ]
        np.save(file, np.concatenate(parts))
    return specs, np.load(file)


def matrices(weights: nnx.State) -> nnx.State:
    """Which axes of each weight Muon (Jordan, 2024) takes as a matrix: the last two of every kernel, stacked or not."""

    def axes(path, weight):
        is_kernel = "kernel" in jax.tree_util.keystr(path)
        return optax.contrib.MuonDimensionNumbers(weight.ndim - 2, weight.ndim - 1) if is_kernel else None

    return jax.tree_util.tree_map_with_path(axes, weights)


def start_as_identity(transformer: WanTransformer) -> None:
    """Blocks that add nothing and an output of zero to begin with (adaLN-Zero, Peebles and Xie, 2023)."""
    for linear in (transformer.time_proj, transformer.proj_out, transformer.blocks.cross_attn.out):
        linear.kernel[...] = jnp.zeros_like(linear.kernel[...])
    table = transformer.blocks.table[...]
    transformer.blocks.table[...] = table.at[:, jnp.array([2, 5])].set(0.0)  # the gates


def multiply_flat(model: nnx.Module) -> None:
    """Has dense layers see a sequence as a matrix: backwards, XLA on the CPU is twice as fast so."""

    def dot(x, kernel, dimension_numbers, **options):
        flat = lax.dot_general(x.reshape(-1, x.shape[-1]), kernel, (((1,), (0,)), ((), ())), **options)
        return flat.reshape(*x.shape[:-1], kernel.shape[-1])

    for _, module in nnx.iter_graph(model):
        if isinstance(module, nnx.Linear):
            module.dot_general = dot
