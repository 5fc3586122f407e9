# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=true, reportIncompatibleVariableOverride=true
"""A Wan checkpoint: its shapes, and its handling of prompts, pictures and two experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np
from jaxtyping import Float

from wanjax.checkpoints.networks import network as network_in
from wanjax.checkpoints.sources import Source
from wanjax.converters.wan.diffusers import sparse_linear_entry
from wanjax.errors import WanjaxError
from wanjax.kernels.attention import AUTO, SparseLinear
from wanjax.layers.flops import attention_flops
from wanjax.layers.tiling import Tiling
from wanjax.media.pictures import PictureOfAnySize, Pictures
from wanjax.models.clip import CLIPVisionConfig
from wanjax.models.t5 import T5Config
from wanjax.models.wan.causal import angles_at, place_of
from wanjax.models.wan.config import (
    CausalTransformerConfig,
    ControlTransformerConfig,
    ImageTransformerConfig,
    TransformerConfig,
)
from wanjax.models.wan.flops import forward_flops
from wanjax.pipelines.checks import check_features
from wanjax.pipelines.denoiser import Denoiser, Held, ModelInputs
from wanjax.pipelines.frames import encode_clip
from wanjax.pipelines.guidance import Groups
from wanjax.pipelines.model import Forward, ModelSpec, VideoModel
from wanjax.pipelines.runtime import Runtime
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.text.tokenizer import TokenBatch, clean_prompt
from wanjax.pipelines.wan.causal_programs import CausalInputs, CausalWanDenoiser, Past, begin_past, renew
from wanjax.pipelines.wan.conditioning import TEXT_TO_VIDEO, Encoders, Task, WanEncoded, task_of
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.pipelines.wan.programs import (
    TEXT_LENGTH,
    WanDenoiser,
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
EXPERTS = ("transformer", "transformer_2")


@dataclass(frozen=True, kw_only=True)
class WanArchitecture(VideoModel):
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

    @cached_property
    def spec(self) -> ModelSpec:
        config = self.transformer
        networks: dict[str, Any] = {
            "text_encoder": self.text_encoder,
            "image_encoder": self.image_encoder,
            "transformer": config,
            "transformer_2": config if self.experts else None,
            "vae": self.vae,
        }
        causal = isinstance(config, CausalTransformerConfig)
        return ModelSpec(
            purpose=self.task.name,
            grid=self.vae.spatial_factor * config.patch[1],
            vae=self.vae,
            scheduler=self.scheduler,
            networks={name: config for name, config in networks.items() if config is not None},
            tables=self.tables,
            denoisers=EXPERTS if self.experts else EXPERTS[:1],
            takes=self.task.takes,
            needs=self.task.needs,
            begins_from_video=self.task.begins_from_video,
            ways=True,
            radial=not (causal or isinstance(config, ControlTransformerConfig) or config.sparse_linear),
            trained_attention=config.attention(AUTO),
            block_frames=config.block_frames if causal else 0,
            text_length=TEXT_LENGTH,
            config_entries=sparse_linear_entry(config.sparse_linear),
        )

    @property
    def denoiser(self) -> Denoiser:
        return CausalWanDenoiser() if self.spec.streams else WanDenoiser(self.task)

    @property
    def image_tokens(self) -> int:
        """The number of picture tokens in cross-attention's context, for plans."""
        if isinstance(self.transformer, ImageTransformerConfig) and self.image_encoder is not None:
            return self.transformer.image_positions or self.image_encoder.tokens
        return 0

    def linearised(self, sparse: SparseLinear, model: str) -> "VideoModel":
        if not self.spec.radial:
            return super().linearised(sparse, model)
        return replace(self, transformer=replace(self.transformer, sparse_linear=sparse))

    def forward(self, settings: Settings, encoded: WanEncoded | None = None) -> Forward:
        if isinstance(self.transformer, CausalTransformerConfig):
            return self._block_forward(settings, self.transformer)
        seen = None if encoded is None else encoded.image_embeds
        _, _, *cells = self.spec.latent_shape(settings)
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

    def _block_forward(self, settings: Settings, config: CausalTransformerConfig) -> Forward:
        """Returns the work of one forward for a block that sees a full window."""
        _, _, _, *cells = self.spec.latent_shape(settings)
        tokens = prod((config.block_frames, *cells)) // config.patch_cells
        flops = dict(forward_flops(config, tokens=tokens, text=TEXT_LENGTH))
        scores = config.layers * attention_flops(tokens, config.slots * tokens, config.width)
        flops["self_attention"] += scores - config.layers * attention_flops(tokens, tokens, config.width)
        return Forward(tokens, config.layers, config.heads, config.width, scores, flops)

    def tokens(self, runtime: Runtime, prompts: Sequence[str], follow: str) -> tuple[TokenBatch, ...]:
        return super().tokens(runtime, list(map(clean_prompt, prompts)), follow)

    def encode_prompts(self, runtime: Runtime, settings: Settings) -> WanEncoded:
        [both] = self.tokens(runtime, [settings.prompt, settings.negative_prompt], settings.follow)
        graphdef, weights = runtime.split("text_encoder")
        return WanEncoded(*runtime.call(encode_prompts, graphdef, both.ids, both.mask, weights))

    def encode_pictures(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        def resized(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
            """Returns a picture of another size on the host; one of zeros where a run is recorded."""
            return runtime.strategy.read(runtime.call(resize, size, picture), np.zeros((*size, 3), np.float32))

        def video(frames: Any) -> Any:
            return encode_clip(runtime.components.get("vae"), frames, tiling, runtime.call)

        encoders = Encoders(
            video,
            partial(self.encode_images, runtime, follow=settings.follow),
            partial(runtime.call, make_condition, self.task),
            resized,
            self.transformer,
            self.vae,
        )
        return self.task.encode(encoders, pictures, settings)

    def encode_images(
        self, runtime: Runtime, images: Sequence[PictureOfAnySize], *, follow: str
    ) -> Float[Value, "1 S E"]:
        """Returns the features of images, joined along the sequence, by the checkpoint's vision tower.

        The authors show it the whole of a picture, and diffusers the middle.
        """
        graphdef, weights = runtime.split("image_encoder")
        seen = runtime.components.get("image_processor")(images, whole=follow == "official")
        return runtime.call(encode_images, graphdef, seen, weights)

    def check_encoded(self, encoded: WanEncoded, settings: Settings) -> None:
        for name in ("prompt_embeds", "negative_prompt_embeds"):
            right = (*encoded.prompt_embeds.shape[:2], self.transformer.text_width)
            check_features(name, getattr(encoded, name), right, settings.model)
        self.task.check(encoded, self.spec.latent_shape(settings), self.transformer)

    def references(self, encoded: WanEncoded, settings: Settings) -> int:
        return self.task.references(encoded, self.spec.latent_shape(settings))

    def prepare(
        self,
        runtime: Runtime,
        graphdef: Any,
        weights: Any,
        encoded: WanEncoded,
        x: Held,
        groups: Groups,
        *,
        nag: np.ndarray | None = None,
        block: int = 0,
        memory: Any = None,
    ) -> tuple[tuple[Any, ...], Any]:
        if self.spec.streams:
            return self._prepare_block(runtime, graphdef, weights, encoded, x, nag, block, memory)
        given = encoded[:2], encoded.condition, encoded.image_embeds, nag
        return runtime.call(make_context, (graphdef, self.task, groups), x, weights, *given)

    def _prepare_block(
        self,
        runtime: Runtime,
        graphdef: Any,
        weights: Any,
        encoded: WanEncoded,
        x: Held,
        nag: np.ndarray | None,
        block: int,
        memory: Past | None,
    ) -> tuple[tuple[Any, ...], Any]:
        """Returns the same for a block that also sees the keys and values of those before it."""
        config: Any = self.transformer
        negative = () if nag is None else (encoded.negative_prompt_embeds, nag)
        seen: Past = memory or runtime.call(begin_past, graphdef, x, weights, encoded.prompt_embeds, *negative)
        tokens = prod(x.shape[1:4]) // config.patch_cells
        return (seen.context,), CausalInputs(angles_at(config, block), seen.window, place_of(config, block, tokens))

    def update_memory(self, runtime: Runtime, graphdef: Any, weights: Any, inputs: ModelInputs, x: Held) -> Past:
        [context], given = inputs.prompts, inputs.shared
        return Past(context, runtime.call(renew, graphdef, given.window, x, weights, context, given.time, given.place))
