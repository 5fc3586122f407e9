# SPDX-License-Identifier: Apache-2.0
"""The noise that torch's generator on a CPU draws from a seed, by NumPy alone, for the setting `rng`.

diffusers draws a video's noise in this order: the noise of sampled picture latents, the initial noise, and the noise of
each step of a stochastic solver. Each video has a generator of its own. Arrays that a caller provides are not drawn.

The generator is the Mersenne Twister MT19937, seeded with the low 32 bits of the seed. Normally distributed numbers
follow Box and Muller ("A Note on the Generation of Random Normal Deviates", 1958) in the layout of torch's
aten/src/ATen/native/cpu/DistributionTemplates.h: sixteen uniform numbers at a time give eight cosines and their eight
sines. The logarithms and cosines of NumPy and of torch may round differently, by at most 5e-7.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float, Float32

GROUP_SIZE = 16  # numbers that are transformed together
BLOCK_SIZE = 2**14  # numbers that are drawn at once, so that they stay in a processor's cache
SEED_MASK = 0xFFFFFFFF  # the bits of a seed that count
Shape = tuple[int, ...]
Noise = Float[np.ndarray, "B C ..."]


class TorchGenerator:
    """A generator that draws what `torch.Generator().manual_seed(seed)` draws.

    Args:
        seed: The seed, at least 0.
    """

    def __init__(self, seed: int):
        self._bits = np.random.MT19937()
        np.random.RandomState(self._bits).seed(seed & SEED_MASK)
        self._next_number: float | None = None  # the unused second number of a pair; only small arrays leave one

    def normal(self, shape: Shape, dtype: DTypeLike = np.float32) -> Float[np.ndarray, "..."]:
        """Draw normally distributed numbers, as `torch.randn(shape, generator=generator, dtype=dtype)` does.

        Args:
            shape: The shape of the array.
            dtype: A float type of at most 32 bits. The numbers are float32, rounded to this type.
        """
        count = math.prod(shape)
        numbers = np.empty(count, np.float32)
        if count < GROUP_SIZE:
            for index in range(count):
                numbers[index] = self._one_normal()
        else:
            grouped_count = count // GROUP_SIZE * GROUP_SIZE
            for start in range(0, grouped_count, BLOCK_SIZE):
                block = numbers[start : min(start + BLOCK_SIZE, grouped_count)]
                block[:] = _pairs_to_normal(self._uniform(len(block)))
            if grouped_count < count:  # torch draws the last sixteen numbers again
                self._bits.random_raw(_unused_draws(count, dtype), output=False)
                numbers[-GROUP_SIZE:] = _pairs_to_normal(self._uniform(GROUP_SIZE))
        return numbers.reshape(shape).astype(jnp.dtype(dtype), copy=False)

    def skip(self, shape: Shape, dtype: DTypeLike = np.float32) -> None:
        """Advance the generator as `normal` does, without computing the numbers.

        Args:
            shape: The shape of the array.
            dtype: The type of its numbers.
        """
        count = math.prod(shape)
        if count < GROUP_SIZE:
            self.normal(shape)
        else:
            grouped_count = -(-count // GROUP_SIZE) * GROUP_SIZE
            self._bits.random_raw(grouped_count + _unused_draws(count, dtype), output=False)

    def _uniform(self, count: int) -> Float32[np.ndarray, " N"]:
        """Draw numbers in [0, 1) with 24 bits each."""
        bits = self._bits.random_raw(count).astype(np.uint32) & np.uint32(2**24 - 1)
        return bits.astype(np.float32) * np.float32(2.0**-24)

    def _one_normal(self) -> float:
        """Draw one number of a small array, in float64. Every second call returns the other number of a pair."""
        if self._next_number is not None:
            number, self._next_number = self._next_number, None
            return number
        first, second = (self._uniform_of_53_bits() for _ in range(2))
        radius, angle = math.sqrt(-2 * math.log1p(-second)), 2 * math.pi * first
        self._next_number = radius * math.sin(angle)
        return radius * math.cos(angle)

    def _uniform_of_53_bits(self) -> float:
        high, low = (int(word) for word in self._bits.random_raw(2))
        return ((high << 32 | low) & (2**53 - 1)) * 2.0**-53


def _unused_draws(count: int, dtype: DTypeLike) -> int:
    """Count the uniform numbers that torch draws and does not use for the last, incomplete group of a large array.

    torch draws float32 numbers for the whole array, and then sixteen new ones for its end. For the types of 16 bits it
    draws one group at a time.
    """
    return count % GROUP_SIZE if jnp.dtype(dtype).itemsize == 4 else 0


def _pairs_to_normal(uniform: Float32[np.ndarray, " N"]) -> Float32[np.ndarray, " N"]:
    """Convert uniform numbers to normally distributed ones. Each group has eight radii, then eight angles."""
    groups = uniform.reshape(-1, 2, GROUP_SIZE // 2)
    numbers = np.empty_like(groups)
    radius, angle = np.sqrt(np.float32(-2) * np.log(1 - groups[:, 0])), np.float32(2 * np.pi) * groups[:, 1]
    np.multiply(radius, np.cos(angle), out=numbers[:, 0])
    np.multiply(radius, np.sin(angle), out=numbers[:, 1])
    return numbers.reshape(-1)


class NoiseSpec(NamedTuple):
    """How a family's reference draws noise, apart from the order of the arrays.

    Args:
        frames_first: Whether frames precede channels, [B T C H W], in the noise of latents.
        rounded: Whether the numbers are rounded to the dtype of the network; otherwise they are float32.
    """

    frames_first: bool = False
    rounded: bool = False


class TorchNoise:
    """Draws the noise of a batch of videos. While a run is traced, nothing is drawn and arrays are zeros.

    Args:
        seeds: The seed of each video.
        spec: How the family's reference draws noise.
        dtype: The dtype of the network.
        executes: False while a run is traced.
    """

    def __init__(self, seeds: Sequence[int], spec: NoiseSpec, dtype: DTypeLike, *, executes: bool):
        self._generators = [TorchGenerator(seed) for seed in seeds] if executes else None
        self._frames_first, self.dtype = spec.frames_first, jnp.dtype(dtype if spec.rounded else np.float32)

    def draw(self, shape: Shape) -> Noise:
        """Draw noise for latents [B C T H W], or [B C L] for a modality that is not a video.

        Args:
            shape: The shape, with one video per seed.
        """
        if not (self._frames_first and len(shape) == 5):
            return self._draw(shape, self.dtype)
        batch, channels, frames, *latent_size = shape
        return np.swapaxes(self._draw((batch, frames, channels, *latent_size), self.dtype), 1, 2)

    def draw_posterior(self, shape: Shape, dtype: DTypeLike) -> Noise:
        """Draw noise for sampled latents of pictures, [B C T H W]; channels always precede frames.

        Args:
            shape: The shape, with one video per seed.
            dtype: The dtype of the autoencoder.
        """
        return self._draw(shape, dtype)

    def skip(self, shape: Shape) -> None:
        """Advance the generators as `draw` does, without computing the numbers.

        Args:
            shape: The shape, with one video per seed.
        """
        for generator in self._generators or ():
            generator.skip((1, *shape[1:]), self.dtype)

    def _draw(self, shape: Shape, dtype: DTypeLike) -> Noise:
        if self._generators is None:
            return np.broadcast_to(np.zeros((), jnp.dtype(dtype)), shape)
        return np.concatenate([generator.normal((1, *shape[1:]), dtype) for generator in self._generators])


class StepNoise:
    """The noise that the steps of a chunk add. Each step's noise is drawn just before the step.

    Args:
        source: Draws the noise.
        draws: The number of arrays that the reference draws in each step. A step uses the last of them.
        shapes: The shape of the noise of each modality, [B C ...], by name.
    """

    def __init__(self, source: TorchNoise, draws: Sequence[int], shapes: Mapping[str, Shape]):
        self._source, self._draws, self._shapes, self._next_step = source, draws, shapes, 0

    def draw(self, index: int) -> dict[str, Noise]:
        """Draw the noise of a step, channels last, by modality. Return zeros for a step for which the reference draws
        no noise.

        Args:
            index: The index of the step. The noise of earlier steps that was not drawn is skipped.
        """
        self.skip_to(index)
        self._skip(self._draws[index] - 1)
        self._next_step = index + 1
        draw = self._source.draw if self._draws[index] else partial(np.zeros, dtype=self._source.dtype)
        return {name: np.moveaxis(draw(shape), 1, -1) for name, shape in self._shapes.items()}

    def skip_to(self, index: int) -> None:
        """Skip the noise of all steps before a step.

        Args:
            index: The index of the step. The number of all steps skips the noise of every step.
        """
        self._skip(sum(self._draws[self._next_step : index]))
        self._next_step = max(self._next_step, index)

    def _skip(self, count: int) -> None:
        """Skip arrays of noise."""
        for shape in [*self._shapes.values()] * count:
            self._source.skip(shape)
