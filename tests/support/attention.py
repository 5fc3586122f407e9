# SPDX-License-Identifier: Apache-2.0
"""Operands of attention, its formula in float64, and the bounds of its error."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from wanjax.kernels.attention import attention, flash_kernel, flash_tpu
from wanjax.kernels.attention.ring_weights import RingWeights, gather_during_attention, take_pending_weights
from wanjax.sharding import use_partitioner

BOUND = {"float32": 1e-6, "bfloat16": 3e-3}
SMALL_TILES = flash_tpu.Config(128, 64, 32, interpret=True)


def normal(seed, *shape, dtype="float32"):
    return jnp.asarray(np.float32(np.random.default_rng(seed).normal(size=shape)).astype(jnp.dtype(dtype)), dtype)


def operands(batch, queries, keys, heads, kv_heads, size, dtype="float32", seed=0):
    q = normal(seed, batch, queries, heads, size, dtype=dtype)
    k, v = (normal(seed + i, batch, keys, kv_heads, size, dtype=dtype) for i in (1, 2))
    return q, k, v


def run(name, q, k, v, **options):
    """Compile and run an implementation. `window`, `scale` and `config` are static."""
    static = {key: options.pop(key) for key in ("window", "scale", "config") if key in options}
    return jax.jit(partial(attention, implementation=name, **static))(q, k, v, **options)


def softmax(q, k, key_mask=None, window=None, scale=None, bias=None):
    """Return the weights [B N L S] of the formula in float64; a row without keys is zeros."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    logits = np.einsum("BLND,BSND->BNLS", q, k, optimize=True) * (q.shape[3] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + np.asarray(bias, np.float64)
    attended = np.ones(logits.shape, bool)
    if key_mask is not None:
        attended &= np.asarray(key_mask)[:, None, None, :]
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        offset = np.arange(k.shape[1]) - np.arange(q.shape[1])[:, None]
        attended &= offset >= (-np.inf if left is None else -left)
        attended &= offset <= (np.inf if right is None else right)
    logits = np.where(attended, logits, -1e300)
    weights = np.where(attended, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0)
    return weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)


def exact(q, k, v, **options):
    v = np.repeat(np.asarray(v, np.float64), q.shape[2] // v.shape[2], axis=2)
    return np.einsum("BNLS,BSND->BLND", softmax(q, k, **options), v, optimize=True)


def exact_gradients(q, k, v, g, *, scale, of_lse=0.0, **options):
    """Return the gradients of Σ g · attention for q, k, v (with all heads) and the logits, in float64.

    `of_lse` [B L N] adds the gradients of Σ of_lse · log-sum-exp.
    """
    weights = softmax(q, k, scale=scale, **options)
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    d_weights = np.einsum("BLND,BSND->BNLS", g, v)
    d_log_sum_exp = np.broadcast_to(np.asarray(of_lse, np.float64), q.shape[:3]).transpose(0, 2, 1)[..., None]
    d_logits = weights * (d_weights - (weights * d_weights).sum(axis=-1, keepdims=True) + d_log_sum_exp)
    return (
        scale * np.einsum("BNLS,BSND->BLND", d_logits, k),
        scale * np.einsum("BNLS,BLND->BSND", d_logits, q),
        np.einsum("BNLS,BLND->BSND", weights, g),
        d_logits,
    )


@contextmanager
def count_calls(name: str, module: ModuleType = flash_kernel) -> Iterator[list[int]]:
    """Yield a list that gets one entry for each call of a kernel's function while kernels run in the `with` block."""
    calls: list[int] = []
    function = getattr(module, name)

    def counted(*arguments, **options):
        jax.debug.callback(lambda: calls.append(1))
        return function(*arguments, **options)

    jax.clear_caches()  # a kernel is traced once
    with mock.patch.object(module, name, counted):
        yield calls
    jax.clear_caches()


def attend_while_gathering(partitioner, attend, *operands):
    """Run attention while it gathers two weight matrices; check that every device then has both matrices."""
    mesh_axis = "sp" if partitioner.axis_size("sp") > 1 else "tp"
    weights = [normal(6, 32, 16), normal(7, 16, 24)]
    specs = PartitionSpec(None, mesh_axis), PartitionSpec(mesh_axis, None)
    placed = [jax.device_put(x, NamedSharding(partitioner.mesh, spec)) for x, spec in zip(weights, specs, strict=True)]

    def run(weights, *operands):
        with use_partitioner(partitioner), gather_during_attention(pending := RingWeights(weights, (1, 0), mesh_axis)):
            out = attend(*operands)
            assert take_pending_weights() is None
            return out, pending.gathered()

    out, gathered = jax.jit(run)(placed, *operands)
    for gathered_weight, weight in zip(gathered, weights, strict=True):
        assert gathered_weight.sharding.is_fully_replicated
        np.testing.assert_array_equal(gathered_weight, weight)
    return out
