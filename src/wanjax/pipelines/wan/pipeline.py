# SPDX-License-Identifier: Apache-2.0
"""Wan's pipeline: its handling of prompts, pictures and two experts."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from wanjax.layers.tiling import Tiling
from wanjax.media.pictures import PictureOfAnySize, Pictures
from wanjax.pipelines.checks import check_features
from wanjax.pipelines.guidance import grouping
from wanjax.pipelines.keywords import GivenSettings, spelled_out
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.sampler import Denoiser, Held, Inputs
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.steps import Segment
from wanjax.pipelines.tokenizer import TokenBatch, Truncation, clean_prompt
from wanjax.pipelines.wan.architecture import WanArchitecture
from wanjax.pipelines.wan.conditioning import Encoders, WanEncoded
from wanjax.pipelines.wan.experts import EXPERTS, segments
from wanjax.pipelines.wan.programs import (
    TEXT_LENGTH,
    WanDenoiser,
    WanEnds,
    encode_images,
    encode_prompts,
    make_condition,
    make_context,
    resize,
)
from wanjax.programs import Value

OLD_TEXT_LENGTH = 226  # the length of prompts in files of the scripts before wanjax, a mistake


class WanPipeline(Pipeline):
    """A Wan checkpoint as a function from prompts, and pictures if its task has them, to videos."""

    architecture: WanArchitecture
    encoded_type = WanEncoded

    image_encoder = property(lambda self: self.components.get("image_encoder"))
    image_processor = property(lambda self: self.components.get("image_processor"))
    transformer_2 = property(lambda self: self.components.get("transformer_2"))

    @spelled_out(GivenSettings)
    def settings(self, *, size: tuple[int, int] | None = None, **settings: Any) -> Settings:
        """Returns the model's defaults, overridden by the given settings; raises WanjaxError for invalid ones.

        A single guidance scale for a model of two experts applies to both.
        """
        if self.architecture.experts and settings.get("guidance_scale_2") is None:
            settings |= {"guidance_scale_2": settings.get("guidance_scale")}
        return super().settings(size=size, **settings)

    @property
    def begins_from_video(self) -> bool:
        return self.architecture.task.begins_from_video

    def check_pictures(self, pictures: Pictures, settings: Settings) -> None:
        self.architecture.task.check_pictures(pictures, settings)

    def tokenize(self, prompt: str) -> TokenBatch:
        """Returns the cleaned prompt's tokens; `truncated[0]` is the truncation, or None."""
        return self.tokenizer.tokenize([clean_prompt(prompt)])

    def truncations(self, prompt: str) -> Sequence[Truncation]:
        return tuple(filter(None, self.tokenize(prompt).truncated))

    def encode_prompts(self, prompt: str, negative_prompt: str | None = None) -> WanEncoded:
        negative = self.defaults.negative_prompt if negative_prompt is None else negative_prompt
        both = [self.tokenize(text) for text in (prompt, negative)]
        ids, mask = (np.concatenate(x) for x in zip(*((b.ids, b.mask) for b in both), strict=True))
        graphdef, weights = nnx.split(self.text_encoder)
        return WanEncoded(*self.call(encode_prompts, graphdef, ids, mask, weights))

    def encode_pictures(
        self, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        config = self.architecture
        encoders = Encoders(
            partial(self.encode_video, tiling=tiling),
            self.encode_images,
            partial(self.call, make_condition, config.task),
            self._resized,
            config.transformer,
            config.vae,
        )
        return config.task.encode(encoders, pictures, settings)

    def _resized(self, picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Returns a picture of another size on the host; one of zeros where a run is recorded."""
        return self.strategy.read(self.call(resize, size, picture), np.zeros((*size, 3), np.float32))

    def encode_images(self, images: Sequence[PictureOfAnySize]) -> Float[Value, "1 S E"]:
        """Returns the features of images, joined along the sequence, by the checkpoint's vision tower."""
        graphdef, weights = nnx.split(self.image_encoder)
        return self.call(encode_images, graphdef, self.image_processor(images), weights)

    def encoded_from(self, tensors: Mapping[str, Array]) -> WanEncoded:
        """Restores the output of `encode` from its tensors by name; warns where prompts are shorter than Wan's."""
        encoded = super().encoded_from(tensors)
        if encoded.prompt_embeds.shape[1] == OLD_TEXT_LENGTH:
            warnings.warn(
                f"the prompt has {OLD_TEXT_LENGTH} tokens where Wan reads {TEXT_LENGTH}: the video will differ",
                stacklevel=2,
            )
        return encoded

    def check_encoded(self, encoded: WanEncoded, settings: Settings) -> None:
        config = self.architecture.transformer
        for name in ("prompt_embeds", "negative_prompt_embeds"):
            right = (*encoded.prompt_embeds.shape[:2], config.text_width)
            check_features(name, getattr(encoded, name), right, settings.model)
        self.architecture.task.check(encoded, self.architecture.latent_shape(settings), config)

    def references(self, encoded: WanEncoded, settings: Settings) -> int:
        return self.architecture.task.references(encoded, self.architecture.latent_shape(settings))

    @property
    def ends(self) -> WanEnds:
        return WanEnds(self.architecture.task)

    def schedule(self, encoded: WanEncoded, settings: Settings) -> Any:
        """Returns the schedule; a given video skips the noisiest steps."""
        skip = 0 if encoded.video_latents is None else settings.steps - settings.strong_steps
        return self.scheduler.schedule(settings.steps, skip=skip, shift=settings.flow_shift, sigmas=settings.sigmas)

    def noise_range(self, network: str) -> tuple[float, float]:
        if not self.architecture.experts or self.defaults.boundary is None:
            return super().noise_range(network)
        return (self.defaults.boundary, 1.0) if network == EXPERTS[0] else (0.0, self.defaults.boundary)

    def segments(self, schedule: Any, settings: Settings) -> Sequence[Segment]:
        return segments(schedule.timesteps, settings)

    def inputs(
        self,
        network: Any,
        segment: Segment,
        encoded: WanEncoded,
        x: Held,
        batched: bool,
    ) -> tuple[Denoiser, Inputs]:
        graphdef, weights = nnx.split(network)
        task, groups = self.architecture.task, grouping(segment.guided, batched, self.partitioner)
        texts, pictures = encoded[:2], (encoded.condition, encoded.image_embeds)
        contexts, shared = self.call(make_context, (graphdef, task, groups), x, weights, texts, *pictures)
        denoiser = WanDenoiser(graphdef, self.scheduler, task, dense=False if network.attention.radial else None)
        return denoiser, Inputs(weights, contexts, shared, groups.batch * x.shape[0])
