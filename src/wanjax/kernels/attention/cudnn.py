# SPDX-License-Identifier: Apache-2.0
"""Attention by NVIDIA's cuDNN, through `jax.nn.dot_product_attention`, on GPUs from Ampere on.

cuDNN takes a mask only as a full score matrix. To avoid this matrix, the valid keys are moved to the front, and cuDNN
gets the number of valid keys. Attention does not depend on the order of the keys.
"""

import re

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32

from wanjax.kernels.attention.masks import Window, valid_keys_first
from wanjax.kernels.target import target
from wanjax.sharding import current_partitioner

MAX_HEAD_DIM = 128
BEFORE_AMPERE = re.compile(r"Tesla|Quadro|TITAN|GTX|RTX 20\d\d|\bT\d+\b")
"""Words in NVIDIA's names of cards whose compute capability is below 8.0. No later card has one of these words in its
name."""


def unsupported(q, k, v, *, key_mask, window, scale, bias, config, return_lse) -> str | None:
    """Return the reason why this call is not supported, or None."""
    device = target(q)
    if device.platform == "gpu" and BEFORE_AMPERE.search(device.device_kind):
        return f"cudnn's attention needs an Ampere card or a later card, and the card is {device.device_kind}"
    if device.platform != "gpu" or "NVIDIA" not in device.device_kind:
        return f"cudnn runs on NVIDIA's cards, and the device is {device.device_kind}: choose chunked or auto here"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cudnn takes bfloat16 and float16, not {q.dtype}"
    if q.shape[3] % 8 or q.shape[3] > MAX_HEAD_DIM:
        return f"cudnn supports head sizes that are a multiple of 8 up to {MAX_HEAD_DIM}, not {q.shape[3]}"
    if window is not None:
        return f"cudnn cannot compute a two-sided window such as {window}"
    if bias is not None:
        return "cudnn would round a bias to the operands' dtype"
    if return_lse:
        return "cudnn returns the log-sum-exp in the operands' dtype, which is too coarse to merge parts"
    if config is not None:
        return f"cudnn has no configuration: {type(config).__name__} belongs to another implementation"
    return None


def attention(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    *,
    key_mask: Bool[Array, "B S"] | None,
    window: Window | None,
    scale: float,
    bias: Float32[Array, "..."] | None,
    config: None,
    return_lse: bool = False,
) -> Float[Array, "B L N D"]:
    """Compute the same as the reference."""
    num_keys = None
    if key_mask is not None:
        num_keys, (k, v) = valid_keys_first(key_mask, k, v)
    lengths = None if num_keys is None else jnp.maximum(num_keys, 1)

    def call(q, k, v, lengths):
        with jax.numpy_dtype_promotion("standard"):  # JAX itself mixes dtypes here
            return jax.nn.dot_product_attention(
                q, k, v, scale=scale, key_value_seq_lengths=lengths, implementation="cudnn"
            )

    partitioner = current_partitioner()
    if partitioner.is_single_device and isinstance(partitioner.mesh, AbstractMesh) and partitioner.device is not None:
        # if no device is present, JAX lowers cuDNN's call only if all axes of the mesh are manual
        specs = PartitionSpec()
        call = jax.shard_map(call, mesh=partitioner.mesh, in_specs=specs, out_specs=specs, check_vma=False)
    out = call(q, k, v, lengths)
    return out if num_keys is None else jnp.where(num_keys[:, None, None, None] > 0, out, jnp.zeros_like(out))
