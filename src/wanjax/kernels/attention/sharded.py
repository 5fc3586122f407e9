# SPDX-License-Identifier: Apache-2.0
"""Attention on several devices, around any kernel that runs on one.

Operands are [B L N D], with batches on `dp`. If keys are few beside queries, each device holds all keys and attends its
own queries to them. Otherwise an all-to-all over `tp` exchanges tokens for heads (Jacobs et al., DeepSpeed Ulysses,
2023), unless heads are sharded there already; over `sp`, keys and values pass around a ring while queries stay (Liu et
al., Ring Attention, 2023). A kernel that can go on from the sums of other keys does so; else the softmaxes of the turns
are merged by their log-sum-exps. Lengths and heads that do not divide are padded. A padded key never takes part: it is
sliced off on a device that holds all keys, and masked elsewhere.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32

from wanjax.kernels.attention.gradient import from_result
from wanjax.kernels.attention.masks import divide_or_zero, finite_max, log_sum_exp
from wanjax.kernels.attention.radial import Radial
from wanjax.kernels.rotary_heads import join_parts
from wanjax.sharding import Partitioner, pad_to

Kernel = Callable[..., Any]  # attention on one device: (q, k, v, *, key_mask, window, bias, return_lse); its gradient
Mask = Bool[Array, "B S"]
Axes = str | tuple[str, ...] | None


class Kernels(NamedTuple):
    """What one device computes: attention, its part for some of the keys, and its gradient.

    `part(q, k, v, before, last=...)` adds the attention to keys to `before`, what it returned for others or None at
    first; for the last keys it returns the result and its log-sum-exps. `gradient` is that of `gradient.from_result`,
    for keys that all queries see.
    """

    whole: Kernel
    part: Kernel
    gradient: Kernel


class Placement(NamedTuple):
    """The mesh axes of the batch, tokens and heads of the queries."""

    batch: Any
    tokens: Any
    heads: Any

    @classmethod
    def of(cls, q: Float[Array, "B L N D"], partitioner: Partitioner) -> "Placement":
        return cls(*partitioner.activation(("batch", "length", "heads"), q.shape[:3]))


def attention(
    kernels: Kernels,
    partitioner: Partitioner,
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    *,
    keys: int,
    key_mask: Mask | None,
    window: Any,
    bias: Float32[Array, "..."] | None,
) -> Float[Array, "B L N D"]:
    """Compute what `kernels.whole` does on one device for the first `keys` keys.

    The operands are those of `api.attention`.
    """
    length, heads = q.shape[1:3]
    if k.shape[2] < heads:
        k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    q = pad_to(q, 1, partitioner.size(("sp", "tp")))
    place = Placement.of(q, partitioner)
    whole = window is None or (isinstance(window, Radial) and partitioner.size("sp") == 1)  # no ring divides its keys
    if whole and bias is None and not _few(keys, length, heads, partitioner, place):
        kernels = kernels._replace(whole=partial(kernels.whole, window=window, bias=None))
        return _by_both(kernels, partitioner, place, q, k, v, keys, key_mask)[:, :length]
    k, v, key_mask = k[:, :keys], v[:, :keys], None if key_mask is None else key_mask[:, :keys]
    if window is not None:  # which counts tokens, so that each device has all of them, for some of the heads
        place = Placement(place.batch, None, ("sp", "tp"))
        q, k, v = (pad_to(x, 2, partitioner.size(place.heads)) for x in (q[:, :length], k, v))
    kernel = partial(kernels.whole, window=window)
    return _with_all_keys(kernel, partitioner, place, q, k, v, key_mask, bias)[:, :length, :heads]


def _few(keys: int, queries: int, heads: int, partitioner: Partitioner, place: Placement) -> bool:
    """Return whether replicating keys and values sends the least, or if heads are too few for an all-to-all."""
    shards = partitioner.size(place.tokens)
    return keys * (shards - 1) <= queries or (place.heads is None and heads < partitioner.size("tp"))


def _with_all_keys(
    kernel: Kernel, partitioner: Partitioner, place: Placement, q, k, v, key_mask: Mask | None, bias
) -> Array:
    """Attention with queries sharded by tokens or by heads, and all keys of these heads on each device."""
    spec, whole, bias_spec = PartitionSpec(*place), PartitionSpec(place.batch, None, place.heads), None
    if bias is not None:
        for axis, size in ((1, q.shape[2]), (2, q.shape[1])):
            bias = bias if bias.shape[axis] == 1 else pad_to(bias, axis, size)
        axes = (place.batch, place.heads, place.tokens, None)
        bias_spec = PartitionSpec(*(axis if size > 1 else None for axis, size in zip(axes, bias.shape, strict=True)))

    def attend(q, k, v, key_mask, bias):
        return kernel(q, k, v, key_mask=key_mask, bias=bias)

    specs = (spec, whole, whole, PartitionSpec(place.batch), bias_spec)
    return partitioner.shard_map(attend, specs, spec)(q, k, v, key_mask, bias)


def _by_both(
    kernels: Kernels, partitioner: Partitioner, place: Placement, q, k, v, keys: int, key_mask: Mask | None
) -> Array:
    """Attention with heads on `tp`, and keys and values around the ring of `sp`."""
    spec = PartitionSpec(*place)
    k, v = (pad_to(x, 1, partitioner.size(("sp", "tp"))) for x in (k, v))
    hops, padded = partitioner.size("sp"), k.shape[1] > keys
    if key_mask is not None:
        key_mask = pad_to(key_mask[:, :keys], 1, k.shape[1])
    devices = partitioner.size("tp") if place.heads is None else 1

    def attend(q, k, v, key_mask):
        heads = q.shape[2]
        q, k, v = (tokens_to_heads(x, devices) for x in (q, k, v))
        if hops == 1:
            out = kernels.whole(q, k, v, key_mask=key_mask, keys=keys)
        else:
            masks = {"key_mask": key_mask}
            if key_mask is None and padded:  # a count, which spares a kernel the order of the keys
                here = jnp.clip(keys - jax.lax.axis_index("sp") * k.shape[1], 0, k.shape[1])
                masks["keys"] = jnp.full((k.shape[0],), here, jnp.int32)
            ways = partial(_ring, kernels.part, devices=hops), partial(_ring_gradient, kernels.gradient, devices=hops)
            out, _ = from_result(*ways, q, k, v, masks)
        return heads_to_tokens(out, heads, devices)

    specs = (spec, spec, spec, PartitionSpec(place.batch, "sp"))
    return partitioner.shard_map(attend, specs, spec)(q, k, v, key_mask)


def by_whole_heads(
    kernel: Kernel,
    partitioner: Partitioner,
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
    weights: Any,
) -> Float[Array, "B L N D"]:
    """Compute `kernel(q, k, v, weights)` of whole heads with all their tokens, exchanged over all axes of tokens.

    `weights` are the same for all heads. Tokens are padded, and so are heads, to what the devices divide.
    """
    length = q.shape[1]
    q, k, v = (pad_to(x, 1, partitioner.size(("sp", "tp"))) for x in (q, k, v))
    place = Placement.of(q, partitioner)
    devices = partitioner.size(place.tokens)

    def attend(q, k, v, weights):
        heads = q.shape[2]
        q, k, v = (tokens_to_heads(x, devices, place.tokens) for x in (q, k, v))
        return heads_to_tokens(kernel(q, k, v, weights), heads, devices, place.tokens)

    spec = PartitionSpec(*place)
    return partitioner.shard_map(attend, (spec, spec, spec, PartitionSpec()), spec)(q, k, v, weights)[:, :length]


def tokens_to_heads(x: Float[Array, "B L N D"], devices: int, axes: Axes = "tp") -> Float[Array, "B _L _N D"]:
    """Exchanges some tokens of all heads for all tokens of some heads, padded to the number of devices of the axes.

    What is sent to a device, and what is received from it, is contiguous in memory. One device has all already.
    """
    if devices == 1:
        return x
    x = pad_to(x, 2, devices)
    batch, length, heads, size = x.shape
    parts = jnp.moveaxis(x.reshape(batch, length, devices, heads // devices * size), 2, 0)
    parts = jax.lax.all_to_all(parts, axes, split_axis=0, concat_axis=0, tiled=True)
    return jnp.moveaxis(parts, 0, 1).reshape(batch, devices * length, heads // devices, size)


def heads_to_tokens(
    x: Float[Array, "B L N D"], heads: int, devices: int, axes: Axes = "tp"
) -> Float[Array, "B _L _N D"]:
    """The inverse of `tokens_to_heads` for so many heads."""
    if devices == 1:
        return x
    batch, length, some, size = x.shape
    parts = jnp.moveaxis(x.reshape(batch, devices, length // devices, some * size), 1, 0)
    parts = jax.lax.all_to_all(parts, axes, split_axis=0, concat_axis=0, tiled=True)
    return join_parts(parts).reshape(batch, length // devices, devices * some, size)[:, :, :heads]


Attended = tuple[Float[Array, "B L N D"], Float32[Array, "B L N"]]


def _ring(
    part: Kernel, q: Float[Array, "B L N D"], k: Array, v: Array, masks: dict[str, Any], *, devices: int
) -> Attended:
    """Attention to the keys and values of all devices of `sp`; the last ones received are not sent on.

    `masks` are the kernel's options that tell which keys of this device take part. The turns are not a loop, so that
    the first keys may be sent while values are projected.
    """

    def attend(before: Any, shard: tuple, *, last: bool) -> Any:
        *keys_and_values, masks = shard
        return part(q, *(x.reshape(k.shape) for x in keys_and_values), before, **masks, last=last)

    # heads side by side, as projections write them: apart, a TPU would copy what is sent
    done, shard = None, (*(x.reshape(*x.shape[:2], -1) for x in (k, v)), masks)
    for _ in range(devices - 1):
        arriving = jax.lax.ppermute(shard, "sp", _to_next(devices))  # runs beside the attention to this shard
        done, shard = attend(done, shard, last=False), arriving
    return attend(done, shard, last=True)


def _ring_gradient(
    gradient: Kernel, q, k, v, g, lse, delta, masks: dict[str, Any], *, devices: int
) -> tuple[Array, Array, Array]:
    """The gradients of q, k and v. Those of keys and values go round with them, and once more, back to their device."""

    def add(dq: Array, shard: tuple, sums: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        k, v, masks = shard
        more, *parts = gradient(q, k, v, g, lse, delta, **masks)
        of_k, of_v = (x + part.astype(jnp.float32) for x, part in zip(sums, parts, strict=True))
        return dq + more.astype(jnp.float32), (of_k, of_v)

    def hop(carry, _):
        dq, shard, sums = carry
        arriving = jax.lax.ppermute(shard, "sp", _to_next(devices))
        dq, sums = add(dq, shard, sums)
        return (dq, arriving, jax.lax.ppermute(sums, "sp", _to_next(devices))), None

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
    start = (zeros[0], (k, v, masks), (zeros[1], zeros[2]))
    (dq, shard, sums), _ = jax.lax.scan(hop, start, length=devices - 1)
    dq, sums = add(dq, shard, sums)
    dk, dv = jax.lax.ppermute(sums, "sp", _to_next(devices))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _to_next(devices: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % devices) for i in range(devices)]


def merge(a: Attended, b: Attended) -> Attended:
    """Merge attention to two sets of keys by its log-sum-exps, in float32."""
    top = jnp.maximum(a[1], b[1])
    (x, of_x), (y, of_y) = ((out.astype(jnp.float32), jnp.exp(lse - finite_max(top))) for out, lse in (a, b))
    total = of_x + of_y
    out = divide_or_zero(of_x, total)[..., None] * x + divide_or_zero(of_y, total)[..., None] * y
    return out, log_sum_exp(top, total)
