# SPDX-License-Identifier: Apache-2.0
"""The architecture of a HunyuanVideo checkpoint, read from its configs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from wanjax.checkpoints.networks import Config
from wanjax.checkpoints.networks import network as network_in
from wanjax.checkpoints.sources import Source
from wanjax.errors import WanjaxError
from wanjax.models.hunyuanvideo.config import TransformerConfig
from wanjax.models.hunyuanvideo.flops import forward_flops, joint_attention_flops
from wanjax.models.hunyuanvideo.vae_config import VAEConfig
from wanjax.models.qwen2_vl import Qwen2VLConfig
from wanjax.models.siglip import SiglipVisionConfig
from wanjax.models.t5 import T5Config
from wanjax.pipelines.family import Architecture, Forward
from wanjax.pipelines.hunyuanvideo.conditioning import HunyuanVideoEncoded, lengths_of
from wanjax.pipelines.hunyuanvideo.networks import NETWORKS
from wanjax.pipelines.settings import Settings
from wanjax.schedulers import Scheduler, from_config
from wanjax.schedulers.flow_euler import FlowEuler

IMAGE_TO_VIDEO = "HunyuanVideo15ImageToVideoPipeline"


@dataclass(frozen=True, kw_only=True)
class HunyuanVideoArchitecture(Architecture):
    """The shapes of HunyuanVideo's networks. A `pictured` model continues a picture; its transformer is no other.

    `prompt_tokens` is the number of a prompt's tokens in plans; 256 hold about 180 words.
    """

    text_encoder: Qwen2VLConfig | None = None
    text_encoder_2: T5Config | None = None
    image_encoder: SiglipVisionConfig | None = None
    transformer: TransformerConfig
    vae: VAEConfig
    pictured: bool
    scheduler: Scheduler = field(default_factory=FlowEuler)
    prompt_tokens: int = 256

    @classmethod
    def of(cls, source: Source, encoders: bool = False) -> "HunyuanVideoArchitecture":
        """Reads the architecture from a checkpoint's configs, those of its text and image encoders if asked.

        Raises WanjaxError where the configs contradict each other.
        """

        def config(component: str, *, read: bool = True) -> Any:
            return network_in(source, component, NETWORKS).config if read else None

        pictured = source.index.get("_class_name") == IMAGE_TO_VIDEO
        made = cls(
            text_encoder=config("text_encoder", read=encoders),
            text_encoder_2=config("text_encoder_2", read=encoders),
            image_encoder=config("image_encoder", read=encoders and pictured),
            transformer=config("transformer"),
            vae=config("vae"),
            pictured=pictured,
            scheduler=from_config(source.config("scheduler")),
        )
        channels, latents = made.transformer.channels_in, made.vae.latent_channels
        if (channels, made.transformer.channels_out) != (2 * latents + 1, latents):
            raise WanjaxError(
                f"the checkpoint's configs contradict each other: with a VAE of {latents} channels the transformer has "
                f"{2 * latents + 1} in and {latents} out, not {channels} and {made.transformer.channels_out}"
            )
        return made

    @property
    def purpose(self) -> str:
        return "image to video" if self.pictured else "text to video"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("image",) if self.pictured else ()

    @property
    def networks(self) -> Mapping[str, Config]:
        names = ("text_encoder", "text_encoder_2", "image_encoder", "transformer", "vae")
        return {name: config for name in names if (config := getattr(self, name)) is not None}

    @property
    def radial(self) -> bool:
        return True

    @property
    def grid(self) -> int:
        return self.vae.spatial_factor

    @property
    def image_tokens(self) -> int:
        """The number of a picture's tokens, for plans."""
        return self.image_encoder.tokens if self.pictured and self.image_encoder is not None else 0

    def picture_shapes(self, settings: Settings) -> Mapping[str, tuple[int | None, ...]]:
        """Returns the fields of `HunyuanVideoEncoded` that hold a picture, by their shapes; None is any size."""
        if not self.pictured:
            return {}
        _, channels, _, *cells = self.latent_shape(settings)
        return {"image_embeds": (1, None, self.transformer.image_width), "image_latents": (1, channels, 1, *cells)}

    def forward(self, settings: Settings, encoded: HunyuanVideoEncoded | None = None) -> Forward:
        config, (_, _, *cells) = self.transformer, self.latent_shape(settings)
        prompt, beside = self.prompt_tokens, self.image_tokens
        if encoded is not None:
            [lengths] = lengths_of(encoded.texts[:1], together=False)
            seen = 0 if encoded.image_embeds is None else encoded.image_embeds.shape[1]
            prompt, beside = lengths.prompt, lengths.glyphs + seen
        video = prod(cells)
        return Forward(
            tokens=video + prompt + beside,
            layers=config.layers,
            heads=config.heads,
            width=config.width,
            scores=joint_attention_flops(config, video + prompt + beside),
            flops=forward_flops(config, video=video, prompt=prompt, beside=beside),
        )
