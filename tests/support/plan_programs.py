# SPDX-License-Identifier: Apache-2.0
"""Small programs for the tests of pricing, which the compiling process builds."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wanjax.kernels.attention import attention, choose
from wanjax.kernels.attention.specs import WORKLOADS
from wanjax.kernels.attention.target import target
from wanjax.plan.program import Program


def product_kernel(x: jax.Array, y: jax.Array) -> jax.Array:
    """exp(x y) by blocks of 128, whose kernel has a beginning, a body and an end."""

    def kernel(x_ref, y_ref, out_ref, total):
        @pl.when(pl.program_id(2) == 0)
        def begin():
            total[...] = jnp.zeros_like(total)

        total[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def end():
            out_ref[...] = jnp.exp(total[...])

    (length, inner), width = x.shape, y.shape[1]
    return pl.pallas_call(
        kernel,
        grid=(length // 128, width // 128, inner // 128),
        in_specs=[pl.BlockSpec((128, 128), lambda i, j, k: (i, k)), pl.BlockSpec((128, 128), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((128, 128), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((length, width), jnp.float32),
        scratch_shapes=[pltpu.VMEM((128, 128), jnp.float32)],
        name="product",
    )(x, y)


def layers(mesh: Mesh, *, count: int, tokens: int, width: int) -> Program:
    """Layers in a scan, tokens over `dp`, the columns of their weights over `tp`."""

    def layer(x, w):
        y = jnp.tanh(x @ w)
        return jax.lax.with_sharding_constraint(y, P("dp", None)), None

    def shape(spec: P, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    operands = shape(P("dp", None), tokens, width), shape(P(None, None, "tp"), count, width, width)
    return Program(lambda x, w: jax.lax.scan(layer, x, w)[0], operands, donate=(0,))


def refused(mesh: Mesh) -> Program:
    return Program(lambda x: x.undefined, (jax.ShapeDtypeStruct((8,), jnp.float32),))


def target_of(x: jax.Array) -> jax.Array:
    """A kernel for TPUs if that is what this is being compiled for, else a sum."""
    copy = pl.pallas_call(_copy, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))
    return copy(x) if target(x).platform == "tpu" else x + x


def _copy(x_ref, out_ref):
    out_ref[...] = x_ref[...]


def attend(mesh: Mesh, *, workload: str) -> Program:
    """A named workload in bfloat16, as the dispatcher does it, on each device the same."""
    return _attend(mesh, WORKLOADS[workload].operands(jnp.bfloat16))


def attend_small(mesh: Mesh, *, size: int, dtype: str, window: tuple[int, int] | None, masked: bool) -> Program:
    """Two examples of two heads that share one of k and v, with a window or a mask of keys."""
    operands = [jax.ShapeDtypeStruct((2, length, heads, size), jnp.dtype(dtype)) for length, heads in SMALL_LENGTHS]
    mask = [jax.ShapeDtypeStruct((2, SMALL_LENGTHS[1][0]), bool)] if masked else []
    return _attend(mesh, [*operands, *mask], window)


SMALL_LENGTHS = ((300, 2), (200, 1), (200, 1))  # and heads of q, k and v


def _attend(mesh: Mesh, operands, window=None) -> Program:
    def run(q, k, v, key_mask=None):
        assert choose(q, k, v, key_mask=key_mask, window=window).name == "flash_tpu"
        return attention(q, k, v, key_mask=key_mask, window=window)

    everywhere = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())) for x in operands)
    return Program(everywhere, tuple(shapes))
