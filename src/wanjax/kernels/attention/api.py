# SPDX-License-Identifier: Apache-2.0
"""The public functions of attention: choose the implementation that fits a call, and call it."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from wanjax.errors import UnsupportedError, WanjaxError
from wanjax.figures import pluralize
from wanjax.kernels.admitted import is_admitted
from wanjax.kernels.attention import (
    joint,
    kv_cache,
    sharded,
    sparse_linear,
    sparse_linear_chunked,
    sparse_linear_tpu,
)
from wanjax.kernels.attention.config import IMPLEMENTATIONS, AttentionConfig
from wanjax.kernels.attention.implementation import Implementation
from wanjax.kernels.attention.joint import VideoTextPair
from wanjax.kernels.attention.kv_cache import CacheSlot, KVCache
from wanjax.kernels.attention.masks import Window, length_mask
from wanjax.kernels.attention.merge import merge_by_log_sum_exp
from wanjax.kernels.attention.radial import Radial
from wanjax.kernels.attention.ring_weights import ShardedMatrix
from wanjax.kernels.attention.sparse_linear import Projection, SparseLinearAttentionConfig
from wanjax.kernels.target import target
from wanjax.sharding import current_partitioner

SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")


class ImplementationChoice(NamedTuple):
    """An implementation, and the reason for choosing it."""

    name: str
    reason: str


# For each platform: if the user names no implementation, the first one that supports the call is used.
FALLBACK_CHOICES = (ImplementationChoice("chunked", "its memory does not grow with queries times keys"),)
PREFERRED_CHOICES: dict[str, tuple[ImplementationChoice, ...]] = {
    "gpu": (ImplementationChoice("cudnn", "it is NVIDIA's own implementation"), *FALLBACK_CHOICES),
    "tpu": (
        ImplementationChoice("flash_tpu", "it is the fastest by the compiler's estimates"),
        ImplementationChoice("splash", "it is JAX's own implementation"),
        *FALLBACK_CHOICES,
    ),
}

SPARSE_LINEAR_IMPLEMENTATIONS = {
    "reference": sparse_linear.attention,
    "chunked": sparse_linear_chunked.attention,
    "tpu": sparse_linear_tpu.attention,
}


@jax.named_scope("attention")
def attention(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    *,
    kv_length: int | None = None,
    key_mask: Bool[Array, "B S"] | None = None,
    window: int | Window | Radial | None = None,
    scale: float | None = None,
    bias: Float[Array, "..."] | None = None,
    implementation: str | AttentionConfig | None = None,
    config: Any = None,
) -> Float[Array, "B L N D"]:
    """Return softmax(scale · q kᵀ + bias) v in the dtype of the operands; softmax and sums are in float32.

    Within `sharding.use_partitioner`, the devices of the mesh share the computation.

    Args:
        q: Queries.
        k: Keys. If k has fewer heads than q, N / K consecutive heads of q share a head of k.
        v: Values, one for each key.
        kv_length: The first `kv_length` keys are valid. None means that all keys are valid.
        key_mask: True for valid keys. A query without a valid key gives zeros.
        window: A pair (left, right), or a `Radial` mask. A query attends to at most `left` keys before its own position
            and `right` keys after it. A single number sets both; None for a side means no bound.
        scale: The factor of the logits, 1 / √D by default.
        bias: Added to the logits; float32, broadcasts to [B N L S].
        implementation: An `AttentionConfig`, or its text. Its tiles and its window apply if the call has no `config`
            and no `window`. If it names an implementation, there is no fallback to another one. With None, the
            platform and the shapes determine the implementation, as `choose_implementation` shows.
        config: The configuration of the implementation. Each implementation has its own type.

    Raises:
        WanjaxError: Operands do not fit each other.
        UnsupportedError: The implementation does not support the call.
    """
    attn = _parse_dense(implementation)
    options = _checked_options(attn, q, k, v, key_mask, window, scale, bias, config)
    mask, window, bias = (options.pop(name) for name in ("key_mask", "window", "bias"))
    kv_length = k.shape[1] if kv_length is None else kv_length
    if not 1 <= kv_length <= k.shape[1]:
        raise WanjaxError(
            f"kv_length must be from 1 to {k.shape[1]} for {pluralize(k.shape[1], 'key')}, got {kv_length}"
        )
    if kv_length < k.shape[1] and bias is not None and bias.shape[3] > 1:
        bias = bias[..., :kv_length]
    on_one_device = (_attend_on_one_device, _attend_with_carry_on_one_device, _gradient_on_one_device)
    kernels = sharded.AttentionKernels(
        *(partial(function, name=attn.implementation, **options) for function in on_one_device)
    )
    masks = {"kv_length": kv_length, "key_mask": mask, "window": window, "bias": bias}
    if current_partitioner().is_single_device:
        return kernels.attend(q, k, v, **masks)
    return sharded.attention(kernels, current_partitioner(), q, k, v, **masks)


def kernel_with_lse(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    implementation: str | AttentionConfig | None = None,
) -> Callable[..., Any]:
    """Return the function (q, k, v) of dense attention on one device, for operands of these dtypes and head size.

    The function returns the result, and the log-sum-exp of each query. Log-sum-exps are needed to merge the attention
    to several sets of keys.
    """
    attn = AttentionConfig.of(implementation)
    if not attn.is_dense:
        raise UnsupportedError(
            "attention with log-sum-exps has no window and no sparse mask: use auto, or a name without options"
        )
    options = _checked_options(attn, q, k, v)
    return partial(_attend_on_one_device, name=attn.implementation, return_lse=True, **options)


@jax.named_scope("attention")
def attention_to_cache(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
    cache: KVCache,
    slot: CacheSlot,
    *,
    length: int,
    implementation: str | AttentionConfig | None = None,
) -> tuple[Float[Array, "B L N D"], KVCache]:
    """Compute the attention of a chunk of tokens to itself and to a cache. Also return the chunk's keys and values.

    The first `length` tokens of the chunk are real. `kv_cache.insert_chunk` writes the returned keys and values into
    the cache. The other keywords and the errors are those of `attention`. Windows and radial masks are not supported.
    """
    attn = AttentionConfig.of(implementation)
    if not attn.is_dense:
        raise UnsupportedError(
            "attention to cached keys has no window and no sparse mask: use auto, or a name without options"
        )
    options = _checked_options(attn, q, k, v)
    return kv_cache.attention(
        partial(_attend_on_one_device, name=attn.implementation, **options), q, k, v, cache, slot, length
    )


@jax.named_scope("attention")
def joint_attention(
    q: VideoTextPair,
    k: VideoTextPair,
    v: VideoTextPair,
    *,
    length: int,
    text_lengths: Int32[Array, " B"],
    window: Any = None,
    implementation: str | AttentionConfig | None,
) -> VideoTextPair:
    """Compute the joint attention of a video and its text. The first `length` tokens of the video and the first
    `text_lengths` tokens of the text are valid.

    The text follows the video in one sequence, to which `window` applies. The other keywords and the errors are those
    of `attention`.
    """
    attn = _parse_dense(implementation)
    options = _checked_options(attn, q.video, k.video, v.video, window=window)
    window = options.pop("window")
    kernel = partial(_attend_on_one_device, name=attn.implementation, **options)
    return joint.attention(kernel, q, k, v, length=length, text_lengths=text_lengths, window=window)


@jax.named_scope("attention")
def sparse_linear_attention(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    projection: Projection,
    sparse: SparseLinearAttentionConfig,
    *,
    kv_length: int | None = None,
    implementation: str | None = None,
    config: sparse_linear_tpu.Config | None = None,
) -> Float[Array, "B L N D"]:
    """Return sparse-linear self-attention of the first `kv_length` tokens, in the dtype of the operands.

    The module `sparse_linear` has the definition. Within `sharding.use_partitioner` the heads are sharded over all
    devices.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        projection: Weights of the linear part's projection.
        sparse: The fraction of blocks to keep, and their sizes.
        kv_length: The number of valid tokens. The valid tokens come first; None means all. The results of other tokens
            are zeros.
        implementation: A name in `SPARSE_LINEAR_IMPLEMENTATIONS`. None chooses `tpu` if it supports the call, else
            `chunked`.
        config: The configuration of `tpu`.

    Raises:
        WanjaxError: Operands do not fit each other.
        UnsupportedError: The named implementation does not support the call.
    """
    if q.shape != k.shape:
        raise WanjaxError(f"sparse-linear attention of {list(q.shape)} to {list(k.shape)}: give equal shapes")
    _checked_options(AttentionConfig(), q, k, v)
    head_dim, kv_length = q.shape[3], q.shape[1] if kv_length is None else kv_length
    if projection.kernel.shape != (head_dim, head_dim) or projection.bias.shape != (head_dim,):
        raise WanjaxError(
            f"a projection {list(projection.kernel.shape)} of heads of {head_dim}: give [{head_dim}, {head_dim}]"
        )
    if not 1 <= kv_length <= q.shape[1]:
        raise WanjaxError(f"kv_length is {kv_length} for {pluralize(q.shape[1], 'token')}: give 1 to {q.shape[1]}")
    reason = sparse_linear_tpu.unsupported(q, sparse, kv_length, config)
    if implementation == "tpu" and reason is not None:
        raise UnsupportedError(reason)
    is_tpu_admitted = is_admitted("sparse_linear_tpu")
    name = implementation or ("tpu" if reason is None and is_tpu_admitted else "chunked")
    if name not in SPARSE_LINEAR_IMPLEMENTATIONS:
        raise WanjaxError(
            f"no sparse-linear attention is named {name!r}: there are {', '.join(SPARSE_LINEAR_IMPLEMENTATIONS)}"
        )
    if implementation not in (None, "tpu") and config is not None:
        raise UnsupportedError(f"the {name} sparse-linear attention has no config: only tpu has one")
    options = {"sparse": sparse, "kv_length": kv_length} | ({"config": config} if name == "tpu" else {})
    kernel = partial(SPARSE_LINEAR_IMPLEMENTATIONS[name], **options)
    return sharded.attention_by_heads(kernel, current_partitioner(), q, k, v, projection)


def _parse_dense(implementation: str | AttentionConfig | None) -> AttentionConfig:
    """Parse a config. Raises UnsupportedError for sparse-linear attention, which needs a learned projection."""
    attn = AttentionConfig.of(implementation)
    if attn.sparse:
        raise UnsupportedError("sparse-linear attention has weights: call `sparse_linear_attention`")
    return attn


def _attend_on_one_device(
    q,
    k,
    v,
    *,
    key_mask,
    name: str | None,
    kv_length: int | Array | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Compute attention on the device that holds the operands. Keys after the first `kv_length` are padding."""
    options |= {"return_lse": return_lse}
    implementation = _implementation_for(q, k, v, name, key_mask=key_mask, **options)
    per_example = isinstance(kv_length, Array)
    if kv_length is not None and (per_example or kv_length < k.shape[1]):
        if implementation.takes_kv_length and key_mask is None:  # a slice of the keys would be a copy
            options |= {"kv_length": kv_length}
        elif per_example:
            key_mask = (
                length_mask(kv_length, k.shape[1])
                if key_mask is None
                else key_mask & length_mask(kv_length, k.shape[1])
            )
        else:
            k, v, key_mask = (x if x is None else x[:, :kv_length] for x in (k, v, key_mask))
    return implementation.attention(q, k, v, key_mask=key_mask, **options)


