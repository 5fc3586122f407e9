# SPDX-License-Identifier: Apache-2.0
"""Train the small diffusion transformer and its text encoder together, by flow matching on encoded clips.

Flow matching (Lipman et al., 2023; Liu et al., rectified flow, 2023): at noise level s, a clip x and noise e are mixed
to (1 - s) x + s e, and the transformer predicts the velocity e - x. First it learns to make clips from a prompt. Then
it also learns to continue from a picture: the first frame's latents are the picture's latents, without noise and at
timestep 0.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from captions import caption, motion_caption
from clips import Spec, draw, sample_specs
from flax import nnx
from loop import ClipTrainer
from recipe import CLIPS, FLOW_BATCH, FLOW_STEPS, FRAMES, PICTURE_STEPS, SIZE
from tokenizer import MAX_LENGTH
from tokenizer import build as build_tokenizer

from wanjax.models.t5 import T5Encoder
from wanjax.models.wan.transformer import WanTransformer
from wanjax.models.wan.vae import WanVAE
from wanjax.pipelines.wan.programs import encode_text
from wanjax.training.optimizers import muon_dimensions

PEAK_LEARNING_RATE = 2e-3
WARM_UP = 200  # steps
EMPTY_CAPTIONS = 0.1  # fraction of clips without a prompt, for guidance
MOTION_ONLY = 0.4  # fraction of clips with a picture whose caption names only the motion
NOISE_MEAN, NOISE_STD = 0.5, 1.0  # of the logit of the noise level


class PromptedTransformer(nnx.Module):
    """The text encoder and the transformer, which are trained together."""

    def __init__(self, text_encoder: T5Encoder, transformer: WanTransformer):
        self.text_encoder = text_encoder
        self.transformer = transformer


def text_loss(model: PromptedTransformer, batch: dict, key: jax.Array) -> tuple[jax.Array, dict]:
    """Return the mean squared error of the velocity at random noise levels."""
    return velocity_error(model, batch, key), {}


def text_and_picture_loss(model: PromptedTransformer, batch: dict, key: jax.Array) -> tuple[jax.Array, dict]:
    """Return the same error, with the first frame as an input for the second half of the batch."""
    half = FLOW_BATCH // 2
    text = velocity_error(model, {name: x[:half] for name, x in batch.items()}, key)
    picture = velocity_error(
        model, {name: x[half:] for name, x in batch.items()}, jax.random.fold_in(key, 1), clean_frames=1
    )
    return (text + picture) / 2, {"text": text, "picture": picture}


def velocity_error(model: PromptedTransformer, batch: dict, key: jax.Array, clean_frames: int = 0) -> jax.Array:
    """Return the velocity's error over all latent frames except the first `clean_frames`, which have no noise."""
    level_key, noise_key = jax.random.split(key)
    x = batch["latents"]
    level = jax.nn.sigmoid(NOISE_MEAN + NOISE_STD * jax.random.normal(level_key, x.shape[:1]))
    s = level[:, None, None, None, None]
    noise = jax.random.normal(noise_key, x.shape)
    noisy = ((1.0 - s) * x + s * noise).at[:, :clean_frames].set(x[:, :clean_frames])
    text = encode_text(model.text_encoder, batch["ids"], batch["mask"])
    context, rope = model.transformer.context(text), model.transformer.rope(model.transformer.grid(noisy))
    velocity = model.transformer(noisy, 1000.0 * level, context, rope, clean_frames=clean_frames)
    return jnp.mean((velocity - (noise - x))[:, clean_frames:] ** 2)


def train_flow(model: PromptedTransformer, vae: WanVAE, workdir: Path, seed: int) -> PromptedTransformer:
    """Train the networks, or resume their training, and return them."""
    specs, latents = encoded_clips(vae, workdir, seed)
    tokenizer = build_tokenizer()
    tokenizer.enable_truncation(MAX_LENGTH)
    tokenizer.enable_padding(length=MAX_LENGTH, pad_id=0, pad_token="<pad>")

    def batch(rng: np.random.Generator, pictures: bool) -> dict:
        chosen = rng.integers(0, len(specs), FLOW_BATCH)
        words = [draw_caption(specs[i], rng, pictures and n >= FLOW_BATCH // 2) for n, i in enumerate(chosen)]
        tokens = tokenizer.encode_batch(words)
        return {
            "latents": latents[chosen],
            "ids": np.array([t.ids for t in tokens], np.int32),
            "mask": np.array([t.attention_mask for t in tokens], bool),
        }

    start_as_identity(model.transformer)
    text_trainer = ClipTrainer(
        "flow", model, text_loss, muon(PEAK_LEARNING_RATE, FLOW_STEPS), workdir, seed, ema_decay=0.999
    )
    text_trainer.train(FLOW_STEPS, partial(batch, pictures=False))
    optimizer = muon(PEAK_LEARNING_RATE / 2, PICTURE_STEPS)
    picture_trainer = ClipTrainer(
        "pictures", text_trainer.model(), text_and_picture_loss, optimizer, workdir, seed + 1, ema_decay=0.999
    )
    picture_trainer.train(PICTURE_STEPS, partial(batch, pictures=True))
    return picture_trainer.model()


def draw_caption(spec: Spec, rng: np.random.Generator, picture: bool) -> str:
    """Draw a caption for training: sometimes an empty one, and with a picture sometimes only the motion."""
    if rng.random() < EMPTY_CAPTIONS:
        return ""
    return motion_caption(spec, rng) if picture and rng.random() < MOTION_ONLY else caption(spec, rng)


def muon(peak: float, steps: int) -> optax.GradientTransformation:
    """Return Muon for kernels and Adam for the rest: warm-up, a constant rate, and linear decay in the last 30 %."""
    decay = steps * 3 // 10
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, WARM_UP),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, decay),
        ],
        [WARM_UP, steps - decay],
    )
    return optax.contrib.muon(
        schedule,
        adam_learning_rate=peak / 2,
        consistent_rms=0.2,
        weight_decay=0.0,
        muon_weight_dimension_numbers=muon_dimensions,
    )


def encoded_clips(vae: WanVAE, workdir: Path, seed: int) -> tuple[list, np.ndarray]:
    """Return specs and normalised latents [B T H W C] of the training clips; the latents are cached in a file."""
    rng = np.random.default_rng([seed, 2])
    specs = sample_specs(rng, CLIPS)
    file = workdir / "latents.npy"
    if not file.exists():
        encode = nnx.jit(lambda vae, video: vae.encode_chunk(video, None)[0])
        parts = [
            np.asarray(encode(vae, draw(specs[i : i + 32], FRAMES, SIZE, rng)))  #
            for i in range(0, CLIPS, 32)
        ]
        np.save(file, np.concatenate(parts))
    return specs, np.load(file)


def start_as_identity(transformer: WanTransformer) -> None:
    """Initialise every block to the identity and the output to zero (adaLN-Zero, Peebles and Xie, 2023)."""
    for linear in (transformer.time_proj, transformer.proj_out, transformer.blocks.cross_attn.out):
        linear.kernel[...] = jnp.zeros_like(linear.kernel[...])
    table = transformer.blocks.table[...]
    transformer.blocks.table[...] = table.at[:, jnp.array([2, 5])].set(0.0)  # the gates
