# SPDX-License-Identifier: Apache-2.0
"""Each kernel for TPUs, in each of its branches, without a race or a read of memory that nothing wrote.

JAX's interpreter runs the kernels on two cores that share the grid. It detects races between them, and fills scratch,
results and the rows after an operand's end with NaN, which would reach the result.
"""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import wanjax
from tests.support.attention import BOUND, SMALL_TILES, exact, exact_gradients, normal, operands, run
from tests.support.compare import error
from tests.support.quick import quick
from tests.support.races import CORES, Report, detect_races
from wanjax.kernels import normed_silu, rotary_heads
from wanjax.kernels.attention import (
    Projection,
    SparseLinear,
    attention,
    flash_gradient,
    flash_tpu,
    reference,
    sparse_linear_attention,
    sparse_linear_kernel,
    sparse_linear_tpu,
)
from wanjax.kernels.attention.flash_tiles import Int8Config
from wanjax.kernels.attention.radial import Radial
from wanjax.kernels.attention.ring_weights import ShardedMatrix
from wanjax.kernels.quantized_matmul import (
    GatedSum,
    Modulation,
    QuantizedRows,
    RMSNormRotary,
    quantize_weight,
    quantized_mlp,
)
from wanjax.kernels.quantized_matmul import reference as quantized_reference
from wanjax.kernels.quantized_matmul import tiles as tiles_of_products
from wanjax.kernels.quantized_matmul import tpu as quantized_tpu
from wanjax.kernels.quantized_matmul import xla as quantized_xla
from wanjax.sharding import SHARDING_RULES, Partitioner, make_mesh, use_partitioner

SOURCE = Path(wanjax.__file__).parent
WIDE_TILES = flash_tpu.Config(512, 64, 64, interpret=True)


class Case(NamedTuple):
    """Kernels on small operands.

    Attributes:
        kernels: The names of the kernels that it runs.
        results: Runs them; returns the results and those of the reference in float64.
        bound: The largest relative error of a result.
        cores: The number of cores that compute; one for a kernel whose grid is sequential.
    """

    kernels: set[str]
    results: Callable[[], tuple[tuple, tuple]]
    bound: float
    cores: int = CORES


def out_of_range(q, k, v, key: int):
    """Return operands with loud keys from `key` on, whose logits leave the range of the offset."""
    direction = np.sign(np.asarray(q, np.float32)[:, :1, :1])
    k, loud = np.array(k), np.zeros(k.shape[1], bool)
    loud[key : key + 6] = True
    k = np.where(loud[:, None, None], 4000.0 / q.shape[3] * direction, k)
    return jnp.asarray(np.abs(np.asarray(q)) * direction, q.dtype), jnp.asarray(k, v.dtype), v


def dense(q, k, v, config=SMALL_TILES, **options) -> tuple[tuple, tuple]:
    return (run("flash_tpu", q, k, v, config=config, **options),), (exact(q, k, v, **options),)


def carried(q, k, v, ends, config=SMALL_TILES, num_keys=None) -> tuple[tuple, tuple]:
    """Add the keys up to each end to the sums of those before; of each example, the first `num_keys` take part."""

    @jax.jit
    def add_parts(q, k, v):
        sums: Any = None
        start = 0
        for end in ends:
            options = {"key_mask": None, "scale": 0.3, "config": config, "is_last": end == ends[-1]}
            if num_keys is not None:
                options["kv_length"] = jnp.clip(jnp.asarray(num_keys) - start, 0, end - start)
            sums = flash_tpu.attention_with_carry(q, k[:, start:end], v[:, start:end], sums, **options)
            start = end
        return sums

    mask = None if num_keys is None else np.arange(k.shape[1]) < np.asarray(num_keys)[:, None]
    return (add_parts(q, k, v)[0],), (exact(q, k, v, key_mask=mask, scale=0.3),)


