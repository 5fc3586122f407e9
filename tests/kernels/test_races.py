# SPDX-License-Identifier: Apache-2.0
"""Each branch of each TPU kernel runs without a race and without a read of uninitialized memory.

JAX's interpreter runs the kernels on two cores that share the grid. It detects races between the cores. It fills
scratch, results and the rows after an operand's end with NaN, so that a read of them changes the result.
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
    SparseLinearAttentionConfig,
    attention,
    flash_gradient,
    flash_tpu,
    merge,
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
        kernels: The names of the kernels that the case runs.
        results: Runs the kernels; returns their results and the reference's in float64.
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


def run_dense(q, k, v, config=SMALL_TILES, **options) -> tuple[tuple, tuple]:
    return (run("flash_tpu", q, k, v, config=config, **options),), (exact(q, k, v, **options),)


def run_in_parts(q, k, v, ends, config=SMALL_TILES, num_keys=None) -> tuple[tuple, tuple]:
    """Attend to the keys part by part, up to each end; each example attends to its first `num_keys` keys."""

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


def run_joining_shards(q, k, v) -> tuple[tuple, tuple]:
    """Join the shards of two matrices while attention computes; the first shard is the last part of each matrix."""
    parts = [(1, [normal(10 + i, 16, 128) for i in range(3)]), (0, [normal(20 + i, 8, 32) for i in range(3)])]
    sharded = tuple(ShardedMatrix(tuple(shards), axis, jnp.int32(2)) for axis, shards in parts)
    options: Any = {"key_mask": None, "scale": 0.3, "config": SMALL_TILES, "is_last": True}
    attend = partial(flash_tpu.attention_with_carry, carry=None, **options)
    out, _, *joined = jax.jit(lambda q, k, v, sharded: attend(q, k, v, matrices=sharded))(q, k, v, sharded)
    expected = [np.concatenate([*shards[1:], shards[0]], axis) for axis, shards in parts]
    return (out, *joined), (exact(q, k, v, scale=0.3), *expected)


def run_radial(q, k, v, mask: Radial, keys: int) -> tuple[tuple, tuple]:
    """Attend under the mask to the first `keys` keys; the queries after them are padding."""
    config = flash_tpu.Config(256, 256, 256, interpret=True)
    out = jax.jit(partial(attention, implementation="flash_tpu", window=mask, config=config, kv_length=keys))(q, k, v)
    q, k, v = (x[:, :keys] for x in (q, k, v))
    bias = np.where(mask.token_mask(keys, keys), 0.0, -1e290)[None, None]
    return (out[:, :keys],), (exact(q, k, v, bias=bias),)


def gradients(q, k, v, config, num_keys=None) -> tuple[tuple, tuple]:
    """Compute the gradients from the reference's result; each example attends to its first `num_keys` keys."""
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


def run_sparse_linear(q, k, v, top: float, keys: int, config) -> tuple[tuple, tuple]:
    """Run the three kernels on grid steps of a few tokens."""
    projection = Projection(0.2 * normal(7, 128, 128), normal(8, 128))
    options = {"sparse": SparseLinearAttentionConfig(top), "kv_length": keys}
    with mock.patch.object(sparse_linear_kernel, "TOKENS_PER_STEP", 128):
        out = jax.jit(partial(sparse_linear_attention, implementation="tpu", config=config, **options))(
            q, k, v, projection
        )
    expected = jax.jit(partial(sparse_linear_attention, implementation="reference", **options))(q, k, v, projection)
    return (out[:, :keys],), (np.float64(expected[:, :keys]),)


def run_lists(rows: int, blocks: int, top_k: int) -> tuple[tuple, tuple]:
    """List the best blocks of scores with many ties."""
    scores = np.random.default_rng(2).choice(np.asarray([-2.5, -0.0, 0.0, 3.0], np.float32), (rows, blocks))
    sizes = sparse_linear_kernel.KernelSizes(1, 1, 1, 128, 64, top_k, 4, 1)
    out = jax.jit(partial(sparse_linear_kernel.list_blocks, sizes=sizes, interpret=True))(scores)
    best = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :top_k], axis=1)
    return (out[:, :top_k],), (np.float64(64 * best),)


def run_rotary(tokens: int, parts: int) -> tuple[tuple, tuple]:
    angle = normal(5, tokens, 64)
    options = normal(0, 2, tokens, 256), normal(1, 2, tokens, 1), normal(2, 256), jnp.cos(angle), jnp.sin(angle)
    out = jax.jit(partial(rotary_heads.call, parts=parts, interpret=True))(*options)
    return (out,), (np.float64(rotary_heads.reference(*options)),)


