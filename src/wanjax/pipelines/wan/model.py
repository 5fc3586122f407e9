# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=true, reportIncompatibleVariableOverride=true
"""The common base of Wan's models: networks, prompts and two experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, ClassVar

from jaxtyping import Float

from wanjax.converters.wan.diffusers import sparse_linear_entry
from wanjax.execution import ArrayOrShape
from wanjax.kernels.attention import AUTO
from wanjax.kernels.attention.flash_int8 import HEAD_DIM as INT8_HEAD_DIM
from wanjax.layers.flops import attention_flops
from wanjax.layers.tiling import Tiling
from wanjax.media.inputs import InputSpec
from wanjax.models.clip import CLIPVisionConfig
from wanjax.models.t5 import T5Config
from wanjax.models.wan.config import ImageTransformerConfig, TransformerConfig, forward_flops
from wanjax.pipelines.denoiser import Denoiser, LatentArray, Preparation
from wanjax.pipelines.frames import encode_clip
from wanjax.pipelines.model import ForwardCost, ModelSpec, VideoModel
from wanjax.pipelines.runtime import Runtime, SplitNetwork
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.text.tokenizer import TokenBatch, clean_prompt
from wanjax.pipelines.torch_noise import NoiseSpec
from wanjax.pipelines.validation import FieldShape, Shape
from wanjax.pipelines.wan.conditioning import WanConditioning
from wanjax.pipelines.wan.denoisers import WanDenoiser
from wanjax.pipelines.wan.programs import TEXT_LENGTH, encode_prompts, make_context
from wanjax.schedulers import Scheduler, UniPC

EXPERTS = ("transformer", "transformer_2")


@dataclass(frozen=True, kw_only=True)
class WanModel(VideoModel[WanConditioning]):
    """A Wan checkpoint, by the configs of its networks. The module `tasks` has one subclass for each task.

    Args:
        text_encoder: The text encoder's config; None if it was not read.
        transformer: The denoiser's config.
        image_encoder: The vision tower's config; None if the model has no vision tower or the config was not read.
        has_experts: Whether a second transformer of the same shape runs the steps with low noise.
        scheduler: The checkpoint's scheduler.
    """

    conditioning_type = WanConditioning
    task: ClassVar[str] = "text to video"
    inputs: ClassVar[tuple[InputSpec, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    """The fields of `WanConditioning` that may be None."""
    radial: ClassVar[bool] = True
    skips_blocks: ClassVar[bool] = True
    """Whether a prediction can skip some of the transformer's blocks."""

    text_encoder: T5Config | None = None
    transformer: TransformerConfig
    image_encoder: CLIPVisionConfig | None = None
    has_experts: bool = False
    scheduler: Scheduler = field(default_factory=UniPC)

    @cached_property
    def spec(self) -> ModelSpec:
        config = self.transformer
        networks: dict[str, Any] = {
            "text_encoder": self.text_encoder,
            "image_encoder": self.image_encoder,
            "transformer": config,
            "transformer_2": config if self.has_experts else None,
            "vae": self.vae,
        }
        return ModelSpec(
            task=self.task,
            size_multiple=self.vae.spatial_factor * config.patch[1],
            vae=self.vae,
            scheduler=self.scheduler,
            networks={name: config for name, config in networks.items() if config is not None},
            cache_tables=self.tables,
            denoisers=EXPERTS if self.has_experts else EXPERTS[:1],
            inputs=self.inputs,
            has_two_reference_implementations=True,
            supports_radial=self.radial and not config.sparse_linear,
            supports_sparse_linear=self.radial and not config.sparse_linear,
            supports_int8_attention=config.head_dim == INT8_HEAD_DIM,
            trained_attention=config.resolve_attention(AUTO),
            chunk_frames=self.chunk_frames,
            noise_spec=NoiseSpec(frames_first=self.chunk_frames > 0),
            text_length=TEXT_LENGTH,
            skippable_blocks=config.layers if self.skips_blocks else 0,
            config_entries=sparse_linear_entry(config.sparse_linear),
        )

    @property
    def denoiser(self) -> Denoiser:
        return WanDenoiser()

    @property
    def chunk_frames(self) -> int:
        """The number of latent frames in a chunk, for a model that denoises chunk by chunk, else 0."""
        return 0

    @property
    def image_tokens(self) -> int:
        """The number of image tokens in cross-attention's context, for plans."""
        if isinstance(self.transformer, ImageTransformerConfig) and self.image_encoder is not None:
            return self.transformer.image_positions or self.image_encoder.tokens
        return 0

    def cost(self, settings: Settings, conditioning: WanConditioning | None = None) -> ForwardCost:
        image_embeds = None if conditioning is None else conditioning.image_embeds
        _, _, *latent_size = self.spec.latent_shape(settings)
        config, tokens = self.transformer, prod(latent_size) // self.transformer.patch_volume
        return ForwardCost(
            num_tokens=tokens,
            num_layers=config.layers,
            num_heads=config.heads,
            width=config.width,
            attention_flops=config.layers * attention_flops(tokens, tokens, config.width),
            flops=forward_flops(
                config,
                tokens=tokens,
                text_tokens=TEXT_LENGTH,
                image_tokens=self.image_tokens if image_embeds is None else image_embeds.shape[1],
            ),
            has_single_sequence=not config.sparse_linear,
        )

    def tokenize(self, runtime: Runtime, prompts: Sequence[str], reference_impl: str) -> tuple[TokenBatch, ...]:
        return super().tokenize(runtime, list(map(clean_prompt, prompts)), reference_impl)

    def encode_text(self, runtime: Runtime, settings: Settings) -> WanConditioning:
        [batch] = self.tokenize(runtime, [settings.prompt, settings.negative_prompt], settings.follow)
        graphdef, weights = runtime.split("text_encoder")
        return WanConditioning(*runtime.call(encode_prompts, graphdef, batch.ids, batch.mask, weights))

    def encode_clip(self, runtime: Runtime, frames: Any, tiling: Tiling | None) -> Float[ArrayOrShape, "1 C _T _H _W"]:
        """Encode frames in the video's size to latents.

        Args:
            runtime: Networks, devices and strategy.
            frames: Frames in the video's size, [T H W 3].
            tiling: The tiles to encode separately, which saves memory; None encodes whole frames.
        """
        return encode_clip(runtime.components.get("vae"), frames, tiling, runtime.call)

    def conditioning_shapes(self, conditioning: WanConditioning, settings: Settings) -> Mapping[str, FieldShape]:
        text = FieldShape((*conditioning.prompt_embeds.shape[:2], self.transformer.text_width))
        image_shapes = self.picture_shapes(settings).items()
        shapes = {name: FieldShape(shape, name in self.optional) for name, shape in image_shapes}
        return {"prompt_embeds": text, "negative_prompt_embeds": text, **shapes}

    def picture_shapes(self, settings: Settings) -> Mapping[str, Shape]:
        """Return the shapes of the image fields of `WanConditioning`, by field.

        Args:
            settings: Settings of the video.
        """
        return {}

    def prepare(
        self,
        runtime: Runtime,
        network: SplitNetwork,
        conditioning: WanConditioning,
        x: LatentArray,
        preparation: Preparation,
    ) -> tuple[tuple[Any, ...], Any]:
        arguments = conditioning[:2], conditioning.condition, conditioning.image_embeds, preparation.nag
        return runtime.call(make_context, (network.graphdef, preparation.groups), x, network.weights, *arguments)
