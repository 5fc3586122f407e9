# SPDX-License-Identifier: Apache-2.0
"""Price the projections of one Wan 14B block on a TPU: in bfloat16 by XLA, and with weights and tokens of 8 bits.

    python -m benchmarks.quantized_prices [--chip v6e] [--rows 18900] [--format int8]

Prices include norms, modulations, GELU, residual sums and the rotation of queries and keys by position. In the column
"each alone", these are XLA's operations between products, and each product quantizes its own tokens. In the column
"fused", as in the model, they are part of the kernels, and tokens are quantized once for queries, keys and values.
Weights are not sharded, as after an all-gather.
"""

import argparse
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks.attention_prices import smallest_slice
from wanjax.kernels.quantized_matmul import (
    FORMATS,
    GatedSum,
    Modulation,
    QuantizedWeight,
    RMSNormRotary,
    quantize_tokens,
    quantized_heads,
    quantized_matmul,
    quantized_mlp,
)
from wanjax.kernels.quantized_matmul.operands import add_gated, modulated_norm, norm_and_rotate
from wanjax.pricing.chips import abstract_mesh, find_slice
from wanjax.pricing.lowering import replicated
from wanjax.pricing.pricer import Pricer

WIDTH, MLP_WIDTH, HEAD_DIM, HADAMARD_SIZE = 5120, 13824, 128, 256
DTYPE = jnp.dtype("bfloat16")
EPS = 1e-6
ROWS = 18_900  # 75,600 tokens at 720p on four chips; four more chips compute the other prompt
VMEM = {"v6e": {"xla_tpu_scoped_vmem_limit_kib": str(64 << 10)}}  # as `compiler_options` has it
CHIPS = ("v5e", "v6e", "v7x")
VARIANTS = ("bfloat16", "each alone", "fused")


class BlockPart(NamedTuple):
    """The projections of a block that are priced together.

    Attributes:
        sizes: The input and output channels of each weight.
        run: A function of a variant, x, weights, a modulation, a gated sum and a norm of heads; it returns the outputs.
        normed: Whether a modulated norm precedes the projections.
        has_gated_sum: Whether a add_gated sum follows.
        heads: `normed` if a norm of the heads follows, `rotated` if their rotation by position follows too, else None.
    """

    sizes: tuple[tuple[int, int], ...]
    run: Callable[..., Any]
    normed: bool = False
    has_gated_sum: bool = False
    heads: Literal["normed", "rotated"] | None = None


class Variant(NamedTuple):
    """How products are computed.

    Attributes:
        name: One of VARIANTS.
        number_format: The format of 8 bits.
    """

    name: str
    number_format: Any

    @property
    def options(self) -> dict[str, Any]:
        """The options of a quantized product."""
        return {"activations": self.number_format, "dtype": DTYPE}

    def product(self, x: jax.Array, weight: Any, *, gelu: bool = False) -> jax.Array:
        """Return a product in bfloat16, or a product of 8 bits that quantizes its own tokens."""
        if self.name == "bfloat16":
            y = jnp.matmul(x, weight[0]) + weight[1][None, None]
        else:
            y = quantized_matmul(x, *weight, hadamard_size=HADAMARD_SIZE, **self.options)
        return jax.nn.gelu(y, approximate=True) if gelu else y


def project_qkv(
    variant: Variant, x: jax.Array, weights: Any, modulation: Modulation, _: None, norm: RMSNormRotary
) -> list[jax.Array]:
    """Queries, keys and values."""
    if variant.name == "fused":
        options: dict[str, Any] = {"hadamard_size": HADAMARD_SIZE, **variant.options}
        rows: Any = quantize_tokens(x, weights[0][0], **options, modulation=modulation)
        q, k = (quantized_heads(rows, *weight, norm=norm, norm_eps=EPS, **options) for weight in weights[:2])
        return [q, k, quantized_matmul(rows, *weights[2], **options)]
    normed = modulated_norm(x, modulation, EPS).astype(DTYPE)
    q, k, v = (variant.product(normed, weight) for weight in weights)
    return [norm_and_rotate(q, norm, EPS), norm_and_rotate(k, norm, EPS), v]


def project_one(
    variant: Variant,
    x: jax.Array,
    weights: Any,
    modulation: Modulation | None,
    gated_sum: GatedSum | None,
    norm: RMSNormRotary | None,
) -> jax.Array:
    """One projection."""
    if variant.name == "fused":
        options: dict[str, Any] = {"hadamard_size": HADAMARD_SIZE, **variant.options, "modulation": modulation}
        if norm is not None:
            return quantized_heads(x, *weights[0], norm=norm, norm_eps=EPS, **options)
        return quantized_matmul(x, *weights[0], gated_sum=gated_sum, **options)
    x = x if modulation is None else modulated_norm(x, modulation, EPS).astype(DTYPE)
    y = variant.product(x, weights[0])
    y = y if norm is None else norm_and_rotate(y, norm, EPS)
    return y if gated_sum is None else add_gated(y, gated_sum)


