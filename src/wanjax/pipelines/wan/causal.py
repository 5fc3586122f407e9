# SPDX-License-Identifier: Apache-2.0
"""The pipeline of Wan's models that make a video block by block.

Follows pipeline/causal_inference.py of guandeh17/Self-Forcing: four steps of consistency sampling for each block, and
one pass over the finished block at timestep 0, whose keys and values later blocks see.
"""

from math import prod
from typing import Any

from flax import nnx

from wanjax.models.wan.causal import place_of, turns_at
from wanjax.models.wan.config import CausalTransformerConfig
from wanjax.pipelines.keywords import GivenSettings, spelled_out
from wanjax.pipelines.sampler import Denoiser, Held, Inputs
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.streaming import StreamingPipeline
from wanjax.pipelines.wan.architecture import WanArchitecture
from wanjax.pipelines.wan.causal_architecture import CausalWanArchitecture
from wanjax.pipelines.wan.causal_programs import CausalWanDenoiser, Past, Sight, begin_past, renew
from wanjax.pipelines.wan.conditioning import WanEncoded
from wanjax.pipelines.wan.pipeline import WanPipeline


class CausalWanPipeline(StreamingPipeline, WanPipeline):
    """A causal Wan checkpoint as a function from prompts to videos, whose frames come block by block."""

    architecture: CausalWanArchitecture

    @property
    def config(self) -> CausalTransformerConfig:
        return self.architecture.transformer

    @property
    def block_frames(self) -> int:
        return self.config.block_frames

    @spelled_out(GivenSettings)
    def settings(self, *, size: tuple[int, int] | None = None, **settings: Any) -> Settings:
        """Returns the model's defaults, overridden by the given settings; raises WanjaxError for invalid ones."""
        chosen = super().settings(size=size, **settings)
        self.architecture.check_settings(chosen)
        return chosen

    def begin_past(self, network: nnx.Module, encoded: WanEncoded, x: Held) -> Past:
        graphdef, weights = nnx.split(network)
        return self.call(begin_past, graphdef, x, weights, encoded.prompt_embeds)

    def block_inputs(self, network: nnx.Module, past: Past, x: Held, block: int) -> tuple[Denoiser, Inputs]:
        graphdef, weights = nnx.split(network)
        tokens = prod(x.shape[1:4]) // self.config.patch_cells
        sight = Sight(turns_at(self.config, block), past.window, place_of(self.config, block, tokens))
        return CausalWanDenoiser(graphdef, self.scheduler), Inputs(weights, (past.context,), sight, x.shape[0])

    def renewed(self, network: nnx.Module, past: Past, inputs: Inputs, x: Held) -> Past:
        graphdef, weights = nnx.split(network)
        sight = inputs.shared
        window = self.call(renew, graphdef, past.window, x, weights, past.context, sight.time, sight.place)
        return past._replace(window=window)


def pipeline_of(components: Any, architecture: WanArchitecture, *rest: Any) -> WanPipeline:
    """Returns the pipeline of a Wan checkpoint; the arguments are those of `Pipeline`."""
    kind = CausalWanPipeline if isinstance(architecture, CausalWanArchitecture) else WanPipeline
    return kind(components, architecture, *rest)
