# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=true, reportIncompatibleVariableOverride=true
"""A CogVideoX checkpoint: its shapes, its handling of pictures, and the frames that it denoises before the video."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from wanjax.checkpoints.networks import network as network_in
from wanjax.checkpoints.sources import Source
from wanjax.errors import WanjaxError
from wanjax.layers.flops import attention_flops
from wanjax.layers.tiling import Tiling
from wanjax.media.pictures import Pictures, fit
from wanjax.models.cogvideox.config import TransformerConfig
from wanjax.models.cogvideox.flops import forward_flops
from wanjax.models.cogvideox.vae_config import VAEConfig
from wanjax.models.t5 import T5Config
from wanjax.pipelines.checks import check_features, check_fields
from wanjax.pipelines.cogvideox.conditioning import POSTERIORS, CogVideoXEncoded, CogVideoXEnds
from wanjax.pipelines.cogvideox.networks import NETWORKS
from wanjax.pipelines.cogvideox.programs import CogVideoXDenoiser, encode_prompts, make_context, split_posterior
from wanjax.pipelines.family import Architecture, Forward, Pipe
from wanjax.pipelines.frames import GivenFrames, encoded
from wanjax.pipelines.guidance import dynamic_scales, grouping
from wanjax.pipelines.sampler import Denoiser, Held, Inputs, led
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.steps import Segment
from wanjax.pipelines.text.tokenizer import TokenBatch
from wanjax.programs import Value
from wanjax.schedulers import Scheduler, from_config
from wanjax.schedulers.ddim import DDIM

OFFICIAL_TEXT_LENGTH = 224  # tokens, of CogVideoX-1.5


@dataclass(frozen=True, kw_only=True)
class CogVideoXArchitecture(Architecture):
    """A CogVideoX checkpoint as its family knows it.

    A transformer of twice as many channels as the latents takes a picture; a patch of two frames is that of 1.5.
    """

    encoded_type = CogVideoXEncoded

    text_encoder: T5Config | None = None
    transformer: TransformerConfig
    vae: VAEConfig
    scheduler: Scheduler = field(default_factory=DDIM)

    @classmethod
    def of(cls, source: Source, encoders: bool = False) -> "CogVideoXArchitecture":
        """Reads the architecture from a checkpoint's configs, that of its text encoder if asked.

        Raises WanjaxError where the configs contradict each other.
        """

        def config(component: str) -> Any:
            return network_in(source, component, NETWORKS).config

        made = cls(
            text_encoder=config("text_encoder") if encoders else None,
            transformer=config("transformer"),
            vae=config("vae"),
            scheduler=from_config(source.config("scheduler")),
        )
        channels, latents = made.transformer.channels_in, made.vae.latent_channels
        pictured = source.index.get("_class_name") == "CogVideoXImageToVideoPipeline"
        if channels != latents * (2 if pictured else 1) or made.transformer.channels_out != latents:
            raise WanjaxError(
                f"the checkpoint's configs contradict each other: a {source.index.get('_class_name')} whose VAE has "
                f"{latents} channels cannot have a transformer from {channels} to {made.transformer.channels_out}"
            )
        return made

    @property
    def pictured(self) -> bool:
        """True for a model that continues a picture."""
        return self.transformer.channels_in > self.vae.latent_channels

    @property
    def purpose(self) -> str:
        return "image to video" if self.pictured else "text to video"

    @property
    def takes(self) -> tuple[str, ...]:
        return ("image",) if self.pictured else ("video",)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("image",) if self.pictured else ()

    @property
    def grid(self) -> int:
        return self.vae.spatial_factor * self.transformer.patch[1]

    @property
    def fixed_size(self) -> tuple[int, int] | None:
        """The only (height, width) of a model with learned positions; None for others, which make any."""
        if self.transformer.added != "learned" or self.transformer.trained_grid is None:
            return None
        _, rows, columns = self.transformer.trained_grid
        return rows * self.grid, columns * self.grid

    def denoised_shape(self, settings: Settings) -> tuple[int, ...]:
        """Returns the shape [1 C T H W] of the latents that are denoised; frames in front fill the patches."""
        batch, channels, frames, *cells = self.latent_shape(settings)
        return batch, channels, frames + -frames % self.transformer.patch[0], *cells

    def latent_fields(self, settings: Settings) -> Mapping[str, tuple[int, ...]]:
        """Returns the fields of `CogVideoXEncoded` that hold latents, by their shapes but for the first axis."""
        _, channels, frames, *cells = self.latent_shape(settings)
        kind, count = ("image", 1) if self.pictured else ("video", frames)
        return {f"{kind}_{name}": (channels, count, *cells) for name in ("latents", "deviation")}

    def forward(self, settings: Settings, encoded: Any = None) -> Forward:
        _, _, *cells = self.denoised_shape(settings)
        config = replace(self.transformer, text_length=self.text_length(settings.follow))
        video = prod(cells) // config.patch_cells
        tokens = config.text_length + video
        return Forward(
            tokens=tokens,
            layers=config.layers,
            heads=config.heads,
            width=config.width,
            scores=config.layers * attention_flops(tokens, tokens, config.width),
            flops=forward_flops(config, video=video),
        )

    @property
    def ways(self) -> bool:
        return True

    def text_length(self, follow: str) -> int:
        """The tokens of a prompt that are read, padding included: of 1.5 the authors' code reads fewer."""
        longest = self.transformer.text_length
        shorter = follow == "official" and self.transformer.patch[0] > 1
        return min(longest, OFFICIAL_TEXT_LENGTH) if shorter else longest

    @property
    def ends(self) -> CogVideoXEnds:
        return CogVideoXEnds()

    def check_settings(self, settings: Settings) -> None:
        super().check_settings(settings)
        if (fixed := self.fixed_size) and settings.size != fixed:
            raise WanjaxError(
                f"{settings.model} has learned positions for {fixed[1]}x{fixed[0]} alone: "
                f"{settings.width}x{settings.height} cannot be made with it"
            )

    def size_for(self, picture: tuple[int, int, int], asked: Settings) -> tuple[int, int]:
        return self.fixed_size or super().size_for(picture, asked)

    def tokens(self, pipe: Pipe, prompts: Sequence[str], follow: str) -> tuple[TokenBatch, ...]:
        return (pipe.components.get("tokenizer").tokenize(prompts, self.text_length(follow)),)

    def encode_prompts(self, pipe: Pipe, settings: Settings) -> CogVideoXEncoded:
        [both] = self.tokens(pipe, [settings.prompt, settings.negative_prompt], settings.follow)
        graphdef, weights = nnx.split(pipe.components.get("text_encoder"))
        return CogVideoXEncoded(*pipe.call(encode_prompts, graphdef, both.ids, weights))

    def encode_pictures(
        self, pipe: Pipe, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        def posterior(frames: Iterable[np.ndarray], scale: float) -> Any:
            """Returns the mean and the deviation of the latents of frames in the video's size, scaled."""
            fitted = [fit(frame, settings.size, settings.resize) for frame in frames]
            return pipe.call(split_posterior, scale, encoded(pipe.components.get("vae"), fitted, tiling, pipe.call))

        made: dict[str, Any] = {}
        if pictures.image is not None:
            made["image_latents"], made["image_deviation"] = posterior([pictures.image], self.vae.picture_scale)
        if pictures.video is not None:
            clip = pictures.video[: settings.frames]
            made["video_latents"], made["video_deviation"] = posterior(clip, self.vae.scaling_factor)
        return made

    def encode_frames(self, pipe: Pipe, frames: GivenFrames, tiling: Tiling | None) -> Float[Value, "1 C _T _H _W"]:
        """Encodes frames to the mean of their posterior."""
        return pipe.call(split_posterior, self.vae.scaling_factor, super().encode_frames(pipe, frames, tiling))[0]

    def check_encoded(self, encoded: CogVideoXEncoded, settings: Settings) -> None:
        right = (len(encoded.prompt_embeds), self.text_length(settings.follow), self.transformer.text_width)
        for name in ("prompt_embeds", "negative_prompt_embeds"):
            check_features(name, getattr(encoded, name), right, settings.model)
        shapes = {name: (None, *shape) for name, shape in self.latent_fields(settings).items()}
        optional = [name for name in shapes if name != "image_latents"]
        check_fields(encoded, encoded._fields[2:6], shapes, optional=optional, purpose=self.purpose)

    def draws(self, settings: Settings, references: int = 0, videos: int = 1) -> Mapping[str, tuple[int, ...]]:
        shapes = dict(super().draws(settings, references, videos))
        for name, (_, mean, _) in POSTERIORS.items():
            if right := self.latent_fields(settings).get(mean):
                shapes[name] = (videos, *right)
        return shapes

    def clean(self, latents: Float[Array, "B C T H W"]) -> Float[Array, "B _T H W C"]:
        return led(jnp.moveaxis(latents, 1, -1), latents.shape[2] + -latents.shape[2] % self.transformer.patch[0])

    def levels(self, settings: Settings) -> Mapping[str, Any]:
        return {"follow": settings.follow}

    def segments(self, schedule: Any, settings: Settings) -> Sequence[Segment]:
        if not (settings.dynamic_guidance and settings.guided):
            return super().segments(schedule, settings)
        scales = dynamic_scales(settings.guidance_scale, schedule.timesteps, settings.steps)
        return [Segment(self.denoisers[0], 0, tuple(scales))]

    def inputs(
        self, pipe: Pipe, network: nnx.Module, segment: Segment, encoded: CogVideoXEncoded, x: Held, batched: bool
    ) -> tuple[Denoiser, Inputs]:
        graphdef, weights = nnx.split(network)
        groups = grouping(segment.guided, batched, pipe.partitioner)
        given = x, weights, encoded[:2], encoded.image_latents, segment.rule.leads
        contexts, shared = pipe.call(make_context, (graphdef, groups), *given)
        return CogVideoXDenoiser(graphdef, self.scheduler), Inputs(weights, contexts, shared, groups.batch * x.shape[0])
