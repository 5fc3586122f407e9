# SPDX-License-Identifier: Apache-2.0
"""The TPU kernels of quantized products are compared with their formula in float64, and compiled for TPUs."""

from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

from tests.support.attention import normal
from tests.support.compare import error
from tests.support.quantized import formula, outliers, rotated, rounded
from tests.support.quick import quick
from tests.support.small_wan import partitioner
from wanjax.errors import UnsupportedError, WanjaxError
from wanjax.kernels.alignment import ceil_div
from wanjax.kernels.quantized_matmul import (
    GatedSum,
    Modulation,
    QuantizedRows,
    QuantizedWeight,
    RMSNormRotary,
    api,
    quantize_tokens,
    quantize_weight,
    quantized_heads,
    quantized_matmul,
    quantized_mlp,
    reference,
    tpu,
    xla,
)
from wanjax.kernels.quantized_matmul.tiles import COMPILER_VMEM_BYTES, Product, Tiles, default_tiles
from wanjax.pricing.chips import abstract_mesh, find_slice
from wanjax.pricing.compile import compile_program
from wanjax.pricing.lowering import AbstractCall
from wanjax.pricing.pallas_kernels import kernel_calls
from wanjax.sharding import SHARDING_RULES, Partitioner, use_partitioner

SMALL = Tiles(64, 256, 32, 32)  # two strips, and tiles that divide no size below
NARROW = Tiles(64, 128, 32, 32)
EPS = 1e-6
BOUND = {"float32": 1e-6, "bfloat16": 3e-3}  # of a product of rows that are rounded already
# float32 sums may round a number between two steps the other way
ROUNDED_INPUT_BOUND = {"float32": 5e-4, "bfloat16": 3e-3}


def weight_and_bias(number_format: Any = "int8", hadamard_size=64, depth=512, columns=384, seed=0):
    kernel = normal(seed, depth, columns) / depth**0.5
    return quantize_weight(kernel, number_format=number_format, hadamard_size=hadamard_size), normal(seed + 1, columns)


def gelu(y):
    return y * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))


def vector_of_token(vectors, second_mask):
    """Return the vector of each token, in float64."""
    vectors = np.asarray(vectors, np.float64)
    return (
        vectors
        if second_mask is None
        else np.where(np.asarray(second_mask)[None, :, None], vectors[:, 1:], vectors[:, :1])
    )


def modulated_norm(x, modulation):
    """Return the modulated layer norm in float64."""
    shift, scale = (vector_of_token(vectors, modulation.second_mask) for vectors in modulation[:2])
    x = np.asarray(x, np.float64)
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPS)
    return y * (1 + scale) + shift


def run(
    x, weight, bias, number_format="int8", hadamard_size=64, dtype="float32", call=tpu.quantized_matmul, **options: Any
):
    options = {
        "hadamard_size": hadamard_size,
        "activations": number_format,
        "dtype": jnp.dtype(dtype),
        "interpret": True,
    } | options
    arrays = {name: options.pop(name) for name in ("modulation", "gated_sum") if name in options}
    return jax.jit(partial(call, **options))(x, weight, bias, **arrays)


@pytest.mark.parametrize("number_format", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [100, 20])
def test_products_of_rounded_rows_are_exact(length, dtype, number_format):
    """Tiles of 64 rows and 256 columns divide neither size, and 20 rows are fewer than a tile."""
    x = outliers(0, 2, length, 512)
    rows = QuantizedRows(
        *jax.jit(partial(xla.quantize, hadamard_size=64, number_format=number_format, dtype=jnp.dtype(dtype)))(x)
    )
    weight, bias = weight_and_bias(number_format)
    y = run(rows, weight, bias, number_format, dtype=dtype, tiles=SMALL)
    values = np.asarray(rows.values, np.float64) * np.asarray(rows.scale, np.float64)
    assert (y.dtype, y.shape) == (dtype, (2, length, 384))
    assert error(y.astype(jnp.float32), formula(values, weight, bias, 0, None)) <= BOUND[dtype]


