# SPDX-License-Identifier: Apache-2.0
"""Attention as one function with several implementations."""

from wanjax.kernels.attention.api import (
    ImplementationChoice,
    attention,
    attention_to_cache,
    choose_implementation,
    joint_attention,
    kernel_with_lse,
    sparse_linear_attention,
)
from wanjax.kernels.attention.config import AUTO, IMPLEMENTATIONS, AttentionConfig
from wanjax.kernels.attention.joint import VideoTextPair
from wanjax.kernels.attention.radial import Radial
from wanjax.kernels.attention.sparse_linear import Projection, SparseLinearAttentionConfig

__all__ = [
    "AUTO",
    "IMPLEMENTATIONS",
    "AttentionConfig",
    "ImplementationChoice",
    "Projection",
    "Radial",
    "SparseLinearAttentionConfig",
    "VideoTextPair",
    "attention",
    "attention_to_cache",
    "choose_implementation",
    "joint_attention",
    "kernel_with_lse",
    "sparse_linear_attention",
]
