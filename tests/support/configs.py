# SPDX-License-Identifier: Apache-2.0
"""Configs of small networks."""

from dataclasses import replace

from wanjax.models.t5 import T5Config
from wanjax.models.wan.config import T2V_14B

TRANSFORMER = replace(
    T2V_14B, layers=1, heads=4, head_dim=24, mlp_dim=160, channels_in=6, text_width=40, frequency_dim=32
)
UMT5 = T5Config(
    vocab_size=80,
    width=48,
    heads=3,
    head_dim=16,
    mlp_dim=96,
    layers=2,
    buckets=8,
    max_distance=20,
    eps=1e-6,
    shared_bias=False,
)
