# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo's pipeline: its handling of prompts, quoted text and pictures."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from wanjax.errors import WanjaxError
from wanjax.layers.tiling import Tiling
from wanjax.media.pictures import PictureOfAnySize, Pictures
from wanjax.pipelines.checks import check_features, check_fields, check_taken
from wanjax.pipelines.guidance import grouping
from wanjax.pipelines.hunyuanvideo.architecture import HunyuanVideoArchitecture
from wanjax.pipelines.hunyuanvideo.conditioning import HunyuanVideoEncoded, fitted, lengths_of, size_of
from wanjax.pipelines.hunyuanvideo.programs import (
    HunyuanVideoDenoiser,
    encode_chats,
    encode_glyphs,
    encode_images,
    make_context,
)
from wanjax.pipelines.hunyuanvideo.text import TEMPLATE_TOKENS, tokenize_chats, tokenize_glyphs
from wanjax.pipelines.keywords import GivenSettings, spelled_out
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.sampler import Denoiser, Held, Inputs
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.steps import Segment
from wanjax.pipelines.tokenizer import TokenBatch, Truncation
from wanjax.programs import Value


class HunyuanVideoPipeline(Pipeline):
    """A HunyuanVideo checkpoint as a function from prompts, and a picture if it takes one, to videos."""

    architecture: HunyuanVideoArchitecture
    encoded_type = HunyuanVideoEncoded

    tokenizer_2 = property(lambda self: self.components.get("tokenizer_2"))
    text_encoder_2 = property(lambda self: self.components.get("text_encoder_2"))
    image_encoder = property(lambda self: self.components.get("image_encoder"))
    feature_extractor = property(lambda self: self.components.get("feature_extractor"))

    @spelled_out(GivenSettings)
    def settings(self, *, size: tuple[int, int] | None = None, **settings: Any) -> Settings:
        """Returns the model's defaults, overridden by the given settings; raises WanjaxError for invalid ones."""
        chosen = super().settings(size=size, **settings)
        longest = self.architecture.vae.longest_video
        if chosen.frames > longest:
            raise WanjaxError(f"{chosen.frames} frames are too many for {chosen.model}: at most {longest} would do")
        return chosen

    def check_pictures(self, pictures: Pictures, settings: Settings) -> None:
        taken = self.architecture.needs
        check_taken(pictures.given(), settings.model, self.architecture.purpose, takes=taken, needs=taken)

    def size_for(self, picture: tuple[int, int, int], asked: Settings) -> tuple[int, int]:
        return size_of(picture, self.architecture.transformer.target_size, self.grid)

    def truncations(self, prompt: str) -> Sequence[Truncation]:
        chats, glyphs = tokenize_chats(self.tokenizer, [prompt]), tokenize_glyphs(self.tokenizer_2, [prompt])
        return tuple(filter(None, (*chats.truncated, *glyphs.truncated)))

    def encode_prompts(self, prompt: str, negative_prompt: str | None = None) -> HunyuanVideoEncoded:
        both = [prompt, self.defaults.negative_prompt if negative_prompt is None else negative_prompt]
        chats, quoted = tokenize_chats(self.tokenizer, both), tokenize_glyphs(self.tokenizer_2, both)
        mask = chats.mask[:, TEMPLATE_TOKENS:]
        graphdef, weights = nnx.split(self.text_encoder)
        embeds, glyphs = self.call(encode_chats, graphdef, chats.ids, mask, weights), self._glyphs(quoted)
        fields: Any = ((embeds[i], mask[i : i + 1], glyphs[i], quoted.mask[i : i + 1]) for i in (0, 1))
        return HunyuanVideoEncoded(*(x for text in fields for x in text))

    def _glyphs(self, quoted: TokenBatch) -> Sequence[Any]:
        """Returns features of both quoted texts; the encoder is not loaded for zeros, where nothing is quoted."""
        if not quoted.mask.any():
            shape = (1, *quoted.ids.shape[1:], self.architecture.transformer.glyph_width)
            return [np.zeros(shape, jnp.dtype(self.defaults.dtype))] * 2
        graphdef, weights = nnx.split(self.text_encoder_2)
        return self.call(encode_glyphs, graphdef, quoted.ids, quoted.mask, weights)

    def encode_pictures(
        self, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        if pictures.image is None:
            return {}
        frame = fitted(pictures.image, settings.size, settings.resize)
        latents = self.encode_video(frame[None], tiling=tiling)
        return {"image_embeds": self.encode_images([frame]), "image_latents": latents}

    def encode_images(self, images: Sequence[PictureOfAnySize]) -> Float[Value, "B S E"]:
        """Returns the features of images by the checkpoint's vision tower."""
        graphdef, weights = nnx.split(self.image_encoder)
        return self.call(encode_images, graphdef, self.feature_extractor(images), weights)

    def check_encoded(self, encoded: HunyuanVideoEncoded, settings: Settings) -> None:
        config, videos = self.architecture.transformer, len(encoded.prompt_embeds)
        for name, width in zip(encoded._fields[:8:2], (config.text_width, config.glyph_width) * 2, strict=True):
            features, mask = getattr(encoded, name), getattr(encoded, self._mask_of(name))
            check_features(name, features, (videos, *features.shape[1:2], width), settings.model)
            if mask.shape != features.shape[:2]:
                right = list(features.shape[:2])
                raise WanjaxError(f"the mask of the {name} is {list(mask.shape)} where {right} is right")
        shapes = self.architecture.picture_shapes(settings)
        check_fields(encoded, encoded._fields[8:], shapes, purpose=self.architecture.purpose)

    @staticmethod
    def _mask_of(name: str) -> str:
        """Returns the name of a text's mask: `prompt_embeds_mask_2` is that of `prompt_embeds_2`."""
        stem, second, _ = name.partition("_2")
        return f"{stem}_mask{second}"

    def schedule(self, encoded: HunyuanVideoEncoded, settings: Settings) -> Any:
        return self.scheduler.schedule(settings.steps, shift=settings.flow_shift)

    def inputs(
        self, network: Any, segment: Segment, encoded: HunyuanVideoEncoded, x: Held, batched: bool
    ) -> tuple[Denoiser, Inputs]:
        graphdef, weights = nnx.split(network)
        groups = grouping(segment.guided, batched, self.partitioner)
        static = graphdef, groups, lengths_of(encoded.texts, together=groups.batch > 1)
        given = encoded.texts, encoded.image_embeds, encoded.image_latents
        contexts, shared = self.call(make_context, static, x, weights, *given)
        dense = False if network.attention.radial else None
        denoiser = HunyuanVideoDenoiser(graphdef, self.scheduler, self.architecture.transformer.meanflow, dense=dense)
        return denoiser, Inputs(weights, contexts, shared, groups.batch * x.shape[0])
