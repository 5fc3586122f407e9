# SPDX-License-Identifier: Apache-2.0
"""What is done to heads on their way from a projection to attention and back, each in one pass over a TPU's memory.

XLA lays tokens along the lanes to join the halves of a head, and copies queries and keys back and forth for it; and to
cut the width of a token in parts for other devices it copies it twice. The kernels here read rows of all heads as a
projection wrote them, turn halves by a rotation of lanes, and write each part in one piece.

Heads are sent in two groups if they can be halved, so that one is on its way while there is attention in the other.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32

from wanjax.kernels.attention.target import target
from wanjax.sharding import TILE, Layout, current

LANES = 128
ROWS = 256  # tokens at a time: more gain nothing, and fewer leave transfers short


def normed_rotary(
    x: Float[Array, "B L N*D"],
    inverse: Float32[Array, "B L 1"],
    scale: Float32[Array, "N*D"],
    cos: Float32[Array, "L P"],
    sin: Float32[Array, "L P"],
    *,
    interpret: bool = False,
) -> Float[Array, "B L N D"]:
    """x · inverse · scale in float32, in each head of 2 P channels p turned with p + P by its angle, rounded once.

    Over several devices each does its tokens, and its heads where these lie on devices of their own. `interpret` runs
    the kernel without a TPU, slowly, as tests do.
    """
    if not interpret and (target(x).platform != "tpu" or 2 * cos.shape[1] != LANES):
        return plain(x, inverse, scale, cos, sin)
    layout = current()
    if layout is None:
        return _with_gradient((1, 1), interpret, x, inverse, scale, cos, sin)
    batch, length, heads, parts = _places(layout, x)
    turn = partial(_with_gradient, parts, interpret)
    tokens = PartitionSpec(batch, length)
    specs = (PartitionSpec(batch, length, heads), tokens, PartitionSpec(heads), *2 * (PartitionSpec(length),))
    # a kernel does not say along which axes of the mesh its result differs, so that it cannot be checked
    return jax.shard_map(turn, mesh=layout.mesh, in_specs=specs, out_specs=specs[0], check_vma=False)(
        x, inverse, scale, cos, sin
    )


def apart(x: Float[Array, "B L N*D"], heads: int) -> Float[Array, "B L N D"]:
    """x in its heads, written in the parts in which these are sent to other devices, if they are."""
    layout, split = current(), x.reshape(*x.shape[:2], heads, -1)
    if layout is None or target(x).platform != "tpu" or split.shape[3] != LANES:
        return split
    batch, length, place, parts = _places(layout, x)
    if parts == (1, 1):
        return split
    spec, write = PartitionSpec(batch, length, place), partial(_copied, parts=parts)
    return jax.shard_map(write, mesh=layout.mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


def _places(layout: Layout, x: Array) -> tuple[Any, Any, Any, tuple[int, int]]:
    """Where batch, tokens and heads lie, and the groups and parts in which the heads of a token are sent."""
    heads, devices = x.shape[2] // LANES, layout.size("tp")
    places = layout.activation(("batch", "length", "heads"), (*x.shape[:2], heads))
    sent = places[2] is None and heads % devices == 0
    return *places, (groups(heads, devices), devices) if sent else (1, 1)


def groups(heads: int, devices: int) -> int:
    """In how many groups heads are sent, all devices having as many of each."""
    return 2 if heads % (2 * devices) == 0 and devices > 1 else 1


def plain(x: Array, inverse: Array, scale: Array, cos: Array, sin: Array) -> Float[Array, "B L N D"]:
    """What the kernel is held to."""
    y = (x.astype(jnp.float32) * inverse * scale[None, None]).reshape(*x.shape[:2], -1, 2 * cos.shape[1])
    a, b = jnp.split(y, 2, axis=-1)
    cos, sin = cos[None, :, None], sin[None, :, None]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_gradient(parts: tuple[int, int], interpret: bool, *operands: Array) -> Array:
    return _call(*operands, parts=parts, interpret=interpret)


def _forward(parts: tuple[int, int], interpret: bool, *operands: Array):
    return _with_gradient(parts, interpret, *operands), operands


def _backward(parts: tuple[int, int], interpret: bool, operands: tuple[Array, ...], g: Array):
    return jax.vjp(plain, *operands)[1](g)


_with_gradient.defvjp(_forward, _backward)


def _call(
    x: Array, inverse: Array, scale: Array, cos: Array, sin: Array, *, parts: tuple[int, int], interpret: bool
) -> Array:
    """Written in groups of parts of consecutive heads, each of which lies in one piece, as it is sent on."""
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
        out_specs=_groups_of_parts(parts, rows, width),
        out_shape=_written(parts, x),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="normed_rotary",
    )(x, inverse, scale[None], cos, sin)
    return _beside(out)


def _beside(parts: Sequence[Float[Array, "_N B L E"]]) -> Float[Array, "B L N D"]:
    """Parts one beside the other, which the compiler sees through where they are then taken apart again."""
    return jnp.concatenate([jnp.moveaxis(group, 0, 2).reshape(*group.shape[1:3], -1, LANES) for group in parts], axis=2)


def _kernel(x_ref, inverse_ref, scale_ref, cos_ref, sin_ref, *out_refs):
    cos = jnp.concatenate([cos_ref[...], cos_ref[...]], axis=1)
    sin = jnp.concatenate([-sin_ref[...], sin_ref[...]], axis=1)
    inverse = inverse_ref[...]
    for start in range(0, x_ref.shape[1], LANES):
        head = pl.ds(start, LANES)
        x = x_ref[:, head].astype(jnp.float32) * inverse * scale_ref[:, head]
        part, within = divmod(start, out_refs[0].shape[2])
        group, part = divmod(part, out_refs[0].shape[0])
        out_refs[group][part, :, pl.ds(within, LANES)] = (x * cos + pltpu.roll(x, LANES // 2, 1) * sin).astype(
            out_refs[group].dtype
        )


def _copied(x: Array, *, parts: tuple[int, int], interpret: bool = False) -> Array:
    batch, length, width = x.shape
    rows = _height(length)

    def kernel(x_ref, *out_refs):
        for columns, (out_ref, part) in _columns(out_refs):
            out_ref[part] = x_ref[:, columns]

    out = pl.pallas_call(
        kernel,
        grid=(batch, -(-length // rows)),
        in_specs=[_rows(rows, width)],
        out_specs=_groups_of_parts(parts, rows, width),
        out_shape=_written(parts, x),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="heads_apart",
    )(x)
    return _beside(out)


def joined(parts: Sequence[Float[Array, "_N B L E"]], *, interpret: bool = False) -> Float[Array, "B L N*D"]:
    """Groups of parts of the width of each token, one beside the other in memory."""
    count, batch, length, part = parts[0].shape
    if not interpret and (target(parts[0]).platform != "tpu" or part % LANES):
        rows = [jnp.moveaxis(group, 0, 2).reshape(batch, length, -1) for group in parts]
        return jnp.concatenate(rows, axis=2)
    rows, width = _height(length), len(parts) * count * part

    def kernel(*refs):
        *part_refs, out_ref = refs
        for columns, (part_ref, index) in _columns(part_refs):
            out_ref[:, columns] = part_ref[index]

    return pl.pallas_call(
        kernel,
        grid=(batch, -(-length // rows)),
        in_specs=_groups_of_parts((len(parts), count), rows, width),
        out_specs=_rows(rows, width),
        out_shape=jax.ShapeDtypeStruct((batch, length, width), parts[0].dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="heads_joined",
    )(*parts)


def _columns(groups: Sequence[Any]) -> Iterator[tuple[Any, tuple[Any, int]]]:
    """The columns of each part, the group that it is in, and its place there."""
    width, start = groups[0].shape[2], 0
    for group in groups:
        for part in range(group.shape[0]):
            yield pl.ds(start, width), (group, part)
            start += width


def _written(parts: tuple[int, int], x: Array) -> list[jax.ShapeDtypeStruct]:
    (count, devices), (batch, length, width) = parts, x.shape
    return [jax.ShapeDtypeStruct((devices, batch, length, width // devices // count), x.dtype)] * count


def _height(length: int) -> int:
    return min(ROWS, -(-length // TILE) * TILE)


def _rows(rows: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, rows, width), lambda b, i: (b, i, 0))


def _groups_of_parts(parts: tuple[int, int], rows: int, width: int) -> list[pl.BlockSpec]:
    count, devices = parts
    return [pl.BlockSpec((devices, None, rows, width // devices // count), lambda b, i: (0, b, i, 0))] * count
