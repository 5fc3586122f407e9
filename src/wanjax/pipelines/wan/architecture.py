# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=true, reportIncompatibleVariableOverride=true
"""A Wan checkpoint: its shapes, and its handling of prompts, pictures and two experts."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from wanjax.checkpoints.networks import Config
from wanjax.checkpoints.networks import network as network_in
from wanjax.checkpoints.sources import Source
from wanjax.converters.wan.diffusers import sparse_linear_entry
from wanjax.errors import WanjaxError, WanjaxWarning
from wanjax.kernels.attention import Attention, SparseLinear
from wanjax.layers.flops import attention_flops
from wanjax.layers.tiling import Tiling
from wanjax.media.pictures import PictureOfAnySize, Pictures
from wanjax.models.clip import CLIPVisionConfig
from wanjax.models.t5 import T5Config
from wanjax.models.wan.config import ControlTransformerConfig, ImageTransformerConfig, TransformerConfig
from wanjax.models.wan.flops import forward_flops
from wanjax.pipelines.checks import check_features
from wanjax.pipelines.family import Architecture, Forward, Pipe
from wanjax.pipelines.guidance import grouping
from wanjax.pipelines.sampler import Denoiser, Held, Inputs
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.steps import Segment
from wanjax.pipelines.text.tokenizer import TokenBatch, clean_prompt
from wanjax.pipelines.wan.conditioning import TEXT_TO_VIDEO, Encoders, Task, WanEncoded, task_of
from wanjax.pipelines.wan.experts import EXPERTS, segments
from wanjax.pipelines.wan.networks import NETWORKS
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
from wanjax.schedulers import Consistency, Scheduler, UniPC, from_config

THREE_STEPS = Consistency(timesteps=(1000.0, 757.0, 522.0))
"""The scheduler of models distilled as FastWan, whose scheduler_config.json is that of the model before."""
OLD_TEXT_LENGTH = 226  # the length of prompts in files of the scripts before wanjax, a mistake


@dataclass(frozen=True, kw_only=True)
class WanArchitecture(Architecture):
    """A Wan checkpoint as its family knows it: the shapes of its networks, and its task.

    With `experts`, a second transformer of the same shape takes the steps at low noise.
    """

    encoded_type = WanEncoded

    text_encoder: T5Config | None = None
    transformer: TransformerConfig
    image_encoder: CLIPVisionConfig | None = None
    task: Task = TEXT_TO_VIDEO
    experts: bool = False
    scheduler: Scheduler = field(default_factory=UniPC)

    @classmethod
    def of(cls, source: Source, encoders: bool = False) -> "WanArchitecture":
        """Reads the architecture from a checkpoint's configs, those of its encoders if asked.

        Raises WanjaxError where the configs contradict each other.
        """

        def config(component: str) -> Any:
            return network_in(source, component, NETWORKS).config

        def encoder(component: str) -> Any:
            return config(component) if encoders and component in source.components else None

        transformer, vae = config("transformer"), config("vae")
        experts = EXPERTS[1] in source.components
        if experts and config(EXPERTS[1]) != transformer:
            raise WanjaxError(f"the two transformers of {source.name} differ in their config.json: experts are alike")
        return cls(
            text_encoder=encoder("text_encoder"),
            transformer=transformer,
            vae=vae,
            image_encoder=encoder("image_encoder"),
            task=task_of(source.index, transformer, vae),
            experts=experts,
            scheduler=THREE_STEPS
            if source.index.get("_class_name") == "WanDMDPipeline"
            else from_config(source.config("scheduler")),
        )

    @property
    def purpose(self) -> str:
        return self.task.name

    @property
    def needs(self) -> tuple[str, ...]:
        return self.task.needs

    @property
    def takes(self) -> tuple[str, ...]:
        return self.task.takes

    @property
    def begins_from_video(self) -> bool:
        return self.task.begins_from_video

    @property
    def networks(self) -> Mapping[str, Config]:
        found: dict[str, Config | None] = {
            "text_encoder": self.text_encoder,
            "image_encoder": self.image_encoder,
            "transformer": self.transformer,
            "transformer_2": self.transformer if self.experts else None,
            "vae": self.vae,
        }
        return {name: config for name, config in found.items() if config is not None}

    @property
    def denoisers(self) -> tuple[str, ...]:
        return EXPERTS if self.experts else EXPERTS[:1]

    @property
    def radial(self) -> bool:
        return not (isinstance(self.transformer, ControlTransformerConfig) or self.transformer.sparse_linear)

    @property
    def ways(self) -> bool:
        return True

    @property
    def grid(self) -> int:
        return self.vae.spatial_factor * self.transformer.patch[1]

    @property
    def image_tokens(self) -> int:
        """The number of picture tokens in cross-attention's context, for plans."""
        if isinstance(self.transformer, ImageTransformerConfig) and self.image_encoder is not None:
            return self.transformer.image_positions or self.image_encoder.tokens
        return 0

    @property
    def ends(self) -> WanEnds:
        return WanEnds(self.task)

    def attention(self, asked: Attention) -> Attention:
        return self.transformer.attention(asked)

    def linearised(self, sparse: SparseLinear, model: str) -> "Architecture":
        if not self.radial:
            return super().linearised(sparse, model)
        return replace(self, transformer=replace(self.transformer, sparse_linear=sparse))

    @property
    def entries(self) -> Mapping[str, Any]:
        return sparse_linear_entry(self.transformer.sparse_linear)

    def forward(self, settings: Settings, encoded: WanEncoded | None = None) -> Forward:
        seen = None if encoded is None else encoded.image_embeds
        _, _, *cells = self.latent_shape(settings)
        config, tokens = self.transformer, prod(cells) // self.transformer.patch_cells
        return Forward(
            tokens=tokens,
            layers=config.layers,
            heads=config.heads,
            width=config.width,
            scores=config.layers * attention_flops(tokens, tokens, config.width),
            flops=forward_flops(
                config, tokens=tokens, text=TEXT_LENGTH, image=self.image_tokens if seen is None else seen.shape[1]
            ),
            ring=not config.sparse_linear,
        )

    def implied(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns given settings; noise levels follow whom the rest does, unless they are given.

        A single guidance scale for a model of two experts applies to both.
        """
        found = {**given}
        if given.get("sigmas") is None:
            found["sigmas"] = given.get("follow")
        if self.experts and given.get("guidance_scale_2") is None:
            found["guidance_scale_2"] = given.get("guidance_scale")
        return found

    def tokens(self, pipe: Pipe, prompts: Sequence[str], follow: str) -> tuple[TokenBatch, ...]:
        return super().tokens(pipe, list(map(clean_prompt, prompts)), follow)

    def encode_prompts(self, pipe: Pipe, settings: Settings) -> WanEncoded:
        [both] = self.tokens(pipe, [settings.prompt, settings.negative_prompt], settings.follow)
        graphdef, weights = nnx.split(pipe.components.get("text_encoder"))
        return WanEncoded(*pipe.call(encode_prompts, graphdef, both.ids, both.mask, weights))

    def encode_pictures(
        self, pipe: Pipe, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        def resized(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
            """Returns a picture of another size on the host; one of zeros where a run is recorded."""
            return pipe.strategy.read(pipe.call(resize, size, picture), np.zeros((*size, 3), np.float32))

        encoders = Encoders(
            partial(pipe.encode_video, tiling=tiling),
            partial(self.encode_images, pipe, follow=settings.follow),
            partial(pipe.call, make_condition, self.task),
            resized,
            self.transformer,
            self.vae,
        )
        return self.task.encode(encoders, pictures, settings)

    def encode_images(self, pipe: Pipe, images: Sequence[PictureOfAnySize], *, follow: str) -> Float[Value, "1 S E"]:
        """Returns the features of images, joined along the sequence, by the checkpoint's vision tower.

        The authors show it the whole of a picture, and diffusers the middle.
        """
        graphdef, weights = nnx.split(pipe.components.get("image_encoder"))
        seen = pipe.components.get("image_processor")(images, whole=follow == "official")
        return pipe.call(encode_images, graphdef, seen, weights)

    def encoded_from(self, tensors: Mapping[str, Array]) -> WanEncoded:
        """Restores the output of `encode` from its tensors by name; warns where prompts are shorter than Wan's."""
        encoded = super().encoded_from(tensors)
        if encoded.prompt_embeds.shape[1] == OLD_TEXT_LENGTH:
            warnings.warn(
                f"the prompt has {OLD_TEXT_LENGTH} tokens where Wan reads {TEXT_LENGTH}: the video will differ",
                WanjaxWarning,
                stacklevel=2,
            )
        return encoded

    def check_encoded(self, encoded: WanEncoded, settings: Settings) -> None:
        for name in ("prompt_embeds", "negative_prompt_embeds"):
            right = (*encoded.prompt_embeds.shape[:2], self.transformer.text_width)
            check_features(name, getattr(encoded, name), right, settings.model)
        self.task.check(encoded, self.latent_shape(settings), self.transformer)

    def references(self, encoded: WanEncoded, settings: Settings) -> int:
        return self.task.references(encoded, self.latent_shape(settings))

    def noise_range(self, network: str, settings: Settings) -> tuple[float, float]:
        if not self.experts or settings.boundary is None:
            return super().noise_range(network, settings)
        return (settings.boundary, 1.0) if network == EXPERTS[0] else (0.0, settings.boundary)

    def segments(self, schedule: Any, settings: Settings) -> Sequence[Segment]:
        return segments(schedule.timesteps, settings)

    def inputs(
        self, pipe: Pipe, network: Any, segment: Segment, encoded: WanEncoded, x: Held, batched: bool
    ) -> tuple[Denoiser, Inputs]:
        graphdef, weights = nnx.split(network)
        groups = grouping(segment.guided, batched, pipe.partitioner)
        given = encoded[:2], encoded.condition, encoded.image_embeds, segment.rule.leads
        contexts, shared = pipe.call(make_context, (graphdef, self.task, groups), x, weights, *given)
        dense = False if network.attention.radial else None
        denoiser = WanDenoiser(graphdef, self.scheduler, self.task, dense=dense)
        return denoiser, Inputs(weights, contexts, shared, groups.batch * x.shape[0])
