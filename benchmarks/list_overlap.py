# SPDX-License-Identifier: Apache-2.0
"""Measure how much the key lists of neighbouring query blocks overlap in sparse-linear attention, on random weights.

    python -m benchmarks.list_overlap [--model wan2.1-t2v-1.3b] [--size 832x480] [--frames 81] [--top .15 --top .1]

The tokens are smooth random latents, embedded by the first layer of a random model with its norms and RoPE. The size of
the union of two or four neighbouring lists is given relative to one list, so it is 1 if they are equal. A kernel that
processes several query blocks with the union of their lists does this many times the necessary work.
"""

import argparse
from math import ceil, prod

import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from wanjax.kernels.attention import AttentionConfig, SparseLinearAttentionConfig
from wanjax.kernels.attention.blocks import heads_to_batch
from wanjax.kernels.attention.sparse_linear import choose_blocks
from wanjax.layers.heads import split_heads
from wanjax.layers.rope import norm_and_rope, rope_3d
from wanjax.models.wan.transformer import SelfAttention, TransformerConfig
from wanjax.registry import model_description

SMOOTHNESS = (0.0, 2.0, 8.0)  # standard deviations, in patches, of the Gaussian that smooths latents


def smooth_tokens(config: TransformerConfig, grid: tuple[int, int, int], sigma: float) -> np.ndarray:
    """Return tokens [1 L E] with unit variance, from random latents smoothed by a Gaussian of `sigma` patches."""
    random = np.random.default_rng(0)
    noise = np.fft.fftn(random.normal(size=(*grid, config.patch_volume * config.channels_in)), axes=(0, 1, 2))
    for axis, size in enumerate(grid):
        damping = np.exp(-2 * (np.pi * sigma * np.fft.fftfreq(size)) ** 2)
        noise *= damping.reshape([-1 if n == axis else 1 for n in range(4)])
    field = np.fft.ifftn(noise, axes=(0, 1, 2)).real.reshape(prod(grid), -1)
    x = (field / field.std()) @ random.normal(size=(field.shape[1], config.width)) / field.shape[1] ** 0.5
    return ((x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True)).astype(np.float32)[None]


def relative_union(lists: np.ndarray, group_size: int) -> float:
    """Return the mean size of the union of `group_size` neighbouring lists [N L S], relative to one list."""
    count = lists.shape[1] // group_size * group_size
    groups = np.sort(lists[:, :count].reshape(len(lists), -1, group_size * lists.shape[2]), axis=2)
    return float((1 + (np.diff(groups, axis=2) > 0).sum(axis=2)).mean() / lists.shape[2])


def block_lists(
    config: TransformerConfig, grid: tuple[int, int, int], sparse: SparseLinearAttentionConfig, sigma: float
) -> np.ndarray:
    """Return the lists [N L S] of key blocks that a layer's heads choose for each query block."""
    options = {"dtype": jnp.float32, "param_dtype": jnp.float32, "rngs": nnx.Rngs(0)}
    layer, rope = SelfAttention(config, AttentionConfig(sparse=sparse), **options), rope_3d(grid, config.rope_channels)
    x = jnp.asarray(smooth_tokens(config, grid, sigma))
    q, k = (
        heads_to_batch(split_heads(norm_and_rope(project(x), norm, rope), config.heads))
        for project, norm in ((layer.q, layer.q_norm), (layer.k, layer.k_norm))
    )
    return np.asarray(choose_blocks(q, k, sparse))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wan2.1-t2v-1.3b")
    parser.add_argument("--size", default="832x480")
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--top", type=float, action="append")
    options = parser.parse_args()
    model = model_description(options.model)
    video_model, settings = model.model, model.settings
    width, height = map(int, options.size.split("x"))
    video = {"width": width, "height": height, "frames": options.frames}
    work = video_model.cost(settings.updated(video))
    config = video_model.spec.networks["transformer"]
    token_pixels = video_model.vae.spatial_factor * config.patch[1]
    grid = (
        work.num_tokens // (height // token_pixels * (width // token_pixels)),
        height // token_pixels,
        width // token_pixels,
    )
    columns = "top", "smoothed over", "blocks of a list", "two neighbours", "four", "two at random", "four"
    title = f"{options.model}, {options.size}, {work.num_tokens} tokens, {config.heads} heads: unions of lists"
    table = Table(*columns, title=title)
    for top in options.top or (0.15, 0.1):
        sparse = SparseLinearAttentionConfig(top)
        top_k, blocks = sparse.top_k(work.num_tokens), ceil(work.num_tokens / sparse.block_kv)
        random_unions = [(1 - (1 - top_k / blocks) ** n) * blocks / top_k for n in (2, 4)]
        for sigma in SMOOTHNESS:
            lists = block_lists(config, grid, sparse, sigma)
            numbers = [relative_union(lists, 2), relative_union(lists, 4), *random_unions]
            table.add_row(f"{top:g}", f"{sigma:g}", f"{top_k} of {blocks}", *(f"{n:.2f}" for n in numbers))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
