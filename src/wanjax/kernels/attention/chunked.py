# SPDX-License-Identifier: Apache-2.0
"""Attention by blocks of queries and keys, on any platform, with memory that does not grow with their product.

The softmax over all keys is merged from those of the blocks (Milakov and Gimelshein, Online normalizer calculation for
softmax, 2018; Rabe and Staats, Self-attention does not need O(n²) memory, 2021). Blocks of keys tile S exactly: the
first may be shorter, and no key is padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Bool, Float, Float32

from wanjax.errors import WanjaxError
from wanjax.kernels.attention.masks import Window, divide_live, finite_max, in_window, log_sum_exp
from wanjax.kernels.attention.radial import Radial, lists
from wanjax.kernels.target import target


@dataclass(frozen=True)
class Config:
    """The largest numbers of queries and keys in a block; blocks are as even as the lengths allow.

    `batched` computes all heads of all examples at once, which suits an accelerator; otherwise one after another, which
    keeps the scores of a block in a CPU's cache.
    """

    block_q: int
    block_kv: int
    batched: bool

    def __post_init__(self):
        if self.block_q < 1 or self.block_kv < 1:
            raise WanjaxError(f"blocks of {self.block_q} queries and {self.block_kv} keys: each must be at least 1")


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
    """Computes what the reference does, block by block; the gradient computes the scores again."""
    config = config or default_config(target(q).platform, q.shape[3])
    batch, length, heads, size = q.shape
    kv_heads = k.shape[2]
    groups = (kv_heads, heads // kv_heads)
    q = q.reshape(batch, length, *groups, size)
    if bias is not None:
        bias = bias.reshape(bias.shape[0], *(groups if bias.shape[1] == heads else (1, 1)), *bias.shape[2:])
    # over examples, then heads of k, then the heads of q that share one: the axes of q, k, v, key_mask, bias
    head = partial(_head, window=window, scale=scale, dtype=q.dtype, config=config)
    for axes in ((1, None, None, None, 0), (1, 1, 1, None, 0), (0, 0, 0, 0, 0)):
        head = _over(head, axes, batched=config.batched)
    out, lse = (x.reshape(batch, heads, length, -1) for x in head(q, k, v, key_mask, bias))
    out = jnp.moveaxis(out, 1, 2)
    return (out, jnp.moveaxis(lse[..., 0], 1, 2)) if return_lse else out


def _over(f: Callable, axes: Sequence[int | None], *, batched: bool) -> Callable:
    """Maps f over an axis of its arguments; an argument without the axis, or with one entry, is shared by all."""

    def run(*arguments: Array | None) -> tuple[Array, ...]:
        xs, ways = list(arguments), list(axes)
        for i, (x, axis) in enumerate(zip(arguments, axes, strict=True)):
            if x is None or (axis is not None and x.shape[axis] == 1):
                xs[i], ways[i] = x if x is None else x.squeeze(axis), None
        counts = {x.shape[way] for x, way in zip(xs, ways, strict=True) if x is not None and way is not None}
        if not counts:
            return jax.tree.map(lambda y: y[None], f(*xs))
        if batched:
            return jax.vmap(f, ways)(*xs)
        return jax.lax.map(lambda index: f(*map(partial(_entry, index), xs, ways)), jnp.arange(counts.pop()))

    return run


def _entry(index: Array, x: Array | None, axis: int | None) -> Array | None:
    if x is None or axis is None:
        return x
    casts_all = x.dtype == jnp.bfloat16 and jax.__version_info__ < (0, 11)
    return (_wide_entry if casts_all else _index)(x, index, axis)


def _index(x: Array, index: Array, axis: int) -> Array:
    return jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _wide_entry(x: BFloat16[Array, "..."], index: Array, axis: int) -> Float32[Array, "..."]:
    """An entry in float32. Up to jax 0.10, XLA on CPUs would cast all entries to float32 before a loop indexes them.

    So it indexes integers: the bits of a bfloat16 are the upper half of the float32 of the same value.
    """
    bits = _index(jax.lax.bitcast_convert_type(x, jnp.uint16), index, axis)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


@_wide_entry.defjvp
def _wide_entry_jvp(axis: int, values: tuple, tangents: tuple) -> tuple[Array, Array]:
    return _wide_entry(*values, axis), _index(tangents[0], values[1], axis).astype(jnp.float32)


class Partial(NamedTuple):
    """Softmax over some keys: the largest logit and, relative to it, the sums of weights and of weighted values."""

    top: Float32[Array, "L 1"]
    weight: Float32[Array, "L 1"]
    total: Float32[Array, "L D"]


def merge(a: Partial, b: Partial) -> Partial:
    """Merges the softmaxes over two sets of keys."""
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
    """One head of one example, and its log-sum-exps. Queries are padded to whole blocks, which changes no result."""
    precision = "highest" if dtype == jnp.float32 else "default"  # one pass of a matrix unit is exact for bfloat16
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    length, keys = q.shape[0], k.shape[0]
    if isinstance(window, Radial):
        out, lse = _radial(scale * q, k, v, live, window, precision, config)
        return out.astype(dtype), lse
    blocks, rows = _even(length, config.block_q)
    fill = blocks * rows - length
    queries = jnp.pad(scale * q, ((0, fill), (0, 0)))
    if bias is not None and bias.shape[0] > 1:
        bias = jnp.pad(bias, ((0, fill), (0, 0)))
    back, ahead = (keys if side is None else side for side in window or (None, None))
    reach = min(keys, rows + back + ahead)  # neighbouring keys that a block of queries can see

    @jax.checkpoint
    def block(start: Array) -> tuple[Float32[Array, "L D"], Float32[Array, "L 1"]]:
        x = _take(queries, start, rows)
        first = jnp.clip(start - back, 0, keys - reach)
        score = partial(_score, x, k, v, live, bias, start, window=window, precision=precision)
        steps, columns = _even(reach, config.block_kv)
        ragged = reach - (steps - 1) * columns
        begins = first + ragged + columns * jnp.arange(steps - 1, dtype=start.dtype)
        done, _ = jax.lax.scan(
            lambda done, begin: (merge(done, score(begin, columns)), None), score(first, ragged), begins
        )
        return divide_live(done.total, done.weight), log_sum_exp(done.top, done.weight)

    out, lse = jax.lax.map(block, rows * jnp.arange(blocks))
    return out.reshape(-1, v.shape[1])[:length].astype(dtype), lse.reshape(-1, 1)[:length]


def _radial(
    q: Float32[Array, "L D"],
    k: Float32[Array, "S D"],
    v: Float32[Array, "S D"],
    live: Bool[Array, " S"] | None,
    mask: Radial,
    precision: str,
    config: Config,
) -> tuple[Float32[Array, "L D"], Float32[Array, "L 1"]]:
    """One head under a radial mask: each block of queries visits the blocks of keys that it sees, a few at a time.

    All visit as many as the longest of their lists has, so the blocks with text, which see all, are apart.
    """
    length, keys, size = q.shape[0], k.shape[0], mask.block_kv
    whole = [jnp.pad(x, ((0, -len(x) % n), (0, 0))) for x, n in ((q, mask.block_q), (k, size), (v, size))]
    rows, k, v = (x.reshape(-1, n, x.shape[1]) for x, n in zip(whole, (mask.block_q, size, size), strict=True))
    shown = jnp.pad(jnp.ones(keys, bool) if live is None else live, (0, -keys % size)).reshape(-1, size)
    visit = partial(_visited, held=(k, v, shown), precision=precision, together=max(1, config.block_kv // size))
    seen, text = mask.live(length, keys), mask.frames * mask.frame_tokens // mask.block_q
    parts = [visit(rows[part], seen[part]) for part in (slice(0, text), slice(text, None)) if len(seen[part])]
    out, lse = (jnp.concatenate(both) for both in zip(*parts, strict=True))
    return out.reshape(-1, v.shape[2])[:length], lse.reshape(-1, 1)[:length]


def _visited(
    rows: Float32[Array, "_B L D"],
    seen: Bool[np.ndarray, "_B _S"],
    *,
    held: tuple[Array, Array, Array],
    precision: str,
    together: int,
) -> tuple[Float32[Array, "_B L D"], Float32[Array, "_B L 1"]]:
    """Blocks of queries that see some blocks of keys. `held` are the keys' blocks, values, and which take part."""
    columns, counts = lists(seen)
    together = min(together, columns.shape[1])
    columns = np.pad(columns, ((0, 0), (0, -columns.shape[1] % together)))
    k, v, shown = held

    @jax.checkpoint
    def block(row: tuple[Array, Array, Array]) -> tuple[Float32[Array, "L D"], Float32[Array, "L 1"]]:
        x, listed, count = row

        def add(done: Partial, at: tuple[Array, Array]) -> tuple[Partial, None]:
            columns, number = at
            seen = shown[columns] & (number < count)[:, None]
            some_k, some_v = (array[columns].reshape(-1, array.shape[2]) for array in (k, v))
            return merge(done, _softmax(x, some_k, some_v, seen.reshape(1, -1), precision)), None

        nothing = Partial(*(jnp.full((len(x), n), fill) for n, fill in ((1, -jnp.inf), (1, 0.0), (v.shape[2], 0.0))))
        steps = listed.reshape(-1, together), jnp.arange(len(listed), dtype=jnp.int32).reshape(-1, together)
        done, _ = jax.lax.scan(add, nothing, steps)
        return divide_live(done.total, done.weight), log_sum_exp(done.top, done.weight)

    return jax.lax.map(block, (rows, jnp.asarray(columns), jnp.asarray(counts)))