def _attend_with_carry_on_one_device(
    q,
    k,
    v,
    carry: Any,
    *,
    is_last: bool,
    key_mask,
    name: str | None,
    kv_length: Array | None = None,
    matrices: tuple[ShardedMatrix, ...] = (),
    **options: Any,
) -> Any:
    """Add keys to the softmax sums in `carry`, as `sharded.AttentionKernels.attend_with_carry` describes."""
    all_options = {"window": None, "bias": None, "return_lse": True, **options}
    implementation = _implementation_for(q, k, v, name, key_mask=key_mask, **all_options)
    is_tpu_admitted = name is not None or is_admitted("flash_tpu_carried")
    if (
        is_tpu_admitted
        and implementation.attention_with_carry is not None
        and implementation.supports_carry(options["config"])
    ):
        return implementation.attention_with_carry(
            q, k, v, carry, is_last=is_last, key_mask=key_mask, kv_length=kv_length, matrices=matrices, **options
        )
    result = _attend_on_one_device(q, k, v, key_mask=key_mask, name=name, kv_length=kv_length, **all_options)
    result = result if carry is None else merge_by_log_sum_exp(carry, result)
    return (result[0].astype(q.dtype), result[1], *(matrix.concatenate() for matrix in matrices)) if is_last else result


def _gradient_on_one_device(
    q, k, v, g, lse, delta, *, key_mask, name: str | None, kv_length: Array | None = None, **options: Any
) -> Any:
    """Compute the gradients of q, k and v, for attention of all queries to the same keys."""
    options |= {"window": None}
    implementation = _implementation_for(q, k, v, name, key_mask=key_mask, bias=None, **options, return_lse=True)
    return implementation.gradient(q, k, v, g, lse, delta, key_mask=key_mask, kv_length=kv_length, **options)


