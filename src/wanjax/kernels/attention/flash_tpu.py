# SPDX-License-Identifier: Apache-2.0
"""Exact attention on TPUs: a Pallas kernel whose fast path needs no running maximum.

Scores have the shape keys × queries, exponents are in base 2, and sums are in float32 (Milakov and Gimelshein, Online
normalizer calculation for softmax, 2018; Dao et al., FlashAttention, 2022).

Softmax does not change when an offset is subtracted from all logits of a row. In floating point, any offset within 60
powers of two of the row's maximum gives the same result. So the first keys of a row determine its offset. The other
keys need no maximum and no rescaling, and no block waits for another block.

If a later logit is out of this range, the row's sum of weights becomes very large. The kernel then restores the state
from before the block of keys, and repeats the block by the running-max path, which first raises the offset to the
block's maximum. All later blocks of this head use the running-max path at once. Keys are not padded.
"""

import math
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from wanjax.errors import UnsupportedError
from wanjax.kernels.admitted import is_admitted
from wanjax.kernels.attention import chunked, flash_gradient, flash_int8
from wanjax.kernels.attention.blocks import from_rows, mean_logits, to_rows
from wanjax.kernels.attention.flash_kernel import KernelSizes, PartialSums, call
from wanjax.kernels.attention.flash_tiles import (
    COMPILER_VMEM_BYTES,
    INT8_REGISTER_ROWS,
    REGISTER_ROWS,
    UNBOUNDED_SIDE,
    Config,
    Int8Config,
    default_config,
    sparse_config,
)
from wanjax.kernels.attention.gradient import from_result
from wanjax.kernels.attention.implementation import INTERPRETER_ADVICE
from wanjax.kernels.attention.masks import Window, divide_or_zero, length_mask, valid_keys_first
from wanjax.kernels.attention.radial import Radial, kernel_lists
from wanjax.kernels.attention.ring_weights import ShardedMatrix
from wanjax.kernels.target import vmem_bytes
from wanjax.sharding import pad_to

HEAD_DIMS = (64, 128)
DTYPES = ("float32", "bfloat16")


def unsupported(q, k, v, *, key_mask, window, scale, bias, config, return_lse) -> str | None:
    """Return the reason why this call is not supported, or None."""
    head_dim, vmem_capacity = q.shape[3], vmem_bytes()
    if config is not None and not isinstance(config, Config | Int8Config):
        return f"flash_tpu must be configured by a flash_tpu.Config, not by {type(config).__name__}"
    if vmem_capacity is None and not (config and config.interpret):
        if config is not None:
            return (
                "flash_tpu and its options (block_q, block_kv, block_kv_compute, center_keys and qk) are for TPUs: "
                "leave them out here"
            )
        return INTERPRETER_ADVICE.format("flash_tpu", "flash_tpu")
    if head_dim not in HEAD_DIMS:
        return f"flash_tpu does not support a head size of {head_dim}: it supports {' and '.join(map(str, HEAD_DIMS))}"
    if q.dtype.name not in DTYPES:
        return f"flash_tpu does not support {q.dtype.name}: it supports {' and '.join(DTYPES)}"
    if bias is not None:
        return "flash_tpu takes no bias: it supports a key mask or a window"
    if key_mask is not None and window is not None:
        return "flash_tpu takes a key mask or a window, not both"
    if isinstance(config, Int8Config):
        reason = flash_int8.unsupported(q, key_mask=key_mask, window=window, interpret=config.interpret)
        if reason is not None:
            return reason
    if vmem_capacity is None:
        return None
    ragged = key_mask is not None or window is not None
    tiles = _resolve_config(config, window, (head_dim, q.shape[1], k.shape[1], q.dtype.name), ragged)
    needed = tiles.vmem_bytes(head_dim, q.dtype.itemsize) + COMPILER_VMEM_BYTES
    if needed > vmem_capacity:
        advice = "a chip with more VMEM" if vmem_capacity < COMPILER_VMEM_BYTES else "smaller tiles"
        return (
            f"flash_tpu's tiles need {needed >> 20} MiB of VMEM, and the chip has {vmem_capacity >> 20}: use {advice}"
        )
    return None


def attention(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    *,
    key_mask: Bool[Array, "B S"] | None,
    window: Window | Radial | None,
    scale: float,
    bias: None,
    config: Config | Int8Config | None,
    return_lse: bool = False,
    kv_length: int | Int32[Array, " B"] | None = None,
) -> Float[Array, "B L N D"] | tuple[Float[Array, "B L N D"], Float32[Array, "B L N"]]:
    """Compute the same as the reference. The gradient computes the scores again, as in `chunked`.

    Only the first `kv_length` keys are valid; None means all. `kv_length` is one number, or one number for each
    example. Set either `kv_length` or `key_mask`. With a radial mask, all tokens of the video must be valid.
    """
    per_example = isinstance(kv_length, Array)
    options = {"window": window, "scale": scale, "config": config, "kv_length": None if per_example else kv_length}
    masks = key_mask, kv_length if per_example else None
    out, lse = from_result(partial(_attention, **options), partial(_gradient, **options), q, k, v, masks)
    return (out, lse) if return_lse else out


