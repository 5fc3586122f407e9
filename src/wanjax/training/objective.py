# SPDX-License-Identifier: Apache-2.0
"""The loss of a family's denoiser: the mean squared error of what it predicts at random noise levels.

For a flow this is flow matching (Lipman et al., 2023). For a network that predicts v it is also the error of the clean
sample weighted by 1 / (1 - ᾱ), as the reference's examples/cogvideo/train_cogvideox_lora.py has it: the two errors
differ by the factor σ.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from wanjax.errors import WanjaxError
from wanjax.execution import Inline
from wanjax.kernels.attention import AttentionConfig
from wanjax.pipelines.denoiser import Preparation, draw_posteriors
from wanjax.pipelines.guidance import Groups
from wanjax.pipelines.model import latents_of
from wanjax.pipelines.noise_inputs import INITIAL, STEP_NOISE
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.runtime import SplitNetwork
from wanjax.pipelines.settings import Settings
from wanjax.schedulers.base import shift_sigmas
from wanjax.training.adapters import without_factors

Timesteps = Literal["uniform", "logit-normal", "shift"]
Loss = Callable[[nnx.Module, Any, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]


class Batch(NamedTuple):
    """Latents [B C T H W], what the first stage made for each, and how far each is preserved [B] (None: not at all)."""

    latents: Any
    encoded: Any
    preserved: Any = None


@dataclass(frozen=True)
class NoiseLevels:
    """The distribution of noise levels in training, as fractions of their range.

    `uniform`; `logit-normal` with this mean and deviation (Esser et al., 2403.03206); or `shift`, uniform levels moved
    to high noise by a flow's `shift`. All are cut to the range from `low` to `high`, that of one of two experts.
    """

    timesteps: Timesteps = "uniform"
    shift: float = 1.0
    mean: float = 0.0
    std: float = 1.0
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self):
        if self.timesteps not in get_args(Timesteps):
            names = ", ".join(get_args(Timesteps))
            raise WanjaxError(f"timesteps cannot be drawn by {self.timesteps!r}: give {names}")
        for name in ("shift", "std"):
            if not 0 < (value := getattr(self, name)) < float("inf"):
                raise WanjaxError(f"the {name} of the noise levels is {value}: give a number above 0")
        if not math.isfinite(self.mean):
            raise WanjaxError(f"the mean of the noise levels is {self.mean}: give a finite number, such as 0")

    def draw(self, key: jax.Array, count: int) -> Float[Array, "B"]:
        """Return random levels."""
        if self.timesteps == "logit-normal":
            low, high = ((_logit(x) - self.mean) / self.std for x in (self.low, self.high))
            return jax.nn.sigmoid(
                self.mean + self.std * jax.random.truncated_normal(key, low, high, (count,), jnp.float32)
            )
        return self.at(jax.random.uniform(key, (count,), jnp.float32))

    def at(self, u: Float[Array, "B"]) -> Float[Array, "B"]:
        """Return the levels at fractions u of a uniform distribution, shifted."""
        shift = self.shift if self.timesteps == "shift" else 1.0
        low, high = map(float, shift_sigmas(np.array([self.low, self.high]), 1 / shift))
        u = jnp.float32(low) + jnp.float32(high - low) * u
        return jnp.float32(shift) * u / (1 + jnp.float32(shift - 1) * u)


def _logit(x: float) -> float:
    return math.log(x / (1 - x)) if 0 < x < 1 else math.copysign(math.inf, x - 0.5)


def loss_of(pipe: Pipeline, levels: NoiseLevels) -> Loss:
    """Return the loss of a pipeline's denoiser on a `Batch` and a key."""

    def loss(network: nnx.Module, batch: Batch, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        level_key, noise_key, picture_key = jax.random.split(key, 3)
        fractions = levels.draw(level_key, len(batch.latents))
        noise = jax.random.normal(noise_key, pipe.model.spec.to_training_latents(batch.latents).shape, jnp.float32)
        return error(pipe, network, batch, fractions, noise, picture_key), {}

    return loss


def error(
    pipe: Pipeline,
    network: nnx.Module,
    batch: Batch,
    fractions: Float[Array, "B"],
    noise: Float[Array, "B T H W C"],
    key: jax.Array,
) -> Float[Array, ""]:
    """Return the mean squared error at these noise levels, with this noise; the key draws random pictures.

    The target of preserved latents is what the network predicts for them as it was before its training; of latents that
    are preserved by a part, that part of it and the rest of their own.
    """
    x0 = pipe.model.spec.to_training_latents(batch.latents)
    levels = pipe.scheduler.levels(fractions)
    alphas, sigmas = (x[0].reshape(-1, 1, 1, 1, 1) for x in (levels.alphas, levels.sigmas))
    x = alphas * x0 + sigmas * noise
    runtime, model = pipe.runtime.under(Inline()), pipe.model
    seed_words = jnp.zeros((len(x), 2), jnp.uint32)  # of no seed, since all noise is given
    drawn = draw_posteriors(model.spec.posteriors, latents_of(batch.encoded), seed_words, _pictures(pipe, batch, key))
    conditioning = batch.encoded._replace(**drawn)

    def predict(network: Any) -> Float[Array, "B T H W C"]:
        parts = SplitNetwork(*nnx.split(network))
        dense = False if model.spec.radial_attention and network.attention.radial else None
        [prompt], shared = model.prepare(runtime, parts, conditioning, x, Preparation(Groups(1, 1)))
        network = nnx.merge(*parts)
        times = model.denoiser.timesteps(levels)
        return model.denoiser.predict(network, x, times, prompt, shared, dense=dense).astype(jnp.float32)

    target = pipe.scheduler.target(alphas, sigmas, x0, noise)
    if batch.preserved is not None:
        untrained = jax.lax.stop_gradient(predict(_untrained(pipe, network)))
        weight = batch.preserved.reshape(-1, 1, 1, 1, 1)
        target = weight * untrained + (1 - weight) * target
    return jnp.mean(jnp.square(predict(network) - target))


def _untrained(pipe: Pipeline, network: nnx.Module) -> nnx.Module:
    """Return a network without its LoRA, which attends to all tokens where it did before its training."""
    network = without_factors(network)
    if pipe.components.source is not None and pipe.components.source.extended:
        for _, module in nnx.iter_modules(network):
            each: Any = module
            if isinstance(getattr(each, "attention", None), AttentionConfig):
                each.attention = each.attention.dense_only()
    return network


def _pictures(pipe: Pipeline, batch: Batch, key: jax.Array) -> dict[str, jax.Array]:
    """Return the noise of pictures whose latents are random."""
    settings = settings_of(pipe, batch.latents.shape)
    shapes = pipe.model.spec.noise_inputs(settings, 0, len(batch.latents))
    names = [name for name in shapes if name not in (INITIAL, STEP_NOISE)]
    keys = jax.random.split(key, max(1, len(names)))
    return {name: jax.random.normal(k, shapes[name], jnp.float32) for name, k in zip(names, keys, strict=False)}


def settings_of(pipe: Pipeline, latents: tuple[int, ...]) -> Settings:
    """Return the settings of videos whose latents have this shape [B C T H W]."""
    vae = pipe.model.vae
    _, _, frames, *cells = latents
    height, width = (n * vae.spatial_factor for n in cells)
    return pipe.defaults.updated({"frames": (frames - 1) * vae.temporal_factor + 1, "height": height, "width": width})
