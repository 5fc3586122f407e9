# SPDX-License-Identifier: Apache-2.0
"""The kernel of attention's gradient on TPUs, in interpret mode, against the formula in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention import BOUND, SMALL_TILES, exact_gradients, normal, operands
from tests.support.compare import error
from tests.support.quick import quick
from wanjax.kernels.attention import attention, flash_gradient, reference
from wanjax.kernels.attention.flash_gradient import Config

ONE_BLOCK, BLOCKS, PARTS = (
    Config(384, 512, 256, 384, True),
    Config(256, 256, 128, 512, True),
    Config(128, 256, 256, 128, True),
)


def kernel_and_exact_gradients(q, k, v, g, config, scale=0.3, keys=None, live=None):
    """Return the kernel's gradients, from the result and the log-sum-exps of the reference, and the exact gradients."""
    keys = k.shape[1] if keys is None else keys
    live = np.full((q.shape[0],), keys, np.int32) if live is None else np.asarray(live, np.int32)
    mask = np.arange(k.shape[1])[None] < live[:, None]

    @jax.jit
    def run(q, k, v, g, live, mask):
        options = {"key_mask": mask, "window": None, "scale": scale, "bias": None, "config": None}
        out, lse = reference.attention(q, k, v, **options, return_lse=True)
        delta = (g.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)
        return flash_gradient.gradient(q, k, v, g, lse, delta, live, scale=scale, max_keys=keys, config=config)

    return run(q, k, v, g, live, mask), exact_gradients(q, k, v, g, scale=scale, key_mask=mask)[:3]


CONFIGS = {"one block": ONE_BLOCK, "blocks": BLOCKS, "parts": PARTS}
CASES = [(name, size) for name in CONFIGS for size in (64, 128)]


@pytest.mark.parametrize(("name", "size"), quick([("one block", 64), ("blocks", 128), ("parts", 64)], CASES))
def test_lengths_need_not_fill_blocks(name, size):
    q, k, v = operands(2, 300, 450, 2, 2, size)
    kernel_gradients, expected = kernel_and_exact_gradients(q, k, v, normal(4, *q.shape), CONFIGS[name])
    for gradient, expected_gradient in zip(kernel_gradients, expected, strict=True):
        assert error(gradient, expected_gradient) <= 3 * BOUND["float32"]


@pytest.mark.parametrize("live", [(450, 130), (1, 256), (256, 450)])
def test_padding_keys_get_no_gradient(live):
    """Examples differ in their number of keys; the others get no gradient, and may have any finite values."""
    q, k, v = operands(2, 300, 500, 1, 1, 64)
    k, v = (np.where(np.arange(500)[:, None, None] < 450, x, np.float32(1e4)) for x in (k, v))
    kernel_gradients, expected = kernel_and_exact_gradients(q, k, v, normal(4, *q.shape), BLOCKS, keys=450, live=live)
    for gradient, expected_gradient in zip(kernel_gradients, expected, strict=True):
        assert error(gradient, expected_gradient) <= 3 * BOUND["float32"]
    for x in map(np.asarray, kernel_gradients[1:]):
        assert not any(x[b, count:].any() for b, count in enumerate(live))


def test_bfloat16_gradients_are_near():
    q, k, v = operands(1, 300, 450, 2, 2, 128, "bfloat16")
    kernel_gradients, expected = kernel_and_exact_gradients(q, k, v, normal(4, *q.shape, dtype="bfloat16"), BLOCKS)
    for gradient, expected_gradient in zip(kernel_gradients, expected, strict=True):
        assert gradient.dtype == jnp.bfloat16
        assert error(gradient, expected_gradient) <= 2 * BOUND["bfloat16"]


@pytest.mark.parametrize(
    ("options", "heads"),
    [({}, 2), ({"kv_length": 70}, 2), ({"window": (40, 9)}, 2), ({"masked": True}, 2), ({}, 1)],
    ids=["all", "first", "window", "mask", "shared"],
)
def test_attention_has_gradients_for_every_option(options, heads):
    """Where the kernel does not support the options, chunked attention computes the gradients."""
    q, k, v = operands(1, 90, 100, 2, heads, 64)
    mask = jnp.asarray(np.random.default_rng(3).random((1, 100)) < 0.7, bool) if options.get("masked") else None
    options = {"scale": 0.3, "key_mask": mask} | {name: x for name, x in options.items() if name != "masked"}

    def loss(name, config, *qkv):
        return jnp.sum(jnp.sin(attention(*qkv, implementation=name, config=config, **options)))

    expected = jax.jit(jax.grad(partial(loss, "reference", None), (0, 1, 2)))(q, k, v)
    kernel_gradients = jax.jit(jax.grad(partial(loss, "flash_tpu", SMALL_TILES), (0, 1, 2)))(q, k, v)
    for gradient, expected_gradient in zip(kernel_gradients, expected, strict=True):
        assert error(gradient, np.float64(expected_gradient)) <= 3e-6


@pytest.mark.parametrize("queries", [1000, 14_040, 75_600, 200_000])
@pytest.mark.parametrize("vmem", [64, 128])
def test_default_tiles_fit_vmem(queries, vmem):
    """A call holds as many queries as VMEM allows, in whole blocks."""
    tiles = flash_gradient.choose_config(queries, queries, 128, 2, vmem << 20)
    assert tiles is not None
    assert tiles.resident_q % tiles.block_q == tiles.block_kv % tiles.block_kv_compute == 0
    assert tiles.vmem_bytes(128, 2) + flash_gradient.COMPILER_VMEM_BYTES <= vmem << 20
    assert tiles.resident_q >= min(queries, 30_000)
    assert tiles.resident_q - tiles.block_q < queries


def test_a_chip_with_little_vmem_has_no_kernel():
    assert flash_gradient.choose_config(14_040, 14_040, 128, 2, 16 << 20) is None
