# SPDX-License-Identifier: Apache-2.0
"""The methods in which the pipelines of families differ: those that each implements, and those that it may override."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from wanjax.layers.tiling import Tiling
from wanjax.media.pictures import Pictures, size_within
from wanjax.pipelines.draws import INITIAL, OF_STEPS
from wanjax.pipelines.frames import Latents
from wanjax.pipelines.model import Model
from wanjax.pipelines.preview import Look
from wanjax.pipelines.sampler import Denoiser, Ends, Held, Inputs
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.steps import Segment
from wanjax.pipelines.tokenizer import Truncation

Encoded = Any  # the family's own NamedTuple of arrays, each with a first axis of size 1


class Hooks(Model, ABC):
    """A model, and the methods that its family adds to it for a pipeline."""

    encoded_type: type[Any]
    """The type that `encode` returns; its fields are the tensors of the first stage's file."""
    ends: Ends = Ends()
    """The two ends of denoising."""
    block_frames: int = 0
    """The number of latent frames of each block of a video that is made block by block; 0 for one made as a whole."""

    @abstractmethod
    def check_pictures(self, pictures: Pictures, settings: Settings) -> None:
        """Raises WanjaxError unless the model takes these pictures and needs no others."""

    @abstractmethod
    def truncations(self, prompt: str) -> Sequence[Truncation]:
        """Returns the parts of a prompt that the model does not read, if any."""

    @abstractmethod
    def encode_prompts(self, prompt: str, negative_prompt: str | None = None) -> Encoded:
        """Encodes a prompt and the negative prompt (None is the model's default), with the text encoders alone."""

    @abstractmethod
    def colours(self) -> Look:
        """Returns what makes previews of latents."""

    @abstractmethod
    def encode_pictures(
        self, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        """Encodes the pictures of `prepare` without the text encoders; returns fields of `encoded_type`."""

    @abstractmethod
    def check_encoded(self, encoded: Encoded, settings: Settings) -> None:
        """Raises WanjaxError unless this output of `encode` fits a video of these settings."""

    @abstractmethod
    def schedule(self, encoded: Encoded, settings: Settings) -> Any:
        """Returns the noise levels of the steps, arrays of the host; a given video skips the noisiest."""

    @abstractmethod
    def inputs(
        self, network: nnx.Module, segment: Segment, encoded: Encoded, x: Held, batched: bool
    ) -> tuple[Denoiser, Inputs]:
        """Returns the denoiser of a segment's network, and the inputs that its steps share."""

    def prepared(
        self,
        network: nnx.Module,
        segment: Segment,
        encoded: Encoded,
        x: Held,
        batched: bool,
        block: int,
        past: Any,
    ) -> tuple[Denoiser, Inputs, Any]:
        """Returns the denoiser and the inputs of a block, counted from 0, and what is kept of the blocks before it."""
        return *self.inputs(network, segment, encoded, x, batched), past

    def renewed(self, network: nnx.Module, past: Any, inputs: Inputs, x: Held) -> Any:
        """Returns what the next block is given, once a block is finished; the buffers of `past` may be reused."""
        return past

    def segments(self, schedule: Any, settings: Settings) -> Sequence[Segment]:
        """Returns the steps of each network, and their guidance scales."""
        steps = len(schedule.timesteps)
        return [Segment(self.architecture.denoisers[0], 0, (settings.guidance_scale,) * steps)]

    def references(self, encoded: Encoded, settings: Settings) -> int:
        """Returns the number of reference latent frames, which are denoised before the video's and then dropped."""
        return 0

    def noise_shape(self, settings: Settings, references: int = 0) -> tuple[int, ...]:
        """Returns the shape [1 C T H W] of the initial noise, with all frames that are dropped before the video's."""
        batch, channels, frames, height, width = self.architecture.denoised_shape(settings)
        return batch, channels, references + frames, height, width

    def draws(self, settings: Settings, references: int = 0, videos: int = 1) -> Mapping[str, tuple[int, ...]]:
        """Returns the shapes of the random arrays that can be given for videos made together, by name.

        `step_noise` has a row for each step of the settings; those that a given video skips are not used.
        """
        initial = (videos, *self.noise_shape(settings, references)[1:])
        of_steps = {OF_STEPS: (settings.steps, *initial)} if self.scheduler.stochastic else {}
        return {INITIAL: initial} | of_steps

    def size_for(self, picture: tuple[int, int, int], asked: Settings) -> tuple[int, int]:
        """Returns the size of a video of a picture [H W 3], where none is given."""
        return size_within(picture, asked.height * asked.width, self.grid)

    def noise_range(self, network: str) -> tuple[float, float]:
        """Returns the noise levels, from 0 to 1, between which a network denoises."""
        return 0.0, 1.0

    def clean(self, latents: Latents) -> Float[Array, "B _T H W C"]:
        """Returns the latents of encoded videos [B C T H W] as the network is trained to make them."""
        return jnp.moveaxis(latents, 1, -1)

    @property
    def grid(self) -> int:
        """The number of pixels of which a video's height and width are multiples."""
        return self.architecture.grid
