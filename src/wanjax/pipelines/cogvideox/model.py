# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=true, reportIncompatibleVariableOverride=true
"""A CogVideoX checkpoint: its shapes, its handling of pictures, and the frames that it denoises before the video."""

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
from wanjax.media.pictures import Pictures, fit
from wanjax.models.cogvideox.config import TransformerConfig, forward_flops
from wanjax.models.cogvideox.vae_config import VAEConfig
from wanjax.models.t5 import T5Config
from wanjax.pipelines.cogvideox.conditioning import POSTERIORS, CogVideoXConditioning
from wanjax.pipelines.cogvideox.networks import NETWORKS
from wanjax.pipelines.cogvideox.programs import CogVideoXDenoiser, encode_prompts, make_context
from wanjax.pipelines.denoiser import Denoiser, LatentArray, Preparation
from wanjax.pipelines.frames import encode_frames, split_posterior
from wanjax.pipelines.model import Cost, ModelSpec, VideoModel
from wanjax.pipelines.runtime import Runtime, SplitNetwork
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.text.tokenizer import TokenBatch
from wanjax.pipelines.validation import FieldShape
from wanjax.schedulers import Scheduler, from_config
from wanjax.schedulers.ddim import DDIM

OFFICIAL_TEXT_LENGTH = 224  # tokens, of CogVideoX-1.5


@dataclass(frozen=True, kw_only=True)
class CogVideoXModel(VideoModel[CogVideoXConditioning]):
    """A CogVideoX checkpoint as its family knows it.

    A transformer of twice as many channels as the latents takes a picture; a patch of two frames is that of 1.5.

    Args:
        text_encoder: Config of the text encoder; None where it was not read.
        transformer: Config of the denoiser.
        vae: Config of the autoencoder.
        scheduler: The checkpoint's scheduler.
    """

    conditioning_type = CogVideoXConditioning

    text_encoder: T5Config | None = None
    transformer: TransformerConfig
    vae: VAEConfig
    scheduler: Scheduler = field(default_factory=DDIM)

    @classmethod
    def of(cls, source: Source, encoders: bool = False) -> "CogVideoXModel":
        """Read the model from a checkpoint's configs, that of its text encoder if asked.

        Raises WanjaxError where the configs contradict each other.

        Args:
            source: The checkpoint.
            encoders: Whether to read the configs of the encoders too.
        """

        def config(component: str) -> Any:
            return network_in(source, component, NETWORKS).config

        model = cls(
            text_encoder=config("text_encoder") if encoders else None,
            transformer=config("transformer"),
            vae=config("vae"),
            scheduler=from_config(source["scheduler"].config()),
        )
        channels, latents = model.transformer.channels_in, model.vae.latent_channels
        pictured = source.index.get("_class_name") == "CogVideoXImageToVideoPipeline"
        if channels != latents * (2 if pictured else 1) or model.transformer.channels_out != latents:
            raise WanjaxError(
                f"the checkpoint's configs contradict each other: a {source.index.get('_class_name')} whose VAE has "
                f"{latents} channels cannot have a transformer from {channels} to {model.transformer.channels_out}"
            )
        return model

    @property
    def pictured(self) -> bool:
        """True for a model that continues a picture."""
        return self.transformer.channels_in > self.vae.latent_channels

    @cached_property
    def spec(self) -> ModelSpec:
        networks: dict[str, Any] = {"text_encoder": self.text_encoder, "transformer": self.transformer, "vae": self.vae}
        return ModelSpec(
            task="image to video" if self.pictured else "text to video",
            size_multiple=self.grid,
            vae=self.vae,
            scheduler=self.scheduler,
            networks={name: config for name, config in networks.items() if config is not None},
            cache_tables=self.tables,
            inputs=(IMAGE.needed,) if self.pictured else (VIDEO,),
            reference_variants=True,
            frame_multiple=self.transformer.patch[0],
            fixed_size=self.fixed_size,
            posteriors=POSTERIORS,
        )

    @property
    def denoiser(self) -> Denoiser:
        return CogVideoXDenoiser()

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

    def cost(self, settings: Settings, conditioning: Any = None) -> Cost:
        _, _, *cells = self.spec.noise_shape(settings)
        config = replace(self.transformer, text_length=self.text_length(settings.follow))
        video = prod(cells) // config.patch_cells
        tokens = config.text_length + video
        return Cost(
            tokens=tokens,
            layers=config.layers,
            heads=config.heads,
            width=config.width,
            scores=config.layers * attention_flops(tokens, tokens, config.width),
            flops=forward_flops(config, video=video),
        )

    def text_length(self, follow: str) -> int:
        """The tokens of a prompt that are read, padding included: of 1.5 the authors' code reads fewer.

        Args:
            follow: Which reference implementation to match, as in the settings.
        """
        longest = self.transformer.text_length
        shorter = follow == "official" and self.transformer.patch[0] > 1
        return min(longest, OFFICIAL_TEXT_LENGTH) if shorter else longest

    def tokenize(self, runtime: Runtime, prompts: Sequence[str], follow: str) -> tuple[TokenBatch, ...]:
        return (runtime.components.get("tokenizer").tokenize(prompts, self.text_length(follow)),)

    def encode_text(self, runtime: Runtime, settings: Settings) -> CogVideoXConditioning:
        [both] = self.tokenize(runtime, [settings.prompt, settings.negative_prompt], settings.follow)
        graphdef, weights = runtime.split("text_encoder")
        return CogVideoXConditioning(*runtime.call(encode_prompts, graphdef, both.ids, weights))

    def encode_inputs(
        self, runtime: Runtime, pictures: Pictures, settings: Settings, *, tiling: Tiling | None = None
    ) -> Mapping[str, Any]:
        def posterior(frames: Iterable[np.ndarray], scale: float) -> Any:
            """Return the mean and the deviation of the latents of frames in the video's size, scaled."""
            fitted = [fit(frame, settings.size, settings.resize) for frame in frames]
            return runtime.call(
                split_posterior, scale, encode_frames(runtime.components.get("vae"), fitted, tiling, runtime.call)
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
        _, channels, frames, *cells = self.spec.latent_shape(settings)
        kind, count = ("image", 1) if self.pictured else ("video", frames)
        shape = None, channels, count, *cells
        latents = {f"{kind}_latents": FieldShape(shape, kind == "video"), f"{kind}_deviation": FieldShape(shape, True)}
        return {"prompt_embeds": text, "negative_prompt_embeds": text, **latents}

    def prepare(
        self,
        runtime: Runtime,
        network: SplitNetwork,
        conditioning: CogVideoXConditioning,
        x: LatentArray,
        purpose: Preparation,
    ) -> tuple[tuple[Any, ...], Any]:
        arguments = x, network.weights, conditioning[:2], conditioning.image_latents, purpose.nag
        return runtime.call(make_context, (network.graphdef, purpose.groups), *arguments)