def choose_implementation(
    q: jax.Array | jax.ShapeDtypeStruct,
    k: jax.Array | jax.ShapeDtypeStruct,
    v: jax.Array | jax.ShapeDtypeStruct,
    *,
    key_mask: jax.Array | None = None,
    window: int | Window | Radial | None = None,
    scale: float | None = None,
    bias: jax.Array | None = None,
    implementation: str | AttentionConfig | None = None,
    config: Any = None,
    return_lse: bool = False,
) -> ImplementationChoice:
    """Return the implementation that `attention` uses for these arguments, and the reason for the choice.

    The arguments and errors are those of `attention`. Shapes (`jax.ShapeDtypeStruct`) may replace the arrays. With
    `return_lse`, the implementation must also return the log-sum-exp of each query, as ring attention needs.
    `kernels.target.target` gives the platform.
    """
    attn = AttentionConfig.of(implementation)
    options = _checked_options(attn, q, k, v, key_mask, window, scale, bias, config)
    return _first_supported(q, k, v, attn.implementation, **options, return_lse=return_lse)


def _implementation_for(q, k, v, name: str | None, **options: Any) -> Implementation:
    """Return the implementation that `_first_supported` chooses."""
    return IMPLEMENTATIONS[_first_supported(q, k, v, name, **options).name]


