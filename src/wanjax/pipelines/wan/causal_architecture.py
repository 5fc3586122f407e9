# SPDX-License-Identifier: Apache-2.0
"""The architecture of a Wan checkpoint that makes a video block by block."""

from dataclasses import dataclass, fields
from math import prod

from wanjax.checkpoints.sources import Source
from wanjax.errors import WanjaxError
from wanjax.models.wan.config import CausalTransformerConfig
from wanjax.models.wan.flops import forward_flops, self_attention_flops
from wanjax.pipelines.cache_rules import NONE, CacheRule
from wanjax.pipelines.family import Forward
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.wan.architecture import WanArchitecture
from wanjax.pipelines.wan.conditioning import WanEncoded
from wanjax.pipelines.wan.programs import TEXT_LENGTH


@dataclass(frozen=True, kw_only=True)
class CausalWanArchitecture(WanArchitecture):
    """The shapes of Wan's networks where the transformer makes a video block by block."""

    transformer: CausalTransformerConfig

    @property
    def block_length(self) -> int:
        return self.transformer.block_frames * self.vae.temporal_factor

    @property
    def radial(self) -> bool:
        return False

    def check_settings(self, settings: Settings) -> None:
        """Raises WanjaxError unless the video is of whole blocks, and without guidance."""
        block, factor = self.transformer.block_frames, self.vae.temporal_factor
        frames = self.latent_shape(settings)[2]
        if frames % block:
            legal = [(n * block - 1) * factor + 1 for n in (frames // block, frames // block + 1) if n]
            raise WanjaxError(
                f"{settings.frames} frames are {frames} latent frames, and {settings.model} makes blocks of {block}: "
                f"{' or '.join(map(str, legal))} frames would do"
            )
        if settings.guided:
            raise WanjaxError(
                f"{settings.model} was distilled without guidance: a guidance scale of 1, its default, would do"
            )

    def cache_rule(self, settings: Settings) -> CacheRule:
        if settings.cache != NONE:
            raise WanjaxError(f"{settings.model} takes too few steps for a step cache: leave {settings.cache} out")
        return NONE

    def forward(self, settings: Settings, encoded: WanEncoded | None = None) -> Forward:
        """Returns the work of one forward for a block that sees a full window."""
        _, _, _, *cells = self.latent_shape(settings)
        config = self.transformer
        tokens = prod((config.block_frames, *cells)) // config.patch_cells
        flops = dict(forward_flops(config, tokens=tokens, text=TEXT_LENGTH))
        scores = self_attention_flops(config, tokens) * config.slots
        flops["self_attention"] += scores - self_attention_flops(config, tokens)
        return Forward(tokens, config.layers, config.heads, config.width, scores, flops)

    def decoded_at_once(self, frames: int) -> tuple[int, int]:
        """A block's latent frames, in every chunk."""
        return self.transformer.block_frames, self.transformer.block_frames


def architecture_of(source: Source, encoders: bool = False) -> WanArchitecture:
    """Reads the architecture from a checkpoint's configs, as `WanArchitecture.of`."""
    found = WanArchitecture.of(source, encoders)
    if not isinstance(found.transformer, CausalTransformerConfig):
        return found
    return CausalWanArchitecture(**{field.name: getattr(found, field.name) for field in fields(found)})