def run_head_rotary(tokens: int, size: int, parts: int) -> tuple[tuple, tuple]:
    angle = normal(5, tokens, size // 2)
    options = normal(0, 2, tokens, 256), normal(1, size), normal(2, size), jnp.cos(angle), jnp.sin(angle)
    out = jax.jit(partial(rotary_heads.call_by_head, eps=1e-6, parts=parts, interpret=True))(*options)
    return (out,), (np.float64(rotary_heads.reference_by_head(*options, eps=1e-6)),)


def run_packing(tokens: int) -> tuple[tuple, tuple]:
    """Write heads apart, and join them again."""
    x = normal(0, 2, tokens, 256)
    parts = jnp.moveaxis(x.reshape(2, tokens, 2, 128), 2, 0)
    packed = jax.jit(partial(rotary_heads.pack, parts=2, interpret=True))(x)
    joined = jax.jit(partial(rotary_heads.join, parts=2, interpret=True))(parts)
    return (packed, joined), (np.float64(x), np.float64(x))


def run_merge(length: int, start: int) -> tuple[tuple, tuple]:
    x, y, share = normal(0, 2, length, 256), normal(1, 2, length - 2 * start, 256), normal(2, 2, length - 2 * start, 2)
    out = jax.jit(partial(merge.call, start=start, interpret=True))(x, y, share)
    return (out,), (np.float64(merge.reference(x, y, share, start=start)),)


def run_silu(height: int, width: int) -> tuple[tuple, tuple]:
    x, gamma = normal(0, 1, 8, height, width, 96), normal(1, 96)
    with mock.patch.object(normed_silu, "BLOCK_BYTES", 4 * 8 * 128 * 6):  # six pixels
        out = jax.jit(partial(normed_silu.normed_silu, dtype="float32", interpret=True))(x, gamma)
    return (out,), (np.float64(normed_silu.reference(x, gamma, "float32")),)


def run_quantized(length: int, result: str, number_format: Any = "int8") -> tuple[tuple, tuple]:
    """Multiply rows of two examples as a block does; the tiles do not divide the rows."""
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
    yield "one whole block", case(run_dense, *operands(1, 128, 64, 2, 2, 64))
    yield "ragged blocks", case(run_dense, *small)
    yield "bfloat16", case(run_dense, *operands(1, 200, 150, 2, 2, 64, "bfloat16"), bound=BOUND["bfloat16"])
    yield "bfloat16 of 128", case(run_dense, *operands(1, 200, 150, 2, 2, 128, "bfloat16"), bound=BOUND["bfloat16"])
    yield "a last block of few queries", case(run_dense, *operands(1, 600, 70, 2, 1, 64), config=WIDE_TILES)
    yield "the running-max path", case(run_dense, *out_of_range(*small, 70))
    yield "the running-max path of one block", case(run_dense, *out_of_range(*operands(1, 128, 60, 2, 2, 64), 40))
    yield "a key mask", case(run_dense, *pair, key_mask=mask)
    yield "a window", case(run_dense, *operands(1, 300, 300, 2, 2, 64), window=(200, 150))
    yield (
        "a window, the running-max path",
        case(run_dense, *out_of_range(*operands(1, 300, 300, 2, 2, 64), 100), window=(90, 90)),
    )
    int8 = partial(case, run_dense, bound=0.03, names="flash_attention_int8")
    heads_of_128, int8_tiles = operands(1, 200, 150, 2, 1, 128, "bfloat16"), Int8Config(SMALL_TILES)
    yield "q kᵀ in int8, one whole block", int8(*operands(1, 128, 64, 2, 2, 128, "bfloat16"), config=int8_tiles)
    yield "q kᵀ in int8, ragged blocks", int8(*heads_of_128, config=int8_tiles)
    yield "q kᵀ in int8, the running-max path", int8(*out_of_range(*heads_of_128, 70), config=int8_tiles)
    yield (
        "q kᵀ in int8, a last block of few queries",
        int8(*out_of_range(*operands(1, 600, 70, 2, 1, 128, "bfloat16"), 50), config=Int8Config(WIDE_TILES)),
    )
    yield "carried sums", case(run_in_parts, *small, ends=(64, 128, 150))
    yield "carried sums of blocks", case(run_in_parts, *small, ends=(80, 150))
    yield "carried sums, the running-max path", case(run_in_parts, *out_of_range(*small, 70), ends=(64, 128, 150))
    yield "carried sums, the running-max path of blocks", case(run_in_parts, *out_of_range(*small, 140), ends=(50, 150))
    yield (
        "carried sums of few queries",
        case(run_in_parts, *operands(1, 600, 70, 2, 1, 64), ends=(40, 70), config=WIDE_TILES),
    )
    yield "joined shards", case(run_joining_shards, *small)._replace(cores=1)
    yield "carried sums, counted keys", case(run_in_parts, *pair, ends=(64, 150), num_keys=(140, 50))


def other_cases() -> Iterator[tuple[str, Case]]:
    def case_of(kernels: str, results: Callable, *arguments, bound: float = BOUND["float32"], **options) -> Case:
        return Case(set(kernels.split()), partial(results, *arguments, **options), bound)

    mask, video = Radial(4, 140, 0.2, False, 128, 128), operands(1, 650, 650, 2, 2, 64)
    yield "a radial mask", case_of("flash_blocks", run_radial, *video, mask, 640)
    yield "a radial mask, text and a tail", case_of("flash_blocks", run_radial, *video, mask, 610)
    yield (
        "a radial mask, the running-max path",
        case_of("flash_blocks", run_radial, *out_of_range(*video, 300), mask, 610),
    )

    tiles = flash_gradient.Config(128, 128, 128, 512, True)
    tiles_in_parts, padded_operands = flash_gradient.Config(128, 256, 128, 128, True), operands(2, 200, 300, 1, 1, 64)
    gradient = partial(case_of, "flash_gradient", gradients, bound=3 * BOUND["float32"])
    yield "gradients of one block", gradient(*operands(1, 128, 128, 2, 2, 64), tiles)
    yield "gradients of blocks", gradient(*padded_operands, tiles)
    yield "gradients of counted keys", gradient(*padded_operands, tiles, num_keys=(260, 90))
    yield "gradients in parts", gradient(*padded_operands, tiles_in_parts)
    yield (
        "gradients in bfloat16",
        case_of(
            "flash_gradient",
            gradients,
            *operands(1, 200, 150, 2, 2, 128, "bfloat16"),
            tiles,
            bound=2 * BOUND["bfloat16"],
        ),
    )

    kernels_of_sparse_linear = "sparse_linear_prepare sparse_linear_lists sparse_linear"
    tokens, config = operands(1, 330, 330, 2, 2, 128), sparse_linear_tpu.Config(2, 1, interpret=True)
    yield (
        "sparse-linear attention",
        case_of(kernels_of_sparse_linear, run_sparse_linear, *operands(1, 256, 256, 2, 2, 128), 0.6, 256, config),
    )
    yield (
        "sparse-linear attention, a tail",
        case_of(kernels_of_sparse_linear, run_sparse_linear, *tokens, 0.9, 310, config),
    )
    loud = (12 * tokens[0], 12 * tokens[1], tokens[2])
    yield (
        "sparse-linear attention, steps repeated",
        case_of(kernels_of_sparse_linear, run_sparse_linear, *loud, 0.9, 310, config, bound=1e-5),
    )
    yield "lists of ties", case_of("sparse_linear_lists", run_lists, 140, 150, 60, bound=0.0)

    for length in (256, 300):
        for count in (1, 2):
            yield f"norm and rotary of {length}, {count} parts", case_of("normed_rotary", run_rotary, length, count)
        yield f"heads apart and joined of {length}", case_of("heads_apart heads_joined", run_packing, length, bound=0.0)
    for size, count in ((64, 1), (128, 2)):
        yield f"norm and rotary by heads of {size}", case_of("head_normed_rotary", run_head_rotary, 300, size, count)
    yield "rows in 8 bits", case_of("quantize_rows", run_quantized, 600, "rows", bound=1e-3)
    yield "products in 8 bits", case_of("quantized_matmul", run_quantized, 100, "sum", bound=1e-3)
    yield "products of 8-bit floats", case_of("quantized_matmul", run_quantized, 100, "sum", "fp8", bound=5e-3)
    yield "normed heads of a product in 8 bits", case_of("quantized_matmul", run_quantized, 100, "heads", bound=1e-3)
    yield "an MLP in 8 bits", case_of("quantized_matmul", run_quantized, 100, "mlp", bound=1e-2)
    yield "merged rows", case_of("merged_rows", run_merge, 80, 16, bound=0.0)
    yield "norm and SiLU", case_of("normed_silu", run_silu, 3, 4)
    yield "norm and SiLU, a ragged block", case_of("normed_silu", run_silu, 3, 5, bound=2 * BOUND["float32"])


CASES = dict([*flash_cases(), *other_cases()])
QUICK = (  # the fewest of which each kernel and each branch has a case
    "q kᵀ in int8, a last block of few queries",
    "a window",
    "joined shards",
    "a radial mask, the running-max path",
    "gradients of counted keys",
    "sparse-linear attention, steps repeated",
    "norm and rotary of 300, 2 parts",
    "norm and rotary by heads of 64",
    "heads apart and joined of 300",
    "merged rows",
    "norm and SiLU, a ragged block",
    "rows in 8 bits",
    "normed heads of a product in 8 bits",
)


@cache
def report_of(name: str) -> Report:
    """Run a case, check its results against the reference, and return the report on races."""
    case = CASES[name]
    with detect_races() as report:
        outputs, expected = case.results()
        outputs = [np.asarray(x.astype(jnp.float32)) for x in outputs]
    for output, expected_output in zip(outputs, expected, strict=True):
        assert error(output, expected_output) <= case.bound
    return report


@pytest.mark.parametrize("name", quick(QUICK, CASES))
def test_a_kernel_has_no_race_and_reads_no_uninitialized_memory(name):
    report = report_of(name)
    assert report.num_races == 0
    assert report.kernels == CASES[name].kernels
    assert len(report.detectors) >= len(report.kernels)
    assert len(report.cores) == CASES[name].cores


@pytest.mark.slow
def test_a_ring_has_no_races():
    """Four devices of two cores each: keys are added to carried sums, and gradients go around with their keys."""
    q, k, v = operands(1, 64, 64, 2, 2, 64)
    g = normal(5, *q.shape)

    def loss(q, k, v):
        with use_partitioner(Partitioner(make_mesh(1, 4, 1, devices=jax.devices()[:4]), SHARDING_RULES["fsdp"])):
            return jnp.sum(g * attention(q, k, v, implementation="flash_tpu", config=SMALL_TILES, scale=0.3))

    with detect_races() as report:
        gradients = [np.asarray(x) for x in jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)]
    for gradient, expected_gradient in zip(gradients, exact_gradients(q, k, v, g, scale=0.3), strict=False):
        assert error(gradient, expected_gradient) <= 1.5 * BOUND["float32"]
    assert report.num_races == 0
    assert report.kernels == {"flash_attention", "flash_gradient"}
    assert len(report.detectors) >= 8


