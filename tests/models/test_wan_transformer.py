# SPDX-License-Identifier: Apache-2.0
"""The memory of Wan's transformer with tokens at two timesteps, read from its compiled program."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
from flax import nnx
from jax.stages import Compiled

from wanjax.kernels import compiler_options
from wanjax.kernels.attention import AttentionConfig
from wanjax.layers.placement import as_shapes
from wanjax.models.wan.config import TI2V_5B
from wanjax.models.wan.transformer import WanTransformer

LATENTS = (1, 31, 44, 80, 48)  # 704 × 1280 pixels, 121 frames
TOKENS = 31 * 22 * 40
MODULATIONS = TOKENS * 6 * TI2V_5B.width


@cache
def step(clean_frames: int) -> Compiled:
    """Compile two blocks of Wan 2.2 TI2V-5B for its largest video in float32, from shapes."""
    config = replace(TI2V_5B, layers=2)
    options = {"attention": AttentionConfig("chunked"), "dtype": jnp.float32, "param_dtype": jnp.float32}
    graphdef, weights = nnx.split(as_shapes(lambda rngs: WanTransformer(config, **options, rngs=rngs)))

    def prepare(weights, latents, text):
        model = nnx.merge(graphdef, weights)
        return model.context(text), model.rope(model.grid(latents))

    def run(weights, latents, t, context, rope):
        return nnx.merge(graphdef, weights)(latents, t, context, rope, clean_frames=clean_frames)

    latents, t, text = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (LATENTS, (1,), (1, 512, 4096)))
    arguments = weights, latents, t, *jax.eval_shape(prepare, weights, latents, text)
    return jax.jit(run, compiler_options=compiler_options.scan_options()).lower(*arguments).compile()


def array_sizes(compiled: Compiled) -> Iterator[int]:
    """Yield the number of elements of every array in the program."""
    for shape in re.findall(r"= \w+\[([\d,]+)\]", compiled.as_text()):
        yield math.prod(map(int, shape.split(",")))


def test_no_array_holds_all_modulations_of_all_tokens():
    assert TOKENS * TI2V_5B.mlp_dim == max(array_sizes(step(1))) < MODULATIONS


def test_a_clean_frame_needs_no_more_memory():
    """Several arrays with the modulations of all tokens would take 2 GB, half as much as everything else."""
    without_clean_frame, with_clean_frame = (step(frames).memory_analysis().temp_size_in_bytes for frames in (0, 1))
    assert with_clean_frame < 1.05 * without_clean_frame
