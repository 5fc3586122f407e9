# SPDX-License-Identifier: Apache-2.0
"""Trials of the kernels of quantized products on small shapes. `admission` runs them before a kernel is first used."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from wanjax.kernels.admission import Kernel, Trial
from wanjax.kernels.alignment import LANES
from wanjax.kernels.attention.trials import normal
from wanjax.kernels.quantized_matmul import reference, tpu, xla
from wanjax.kernels.quantized_matmul.formats import NumberFormat, quantize_weight
from wanjax.kernels.quantized_matmul.operands import GatedSum, Modulation, RMSNormRotary
from wanjax.kernels.quantized_matmul.tiles import Tiles
from wanjax.kernels.target import has_fast_float8

DEPTH, COLUMNS, HADAMARD_SIZE = 512, 768, 256
TILES = Tiles(128, 256, 64, 64)
TOKENS = {"whole tiles, a norm and GELU": 256, "a ragged tail and a gated sum": 300}
TOLERANCE = 1e-2  # bfloat16 results, and numbers halfway between two steps of rounding, give an error of about 2e-3
MLP_TOLERANCE = 2e-2  # kernel and reference quantize the rows of the second product with different scales
EPS = 1e-6


def _trials() -> Iterator[Trial]:
    formats: tuple[NumberFormat, ...] = ("int8", "fp8") if has_fast_float8() else ("int8",)
    for weight_format in formats:
        weight, bias = (
            quantize_weight(_kernel(4, DEPTH, COLUMNS), number_format=weight_format, hadamard_size=HADAMARD_SIZE),
            normal(5, COLUMNS),
        )
        down = (
            quantize_weight(_kernel(6, COLUMNS, DEPTH), number_format=weight_format, hadamard_size=HADAMARD_SIZE),
            normal(7, DEPTH),
        )
        options: dict[str, Any] = {"activations": weight_format, "dtype": jnp.dtype("bfloat16")}
        for name, tokens in TOKENS.items():
            x, gate = normal(0, 1, tokens, DEPTH), normal(2, 1, 2, COLUMNS, dtype="float32")
            second_mask = jnp.arange(tokens) >= tokens - 100
            sum_options = {"gated_sum": GatedSum(normal(1, 1, tokens, COLUMNS), gate, second_mask)}
            input_options = {"modulation": _modulation(DEPTH, second_mask), "eps": EPS, "gelu": True}
            call = {
                "hadamard_size": HADAMARD_SIZE,
                **options,
                **(sum_options if tokens % TILES.rows else input_options),
            }
            run = partial(_run, tpu.quantized_matmul, (x, weight, bias), call | {"tiles": TILES})
            yield Trial(f"{weight_format}, {name}", run, partial(_expected, x, weight, bias, call), TOLERANCE)
        rows = {"hadamard_size": HADAMARD_SIZE, "number_format": weight_format, "dtype": options["dtype"]}
        run = partial(_run_rows, tpu.quantize, x, rows)
        yield Trial(f"{weight_format}, rows", run, partial(_run_rows, xla.quantize, x, rows), TOLERANCE)
        square = (
            quantize_weight(_kernel(10, DEPTH, DEPTH), number_format=weight_format, hadamard_size=HADAMARD_SIZE),
            normal(11, DEPTH),
        )
        for parts, channels in ((1, LANES), (2, DEPTH), (2, None)):
            heads = {"norm_eps": EPS, "hadamard_size": HADAMARD_SIZE, **options}
            operands = x, *square, None if channels is None else _heads_norm(x.shape[1], channels)
            run = partial(_run, tpu.quantized_heads, operands, heads | {"tiles": TILES, "parts": parts})
            expected = partial(_expected_heads, operands, heads)
            norm = "no norm" if channels is None else f"a norm of {channels} channels"
            yield Trial(f"{weight_format}, {norm}, {parts} parts", run, expected, TOLERANCE)
        mlp = {"hadamard_sizes": (HADAMARD_SIZE, HADAMARD_SIZE), **options, "tiles": TILES}
        run = partial(_run, tpu.quantized_mlp, (x, (weight, bias), down), mlp)
        yield Trial(
            f"{weight_format}, an MLP", run, partial(_expected_mlp, x, weight, bias, down, options), MLP_TOLERANCE
        )


def _kernel(seed: int, depth: int, columns: int) -> jax.Array:
    return normal(seed, depth, columns, dtype="float32") / depth**0.5


def _modulation(size: int, second_mask: jax.Array) -> Modulation:
    shift, scale = (normal(seed, 1, 2, size, dtype="float32") / 4 for seed in (8, 9))
    return Modulation(shift, scale, second_mask)


def _heads_norm(num_tokens: int, size: int) -> RMSNormRotary:
    angles = normal(12, num_tokens, LANES // 2, dtype="float32")
    return RMSNormRotary(normal(13, size, dtype="float32"), jnp.cos(angles), jnp.sin(angles))


def _run(call: Any, operands: tuple, options: dict[str, Any], interpret: bool) -> jax.Array:
    return jax.jit(partial(call, **options, interpret=interpret))(*operands)


def _expected(x: jax.Array, weight: Any, bias: jax.Array, options: dict[str, Any]) -> jax.Array:
    return jax.jit(partial(reference.quantized_matmul, **options))(x, weight, bias)


def _expected_heads(operands: tuple, options: dict[str, Any]) -> jax.Array:
    return jax.jit(partial(reference.quantized_heads, **options))(*operands)


def _run_rows(call: Any, x: jax.Array, options: dict[str, Any], interpret: bool | None = None) -> jax.Array:
    """Return the numbers that quantized rows represent."""
    extra = {} if interpret is None else {"interpret": interpret}
    values, scale = jax.jit(partial(call, **options, **extra))(x)
    return values.astype(jnp.float32) * scale


def _expected_mlp(x: jax.Array, weight: Any, bias: jax.Array, down: tuple, options: dict[str, Any]) -> jax.Array:
    hidden = _expected(x, weight, bias, {"hadamard_size": HADAMARD_SIZE, "gelu": True, **options})
    weight, bias = down
    return _expected(hidden, weight, bias, {"hadamard_size": HADAMARD_SIZE, **options})


_MODULES = tuple(
    f"wanjax.kernels.quantized_matmul.{name}" for name in ("tpu", "kernel", "tiles", "formats", "operands")
)

KERNELS = (Kernel("quantized_matmul", (*_MODULES, __name__), _trials),)
