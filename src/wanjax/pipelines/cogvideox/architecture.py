# SPDX-License-Identifier: Apache-2.0
"""The architecture of a CogVideoX checkpoint, read from its configs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from wanjax.checkpoints.networks import Config
from wanjax.checkpoints.networks import network as network_in
from wanjax.checkpoints.sources import Source
from wanjax.errors import WanjaxError
from wanjax.models.cogvideox.config import TransformerConfig
from wanjax.models.cogvideox.flops import forward_flops, self_attention_flops
from wanjax.models.cogvideox.vae_config import VAEConfig
from wanjax.models.t5 import T5Config
from wanjax.pipelines.cogvideox.networks import NETWORKS
from wanjax.pipelines.family import Architecture, Forward
from wanjax.pipelines.settings import Settings
from wanjax.schedulers import Scheduler, from_config
from wanjax.schedulers.ddim import DDIM


@dataclass(frozen=True, kw_only=True)
class CogVideoXArchitecture(Architecture):
    """The shapes of CogVideoX's networks.

    A transformer of twice as many channels as the latents takes a picture; a patch of two frames is that of 1.5.
    """

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
        """The pictures that the model can use, by name."""
        return ("image",) if self.pictured else ("video",)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("image",) if self.pictured else ()

    @property
    def networks(self) -> Mapping[str, Config]:
        found = {"text_encoder": self.text_encoder, "transformer": self.transformer, "vae": self.vae}
        return {name: config for name, config in found.items() if config is not None}

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

    @property
    def picture_scale(self) -> float:
        """The factor of a picture's latents; in 1.5 it is inverted, which its transformer learned."""
        factor = self.vae.scaling_factor
        return 1 / factor if self.vae.invert_scale_latents else factor

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
        config, video = self.transformer, prod(cells) // prod(self.transformer.patch)
        tokens = config.text_length + video
        return Forward(
            tokens=tokens,
            layers=config.layers,
            heads=config.heads,
            width=config.width,
            scores=self_attention_flops(config, tokens),
            flops=forward_flops(config, video=video),
        )
