# SPDX-License-Identifier: Apache-2.0
"""TPU kernels for heads between a projection and attention, each with one pass over memory.

XLA lays tokens along the lanes to join the halves of a head, and copies queries and keys back and forth for it. To
split the width of a token into parts for other devices, it copies twice. The kernels here read rows of all heads as a
projection wrote them, swap the halves of a head by a rotation of lanes, and write each part contiguously.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32

from wanjax.kernels.target import target
from wanjax.sharding import TILE, Partitioner, current

LANES = 128
ROWS = 256  # tokens at a time: more are no faster, and fewer make transfers too short


def normed_rotary(
    x: Float[Array, "B L E"],
    inverse: Float32[Array, "B L 1"],
    scale: Float32[Array, " E"],
    cos: Float32[Array, "L P"],
    sin: Float32[Array, "L P"],
    *,
    interpret: bool = False,
) -> Float[Array, "B L E"]:
    """Computes x · inverse · scale, then rotates channels p and p + P of each head of 2 P channels by the p-th angle.

    Float32 inside, rounded once to x's dtype. On several devices each computes its tokens, and its heads where heads
    are sharded. `interpret` runs the kernel without a TPU, slowly, for tests.
    """
    if not interpret and (target(x).platform != "tpu" or 2 * cos.shape[1] != LANES):
        return plain(x, inverse, scale, cos, sin)
    partitioner = current()
    if partitioner is None:
        return _with_gradient(1, interpret, x, inverse, scale, cos, sin)
    batch, length, heads, parts = _placement(partitioner, x)
    turn = partial(_with_gradient, parts, interpret)
    tokens = PartitionSpec(batch, length)
    specs = (PartitionSpec(batch, length, heads), tokens, PartitionSpec(heads), *2 * (PartitionSpec(length),))
    # a kernel does not say along which mesh axes its result varies, so that cannot be checked
    return jax.shard_map(turn, mesh=partitioner.mesh, in_specs=specs, out_specs=specs[0], check_vma=False)(
        x, inverse, scale, cos, sin
    )


def pack_for_all_to_all(x: Float[Array, "B L E"]) -> Float[Array, "B L E"]:
    """Returns x, whose heads lie in memory by the device that they are sent to, if an all-to-all is to send them."""
    partitioner = current()
    if partitioner is None or target(x).platform != "tpu" or x.shape[2] % LANES:
        return x
    batch, length, heads, parts = _placement(partitioner, x)
    spec = PartitionSpec(batch, length, heads)
    write = partial(_packed, parts=parts)
    if parts == 1:
        return x
    return jax.shard_map(write, mesh=partitioner.mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


def _placement(partitioner: Partitioner, x: Array) -> tuple[Any, Any, Any, int]:
    """The mesh axes of batch, tokens and heads, and the number of parts that an all-to-all sends (1: there is none)."""
    heads, devices = x.shape[2] // LANES, partitioner.size("tp")
    axes = partitioner.activation(("batch", "length", "heads"), (*x.shape[:2], heads))
    return *axes, devices if axes[2] is None and heads % devices == 0 else 1


def plain(
    x: Float[Array, "B L E"],
    inverse: Float32[Array, "B L 1"],
    scale: Float32[Array, " E"],
    cos: Float32[Array, "L P"],
    sin: Float32[Array, "L P"],
) -> Float[Array, "B L E"]:
    """`normed_rotary` in plain JAX: the specification of the kernel, and its gradient."""
    y = (x.astype(jnp.float32) * inverse * scale[None, None]).reshape(*x.shape[:2], -1, 2 * cos.shape[1])
    a, b = jnp.split(y, 2, axis=-1)
    cos, sin = cos[None, :, None], sin[None, :, None]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype).reshape(x.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_gradient(parts: int, interpret: bool, *operands: Array) -> Array:
    return _call(*operands, parts=parts, interpret=interpret)


def _forward(parts: int, interpret: bool, *operands: Array):
    return _with_gradient(parts, interpret, *operands), operands


def _backward(parts: int, interpret: bool, operands: tuple[Array, ...], g: Array):
    return jax.vjp(plain, *operands)[1](g)


_with_gradient.defvjp(_forward, _backward)


def _call(
    x: Array, inverse: Array, scale: Array, cos: Array, sin: Array, *, parts: int, interpret: bool
) -> Float[Array, "B L E"]:
    """The kernel of `normed_rotary`. It writes `parts` of consecutive heads, each contiguous, for an all-to-all."""
    batch, length, width = x.shape
    rows = _height(length)
    table = pl.BlockSpec((rows, cos.shape[1]), lambda b, i: (i, 0))
    out = pl.pallas_call(
        _kernel,
        grid=(batch, -(-length // rows)),
        in_specs=[
            _rows(rows, width),
            pl.BlockSpec((None, rows, 1), lambda b, i: (b, i, 0)),
            pl.BlockSpec((1, width), lambda b, i: (0, 0)),
            table,
            table,
        ],
        out_specs=_rows_of_parts(parts, rows, width),
        out_shape=jax.ShapeDtypeStruct((parts, batch, length, width // parts), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="normed_rotary",
    )(x, inverse, scale[None], cos, sin)
    return _beside(out)


def _beside(parts: Float[Array, "_N B L E"]) -> Float[Array, "B L _E"]:
    """Joins parts along the width. The compiler drops this where the parts are then split again."""
    return jnp.moveaxis(parts, 0, 2).reshape(*parts.shape[1:3], -1)


def _kernel(x_ref, inverse_ref, scale_ref, cos_ref, sin_ref, out_ref):
    cos = jnp.concatenate([cos_ref[...], cos_ref[...]], axis=1)
    sin = jnp.concatenate([-sin_ref[...], sin_ref[...]], axis=1)
    inverse = inverse_ref[...]
    for start in range(0, x_ref.shape[1], LANES):
        head = pl.ds(start, LANES)
        x = x_ref[:, head].astype(jnp.float32) * inverse * scale_ref[:, head]
        part, within = divmod(start, out_ref.shape[2])
        out_ref[part, :, pl.ds(within, LANES)] = (x * cos + pltpu.roll(x, LANES // 2, 1) * sin).astype(out_ref.dtype)


def _packed(x: Float[Array, "B L E"], *, parts: int, interpret: bool = False) -> Float[Array, "B L E"]:
    """The kernel of `pack_for_all_to_all`."""
    batch, length, width = x.shape
    rows = _height(length)

    def kernel(x_ref, out_ref):
        for part in range(parts):
            out_ref[part] = x_ref[:, pl.ds(part * width // parts, width // parts)]

    out = pl.pallas_call(
        kernel,
        grid=(batch, -(-length // rows)),
        in_specs=[_rows(rows, width)],
        out_specs=_rows_of_parts(parts, rows, width),
        out_shape=jax.ShapeDtypeStruct((parts, batch, length, width // parts), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="heads_apart",
    )(x)
    return _beside(out)


def join_parts(parts: Float[Array, "_N B L E"], *, interpret: bool = False) -> Float[Array, "B L _E"]:
    """Joins parts along the width of each token, after an all-to-all; `interpret` is for tests."""
    count, batch, length, width = parts.shape
    if not interpret and (target(parts).platform != "tpu" or width % LANES):
        return _beside(parts)
    rows = _height(length)

    def kernel(parts_ref, out_ref):
        for part in range(count):
            out_ref[:, pl.ds(part * width, width)] = parts_ref[part]

    return pl.pallas_call(
        kernel,
        grid=(batch, -(-length // rows)),
        in_specs=[_rows_of_parts(count, rows, count * width)],
        out_specs=_rows(rows, count * width),
        out_shape=jax.ShapeDtypeStruct((batch, length, count * width), parts.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="heads_joined",
    )(parts)


def _height(length: int) -> int:
    """Tokens of one block."""
    return min(ROWS, -(-length // TILE) * TILE)


def _rows(rows: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, rows, width), lambda b, i: (b, i, 0))


def _rows_of_parts(parts: int, rows: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((parts, None, rows, width // parts), lambda b, i: (0, b, i, 0))
