# SPDX-License-Identifier: Apache-2.0
"""The training loss of a family's denoiser: the mean squared error of its prediction at random noise levels.

For a flow model, this is flow matching (Lipman et al., 2023). For v-prediction, the error of the prediction times σ is
the error of the clean sample. The loss is therefore the squared error of the clean sample, weighted by 1 / (1 - ᾱ). The
reference uses this weighted loss in examples/cogvideo/train_cogvideox_lora.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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
from wanjax.training.adapters import remove_adapters
from wanjax.training.settings_check import check_types

Timesteps = Literal["uniform", "logit-normal", "shift"]
Loss = Callable[[nnx.Module, Any, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]


class Batch(NamedTuple):
    """A training batch.

    Args:
        latents: Latents [B C T H W].
        conditioning: The output of the stage `encode`, for all videos of the batch.
        preservation: The weight [B] of prior preservation for each video, from 0 to 1; None is 0 for all videos.
    """

    latents: Any
    conditioning: Any
    preservation: Any = None


@dataclass(frozen=True)
class NoiseLevels:
    """The distribution of noise levels in training, as fractions of the noise range.

    Args:
        timesteps: `uniform`, `logit-normal` (Esser et al., 2403.03206), or `shift`: uniform levels that a flow shift
            moves towards high noise.
        shift: The flow shift.
        mean: Mean of the logit-normal distribution.
        std: Standard deviation of the logit-normal distribution.
        low: The lowest level: 0, or more for an expert for high noise levels.
        high: The highest level: 1, or less for an expert for low noise levels.
    """

    timesteps: Timesteps = "uniform"
    shift: float = 1.0
    mean: float = 0.0
    std: float = 1.0
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self):
        check_types(self)
        for name in ("shift", "std"):
            if not 0 < (value := getattr(self, name)) < float("inf"):
                raise WanjaxError(f"the {name} of the noise levels is {value}: give a number above 0")
        if not math.isfinite(self.mean):
            raise WanjaxError(f"the mean of the noise levels is {self.mean}: give a finite number, such as 0")

    def draw(self, key: jax.Array, count: int) -> Float[Array, "B"]:
        """Draw random levels."""
        if self.timesteps == "logit-normal":
            low, high = ((_logit(x) - self.mean) / self.std for x in (self.low, self.high))
            return jax.nn.sigmoid(
                self.mean + self.std * jax.random.truncated_normal(key, low, high, (count,), jnp.float32)
            )
        return self.from_uniform(jax.random.uniform(key, (count,), jnp.float32))

    def from_uniform(self, u: Float[Array, "B"]) -> Float[Array, "B"]:
        """Map uniform numbers u in [0, 1] to shifted levels between `low` and `high`."""
        shift = self.shift if self.timesteps == "shift" else 1.0
        low, high = map(float, shift_sigmas(np.array([self.low, self.high]), 1 / shift))
        u = jnp.float32(low) + jnp.float32(high - low) * u
        return jnp.float32(shift) * u / (1 + jnp.float32(shift - 1) * u)


def _logit(x: float) -> float:
    return math.log(x / (1 - x)) if 0 < x < 1 else math.copysign(math.inf, x - 0.5)


def make_loss(pipe: Pipeline, noise_levels: NoiseLevels) -> Loss:
    """Build the loss of a pipeline's denoiser: a function of the network, a `Batch` and a random key."""

    def loss(network: nnx.Module, batch: Batch, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        level_key, noise_key, picture_key = jax.random.split(key, 3)
        fractions = noise_levels.draw(level_key, len(batch.latents))
        noise = jax.random.normal(noise_key, pipe.model.spec.to_training_latents(batch.latents).shape, jnp.float32)
        return denoising_error(pipe, network, batch, fractions, noise, picture_key), {}

    return loss


def denoising_error(
    pipe: Pipeline,
    network: nnx.Module,
    batch: Batch,
    fractions: Float[Array, "B"],
    noise: Float[Array, "B T H W C"],
    key: jax.Array,
) -> Float[Array, ""]:
    """Compute the mean squared error of the prediction at given noise levels.

    For prior preservation, the target is the prediction of the network without its LoRA. If the weight of the
    preservation is between 0 and 1, the target is interpolated between this target and the usual target.

    Args:
        pipe: The pipeline.
        network: The network to train.
        batch: The batch.
        fractions: The noise level of each video, as fractions of the noise range.
        noise: The noise.
        key: The random key for noise in the conditioning, such as in latents that are sampled from a posterior.
    """
    x0 = pipe.model.spec.to_training_latents(batch.latents)
    levels = pipe.scheduler.levels(fractions)
    alphas, sigmas = (x[0].reshape(-1, 1, 1, 1, 1) for x in (levels.alphas, levels.sigmas))
    x = alphas * x0 + sigmas * noise
    runtime, model = pipe.runtime.with_strategy(Inline()), pipe.model
    seed_words = jnp.zeros((len(x), 2), jnp.uint32)  # not used, because all noise comes from an argument
    sampled = draw_posteriors(
        model.spec.posteriors, latents_of(batch.conditioning), seed_words, _picture_noise(pipe, batch, key)
    )
    conditioning = batch.conditioning._replace(**sampled)

    def predict(network: Any) -> Float[Array, "B T H W C"]:
        split_network = SplitNetwork(*nnx.split(network))
        is_dense = False if model.spec.supports_radial and network.attention.radial else None
        [prompt], shared = model.prepare(runtime, split_network, conditioning, x, Preparation(Groups(1, 1)))
        network = nnx.merge(*split_network)
        timesteps = model.denoiser.timesteps(levels)
        return model.denoiser.predict(network, x, timesteps, prompt, shared, dense=is_dense).astype(jnp.float32)

    target = pipe.scheduler.target(alphas, sigmas, x0, noise)
    if batch.preservation is not None:
        base_prediction = jax.lax.stop_gradient(predict(_base_network(pipe, network)))
        preserve_weight = batch.preservation.reshape(-1, 1, 1, 1, 1)
        target = preserve_weight * base_prediction + (1 - preserve_weight) * target
    return jnp.mean(jnp.square(predict(network) - target))


def _base_network(pipe: Pipeline, network: nnx.Module) -> nnx.Module:
    """Return a copy of a network without its LoRA.

    If the training introduced sparse attention, the copy has dense attention.
    """
    network = remove_adapters(network)
    if pipe.components.source is not None and pipe.components.source.is_extended:
        for _, module in nnx.iter_modules(network):
            layer: Any = module
            if isinstance(getattr(layer, "attention", None), AttentionConfig):
                layer.attention = layer.attention.dense_only()
    return network


def _picture_noise(pipe: Pipeline, batch: Batch, key: jax.Array) -> dict[str, jax.Array]:
    """Draw the noise for sampling the latents of conditioning pictures."""
    settings = video_settings(pipe, batch.latents.shape)
    shapes = pipe.model.spec.noise_inputs(settings, 0, len(batch.latents))
    names = [name for name in shapes if name not in (INITIAL, STEP_NOISE)]
    keys = jax.random.split(key, max(1, len(names)))
    return {
        name: jax.random.normal(subkey, shapes[name], jnp.float32) for name, subkey in zip(names, keys, strict=False)
    }


def video_settings(pipe: Pipeline, latents_shape: tuple[int, ...]) -> Settings:
    """Return the settings of videos whose latents have the shape [B C T H W]."""
    vae = pipe.model.vae
    _, _, frames, *latent_size = latents_shape
    height, width = (size * vae.spatial_factor for size in latent_size)
    return pipe.defaults.updated({"frames": (frames - 1) * vae.temporal_factor + 1, "height": height, "width": width})
