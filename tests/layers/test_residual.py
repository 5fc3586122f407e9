# SPDX-License-Identifier: Apache-2.0
"""Dense and quantized projections of a block, with the norm before and the residual sum after."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.compare import error
from tests.support.projections import F32, dense, quantized
from wanjax.kernels.quantized_matmul import QuantizedRows
from wanjax.layers.heads import join_heads, split_heads
from wanjax.layers.mlp import MLP, gelu, gelu_tanh
from wanjax.layers.modulation import gated_add, modulate
from wanjax.layers.norms import layer_norm, rms_norm
from wanjax.layers.precision import PRECISIONS
from wanjax.layers.residual import NormedTokens, Residual, project, project_heads, quantizes_tokens, shared_input
from wanjax.layers.rope import apply_rotary, head_norm_and_rope, norm_and_rope, rope_3d

WIDTH, HIDDEN = 256, 192  # rotated by 256 and by 64
CASES = {
    "a modulated norm": (False, True, 1),
    "an affine norm": (True, False, 1),
    "an affine norm, modulated": (True, True, 1),
    "two modulations": (True, True, 2),
}


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def make_inputs(affine, modulated, modulations):
    """Return tokens with a norm, and the residual that the result is added to."""
    norm: Any = layer_norm(WIDTH, 1e-5, affine=affine, **F32, rngs=nnx.Rngs(0))
    if affine:
        norm.scale[...], norm.bias[...] = 1 + normal(WIDTH, seed=1) / 4, normal(WIDTH, seed=2)
    second_mask = jnp.arange(40) < 8 if modulations == 2 else None
    shift, scale, gate = (normal(2, modulations, WIDTH, seed=seed) / 2 for seed in (3, 4, 5))
    mod = (shift, scale, second_mask) if modulated else ()
    x = normal(2, 40, WIDTH, seed=6)
    return NormedTokens(x, norm, jnp.float32, *mod), Residual(x, gate if modulated else None, second_mask)


def compute_separately(tokens, residual, layer):
    """Compute the norm, a layer, and the sum one after another."""
    y = tokens.norm(tokens.x)
    if tokens.shift is not None:
        y = modulate(y, tokens.shift, tokens.scale, tokens.second_mask)
    if residual.gate is None:
        return residual.x + layer(y)
    return gated_add(residual.x, layer(y), residual.gate, residual.second_mask)


def layer_of(precision, sizes=(WIDTH, WIDTH), seed=0):
    base = dense(nnx.Rngs(seed), sizes)
    base.bias[...] = normal(sizes[1], seed=7)
    return quantized(base, PRECISIONS[precision]) if PRECISIONS[precision].quantizes else base


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_projection_computes_norm_product_and_sum(precision, case):
    (tokens, residual), layer = make_inputs(*case), layer_of(precision)
    # a difference in the last bit can round to another step
    tolerance = 1e-3 if PRECISIONS[precision].activations else 0
    assert error(project(layer, tokens, residual), compute_separately(tokens, residual, layer)) <= tolerance
    assert error(project(layer, tokens), layer(tokens.compute())) <= tolerance


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_mlp_computes_norm_products_and_sum(precision, case):
    tokens, residual = make_inputs(*case)
    for activation in (gelu_tanh, gelu):  # kernels have only the tanh form
        mlp: Any = MLP((WIDTH, HIDDEN, WIDTH), ("embed", "mlp", "embed"), activation, **F32, rngs=nnx.Rngs(0))
        mlp.up, mlp.down = layer_of(precision, (WIDTH, HIDDEN)), layer_of(precision, (HIDDEN, WIDTH), 1)

        def layers(x, mlp=mlp):
            return mlp.down(mlp.activation(mlp.up(x)))

        tolerance = 2e-3 if PRECISIONS[precision].activations else 0
        assert error(mlp(tokens, residual), compute_separately(tokens, residual, layers)) <= tolerance
        assert error(mlp(tokens), layers(tokens.compute())) <= tolerance


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("channels", [WIDTH, 64])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_heads_are_projected_normed_and_rotated(precision, channels, rotates):
    (tokens, _), layer = make_inputs(*CASES["a modulated norm"]), layer_of(precision)
    norm: Any = rms_norm(channels, 1e-5, **F32, rngs=nnx.Rngs(0))
    norm.scale[...] = normal(channels, seed=8)
    rope = rope_3d((2, 4, 5), (16, 24, 24)) if rotates else None
    y = layer(tokens.compute())
    if channels < WIDTH:
        heads = norm(split_heads(y, WIDTH // channels))
        expected = join_heads(heads)
        if rope is not None:
            expected = head_norm_and_rope(y, norm, rope)  # one kernel on a TPU, which multiplies in another order
            assert error(expected, join_heads(apply_rotary(heads, rope))) <= 1e-7
    else:
        expected = norm(y) if rope is None else norm_and_rope(y, norm, rope)
    tolerance = 1e-3 if PRECISIONS[precision].activations else 0
    for x in (tokens, shared_input(tokens, layer)):
        assert error(project_heads(layer, x, norm, rope), expected) <= tolerance


def test_projections_of_one_precision_share_rounded_tokens():
    tokens, _ = make_inputs(*CASES["a modulated norm"])
    for precision in PRECISIONS:
        layers = [layer_of(precision, seed=seed) for seed in range(3)]
        x = shared_input(tokens, *layers)
        assert isinstance(x, QuantizedRows) == (PRECISIONS[precision].activations is not None)
        for layer in layers:
            assert error(layer(x), layer(tokens.compute())) <= 1e-3
    mixed = layer_of("int8"), layer_of("none")
    assert not quantizes_tokens(*mixed)
    assert isinstance(shared_input(tokens, *mixed), jnp.ndarray)
