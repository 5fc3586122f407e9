# SPDX-License-Identifier: Apache-2.0
"""Counted operations equal the products of a compiled program, and are near the compiler's own count."""

from dataclasses import asdict
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.support.configs import TRANSFORMER
from wanjax.checkpoints.network_kinds import network_of
from wanjax.kernels.attention import AttentionConfig
from wanjax.models.wan.config import (
    ControlTransformerConfig,
    ImageTransformerConfig,
    TransformerConfig,
    forward_flops,
)
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.pricing.hlo import parse
from wanjax.pricing.work import flops

CONFIGS = {
    "text": TRANSFORMER,
    "image": ImageTransformerConfig(**asdict(TRANSFORMER), image_width=24, image_positions=None),
    "control": ControlTransformerConfig(**asdict(TRANSFORMER), control_channels=10, control_stride=1),
}
GRID, TEXT, IMAGE = (3, 6, 10), 12, 10


@cache
def compile_forward(config: TransformerConfig) -> jax.stages.Compiled:
    """Compile a forward from shapes; its one block needs no loop."""
    options = {"attention": AttentionConfig("reference"), "dtype": jnp.float32, "param_dtype": jnp.float32}
    graphdef, weights = nnx.split(network_of(config, NETWORKS).abstract(**options))
    frames, height, width = (size * cells for size, cells in zip(GRID, config.patch, strict=True))

    def context(weights: nnx.State, *inputs: jax.Array) -> Any:
        return nnx.merge(graphdef, weights).context(*inputs)

    def forward(weights: nnx.State, latents: jax.Array, *arguments: Any) -> jax.Array:
        model = nnx.merge(graphdef, weights)
        t, context, *control = arguments
        return model(
            latents, t, context, model.rope(model.grid(latents)), **dict(zip(("control",), control, strict=False))
        )

    def shapes(*shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    inputs = shapes((1, TEXT, config.text_width))
    if isinstance(config, ImageTransformerConfig):
        inputs += shapes((1, IMAGE, config.image_width))
    control = []
    if isinstance(config, ControlTransformerConfig):
        control = shapes((1, frames, height, width, config.control_channels))
    latents, t = shapes((1, frames, height, width, config.channels_in), (1,))
    return jax.jit(forward).lower(weights, latents, t, jax.eval_shape(context, weights, *inputs), *control).compile()


def count_flops(config: TransformerConfig) -> int:
    image = IMAGE if isinstance(config, ImageTransformerConfig) else 0
    return sum(forward_flops(config, tokens=prod(GRID), text_tokens=TEXT, image_tokens=image).values())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_count_equals_the_products_of_the_program(config):
    module = parse(compile_forward(config).as_text())
    products = sum(
        flops(module, instruction, computation)
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode in ("dot", "convolution")
    )
    assert products == count_flops(config)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_compiler_s_count_is_slightly_larger(config):
    """The compiler also counts the operations of norms, softmax and the rest."""
    cost = compile_forward(config).cost_analysis()
    assert cost is not None
    assert 1 < cost["flops"] / count_flops(config) < 1.1
