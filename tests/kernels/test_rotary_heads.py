# SPDX-License-Identifier: Apache-2.0
"""The kernels around attention are compared with the operations that they replace."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.compare import error
from tests.support.quick import quick
from tests.support.small_wan import partitioner
from wanjax.kernels import rotary_heads
from wanjax.kernels.autodiff import with_gradient
from wanjax.sharding import use_partitioner


def operands(batch, length, count, dtype):
    random = np.random.default_rng(length)

    def draw(*shape):
        return random.normal(size=shape).astype(np.float32)

    angle = draw(length, 64)
    width = 128 * count
    arrays = draw(batch, length, width).astype(dtype), draw(batch, length, 1), draw(width), np.cos(angle), np.sin(angle)
    return tuple(jnp.asarray(array, array.dtype) for array in arrays)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(("length", "dtype", "bound"), [(7, jnp.float32, 1e-6), (300, jnp.bfloat16, 3e-3)])
def test_the_kernel_computes_norm_and_rope(parts, length, dtype, bound):
    arguments = operands(2, length, 4, dtype)
    call = partial(rotary_heads.call, parts=parts, interpret=True)
    out, expected = jax.jit(lambda *arguments: (call(*arguments), rotary_heads.reference(*arguments)))(*arguments)
    assert out.dtype == dtype
    assert error(out, np.asarray(expected, np.float64)) <= bound


def operands_by_head(batch, length, count, size, dtype):
    random = np.random.default_rng(length)

    def draw(*shape):
        return random.normal(size=shape).astype(np.float32)

    angle = draw(length, size // 2)
    x = (3 + draw(batch, length, count * size)).astype(dtype)  # the norm has to subtract this mean
    x = x, draw(size), draw(size), np.cos(angle), np.sin(angle)
    return tuple(jnp.asarray(array, array.dtype) for array in x)


reference_by_head = partial(rotary_heads.reference_by_head, eps=1e-6)
norm_and_rope_by_head = partial(rotary_heads.head_normed_rotary, eps=1e-6, interpret=True)
SIZES = [(128, 4), (64, 8), (32, 16)]
CASES = [(size, count, parts, dtype) for size, count in SIZES for parts in (1, 4) for dtype in ("float32", "bfloat16")]
QUICK = [case for case in CASES if (case[2] == 1) == (case[3] == "float32") or case[0] == 64]


@pytest.mark.parametrize(("size", "count", "parts", "dtype"), quick(QUICK, CASES))
def test_the_kernel_computes_the_norm_of_each_head_and_rope(size, count, parts, dtype):
    length, bound = {"float32": (7, 1e-6), "bfloat16": (300, 3e-3)}[dtype]
    arguments = operands_by_head(2, length, count, size, dtype)
    call = partial(rotary_heads.call_by_head, eps=1e-6, parts=parts, interpret=True)
    out, expected = jax.jit(lambda *arguments: (call(*arguments), reference_by_head(*arguments)))(*arguments)
    assert out.dtype == dtype
    assert error(out, np.asarray(expected, np.float64)) <= bound


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("bfloat16", 3e-3)])
def test_the_kernel_computes_the_rms_norm_of_each_head_and_rope(dtype, bound):
    x, scale, _, *tables = operands_by_head(2, 300, 4, 128, dtype)
    call = partial(rotary_heads.call_by_head, eps=1e-6, parts=4, interpret=True)
    out, expected = jax.jit(lambda *operands: (call(*operands), reference_by_head(*operands)))(x, scale, None, *tables)
    assert out.dtype == dtype
    assert error(out, np.asarray(expected, np.float64)) <= bound


@pytest.mark.parametrize("norm", ["layer norm", "RMS norm"])
def test_the_reference_follows_the_formula(norm):
    x, scale, bias, cos, sin = operands_by_head(2, 5, 3, 64, jnp.float32)
    mean, bias = (None, bias) if norm == "layer norm" else (0.0, None)
    out = np.asarray(jax.jit(partial(rotary_heads.head_normed_rotary, eps=1e-6))(x, scale, bias, cos, sin))
    y = np.asarray(x, np.float64).reshape(2, 5, 3, 64)
    y = y - (y.mean(-1, keepdims=True) if mean is None else mean)
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6) * np.asarray(scale)
    y = y if bias is None else y + np.asarray(bias)
    rotated = (y[..., :32] + 1j * y[..., 32:]) * (np.asarray(cos) + 1j * np.asarray(sin))[None, :, None]
    assert error(out.reshape(2, 5, 3, 64), np.concatenate([rotated.real, rotated.imag], axis=-1)) <= 1e-6


def test_narrow_heads_use_no_kernel():
    arguments = operands_by_head(2, 5, 3, 64, jnp.float32)
    interpreted, reference = jax.jit(
        lambda *arguments: (norm_and_rope_by_head(*arguments), reference_by_head(*arguments))
    )(*arguments)
    assert (np.asarray(interpreted) == reference).all()


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_gradient_by_head_equals_that_of_the_reference(has_bias):
    x, scale, bias, *tables = operands_by_head(1, 16, 4, 64, jnp.float32)
    rest = scale, bias if has_bias else None, *tables
    gradient, expected = (
        jax.jit(jax.grad(lambda x, function=function: jnp.sum(jnp.sin(function(x, *rest)))))(x)
        for function in (norm_and_rope_by_head, reference_by_head)
    )
    assert error(gradient, np.asarray(expected, np.float64)) <= 1e-6


MESHES = [((2, 1, 4), "fsdp"), ((1, 2, 4), "tp"), ((2, 2, 2), "tp")]
MESHES_AND_HEADS = [(*mesh, count) for mesh in MESHES for count in (8, 6)]


@pytest.mark.parametrize(
    ("axes", "rules", "count"),
    quick([MESHES_AND_HEADS[0], MESHES_AND_HEADS[1], MESHES_AND_HEADS[3], MESHES_AND_HEADS[4]], MESHES_AND_HEADS),
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_eight_devices_compute_the_norm_of_each_head(axes, rules, count, has_bias):
    x, scale, bias, *tables = operands_by_head(2, 16, count, 64, jnp.float32)
    options = x, scale, bias if has_bias else None, *tables
    with use_partitioner(partitioner(axes, rules)):
        out = jax.jit(norm_and_rope_by_head)(*options)
    expected = jax.jit(reference_by_head)(*options)
    assert error(out, np.asarray(expected, np.float64)) <= 1e-6


def test_the_gradient_equals_that_of_the_reference():
    x, *rest = operands(1, 16, 2, jnp.float32)
    gradient, expected = (
        jax.jit(jax.grad(lambda x, function=function: jnp.sum(jnp.sin(function(x, *rest)))))(x)
        for function in (partial(rotary_heads.normed_rotary, interpret=True), rotary_heads.reference)
    )
    assert error(gradient, np.asarray(expected, np.float64)) <= 1e-6


@pytest.mark.parametrize("length", [8, 300])
def test_heads_are_written_apart_and_joined_again(length):
    x = np.asarray(operands(2, length, 4, jnp.bfloat16)[0])
    parts = np.moveaxis(x.reshape(2, length, 2, -1), 2, 0)

    @jax.jit
    def pack_and_join(x, parts):
        joined = rotary_heads.join_parts(parts, interpret=True), rotary_heads.join_parts(parts)
        return rotary_heads.pack(x, parts=2, interpret=True), *joined

    assert all((np.asarray(out) == x).all() for out in pack_and_join(x, parts))


def test_the_gradient_of_parts_equals_that_of_the_values():
    """Training needs the gradient of a kernel that only moves values."""
    x, g = (np.asarray(operands(1, 40, 4, jnp.float32)[0]) + i for i in range(2))
    packed = partial(with_gradient, partial(rotary_heads.pack, parts=2, interpret=True), rotary_heads._identity)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: jnp.sum(g * packed(x))))(x), g)
    parts = np.moveaxis(x.reshape(1, 40, 2, 256), 2, 0)
    gradient = jax.jit(jax.grad(lambda parts: jnp.sum(g * rotary_heads.join_parts(parts, interpret=True))))(parts)
    np.testing.assert_array_equal(gradient, np.moveaxis(g.reshape(1, 40, 2, 256), 2, 0))
