# SPDX-License-Identifier: Apache-2.0
"""Trials of the attention kernels on small shapes. `admission` runs them before a kernel is first used."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wanjax.kernels.admission import Kernel, Trial
from wanjax.kernels.attention import chunked, flash_tpu, merge, reference, sparse_linear, sparse_linear_tpu, splash
from wanjax.kernels.attention.flash_tiles import Config, Int8Config
from wanjax.kernels.attention.radial import Radial
from wanjax.kernels.attention.ring_weights import ShardedMatrix

HEAD_DIM = 128
TOLERANCE = 1e-2  # bfloat16 operands and weights give an error of about 3e-3
INT8_TOLERANCE = 3e-2  # q and k in int8 give an error of about 1.3e-2
BLOCKS_MODULE = "wanjax.kernels.attention.blocks"
FLASH_MODULES = (*(f"wanjax.kernels.attention.flash_{name}" for name in ("tpu", "kernel", "tiles")), BLOCKS_MODULE)
WHOLE_BLOCK_SIZES, RAGGED_SIZES = (256, 512), (300, 700)  # queries and keys
NO_MASKS: dict[str, Any] = {"key_mask": None, "window": None, "bias": None}


def normal(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    """Return an operand of a trial: normal random numbers. The same seed gives the same numbers on every machine."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).astype(dtype)


def _operands(num_queries: int, num_keys: int, size: int = HEAD_DIM) -> list[jax.Array]:
    return [normal(seed, 1, length, 2, size) for seed, length in enumerate((num_queries, num_keys, num_keys))]


def _operands_out_of_range(num_queries: int, num_keys: int) -> list[jax.Array]:
    """Return operands in which a late key has logits out of the range of the offset, which forces the running-max
    path."""
    q, k, v = _operands(num_queries, num_keys)
    return [q, k.at[:, -40].set(jnp.sign(q[:, 5]) * jnp.bfloat16(40)), v]


def _reference_in_float32(operands: list[jax.Array], window: Radial | None = None) -> jax.Array:
    """Compute the reference in float32."""
    masks = NO_MASKS | {"window": window}
    out: Any = reference.attention(
        *(x.astype(jnp.float32) for x in operands), **masks, scale=_softmax_scale(operands), config=None
    )
    return out


def _softmax_scale(operands: list[jax.Array]) -> float:
    return operands[0].shape[3] ** -0.5


def _trial_tiles(interpret: bool) -> Config:
    return Config(256, 512, 256, interpret=interpret)


def _run_flash(operands: list[jax.Array], interpret: bool, window: Radial | None = None) -> jax.Array:
    config = None if window and not interpret else _trial_tiles(interpret)
    options = NO_MASKS | {"window": window, "scale": _softmax_scale(operands), "config": config}
    return jax.jit(partial(flash_tpu.attention, **options))(*operands)


def _flash_trials() -> Iterator[Trial]:
    cases = {
        "a whole compute block": _operands(*WHOLE_BLOCK_SIZES),
        "a ragged tail": _operands(*RAGGED_SIZES),
        "the running-max path": _operands_out_of_range(*RAGGED_SIZES),
    }
    for name, operands in cases.items():
        yield Trial(name, partial(_run_flash, operands), partial(_reference_in_float32, operands), TOLERANCE)


def _int8_trials() -> Iterator[Trial]:
    def run(operands: list[jax.Array], interpret: bool) -> jax.Array:
        options = NO_MASKS | {"scale": _softmax_scale(operands), "config": Int8Config(_trial_tiles(interpret))}
        return jax.jit(partial(flash_tpu.attention, **options))(*operands)

    cases = {
        "a whole compute block": _operands(*WHOLE_BLOCK_SIZES),
        "a ragged tail": _operands(*RAGGED_SIZES),
        "the running-max path": _operands_out_of_range(*RAGGED_SIZES),
    }
    for name, operands in cases.items():
        yield Trial(name, partial(run, operands), partial(_reference_in_float32, operands), INT8_TOLERANCE)


def _radial_trials() -> Iterator[Trial]:
    mask, operands = Radial(3, 300, 0.2), _operands(900, 900)
    yield Trial(
        "a radial mask",
        partial(_run_flash, operands, window=mask),
        partial(_reference_in_float32, operands, mask),
        TOLERANCE,
    )


def _carry_trials() -> Iterator[Trial]:
    def run(operands: list[jax.Array], interpret: bool) -> jax.Array:
        options = {"key_mask": None, "scale": _softmax_scale(operands), "config": _trial_tiles(interpret)}

        @jax.jit
        def two_calls(q, k, v):
            half_length = k.shape[1] // 2
            sums: Any = flash_tpu.attention_with_carry(
                q, k[:, :half_length], v[:, :half_length], None, is_last=False, **options
            )
            out: Any = flash_tpu.attention_with_carry(
                q, k[:, half_length:], v[:, half_length:], sums, is_last=True, **options
            )
            return out[0]

        return two_calls(*operands)

    for name, operands in {
        "carried sums": _operands(*RAGGED_SIZES),
        "carried sums, the running-max path": _operands_out_of_range(*RAGGED_SIZES),
    }.items():
        yield Trial(name, partial(run, operands), partial(_reference_in_float32, operands), TOLERANCE)


