# SPDX-License-Identifier: Apache-2.0
"""The kernels around attention, interpreted, against the operations that they replace."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.compare import error
from tests.support.small_wan import partitioner
from wanjax.kernels import heads
from wanjax.sharding import use


def operands(batch, length, count, dtype):
    random = np.random.default_rng(length)

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    angle = draw(length, 64)
    width = 128 * count
    return draw(batch, length, width).astype(dtype), draw(batch, length, 1), draw(width), jnp.cos(angle), jnp.sin(angle)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(("length", "dtype", "bound"), [(7, jnp.float32, 1e-6), (300, jnp.bfloat16, 3e-3)])
def test_norm_and_rope_in_one_pass(parts, length, dtype, bound):
    given = operands(2, length, 4, dtype)
    out = heads._call(*given, parts=parts, interpret=True)
    assert out.dtype == dtype
    assert error(out.astype(jnp.float32), np.asarray(heads.plain(*given).astype(jnp.float32), np.float64)) <= bound


def operands_by_head(batch, length, count, size, dtype):
    random = np.random.default_rng(length)

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    angle = draw(length, size // 2)
    x = (3 + draw(batch, length, count * size)).astype(dtype)  # with a mean that the norm has to take away
    return x, draw(size), draw(size), jnp.cos(angle), jnp.sin(angle)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(("size", "count"), [(128, 4), (64, 8), (32, 16)])
@pytest.mark.parametrize(("length", "dtype", "bound"), [(7, jnp.float32, 1e-6), (300, jnp.bfloat16, 3e-3)])
def test_norm_of_each_head_and_rope_in_one_pass(parts, size, count, length, dtype, bound):
    given = operands_by_head(2, length, count, size, dtype)
    out = heads._call_by_head(*given, eps=1e-6, parts=parts, interpret=True)
    assert out.dtype == dtype
    right = heads.plain_by_head(*given, eps=1e-6).astype(jnp.float32)
    assert error(out.astype(jnp.float32), np.asarray(right, np.float64)) <= bound


def test_the_norm_of_each_head_by_its_formula():
    x, scale, bias, cos, sin = operands_by_head(2, 5, 3, 64, jnp.float32)
    out = heads.head_normed_rotary(x, scale, bias, cos, sin, eps=1e-6).reshape(2, 5, 3, 64)
    y = np.asarray(x, np.float64).reshape(2, 5, 3, 64)
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6) * np.asarray(scale) + np.asarray(
        bias
    )
    turned = (y[..., :32] + 1j * y[..., 32:]) * (np.asarray(cos) + 1j * np.asarray(sin))[None, :, None]
    assert error(out, np.concatenate([turned.real, turned.imag], axis=-1)) <= 1e-6


def test_widths_that_fill_no_lanes_need_no_kernel():
    given = operands_by_head(2, 5, 3, 64, jnp.float32)
    interpreted = heads.head_normed_rotary(*given, eps=1e-6, interpret=True)
    assert (interpreted == heads.plain_by_head(*given, eps=1e-6)).all()


def test_gradient_by_head():
    x, *rest = operands_by_head(1, 16, 4, 64, jnp.float32)
    ours, right = (
        jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x, *rest, eps=1e-6))))(x)
        for f in (lambda *given, eps: heads.head_normed_rotary(*given, eps=eps, interpret=True), heads.plain_by_head)
    )
    assert error(ours, np.asarray(right, np.float64)) <= 1e-6


@pytest.mark.parametrize(("axes", "rules"), [((2, 1, 4), "fsdp"), ((1, 2, 4), "tp"), ((2, 2, 2), "tp")])
@pytest.mark.parametrize("count", [8, 6])
def test_norm_of_each_head_on_eight_devices(axes, rules, count):
    given = operands_by_head(2, 16, count, 64, jnp.float32)
    with use(partitioner(axes, rules)):
        out = jax.jit(partial(heads.head_normed_rotary, eps=1e-6, interpret=True))(*given)
    right = heads.plain_by_head(*given, eps=1e-6)
    assert error(out, np.asarray(right, np.float64)) <= 1e-6


def test_gradient():
    x, *rest = operands(1, 16, 2, jnp.float32)
    ours, right = (
        jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x, *rest))))(x)
        for f in (lambda *given: heads.normed_rotary(*given, interpret=True), heads.plain)
    )
    assert error(ours, np.asarray(right, np.float64)) <= 1e-6


@pytest.mark.parametrize("length", [8, 300])
def test_parts_are_written_and_joined(length):
    x = operands(2, length, 4, jnp.bfloat16)[0]
    assert (heads._packed(x, parts=2, interpret=True) == x).all()
    parts = jnp.moveaxis(x.reshape(2, length, 2, -1), 2, 0)
    assert (heads.join_parts(parts, interpret=True) == x).all()
    assert (heads.join_parts(parts) == x).all()


def test_the_gradient_of_parts_is_the_values_own():
    """What only moves values has a gradient too, which training needs."""
    x, g = (operands(1, 40, 4, jnp.float32)[0] + i for i in range(2))
    packed = partial(heads._with_gradient, heads._packed, heads._same, True, 2)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(g * packed(x)))(x), g)
    parts = jnp.moveaxis(x.reshape(1, 40, 2, 256), 2, 0)
    gradient = jax.grad(lambda parts: jnp.sum(g * heads.join_parts(parts, interpret=True)))(parts)
    np.testing.assert_array_equal(gradient, jnp.moveaxis(g.reshape(1, 40, 2, 256), 2, 0))
