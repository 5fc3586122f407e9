# SPDX-License-Identifier: Apache-2.0
"""The kernels around attention, interpreted, against the operations that they replace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.compare import error
from wanjax.kernels import heads


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