def joining(q, k, v) -> tuple[tuple, tuple]:
    """Join the shards of two matrices while attention computes; the first shard is the last part of each matrix."""
    parts = [(1, [normal(10 + i, 16, 128) for i in range(3)]), (0, [normal(20 + i, 8, 32) for i in range(3)])]
    sharded = tuple(ShardedMatrix(tuple(shards), axis, jnp.int32(2)) for axis, shards in parts)
    options: Any = {"key_mask": None, "scale": 0.3, "config": SMALL_TILES, "is_last": True}
    attend = partial(flash_tpu.attention_with_carry, carry=None, **options)
    out, _, *joined = jax.jit(lambda q, k, v, sharded: attend(q, k, v, matrices=sharded))(q, k, v, sharded)
    expected = [np.concatenate([*shards[1:], shards[0]], axis) for axis, shards in parts]
    return (out, *joined), (exact(q, k, v, scale=0.3), *expected)


def radial(q, k, v, mask: Radial, keys: int) -> tuple[tuple, tuple]:
    """Attend under the mask to the first `keys` keys; the queries after them are padding."""
    config = flash_tpu.Config(256, 256, 256, interpret=True)
    out = jax.jit(partial(attention, implementation="flash_tpu", window=mask, config=config, kv_length=keys))(q, k, v)
    q, k, v = (x[:, :keys] for x in (q, k, v))
    bias = np.where(mask.token_mask(keys, keys), 0.0, -1e290)[None, None]
    return (out[:, :keys],), (exact(q, k, v, bias=bias),)


def gradients(q, k, v, config, num_keys=None) -> tuple[tuple, tuple]:
    """Compute the gradients from the reference's result; of each example, the first `num_keys` keys take part."""
    g, keys = normal(4, *q.shape, dtype=q.dtype.name), k.shape[1]
    num_keys = np.full(len(q), keys, np.int32) if num_keys is None else np.asarray(num_keys, np.int32)
    mask = np.arange(keys) < num_keys[:, None]

    @jax.jit
    def run(q, k, v, g, num_keys, mask):
        options = {"key_mask": mask, "window": None, "scale": 0.3, "bias": None, "config": None}
        out, lse = reference.attention(q, k, v, **options, return_lse=True)
        delta = (g.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)
        return flash_gradient.gradient(q, k, v, g, lse, delta, num_keys, scale=0.3, max_keys=keys, config=config)

    return run(q, k, v, g, num_keys, mask), exact_gradients(q, k, v, g, scale=0.3, key_mask=mask)[:3]


def sparse(q, k, v, top: float, keys: int, config) -> tuple[tuple, tuple]:
    """Run the three kernels on grid steps of a few tokens."""
    projection = Projection(0.2 * normal(7, 128, 128), normal(8, 128))
    options = {"sparse": SparseLinear(top), "kv_length": keys}
    with mock.patch.object(sparse_linear_kernel, "TOKENS_PER_STEP", 128):
        out = jax.jit(partial(sparse_linear_attention, implementation="tpu", config=config, **options))(
            q, k, v, projection
        )
    expected = jax.jit(partial(sparse_linear_attention, implementation="reference", **options))(q, k, v, projection)
    return (out[:, :keys],), (np.float64(expected[:, :keys]),)


def lists(rows: int, blocks: int, top_k: int) -> tuple[tuple, tuple]:
    """List the best blocks of scores with many ties."""
    scores = np.random.default_rng(2).choice(np.asarray([-2.5, -0.0, 0.0, 3.0], np.float32), (rows, blocks))
    sizes = sparse_linear_kernel.KernelSizes(1, 1, 1, 128, 64, top_k, 4, 1)
    out = jax.jit(partial(sparse_linear_kernel.list_blocks, sizes=sizes, interpret=True))(scores)
    best = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :top_k], axis=1)
    return (out[:, :top_k],), (np.float64(64 * best),)


def rotary(tokens: int, parts: int) -> tuple[tuple, tuple]:
    angle = normal(5, tokens, 64)
    options = normal(0, 2, tokens, 256), normal(1, 2, tokens, 1), normal(2, 256), jnp.cos(angle), jnp.sin(angle)
    out = jax.jit(partial(rotary_heads.call, parts=parts, interpret=True))(*options)
    return (out,), (np.float64(rotary_heads.reference(*options)),)