def mlp(
    variant: Variant, x: jax.Array, weights: Any, modulation: Modulation, gated_sum: GatedSum, _: None
) -> jax.Array:
    """The MLP."""
    if variant.name == "fused":
        fused_inputs = {"modulation": modulation, "gated_sum": gated_sum}
        return quantized_mlp(
            x, *weights, hadamard_sizes=(HADAMARD_SIZE, HADAMARD_SIZE), **variant.options, **fused_inputs
        )
    normed = modulated_norm(x, modulation, EPS).astype(DTYPE)
    return add_gated(variant.product(variant.product(normed, weights[0], gelu=True), weights[1]), gated_sum)


SQUARE = (WIDTH, WIDTH)
PARTS = {
    "q, k, v": BlockPart((SQUARE,) * 3, project_qkv, normed=True, heads="rotated"),
    "o": BlockPart((SQUARE,), project_one, has_gated_sum=True),
    "q to the text": BlockPart((SQUARE,), project_one, normed=True, heads="normed"),
    "o from the text": BlockPart((SQUARE,), project_one, has_gated_sum=True),
    "MLP": BlockPart(((WIDTH, MLP_WIDTH), (MLP_WIDTH, WIDTH)), mlp, normed=True, has_gated_sum=True),
}


def program(part: BlockPart, variant: Variant, rows: int) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """Return a function of a part, and the shapes of its arguments."""
    shape = jax.ShapeDtypeStruct
    values = DTYPE if variant.name == "bfloat16" else FORMATS[variant.number_format]
    arguments: list[Any] = [shape((1, rows, part.sizes[0][0]), DTYPE)]
    arguments.append(
        [
            ((shape(size, values), shape(size[1:], jnp.float32)), shape(size[1:], DTYPE))
            if variant.name != "bfloat16"
            else (shape(size, values), shape(size[1:], DTYPE))
            for size in part.sizes
        ]
    )
    vector = shape((1, 1, WIDTH), jnp.float32)
    arguments.append(Modulation(vector, vector) if part.normed else None)  # pyright: ignore[reportArgumentType]
    gated_sum: Any = shape((1, rows, part.sizes[-1][1]), DTYPE), vector
    arguments.append(GatedSum(*gated_sum) if part.has_gated_sum else None)
    table = (shape((rows, HEAD_DIM // 2), jnp.float32),) * 2
    norm: Any = shape((WIDTH,), jnp.float32), *(table if part.heads == "rotated" else ())
    arguments.append(RMSNormRotary(*norm) if part.heads else None)
    leaves, tree = jax.tree.flatten(arguments)

    def run(*arrays: jax.Array) -> Any:
        x, weights, modulation, gated_sum, norm = jax.tree.unflatten(tree, arrays)
        if variant.name != "bfloat16":
            weights = [(QuantizedWeight(*weight), bias) for weight, bias in weights]
        return part.run(variant, x, weights, modulation, gated_sum, norm)

    return run, leaves


def price_table(chip: str, rows: int, number_format: str) -> Table:
    """Compile and price all parts in all variants."""
    target = find_slice(smallest_slice(chip))
    mesh = abstract_mesh(target)
    names = [(part, name) for part in PARTS for name in VARIANTS]
    programs = []
    for part, name in names:
        run, shapes = program(PARTS[part], Variant(name, number_format), rows)
        programs.append(replicated(run, mesh, shapes)._replace(compiler_options=VMEM.get(chip)))
    prices = dict(zip(names, Pricer().price_all(target, programs), strict=True))
    doubts = {doubt for price in prices.values() for doubt in price.doubts}
    assert not doubts, doubts
    title = f"{rows:,} tokens on one {chip}, priced in ms: bfloat16 by XLA, and {number_format}"
    table = Table("", *VARIANTS, "bfloat16 / fused", title=title)
    totals = dict.fromkeys(VARIANTS, 0.0)
    for part in PARTS:
        seconds = [prices[part, name].seconds or float("nan") for name in VARIANTS]
        for name, part_seconds in zip(VARIANTS, seconds, strict=True):
            totals[name] += part_seconds
        table.add_row(
            part, *(f"{1e3 * part_seconds:.3f}" for part_seconds in seconds), f"{seconds[0] / seconds[2]:.2f}"
        )
    ratio = totals["bfloat16"] / totals["fused"]
    table.add_row("a block", *(f"{1e3 * totals[name]:.3f}" for name in VARIANTS), f"{ratio:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=CHIPS, default="v6e")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--format", choices=sorted(FORMATS), default="int8")
    options = parser.parse_args()
    Console(width=120).print(price_table(options.chip, options.rows, options.format))


if __name__ == "__main__":
    main()
