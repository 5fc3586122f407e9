# SPDX-License-Identifier: Apache-2.0
"""Compare implementations of a computation on the CPU. wanjax uses the first one; docs/performance.md says why.

python -m benchmarks.choices [conv] [dense] [casts] [--repeats 5]
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from rich.console import Console
from rich.table import Table

from benchmarks.timing import Run, time_alternately
from wanjax.kernels import compiler_options
from wanjax.layers.conv import CausalConv
from wanjax.layers.linear import linear
from wanjax.layers.placement import as_shapes
from wanjax.models.t5 import UMT5_XXL, T5Encoder

AXES = ("NHWC", "HWIO", "NHWC")
AXES_3D = ("NDHWC", "DHWIO", "NDHWC")


def conv(repeats: int) -> Table:
    """Time the VAE's causal 3 × 3 × 3 convolution of 4 frames and 2 cached frames, at a shallow and at a deep level."""
    table = Table("channels", "frame", *("2-D per tap", "3-D", "2-D of stacked taps", "torch"), title="conv, GFLOP/s")
    for channels, height, width in ((96, 120, 208), (384, 30, 52)):
        x = np.random.default_rng(0).standard_normal((1, 6, height, width, channels), np.float32)
        timings = time_alternately(_conv_forms(x), repeats)
        flops = 2 * 27 * channels**2 * 4 * height * width
        rates = [f"{flops / timing.median / 1e9:.0f}" for timing in timings.values()]
        table.add_row(str(channels), f"{width} × {height}", *rates)
    return table


def _conv_forms(frames: np.ndarray) -> dict[str, Run]:
    channels = frames.shape[-1]
    layer = CausalConv(channels, channels, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    graphdef, weights = nnx.split(layer)
    kernel = layer.kernel[...]
    x = jnp.asarray(frames)
    torch_layer = torch.nn.Conv3d(channels, channels, 3, padding=(0, 1, 1))
    torch_x = torch.from_numpy(np.ascontiguousarray(frames.transpose(0, 4, 1, 2, 3)))

    @jax.jit
    def per_tap(weights, x):
        return nnx.merge(graphdef, weights)(x[:, 2:], x[:, :2])[0]

    @jax.jit
    def conv_3d(kernel, x):
        padding = ((0, 0), (1, 1), (1, 1))
        return jax.lax.conv_general_dilated(x, kernel, (1, 1, 1), padding, dimension_numbers=AXES_3D)

    @jax.jit
    def conv_2d_of_taps(kernel, x):
        taps = jnp.concatenate([x[0, tap : tap + 4] for tap in range(3)], axis=-1)
        kernel = jnp.concatenate(list(kernel), axis=2)
        return jax.lax.conv_general_dilated(taps, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=AXES)

    def in_torch() -> torch.Tensor:
        with torch.no_grad():
            return torch_layer(torch_x)

    return {
        "per tap": partial(per_tap, weights, x),
        "whole": partial(conv_3d, kernel, x),
        "stacked": partial(conv_2d_of_taps, kernel, x),
        "torch": in_torch,
    }


def dense(repeats: int) -> Table:
    """Time the gradient of a dense layer at the sizes of two training steps: wanjax's code, and XLA's own gradient."""
    table = Table("x", "kernel", "by hand", "XLA's", "XLA's, x as a matrix", title="gradient of a dense layer, ms")
    random = np.random.default_rng(0)
    for shape, width in (((64, 80, 192), 512), ((1, 1280, 1536), 8960)):
        axes, kw = (None, None), {"dtype": jnp.float32, "param_dtype": jnp.float32}
        layer = linear(shape[-1], width, axes, bias=False, **kw, rngs=nnx.Rngs(0))
        graphdef, weights = nnx.split(layer)
        x, kernel = jnp.asarray(random.standard_normal(shape, np.float32)), layer.kernel[...]
        by_hand = _gradient(lambda weights, x, graphdef=graphdef: nnx.merge(graphdef, weights)(x))
        functions = {
            "by hand": partial(by_hand, weights, x),
            "XLA's": partial(_gradient(lambda kernel, x: x @ kernel), kernel, x),
            "flat": partial(_gradient(lambda kernel, x: x.reshape(-1, x.shape[-1]) @ kernel), kernel, x),
        }
        timings = time_alternately(functions, repeats)
        times = (f"{1e3 * timing.median:.1f}" for timing in timings.values())
        table.add_row(str(list(shape)), str(list(kernel.shape)), *times)
    return table


def _gradient(product: Callable[[Any, jax.Array], jax.Array]) -> Callable[..., Any]:
    return jax.jit(jax.grad(lambda weights, x: jnp.sum(product(weights, x) ** 2), (0, 1)))


def casts(repeats: int) -> Table:
    """Read XLA's temporary memory for UMT5-XXL with bfloat16 weights and float32 compute; nothing is run."""
    del repeats
    make = partial(T5Encoder, UMT5_XXL, dtype=jnp.float32, param_dtype=jnp.bfloat16)
    graphdef, weights = nnx.split(as_shapes(lambda rngs: make(rngs=rngs)))
    tokens = jax.ShapeDtypeStruct((2, 512), jnp.int32)
    lowered = jax.jit(lambda weights, tokens: nnx.merge(graphdef, weights)(tokens)).lower(weights, tokens)
    options: Any = (compiler_options.scan_options(), None)
    plans: Any = (lowered.compile(compiler_options=compiler_option).memory_analysis() for compiler_option in options)
    table = Table("weights cast inside the loop over blocks", "before it", title="temporary memory of UMT5-XXL, GB")
    table.add_row(*(f"{plan.temp_size_in_bytes / 1e9:.1f}" for plan in plans))
    return table


def main() -> None:
    benchmarks = {"conv": conv, "dense": dense, "casts": casts}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*benchmarks, []], help=f"{', '.join(benchmarks)}; default: all")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for name in options.names or benchmarks:
        Console().print(benchmarks[name](options.repeats))


if __name__ == "__main__":
    main()
