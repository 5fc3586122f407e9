# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=true, reportIncompatibleVariableOverride=true
"""A HunyuanVideo checkpoint: its shapes, and its handling of prompts, quoted text and images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from wanjax.checkpoints.network_kinds import network as network_in
from wanjax.checkpoints.sources import Source
from wanjax.errors import WanjaxError
from wanjax.execution import ArrayOrShape
from wanjax.layers.flops import attention_flops
from wanjax.layers.tiling import Tiling
from wanjax.media.inputs import IMAGE
from wanjax.media.pictures import PictureOfAnySize, Pictures
from wanjax.models.hunyuanvideo.config import TransformerConfig, forward_flops
from wanjax.models.hunyuanvideo.vae_config import VAEConfig
from wanjax.models.qwen2_vl import Qwen2VLConfig
from wanjax.models.siglip import SiglipVisionConfig
from wanjax.models.t5 import T5Config
from wanjax.pipelines.denoiser import Denoiser, LatentArray, Preparation
from wanjax.pipelines.frames import encode_clip
from wanjax.pipelines.hunyuanvideo.conditioning import HunyuanVideoConditioning, fit_image, size_for_image, used_lengths
from wanjax.pipelines.hunyuanvideo.networks import NETWORKS
from wanjax.pipelines.hunyuanvideo.programs import (
    HunyuanVideoDenoiser,
    encode_chats,
    encode_glyphs,
    encode_images,
    make_context,
)
from wanjax.pipelines.hunyuanvideo.text import NUM_TEMPLATE_TOKENS, tokenize_chats, tokenize_glyphs
from wanjax.pipelines.model import ForwardCost, ModelSpec, VideoModel
from wanjax.pipelines.runtime import Runtime, SplitNetwork
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.text.tokenizer import TokenBatch
from wanjax.pipelines.torch_noise import NoiseSpec
from wanjax.pipelines.validation import FieldShape
from wanjax.schedulers import Scheduler, from_config
from wanjax.schedulers.flow_euler import FlowEuler

IMAGE_TO_VIDEO = "HunyuanVideo15ImageToVideoPipeline"


@dataclass(frozen=True, kw_only=True)
class HunyuanVideoModel(VideoModel[HunyuanVideoConditioning]):
    """A HunyuanVideo checkpoint, by the configs of its networks.

    Args:
        text_encoder: The language model's config; None if it was not read.
        text_encoder_2: The config of the encoder of quoted text; None if it was not read.
        image_encoder: The vision tower's config; None if it was not read.
        transformer: The denoiser's config.
        vae: The autoencoder's config.
        starts_from_image: Whether the video starts from an image. The transformer's config does not depend on it.
        scheduler: The checkpoint's scheduler.
        prompt_tokens: The number of tokens of a prompt in plans; 256 hold about 180 words.
    """

    conditioning_type = HunyuanVideoConditioning

    text_encoder: Qwen2VLConfig | None = None
    text_encoder_2: T5Config | None = None
    image_encoder: SiglipVisionConfig | None = None
    transformer: TransformerConfig
    vae: VAEConfig
    starts_from_image: bool
    scheduler: Scheduler = field(default_factory=FlowEuler)
    prompt_tokens: int = 256

    @classmethod
    def of(cls, source: Source, reads_encoder_configs: bool = False) -> "HunyuanVideoModel":
        """Read a model from a checkpoint's configs.

        Args:
            source: The checkpoint.
            reads_encoder_configs: Whether to read the configs of the text and image encoders too.

        Raises:
            WanjaxError: The configs contradict each other.
        """

        def config(component: str, *, read: bool = True) -> Any:
            return network_in(source, component, NETWORKS).config if read else None

        starts_from_image = source.index.get("_class_name") == IMAGE_TO_VIDEO
        model = cls(
            text_encoder=config("text_encoder", read=reads_encoder_configs),
            text_encoder_2=config("text_encoder_2", read=reads_encoder_configs),
            image_encoder=config("image_encoder", read=reads_encoder_configs and starts_from_image),
            transformer=config("transformer"),
            vae=config("vae"),
            starts_from_image=starts_from_image,
            scheduler=from_config(source["scheduler"].config()),
        )
        channels, latent_channels = model.transformer.channels_in, model.vae.latent_channels
        if (channels, model.transformer.channels_out) != (2 * latent_channels + 1, latent_channels):
            raise WanjaxError(
                f"the checkpoint's configs contradict each other: for a VAE of {latent_channels} channels the "
                f"transformer needs {2 * latent_channels + 1} in and {latent_channels} out, not {channels} and "
                f"{model.transformer.channels_out}"
            )
        return model

    @cached_property
    def spec(self) -> ModelSpec:
        names = ("text_encoder", "text_encoder_2", "image_encoder", "transformer", "vae")
        return ModelSpec(
            task="image to video" if self.starts_from_image else "text to video",
            size_multiple=self.vae.spatial_factor,
            vae=self.vae,
            scheduler=self.scheduler,
            networks={name: config for name in names if (config := getattr(self, name)) is not None},
            cache_tables=self.tables,
            inputs=(IMAGE.needed,) if self.starts_from_image else (),
            supports_radial=True,
            max_frames=self.vae.longest_video,
            noise_spec=NoiseSpec(rounded=True),
        )

    @property
    def denoiser(self) -> Denoiser:
        return HunyuanVideoDenoiser(self.transformer.uses_meanflow)

    @property
    def image_tokens(self) -> int:
        """The number of tokens of an image, for plans."""
        return self.image_encoder.tokens if self.starts_from_image and self.image_encoder is not None else 0

    def picture_shapes(self, settings: Settings) -> Mapping[str, tuple[int | None, ...]]:
        """Return the shapes of the image fields of `HunyuanVideoConditioning`, by field; None is any size.

        Args:
            settings: Settings of the video.
        """
        if not self.starts_from_image:
            return {}
        _, channels, _, *latent_size = self.spec.latent_shape(settings)
        return {
            "image_embeds": (1, None, self.transformer.image_width),
            "image_latents": (1, channels, 1, *latent_size),
        }

    def cost(self, settings: Settings, conditioning: HunyuanVideoConditioning | None = None) -> ForwardCost:
        config, (_, _, *latent_size) = self.transformer, self.spec.latent_shape(settings)
        prompt_tokens, other_tokens = self.prompt_tokens, self.image_tokens
        if conditioning is not None:
            [lengths] = used_lengths(conditioning.texts[:1], batched=False)
            image_tokens = 0 if conditioning.image_embeds is None else conditioning.image_embeds.shape[1]
            prompt_tokens, other_tokens = lengths.prompt, lengths.glyphs + image_tokens
        video_tokens = prod(latent_size)
        tokens = video_tokens + prompt_tokens + other_tokens
        return ForwardCost(
            num_tokens=tokens,
            num_layers=config.layers,
            num_heads=config.heads,
            width=config.width,
            attention_flops=config.layers * attention_flops(tokens, tokens, config.width),
            flops=forward_flops(
                config, video_tokens=video_tokens, prompt_tokens=prompt_tokens, other_tokens=other_tokens
            ),
        )

    def size_for(self, picture: tuple[int, int, int], settings: Settings) -> tuple[int, int]:
        return size_for_image(picture, self.transformer.target_size, self.spec.size_multiple)

    def tokenize(self, runtime: Runtime, prompts: Sequence[str], reference_impl: str) -> tuple[TokenBatch, ...]:
        """Tokenize prompts and their quoted text."""
        chats, glyphs = runtime.components.get("tokenizer"), runtime.components.get("tokenizer_2")
        return tokenize_chats(chats, prompts), tokenize_glyphs(glyphs, prompts)

    def encode_text(self, runtime: Runtime, settings: Settings) -> HunyuanVideoConditioning:
        chats, glyph_tokens = self.tokenize(runtime, [settings.prompt, settings.negative_prompt], settings.follow)
        mask = chats.mask[:, NUM_TEMPLATE_TOKENS:]
        graphdef, weights = runtime.split("text_encoder")
        embeds, glyph_embeds = (
            runtime.call(encode_chats, graphdef, chats.ids, mask, weights),
            self._encode_glyphs(runtime, glyph_tokens, settings.dtype),
        )
        fields_of_texts: Any = (
            (embeds[i], mask[i : i + 1], glyph_embeds[i], glyph_tokens.mask[i : i + 1]) for i in (0, 1)
        )
        return HunyuanVideoConditioning(*(x for text in fields_of_texts for x in text))

    def _encode_glyphs(self, runtime: Runtime, glyph_tokens: TokenBatch, dtype: str) -> Sequence[Any]:
        """Encode both quoted texts. If nothing is quoted, return zeros without loading the encoder."""
        if not glyph_tokens.mask.any():
            shape = (1, *glyph_tokens.ids.shape[1:], self.transformer.glyph_width)
            return [np.zeros(shape, jnp.dtype(dtype))] * 2
        graphdef, weights = runtime.split("text_encoder_2")
        return runtime.call(encode_glyphs, graphdef, glyph_tokens.ids, glyph_tokens.mask, weights)

    def encode_inputs(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        if (picture := pictures.picture("image")) is None:
            return {}
        frame = fit_image(picture, settings.size, settings.resize)
        latents = encode_clip(runtime.components.get("vae"), frame[None], tiling, runtime.call)
        return {"image_embeds": self.encode_images(runtime, [frame]), "image_latents": latents}

    def encode_images(self, runtime: Runtime, images: Sequence[PictureOfAnySize]) -> Float[ArrayOrShape, "B S E"]:
        """Encode images with the checkpoint's vision tower.

        Args:
            runtime: Networks, devices and strategy.
            images: The images, of any size.
        """
        graphdef, weights = runtime.split("image_encoder")
        return runtime.call(encode_images, graphdef, runtime.components.get("feature_extractor")(images), weights)

    def conditioning_shapes(
        self, conditioning: HunyuanVideoConditioning, settings: Settings
    ) -> Mapping[str, FieldShape]:
        config, arrays = self.transformer, (*conditioning.texts[0], *conditioning.texts[1])
        shapes: dict[str, tuple[int | None, ...]] = {}
        for i, width in zip(range(0, 8, 2), (config.text_width, config.glyph_width) * 2, strict=True):
            features, mask = conditioning._fields[i : i + 2]
            shapes |= {features: (len(conditioning.prompt_embeds), None, width), mask: arrays[i].shape[:2]}
        return {name: FieldShape(shape) for name, shape in {**shapes, **self.picture_shapes(settings)}.items()}

    def prepare(
        self,
        runtime: Runtime,
        network: SplitNetwork,
        conditioning: HunyuanVideoConditioning,
        x: LatentArray,
        preparation: Preparation,
    ) -> tuple[tuple[Any, ...], Any]:
        batched = preparation.groups.batch > 1 or preparation.nag is not None
        static = network.graphdef, preparation.groups, used_lengths(conditioning.texts, batched=batched)
        arguments = conditioning.texts, conditioning.image_embeds, conditioning.image_latents, preparation.nag
        return runtime.call(make_context, static, x, network.weights, *arguments)