def calls_of(tree: ast.AST, name: str) -> list[ast.Call]:
    """Return the calls of functions or attributes whose name ends with `name`."""

    def called_name(node: ast.Call) -> str:
        return getattr(node.func, "attr", getattr(node.func, "id", ""))

    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and called_name(node).endswith(name)]


def test_every_kernel_has_a_case():
    """Each `pallas_call` names its kernel, except in rotary_heads.py, where the caller of a function names it."""
    names: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"\b(core_map|emit_pipeline|pl\.kernel|plgpu|triton)\b", text), (
            path
        )  # other ways to a kernel
        for call in calls_of(ast.parse(text), "pallas_call") if "pl.pallas_call" in text else ():
            argument = next(keyword.value for keyword in call.keywords if keyword.arg == "name")
            constants = {str(node.value) for node in ast.walk(argument) if isinstance(node, ast.Constant)}
            assert constants or path.name == "rotary_heads.py", path
            names |= constants
    assert len(names) >= 11
    assert names == {kernel for case in CASES.values() for kernel in case.kernels}
    assert names == {kernel for name in QUICK for kernel in CASES[name].kernels}


def test_every_branch_is_both_taken_and_skipped():
    branches = {
        (path.name, call.lineno): set[bool]()
        for path in SOURCE.rglob("kernels/**/*.py")
        for call in calls_of(ast.parse(path.read_text()), "when")
    }
    for name in QUICK:
        for branch, values in report_of(name).branches.items():
            branches[branch] |= values
    assert len(branches) >= 20
    assert not {branch: values for branch, values in branches.items() if len(values) < 2}


def call_on_two_cores(kernel: Callable, out_index: Callable, scratch: tuple = ()) -> jax.Array:
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

    for out_index, num_races in ((lambda i: (i, 0), 0), (lambda i: (0, 0), 1)):
        with detect_races() as report:
            call_on_two_cores(kernel, out_index).block_until_ready()
        assert report.num_races == num_races
        assert report.cores == set(range(CORES))


def test_a_read_of_uninitialized_memory_is_detected():
    """Scratch and unwritten rows of the result are NaN."""

    def kernel(x_ref, out_ref, sum_ref):
        sum_ref[...] += x_ref[...]
        out_ref[...] = sum_ref[...]

    with detect_races() as report:
        out = call_on_two_cores(kernel, lambda i: (i, 0), (pltpu.VMEM((8, 128), jnp.float32),))
        assert np.isnan(np.asarray(out)).all()
    assert report.num_races == 0