def head_rotary(tokens: int, size: int, parts: int) -> tuple[tuple, tuple]:
    angle = normal(5, tokens, size // 2)
    options = normal(0, 2, tokens, 256), normal(1, size), normal(2, size), jnp.cos(angle), jnp.sin(angle)
    out = jax.jit(partial(rotary_heads.call_by_head, eps=1e-6, parts=parts, interpret=True))(*options)
    return (out,), (np.float64(rotary_heads.reference_by_head(*options, eps=1e-6)),)


def moved_heads(tokens: int) -> tuple[tuple, tuple]:
    """Write heads apart, and join them again."""
    x = normal(0, 2, tokens, 256)
    parts = jnp.moveaxis(x.reshape(2, tokens, 2, 128), 2, 0)
    packed = jax.jit(partial(rotary_heads.pack, parts=2, interpret=True))(x)
    joined = jax.jit(partial(rotary_heads.join, parts=2, interpret=True))(parts)
    return (packed, joined), (np.float64(x), np.float64(x))


def silu(height: int, width: int) -> tuple[tuple, tuple]:
    x, gamma = normal(0, 1, 8, height, width, 96), normal(1, 96)
    with mock.patch.object(normed_silu, "BLOCK_BYTES", 4 * 8 * 128 * 6):  # six pixels
        out = jax.jit(partial(normed_silu.normed_silu, dtype="float32", interpret=True))(x, gamma)
    return (out,), (np.float64(normed_silu.reference(x, gamma, "float32")),)


def quantized(length: int, result: str, number_format: Any = "int8") -> tuple[tuple, tuple]:
    """Multiply rows of two examples by tiles that do not divide them, in each way that a block has."""
    options: Any = {"activations": number_format, "dtype": jnp.dtype("float32")}
    (x, residual), gate = (normal(seed, 2, length, 256) for seed in (0, 1)), normal(2, 2, 1, 256)
    up, down = (
        (
            quantize_weight(normal(seed, *sizes) / 16, number_format=number_format, hadamard_size=64),
            normal(seed + 1, sizes[1]),
        )
        for seed, sizes in ((3, (256, 512)), (5, (512, 256)))
    )
    modulation, gated_sum = Modulation(normal(7, 2, 1, 256), normal(8, 2, 1, 256)), GatedSum(residual, gate)
    normed = {"modulation": modulation, "eps": 1e-6}
    tiles = {"tiles": tiles_of_products.Tiles(64, 256, 32, 32), "interpret": True}
    if result == "rows":
        rows = jax.jit(
            partial(
                quantized_tpu.quantize,
                hadamard_size=64,
                number_format=number_format,
                dtype=options["dtype"],
                interpret=True,
                eps=1e-6,
            )
        )
        values, scale = rows(x, modulation=modulation)
        expected = quantized_xla.quantize(
            x, hadamard_size=64, number_format=number_format, dtype=options["dtype"], **normed
        )
        pairs = [(values.astype(jnp.float32) * scale, expected.values.astype(jnp.float32) * expected.scale)]
    elif result == "sum":
        product = partial(quantized_tpu.quantized_matmul, hadamard_size=64, **options, **tiles)
        expected = partial(quantized_xla.quantized_matmul, hadamard_size=64, **options)
        with_norm = jax.jit(partial(product, gelu=True, eps=1e-6))(x, *up, modulation=modulation)
        with_sum = jax.jit(product)(
            QuantizedRows(
                *quantized_xla.quantize(
                    with_norm, hadamard_size=64, number_format=number_format, dtype=options["dtype"]
                )
            ),
            *down,
            gated_sum=gated_sum,
        )
        pairs = [
            (with_norm, expected(x, *up, gelu=True, **normed)),
            (with_sum, expected(with_norm, *down, gated_sum=gated_sum)),
        ]
    elif result == "heads":
        angles = normal(9, length, 64)
        norm = RMSNormRotary(normal(10, 512), jnp.cos(angles), jnp.sin(angles))
        heads = partial(quantized_tpu.quantized_heads, hadamard_size=64, norm_eps=1e-6, parts=2, **options, **tiles)
        expected = partial(quantized_reference.quantized_heads, hadamard_size=64, norm_eps=1e-6, **options, **normed)
        pairs = [
            (jax.jit(partial(heads, eps=1e-6))(x, *up, norm, modulation=modulation), expected(x, *up, norm)),
        ]
    else:
        mlp = partial(quantized_tpu.quantized_mlp, hadamard_sizes=(64, 64), **options, **tiles, eps=1e-6)
        pairs = [
            (
                jax.jit(mlp)(x, up, down, modulation=modulation, gated_sum=gated_sum),
                quantized_mlp(x, up, down, hadamard_sizes=(64, 64), **options, **normed, gated_sum=gated_sum),
            )
        ]
    return tuple(output for output, _ in pairs), tuple(np.float64(expected) for _, expected in pairs)


def flash_cases() -> Iterator[tuple[str, Case]]:
    def case(
        results: Callable, *arguments, bound: float = BOUND["float32"], names: str = "flash_attention", **options
    ) -> Case:
        return Case({names}, partial(results, *arguments, **options), bound)

    small = operands(1, 200, 150, 2, 2, 64)
    pair = operands(2, 200, 150, 2, 1, 64)
    mask = np.arange(150) % 3 < 2
    mask = np.stack([mask, np.zeros_like(mask)])
    yield "one whole block", case(dense, *operands(1, 128, 64, 2, 2, 64))
    yield "ragged blocks", case(dense, *small)
    yield "bfloat16", case(dense, *operands(1, 200, 150, 2, 2, 64, "bfloat16"), bound=BOUND["bfloat16"])
    yield "bfloat16 of 128", case(dense, *operands(1, 200, 150, 2, 2, 128, "bfloat16"), bound=BOUND["bfloat16"])
    yield "a last block of few queries", case(dense, *operands(1, 600, 70, 2, 1, 64), config=WIDE_TILES)
    yield "the running-max path", case(dense, *out_of_range(*small, 70))
    yield "the running-max path of one block", case(dense, *out_of_range(*operands(1, 128, 60, 2, 2, 64), 40))
    yield "a key mask", case(dense, *pair, key_mask=mask)
    yield "a window", case(dense, *operands(1, 300, 300, 2, 2, 64), window=(200, 150))
    yield (
        "a window, the running-max path",
        case(dense, *out_of_range(*operands(1, 300, 300, 2, 2, 64), 100), window=(90, 90)),
    )
    int8 = partial(case, dense, bound=0.03, names="flash_attention_int8")
    of_128, int8_tiles = operands(1, 200, 150, 2, 1, 128, "bfloat16"), Int8Config(SMALL_TILES)
    yield "q kᵀ in int8, one whole block", int8(*operands(1, 128, 64, 2, 2, 128, "bfloat16"), config=int8_tiles)
    yield "q kᵀ in int8, ragged blocks", int8(*of_128, config=int8_tiles)
    yield "q kᵀ in int8, the running-max path", int8(*out_of_range(*of_128, 70), config=int8_tiles)
    yield (
        "q kᵀ in int8, a last block of few queries",
        int8(*out_of_range(*operands(1, 600, 70, 2, 1, 128, "bfloat16"), 50), config=Int8Config(WIDE_TILES)),
    )
    yield "carried sums", case(carried, *small, ends=(64, 128, 150))
    yield "carried sums of blocks", case(carried, *small, ends=(80, 150))
    yield "carried sums, the running-max path", case(carried, *out_of_range(*small, 70), ends=(64, 128, 150))
    yield "carried sums, the running-max path of blocks", case(carried, *out_of_range(*small, 140), ends=(50, 150))
    yield (
        "carried sums of few queries",
        case(carried, *operands(1, 600, 70, 2, 1, 64), ends=(40, 70), config=WIDE_TILES),
    )
    yield "joined shards", case(joining, *small)._replace(cores=1)
    yield "carried sums, counted keys", case(carried, *pair, ends=(64, 150), num_keys=(140, 50))


def other_cases() -> Iterator[tuple[str, Case]]:
    def of(kernels: str, results: Callable, *arguments, bound: float = BOUND["float32"], **options) -> Case:
        return Case(set(kernels.split()), partial(results, *arguments, **options), bound)

    mask, video = Radial(4, 140, 0.2, False, 128, 128), operands(1, 650, 650, 2, 2, 64)
    yield "a radial mask", of("flash_blocks", radial, *video, mask, 640)
    yield "a radial mask, text and a tail", of("flash_blocks", radial, *video, mask, 610)
    yield "a radial mask, the running-max path", of("flash_blocks", radial, *out_of_range(*video, 300), mask, 610)

    tiles = flash_gradient.Config(128, 128, 128, 512, True)
    parts, ahead = flash_gradient.Config(128, 256, 128, 128, True), operands(2, 200, 300, 1, 1, 64)
    gradient = partial(of, "flash_gradient", gradients, bound=3 * BOUND["float32"])
    yield "gradients of one block", gradient(*operands(1, 128, 128, 2, 2, 64), tiles)
    yield "gradients of blocks", gradient(*ahead, tiles)
    yield "gradients of counted keys", gradient(*ahead, tiles, num_keys=(260, 90))
    yield "gradients in parts", gradient(*ahead, parts)
    yield (
        "gradients in bfloat16",
        of(
            "flash_gradient",
            gradients,
            *operands(1, 200, 150, 2, 2, 128, "bfloat16"),
            tiles,
            bound=2 * BOUND["bfloat16"],
        ),
    )

    three = "sparse_linear_prepare sparse_linear_lists sparse_linear"
    tokens, config = operands(1, 330, 330, 2, 2, 128), sparse_linear_tpu.Config(2, 1, interpret=True)
    yield "sparse-linear attention", of(three, sparse, *operands(1, 256, 256, 2, 2, 128), 0.6, 256, config)
    yield "sparse-linear attention, a tail", of(three, sparse, *tokens, 0.9, 310, config)
    loud = (12 * tokens[0], 12 * tokens[1], tokens[2])
    yield "sparse-linear attention, steps repeated", of(three, sparse, *loud, 0.9, 310, config, bound=1e-5)
    yield "lists of ties", of("sparse_linear_lists", lists, 140, 150, 60, bound=0.0)

    for length in (256, 300):
        for count in (1, 2):
            yield f"norm and rotary of {length}, {count} parts", of("normed_rotary", rotary, length, count)
        yield f"heads apart and joined of {length}", of("heads_apart heads_joined", moved_heads, length, bound=0.0)
    for size, count in ((64, 1), (128, 2)):
        yield f"norm and rotary by heads of {size}", of("head_normed_rotary", head_rotary, 300, size, count)
    yield "rows in 8 bits", of("quantize_rows", quantized, 600, "rows", bound=1e-3)
    yield "products in 8 bits", of("quantized_matmul", quantized, 100, "sum", bound=1e-3)
    yield "products of 8-bit floats", of("quantized_matmul", quantized, 100, "sum", "fp8", bound=5e-3)
    yield "normed heads of a product in 8 bits", of("quantized_matmul", quantized, 100, "heads", bound=1e-3)
    yield "an MLP in 8 bits", of("quantized_matmul", quantized, 100, "mlp", bound=1e-2)
    yield "norm and SiLU", of("normed_silu", silu, 3, 4)
    yield "norm and SiLU, a ragged block", of("normed_silu", silu, 3, 5, bound=2 * BOUND["float32"])


CASES = dict([*flash_cases(), *other_cases()])
QUICK = (  # of each kernel and each branch
    "ragged blocks",
    "the running-max path",
    "a last block of few queries",
    "q kᵀ in int8, ragged blocks",
    "q kᵀ in int8, the running-max path",
    "q kᵀ in int8, a last block of few queries",
    "a window",
    "carried sums",
    "carried sums, the running-max path of blocks",
    "joined shards",
    "a radial mask, the running-max path",
    "gradients of counted keys",
    "sparse-linear attention, steps repeated",
    "norm and rotary of 300, 2 parts",
    "norm and rotary by heads of 64",
    "heads apart and joined of 300",
    "norm and SiLU, a ragged block",
    "rows in 8 bits",
    "products in 8 bits",
    "normed heads of a product in 8 bits",
    "an MLP in 8 bits",
)


@cache
def report_of(name: str) -> Report:
    """Run a case; its results must be those of the reference."""
    case = CASES[name]
    with detect_races() as report:
        outputs, expected = case.results()
        outputs = [np.asarray(x.astype(jnp.float32)) for x in outputs]
    for ours, expected_output in zip(outputs, expected, strict=True):
        assert error(ours, expected_output) <= case.bound
    return report


@pytest.mark.parametrize("name", quick(QUICK, CASES))
def test_no_race_and_no_undefined_value(name):
    report = report_of(name)
    assert report.num_races == 0
    assert report.kernels == CASES[name].kernels
    assert len(report.detectors) >= len(report.kernels)
    assert len(report.cores) == CASES[name].cores


@pytest.mark.slow
def test_a_ring_without_races():
    """Four devices of two cores each: keys are added to carried sums, and gradients go around with their keys."""
    q, k, v = operands(1, 64, 64, 2, 2, 64)
    g = normal(5, *q.shape)

    def loss(q, k, v):
        with use_partitioner(Partitioner(make_mesh(1, 4, 1, devices=jax.devices()[:4]), SHARDING_RULES["fsdp"])):
            return jnp.sum(g * attention(q, k, v, implementation="flash_tpu", config=SMALL_TILES, scale=0.3))

    with detect_races() as report:
        gradients = [np.asarray(x) for x in jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)]
    for ours, expected_gradient in zip(gradients, exact_gradients(q, k, v, g, scale=0.3), strict=False):
        assert error(ours, expected_gradient) <= 1.5 * BOUND["float32"]
    assert report.num_races == 0
    assert report.kernels == {"flash_attention", "flash_gradient"}
    assert len(report.detectors) >= 8


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    """Return the calls of a function, or attribute, whose name ends so."""

    def called(node: ast.Call) -> str:
        return getattr(node.func, "attr", getattr(node.func, "id", ""))

    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and called(node).endswith(name)]


