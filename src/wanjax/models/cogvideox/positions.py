# SPDX-License-Identifier: Apache-2.0
"""Encode the positions of CogVideoX's tokens, by the tables of RoPE and by embeddings that are added to the tokens.

The joint sequence has the video's tokens in the order T, H, W, then the prompt's tokens. RoPE does not rotate the
prompt's tokens. The reference is diffusers' models/embeddings.py (get_3d_rotary_pos_embed, get_3d_sincos_pos_embed,
CogVideoXPatchEmbed) and pipelines/cogvideo/pipeline_cogvideox.py (get_resize_crop_region_for_grid).
"""

from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32

from wanjax.errors import WanjaxError
from wanjax.layers.placement import param
from wanjax.layers.rope import Rope, rope_3d
from wanjax.models.cogvideox.config import Grid, TransformerConfig
from wanjax.sharding import shard_tokens


class Positions(NamedTuple):
    """The positions of a joint sequence: the tables of RoPE, and the embeddings that are added to the tokens, or
    None."""

    rope: Rope
    added: Float[Array, "1 L E"] | None


class NoPositionEmbedding(nnx.Module):
    """A placeholder for models that encode positions only by RoPE."""

    def __init__(self, config: TransformerConfig, **kw: Any):
        pass

    def __call__(self, grid: Grid, num_text_tokens: int) -> None:
        return None


class Sinusoids(nnx.Module):
    """An embedding of the positions of video tokens by sines and cosines. The embedding of text tokens is zeros."""

    def __init__(self, config: TransformerConfig, **kw: Any):
        self.width = config.width
        self.scales = config.position_scales

    def __call__(self, grid: Grid, num_text_tokens: int) -> Float[Array, "1 L E"]:
        """Compute embeddings of a grid of patches and of `num_text_tokens` text tokens."""
        return _join_sequence(
            sinusoids(grid, self.width, self.scales), jnp.zeros((num_text_tokens, self.width), jnp.float32)
        )


class LearnedTable(Sinusoids):
    """A learned embedding of each token of the training videos and of their prompts."""

    def __init__(self, config: TransformerConfig, **kw: Any):
        super().__init__(config)
        assert config.trained_grid is not None
        zeros, rows = nnx.initializers.zeros_init(), config.text_length + prod(config.trained_grid)
        shape = (rows, config.width)  # the text's rows come first, as in checkpoints
        self.table = param(zeros, shape, (None, "embed"), dtype=kw["param_dtype"], rngs=kw["rngs"])
        self.trained_grid = config.trained_grid

    def __call__(self, grid: Grid, num_text_tokens: int) -> Float[Array, "1 L E"]:
        """Return the learned embeddings, for a grid with the height and width of the training videos.

        If the number of frames differs, return the embeddings of `Sinusoids`, as in the reference. Raises WanjaxError
        if the height or width differs.
        """
        if grid[1:] != self.trained_grid[1:]:
            (_, rows, columns), (_, *size) = self.trained_grid, grid
            raise WanjaxError(
                f"positions are learned for {rows} rows and {columns} columns of patches, not for {size[0]} and "
                f"{size[1]}: use the size of the training videos"
            )
        if grid[0] != self.trained_grid[0]:
            return super().__call__(grid, num_text_tokens)
        table = self.table[...]
        split = len(table) - prod(grid)
        return _join_sequence(table[split:], table[:split][:num_text_tokens])


POSITION_EMBEDDINGS = {None: NoPositionEmbedding, "sinusoids": Sinusoids, "learned": LearnedTable}


def rope_tables(config: TransformerConfig, grid: Grid, num_text_tokens: int) -> Rope:
    """Compute RoPE's tables for a grid of patches, and for `num_text_tokens` text tokens that are not rotated."""
    make_positions = {"counted": counted_positions, "resized": resized_positions, None: zero_positions}[config.rotary]
    positions = make_positions(grid, config.trained_grid)
    return rope_3d(grid, config.rope_channels, positions=positions, unrotated=num_text_tokens)


def counted_positions(grid: Grid, trained_grid: Grid | None) -> list[Float[np.ndarray, " _L"]]:
    """Return the positions 0, 1, 2 ... along frames, height and width."""
    return [np.arange(size, dtype=np.float64) for size in grid]


def zero_positions(grid: Grid, trained_grid: Grid | None) -> list[Float[np.ndarray, " _L"]]:
    """Return position 0 for all tokens, so that RoPE rotates no token."""
    return [np.zeros(size) for size in grid]


def resized_positions(grid: Grid, trained_grid: Grid | None) -> list[Float[np.ndarray, " _L"]]:
    """Scale the grid with its aspect ratio to fit into the trained grid, centre it there, and return its positions.

    The positions of rows go from `top` to `bottom · (1 - 1 / height)`, as in the reference. Their spacing is therefore
    `(bottom - top) / height` only if `top` is 0.
    """
    assert trained_grid is not None
    (frames, height, width), (_, rows, columns) = grid, trained_grid
    if height / width > rows / columns:
        scaled_size = rows, round(rows / height * width)
    else:
        scaled_size = round(columns / width * height), columns
    top, left = (round((size - scaled) / 2) for size, scaled in zip((rows, columns), scaled_size, strict=True))
    bottom, right = top + scaled_size[0], left + scaled_size[1]
    return [
        np.arange(frames, dtype=np.float64),
        np.linspace(top, bottom * (height - 1) / height, height),
        np.linspace(left, right * (width - 1) / width, width),
    ]


def sinusoids(grid: Grid, width: int, scales: tuple[float, float, float]) -> Float32[Array, "L E"]:
    """Compute the embeddings of all positions of a grid. The frame, the column and the row of a position are divided by
    their scales, and encoded in separate channels."""
    axes = (0, width // 4), (2, 3 * width // 8), (1, 3 * width // 8)  # a quarter of the channels encodes the frame
    parts = []
    for axis, channels in axes:
        position = np.arange(grid[axis], dtype=np.float32) / np.float32(scales[axis])
        frequencies = 10000.0 ** -(np.arange(channels // 2) / (channels // 2))
        angles = position.astype(np.float64)[:, None] * frequencies
        axis_embedding = jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], axis=1), jnp.float32)
        other_axes = tuple(other for other in range(3) if other != axis)
        parts.append(jnp.broadcast_to(jnp.expand_dims(axis_embedding, other_axes), (*grid, channels)))
    return jnp.concatenate(parts, axis=-1).reshape(prod(grid), -1)


def _join_sequence(video: Float[Array, "_L E"], text: Float[Array, "_S E"]) -> Float[Array, "1 L E"]:
    return shard_tokens(jnp.concatenate([video, text])[None], ("batch", "length", None))
