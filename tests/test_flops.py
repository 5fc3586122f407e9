# SPDX-License-Identifier: Apache-2.0
"""The count of operations, against the products in a compiled program and the compiler's own count."""

from dataclasses import asdict, replace
from functools import cache
from math import prod

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from wanjax.abstract import abstract
from wanjax.models.wan.config import (
    T2V_14B,
    ControlTransformerConfig,
    ImageTransformerConfig,
    TransformerConfig,
)
from wanjax.plan.flops import forward_flops
from wanjax.plan.hlo import parse
from wanjax.plan.work import flops

SMALL = replace(T2V_14B, layers=1, heads=4, head_dim=24, mlp_dim=160, channels_in=6, text_width=40, frequency_dim=32)
CONFIGS = {
    "text": SMALL,
    "image": ImageTransformerConfig(**asdict(SMALL), image_width=24, image_positions=None),
    "control": ControlTransformerConfig(**asdict(SMALL), control_channels=10, control_stride=1),
}
GRID, TEXT, IMAGE = (3, 6, 10), 12, 10


@cache
def compiled(config: TransformerConfig) -> jax.stages.Compiled:
    """A forward with one block, whose loop is none, from shapes alone."""
    options = {"attention": "reference", "dtype": jnp.float32, "param_dtype": jnp.float32}
    graphdef, weights = nnx.split(abstract(config, **options))
    frames, height, width = (size * cells for size, cells in zip(GRID, config.patch, strict=True))
    shapes = [(1, frames, height, width, config.channels_in), (1,), (1, TEXT, config.text_width)]
    if isinstance(config, ImageTransformerConfig):
        shapes.append((1, IMAGE, config.image_width))
    if isinstance(config, ControlTransformerConfig):
        shapes.append((1, frames, height, width, config.control_channels))
    operands = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return jax.jit(lambda weights, *given: nnx.merge(graphdef, weights)(*given)).lower(weights, *operands).compile()


def counted(config: TransformerConfig) -> int:
    image = IMAGE if isinstance(config, ImageTransformerConfig) else 0
    return sum(forward_flops(config, tokens=prod(GRID), text=TEXT, image=image).values())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_count_is_that_of_the_programs_products(config):
    module = parse(compiled(config).as_text())
    products = sum(
        flops(module, part, within)
        for within in module.computations.values()
        for part in within.instructions
        if part.opcode in ("dot", "convolution")
    )
    assert products == counted(config)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_compilers_count_is_little_more(config):
    """It counts the operations of norms, softmax and the rest, too."""
    cost = compiled(config).cost_analysis()
    assert cost is not None
    assert 1 < cost["flops"] / counted(config) < 1.1
