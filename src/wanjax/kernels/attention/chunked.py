# SPDX-License-Identifier: Apache-2.0
"""Attention by blocks of queries and keys, on any platform. The score matrix is never in memory as a whole.

The softmax over all keys is merged from the softmaxes over the blocks (Milakov and Gimelshein, Online normalizer
calculation for softmax, 2018; Rabe and Staats, Self-attention does not need O(n²) memory, 2021). The first block of
keys may be shorter than the others, so that no key is padding.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from wanjax.kernels.attention.blocks import (
    Config,
    block_grid,
    block_lists,
    key_mask_blocks,
    map_axis,
    matmul_precision,
    slice_axis,
    to_blocks,
    visible_keys,
)
from wanjax.kernels.attention.chunked_gradient import gradient_by_blocks
from wanjax.kernels.attention.gradient import from_result
from wanjax.kernels.attention.masks import Window, divide_or_zero, finite_max, length_mask, log_sum_exp
from wanjax.kernels.attention.radial import Radial
from wanjax.kernels.target import target, uses_bfloat16_instructions


def default_config(platform: str, head_dim: int) -> Config:
    """Return the default block sizes. For CPUs they are the fastest in benchmarks/attention.py. On other platforms, the
    blocks fill a matrix unit."""
    if platform == "cpu":
        return Config(1024, 512 if head_dim <= 64 else 1024, batched=False)
    return Config(256, 1024, batched=True)


def unsupported(q, k, v, *, key_mask, window, scale, bias, config, return_lse) -> str | None:
    """Return the reason why this call is not supported, or None."""
    if isinstance(window, Radial) and bias is not None:
        return "chunked takes a bias or a radial mask, not both"
    if config is not None and not isinstance(config, Config):
        return f"chunked must be configured by a chunked.Config, not by {type(config).__name__}"
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
    """Compute the same as the reference, block by block. The gradient computes the scores of each block again."""
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
    kv_length: Int32[Array, " B"] | None = None,
) -> tuple[Array, Array, Array]:
    """Return the gradients of q, k and v. `gradient.from_result` explains g, lse and delta.

    The valid keys are those in `key_mask`, or the first `kv_length` keys of each example.
    """
    if kv_length is not None:
        key_mask = length_mask(kv_length, k.shape[1])
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
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    groups = (kv_heads, heads // kv_heads)
    q = q.reshape(batch, length, *groups, head_dim)
    if bias is not None:
        bias = bias.reshape(bias.shape[0], *(groups if bias.shape[1] == heads else (1, 1)), *bias.shape[2:])
    # Map over examples, then over heads of k, then over the heads of q that share a head of k.
    # The axes are those of q, k, v, key_mask and bias.

    one_head = partial(_attend_one_head, window=window, scale=scale, dtype=q.dtype, config=config)
    for axes in ((1, None, None, None, 0), (1, 1, 1, None, 0), (0, 0, 0, 0, 0)):
        one_head = map_axis(one_head, axes, batched=config.batched)
    out, lse = (x.reshape(batch, heads, length, -1) for x in one_head(q, k, v, key_mask, bias))
    return jnp.moveaxis(out, 1, 2), jnp.moveaxis(lse[..., 0], 1, 2)


class MatmulOptions(NamedTuple):
    """The precision of matrix products, and the scale of the logits. If the queries are already scaled, `scale` is
    None."""

    precision: str
    scale: float | None

    def dot(self, a: Float[Array, "L D"], b: Float[Array, "D S"]) -> Float32[Array, "L S"]:
        return jnp.matmul(a, b, precision=self.precision, preferred_element_type=jnp.float32)


class PartialSoftmax(NamedTuple):
    """The sums of a softmax over a part of the keys. A query's weights are relative to its maximum logit, `row_max`."""

    row_max: Float32[Array, "L 1"]
    weight_sum: Float32[Array, "L 1"]
    value_sum: Float32[Array, "L D"]


def merge_partial_softmax(a: PartialSoftmax, b: PartialSoftmax) -> PartialSoftmax:
    """Merge the softmaxes over two sets of keys."""
    row_max = jnp.maximum(a.row_max, b.row_max)
    scale_a, scale_b = (jnp.exp(x.row_max - finite_max(row_max)) for x in (a, b))
    return PartialSoftmax(
        row_max, a.weight_sum * scale_a + b.weight_sum * scale_b, a.value_sum * scale_a + b.value_sum * scale_b
    )


