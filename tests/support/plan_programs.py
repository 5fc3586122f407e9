# SPDX-License-Identifier: Apache-2.0
"""Small programs for the tests of pricing."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.workloads import WORKLOADS
from wanjax.kernels.attention import attention, choose_implementation
from wanjax.kernels.attention.ring_weights import RingWeights, gather_during_attention
from wanjax.kernels.target import target
from wanjax.pricing.lowering import AbstractCall, replicated
from wanjax.sharding import SHARDING_RULES, Partitioner, shard_tokens, use_partitioner


def product_kernel(x: jax.Array, y: jax.Array) -> jax.Array:
    """Compute exp(x y) by blocks of 128, with a kernel that has a prologue, a loop body and an epilogue."""

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


def replicated_product(mesh: AbstractMesh) -> AbstractCall:
    """Return a call of `product_kernel`, replicated on each device."""
    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 256), (256, 128)))
    return replicated(product_kernel, mesh, shapes)


def layers(mesh: AbstractMesh, *, count: int, tokens: int, width: int) -> AbstractCall:
    """Return a scan over layers, with tokens over `dp` and the columns of weights over `tp`."""

    def layer(x, w):
        y = jnp.tanh(x @ w)
        return jax.lax.with_sharding_constraint(y, P("dp", None)), None

    def shape(spec: P, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    operands = shape(P("dp", None), tokens, width), shape(P(None, None, "tp"), count, width, width)
    return AbstractCall(lambda x, w: jax.lax.scan(layer, x, w)[0], operands, donate=(0,))


def on_shapes(function, *shapes, dtype="bfloat16", **keywords) -> AbstractCall:
    """Return a call of a function with arrays of these shapes on the host."""
    arguments = tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes)
    return AbstractCall(function, arguments, **keywords)


def target_of(x: jax.Array) -> jax.Array:
    """Run a kernel when compiled for TPUs, else a sum."""
    copy = pl.pallas_call(_copy, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))
    return copy(x) if target(x).platform == "tpu" else x + x


def _copy(x_ref, out_ref):
    out_ref[...] = x_ref[...]


def attend(mesh: AbstractMesh, *, workload: str) -> AbstractCall:
    """Return attention for a named workload in bfloat16, replicated on each device."""
    return _attend(mesh, WORKLOADS[workload].operands(jnp.bfloat16))


def attend_small(
    mesh: AbstractMesh, *, size: int, dtype: str, kv_heads: int, window: tuple[int, int] | None, masked: bool
) -> AbstractCall:
    """Return attention of two examples with two heads, with a window or a key mask, and its gradients."""
    lengths = ((300, 2), (200, kv_heads), (200, kv_heads))
    operands = [jax.ShapeDtypeStruct((2, length, heads, size), jnp.dtype(dtype)) for length, heads in lengths]
    mask = [jax.ShapeDtypeStruct((2, 200), bool)] if masked else []
    attend = _attend(mesh, [*operands, *mask], window)

    def run(q, k, v, *mask):
        out, pull = jax.vjp(lambda *qkv: attend.function(*qkv, *mask), q, k, v)
        return out, pull(out)

    return attend._replace(function=run)


def attend_int8(mesh: AbstractMesh, *, length: int) -> AbstractCall:
    """Return self-attention of two examples with two heads and q kᵀ in int8, replicated on each device."""
    operand = jax.ShapeDtypeStruct((2, length, 2, 128), jnp.bfloat16)
    return replicated(partial(attention, implementation="flash_tpu:qk=int8"), mesh, [operand] * 3)


def attend_ring(mesh: AbstractMesh, *, size: int, dtype: str, length: int) -> AbstractCall:
    """Return ring attention of two heads with tokens over `sp`, which also gathers the weights of a block."""
    specs = P(None, "sp"), P("sp", None)

    def run(q, k, v, *weights):
        pending = RingWeights(weights, (1, 0))
        with use_partitioner(Partitioner(mesh, SHARDING_RULES["fsdp"])), gather_during_attention(pending):
            tokens = (shard_tokens(x, ("batch", "length", "heads", None)) for x in (q, k, v))
            return attention(*tokens, kv_length=length), pending.gathered()

    operand = jax.ShapeDtypeStruct((1, length, 2, size), jnp.dtype(dtype), sharding=NamedSharding(mesh, P()))
    weights = (jax.ShapeDtypeStruct((512, 512), operand.dtype, sharding=NamedSharding(mesh, spec)) for spec in specs)
    return AbstractCall(run, (operand,) * 3 + tuple(weights))


def on_cards(mesh: AbstractMesh) -> AbstractCall:
    """Return the main operations of a video's programs: cuDNN attention, a product, a convolution and a gather."""

    def run(x, kernel, w):
        with use_partitioner(Partitioner(mesh, SHARDING_RULES["fsdp"])):
            tokens = shard_tokens(x.reshape(1, -1, 4, 128), ("batch", "length", "heads", None))
            y = attention(tokens, tokens, tokens, implementation="cudnn").reshape(x.shape)
        y = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P())) @ w
        return jax.lax.conv_general_dilated(y, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    sizes = (1, 32, 32, 512), (3, 3, 512, 512), (512, 512)
    replicate = NamedSharding(mesh, P())
    return AbstractCall(run, tuple(jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=replicate) for size in sizes))


def _attend(mesh: AbstractMesh, operands, window=None) -> AbstractCall:
    def run(q, k, v, key_mask=None):
        assert choose_implementation(q, k, v, key_mask=key_mask, window=window).name == "flash_tpu"
        return attention(q, k, v, key_mask=key_mask, window=window)

    return replicated(run, mesh, operands)
