# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=true, reportIncompatibleVariableOverride=true
"""A CogVideoX checkpoint: its shapes, its handling of images, and the padding frames that it denoises first."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from wanjax.checkpoints.network_kinds import network as network_in
from wanjax.checkpoints.sources import Source
from wanjax.errors import WanjaxError
from wanjax.layers.flops import attention_flops
from wanjax.layers.tiling import Tiling
from wanjax.media.inputs import IMAGE, VIDEO
from wanjax.media.pictures import Pictures, fit_to_size
from wanjax.models.cogvideox.config import TransformerConfig, forward_flops
from wanjax.models.cogvideox.vae_config import VAEConfig
from wanjax.models.t5 import T5Config
from wanjax.pipelines.cogvideox.conditioning import POSTERIORS, CogVideoXConditioning
from wanjax.pipelines.cogvideox.networks import NETWORKS
from wanjax.pipelines.cogvideox.programs import CogVideoXDenoiser, encode_prompts, make_context
from wanjax.pipelines.denoiser import Denoiser, LatentArray, Preparation
from wanjax.pipelines.frames import encode_frames, split_posterior
from wanjax.pipelines.model import ForwardCost, ModelSpec, VideoModel
from wanjax.pipelines.runtime import Runtime, SplitNetwork
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.text.tokenizer import TokenBatch
from wanjax.pipelines.torch_noise import NoiseSpec
from wanjax.pipelines.validation import FieldShape
from wanjax.schedulers import Scheduler, from_config
from wanjax.schedulers.ddim import DDIM

OFFICIAL_TEXT_LENGTH = 224  # tokens of a prompt in CogVideoX-1.5's official code


@dataclass(frozen=True, kw_only=True)
class CogVideoXModel(VideoModel[CogVideoXConditioning]):
    """A CogVideoX checkpoint, by the configs of its networks.

    A transformer with twice as many channels as the latents takes an image; a patch of two frames marks version 1.5.

    Args:
        text_encoder: The text encoder's config; None if it was not read.
        transformer: The denoiser's config.
        vae: The autoencoder's config.
        scheduler: The checkpoint's scheduler.
    """

    conditioning_type = CogVideoXConditioning

    text_encoder: T5Config | None = None
    transformer: TransformerConfig
    vae: VAEConfig
    scheduler: Scheduler = field(default_factory=DDIM)

    @classmethod
    def of(cls, source: Source, reads_encoder_configs: bool = False) -> "CogVideoXModel":
        """Read a model from a checkpoint's configs.

        Args:
            source: The checkpoint.
            reads_encoder_configs: Whether to read the config of the text encoder too.

        Raises:
            WanjaxError: The configs contradict each other.
        """

        def config(component: str) -> Any:
            return network_in(source, component, NETWORKS).config

        model = cls(
            text_encoder=config("text_encoder") if reads_encoder_configs else None,
            transformer=config("transformer"),
            vae=config("vae"),
            scheduler=from_config(source["scheduler"].config()),
        )
        channels, latent_channels = model.transformer.channels_in, model.vae.latent_channels
        starts_from_image = source.index.get("_class_name") == "CogVideoXImageToVideoPipeline"
        if (
            channels != latent_channels * (2 if starts_from_image else 1)
            or model.transformer.channels_out != latent_channels
        ):
            raise WanjaxError(
                f"the checkpoint's configs contradict each other: a {source.index.get('_class_name')} whose VAE has "
                f"{latent_channels} channels cannot have a transformer with {channels} channels in and "
                f"{model.transformer.channels_out} out"
            )
        return model

    @property
    def starts_from_image(self) -> bool:
        """True for a model that starts from an image."""
        return self.transformer.channels_in > self.vae.latent_channels

    @cached_property
    def spec(self) -> ModelSpec:
        networks: dict[str, Any] = {"text_encoder": self.text_encoder, "transformer": self.transformer, "vae": self.vae}
        return ModelSpec(
            task="image to video" if self.starts_from_image else "text to video",
            size_multiple=self.grid,
            vae=self.vae,
            scheduler=self.scheduler,
            networks={name: config for name, config in networks.items() if config is not None},
            cache_tables=self.tables,
            inputs=(IMAGE.needed,) if self.starts_from_image else (VIDEO,),
            has_two_reference_implementations=True,
            frame_multiple=self.transformer.patch[0],
            fixed_size=self.fixed_size,
            posteriors=POSTERIORS,
            noise_spec=NoiseSpec(frames_first=True, rounded=True),
        )

    @property
    def denoiser(self) -> Denoiser:
        return CogVideoXDenoiser()

    @property
    def grid(self) -> int:
        return self.vae.spatial_factor * self.transformer.patch[1]

    @property
    def fixed_size(self) -> tuple[int, int] | None:
        """The only (height, width) of a model with learned positions; None for models that support any size."""
        if self.transformer.added != "learned" or self.transformer.trained_grid is None:
            return None
        _, rows, columns = self.transformer.trained_grid
        return rows * self.grid, columns * self.grid

    def cost(self, settings: Settings, conditioning: Any = None) -> ForwardCost:
        _, _, *latent_size = self.spec.noise_shape(settings)
        config = replace(self.transformer, text_length=self.text_length(settings.follow))
        video_tokens = prod(latent_size) // config.patch_volume
        tokens = config.text_length + video_tokens
        return ForwardCost(
            num_tokens=tokens,
            num_layers=config.layers,
            num_heads=config.heads,
            width=config.width,
            attention_flops=config.layers * attention_flops(tokens, tokens, config.width),
            flops=forward_flops(config, video_tokens=video_tokens),
        )

    def text_length(self, reference_impl: str) -> int:
        """Return the number of tokens that are read of a prompt, with padding. Version 1.5's official code reads fewer.

        Args:
            reference_impl: Which reference implementation to match, as in the settings.
        """
        max_length = self.transformer.text_length
        is_official_1_5 = reference_impl == "official" and self.transformer.patch[0] > 1
        return min(max_length, OFFICIAL_TEXT_LENGTH) if is_official_1_5 else max_length

    def tokenize(self, runtime: Runtime, prompts: Sequence[str], reference_impl: str) -> tuple[TokenBatch, ...]:
        return (runtime.components.get("tokenizer").tokenize(prompts, self.text_length(reference_impl)),)

    def encode_text(self, runtime: Runtime, settings: Settings) -> CogVideoXConditioning:
        [batch] = self.tokenize(runtime, [settings.prompt, settings.negative_prompt], settings.follow)
        graphdef, weights = runtime.split("text_encoder")
        return CogVideoXConditioning(*runtime.call(encode_prompts, graphdef, batch.ids, weights))

    def encode_inputs(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        def posterior(frames: Iterable[np.ndarray], scale: float) -> Any:
            """Return the scaled mean and deviation of the latents of frames, fitted to the video's size."""
            fitted_frames = [fit_to_size(frame, settings.size, settings.resize) for frame in frames]
            return runtime.call(
                split_posterior,
                scale,
                encode_frames(runtime.components.get("vae"), fitted_frames, tiling, runtime.call),
            )

        latents: dict[str, Any] = {}
        if (picture := pictures.picture("image")) is not None:
            latents["image_latents"], latents["image_deviation"] = posterior([picture], self.vae.picture_scale)
        if (clip := pictures.clip("video")) is not None:
            clip = clip[: settings.frames]
            latents["video_latents"], latents["video_deviation"] = posterior(clip, self.vae.scaling_factor)
        return latents

    def conditioning_shapes(self, conditioning: CogVideoXConditioning, settings: Settings) -> Mapping[str, FieldShape]:
        text = FieldShape(
            (len(conditioning.prompt_embeds), self.text_length(settings.follow), self.transformer.text_width)
        )
        _, channels, frames, *latent_size = self.spec.latent_shape(settings)
        kind, count = ("image", 1) if self.starts_from_image else ("video", frames)
        shape = None, channels, count, *latent_size
        latents = {f"{kind}_latents": FieldShape(shape, kind == "video"), f"{kind}_deviation": FieldShape(shape, True)}
        return {"prompt_embeds": text, "negative_prompt_embeds": text, **latents}

    def prepare(
        self,
        runtime: Runtime,
        network: SplitNetwork,
        conditioning: CogVideoXConditioning,
        x: LatentArray,
        preparation: Preparation,
    ) -> tuple[tuple[Any, ...], Any]:
        arguments = x, network.weights, conditioning[:2], conditioning.image_latents, preparation.nag
        return runtime.call(make_context, (network.graphdef, preparation.groups), *arguments)
