# SPDX-License-Identifier: Apache-2.0
"""Compute attention on several devices, by any kernel that runs on one device.

Operands are [B L N D], with the batch sharded over `dp`. If there are few keys compared with queries, each device gets
all keys, and computes the attention of its own queries to them.

Otherwise, `tp` and `sp` shard the computation in different ways. Over `tp`, an all-to-all exchanges tokens for heads
(Jacobs et al., DeepSpeed Ulysses, 2023), unless `tp` shards the heads already. Over `sp`, keys and values pass around a
ring, and queries stay on their devices (Liu et al., Ring Attention, 2023). If the kernel supports it, it adds each
shard of keys to the softmax sums of the earlier shards. Otherwise the softmaxes of the shards are merged by their
log-sum-exps.

Lengths and numbers of heads are padded to multiples of the number of devices. If a device has all keys, it slices the
padding off. Otherwise it masks the padding.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32

from wanjax.kernels.attention.gradient import from_result
from wanjax.kernels.attention.radial import Radial
from wanjax.kernels.attention.ring_weights import (
    RingWeights,
    gather_while_computing,
    group_by_matrix,
    send,
    shard_map_with_weights,
)
from wanjax.kernels.rotary_heads import join_parts
from wanjax.sharding import Partitioner, pad_to

# Attention on one device, with the arguments (q, k, v, *, key_mask, window, bias, return_lse), or its gradient
AttentionFunction = Callable[..., Any]
Mask = Bool[Array, "B S"]
Axes = str | tuple[str, ...] | None


class AttentionKernels(NamedTuple):
    """Functions that compute attention on one device.

    Attributes:
        attend: Computes attention to all keys.
        attend_with_carry: `attend_with_carry(q, k, v, carry, is_last=...)` adds a part of the keys to the attention.
            `carry` is the return value of the call for the earlier keys; it is None in the first call. The call for the
            last keys returns the result and its log-sum-exps. This call also joins the shards of the weights in its
            argument `matrices`, and returns the joined weights.
        gradient: The backward function for `gradient.from_result`, for attention of all queries to the same keys.
    """

    attend: AttentionFunction
    attend_with_carry: AttentionFunction
    gradient: AttentionFunction


class QueryPlacement(NamedTuple):
    """The mesh axes of the batch, tokens and heads of the queries."""

    batch: Any
    tokens: Any
    heads: Any

    @classmethod
    def of(cls, q: Float[Array, "B L N D"], partitioner: Partitioner) -> "QueryPlacement":
        return cls(*partitioner.activation_spec(("batch", "length", "heads"), q.shape[:3]))


def attention(
    kernels: AttentionKernels,
    partitioner: Partitioner,
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    *,
    kv_length: int,
    key_mask: Mask | None,
    window: Any,
    bias: Float32[Array, "..."] | None,
) -> Float[Array, "B L N D"]:
    """Compute on all devices what `kernels.attend` computes on one device, for the first `kv_length` keys.

    The operands are those of `api.attention`.
    """
    length, heads = q.shape[1:3]
    if k.shape[2] < heads:
        k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    q = pad_to(q, 1, partitioner.axis_size(("sp", "tp")))
    placement = QueryPlacement.of(q, partitioner)
    allows_all_to_all = window is None or (isinstance(window, Radial) and partitioner.axis_size("sp") == 1)
    if allows_all_to_all and bias is None and not _replicates_keys(kv_length, length, heads, partitioner, placement):
        kernels = kernels._replace(attend=partial(kernels.attend, window=window, bias=None))
        return _attend_ulysses_and_ring(kernels, partitioner, placement, q, k, v, kv_length, key_mask)[:, :length]
    k, v, key_mask = k[:, :kv_length], v[:, :kv_length], None if key_mask is None else key_mask[:, :kv_length]
    if window is not None:  # a window needs all tokens on each device, so heads are sharded
        placement = QueryPlacement(placement.batch, None, ("sp", "tp"))
        q, k, v = (pad_to(x, 2, partitioner.axis_size(placement.heads)) for x in (q[:, :length], k, v))
    kernel = partial(kernels.attend, window=window)
    return _attend_with_all_keys(kernel, partitioner, placement, q, k, v, key_mask, bias)[:, :length, :heads]


def _replicates_keys(
    kv_length: int, num_queries: int, heads: int, partitioner: Partitioner, placement: QueryPlacement
) -> bool:
    """Return whether keys and values should be replicated: if this sends the least data, or if there are too few heads
    for an all-to-all."""
    shards = partitioner.axis_size(placement.tokens)
    return kv_length * (shards - 1) <= num_queries or (placement.heads is None and heads < partitioner.axis_size("tp"))


def _attend_with_all_keys(
    kernel: AttentionFunction, partitioner: Partitioner, placement: QueryPlacement, q, k, v, key_mask: Mask | None, bias
) -> Array:
    """Compute attention with queries that are sharded by tokens or by heads. Each device has all keys of its heads."""
    spec, kv_spec, bias_spec = PartitionSpec(*placement), PartitionSpec(placement.batch, None, placement.heads), None
    if bias is not None:
        for axis, size in ((1, q.shape[2]), (2, q.shape[1])):
            bias = bias if bias.shape[axis] == 1 else pad_to(bias, axis, size)
        axes = (placement.batch, placement.heads, placement.tokens, None)
        bias_spec = PartitionSpec(*(axis if size > 1 else None for axis, size in zip(axes, bias.shape, strict=True)))

    def attend(q, k, v, key_mask, bias):
        return kernel(q, k, v, key_mask=key_mask, bias=bias)

    specs = (spec, kv_spec, kv_spec, PartitionSpec(placement.batch), bias_spec)
    return partitioner.shard_map(attend, specs, spec)(q, k, v, key_mask, bias)


def _attend_ulysses_and_ring(
    kernels: AttentionKernels,
    partitioner: Partitioner,
    placement: QueryPlacement,
    q,
    k,
    v,
    kv_length: int,
    key_mask: Mask | None,
) -> Array:
    """Compute attention with heads on `tp`, and keys and values around the ring of `sp`."""
    spec = PartitionSpec(*placement)
    k, v = (pad_to(x, 1, partitioner.axis_size(("sp", "tp"))) for x in (k, v))
    ring_size, is_padded = partitioner.axis_size("sp"), k.shape[1] > kv_length
    if key_mask is not None:
        key_mask = pad_to(key_mask[:, :kv_length], 1, k.shape[1])
    ulysses_size = partitioner.axis_size("tp") if placement.heads is None else 1

    def attend(pending: RingWeights | None, weights: Sequence[Array], q, k, v, key_mask):
        heads = q.shape[2]
        q, k, v = (tokens_to_heads(x, ulysses_size) for x in (q, k, v))
        if ring_size == 1:
            attend_to_all = partial(kernels.attend, key_mask=key_mask, kv_length=kv_length)
            out, weights = gather_while_computing(pending, weights, partitioner, attend_to_all, q, k, v)
        else:
            masks = {"key_mask": key_mask}
            # The padding is at the end, so a length suffices; for a mask, a kernel would reorder the keys
            if key_mask is None and is_padded:
                local_length = jnp.clip(kv_length - jax.lax.axis_index("sp") * k.shape[1], 0, k.shape[1])
                masks["kv_length"] = jnp.full((k.shape[0],), local_length, jnp.int32)
            ring = partial(_ring_attention, kernels.attend_with_carry, ring_size=ring_size)
            if pending is None:
                out, _ = from_result(
                    ring, partial(_ring_gradient, kernels.gradient, ring_size=ring_size), q, k, v, masks
                )
            else:
                out, _, *weights = ring(q, k, v, masks, weights=weights, weight_axes=pending.axes)
        return heads_to_tokens(out, heads, ulysses_size), weights

    specs = (spec, spec, spec, PartitionSpec(placement.batch, "sp"))
    return shard_map_with_weights(partitioner, attend, specs, spec)(q, k, v, key_mask)


def attention_by_heads(
    kernel: AttentionFunction,
    partitioner: Partitioner,
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
    weights: Any,
) -> Float[Array, "B L N D"]:
    """Compute `kernel(q, k, v, weights)` with the heads sharded over all devices, and all tokens of a head on one
    device.

    Tokens are exchanged for heads over all mesh axes that shard tokens. `weights` is the same for all heads. Tokens and
    heads are padded to multiples of the number of devices.
    """
    length = q.shape[1]
    q, k, v = (pad_to(x, 1, partitioner.axis_size(("sp", "tp"))) for x in (q, k, v))
    placement = QueryPlacement.of(q, partitioner)
    num_devices = partitioner.axis_size(placement.tokens)

    def attend(q, k, v, weights):
        heads = q.shape[2]
        q, k, v = (tokens_to_heads(x, num_devices, placement.tokens) for x in (q, k, v))
        return heads_to_tokens(kernel(q, k, v, weights), heads, num_devices, placement.tokens)

    spec = PartitionSpec(*placement)
    return partitioner.shard_map(attend, (spec, spec, spec, PartitionSpec()), spec)(q, k, v, weights)[:, :length]


def tokens_to_heads(
    x: Float[Array, "B L N D"], num_devices: int, axes: Axes = "tp", *, after: Sequence[Array] = ()
) -> Float[Array, "B _L _N D"]:
    """Exchange tokens for heads by an all-to-all. Each device then has all tokens of some heads.

    The number of heads is padded to a multiple of the number of devices. The data for one device, or from one device,
    is contiguous in memory. The all-to-all starts when the arrays `after` are computed.
    """
    if num_devices == 1:
        return x
    x = pad_to(x, 2, num_devices)
    batch, length, heads, head_dim = x.shape
    parts = jnp.moveaxis(x.reshape(batch, length, num_devices, heads // num_devices * head_dim), 2, 0)
    if after:
        parts, *_ = jax.lax.optimization_barrier((parts, *after))
    parts = jax.lax.all_to_all(parts, axes, split_axis=0, concat_axis=0, tiled=True)
    return jnp.moveaxis(parts, 0, 1).reshape(batch, num_devices * length, heads // num_devices, head_dim)


def heads_to_tokens(
    x: Float[Array, "B L N D"], heads: int, num_devices: int, axes: Axes = "tp"
) -> Float[Array, "B _L _N D"]:
    """Invert `tokens_to_heads`. `heads` is the number of heads without padding."""
    if num_devices == 1:
        return x
    batch, length, local_heads, head_dim = x.shape
    parts = jnp.moveaxis(x.reshape(batch, num_devices, length // num_devices, local_heads * head_dim), 1, 0)
    parts = jax.lax.all_to_all(parts, axes, split_axis=0, concat_axis=0, tiled=True)
    return join_parts(parts).reshape(batch, length // num_devices, num_devices * local_heads, head_dim)[:, :, :heads]


def _ring_attention(
    attend_with_carry: AttentionFunction,
    q: Float[Array, "B L N D"],
    k: Array,
    v: Array,
    masks: dict[str, Any],
    *,
    ring_size: int,
    weights: Sequence[Array] = (),
    weight_axes: Sequence[int] = (),
) -> Any:
    """Compute attention to the keys and values of all devices of `sp`.

    Keys and values pass around the ring. A device does not forward the last ones that it receives. The ring is
    unrolled, so that the first keys can be sent while the values are still being projected.

    Args:
        attend_with_carry: As in `AttentionKernels`.
        q: The queries of this device.
        k: The keys of this device.
        v: The values of this device.
        masks: Options of `attend_with_carry` that select the valid keys among `k`.
        ring_size: The number of devices.
        weights: Shards of matrices, which pass around the ring in the other direction.
        weight_axes: The axis along which each matrix is sharded.

    Returns:
        The result, its log-sum-exps and the gathered matrices.
    """

    def attend_shard(carry: Any, shard: tuple, **options: Any) -> Any:
        *keys_and_values, masks = shard
        return attend_with_carry(q, *(x.reshape(k.shape) for x in keys_and_values), carry, **masks, **options)

    # the arrays are sent with concatenated heads; a TPU would first copy arrays with an axis of heads
    carry, shard = None, (*(x.reshape(*x.shape[:2], -1) for x in (k, v)), masks)
    arrivals = [tuple(weights)]
    for _ in range(ring_size - 1):
        # sending overlaps with the attention to this shard; the barrier delays the sending of the next turn
        next_shard = jax.lax.ppermute(shard, "sp", _ring_permutation(ring_size))
        next_weights = send(arrivals[-1], "sp", ring_size)
        carry = attend_shard(carry, shard, is_last=False)
        carry, shard, next_weights = jax.lax.optimization_barrier((carry, next_shard, next_weights))
        arrivals.append(next_weights)
    return attend_shard(carry, shard, is_last=True, matrices=group_by_matrix(arrivals, weight_axes, "sp"))


def _ring_gradient(
    gradient: AttentionFunction, q, k, v, g, lse, delta, masks: dict[str, Any], *, ring_size: int
) -> tuple[Array, Array, Array]:
    """Return the gradients of q, k and v. The gradients of k and v pass around the ring with k and v. After the last
    turn, they are sent once more, to the device that owns the keys."""

    def add(dq: Array, shard: tuple, dkv_sums: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        k, v, masks = shard
        dq_part, *dkv_parts = gradient(q, k, v, g, lse, delta, **masks)
        dk, dv = (x + dkv_part.astype(jnp.float32) for x, dkv_part in zip(dkv_sums, dkv_parts, strict=True))
        return dq + dq_part.astype(jnp.float32), (dk, dv)

    def hop(carry, _):
        dq, shard, dkv_sums = carry
        next_shard = jax.lax.ppermute(shard, "sp", _ring_permutation(ring_size))
        dq, dkv_sums = add(dq, shard, dkv_sums)
        return (dq, next_shard, jax.lax.ppermute(dkv_sums, "sp", _ring_permutation(ring_size))), None

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
    start = (zeros[0], (k, v, masks), (zeros[1], zeros[2]))
    (dq, shard, dkv_sums), _ = jax.lax.scan(hop, start, length=ring_size - 1)
    dq, dkv_sums = add(dq, shard, dkv_sums)
    dk, dv = jax.lax.ppermute(dkv_sums, "sp", _ring_permutation(ring_size))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _ring_permutation(ring_size: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % ring_size) for i in range(ring_size)]
