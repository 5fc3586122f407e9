# SPDX-License-Identifier: Apache-2.0
"""Quantized products on TPUs, by the kernels in `kernel`. On several devices, each device computes its own rows."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32

from wanjax.kernels.alignment import LANES
from wanjax.kernels.quantized_matmul import kernel
from wanjax.kernels.quantized_matmul.formats import NumberFormat, QuantizedRows, QuantizedWeight
from wanjax.kernels.quantized_matmul.kernel import Epilogue, Quantization
from wanjax.kernels.quantized_matmul.operands import GatedSum, Modulation, RMSNormRotary
from wanjax.kernels.quantized_matmul.tiles import (
    CHUNK,
    COMPILER_VMEM_BYTES,
    MAX_DEPTH,
    MIN_INPUT_STRIP,
    ROW_TILE,
    Product,
    Tiles,
    default_tiles,
    row_quantizer_vmem_bytes,
)
from wanjax.kernels.rotary_heads import concatenate_parts
from wanjax.kernels.target import has_fast_float8, vmem_bytes
from wanjax.sharding import current_partitioner

DTYPES = ("float32", "bfloat16")
MATMUL_SCOPE = "quantized_products"
INTERPRETED_VMEM_BYTES = 128 << 20
FIRST_BFLOAT16_GENERATION = 6  # the first TPUs with bfloat16 in the vector unit
INPUTS = ("x", "shift", "factor", "second_mask")  # the operands that only the quantization of rows needs
Operands = dict[str, Any]


def unsupported(x: Any, weight: QuantizedWeight, hadamard_size: int, dtype: jnp.dtype) -> str | None:
    """Return the reason why the kernels do not support a product, or None. Shapes may replace the arrays."""
    capacity, shape = vmem_bytes(), (x.values if isinstance(x, QuantizedRows) else x).shape
    depth, columns = weight.values.shape
    if capacity is None:
        return "the kernels of quantized products run on TPUs"
    if len(shape) != 3 or shape[1] < ROW_TILE:
        return f"the kernels of quantized products take [B L I] with L of at least {ROW_TILE}, not {list(shape)}"
    if depth % CHUNK or columns % LANES or (hadamard_size and CHUNK % hadamard_size):
        channels = f"{depth} to {columns} channels, rotated by {hadamard_size}"
        return f"the kernels of quantized products do not support {channels}"
    if dtype.name not in DTYPES:
        return f"the kernels of quantized products do not compute in {dtype.name}"
    partitioner = current_partitioner()
    if not partitioner.is_single_device and partitioner.rules.weights and not partitioner.rules.gather_weights:
        return "the kernels of quantized products do not take sharded weights"
    if weight.values.dtype != jnp.int8 and not has_fast_float8():
        return "this TPU multiplies 8-bit floats no faster than bfloat16"
    smallest = Product(ROW_TILE, depth, columns, dtype.itemsize)
    if default_tiles(smallest, capacity) is None or row_quantizer_vmem_bytes(depth, 4) + COMPILER_VMEM_BYTES > capacity:
        return f"the kernels of quantized products need more than {capacity >> 20} MiB of VMEM for {depth} channels"
    return None


def fuses_mlp(up: QuantizedWeight, down: QuantizedWeight, hadamard_size: int, dtype: jnp.dtype) -> bool:
    """Return True if the first product of an MLP can quantize its results for the second."""
    depth, columns = up.values.shape
    first = Product(ROW_TILE, depth, columns, dtype.itemsize, gelu=True, quantizes_result=True)
    second = Product(ROW_TILE, columns, down.values.shape[1], dtype.itemsize, has_residual=True)
    can_quantize = (
        columns % CHUNK == 0 and not (hadamard_size and CHUNK % hadamard_size) and down.values.shape[1] % LANES == 0
    )
    return can_quantize and all(default_tiles(product, vmem_bytes() or 0) is not None for product in (first, second))


def fuses_heads(weight: QuantizedWeight, norm: RMSNormRotary | None, dtype: jnp.dtype) -> bool:
    """Return True if whole rows of a product fit into VMEM, and the kernel can norm them and rotate their heads of 128
    channels."""
    depth, columns = weight.values.shape
    product = Product(ROW_TILE, depth, columns, dtype.itemsize, quantizes=True, keeps_rows=True)
    fits = default_tiles(product, vmem_bytes() or 0) is not None
    if norm is None:
        return fits
    can_rotate = norm.cos is None or 2 * norm.cos.shape[1] == LANES
    return fits and can_rotate and len(norm.scale) in (LANES, columns)


def quantized_matmul(
    x: Float[Array, "B L E"] | QuantizedRows,
    weight: QuantizedWeight,
    bias: Float[Array, " _E"] | None,
    *,
    hadamard_size: int,
    activations: NumberFormat,
    dtype: jnp.dtype,
    modulation: Modulation | None = None,
    eps: float = 0.0,
    gelu: bool = False,
    gated_sum: GatedSum | None = None,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Float[Array, "B L _E"]:
    """Compute the same as the reference. If x is quantized, the equal parts of a row may have separate scales."""
    operands = _input_operands(x, modulation) | _weight_operands(weight, bias)
    operands |= _sum_operands(gated_sum)
    quantization = Quantization(activations, hadamard_size, None if modulation is None else eps)
    run = partial(_multiply, quantization=quantization, gelu=gelu, dtype=dtype, tiles=tiles, interpret=interpret)
    return _on_each_device(run, operands)


def quantized_heads(
    x: Float[Array, "B L E"] | QuantizedRows,
    weight: QuantizedWeight,
    bias: Float[Array, " _E"] | None,
    norm: RMSNormRotary | None,
    *,
    norm_eps: float = 0.0,
    hadamard_size: int,
    activations: NumberFormat,
    dtype: jnp.dtype,
    modulation: Modulation | None = None,
    eps: float = 0.0,
    parts: int = 1,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Float[Array, "B L _E"]:
    """Compute queries or keys: a product, its norm, and the rotation of its heads, while the rows are in VMEM. Without
    a norm, compute values.

    The heads are in `parts` groups. Each group is contiguous in memory.
    """
    operands = _input_operands(x, modulation) | _weight_operands(weight, bias)
    quantization = Quantization(activations, hadamard_size, None if modulation is None else eps)
    norm_options: dict[str, Any] = {}
    if norm is not None:
        size, columns = len(norm.scale), weight.values.shape[1]
        operands |= {"norm_scale": jnp.tile(norm.scale.astype(jnp.float32), columns // size)[None]}
        operands |= {} if norm.cos is None else {"cos": norm.cos, "sin": norm.sin}
        norm_options = {"norm_eps": norm_eps, "norm_per_head": size < columns}
    epilogue = Epilogue(parts=parts, **norm_options)

    def run(operands: Operands) -> Array:
        product = replace(_sizes(operands, dtype), keeps_rows=True)
        operands, used_tiles = _quantize_rows_separately(operands, product, quantization, dtype, tiles, interpret)
        return concatenate_parts(
            _call(operands, quantization, epilogue, product, used_tiles, dtype, dtype, interpret)[0]
        )

    return _on_each_device(run, operands)


def quantize(
    x: Float[Array, "B L E"],
    *,
    hadamard_size: int,
    number_format: NumberFormat,
    dtype: jnp.dtype,
    modulation: Modulation | None = None,
    eps: float = 0.0,
    interpret: bool = False,
) -> QuantizedRows:
    """Apply the norm and the rotation to the rows of x, and quantize them."""
    quantization = Quantization(number_format, hadamard_size, None if modulation is None else eps)

    def run(operands: Operands) -> QuantizedRows:
        return kernel.quantize(operands, quantization=quantization, dtype=dtype, interpret=interpret)

    return _on_each_device(run, _input_operands(x, modulation))


def quantized_mlp(
    x: Float[Array, "B L E"] | QuantizedRows,
    up: tuple[QuantizedWeight, Array | None],
    down: tuple[QuantizedWeight, Array | None],
    *,
    hadamard_sizes: tuple[int, int],
    activations: NumberFormat,
    dtype: jnp.dtype,
    modulation: Modulation | None = None,
    eps: float = 0.0,
    gated_sum: GatedSum | None = None,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Float[Array, "B L _E"]:
    """Compute a product, GELU and a second product. The first product applies GELU and quantizes its results before it
    writes them. Each row then has a scale for each column tile of the first product.
    """
    operands = _input_operands(x, modulation) | _weight_operands(*up)
    operands |= {f"down_{name}": value for name, value in _weight_operands(*down).items()}
    operands |= _sum_operands(gated_sum)
    quantization = Quantization(activations, hadamard_sizes[0], None if modulation is None else eps)

    def run(operands: Operands) -> Array:
        down_operands = {name.removeprefix("down_"): operands[name] for name in operands if name.startswith("down_")}
        down_operands |= {name: operands[name] for name in ("residual", "gate", "second_gate") if name in operands}
        up_operands = {
            name: operands[name] for name in operands if name not in down_operands and not name.startswith("down_")
        }
        up_operands |= {name: operands[name] for name in ("weight", "scale", "bias")}
        options = {"dtype": dtype, "tiles": tiles, "interpret": interpret}
        hidden_quantization = Quantization(activations, hadamard_sizes[1])
        hidden = _multiply_and_quantize(up_operands, quantization, hidden_quantization, **options)
        return _multiply(down_operands | hidden, quantization=quantization, gelu=False, **options)

    return _on_each_device(run, operands)


def _multiply(
    operands: Operands,
    *,
    quantization: Quantization,
    gelu: bool,
    dtype: jnp.dtype,
    tiles: Tiles | None,
    interpret: bool,
) -> Array:
    """Compute a product. If its tiles are too small to quantize the rows, a separate kernel quantizes them first."""
    result_dtype = operands["residual"].dtype if "residual" in operands else dtype
    product = _sizes(operands, result_dtype)
    product = replace(product, has_residual="residual" in operands, gelu=gelu)
    operands, tiles = _quantize_rows_separately(operands, product, quantization, dtype, tiles, interpret)
    epilogue = Epilogue(gelu=jnp.float32 if gelu else None)
    return _call(operands, quantization, epilogue, product, tiles, dtype, result_dtype, interpret)[0]


def _multiply_and_quantize(
    operands: Operands,
    quantization: Quantization,
    result_quantization: Quantization,
    *,
    dtype: jnp.dtype,
    tiles: Tiles | None,
    interpret: bool,
) -> Operands:
    """Compute a product with GELU. Return the values and scales of the result as operands of the next product."""
    product = replace(_sizes(operands, dtype), gelu=True, quantizes_result=True)
    operands, tiles = _quantize_rows_separately(operands, product, quantization, dtype, tiles, interpret)
    in_bfloat16 = dtype == jnp.bfloat16 and (interpret or pltpu.get_tpu_info().generation >= FIRST_BFLOAT16_GENERATION)
    epilogue = Epilogue(gelu=jnp.bfloat16 if in_bfloat16 else jnp.float32, quantization=result_quantization)
    values, scale = _call(operands, quantization, epilogue, product, tiles, dtype, dtype, interpret)
    return {"values": values, "row_scale": scale}


def _sizes(operands: Operands, result_dtype: jnp.dtype) -> Product:
    """Return the sizes of a product. If the rows are floats, the product quantizes them."""
    x = operands.get("x")
    rows = operands["values"].shape[1] if x is None else x.shape[1]
    itemsize = max(result_dtype.itemsize, 0 if x is None else x.dtype.itemsize)
    depth, columns = operands["weight"].shape
    return Product(rows, depth, columns, itemsize, quantizes=x is not None)


def _quantize_rows_separately(
    operands: Operands,
    product: Product,
    quantization: Quantization,
    dtype: jnp.dtype,
    tiles: Tiles | None,
    interpret: bool,
) -> tuple[Operands, Tiles]:
    """If the product's tiles are too small to quantize the rows, quantize them by a separate kernel.

    Return the operands and the tiles.
    """
    capacity = _capacity(interpret)
    if tiles is None and product.quantizes:
        tiles = default_tiles(product, capacity) if product.depth <= MAX_DEPTH else None
        if tiles is None or (tiles.input_strip < MIN_INPUT_STRIP and tiles.rows < product.rows):
            inputs = {name: operands[name] for name in INPUTS if name in operands}
            rows = kernel.quantize(inputs, quantization=quantization, dtype=dtype, interpret=interpret)
            quantized = {"values": rows.values, "row_scale": rows.scale}
            operands = {name: value for name, value in operands.items() if name not in INPUTS} | quantized
            tiles = None
    tiles = tiles or default_tiles(replace(product, quantizes="x" in operands), capacity)
    assert tiles is not None, product
    return operands, tiles


def _call(
    operands: Operands,
    quantization: Quantization,
    epilogue: Epilogue,
    product: Product,
    tiles: Tiles,
    dtype: jnp.dtype,
    result_dtype: jnp.dtype,
    interpret: bool,
) -> tuple[Array, ...]:
    quantizes = "x" in operands
    limit = replace(product, quantizes=quantizes).vmem_bytes(tiles) + COMPILER_VMEM_BYTES
    return kernel.matmul(
        operands,
        quantization=quantization if quantizes else None,
        epilogue=epilogue,
        tiles=tiles,
        dtype=dtype,
        result_dtype=result_dtype,
        vmem_bytes=limit,
        interpret=interpret,
    )


def _capacity(interpret: bool) -> int:
    return INTERPRETED_VMEM_BYTES if interpret else vmem_bytes() or 0


def _input_operands(x: Array | QuantizedRows, modulation: Modulation | None) -> Operands:
    if isinstance(x, QuantizedRows):
        return {"values": x.values, "row_scale": x.scale}
    if modulation is None:
        return {"x": x}
    shift, scale = (vectors.astype(jnp.float32) for vectors in modulation[:2])
    operands = {"x": x, "shift": shift, "factor": 1.0 + scale}
    return operands if modulation.second_mask is None else operands | {"second_mask": _column(modulation.second_mask)}


def _sum_operands(gated_sum: GatedSum | None) -> Operands:
    if gated_sum is None:
        return {}
    operands = {"residual": gated_sum.residual, "gate": gated_sum.gate.astype(jnp.float32)}
    return operands if gated_sum.second_mask is None else operands | {"second_gate": _column(gated_sum.second_mask)}


def _column(mask: Bool[Array, " L"]) -> Float32[Array, "L 1"]:
    return mask.astype(jnp.float32)[:, None]


def _weight_operands(weight: QuantizedWeight, bias: Array | None) -> Operands:
    columns = weight.values.shape[1:]
    bias = jnp.zeros(columns, jnp.float32) if bias is None else bias.astype(jnp.float32)
    return {"weight": weight.values, "scale": jnp.broadcast_to(weight.scale, columns)[None], "bias": bias[None]}


def _on_each_device(run: Any, operands: Operands) -> Any:
    """Run a function of the operands on each device, with the device's own rows, in the named scope of products."""
    partitioner = current_partitioner()
    shape = operands["x" if "x" in operands else "values"].shape
    batch, length, _ = partitioner.activation_spec(("batch", "length", None), shape)
    tokens, vectors = PartitionSpec(batch, length), PartitionSpec(batch)
    by_name = {name: tokens for name in ("x", "values", "row_scale", "residual")}
    by_name |= {name: vectors for name in ("shift", "factor", "gate")}
    by_name |= {name: PartitionSpec(length) for name in ("cos", "sin", "second_mask", "second_gate")}
    specs = {name: by_name.get(name, PartitionSpec()) for name in operands}
    with jax.named_scope(MATMUL_SCOPE):
        return partitioner.shard_map(run, (specs,), tokens)(operands)
