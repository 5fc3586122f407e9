# SPDX-License-Identifier: Apache-2.0
"""The trials of the hand-written kernels in this folder, and the list of all kernels with trials.

The trials of the kernels in the subpackages are in modules named `trials` there.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from wanjax.kernels import normed_silu, rotary_heads
from wanjax.kernels.admission import Kernel, Trial
from wanjax.kernels.attention import trials
from wanjax.kernels.attention.trials import normal
from wanjax.kernels.quantized_matmul import trials as quantized_trials

BFLOAT16_TOLERANCE = 6e-3  # the largest error of a result that is rounded once to bfloat16
TOKEN_COUNTS = {"whole blocks": 512, "a ragged tail": 300}  # numbers of tokens, by the name of a trial


def _angles(num_tokens: int, pairs: int) -> tuple[jax.Array, jax.Array]:
    angles = normal(5, num_tokens, pairs, dtype="float32")
    return jnp.cos(angles), jnp.sin(angles)


def _rotary_trials() -> Iterator[Trial]:
    for name, tokens in TOKEN_COUNTS.items():
        x, inverse_rms = normal(0, 1, tokens, 512), jnp.abs(normal(1, 1, tokens, 1, dtype="float32"))
        operands = x, inverse_rms, normal(2, 512, dtype="float32"), *_angles(tokens, 64)
        for parts in (1, 2):
            run = partial(_jitted, partial(rotary_heads.call, parts=parts), operands)
            yield Trial(f"{name}, {parts} parts", run, partial(rotary_heads.reference, *operands), BFLOAT16_TOLERANCE)


def _head_rotary_trials() -> Iterator[Trial]:
    for size in (64, 128):
        scale, bias = (normal(seed, size, dtype="float32") for seed in (2, 3))
        for name, norm in (("a layer norm", (scale, bias)), ("an RMS norm", (scale, None))):
            operands = normal(0, 1, 300, 512), *norm, *_angles(300, size // 2)
            run = partial(_jitted, partial(rotary_heads.call_by_head, eps=1e-6, parts=2), operands)
            expected = partial(rotary_heads.reference_by_head, *operands, eps=1e-6)
            yield Trial(f"{name} of heads of {size}", run, expected, BFLOAT16_TOLERANCE)


def _pack_trials() -> Iterator[Trial]:
    for name, tokens in TOKEN_COUNTS.items():
        x = normal(0, 1, tokens, 512)
        yield Trial(name, partial(_jitted, partial(rotary_heads.pack, parts=2), (x,)), lambda x=x: x, 0.0)


def _join_trials() -> Iterator[Trial]:
    for name, tokens in TOKEN_COUNTS.items():
        parts = normal(0, 2, 1, tokens, 256)
        expected = partial(jnp.concatenate, [parts[0], parts[1]], axis=2)
        yield Trial(name, partial(_jitted, partial(rotary_heads.join, parts=2), (parts,)), expected, 0.0)


def _silu_trials() -> Iterator[Trial]:
    for name, (height, width) in {"whole blocks": (16, 16), "a ragged tail": (19, 21)}.items():
        x, gamma = normal(0, 1, 8, height, width, 192), normal(1, 192, dtype="float32")
        run = partial(_jitted, partial(normed_silu.call, dtype=jnp.dtype("bfloat16")), (x, gamma))
        yield Trial(name, run, partial(normed_silu.reference, x, gamma, "float32"), BFLOAT16_TOLERANCE)


def _jitted(call, operands: tuple, interpret: bool) -> jax.Array:
    return jax.jit(partial(call, interpret=interpret))(*operands)


_SHARED_MODULES = (__name__, "wanjax.kernels.attention.trials")
_ROTARY_MODULES, _SILU_MODULES = (
    ("wanjax.kernels.rotary_heads", *_SHARED_MODULES),
    ("wanjax.kernels.normed_silu", *_SHARED_MODULES),
)

KERNELS = (
    *trials.KERNELS,
    *quantized_trials.KERNELS,
    Kernel("normed_rotary", _ROTARY_MODULES, _rotary_trials),
    Kernel("head_normed_rotary", _ROTARY_MODULES, _head_rotary_trials),
    Kernel("heads_apart", _ROTARY_MODULES, _pack_trials),
    Kernel("heads_joined", _ROTARY_MODULES, _join_trials),
    Kernel("normed_silu", _SILU_MODULES, _silu_trials),
)