def _softmax(
    x: Float32[Array, "L D"], k: Float32[Array, "S D"], v: Float32[Array, "S D"], seen: Bool[Array, "1 S"], precision
) -> Partial:
    """The softmax of a block of queries over the keys that are seen."""
    logits = jnp.where(seen, jnp.matmul(x, k.T, precision=precision), -jnp.inf)
    top = jax.lax.stop_gradient(logits.max(axis=1, keepdims=True))
    weights = jnp.exp(logits - finite_max(top))
    return Partial(top, weights.sum(axis=1, keepdims=True), jnp.matmul(weights, v, precision=precision))


def _score(
    x: Float32[Array, "L D"],
    k: Float32[Array, "S D"],
    v: Float32[Array, "S D"],
    live: Bool[Array, " S"] | None,
    bias: Float32[Array, "..."] | None,
    start: Array,
    begin: Array,
    count: int,
    *,
    window: Window | None,
    precision: str,
) -> Partial:
    """The softmax of a block of queries, the first of which is at `start`, over `count` keys from `begin` on."""
    rows = x.shape[0]
    logits = jnp.matmul(x, _take(k, begin, count).T, precision=precision)
    if bias is not None:
        logits += _take(_take(bias, start, rows), begin, count, axis=1)
    if live is not None:
        logits = jnp.where(_take(live, begin, count)[None, :], logits, -jnp.inf)
    if window is not None:
        seen = in_window(start + jnp.arange(rows), begin + jnp.arange(count), window)
        logits = jnp.where(seen, logits, -jnp.inf)
    top = jax.lax.stop_gradient(logits.max(axis=1, keepdims=True))
    weights = jnp.exp(logits - finite_max(top))
    total = jnp.matmul(weights, _take(v, begin, count), precision=precision)
    return Partial(top, weights.sum(axis=1, keepdims=True), total)


def _even(length: int, block: int) -> tuple[int, int]:
    """The fewest blocks of at most `block` that cover a length, and their even size."""
    blocks = -(-length // block)
    return blocks, -(-length // blocks)


def _take(x: Array, start: Array, size: int, axis: int = 0) -> Array:
    """Slices `size` entries from `start` along an axis; an axis of size 1 broadcasts and stays."""
    return x if x.shape[axis] == 1 else jax.lax.dynamic_slice_in_dim(x, start, size, axis)