def test_every_kernel_has_a_case():
    """A call of a kernel names it, unless it stands in a function that is called with the name."""
    names: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"\b(core_map|emit_pipeline|pl\.kernel|plgpu|triton)\b", text), (
            path
        )  # other ways to a kernel
        for call in calls(ast.parse(text), "pallas_call") if "pl.pallas_call" in text else ():
            argument = next(keyword.value for keyword in call.keywords if keyword.arg == "name")
            constants = {str(node.value) for node in ast.walk(argument) if isinstance(node, ast.Constant)}
            assert constants or path.name == "rotary_heads.py", path
            names |= constants
    assert len(names) >= 11
    assert names == {kernel for case in CASES.values() for kernel in case.kernels}
    assert names == {kernel for name in QUICK for kernel in CASES[name].kernels}


def test_every_branch_is_taken_and_passed_over():
    branches = {
        (path.name, call.lineno): set[bool]()
        for path in SOURCE.rglob("kernels/**/*.py")
        for call in calls(ast.parse(path.read_text()), "when")
    }
    for name in QUICK:
        for branch, values in report_of(name).branches.items():
            branches[branch] |= values
    assert len(branches) >= 20
    assert not {branch: values for branch, values in branches.items() if len(values) < 2}


def wrong_call(kernel: Callable, out_index: Callable, scratch: tuple = ()) -> jax.Array:
    """Call a kernel on two blocks, one for each core."""
    call = pl.pallas_call(
        kernel,
        grid=(2,),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((8, 128), out_index),
        out_shape=jax.ShapeDtypeStruct((16, 128), jnp.float32),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name="wrong",
    )
    return jax.jit(call)(jnp.ones((16, 128), jnp.float32))


def test_a_race_is_detected():
    """Both cores write the same block."""

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    for block, num_races in ((lambda i: (i, 0), 0), (lambda i: (0, 0), 1)):
        with detect_races() as report:
            wrong_call(kernel, block).block_until_ready()
        assert report.num_races == num_races
        assert report.cores == set(range(CORES))


def test_a_read_of_undefined_memory_is_detected():
    """Scratch, and rows of the result that are not written, are NaN."""

    def kernel(x_ref, out_ref, sum_ref):
        sum_ref[...] += x_ref[...]
        out_ref[...] = sum_ref[...]

    with detect_races() as report:
        out = wrong_call(kernel, lambda i: (i, 0), (pltpu.VMEM((8, 128), jnp.float32),))
        assert np.isnan(np.asarray(out)).all()
    assert report.num_races == 0