def _joining_trials() -> Iterator[Trial]:
    operands = _operands(*RAGGED_SIZES)
    matrices = [(1, [normal(10 + i, 256, 128) for i in range(4)]), (0, [normal(20 + i, 32, 384) for i in range(4)])]

    def run(interpret: bool) -> Any:
        sharded = tuple(ShardedMatrix(tuple(shards), axis, jnp.int32(3)) for axis, shards in matrices)
        options = {"key_mask": None, "scale": _softmax_scale(operands), "config": _trial_tiles(interpret)}
        attend = partial(flash_tpu.attention_with_carry, carry=None, is_last=True, **options)
        out, _, *joined = jax.jit(lambda q, k, v, sharded: attend(q, k, v, matrices=sharded))(*operands, sharded)
        return out, joined

    def expected() -> Any:
        in_order = [(axis, [*shards[1:], shards[0]]) for axis, shards in matrices]
        return _reference_in_float32(operands), [jnp.concatenate(shards, axis) for axis, shards in in_order]

    yield Trial("joined shards", run, expected, TOLERANCE)


def _run_gradient(attend: Any, operands: list[jax.Array]) -> Any:
    g = normal(7, *operands[0].shape)
    return jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v)[1](g))(*operands)


def _reference_gradient(operands: list[jax.Array]) -> Any:
    options = NO_MASKS | {"scale": _softmax_scale(operands), "config": None}
    g = normal(7, *operands[0].shape).astype(jnp.float32)
    float32_operands = [x.astype(jnp.float32) for x in operands]
    return jax.jit(lambda q, k, v: jax.vjp(partial(chunked.attention, **options), q, k, v)[1](g))(*float32_operands)


def _gradient_trials() -> Iterator[Trial]:
    def run(operands: list[jax.Array], interpret: bool) -> Any:
        options = NO_MASKS | {"scale": _softmax_scale(operands), "config": _trial_tiles(interpret)}
        return _run_gradient(partial(flash_tpu.attention, **options), operands)

    operands = _operands(*RAGGED_SIZES)
    yield Trial(
        "the gradient, a ragged tail", partial(run, operands), partial(_reference_gradient, operands), TOLERANCE
    )


def _splash_trials() -> Iterator[Trial]:
    def attend(operands: list[jax.Array], interpret: bool) -> Any:
        options = NO_MASKS | {"scale": _softmax_scale(operands), "config": splash.Config(interpret)}
        return partial(splash.attention, **options)

    for name, sizes in {"a whole block": WHOLE_BLOCK_SIZES, "a ragged tail": RAGGED_SIZES}.items():
        operands = _operands(*sizes)

        def run(interpret: bool, operands: list[jax.Array] = operands) -> Any:
            return jax.jit(attend(operands, interpret))(*operands)

        def run_gradient(interpret: bool, operands: list[jax.Array] = operands) -> Any:
            return _run_gradient(attend(operands, interpret), operands)

        yield Trial(name, run, partial(_reference_in_float32, operands), TOLERANCE)
    yield Trial("the gradient, a ragged tail", run_gradient, partial(_reference_gradient, operands), TOLERANCE)


def _sparse_trials() -> Iterator[Trial]:
    sparse = sparse_linear.SparseLinearAttentionConfig(0.3)
    projection = sparse_linear.Projection(normal(8, HEAD_DIM, HEAD_DIM) / math.sqrt(HEAD_DIM), normal(9, HEAD_DIM))

    def run(operands: list[jax.Array], interpret: bool) -> jax.Array:
        config = sparse_linear_tpu.Config(interpret=interpret)
        options: Any = {"sparse": sparse, "kv_length": operands[1].shape[1], "config": config}
        return jax.jit(partial(sparse_linear_tpu.attention, **options))(*operands, projection)

    def expected(operands: list[jax.Array]) -> jax.Array:
        q, k, v = operands
        return sparse_linear.attention(q, k, v, projection, sparse=sparse, kv_length=operands[1].shape[1])

    cases = {"whole blocks": _operands(1024, 1024), "a ragged tail": _operands(900, 900)}
    q, k, v = _operands(900, 900)
    cases["steps taken again"] = [q, k.at[:, 700].set(jnp.sign(q[:, 5]) * jnp.bfloat16(40)), v]
    for name, operands in cases.items():
        yield Trial(name, partial(run, operands), partial(expected, operands), TOLERANCE)


def _merge_trials() -> Iterator[Trial]:
    x, y = normal(0, 1, 400, 2 * HEAD_DIM), normal(1, 1, 320, 2 * HEAD_DIM)
    share = jax.nn.sigmoid(normal(2, 1, 320, 2, dtype="float32"))

    def run(interpret: bool) -> jax.Array:
        return jax.jit(partial(merge.call, start=80, interpret=interpret))(x, y, share)

    yield Trial("rows from the second block on", run, partial(merge.reference, x, y, share, start=80), TOLERANCE)


KERNELS = (
    Kernel("flash_tpu", (*FLASH_MODULES, __name__), _flash_trials),
    Kernel(
        "flash_tpu_int8",
        (*FLASH_MODULES, *(f"wanjax.kernels.attention.flash_int8{name}" for name in ("", "_kernel")), __name__),
        _int8_trials,
    ),
    Kernel("flash_tpu_radial", (*FLASH_MODULES, "wanjax.kernels.attention.radial", __name__), _radial_trials),
    Kernel("flash_tpu_carried", (*FLASH_MODULES, __name__), _carry_trials),
    Kernel("flash_tpu_joining", (*FLASH_MODULES, "wanjax.kernels.attention.ring_weights", __name__), _joining_trials),
    Kernel(
        "flash_tpu_gradient", (*FLASH_MODULES, "wanjax.kernels.attention.flash_gradient", __name__), _gradient_trials
    ),
    Kernel("merged_rows", ("wanjax.kernels.attention.merge", __name__), _merge_trials),
    Kernel("splash", ("wanjax.kernels.attention.splash", __name__), _splash_trials),
    Kernel(
        "sparse_linear_tpu",
        (*(f"wanjax.kernels.attention.sparse_linear{name}" for name in ("_tpu", "_kernel")), BLOCKS_MODULE, __name__),
        _sparse_trials,
    ),
)
