# SPDX-License-Identifier: Apache-2.0
"""Attention by blocks of queries and keys, on any platform, with memory that does not grow with their product.

The softmax over all keys is merged from those of the blocks (Milakov and Gimelshein, Online normalizer calculation for
softmax, 2018; Rabe and Staats, Self-attention does not need O(n²) memory, 2021). Blocks of keys tile S exactly: the
first may be shorter, and no key is padding.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from wanjax.kernels.attention.blocks import Config, cut, grid, over, precision_of, seen, shown, take, visits
from wanjax.kernels.attention.chunked_gradient import gradient_by_blocks
from wanjax.kernels.attention.gradient import from_result
from wanjax.kernels.attention.masks import Window, divide_live, finite_max, first_keys, log_sum_exp
from wanjax.kernels.attention.radial import Radial
from wanjax.kernels.target import multiplies_bfloat16, target


def default_config(platform: str, head_dim: int) -> Config:
    """The fastest sizes of benchmarks/attention.py for CPUs; elsewhere, blocks that fill a matrix unit."""
    if platform == "cpu":
        return Config(1024, 512 if head_dim <= 64 else 1024, batched=False)
    return Config(256, 1024, batched=True)


def unsupported(q, k, v, *, key_mask, window, scale, bias, config, return_lse) -> str | None:
    """The reason why this call is not supported, or None."""
    if isinstance(window, Radial) and bias is not None:
        return "chunked takes a bias or a radial mask, not both"
    if config is not None and not isinstance(config, Config):
        return f"chunked is configured by a chunked.Config, which {type(config).__name__} is not"
    return None


def attention(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    *,
    key_mask: Bool[Array, "B S"] | None,
    window: Window | Radial | None,
    scale: float,
    bias: Float32[Array, "..."] | None,
    config: Config | None,
    return_lse: bool = False,
) -> Float[Array, "B L N D"] | tuple[Float[Array, "B L N D"], Float32[Array, "B L N"]]:
    """Compute what the reference does, block by block; the gradient computes the scores of a block again."""
    config = config or default_config(target(q).platform, q.shape[3])
    forward = partial(_forward, window=window, scale=scale, config=config)
    if bias is not None:
        out, lse = forward(q, k, v, key_mask, bias)
    else:
        backward = partial(gradient_by_blocks, window=window, scale=scale, config=config)
        out, lse = from_result(forward, backward, q, k, v, key_mask)
    return (out, lse) if return_lse else out


def gradient(
    q,
    k,
    v,
    g,
    lse,
    delta,
    *,
    key_mask: Bool[Array, "B S"] | None,
    window: Window | Radial | None,
    scale: float,
    config: Config | None,
    keys: Int32[Array, " B"] | None = None,
) -> tuple[Array, Array, Array]:
    """The gradients of q, k and v; g, lse and delta are those of `gradient.from_result`.

    Of each example's keys those of `key_mask`, or the first `keys`, take part.
    """
    if keys is not None:
        key_mask = first_keys(keys, k.shape[1])
    config = config or default_config(target(q).platform, q.shape[3])
    return gradient_by_blocks(q, k, v, g, lse, delta, key_mask, window=window, scale=scale, config=config)


def _forward(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    key_mask: Bool[Array, "B S"] | None,
    bias: Float32[Array, "..."] | None = None,
    *,
    window: Window | Radial | None,
    scale: float,
    config: Config,
) -> tuple[Float[Array, "B L N D"], Float32[Array, "B L N"]]:
    batch, length, heads, size = q.shape
    kv_heads = k.shape[2]
    groups = (kv_heads, heads // kv_heads)
    q = q.reshape(batch, length, *groups, size)
    if bias is not None:
        bias = bias.reshape(bias.shape[0], *(groups if bias.shape[1] == heads else (1, 1)), *bias.shape[2:])
    # over examples, then heads of k, then the heads of q that share one: the axes of q, k, v, key_mask, bias
    head = partial(_head, window=window, scale=scale, dtype=q.dtype, config=config)
    for axes in ((1, None, None, None, 0), (1, 1, 1, None, 0), (0, 0, 0, 0, 0)):
        head = over(head, axes, batched=config.batched)
    out, lse = (x.reshape(batch, heads, length, -1) for x in head(q, k, v, key_mask, bias))
    return jnp.moveaxis(out, 1, 2), jnp.moveaxis(lse[..., 0], 1, 2)


class Products(NamedTuple):
    """The precision of products, and the scale of logits where queries, in bfloat16, do not have it."""

    precision: str
    scale: float | None

    def of(self, a: Float[Array, "L D"], b: Float[Array, "D S"]) -> Float32[Array, "L S"]:
        return jnp.matmul(a, b, precision=self.precision, preferred_element_type=jnp.float32)


class Partial(NamedTuple):
    """Softmax over some keys: the largest logit and, relative to it, the sums of weights and of weighted values."""

    top: Float32[Array, "L 1"]
    weight: Float32[Array, "L 1"]
    total: Float32[Array, "L D"]


def merge(a: Partial, b: Partial) -> Partial:
    """Merge the softmaxes over two sets of keys."""
    top = jnp.maximum(a.top, b.top)
    scale_a, scale_b = (jnp.exp(x.top - finite_max(top)) for x in (a, b))
    return Partial(top, a.weight * scale_a + b.weight * scale_b, a.total * scale_a + b.total * scale_b)


def _head(
    q: Float[Array, "L D"],
    k: Float[Array, "S D"],
    v: Float[Array, "S D"],
    live: Bool[Array, " S"] | None,
    bias: Float32[Array, "..."] | None,
    *,
    window: Window | Radial | None,
    scale: float,
    dtype: DTypeLike,
    config: Config,
) -> tuple[Float[Array, "L D"], Float32[Array, "L 1"]]:
    """One head of one example, and its log-sum-exps. Queries are padded to whole blocks, which changes no result.

    Operands are float32, or bfloat16 where the processor multiplies that; logits and sums are always float32.
    """
    products, length = Products(precision_of(dtype), scale if multiplies_bfloat16(q) else None), len(q)
    if products.scale is None:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        q = scale * q
    if isinstance(window, Radial):
        out, lse = _radial(q, k, v, live, window, products, config)
        return out.astype(dtype), lse
    walk = grid(length, len(k), window, config)
    queries = walk.padded(q)
    if bias is not None and bias.shape[0] > 1:
        bias = walk.padded(bias)

    @jax.checkpoint
    def block(start: Array) -> tuple[Float32[Array, "L D"], Float32[Array, "L 1"]]:
        x = take(queries, start, walk.rows)

        def softmax(begin: Array, count: int) -> Partial:
            marks = seen(live, window, start, walk.rows, begin, count)
            part = None if bias is None else take(take(bias, start, walk.rows), begin, count, axis=1)
            return _softmax(x, take(k, begin, count), take(v, begin, count), marks, part, products)

        first, others = walk.begins(start)
        done = softmax(first, walk.ragged)
        if len(others):  # a scan of no steps is refused under `jax.disable_jit`
            done, _ = jax.lax.scan(lambda done, begin: (merge(done, softmax(begin, walk.columns)), None), done, others)
        return divide_live(done.total, done.weight), log_sum_exp(done.top, done.weight)

    out, lse = jax.lax.map(block, walk.starts)
    return out.reshape(-1, v.shape[1])[:length].astype(dtype), lse.reshape(-1, 1)[:length]


def _radial(
    q: Float[Array, "L D"],
    k: Float[Array, "S D"],
    v: Float[Array, "S D"],
    live: Bool[Array, " S"] | None,
    mask: Radial,
    products: Products,
    config: Config,
) -> tuple[Float32[Array, "L D"], Float32[Array, "L 1"]]:
    """One head under a radial mask: each block of queries visits the blocks of keys that it sees, a few at a time."""
    rows, keys, values = cut(q, mask.block_q), cut(k, mask.block_kv), cut(v, mask.block_kv)
    marks = shown(live, len(k), mask.block_kv)

    def block(row: tuple[Array, ...]) -> tuple[Float32[Array, "L D"], Float32[Array, "L 1"]]:
        x, columns, places, count = row

        def add(done: Partial, at: tuple[Array, Array]) -> tuple[Partial, None]:
            columns, places = at
            some_k, some_v = (array[columns].reshape(-1, array.shape[2]) for array in (keys, values))
            seen = marks[columns] & (places < count)[:, None]
            return merge(done, _softmax(x, some_k, some_v, seen.reshape(1, -1), None, products)), None

        nothing = Partial(*(jnp.full((len(x), n), fill) for n, fill in ((1, -jnp.inf), (1, 0.0), (v.shape[1], 0.0))))
        done, _ = jax.lax.scan(add, nothing, (columns, places))
        return divide_live(done.total, done.weight), log_sum_exp(done.top, done.weight)

    results = [
        jax.lax.map(block, (rows[part.rows], *part.steps)) for part in visits(mask, len(q), len(k), config.block_kv)
    ]
    out, lse = (jnp.concatenate(both) for both in zip(*results, strict=True))
    return out.reshape(-1, v.shape[1])[: len(q)], lse.reshape(-1, 1)[: len(q)]


def _softmax(
    x: Float[Array, "L D"],
    k: Float[Array, "S D"],
    v: Float[Array, "S D"],
    seen: Bool[Array, "_L S"] | None,
    bias: Float32[Array, "..."] | None,
    products: Products,
) -> Partial:
    """The softmax of a block of queries over the keys that are seen."""
    logits = products.of(x, k.T)
    if products.scale is not None:
        logits *= products.scale
    if bias is not None:
        logits += bias
    if seen is not None:
        logits = jnp.where(seen, logits, -jnp.inf)
    top = jax.lax.stop_gradient(logits.max(axis=1, keepdims=True))
    weights = jnp.exp(logits - finite_max(top))
    return Partial(top, weights.sum(axis=1, keepdims=True), products.of(weights.astype(v.dtype), v))