def _attend_one_head(
    q: Float[Array, "L D"],
    k: Float[Array, "S D"],
    v: Float[Array, "S D"],
    key_mask: Bool[Array, " S"] | None,
    bias: Float32[Array, "..."] | None,
    *,
    window: Window | Radial | None,
    scale: float,
    dtype: DTypeLike,
    config: Config,
) -> tuple[Float[Array, "L D"], Float32[Array, "L 1"]]:
    """Compute the attention of one head of one example, and its log-sum-exps. Queries are padded to whole blocks.

    Operands are float32, or bfloat16 if the processor can multiply bfloat16. Logits and sums are always float32.
    """
    matmul, length = MatmulOptions(matmul_precision(dtype), scale if uses_bfloat16_instructions(q) else None), len(q)
    if matmul.scale is None:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        q = scale * q
    if isinstance(window, Radial):
        out, lse = _attend_radial_head(q, k, v, key_mask, window, matmul, config)
        return out.astype(dtype), lse
    grid = block_grid(length, len(k), window, config)
    padded_q = grid.pad_queries(q)
    if bias is not None and bias.shape[0] > 1:
        bias = grid.pad_queries(bias)

    @jax.checkpoint
    def attend_block(q_start: Array) -> tuple[Float32[Array, "L D"], Float32[Array, "L 1"]]:
        q_block = slice_axis(padded_q, q_start, grid.block_q)

        def block_softmax(kv_start: Array, num_keys: int) -> PartialSoftmax:
            visible = visible_keys(key_mask, window, q_start, grid.block_q, kv_start, num_keys)
            bias_block = (
                None
                if bias is None
                else slice_axis(slice_axis(bias, q_start, grid.block_q), kv_start, num_keys, axis=1)
            )
            return _softmax(
                q_block,
                slice_axis(k, kv_start, num_keys),
                slice_axis(v, kv_start, num_keys),
                visible,
                bias_block,
                matmul,
            )

        first_start, later_starts = grid.key_starts(q_start)
        state = block_softmax(first_start, grid.first_block_kv)
        if len(later_starts):  # under `jax.disable_jit`, a scan of zero steps is an error
            state, _ = jax.lax.scan(
                lambda state, kv_start: (
                    merge_partial_softmax(state, block_softmax(kv_start, grid.block_kv)),
                    None,
                ),
                state,
                later_starts,
            )
        return divide_or_zero(state.value_sum, state.weight_sum), log_sum_exp(state.row_max, state.weight_sum)

    out, lse = jax.lax.map(attend_block, grid.q_starts)
    return out.reshape(-1, v.shape[1])[:length].astype(dtype), lse.reshape(-1, 1)[:length]


def _attend_radial_head(
    q: Float[Array, "L D"],
    k: Float[Array, "S D"],
    v: Float[Array, "S D"],
    key_mask: Bool[Array, " S"] | None,
    mask: Radial,
    matmul: MatmulOptions,
    config: Config,
) -> tuple[Float32[Array, "L D"], Float32[Array, "L 1"]]:
    """Compute the attention of one head under a radial mask. For each block of queries, only the visible blocks of keys
    are computed, a few at a time."""
    q_blocks, k_blocks, v_blocks = to_blocks(q, mask.block_q), to_blocks(k, mask.block_kv), to_blocks(v, mask.block_kv)
    valid = key_mask_blocks(key_mask, len(k), mask.block_kv)

    def attend_block(entry: tuple[Array, ...]) -> tuple[Float32[Array, "L D"], Float32[Array, "L 1"]]:
        q_block, kv_blocks, list_positions, count = entry

        def add(state: PartialSoftmax, step: tuple[Array, Array]) -> tuple[PartialSoftmax, None]:
            kv_blocks, list_positions = step
            k_part, v_part = (blocks[kv_blocks].reshape(-1, blocks.shape[2]) for blocks in (k_blocks, v_blocks))
            visible = valid[kv_blocks] & (list_positions < count)[:, None]
            return merge_partial_softmax(
                state, _softmax(q_block, k_part, v_part, visible.reshape(1, -1), None, matmul)
            ), None

        initial_state = PartialSoftmax(
            *(jnp.full((len(q_block), n), fill) for n, fill in ((1, -jnp.inf), (1, 0.0), (v.shape[1], 0.0)))
        )
        state, _ = jax.lax.scan(add, initial_state, (kv_blocks, list_positions))
        return divide_or_zero(state.value_sum, state.weight_sum), log_sum_exp(state.row_max, state.weight_sum)

    results = [
        jax.lax.map(attend_block, (q_blocks[lists.q_blocks], *lists.arrays))
        for lists in block_lists(mask, len(q), len(k), config.block_kv)
    ]
    out, lse = (jnp.concatenate(parts) for parts in zip(*results, strict=True))
    return out.reshape(-1, v.shape[1])[: len(q)], lse.reshape(-1, 1)[: len(q)]


def _softmax(
    q: Float[Array, "L D"],
    k: Float[Array, "S D"],
    v: Float[Array, "S D"],
    visible: Bool[Array, "_L S"] | None,
    bias: Float32[Array, "..."] | None,
    matmul: MatmulOptions,
) -> PartialSoftmax:
    """Return the softmax of a block of queries over the visible keys."""
    logits = matmul.dot(q, k.T)
    if matmul.scale is not None:
        logits *= matmul.scale
    if bias is not None:
        logits += bias
    if visible is not None:
        logits = jnp.where(visible, logits, -jnp.inf)
    row_max = jax.lax.stop_gradient(logits.max(axis=1, keepdims=True))
    weights = jnp.exp(logits - finite_max(row_max))
    return PartialSoftmax(row_max, weights.sum(axis=1, keepdims=True), matmul.dot(weights.astype(v.dtype), v))
