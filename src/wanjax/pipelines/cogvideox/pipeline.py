# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's pipeline: its handling of prompts, pictures, and the frames that it denoises in front of the video."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from wanjax.errors import WanjaxError
from wanjax.layers.tiling import Tiling
from wanjax.media.pictures import Pictures, fit
from wanjax.pipelines.checks import check_features, check_fields, check_taken
from wanjax.pipelines.cogvideox.architecture import CogVideoXArchitecture
from wanjax.pipelines.cogvideox.conditioning import POSTERIORS, CogVideoXEncoded, CogVideoXEnds, led
from wanjax.pipelines.cogvideox.programs import CogVideoXDenoiser, encode_prompts, make_context, split_posterior
from wanjax.pipelines.frames import GivenFrames, Latents, encoded
from wanjax.pipelines.guidance import dynamic_scales, grouping
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.sampler import Denoiser, Held, Inputs
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.steps import Segment
from wanjax.pipelines.tokenizer import Truncation
from wanjax.programs import Value


class CogVideoXPipeline(Pipeline):
    """A CogVideoX checkpoint as a function from prompts, and pictures if it takes them, to videos."""

    architecture: CogVideoXArchitecture
    encoded_type = CogVideoXEncoded

    def check_pictures(self, pictures: Pictures, settings: Settings) -> None:
        task = self.architecture
        check_taken(pictures.given(), settings.model, task.purpose, takes=task.takes, needs=task.needs)

    def size_for(self, picture: tuple[int, int, int], asked: Settings) -> tuple[int, int]:
        fixed = self.architecture.fixed_size
        return fixed if fixed else super().size_for(picture, asked)

    def settings(self, *, size: tuple[int, int] | None = None, **settings: Any) -> Settings:
        """Returns the model's defaults, overridden by the given settings; raises WanjaxError for invalid ones."""
        chosen = super().settings(size=size, **settings)
        fixed = self.architecture.fixed_size
        if fixed and chosen.size != fixed:
            raise WanjaxError(
                f"{chosen.model} has learned positions for {fixed[1]}x{fixed[0]} alone: "
                f"{chosen.width}x{chosen.height} cannot be made with it"
            )
        return chosen

    def truncations(self, prompt: str) -> Sequence[Truncation]:
        return tuple(filter(None, self.tokenizer.tokenize([prompt]).truncated))

    def encode_prompts(self, prompt: str, negative_prompt: str | None = None) -> CogVideoXEncoded:
        negative = self.defaults.negative_prompt if negative_prompt is None else negative_prompt
        ids = self.tokenizer.tokenize([prompt, negative]).ids
        graphdef, weights = nnx.split(self.text_encoder)
        return CogVideoXEncoded(*self.call(encode_prompts, graphdef, ids, weights))

    def encode_pictures(
        self, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        made: dict[str, Any] = {}
        if pictures.image is not None:
            scale = self.architecture.picture_scale
            made["image_latents"], made["image_deviation"] = self._posterior([pictures.image], settings, scale, tiling)
        if pictures.video is not None:
            clip, scale = pictures.video[: settings.frames], self.architecture.vae.scaling_factor
            made["video_latents"], made["video_deviation"] = self._posterior(clip, settings, scale, tiling)
        return made

    def _posterior(
        self, frames: Iterable[np.ndarray], settings: Settings, scale: float, tiling: Tiling | None
    ) -> tuple[Float[Value, "1 C T H W"], Float[Value, "1 C T H W"]]:
        """Returns the mean and the deviation of the latents of frames in the video's size, multiplied by a factor."""
        fitted = [fit(frame, settings.size, settings.resize) for frame in frames]
        return self.call(split_posterior, scale, encoded(self.vae, fitted, tiling, self.call))

    def encode_video(self, frames: GivenFrames, *, tiling: Tiling | None = None) -> Float[Value, "1 C _T _H _W"]:
        """Encodes frames as `Pipeline.encode_video` does: the mean of their posterior."""
        moments = super().encode_video(frames, tiling=tiling)
        return self.call(split_posterior, self.architecture.vae.scaling_factor, moments)[0]

    def check_encoded(self, encoded: CogVideoXEncoded, settings: Settings) -> None:
        config = self.architecture.transformer
        right = (len(encoded.prompt_embeds), config.text_length, config.text_width)
        for name in ("prompt_embeds", "negative_prompt_embeds"):
            check_features(name, getattr(encoded, name), right, settings.model)
        shapes = {name: (None, *shape) for name, shape in self.architecture.latent_fields(settings).items()}
        optional = [name for name in shapes if name != "image_latents"]
        check_fields(encoded, encoded._fields[2:], shapes, optional=optional, purpose=self.architecture.purpose)

    def draws(self, settings: Settings, references: int = 0, videos: int = 1) -> Mapping[str, tuple[int, ...]]:
        shapes = dict(super().draws(settings, references, videos))
        for name, (_, mean, _) in POSTERIORS.items():
            if right := self.architecture.latent_fields(settings).get(mean):
                shapes[name] = (videos, *right)
        return shapes

    def clean(self, latents: Latents) -> Float[Array, "B _T H W C"]:
        patch = self.architecture.transformer.patch[0]
        return led(jnp.moveaxis(latents, 1, -1), latents.shape[2] + -latents.shape[2] % patch)

    ends = CogVideoXEnds()

    def schedule(self, encoded: CogVideoXEncoded, settings: Settings) -> Any:
        """Returns the schedule; a given video skips the noisiest steps."""
        skip = 0 if encoded.video_latents is None else settings.steps - settings.strong_steps
        return self.scheduler.schedule(settings.steps, skip=skip)

    def segments(self, schedule: Any, settings: Settings) -> Sequence[Segment]:
        if not (settings.dynamic_guidance and settings.guided):
            return super().segments(schedule, settings)
        scales = dynamic_scales(settings.guidance_scale, schedule.timesteps, settings.steps)
        return [Segment(self.architecture.denoisers[0], 0, tuple(scales))]

    def inputs(
        self, network: nnx.Module, segment: Segment, encoded: CogVideoXEncoded, x: Held, batched: bool
    ) -> tuple[Denoiser, Inputs]:
        graphdef, weights = nnx.split(network)
        groups = grouping(segment.guided, batched, self.partitioner)
        given = x, weights, encoded[:2], encoded.image_latents
        contexts, shared = self.call(make_context, (graphdef, groups), *given)
        return CogVideoXDenoiser(graphdef, self.scheduler), Inputs(weights, contexts, shared, groups.batch * x.shape[0])
