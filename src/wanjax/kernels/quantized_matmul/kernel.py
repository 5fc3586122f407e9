# SPDX-License-Identifier: Apache-2.0
"""TPU kernels of quantized products. `matmul` computes a product of 8-bit numbers, with the operations before and after
it. `quantize` only quantizes rows.

In a grid step of `matmul`, all input channels of a row tile and of a column tile are in VMEM, so no accumulator is
needed. A row tile stays in VMEM while its column tiles are computed. Before the first column tile, the rows are normed,
rotated and quantized into scratch memory, unless they are already quantized.

While the sums of a product are still in registers, the kernel applies scales, bias and the epilogue. There are four
epilogues: GELU; a gated sum; GELU and the quantization of the result for the next product; or the norm of whole rows of
the result and the rotation of their heads. For this last epilogue, the rows of the result stay in VMEM too. They are
normed and rotated after the last column tile.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32

from wanjax.kernels.alignment import LANES, ceil_div
from wanjax.kernels.hadamard import regular_hadamard
from wanjax.kernels.quantized_matmul.formats import FORMATS, LARGEST, SMALLEST_ABSMAX, NumberFormat, QuantizedRows
from wanjax.kernels.quantized_matmul.tiles import (
    CHUNK,
    COMPILER_VMEM_BYTES,
    NORMED_STRIP,
    QUANTIZED_STRIP_ROWS,
    QUANTIZED_TILE_ROWS,
    Tiles,
    column_chunk_size,
    row_quantizer_vmem_bytes,
)

# Factors in the tanh of GELU: sqrt(2 / π), and 0.044715 times this
GELU_LINEAR, GELU_CUBIC = 0.7978845608028654, 0.035677408136300125

Refs = Mapping[str, Any]


class Quantization(NamedTuple):
    """How rows are quantized to 8 bits.

    Attributes:
        number_format: The format of the numbers.
        hadamard_size: How many channels are rotated together; 0 for no rotation.
        eps: The epsilon of a layer norm with modulation; None for no norm.
    """

    number_format: NumberFormat
    hadamard_size: int
    eps: float | None = None


class Epilogue(NamedTuple):
    """The operations that follow the product and its bias in the kernel.

    Attributes:
        gelu: The dtype in which GELU is computed; None for no GELU.
        quantization: How the result is quantized for the next product; None for a result in floats.
        norm_eps: The epsilon of an RMS norm of whole rows of the result; None for no norm.
        norm_per_head: Whether each head of 128 channels has a separate norm.
        parts: The number of groups of heads into which whole rows of the result are split. Each group is contiguous in
            memory. None writes rows tile by tile.
    """

    gelu: DTypeLike | None = None
    quantization: Quantization | None = None
    norm_eps: float | None = None
    norm_per_head: bool = False
    parts: int | None = None


def matmul(
    operands: Mapping[str, Array],
    *,
    quantization: Quantization | None,
    epilogue: Epilogue,
    tiles: Tiles,
    dtype: jnp.dtype,
    result_dtype: jnp.dtype,
    vmem_bytes: int,
    interpret: bool,
) -> tuple[Array, ...]:
    """Call the kernel of the product. Return the result or, if the result is quantized, its values and scales. A
    result in groups of heads has a leading axis of groups.

    Args:
        operands: The operands by their names:
            - The input: `x` [B L I] and, for T modulations, `shift` and `factor` [B T I].
            - A quantized input instead: `values` [B L I], and `row_scale` [B L G] of G equal parts of a row.
            - The weight: `weight` [I O], `scale` [1 O] and `bias` [1 O].
            - For a gated sum: `gate` [B T O] and `residual` [B L O].
            - For two modulations: `second_mask` [L 1], which is 1 for tokens with the second modulation, else 0.
            - For two gates: `second_gate` [L 1], which is 1 for tokens with the second gate, else 0.
            - For a norm of the result: `norm_scale` [1 O].
            - For the rotation of the heads of the result: `cos` and `sin` [L P].
        quantization: How x is quantized; None if the input is already quantized.
        epilogue: The operations after the product.
        tiles: Tile sizes.
        dtype: The dtype to which x is rounded before its rotation.
        result_dtype: The dtype of a result in floats.
        vmem_bytes: The limit of VMEM.
        interpret: Whether to run the kernel without a TPU, slowly, for tests.
    """
    weight = operands["weight"]
    (batch, length, depth), columns = operands["values" if quantization is None else "x"].shape, weight.shape[1]
    operands = dict(operands) | _matrix(quantization or epilogue.quantization, dtype)
    input_row, result_tile = (None, tiles.rows, depth), (None, tiles.rows, tiles.columns)
    output_vector, num_gates = (1, tiles.columns), operands["gate"].shape[1] if "gate" in operands else 1
    vectors = (None, operands["shift"].shape[1] if "shift" in operands else 1, depth)
    rows_only, columns_only = (lambda b, i, j: (b, i, 0)), (lambda b, i, j: (0, j))
    specs: dict[str, pl.BlockSpec] = {
        "x": pl.BlockSpec(input_row, rows_only),
        "values": pl.BlockSpec(input_row, rows_only),
        "shift": pl.BlockSpec(vectors, lambda b, i, j: (b, 0, 0)),
        "factor": pl.BlockSpec(vectors, lambda b, i, j: (b, 0, 0)),
        "second_mask": pl.BlockSpec((tiles.rows, 1), lambda b, i, j: (i, 0)),
        "second_gate": pl.BlockSpec((tiles.rows, 1), lambda b, i, j: (i, 0)),
        "matrix": pl.BlockSpec((CHUNK, CHUNK), lambda b, i, j: (0, 0)),
        "weight": pl.BlockSpec((depth, tiles.columns), columns_only),
        "scale": pl.BlockSpec(output_vector, columns_only),
        "bias": pl.BlockSpec(output_vector, columns_only),
        "gate": pl.BlockSpec((None, num_gates, tiles.columns), lambda b, i, j: (b, 0, j)),
        "residual": pl.BlockSpec(result_tile, lambda b, i, j: (b, i, j)),
        "norm_scale": pl.BlockSpec((1, columns), lambda b, i, j: (0, 0)),
    }
    for name in ("cos", "sin"):
        if name in operands:
            specs[name] = pl.BlockSpec((tiles.rows, operands[name].shape[1]), lambda b, i, j: (i, 0))
    if quantization is None:
        specs["row_scale"] = pl.BlockSpec((None, tiles.rows, operands["row_scale"].shape[2]), rows_only)
    y_dtype = result_dtype if epilogue.quantization is None else FORMATS[epilogue.quantization.number_format]
    results = {"y": (specs["residual"], jax.ShapeDtypeStruct((batch, length, columns), y_dtype))}
    if epilogue.parts is not None:
        width = columns // epilogue.parts
        whole_rows = pl.BlockSpec((epilogue.parts, None, tiles.rows, width), lambda b, i, j: (0, b, i, 0))
        results["y"] = whole_rows, jax.ShapeDtypeStruct((epilogue.parts, batch, length, width), y_dtype)
    scratch: dict[str, Any] = {}
    if quantization is not None:
        scratch["values"] = pltpu.VMEM((tiles.rows, depth), FORMATS[quantization.number_format])
        scratch["row_scale"] = pltpu.VMEM((tiles.rows, 1), jnp.float32)
        scratch["rotated"] = pltpu.VMEM((tiles.input_strip, depth), jnp.float32)
    if epilogue.quantization is not None:
        groups = columns // tiles.columns
        scale_spec = pl.BlockSpec((None, tiles.rows, groups), rows_only)
        results["y_scale"] = scale_spec, jax.ShapeDtypeStruct((batch, length, groups), jnp.float32)
        scratch["rotated_y"] = pltpu.VMEM((tiles.strip, tiles.columns), jnp.float32)
    names = (*operands, *results, *scratch)
    options = {"quantization": quantization, "epilogue": epilogue, "strip": tiles.strip, "dtype": dtype}
    y = pl.pallas_call(
        partial(_matmul_kernel, names=names, **options),
        grid=(batch, ceil_div(length, tiles.rows), ceil_div(columns, tiles.columns)),
        in_specs=[specs[name] for name in operands],
        out_specs=[spec for spec, _ in results.values()],
        out_shape=[shape for _, shape in results.values()],
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_bytes
        ),
        interpret=interpret,
        name="quantized_matmul",
    )(*operands.values())
    return tuple(y)


def quantize(
    operands: Mapping[str, Array], *, quantization: Quantization, dtype: jnp.dtype, interpret: bool
) -> QuantizedRows:
    """Call the kernel that quantizes rows, in one pass over memory.

    Args:
        operands: `x` [B L I]. If the quantization has a norm, also `shift` and `factor` [B T I] of T modulations. For
            two modulations, also `second_mask` [L 1]. The names have the meaning that they have in `matmul`.
        quantization: How x is quantized.
        dtype: The dtype to which x is rounded before its rotation.
        interpret: Whether to run the kernel without a TPU, slowly, for tests.
    """
    x = operands["x"]
    batch, length, depth = x.shape
    operands = dict(operands) | _matrix(quantization, dtype)
    row = pl.BlockSpec((None, QUANTIZED_TILE_ROWS, depth), lambda b, i: (b, i, 0))
    num_modulations = operands["shift"].shape[1] if "shift" in operands else 1
    vectors = pl.BlockSpec((None, num_modulations, depth), lambda b, i: (b, 0, 0))
    mask_spec = pl.BlockSpec((QUANTIZED_TILE_ROWS, 1), lambda b, i: (i, 0))
    matrix = pl.BlockSpec((CHUNK, CHUNK), lambda b, i: (0, 0))
    specs = {"x": row, "shift": vectors, "factor": vectors, "second_mask": mask_spec, "matrix": matrix}
    names = (*operands, "values", "row_scale", "rotated")
    values, scale = pl.pallas_call(
        partial(_quantize_kernel, names=names, quantization=quantization, dtype=dtype),
        grid=(batch, ceil_div(length, QUANTIZED_TILE_ROWS)),
        in_specs=[specs[name] for name in operands],
        out_specs=[row, pl.BlockSpec((None, QUANTIZED_TILE_ROWS, 1), lambda b, i: (b, i, 0))],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, FORMATS[quantization.number_format]),
            jax.ShapeDtypeStruct((batch, length, 1), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM((QUANTIZED_STRIP_ROWS, depth), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=row_quantizer_vmem_bytes(depth, x.dtype.itemsize) + COMPILER_VMEM_BYTES,
        ),
        interpret=interpret,
        name="quantize_rows",
    )(*operands.values())
    return QuantizedRows(values, scale)


def _matrix(quantization: Quantization | None, dtype: DTypeLike) -> dict[str, Array]:
    """Return the rotation matrix as an operand. The matrix rotates the CHUNK channels of one product together."""
    if quantization is None or not quantization.hadamard_size:
        return {}
    groups = CHUNK // quantization.hadamard_size
    return {"matrix": jnp.asarray(np.kron(np.eye(groups), regular_hadamard(quantization.hadamard_size)), dtype)}


def _matmul_kernel(
    *refs: Any,
    names: tuple[str, ...],
    quantization: Quantization | None,
    epilogue: Epilogue,
    strip: int,
    dtype: jnp.dtype,
) -> None:
    ref, column_tile = dict(zip(names, refs, strict=True)), pl.program_id(2)
    if quantization is not None:

        @pl.when(column_tile == 0)
        def _() -> None:
            _quantize_strips(ref, quantization, dtype)

    def multiply_strip(i: Any, _: None) -> None:
        rows = _strip(i, strip)
        if epilogue.quantization is not None:
            _quantize_products(ref, rows, column_tile, epilogue.gelu, epilogue.quantization, dtype)
            return
        y = _product(ref, rows, slice(None), epilogue.gelu)
        if epilogue.parts is not None:
            _write_columns(ref["y"], rows, column_tile, y.astype(ref["y"].dtype))
            return
        if "gate" in ref:
            gate = _by_token(ref, "gate", slice(None), _second_mask(ref, "second_gate", rows, y.shape[1]))
            y = ref["residual"][rows, :].astype(jnp.float32) + gate * y.astype(jnp.float32)
        ref["y"][rows, :] = y.astype(ref["y"].dtype)

    jax.lax.fori_loop(0, ref["values"].shape[0] // strip, multiply_strip, None)
    norm_eps = epilogue.norm_eps
    if norm_eps is not None:

        @pl.when(column_tile == pl.num_programs(2) - 1)
        def _() -> None:
            _norm_rows(ref, norm_eps, epilogue.norm_per_head)


def _write_columns(y_ref: Any, rows: Any, column_tile: Any, y: Float[Array, "_L _E"]) -> None:
    """Write a strip of a column tile into rows that are split into groups of heads."""
    width, columns = y_ref.shape[2], y.shape[1]
    size = math.gcd(width, columns)  # the columns of one group
    for offset in range(0, columns, size):
        start = column_tile * columns + offset
        part, start = (0, start) if len(y_ref) == 1 else (start // width, start % width)
        y_ref[part, rows, pl.ds(pl.multiple_of(start, size), size)] = y[:, offset : offset + size]


def _norm_rows(ref: Refs, eps: float, per_head: bool) -> None:
    """Apply the RMS norm to whole rows of the result, or to each head. If there are cosines and sines, rotate the
    heads."""
    parts, tile_rows, width = ref["y"].shape
    strip = math.gcd(tile_rows, NORMED_STRIP)

    def norm_strip(i: Any, _: None) -> None:
        rows = _strip(i, strip)
        row_inverse = None if per_head else _inverse_rms(_row_squares(ref["y"], rows), parts * width, eps)
        tables = ()
        if "cos" in ref:
            cos, sin = ref["cos"][rows, :], ref["sin"][rows, :]
            tables = jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1)
        for part in range(parts):
            for start in range(0, width, LANES):
                lanes, channels = slice(start, start + LANES), slice(part * width + start, part * width + start + LANES)
                y = ref["y"][part, rows, lanes].astype(jnp.float32)
                inverse = _inverse_rms(y * y, LANES, eps) if row_inverse is None else row_inverse
                y = y * inverse * ref["norm_scale"][:, channels]
                if tables:
                    cos, sin = tables
                    y = y * cos + pltpu.roll(y, LANES // 2, 1) * sin
                ref["y"][part, rows, lanes] = y.astype(ref["y"].dtype)

    jax.lax.fori_loop(0, tile_rows // strip, norm_strip, None)


def _row_squares(y_ref: Any, rows: Any) -> Float32[Array, "_L _P"]:
    """Return the sums of squares of rows. Each of the 128 lanes has a partial sum."""
    square_sums = jnp.zeros((rows.size, LANES), jnp.float32)
    for part in range(len(y_ref)):
        for start in range(0, y_ref.shape[2], LANES):
            y = y_ref[part, rows, start : start + LANES].astype(jnp.float32)
            square_sums = square_sums + y * y
    return square_sums


def _inverse_rms(square_sums: Float32[Array, "_L _P"], channels: int, eps: float) -> Float32[Array, "_L _P"]:
    """Return 1 / root mean square of each row, in all lanes."""
    mean = square_sums.sum(axis=1, keepdims=True) / channels
    return jnp.broadcast_to(jax.lax.rsqrt(mean + eps), square_sums.shape)


def _product(ref: Refs, rows: Any, columns: slice, gelu: DTypeLike | None) -> Float[Array, "_L _E"]:
    """Return the given rows and columns of the product plus the bias. If `gelu` is a dtype, apply GELU in this
    dtype."""
    depth, groups = ref["weight"].shape[0], ref["row_scale"].shape[1]
    sum_dtype = jnp.int32 if ref["weight"].dtype == jnp.int8 else jnp.float32
    y: Any = None
    for group in range(groups):
        part = slice(group * depth // groups, (group + 1) * depth // groups)
        sums = _dot(ref["values"][rows, part], ref["weight"][part, columns], sum_dtype).astype(jnp.float32)
        sums = sums * ref["row_scale"][rows, group : group + 1]
        y = sums if y is None else y + sums
    y = y * ref["scale"][:, columns] + ref["bias"][:, columns]
    return y if gelu is None else _gelu(y.astype(gelu))


def _quantize_products(
    ref: Refs, rows: Any, column_tile: Any, gelu: DTypeLike | None, quantization: Quantization, dtype: jnp.dtype
) -> None:
    """Rotate and quantize a strip of the product, with a scale for each row of the column tile."""
    columns = ref["rotated_y"].shape[1]
    width = column_chunk_size(columns)

    def chunk_of(y: Float[Array, "_L _E"], offset: int) -> Float32[Array, "_L _D"]:
        chunk = y[:, offset : offset + CHUNK]
        return _dot(chunk, ref["matrix"][...], jnp.float32) if quantization.hadamard_size else chunk.astype(jnp.float32)

    absmax = None
    for start in range(0, columns, width):
        y = _product(ref, rows, slice(start, start + width), gelu).astype(dtype)
        for offset in range(0, width, CHUNK):
            chunk = chunk_of(y, offset)
            ref["rotated_y"][:, start + offset : start + offset + CHUNK] = chunk
            absmax = _raise_absmax(absmax, chunk)
    scale = _quantize_strip(ref["rotated_y"], ref["y"], rows, absmax, quantization.number_format)
    group = jax.lax.broadcasted_iota(jnp.int32, (rows.size, ref["y_scale"].shape[1]), 1)
    ref["y_scale"][rows, :] = jnp.where(group == column_tile, scale, ref["y_scale"][rows, :])


def _quantize_kernel(*refs: Any, names: tuple[str, ...], quantization: Quantization, dtype: jnp.dtype) -> None:
    _quantize_strips(dict(zip(names, refs, strict=True)), quantization, dtype)


def _quantize_strips(ref: Refs, quantization: Quantization, dtype: jnp.dtype) -> None:
    """Norm, rotate and quantize the rows of x, strip by strip."""
    strip, depth = ref["rotated"].shape

    def quantize_strip(i: Any, _: None) -> None:
        rows = _strip(i, strip)
        statistics = None if quantization.eps is None else _statistics(ref["x"], rows, quantization.eps)
        absmax, second_mask = None, _second_mask(ref, "second_mask", rows, CHUNK)
        for start in range(0, depth, CHUNK):
            channels = slice(start, start + CHUNK)
            y = ref["x"][rows, channels]
            if statistics is not None:
                mean, inverse_deviation = statistics
                normed = (y.astype(jnp.float32) - mean) * inverse_deviation
                shift, factor = (_by_token(ref, name, channels, second_mask) for name in ("shift", "factor"))
                y = normed * factor + shift
            y = y.astype(dtype)
            y = _dot(y, ref["matrix"][...], jnp.float32) if quantization.hadamard_size else y.astype(jnp.float32)
            ref["rotated"][:, channels] = y
            absmax = _raise_absmax(absmax, y)
        ref["row_scale"][rows, :] = _quantize_strip(
            ref["rotated"], ref["values"], rows, absmax, quantization.number_format
        )

    jax.lax.fori_loop(0, ref["x"].shape[0] // strip, quantize_strip, None)


def _second_mask(ref: Refs, name: str, rows: Any, columns: int) -> Bool[Array, "_L _E"] | None:
    """Return the mask of the tokens that use the second of two vectors, or None if there is only one vector."""
    return None if name not in ref else jnp.broadcast_to(ref[name][rows, :], (rows.size, columns)) > 0


def _by_token(
    ref: Refs, name: str, columns: slice, second_mask: Bool[Array, "_L _E"] | None
) -> Float32[Array, "_L _E"] | Float32[Array, "1 _E"]:
    """Select the first or the second vector for each token. If there is only one vector, return it."""
    if second_mask is None:
        return ref[name][:, columns]
    return jnp.where(second_mask, ref[name][1:2, columns], ref[name][0:1, columns])


def _statistics(x_ref: Any, rows: Any, eps: float) -> tuple[Array, Array]:
    """Return the mean of each row, and the inverse of its standard deviation."""
    depth = x_ref.shape[1]
    total = square_sums = jnp.zeros((rows.size, LANES), jnp.float32)
    for start in range(0, depth, LANES):
        x = x_ref[rows, start : start + LANES].astype(jnp.float32)
        total, square_sums = total + x, square_sums + x * x
    mean = total.sum(axis=1, keepdims=True) / depth
    variance = jnp.maximum(square_sums.sum(axis=1, keepdims=True) / depth - mean * mean, 0.0)
    return mean, jax.lax.rsqrt(variance + eps)


def _raise_absmax(absmax: Array | None, y: Float32[Array, "_L _D"]) -> Float32[Array, "_L _P"]:
    """Update the largest absolute numbers of rows. Each of the 128 lanes has the maximum of its own channels."""
    for start in range(0, y.shape[1], LANES):
        lanes = jnp.abs(y[:, start : start + LANES])
        absmax = lanes if absmax is None else jnp.maximum(absmax, lanes)
    assert absmax is not None
    return absmax


def _quantize_strip(
    source: Any, target: Any, rows: Any, absmax: Array | None, number_format: NumberFormat
) -> Float32[Array, "_L 1"]:
    """Quantize a strip to 8 bits by the largest absolute numbers of its rows. Return the scales of the rows."""
    assert absmax is not None
    absmax = jnp.maximum(absmax.max(axis=1, keepdims=True), SMALLEST_ABSMAX)
    inverse_scale = jnp.broadcast_to(LARGEST[number_format] / absmax, (rows.size, CHUNK))
    for start in range(0, source.shape[1], CHUNK):
        channels = slice(start, start + CHUNK)
        y = source[:, channels] * inverse_scale
        if number_format == "int8":
            y = jnp.round(y).astype(jnp.int32)  # a direct cast from float32 to int8 is slower
        target[rows, channels] = y.astype(target.dtype)
    return absmax * (1 / LARGEST[number_format])


def _strip(i: Any, size: int) -> Any:
    return pl.ds(pl.multiple_of(i * size, size), size)


def _dot(x: Array, y: Array, sum_dtype: DTypeLike) -> Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=sum_dtype)


def _gelu(y: Float[Array, "_L _E"]) -> Float[Array, "_L _E"]:
    """Compute GELU by its tanh formula."""
    return y * (0.5 + 0.5 * jnp.tanh(y * (GELU_LINEAR + GELU_CUBIC * (y * y))))
