# SPDX-License-Identifier: Apache-2.0
"""Attention over several devices, around any kernel that runs on one.

Operands are [B L N D], batches on `dp`. Keys that are few beside the queries are whole everywhere, and each device
attends its own queries to them. Otherwise `tp` trades tokens for heads (Jacobs et al., DeepSpeed Ulysses, 2023) where
heads do not lie on it anyway, and over `sp` keys and values go round while queries stay (Liu et al., Ring Attention,
2023); the softmaxes over each part are merged by their log-sum-exps. Lengths and heads that do not divide are filled
up. A key that was made up never takes part: it is cut off again where a device holds all keys, and masked elsewhere.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32

from wanjax.kernels.attention.masks import divide_live, finite_max, log_sum_exp
from wanjax.kernels.heads import joined
from wanjax.sharding import Layout, pad_to

Kernel = Callable[..., Any]  # attention on one device: (q, k, v, *, key_mask, window, bias, return_lse)
Mask = Bool[Array, "B S"]


class Placement(NamedTuple):
    """The mesh axes on which batch, tokens and heads of the queries lie."""

    batch: Any
    tokens: Any
    heads: Any


def attention(
    kernel: Kernel,
    layout: Layout,
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    *,
    keys: int,
    key_mask: Mask | None,
    window: Any,
    bias: Float32[Array, "..."] | None,
) -> Float[Array, "B L N D"]:
    """What `kernel` gives on one device for the first `keys` of k and v; the operands are those of `api.attention`."""
    length, heads = q.shape[1:3]
    if k.shape[2] < heads:
        k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    q = pad_to(q, 1, layout.size(("sp", "tp")))
    place = Placement(*layout.activation(("batch", "length", "heads"), q.shape[:3]))
    if window is None and bias is None and not _few(keys, length, heads, layout, place):
        out = _by_both(partial(kernel, window=None, bias=None), layout, place, q, k, v, keys, key_mask)
        return out[:, :length]
    k, v, key_mask = k[:, :keys], v[:, :keys], None if key_mask is None else key_mask[:, :keys]
    if window is None:
        return _by_queries(partial(kernel, window=None), layout, place, q, k, v, key_mask, bias)[:, :length]
    return _by_heads(partial(kernel, window=window), layout, place, q[:, :length], k, v, key_mask, bias)


def _few(keys: int, queries: int, heads: int, layout: Layout, place: Placement) -> bool:
    """Whether to give every device all keys and values is the least to send; it is for heads that are too few, too."""
    parts = layout.size(place.tokens)
    return keys * (parts - 1) <= queries or (place.heads is None and heads < layout.size("tp"))


def _by_queries(kernel: Kernel, layout: Layout, place: Placement, q, k, v, key_mask: Mask | None, bias) -> Array:
    """Each device attends its queries to all keys."""
    spec = PartitionSpec(*place)
    whole = PartitionSpec(place.batch, None, place.heads)
    bias_spec = None
    if bias is not None:
        bias = bias if bias.shape[2] == 1 else pad_to(bias, 2, q.shape[1])
        axes = (place.batch, place.heads, place.tokens, None)
        bias_spec = PartitionSpec(*(axis if size > 1 else None for axis, size in zip(axes, bias.shape, strict=True)))

    def attend(q, k, v, key_mask, bias):
        return kernel(q, k, v, key_mask=key_mask, bias=bias)

    specs = (spec, whole, whole, PartitionSpec(place.batch), bias_spec)
    return _on_each(attend, layout, specs, spec)(q, k, v, key_mask, bias)


def _by_heads(kernel: Kernel, layout: Layout, place: Placement, q, k, v, key_mask: Mask | None, bias) -> Array:
    """Each device attends with its heads, of which some may be made up, over the whole sequence."""
    heads, axes = q.shape[2], ("sp", "tp")
    q, k, v = (pad_to(x, 2, layout.size(axes)) for x in (q, k, v))
    spec = PartitionSpec(place.batch, None, axes)
    bias_spec = None
    if bias is not None:
        bias = bias if bias.shape[1] == 1 else pad_to(bias, 1, layout.size(axes))
        bias_spec = PartitionSpec(
            place.batch if bias.shape[0] > 1 else None, axes if bias.shape[1] > 1 else None, None, None
        )

    def attend(q, k, v, key_mask, bias):
        return kernel(q, k, v, key_mask=key_mask, bias=bias)

    specs = (spec, spec, spec, PartitionSpec(place.batch), bias_spec)
    return _on_each(attend, layout, specs, spec)(q, k, v, key_mask, bias)[:, :, :heads]


def _by_both(kernel: Kernel, layout: Layout, place: Placement, q, k, v, keys: int, key_mask: Mask | None) -> Array:
    """Heads over `tp`, keys and values round the ring of `sp`."""
    spec = PartitionSpec(*place)
    k, v = (pad_to(x, 1, layout.size(("sp", "tp"))) for x in (k, v))
    hops = layout.size("sp")
    if key_mask is not None or (hops > 1 and k.shape[1] > keys):
        key_mask = jnp.ones((k.shape[0], keys), bool) if key_mask is None else key_mask[:, :keys]
        key_mask = jnp.pad(key_mask, ((0, 0), (0, k.shape[1] - keys)))
    heads_whole = place.heads is None and layout.size("tp") > 1

    def attend(q, k, v, key_mask):
        heads = q.shape[2]
        if heads_whole:
            q, k, v = (_tokens_to_heads(x, layout.size("tp")) for x in (q, k, v))
        one = partial(kernel, keys=keys)
        out = one(q, k, v, key_mask=key_mask) if hops == 1 else _ring(kernel, q, (k, v, key_mask), hops)
        return _heads_to_tokens(out, layout.size("tp"))[:, :, :heads] if heads_whole else out

    specs = (spec, spec, spec, PartitionSpec(place.batch, "sp"))
    return _on_each(attend, layout, specs, spec)(q, k, v, key_mask)


def _on_each(function: Callable, layout: Layout, specs: tuple, out: PartitionSpec) -> Callable:
    # kernels do not say along which axes of the mesh their results differ, so that it cannot be checked
    return jax.shard_map(function, mesh=layout.mesh, in_specs=specs, out_specs=out, check_vma=False)


def _tokens_to_heads(x: Float[Array, "B L N D"], devices: int) -> Float[Array, "B _L _N D"]:
    """From some tokens of all heads to all tokens of some heads; heads are filled up to what the devices divide.

    What goes to one device is made whole first, and what comes from one lies whole behind that of the one before it.
    """
    x = pad_to(x, 2, devices)
    batch, length, heads, size = x.shape
    parts = jnp.moveaxis(x.reshape(batch, length, devices, heads // devices * size), 2, 0)
    parts = jax.lax.all_to_all(parts, "tp", split_axis=0, concat_axis=0, tiled=True)
    return jnp.moveaxis(parts, 0, 1).reshape(batch, devices * length, heads // devices, size)


def _heads_to_tokens(x: Float[Array, "B L N D"], devices: int) -> Float[Array, "B _L _N D"]:
    batch, length, heads, size = x.shape
    parts = jnp.moveaxis(x.reshape(batch, devices, length // devices, heads * size), 1, 0)
    parts = jax.lax.all_to_all(parts, "tp", split_axis=0, concat_axis=0, tiled=True)
    return joined(parts).reshape(batch, length // devices, devices * heads, size)


def _ring(kernel: Kernel, q: Float[Array, "B L N D"], part: tuple[Array, Array, Mask | None], devices: int) -> Array:
    """Attention to the keys and values of all devices of `sp`; the last part is not sent on."""
    to_next = [(i, (i + 1) % devices) for i in range(devices)]

    def attend(done, part):
        k, v, key_mask = part
        return merge(done, kernel(q, k, v, key_mask=key_mask, return_lse=True))

    def hop(carry, _):
        done, part = carry
        arriving = jax.lax.ppermute(part, "sp", to_next)  # while this part is attended to
        return (attend(done, part), arriving), None

    nothing = (jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:3], -jnp.inf, jnp.float32))
    (done, part), _ = jax.lax.scan(hop, (nothing, part), length=devices - 1)
    return attend(done, part)[0].astype(q.dtype)


Attended = tuple[Float[Array, "B L N D"], Float32[Array, "B L N"]]


def merge(a: Attended, b: Attended) -> Attended:
    """Attention to the keys of both, from that to each and its log-sum-exp, in float32."""
    top = jnp.maximum(a[1], b[1])
    (x, of_x), (y, of_y) = ((out.astype(jnp.float32), jnp.exp(lse - finite_max(top))) for out, lse in (a, b))
    total = of_x + of_y
    out = divide_live(of_x, total)[..., None] * x + divide_live(of_y, total)[..., None] * y
    return out, log_sum_exp(top, total)
