# SPDX-License-Identifier: Apache-2.0
"""Measure the error of attention with q kᵀ in int8, in Pallas' interpreter, relative to float64.

    python -m benchmarks.int8_attention_error [--queries N] [--keys N]

Each line of the table uses operands of a different distribution. Heads have a size of 128.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from wanjax.kernels.attention.flash_tiles import Config, Int8Config
from wanjax.kernels.attention.flash_tpu import attention

HEAD_DIM = 128
TILES = Config(512, 4096, 4096, interpret=True)
CONFIGS = {"bfloat16": TILES, "int8": Int8Config(TILES)}
CASES = {
    "logits of std 1": {"std": 1.0},
    "logits of std 3": {"std": 3.0},
    "logits of std 6": {"std": 6.0},
    "std 3, k has a mean of 15 in 4 channels": {"std": 3.0, "mean": 15.0},
    "std 3, 5 channels of q and k are 8 times as large": {"std": 3.0, "outlier": 8.0},
}


def operands(queries: int, keys: int, *, std: float, mean: float = 0.0, outlier: float = 1.0):
    """Return q, k and v in bfloat16, [1 L 1 D]; `std` is that of the logits."""
    random = np.random.default_rng(1)
    q, k, v = (random.normal(size=(length, HEAD_DIM)) for length in (queries, keys, keys))
    channels = random.permutation(HEAD_DIM)
    q[:, channels[:5]] *= outlier
    k[:, channels[:5]] *= outlier
    q *= std / ((q @ (k - k.mean(axis=0)).T).std() * HEAD_DIM**-0.5)
    k[:, channels[5:9]] += mean
    return tuple(jnp.asarray(x[None, :, None], jnp.bfloat16) for x in (q, k, v))


def exact_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> np.ndarray:
    """Return attention in float64."""
    q64, k64, v64 = (np.asarray(x, np.float64)[0, :, 0] for x in (q, k, v))
    logits = q64 @ k64.T * HEAD_DIM**-0.5
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return (weights @ v64 / weights.sum(axis=1, keepdims=True))[None, :, None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=512)
    parser.add_argument("--keys", type=int, default=8192)
    options = parser.parse_args()
    fixed_arguments = {"key_mask": None, "window": None, "bias": None, "scale": HEAD_DIM**-0.5}
    table = Table("", *CONFIGS, title=f"relative error, {options.queries:,} queries, {options.keys:,} keys")
    for name, case in CASES.items():
        q, k, v = operands(options.queries, options.keys, **case)
        expected, errors = exact_attention(q, k, v), []
        for config in CONFIGS.values():
            out = np.asarray(jax.jit(partial(attention, config=config, **fixed_arguments))(q, k, v), np.float64)
            errors.append(f"{np.linalg.norm(out - expected) / np.linalg.norm(expected):.4f}")
        table.add_row(name, *errors)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