def supports_carry(config: Config | Int8Config | None) -> bool:
    """Return whether `attention_with_carry` supports the config. Centered keys are not supported, because each call
    would subtract another mean."""
    return config is None or not (isinstance(config, Int8Config) or config.center_keys)


def attention_with_carry(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    carry: PartialSums | None,
    *,
    is_last: bool,
    key_mask: Bool[Array, "B S"] | None,
    scale: float,
    config: Config | None,
    kv_length: Int32[Array, " B"] | None = None,
    matrices: tuple[ShardedMatrix, ...] = (),
) -> Any:
    """Online softmax: update the running sums of earlier keys with these keys and values.

    Args:
        q: The queries.
        k: The next keys.
        v: The values of these keys.
        carry: The running sums, which the call for the earlier keys returned; None in the first call.
        is_last: Whether these are the last keys.
        key_mask: True for valid keys.
        scale: The factor of the logits.
        config: Tiles that `supports_carry` accepts.
        kv_length: The number of valid keys of each example.
        matrices: Sharded weights. The call for the last keys joins their shards.

    Returns:
        The updated sums. If `is_last` is True: the result of attention, its log-sum-exps and the joined weights.
    """
    options = {"window": None, "scale": scale, "config": config, "kv_length": None}
    kernel_matrices = matrices if _can_kernel_join(matrices, config) else ()
    results = _attention(
        q, k, v, (key_mask, kv_length), **options, carry=carry, return_sums=not is_last, matrices=kernel_matrices
    )
    if not is_last:
        return results
    out, lse, *joined = results
    return out, lse, *(joined if kernel_matrices else [matrix.concatenate() for matrix in matrices])


def _can_kernel_join(matrices: tuple[ShardedMatrix, ...], config: Config | None) -> bool:
    """Return whether the kernel can join the shards. The chip must have one core for each device, and shards must
    consist of whole tiles."""
    if config is not None and config.interpret:
        return True
    is_possible = not pltpu.get_tpu_info().is_megacore and all(matrix.is_aligned() for matrix in matrices)
    return is_possible and is_admitted("flash_tpu_joining")


def gradient(
    q,
    k,
    v,
    g,
    lse,
    delta,
    *,
    key_mask,
    window: Window | Radial | None,
    scale: float,
    config: Config | Int8Config | None,
    kv_length=None,
) -> tuple[Array, Array, Array]:
    """Return the gradients of q, k and v. The arguments are those of `chunked.gradient`."""
    options = {"window": window, "scale": scale, "config": config}
    return _gradient(q, k, v, g, lse, delta, (key_mask, kv_length), **options, kv_length=None)


def _gradient(
    q, k, v, g, lse, delta, masks, *, window, scale: float, config: Config | Int8Config | None, kv_length: int | None
):
    """Return the gradients of q, k and v. If all queries attend to the same first keys, the kernel computes the
    gradients, otherwise `chunked` does."""
    (key_mask, kv_lengths), (batch, num_queries, heads, head_dim) = masks, q.shape
    kv_length = k.shape[1] if kv_length is None else kv_length
    if isinstance(config, Int8Config):
        raise UnsupportedError("qk=int8 has no gradient: train with --attention auto")
    interpret, gradient_config = config is not None and config.interpret, None
    if key_mask is None and window is None and k.shape[2] == heads and is_admitted("flash_tpu_gradient"):
        vmem_capacity = 2 * COMPILER_VMEM_BYTES if interpret else vmem_bytes() or 0
        gradient_config = flash_gradient.choose_config(
            num_queries, kv_length, head_dim, q.dtype.itemsize, vmem_capacity, interpret=interpret
        )
    if gradient_config is not None:
        kv_lengths = jnp.full((batch,), kv_length, jnp.int32) if kv_lengths is None else kv_lengths
        return flash_gradient.gradient(
            q, k, v, g, lse, delta, kv_lengths, scale=scale, max_keys=kv_length, config=gradient_config
        )
    options = {"key_mask": key_mask, "window": window, "scale": scale, "config": None, "kv_length": kv_lengths}
    dq, dk, dv = chunked.gradient(q, k[:, :kv_length], v[:, :kv_length], g, lse, delta, **options)
    return dq, pad_to(dk, 1, k.shape[1]), pad_to(dv, 1, k.shape[1])