def _first_supported(q, k, v, name: str | None, **options: Any) -> ImplementationChoice:
    """Choose an implementation. The options have the form that the functions of `Implementation` take."""
    preferred = PREFERRED_CHOICES.get(target(q).platform, FALLBACK_CHOICES)
    reasons = []
    for candidate in preferred if name is None else (ImplementationChoice(name, "it was named"),):
        reason = IMPLEMENTATIONS[candidate.name].unsupported(q, k, v, **options)
        if reason is None and name is None:
            reason = _rejection_reason(candidate.name, options["window"])
        if reason is None:
            return ImplementationChoice(candidate.name, "; ".join([candidate.reason, *reasons]))
        reasons.append(reason)
    raise UnsupportedError("; ".join(reasons))


def _rejection_reason(name: str, window: Any) -> str | None:
    """Return the reason against an implementation whose kernel failed its trials on this chip, or None."""
    kernel = f"{name}_radial" if isinstance(window, Radial) else name
    return None if is_admitted(kernel) else f"{kernel} was tried on this chip and failed"


def _checked_options(
    attn: AttentionConfig, q, k, v, key_mask=None, window=None, scale=None, bias=None, config=None
) -> dict[str, Any]:
    """Return the options in the form that the functions of `Implementation` take. Raises WanjaxError if the operands do
    not fit each other."""
    if not (q.ndim == k.ndim == 4 and k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]):
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise WanjaxError(f"attention of q, k, v shaped {shapes}: give q [B L N D], k [B S K D] and v [B S K D]")
    if 0 in q.shape + k.shape:
        raise WanjaxError(f"attention of q {list(q.shape)} to k {list(k.shape)}: each size must be at least 1")
    if q.shape[2] % k.shape[2]:
        raise WanjaxError(f"{q.shape[2]} heads cannot be shared among {k.shape[2]} of k and v: give a divisor")
    if not q.dtype == k.dtype == v.dtype or q.dtype.name not in SUPPORTED_DTYPES:
        dtypes = ", ".join(str(x.dtype) for x in (q, k, v))
        raise WanjaxError(f"attention of q, k, v in {dtypes}: give one of {', '.join(SUPPORTED_DTYPES)} for all")
    if key_mask is not None and (key_mask.shape != (k.shape[0], k.shape[1]) or key_mask.dtype != bool):
        raise WanjaxError(f"a key mask {key_mask.dtype}{list(key_mask.shape)}: give bool{[k.shape[0], k.shape[1]]}")
    score_shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if bias is not None and (bias.dtype != jnp.float32 or not _broadcasts(bias.shape, score_shape)):
        raise WanjaxError(f"a bias {bias.dtype}{list(bias.shape)}: give float32 that broadcasts to {list(score_shape)}")
    window = attn.window if window is None else window
    window = (window, window) if isinstance(window, int) else window
    if isinstance(window, tuple) and any(side is not None and side < 0 for side in window):
        raise WanjaxError(f"the window {window} has a negative number: give 0, a number of keys, or None")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return {"key_mask": key_mask, "window": window, "scale": scale, "bias": bias, "config": config or attn.config}


def _broadcasts(shape: tuple[int, ...], target_shape: tuple[int, ...]) -> bool:
    return len(shape) == len(target_shape) and all(
        size in (1, target_size) for size, target_size in zip(shape, target_shape, strict=True)
    )