CASES = [
    (number_format, hadamard_size, dtype)
    for number_format in ("int8", "fp8")
    for hadamard_size in (0, 16, 256)
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.parametrize(("number_format", "hadamard_size", "dtype"), quick([CASES[1], CASES[4], CASES[9]], CASES))
def test_a_product_rounds_its_rows(number_format, hadamard_size, dtype):
    x, (weight, bias) = outliers(0, 2, 100, 512, dtype=dtype), weight_and_bias(number_format, hadamard_size)
    y = run(x, weight, bias, number_format, hadamard_size, dtype, tiles=SMALL)
    assert (
        error(y.astype(jnp.float32), formula(x, weight, bias, hadamard_size, number_format))
        <= ROUNDED_INPUT_BOUND[dtype]
    )


@pytest.mark.parametrize("dtype", quick(["float32"], ["float32", "bfloat16"]))
@pytest.mark.parametrize(("separate_pass", "num_vectors"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_a_product_includes_the_norm_before_and_the_sum_after(separate_pass, num_vectors, dtype, monkeypatch):
    """Each example has its own modulations and gates. With `separate_pass`, another kernel rounds the rows."""
    monkeypatch.setattr(tpu, "MAX_DEPTH", 256 if separate_pass else 8192)
    x, (weight, bias) = 2 + outliers(0, 2, 70, 512, dtype=dtype), weight_and_bias()
    second_mask = None if num_vectors == 1 else jnp.arange(70) % 45 > 40  # in the middle of a strip, and at its end
    modulation = Modulation(0.3 * normal(3, 2, num_vectors, 512), 0.3 * normal(4, 2, num_vectors, 512), second_mask)
    gated_sum = GatedSum(normal(5, 2, 70, 384, dtype=dtype), normal(6, 2, num_vectors, 384), second_mask)
    tiles: Any = {} if separate_pass else {"tiles": SMALL}
    y = run(x, weight, bias, dtype=dtype, modulation=modulation, eps=EPS, gated_sum=gated_sum, **tiles)
    product = formula(modulated_norm(x, modulation).astype(dtype), weight, bias, 64, "int8")
    expected = np.asarray(gated_sum.residual, np.float64) + vector_of_token(gated_sum.gate, second_mask) * product
    assert y.dtype == dtype
    assert error(y.astype(jnp.float32), expected) <= ROUNDED_INPUT_BOUND[dtype]
    out = jax.jit(partial(quantized_matmul, hadamard_size=64, activations="int8", dtype=dtype, eps=EPS))(
        x, weight, bias, modulation=modulation, gated_sum=gated_sum
    )
    assert error(out.astype(jnp.float32), expected) <= ROUNDED_INPUT_BOUND[dtype]


def heads_norm(length, channels, rotates=True):
    angles = normal(9, length, 64)
    return RMSNormRotary(normal(8, channels), *((jnp.cos(angles), jnp.sin(angles)) if rotates else ()))


def norm_and_rotate(y, norm):
    """Return the RMS norm of whole rows, or of each head, and the rotation of heads, in float64."""
    scale, *tables = (np.asarray(array, np.float64) for array in norm if array is not None)
    groups = y.reshape(*y.shape[:2], -1, len(scale))
    y = (groups / np.sqrt((groups * groups).mean(-1, keepdims=True) + EPS) * scale).reshape(y.shape)
    if not tables:
        return y
    cos, sin = (table[None, :, None] for table in tables)
    a, b = np.split(y.reshape(*y.shape[:2], -1, 128), 2, axis=-1)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(y.shape)


# Other number formats and dtypes are quick in test_a_product_rounds_its_rows.
FORMATS_OF_HEADS = [("int8", "float32"), ("int8", "bfloat16"), ("fp8", "float32")]
PARTS_OF_HEADS = [(False, 1), (True, 1), (True, 2), (True, 4)]


@pytest.mark.parametrize(("number_format", "dtype"), quick(FORMATS_OF_HEADS[:1], FORMATS_OF_HEADS))
@pytest.mark.parametrize(("rotates", "parts"), quick([(False, 1), (True, 4)], PARTS_OF_HEADS))
@pytest.mark.parametrize("channels", [512, 128])
def test_a_product_norms_and_rotates_its_heads(channels, rotates, parts, number_format, dtype):
    """The norm is of all heads or of each. The column tiles of 256 lie in one group of heads, or contain two."""
    x, (weight, bias) = outliers(0, 2, 100, 512, dtype=dtype), weight_and_bias(number_format, columns=512)
    norm = heads_norm(100, channels, rotates)
    expected = norm_and_rotate(formula(x, weight, bias, 64, number_format), norm)
    kernel = partial(tpu.quantized_heads, parts=parts, tiles=SMALL, interpret=True)
    for call in (kernel, quantized_heads, reference.quantized_heads):
        options = {"norm_eps": EPS, "hadamard_size": 64, "activations": number_format, "dtype": jnp.dtype(dtype)}
        y = jax.jit(partial(call, **options))(x, weight, bias, norm)
        assert (y.dtype, y.shape) == (dtype, (2, 100, 512))
        assert error(y.astype(jnp.float32), expected) <= 2 * ROUNDED_INPUT_BOUND[dtype]  # bfloat16 is rounded twice


@pytest.mark.parametrize("parts", quick([4], [1, 2, 4]))
def test_values_are_written_in_groups_of_heads(parts):
    """Values have no norm. They are equal to those of a product in one group, bit for bit."""
    x, (weight, bias) = outliers(0, 2, 100, 512, dtype="bfloat16"), weight_and_bias(columns=512)
    options = {"hadamard_size": 64, "activations": "int8", "dtype": jnp.dtype("bfloat16")}
    expected = run(x, weight, bias, dtype="bfloat16", tiles=SMALL)
    kernel = partial(tpu.quantized_heads, norm=None, parts=parts, tiles=SMALL, interpret=True)
    np.testing.assert_array_equal(jax.jit(partial(kernel, **options))(x, weight, bias), expected)
    for call in (quantized_heads, partial(reference.quantized_heads, norm=None)):
        y = jax.jit(partial(call, **options))(x, weight, bias)
        assert error(y.astype(jnp.float32), formula(x, weight, bias, 64, "int8")) <= ROUNDED_INPUT_BOUND["bfloat16"]


@pytest.mark.parametrize("separate_pass", [False, True])
def test_a_product_includes_the_norms_before_and_after(separate_pass, monkeypatch):
    """Rows may have any root mean square: the third row is a thousandth of the others, and the fourth is zero."""
    monkeypatch.setattr(tpu, "MAX_DEPTH", 256 if separate_pass else 8192)
    x, (weight, bias) = 2 + outliers(0, 2, 70, 512), weight_and_bias(columns=512)
    x = x.at[:, 2].multiply(1e-3).at[:, 3].set(0.0)
    modulation = Modulation(jnp.zeros((2, 1, 512)), 0.3 * normal(4, 2, 1, 512))
    norm, tiles = heads_norm(70, 512), {} if separate_pass else {"tiles": SMALL}
    expected = norm_and_rotate(formula(modulated_norm(x, modulation), weight, bias, 64, "int8"), norm)
    options = {"norm_eps": EPS, "hadamard_size": 64, "activations": "int8", "dtype": jnp.dtype("float32"), "eps": EPS}
    kernel = partial(tpu.quantized_heads, parts=2, interpret=True, **tiles)
    for call in (kernel, quantized_heads):
        y = jax.jit(partial(call, **options))(x, weight, bias, norm, modulation=modulation)
        assert error(y, expected) <= ROUNDED_INPUT_BOUND["float32"]


def test_gradients_pass_the_norm_unless_inputs_are_rounded():
    x, (weight, bias), norm = normal(0, 1, 40, 512), weight_and_bias(columns=512), heads_norm(40, 512)
    options = {"norm_eps": EPS, "hadamard_size": 64, "dtype": "float32"}

    def loss(x, activations=None):
        return jnp.sum(
            normal(5, 1, 40, 512) * quantized_heads(x, weight, bias, norm, activations=activations, **options)
        )

    direction, size = normal(6, 1, 40, 512), 1e-2
    slope = (loss(x + size * direction) - loss(x - size * direction)) / (2 * size)
    np.testing.assert_allclose(jnp.vdot(jax.grad(loss)(x), direction), slope, rtol=1e-2)
    with pytest.raises(UnsupportedError, match="activations=None"):
        jax.grad(partial(loss, activations="int8"))(x)


def test_a_product_includes_gelu_and_needs_no_bias():
    x, (weight, _) = normal(0, 1, 100, 512, dtype="bfloat16"), weight_and_bias()
    expected = gelu(formula(x, weight, None, 64, "int8"))
    for call, options in ((tpu.quantized_matmul, {"tiles": SMALL, "interpret": True}), (quantized_matmul, {})):
        product = partial(call, hadamard_size=64, activations="int8", dtype=jnp.dtype("bfloat16"), gelu=True, **options)
        assert error(jax.jit(product)(x, weight, None).astype(jnp.float32), expected) <= 3e-3


def test_the_residual_keeps_its_dtype():
    x, (weight, bias) = normal(0, 1, 40, 512, dtype="bfloat16"), weight_and_bias()
    gated_sum = GatedSum(normal(5, 1, 40, 384), normal(6, 1, 1, 384))
    expected = np.asarray(gated_sum.residual, np.float64) + np.asarray(gated_sum.gate, np.float64) * formula(
        x, weight, bias, 64, "int8"
    )
    for y in (
        run(x, weight, bias, dtype="bfloat16", gated_sum=gated_sum, tiles=SMALL),
        quantized_matmul(x, weight, bias, hadamard_size=64, activations="int8", dtype="bfloat16", gated_sum=gated_sum),
    ):
        assert y.dtype == "float32"
        assert error(y, expected) <= ROUNDED_INPUT_BOUND["float32"]


@pytest.mark.parametrize("number_format", ["int8", "fp8"])
@pytest.mark.parametrize("hadamard_size", [0, 64])
def test_rows_are_rounded_by_a_kernel(hadamard_size, number_format):
    """The inputs are float32: few of these numbers lie halfway between two steps."""
    x = outliers(0, 2, 300, 512)
    options = {"hadamard_size": hadamard_size, "number_format": number_format, "dtype": jnp.dtype("float32")}
    values, scale = jax.jit(partial(tpu.quantize, **options, interpret=True))(x)
    expected_values, expected_scale = jax.jit(partial(xla.quantize, **options))(x)
    np.testing.assert_allclose(scale, expected_scale, rtol=1e-6)
    expected = rounded(rotated(np.asarray(x, np.float64), hadamard_size), number_format)
    for rounded_values in (values, expected_values):
        assert (
            error(np.asarray(rounded_values, np.float64) * np.asarray(scale, np.float64), expected)
            <= ROUNDED_INPUT_BOUND["float32"]
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_mlp_rounds_between_its_products(dtype):
    """Each row has a scale for each of the three column tiles."""
    x, up, down = normal(0, 2, 70, 512, dtype=dtype), weight_and_bias(columns=768), weight_and_bias(depth=768, seed=2)
    second_mask = jnp.arange(70) >= 50
    gated_sum = GatedSum(normal(5, 2, 70, 384, dtype=dtype), normal(6, 2, 2, 384), second_mask)
    options = {"hadamard_sizes": (64, 64), "activations": "int8", "dtype": jnp.dtype(dtype)}
    y = jax.jit(partial(tpu.quantized_mlp, **options, tiles=SMALL, interpret=True))(x, up, down, gated_sum=gated_sum)
    hidden = gelu(formula(x, *up, 64, "int8"))
    parts = [rounded(rotated(part, 64), "int8") for part in np.split(hidden, 3, axis=-1)]
    product = formula(np.concatenate(parts, axis=-1), *down, 0, None)
    expected = np.asarray(gated_sum.residual, np.float64) + vector_of_token(gated_sum.gate, second_mask) * product
    assert y.dtype == dtype
    assert error(y.astype(jnp.float32), expected) <= {"float32": 1e-3, "bfloat16": 1e-2}[dtype]
    out = jax.jit(partial(quantized_mlp, **options))(x, up, down, gated_sum=gated_sum)
    assert error(out.astype(jnp.float32), expected) <= 2e-2  # a scale for each row


def test_tokens_rounded_in_advance_give_the_same_result():
    x, (weight, bias) = normal(0, 2, 40, 512), weight_and_bias()
    options: dict[str, Any] = {"hadamard_size": 64, "activations": "int8", "dtype": "float32"}
    modulation = Modulation(*(0.3 * normal(seed, 2, 1, 512) for seed in (3, 4)))
    rows = quantize_tokens(x, weight, **options, modulation=modulation, eps=EPS)
    out = quantized_matmul(rows, weight, bias, **options)
    np.testing.assert_array_equal(out, quantized_matmul(x, weight, bias, **options, modulation=modulation, eps=EPS))
    with pytest.raises(UnsupportedError, match="activations=None"):
        jax.grad(lambda x: quantize_tokens(x, weight, **options).scale.sum())(x)
    with pytest.raises(UnsupportedError, match="format"):
        quantized_matmul(rows, weight, bias, hadamard_size=64, activations=None, dtype="float32")


@pytest.mark.parametrize("axes", [(2, 1, 4), pytest.param((1, 4, 2), marks=pytest.mark.slow)])
def test_each_of_eight_devices_computes_its_rows(axes):
    x, up = normal(0, 2, 512, 512), weight_and_bias()
    second_mask = jnp.arange(512) >= 500
    gated_sum = GatedSum(normal(5, 2, 512, 384), normal(6, 2, 2, 384), second_mask)
    modulation = Modulation(0.3 * normal(3, 2, 2, 512), 0.3 * normal(4, 2, 2, 512), second_mask)
    options: dict[str, Any] = {"modulation": modulation, "eps": EPS, "gated_sum": gated_sum}
    one_device = run(x, *up, **options)
    with use_partitioner(partitioner(axes, "fsdp")):
        sharded = run(x, *up, **options)
        assert len(sharded.sharding.device_set) == 8
    assert error(sharded, np.asarray(one_device, np.float64)) <= 1e-6
    norm = heads_norm(512, 384)

    def heads(parts):
        return run(x, *up, call=partial(tpu.quantized_heads, norm=norm, norm_eps=EPS, parts=parts, tiles=NARROW))

    one_device = heads(1)
    with use_partitioner(partitioner(axes, "fsdp")):
        for parts in (1, 3):
            sharded = heads(parts)
            assert len(sharded.sharding.device_set) == 8
            assert error(sharded, np.asarray(one_device, np.float64)) <= 1e-6


TPU = {"v6e": AbstractDevice("TPU v6 lite", 1, "tpu"), "v7x": AbstractDevice("TPU7x", 1, "tpu")}


def reason_against_kernel(
    chip, number_format="int8", hadamard_size=256, shape=(1, 512, 512), columns=384, dtype="bfloat16"
):
    """Return why a product on a chip does not use the kernel; None if it does."""
    values: Any = jax.ShapeDtypeStruct((shape[-1], columns), {"int8": "int8", "fp8": "float8_e4m3fn"}[number_format])
    scale: Any = jax.ShapeDtypeStruct((columns,), "float32")
    weight = QuantizedWeight(values, scale)
    x: Any = jax.ShapeDtypeStruct(shape, dtype)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("chips",), abstract_device=TPU[chip])):
        reason: Any = tpu.unsupported(x, weight, hadamard_size, jnp.dtype(dtype))
        assert api.uses_kernel(x, weight, hadamard_size, jnp.dtype(dtype)) == (reason is None)
    return reason


def test_the_kernel_is_used_where_it_is_faster_and_fits():
    assert (
        reason_against_kernel("v6e")
        is reason_against_kernel("v7x", "fp8")
        is reason_against_kernel("v6e", shape=(2, 18900, 13824), columns=5120)
        is None
    )
    assert "faster" in reason_against_kernel("v6e", "fp8")
    assert "L of at least 32" in reason_against_kernel("v6e", shape=(1, 1, 512))
    assert "L of at least 32" in reason_against_kernel("v6e", shape=(512, 512))
    assert "channels" in reason_against_kernel("v6e", hadamard_size=64, shape=(1, 512, 384))
    assert "channels" in reason_against_kernel("v6e", columns=100)
    assert "channels" in reason_against_kernel("v6e", hadamard_size=1024, shape=(1, 512, 1024))
    assert "float16" in reason_against_kernel("v6e", dtype="float16")
    assert "VMEM" in reason_against_kernel("v6e", shape=(1, 512, 256 * 1024), columns=1280)
    with use_partitioner(partitioner((1, 2, 4), "tp")):
        assert "sharded weights" in reason_against_kernel("v6e")


def test_xla_computes_the_product_on_other_devices():
    weight, _ = weight_and_bias()
    assert "TPUs" in str(tpu.unsupported(normal(0, 1, 64, 512), weight, 64, jnp.dtype("float32")))
    assert not api.uses_kernel(normal(0, 1, 64, 512), weight, 64, jnp.dtype("float32"))


@pytest.mark.parametrize("vmem", [128, 64])
@pytest.mark.parametrize("rows", [1, 100, 512, 18_900, 75_600])
@pytest.mark.parametrize(("depth", "columns"), [(5120, 5120), (5120, 13824), (13824, 5120), (1536, 8960), (3072, 3072)])
def test_default_tiles_fit_vmem_and_waste_little(depth, columns, rows, vmem):
    changes_of_products = (
        {"quantizes": depth <= 8192, "has_residual": True},
        {"gelu": True, "quantizes_result": True},
        {"quantizes": depth <= 8192, "keeps_rows": True},
        {},
    )
    for changes in changes_of_products:
        product = Product(rows, depth, columns, 2, **changes)
        tiles = default_tiles(product, vmem << 20)
        assert tiles is not None
        assert product.vmem_bytes(tiles) + COMPILER_VMEM_BYTES <= vmem << 20
        assert tiles.rows * ceil_div(rows, tiles.rows) <= 1.03 * rows + 32
        assert tiles.columns * ceil_div(columns, tiles.columns) <= 1.1 * columns
        assert columns % tiles.columns == 0 or not {"quantizes_result", "keeps_rows"} & changes.keys()


def test_default_tiles_are_those_that_were_priced_fastest():
    sizes = {"square": (5120, 5120), "up": (5120, 13824), "down": (13824, 5120)}
    tiles = {
        name: default_tiles(Product(18_900, *size, 2, has_residual=True), 128 << 20) for name, size in sizes.items()
    }
    assert tiles["square"] == Tiles(2112, 1280, 704, 192)
    assert tiles["down"] == Tiles(1056, 1280, 352, 96)


@pytest.mark.parametrize("sizes", [(64, 256, 48, 32), (64, 100, 32, 32), (96, 256, 64, 32), (64, 256, 32, 0)])
def test_tiles_that_do_not_divide_are_refused(sizes):
    with pytest.raises(WanjaxError, match="multiple"):
        Tiles(*sizes)


SLOW_CHIPS = [("v5e-1", "int8"), ("v7x-8", "int8"), ("v7x-8", "fp8")]


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
@pytest.mark.parametrize(
    ("chip", "number_format"), [("v6e-1", "int8"), *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW_CHIPS)]
)
def test_a_chip_s_compiler_accepts_the_kernels(chip, number_format):
    """A block has these products: one of tokens that are already rounded, one with a sum, and an MLP with its norm."""
    target = find_slice(chip)
    mesh = abstract_mesh(target, {"dp": 1, "sp": 1, "tp": target.devices})
    replicated = NamedSharding(mesh, PartitionSpec())

    def shape(*sizes, dtype="bfloat16") -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=replicated)

    def weight(depth, columns):
        values = shape(depth, columns, dtype={"int8": "int8", "fp8": "float8_e4m3fn"}[number_format])
        return QuantizedWeight(values, shape(columns, dtype="float32"))

    def block(x, square, up, down, modulation, gate, second_mask, norm, head_scale):
        options: Any = {"activations": number_format, "dtype": "bfloat16"}
        rows = quantize_tokens(x, square, hadamard_size=256, **options, modulation=modulation)
        q = quantized_heads(rows, square, None, norm, norm_eps=EPS, hadamard_size=256, **options)
        y = quantized_heads(q, square, None, RMSNormRotary(head_scale), norm_eps=EPS, hadamard_size=256, **options)
        x = quantized_matmul(y, square, None, hadamard_size=256, **options, gated_sum=GatedSum(x, gate, second_mask))
        mlp = partial(quantized_mlp, hadamard_sizes=(256, 256), **options, modulation=modulation)
        return mlp(x, (up, None), (down, None), gated_sum=GatedSum(x, gate, second_mask))

    def sharded(*operands):
        with use_partitioner(Partitioner(mesh, SHARDING_RULES["fsdp"])):
            return block(*operands)

    vectors, second_mask = shape(1, 2, 512, dtype="float32"), shape(1000, dtype="bool")
    shapes = shape(1, 1000, 512), weight(512, 512), weight(512, 1024), weight(1024, 512)
    head_scale = shape(128, dtype="float32")
    norm = RMSNormRotary(shape(512, dtype="float32"), *2 * [shape(1000, 64, dtype="float32")])
    compiled = compile_program(
        AbstractCall(
            sharded, (*shapes, Modulation(vectors, vectors, second_mask), vectors, second_mask, norm, head_scale)
        ),
        chip,
    )
    calls = kernel_calls(compiled).values()
    assert sorted(call.name for call in calls) == ["quantize_rows", *5 * ["quantized_matmul"]]
    weight_dtype = shapes[1].values.dtype.name  # prices distinguish kernels by this dtype
    assert all(weight_dtype in dict(call.operands) for call in calls if call.name == "quantized_matmul")
