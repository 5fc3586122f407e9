# SPDX-License-Identifier: Apache-2.0
"""Joint attention: the tokens of a video and the tokens of its text form one sequence with dense attention.

The sequence has the video's real tokens in the order of the frames, then the tokens of the text, then padding. So the
valid keys are the first keys of the sequence. Their number depends on the length of the example's text.

On several devices, tokens of video and text are exchanged for heads over `tp`. Each device then concatenates video and
text. Over `sp`, each device computes its own queries, and gathers the keys of all devices. A window needs all queries
in their order, so with a window tokens are exchanged for heads over `sp` too.

If the video's padding has room for the text (`sharding.shard_tokens`), the text is written there. Concatenation would
copy the video's queries, keys and values.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from wanjax.kernels.attention.ring_weights import RingWeights, gather_while_computing, shard_map_with_weights
from wanjax.kernels.attention.sharded import QueryPlacement, heads_to_tokens, tokens_to_heads
from wanjax.sharding import current_partitioner, pad_to


class VideoTextPair(NamedTuple):
    """Queries, keys or values of a video and of its text, each padded by `sharding.shard_tokens`."""

    video: Any  # Float[Array, "B L N D"]
    text: Any  # Float[Array, "B S N D"]


def attention(
    kernel: Callable[..., Array],
    q: VideoTextPair,
    k: VideoTextPair,
    v: VideoTextPair,
    *,
    length: int,
    text_lengths: Int32[Array, " B"],
    window: Any,
) -> VideoTextPair:
    """Return the attention of all tokens to the valid tokens: the first `length` tokens of the video, and the first
    `text_lengths` tokens of the text.

    On one device, `kernel(q, k, v, kv_length=..., window=...)` computes the attention to the first `kv_length` keys of
    each example.
    """
    partitioner = current_partitioner()
    placement = QueryPlacement.of(q.video, partitioner)
    axes = (placement.tokens,) if isinstance(placement.tokens, str) else placement.tokens or ()
    gather_axes = tuple(axis for axis in axes if axis == "sp" and window is None)
    exchange_axes = tuple(axis for axis in axes if axis not in gather_axes)

    def attend(
        pending: RingWeights | None, weights: Sequence[Array], q: VideoTextPair, k: VideoTextPair, v: VideoTextPair,
        text_lengths: Array,
    ) -> tuple[VideoTextPair, Sequence[Array]]:  # fmt: skip
        heads, num_devices, video_queries = q.video.shape[2], partitioner.axis_size(exchange_axes), length
        exchange = partial(tokens_to_heads, num_devices=num_devices, axes=exchange_axes)
        # the texts are exchanged together, and first: later, their exchange would run beside the large product of the
        # keys or values, which can hide the exchange of a video
        texts = jnp.split(exchange(jnp.concatenate([x.text for x in (q, k, v)])), 3)
        videos = (exchange(x.video, after=texts) for x in (q, k, v))
        q, k, v = map(VideoTextPair, videos, texts)
        if gather_axes:
            video_queries = q.video.shape[1]
            k, v = jax.tree.map(lambda x: jax.lax.all_gather(x, gather_axes, axis=1, tiled=True), (k, v))
        attend_jointly = partial(kernel, kv_length=length + text_lengths, window=window)
        joint_qkv = (_join(x, n, window) for x, n in ((q, video_queries), (k, length), (v, length)))
        out, weights = gather_while_computing(pending, weights, partitioner, attend_jointly, *joint_qkv)
        out = _split(out, video_queries, *(x.shape[1] for x in q))
        return jax.tree.map(lambda x: heads_to_tokens(x, heads, num_devices, exchange_axes), out), weights

    pair_spec = VideoTextPair(PartitionSpec(*placement), PartitionSpec(*placement))
    specs = (pair_spec, pair_spec, pair_spec, PartitionSpec(placement.batch))
    return shard_map_with_weights(partitioner, attend, specs, pair_spec)(q, k, v, text_lengths)


def _join(x: VideoTextPair, length: int, window: Any) -> Float[Array, "B _L N D"]:
    """Return the first `length` tokens of a video, followed by all tokens of its text. If the text is written into the
    video's padding, padding may follow. With a window, no padding may follow.

    The heads are merged into the channels before. With an axis of heads, a TPU would copy the arrays once more.
    """
    heads = x.video.shape[2]
    video, text = (stream.reshape(*stream.shape[:2], -1) for stream in x)
    if window is None and length + text.shape[1] <= video.shape[1]:
        joint = jax.lax.dynamic_update_slice_in_dim(video, text, length, axis=1)
    else:
        joint = jnp.concatenate([video[:, :length], text], axis=1)
    return joint.reshape(*joint.shape[:2], heads, -1)


def _split(x: Float[Array, "B _L N D"], length: int, video_length: int, text_length: int) -> VideoTextPair:
    """Invert `_join` for a video of `video_length` tokens, of which the first `length` are real. The values of its
    padding are finite, and do not matter."""
    heads, joint = x.shape[2], x.reshape(*x.shape[:2], -1)
    text = joint[:, length : length + text_length]
    video = joint if joint.shape[1] == video_length else pad_to(joint[:, :length], 1, video_length)
    return VideoTextPair(*(stream.reshape(*stream.shape[:2], heads, -1) for stream in (video, text)))