def _attention(
    q,
    k,
    v,
    masks,
    *,
    window,
    scale,
    config,
    kv_length,
    carry: PartialSums | None = None,
    return_sums=False,
    matrices=(),
) -> Any:
    (key_mask, kv_lengths), (batch, num_queries, heads, head_dim) = masks, q.shape
    kv_heads, per_example = k.shape[2], kv_lengths is not None
    kv_length = k.shape[1] if kv_length is None else kv_length
    if isinstance(config, Int8Config):
        if per_example:
            raise UnsupportedError("qk=int8 takes no number of keys for each example: use --attention auto")
        tiles = _resolve_config(config, None, (head_dim, num_queries, kv_length, q.dtype.name), False)
        return flash_int8.attention(q, k, v, scale=scale, tiles=tiles, kv_length=kv_length)
    kv_lengths = kv_lengths if per_example else jnp.full((batch,), kv_length, jnp.int32)
    radial = window if isinstance(window, Radial) else None
    ragged = radial is None and (key_mask is not None or per_example or window is not None)
    config = _resolve_config(config, window, (head_dim, num_queries, kv_length, q.dtype.name), ragged)
    key_mean = None
    if config.center_keys:
        k, key_mean = _center_keys(k, length_mask(kv_lengths, k.shape[1]) if per_example else key_mask)
    if key_mask is not None:
        kv_lengths, (k, v) = valid_keys_first(key_mask, k, v)  # the kernel skips blocks of masked keys
    scalars = (kv_lengths,) if radial is None else _list_scalars(radial, num_queries, kv_length, config, kv_lengths)
    sizes = KernelSizes(
        num_queries=num_queries,
        num_keys=kv_length,
        heads=heads,
        block_q=config.block_q,
        block_kv=config.block_kv,
        block_kv_compute=config.block_kv_compute,
        step_kv=radial.block_kv if radial else config.masked_step_kv if ragged else config.running_max_step_kv,
        q_per_list=radial.block_q if radial else config.block_q,
        ragged=ragged,
        window=_window_sides(window),
        q_scale=scale * math.log2(math.e),
        has_carry=carry is not None,
        return_sums=return_sums,
    )
    results = call(
        scalars,
        tuple(map(to_rows, (q, k, v))),
        carry,
        sizes=sizes,
        kv_heads=kv_heads,
        head_dim=head_dim,
        config=config,
        matrices=matrices,
    )
    if isinstance(results, PartialSums):
        return results
    out, lse, *joined = results
    out = from_rows(out, heads, head_dim)
    lse = jnp.moveaxis(lse.reshape(batch, heads, num_queries), 1, 2)
    if key_mean is not None:
        lse += mean_logits(q, key_mean, scale)
    return out, lse, *joined


def _window_sides(window: Window | Radial | None) -> tuple[int, int]:
    sides = (None, None) if window is None or isinstance(window, Radial) else window
    left, right = (UNBOUNDED_SIDE if side is None else min(side, UNBOUNDED_SIDE) for side in sides)
    return left, right


def _resolve_config(
    config: Config | Int8Config | None, window: Window | Radial | None, shape: tuple[int, int, int, str], ragged: bool
) -> Config:
    """Return the tiles in `config`, or the default tiles for a `shape` of (head_dim, queries, keys, dtype)."""
    vmem_capacity, (head_dim, num_queries, num_keys, dtype) = vmem_bytes() or 0, shape
    unit_kv = REGISTER_ROWS
    if isinstance(config, Int8Config):
        config, unit_kv = config.tiles, INT8_REGISTER_ROWS
    if isinstance(window, Radial):
        return sparse_config(window, config, vmem_capacity, head_dim, num_keys, dtype)
    return config or default_config(vmem_capacity, head_dim, num_queries, num_keys, dtype, ragged, unit_kv)


def _list_scalars(
    mask: Radial, num_queries: int, num_keys: int, config: Config, kv_lengths: Int32[Array, " B"]
) -> tuple[Array, ...]:
    """Return the scalars of `sparse_kernel`: the lists of `radial.kernel_lists` without the blocks after `kv_lengths`.

    The lists are shortened at the end. This is correct because all queries see a block of text, unless the block is
    padding, which no query sees.
    """
    block_kv = config.block_kv
    list_start, list_length, visits_tail, block_start = kernel_lists(
        mask, num_queries, num_keys, block_kv, config.block_q // mask.block_q
    )
    first_block = np.arange(0, num_keys, block_kv) // mask.block_kv
    end_block = np.minimum(first_block + block_kv // mask.block_kv, num_keys // mask.block_kv)
    end_of_full_blocks = kv_lengths[:, None] // mask.block_kv
    num_past_end = jnp.maximum(end_block[None] - jnp.maximum(end_of_full_blocks, first_block[None]), 0)  # [B, steps]
    num_visited = jnp.maximum(list_length.reshape(1, -1, len(first_block)) - num_past_end[:, None], 0)
    return tuple(map(jnp.asarray, (list_start, num_visited.reshape(-1), visits_tail, block_start, kv_lengths)))


def _center_keys(
    k: Float[Array, "B S K D"], key_mask: Bool[Array, "B S"] | None
) -> tuple[Array, Float32[Array, "B K D"]]:
    """Subtract the mean of the valid keys from all keys. Return the centered keys and the mean."""
    k32 = k.astype(jnp.float32)
    valid = jnp.ones(k.shape[:2], bool) if key_mask is None else key_mask
    mean = divide_or_zero(
        jnp.where(valid[:, :, None, None], k32, 0.0).sum(axis=1),
        valid.sum(axis=1, dtype=jnp.float32)[:, None, None],
    )
    return (k32 - mean[:, None]).astype(k.dtype), mean
