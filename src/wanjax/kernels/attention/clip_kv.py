# SPDX-License-Identifier: Apache-2.0
"""Attention of a video to itself and to another clip, frame by frame, in one softmax.

The tokens of frame f of the video attend to all tokens of the video, and to the tokens of frame f - 1 of the clip. The
first frame attends only to the video. Attention to the video and attention to the clip are computed separately. They
are merged by their log-sum-exps, so that no scores of other frames of the clip are computed.

On several devices, an all-to-all exchanges tokens for heads, over all mesh axes that shard tokens. The clip's keys and
values are always sharded by heads, so they are never sent.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int8

from wanjax.kernels.attention.merge import AttentionResult, join_heads, merge_by_log_sum_exp, merge_rows
from wanjax.kernels.attention.ring_weights import RingWeights, gather_while_computing, shard_map_with_weights
from wanjax.kernels.attention.sharded import QueryPlacement, heads_to_tokens, tokens_to_heads
from wanjax.sharding import constrain_to, current_partitioner, pad_to

TOKEN_AXES = ("sp", "tp")
INT8_MAX = 127.0


class ClipKV(NamedTuple):
    """Keys and values of a clip, with concatenated heads. For stacked blocks, there is a leading axis of blocks.

    In int8, `k_scale` and `v_scale` hold a scale for each token and head.
    """

    k: Any  # Float[Array, "... B S E"]
    v: Any
    k_scale: Any = None  # Float32[Array, "... B S N"]
    v_scale: Any = None


class Exchange(NamedTuple):
    """The all-to-all that exchanges tokens for heads. After it, each device has all tokens of some heads.

    Attributes:
        tokens: The sharding [B L N D] of tokens before the exchange.
        heads: The sharding [B S E] of arrays with concatenated heads, after the exchange.
        axes: The mesh axes of the exchange.
        num_devices: The number of devices of the exchange.
    """

    tokens: PartitionSpec
    heads: PartitionSpec
    axes: Any
    num_devices: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Exchange":
        """Return the exchange for queries, keys and values of a shape [B L N D], with the current partitioner."""
        partitioner = current_partitioner()
        placement = QueryPlacement(*partitioner.activation_spec(("batch", "length", "heads"), shape[:3]))
        axes_of = [(axes,) if isinstance(axes, str) else axes or () for axes in (placement.heads, placement.tokens)]
        head_axes = tuple(axis for axes in axes_of for axis in axes)
        heads = PartitionSpec(None, None, head_axes or None)
        return cls(PartitionSpec(*placement), heads, placement.tokens, partitioner.axis_size(placement.tokens))

    def tokens_to_heads(self, x: Float[Array, "B L N D"]) -> Float[Array, "B _L _N D"]:
        """Exchange tokens for heads. Each device then has all tokens of some heads. The number of heads is padded."""
        return tokens_to_heads(x, self.num_devices, self.axes)

    def heads_to_tokens(self, x: Float[Array, "B L N D"], heads: int) -> Float[Array, "B _L _N D"]:
        """Invert `tokens_to_heads`."""
        return heads_to_tokens(x, heads, self.num_devices, self.axes)


def store_clip_kv(k: Float[Array, "B L N D"], v: Float[Array, "B L N D"], length: int, *, in_int8: bool) -> ClipKV:
    """Store the keys and values of the first `length` tokens of a clip for `attention_with_frames`.

    Args:
        k: Keys, rotated by position.
        v: Values.
        length: The number of real tokens; further tokens are padding.
        in_int8: Whether to quantize to int8, with a scale for each token and head.
    """
    k, v = (pad_to(x, 1, current_partitioner().axis_size(TOKEN_AXES)) for x in (k, v))
    exchange = Exchange.of(k.shape)

    def store(*operands: Array) -> ClipKV:
        k, v = (exchange.tokens_to_heads(x)[:, :length] for x in operands)
        if not in_int8:
            return ClipKV(join_heads(k), join_heads(v))
        (k, k_scale), (v, v_scale) = map(_quantize_to_int8, (k, v))
        return ClipKV(k, v, k_scale, v_scale)

    specs = ClipKV(*(exchange.heads,) * (4 if in_int8 else 2))
    return current_partitioner().shard_map(store, (exchange.tokens,) * 2, specs)(k, v)


def shard_clip_kv(keys: ClipKV, heads: int) -> ClipKV:
    """Constrain the keys and values [layers B S E] of all blocks to the sharding that `store_clip_kv` gives them."""
    num_devices = current_partitioner().axis_size(TOKEN_AXES)
    exchange = Exchange.of((1, num_devices, heads))
    return jax.tree.map(lambda x: constrain_to(x, PartitionSpec(None, *exchange.heads)), keys)


@jax.named_scope("attention")
def attention_with_frames(
    kernel: Callable[..., Any],
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
    clip: ClipKV,
    *,
    length: int,
    frame_tokens: int,
    bias: Float[Array, ""] | None = None,
) -> Float[Array, "B L N D"]:
    """Return the attention of the first `length` tokens to each other and, frame by frame, to the clip's tokens.

    Args:
        kernel: Computes attention on one device; returns the result and its log-sum-exps.
        q: Queries.
        k: Keys.
        v: Values.
        clip: The keys and values of one clip, from `store_clip_kv`.
        length: The number of real tokens; further tokens are padding.
        frame_tokens: The number of tokens of a frame.
        bias: A number that is added to the scores of the keys of frame 1, or None.
    """
    queries, partitioner = q.shape[1], current_partitioner()
    q, k, v = (pad_to(x, 1, partitioner.axis_size(TOKEN_AXES)) for x in (q, k, v))
    exchange = Exchange.of(q.shape)

    def attend(
        pending: RingWeights | None, weights: Sequence[Array], q: Array, k: Array, v: Array, clip: ClipKV,
        bias: Array | None,
    ) -> tuple[Array, Sequence[Array]]:  # fmt: skip
        heads, qkv = q.shape[2], map(exchange.tokens_to_heads, (q, k, v))
        attend_by_frames = partial(_attend_by_frames, kernel, length, frame_tokens, clip, bias)
        out, weights = gather_while_computing(pending, weights, partitioner, attend_by_frames, *qkv)
        return exchange.heads_to_tokens(out, heads), weights

    clip_specs = jax.tree.map(lambda _: exchange.heads, clip)
    specs = (*(exchange.tokens,) * 3, clip_specs, None if bias is None else PartitionSpec())
    out = shard_map_with_weights(partitioner, attend, specs, exchange.tokens)(q, k, v, clip, bias)
    return out[:, :queries]


def _attend_by_frames(
    kernel: Callable[..., Any],
    length: int,
    frame_tokens: int,
    clip: ClipKV,
    bias: Float[Array, ""] | None,
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
) -> Float[Array, "B L N D"]:
    """Compute attention on one device, for all tokens of some heads. Padding follows the first `length` tokens."""
    batch = len(q)

    # For one frame, the queries of all videos of the batch have the same keys. The heads are concatenated while tokens
    # are moved, because a TPU would copy arrays with an axis of heads.
    def to_frames(x: Array) -> Array:
        by_video = join_heads(x)[:, frame_tokens:length].reshape(batch, -1, frame_tokens, prod(x.shape[2:]))
        return jnp.moveaxis(by_video, 1, 0).reshape(-1, batch * frame_tokens, *x.shape[2:])

    def to_tokens(x: Array) -> Array:
        by_frame = x.reshape(len(x), batch, frame_tokens, -1)
        return jnp.moveaxis(by_frame, 0, 1).reshape(batch, -1, *x.shape[2:])

    out, lse = _attend_to_video(kernel, q, k, v, length, frame_tokens, bias)
    clip_out, clip_lse = map(to_tokens, kernel(to_frames(q), *_clip_frames(clip, frame_tokens, k)))
    return merge_rows(out, lse, clip_out, clip_lse, frame_tokens)


def _attend_to_video(
    kernel: Callable[..., Any],
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
    length: int,
    frame_tokens: int,
    bias: Float[Array, ""] | None,
) -> AttentionResult:
    """Compute attention to the video's first `length` keys, with a bias for the keys of frame 1."""
    if bias is None:
        return kernel(q, k, v, kv_length=length)
    frame_1 = slice(frame_tokens, 2 * frame_tokens)
    out, lse = kernel(q, k[:, frame_1], v[:, frame_1])
    other_kv = (jnp.concatenate([x[:, :frame_tokens], x[:, 2 * frame_tokens :]], axis=1) for x in (k, v))
    merged, lse = merge_by_log_sum_exp(kernel(q, *other_kv, kv_length=length - frame_tokens), (out, lse + bias))
    return merged.astype(q.dtype), lse


def _clip_frames(clip: ClipKV, frame_tokens: int, template: Float[Array, "B L N D"]) -> list[Array]:
    """Return the keys and the values of each frame of a clip, [T S N D], with the heads and the dtype of `template`."""

    def split(x: Array, scale: Array | None) -> Array:
        x = x.reshape(-1, frame_tokens, *template.shape[2:])
        return x if scale is None else (x.astype(scale.dtype) * scale.reshape(*x.shape[:3], 1)).astype(template.dtype)

    return [split(clip.k, clip.k_scale), split(clip.v, clip.v_scale)]


def _quantize_to_int8(x: Float[Array, "B S N D"]) -> tuple[Int8[Array, "B S E"], Float32[Array, "B S N"]]:
    """Quantize to int8 with a scale for each token and head."""
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(x).max(axis=-1), jnp.finfo(jnp.float32).tiny) / INT8_MAX
    return join_heads(jnp.round(x / scale[..., None]).astype(jnp.int8)), scale
