# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=true, reportIncompatibleVariableOverride=true
"""A Wan checkpoint that makes a video block by block.

Follows pipeline/causal_inference.py of guandeh17/Self-Forcing: four steps of consistency sampling for each block, and
one pass over the finished block at timestep 0, whose keys and values later blocks see.
"""

from dataclasses import dataclass, fields
from math import prod

from flax import nnx

from wanjax.checkpoints.sources import Source
from wanjax.errors import WanjaxError
from wanjax.figures import quantity
from wanjax.layers.flops import attention_flops
from wanjax.models.wan.causal import angles_at, place_of
from wanjax.models.wan.config import CausalTransformerConfig
from wanjax.models.wan.flops import forward_flops
from wanjax.pipelines.caching.rules import NONE, CacheRule
from wanjax.pipelines.family import Forward, Pipe
from wanjax.pipelines.sampler import Denoiser, Held, Inputs
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.steps import Segment
from wanjax.pipelines.wan.architecture import WanArchitecture
from wanjax.pipelines.wan.causal_programs import CausalInputs, CausalWanDenoiser, Past, begin_past, renew
from wanjax.pipelines.wan.conditioning import WanEncoded
from wanjax.pipelines.wan.programs import TEXT_LENGTH


@dataclass(frozen=True, kw_only=True)
class CausalWanArchitecture(WanArchitecture):
    """A Wan checkpoint as its family knows it, where the transformer makes a video block by block."""

    transformer: CausalTransformerConfig

    @property
    def block_frames(self) -> int:
        return self.transformer.block_frames

    @property
    def radial(self) -> bool:
        return False

    def check_settings(self, settings: Settings) -> None:
        """Raises WanjaxError unless the video is of whole blocks, and without guidance."""
        super().check_settings(settings)
        block, factor = self.block_frames, self.vae.temporal_factor
        frames = self.latent_shape(settings)[2]
        if frames % block:
            legal = [(n * block - 1) * factor + 1 for n in (frames // block, frames // block + 1) if n]
            raise WanjaxError(
                f"{quantity(settings.frames, 'frame')} are {quantity(frames, 'latent frame')}, and "
                f"{settings.model} makes blocks of {block}: {' or '.join(map(str, legal))} frames would do"
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
        scores = config.layers * attention_flops(tokens, config.slots * tokens, config.width)
        flops["self_attention"] += scores - config.layers * attention_flops(tokens, tokens, config.width)
        return Forward(tokens, config.layers, config.heads, config.width, scores, flops)

    def block_inputs(
        self,
        pipe: Pipe,
        network: nnx.Module,
        segment: Segment,
        encoded: WanEncoded,
        x: Held,
        batched: bool,
        block: int,
        past: Past | None,
    ) -> tuple[Denoiser, Inputs, Past]:
        (graphdef, weights), config = nnx.split(network), self.transformer
        leads = segment.rule.leads
        negative = () if leads is None else (encoded.negative_prompt_embeds, leads)
        seen: Past = past or pipe.call(begin_past, graphdef, x, weights, encoded.prompt_embeds, *negative)
        tokens = prod(x.shape[1:4]) // config.patch_cells
        given = CausalInputs(angles_at(config, block), seen.window, place_of(config, block, tokens))
        return CausalWanDenoiser(graphdef, self.scheduler), Inputs(weights, (seen.context,), given, x.shape[0]), seen

    def renewed(self, pipe: Pipe, network: nnx.Module, past: Past, inputs: Inputs, x: Held) -> Past:
        (graphdef, weights), given = nnx.split(network), inputs.shared
        window = pipe.call(renew, graphdef, past.window, x, weights, past.context, given.time, given.place)
        return past._replace(window=window)


def architecture_of(source: Source, encoders: bool = False) -> WanArchitecture:
    """Reads the architecture from a checkpoint's configs, as `WanArchitecture.of`."""
    found = WanArchitecture.of(source, encoders)
    if not isinstance(found.transformer, CausalTransformerConfig):
        return found
    return CausalWanArchitecture(**{field.name: getattr(found, field.name) for field in fields(found)})
