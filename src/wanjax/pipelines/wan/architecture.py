# SPDX-License-Identifier: Apache-2.0
"""The architecture of a Wan checkpoint, read from its configs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from wanjax.checkpoints.networks import Config
from wanjax.checkpoints.networks import network as network_in
from wanjax.checkpoints.sources import Source
from wanjax.errors import WanjaxError
from wanjax.models.clip import CLIPVisionConfig
from wanjax.models.t5 import T5Config
from wanjax.models.wan.config import ControlTransformerConfig, ImageTransformerConfig, TransformerConfig
from wanjax.models.wan.flops import forward_flops, self_attention_flops
from wanjax.pipelines.family import Architecture, Forward, optional
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.steps import Segment
from wanjax.pipelines.wan.conditioning import TEXT_TO_VIDEO, Task, WanEncoded, task_of
from wanjax.pipelines.wan.experts import EXPERTS, segments
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.pipelines.wan.programs import TEXT_LENGTH
from wanjax.schedulers import Consistency, Scheduler, UniPC, from_config

THREE_STEPS = Consistency(timesteps=(1000.0, 757.0, 522.0))
"""The scheduler of models distilled as FastWan, whose scheduler_config.json is that of the model before."""


@dataclass(frozen=True, kw_only=True)
class WanArchitecture(Architecture):
    """The shapes of Wan's networks, and the task.

    With `experts`, a second transformer of the same shape takes the steps at low noise.
    """

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
            return config(component) if encoders and optional(source, component) else None

        transformer, vae = config("transformer"), config("vae")
        experts = optional(source, EXPERTS[1])
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
        return not isinstance(self.transformer, ControlTransformerConfig)

    @property
    def grid(self) -> int:
        return self.vae.spatial_factor * self.transformer.patch[1]

    @property
    def image_tokens(self) -> int:
        """The number of picture tokens in cross-attention's context, for plans."""
        if isinstance(self.transformer, ImageTransformerConfig) and self.image_encoder is not None:
            return self.transformer.image_positions or self.image_encoder.tokens
        return 0

    def segments(self, settings: Settings) -> Sequence[Segment]:
        options = {"shift": settings.flow_shift, "sigmas": settings.sigmas}
        return segments(self.scheduler.schedule(settings.steps, **options).timesteps, settings)

    def forward(self, settings: Settings, encoded: WanEncoded | None = None) -> Forward:
        seen = None if encoded is None else encoded.image_embeds
        _, _, *cells = self.latent_shape(settings)
        config, tokens = self.transformer, prod(cells) // prod(self.transformer.patch)
        return Forward(
            tokens=tokens,
            layers=config.layers,
            heads=config.heads,
            width=config.width,
            scores=self_attention_flops(config, tokens),
            flops=forward_flops(
                config, tokens=tokens, text=TEXT_LENGTH, image=self.image_tokens if seen is None else seen.shape[1]
            ),
            ring=True,
        )
