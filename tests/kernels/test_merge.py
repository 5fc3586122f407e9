# SPDX-License-Identifier: Apache-2.0
"""Merged results of attention equal attention to both sets of keys."""

from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from wanjax.kernels.attention import merge
from wanjax.pricing.chips import abstract_mesh, find_slice
from wanjax.pricing.compile import compile_program
from wanjax.pricing.lowering import AbstractCall
from wanjax.pricing.pallas_kernels import kernel_calls


def draw(batch, length, later, heads, dtype):
    random = np.random.default_rng(length)
    x, y = (jnp.asarray(random.normal(size=(batch, rows, 128 * heads)), dtype) for rows in (length, later))
    return x, y, jnp.asarray(random.uniform(size=(batch, later, heads)), jnp.float32)


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-6), (jnp.bfloat16, 8e-3)])
def test_the_kernel_merges_rows_from_the_start_on(dtype, bound):
    x, y, share = draw(2, 120, 96, 3, dtype)
    out = jax.jit(partial(merge.call, start=16, interpret=True))(x, y, share)
    x64, y64, share64 = (np.float64(array) for array in (x, y, share))
    merged = x64[:, 16:112] + np.repeat(share64, 128, axis=2) * (y64 - x64[:, 16:112])
    assert out.dtype == dtype
    np.testing.assert_allclose(np.float64(out[:, 16:112]), merged, rtol=bound, atol=bound)
    for rows in (slice(16), slice(112, None)):
        np.testing.assert_array_equal(np.asarray(out[:, rows]), np.asarray(x[:, rows]))


def test_rows_of_no_common_block_are_left_to_the_reference():
    assert merge.is_supported(jnp.zeros((1, 75600, 5, 128)), 72000, 3600)
    assert merge.is_supported(jnp.zeros((1, 32760, 5, 128)), 31200, 1560)
    assert not merge.is_supported(jnp.zeros((1, 20, 3, 128)), 15, 5)
    assert not merge.is_supported(jnp.zeros((1, 64, 3, 64)), 48, 16)


@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")
def test_programs_for_a_chip_use_the_kernel():
    chip = "v6e-1"
    replicated = NamedSharding(abstract_mesh(find_slice(chip), {"dp": 1, "sp": 1, "tp": 1}), PartitionSpec())

    def shape(*sizes, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=replicated)

    def result_of(length):
        return shape(1, length, 10, 128), shape(1, length, 10, dtype="float32")

    call = AbstractCall(partial(merge.merge_rows, start=1560), (*result_of(32760), *result_of(31200)))
    result = compile_program(call, chip)
    assert [call.name for call in kernel_calls(result).values()] == ["merged_rows"]
