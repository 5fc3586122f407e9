# SPDX-License-Identifier: Apache-2.0
"""The mask of radial attention. A query attends to all tokens of near frames, and to a band around its own position in
far frames.

The mask follows Li et al., Radial Attention, 2025: radial_attn/attn_mask.py of its authors. All heads and steps use the
same mask, and the mask consists of blocks. So the visible blocks are known when a program is compiled.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Bool, Int, Int32

from wanjax.errors import WanjaxError
from wanjax.kernels.alignment import ceil_div

NO_BLOCK = 1 << 30  # the entry of a list of blocks that is padding
MASK_BLOCK = 128  # tokens along each side of a block of the published mask, and the smallest half width of a band
DEFAULT_DECAY = 0.2  # the smallest decay that the authors use
MAX_DECAY = 16.0


@dataclass(frozen=True)
class Radial:
    """The mask of a sequence of video tokens, in the order of the frames, and text tokens after them.

    Text tokens attend to all tokens, and all tokens attend to text tokens. A block of `block_q` queries and `block_kv`
    keys is visible if it contains a visible block of the published mask.

    Attributes:
        frames: Latent frames.
        frame_tokens: Tokens of a frame.
        decay: How slowly the band narrows with the distance of frames. With a larger decay, more keys are visible.
        has_sink: Whether all queries attend to the first frame.
        block_q: Queries of a block.
        block_kv: Keys of a block.
    """

    frames: int
    frame_tokens: int
    decay: float
    has_sink: bool = True
    block_q: int = 256
    block_kv: int = MASK_BLOCK

    def __post_init__(self):
        if self.frames < 1 or self.frame_tokens < 1 or not 0 < self.decay <= MAX_DECAY:
            raise WanjaxError(
                f"a radial mask needs at least 1 frame, at least 1 token in each, and a decay above 0 and at most "
                f"{MAX_DECAY:g}, got {self.frames} frames, {self.frame_tokens} tokens and decay {self.decay}: change "
                "what is out of range"
            )
        if any(size < MASK_BLOCK or size % MASK_BLOCK for size in (self.block_q, self.block_kv)):
            raise WanjaxError(f"blocks of {self.block_q} by {self.block_kv} tokens: give multiples of {MASK_BLOCK}")

    def block_mask(self, num_queries: int, num_keys: int) -> Bool[np.ndarray, "_L _S"]:
        """Return the visible blocks of a sequence. The numbers of queries and keys include the text."""
        return _cached_block_mask(self, num_queries, num_keys)

    def density(self, num_tokens: int) -> float:
        """Return the fraction of all scores that is computed, for a sequence with this number of tokens."""
        rows, columns = (_block_sizes(num_tokens, block).astype(np.float64) for block in (self.block_q, self.block_kv))
        return float(rows @ self.block_mask(num_tokens, num_tokens) @ columns) / num_tokens**2

    def token_mask(self, num_queries: int, num_keys: int) -> Bool[np.ndarray, "L S"]:
        """Return the mask of a sequence with these numbers of queries and keys."""
        rows, columns = np.arange(num_queries) // self.block_q, np.arange(num_keys) // self.block_kv
        return self.block_mask(num_queries, num_keys)[rows[:, None], columns[None, :]]


@cache
def _cached_block_mask(mask: Radial, num_queries: int, num_keys: int) -> Bool[np.ndarray, "_L _S"]:
    """Compute `Radial.block_mask`. Queries after the last key are padding and attend to no key."""
    first_text_block = mask.frames * mask.frame_tokens // MASK_BLOCK  # if there is text
    visible = np.zeros((ceil_div(num_queries, MASK_BLOCK), ceil_div(num_keys, MASK_BLOCK)), bool)
    video_mask = published_mask(mask.frames, mask.frame_tokens, mask.decay, mask.has_sink)
    video_mask = video_mask[: len(visible), : visible.shape[1]]
    visible[: len(video_mask), : video_mask.shape[1]] = video_mask
    if num_keys > mask.frames * mask.frame_tokens:
        visible[first_text_block : ceil_div(num_keys, MASK_BLOCK)] = visible[:, first_text_block:] = True
    for axis, block in enumerate((mask.block_q, mask.block_kv)):
        visible = np.logical_or.reduceat(visible, np.arange(0, visible.shape[axis], block // MASK_BLOCK), axis=axis)
    visible.setflags(write=False)
    return visible


@cache
def published_mask(frames: int, frame_tokens: int, decay: float, has_sink: bool) -> Bool[np.ndarray, "_L _S"]:
    """Return the blocks of 128 by 128 video tokens that are visible by the published rule.

    The rule treats each pair of frames separately. Of the columns of a block, it counts those that intersect the pair's
    band. The block is visible if the band covers more than a third of the rows in more than three fifths of these
    columns. The mask includes partial blocks at the end of a frame and of the video. The authors' code omits some of
    them.
    """
    blocks = ceil_div(frames * frame_tokens, MASK_BLOCK)
    mask = np.zeros((blocks, blocks), bool)
    for q_frame in range(frames):
        for kv_frame in range(frames):
            half_width = band_half_width(abs(q_frame - kv_frame), frame_tokens, decay)
            if has_sink and kv_frame == 0:
                half_width = frame_tokens
            if half_width is None:
                continue
            pair_mask = _frame_pair_mask(
                q_frame * frame_tokens, kv_frame * frame_tokens, frame_tokens, frames, half_width
            )
            row, column = q_frame * frame_tokens // MASK_BLOCK, kv_frame * frame_tokens // MASK_BLOCK
            mask[row : row + len(pair_mask), column : column + pair_mask.shape[1]] |= pair_mask
    return mask


def band_half_width(distance: int, frame_tokens: int, decay: float) -> int | None:
    """Return the half width of the band, in positions, for two frames that are `distance` frames apart.

    Return None if no key of the other frame is visible.
    """
    width = 2.0 ** (frame_tokens.bit_length() - distance.bit_length())
    if width < MASK_BLOCK and distance % int(MASK_BLOCK / width):
        return None
    if distance <= 1:
        return frame_tokens
    return int(max(width * decay, MASK_BLOCK))


def _frame_pair_mask(
    q_start: int, kv_start: int, frame_tokens: int, frames: int, half_width: int
) -> Bool[np.ndarray, "_L _S"]:
    """Return the visible blocks of a pair of frames. The first block contains the first tokens of both frames."""
    padding = kv_start % MASK_BLOCK
    # the first query of each block, counted from the frame's first token
    starts = np.arange(-(q_start % MASK_BLOCK), frame_tokens, MASK_BLOCK)[:, None]
    keys = np.arange(frame_tokens)[None, :]
    first_query = np.maximum(np.maximum(starts, 0), keys - half_width)
    end_query = np.minimum(np.minimum(starts + MASK_BLOCK, frame_tokens), keys + half_width + 1)
    count = np.maximum(end_query - first_query, 0)  # for each key, the number of the block's queries that attend to it
    count = np.pad(count, ((0, 0), (padding, -(padding + frame_tokens) % MASK_BLOCK)))
    count = count.reshape(len(starts), -1, MASK_BLOCK)
    num_queries = np.minimum(MASK_BLOCK, frames * frame_tokens - (q_start + starts))[..., None]
    any_visible, mostly_visible = (count > 0).sum(axis=2), (3 * count > num_queries).sum(axis=2)
    return 5 * mostly_visible > 3 * any_visible


def _block_sizes(num_tokens: int, block: int) -> Int[np.ndarray, " _L"]:
    """Return the number of tokens in each block of a sequence."""
    return np.minimum(block, num_tokens - np.arange(0, num_tokens, block))


def column_lists(block_mask: Bool[np.ndarray, "_L _S"]) -> tuple[Int32[np.ndarray, "_L _S"], Int32[np.ndarray, " _L"]]:
    """Return the indices of each row's visible columns, padded with zeros to the longest row, and their counts."""
    counts = block_mask.sum(axis=1, dtype=np.int32)
    order = np.argsort(~block_mask, axis=1, kind="stable")[:, : max(1, counts.max())].astype(np.int32)
    return np.where(np.arange(order.shape[1]) < counts[:, None], order, 0).astype(np.int32), counts


def kernel_lists(
    mask: Radial, num_queries: int, num_keys: int, block_kv: int, q_blocks_per_step: int
) -> tuple[Int32[np.ndarray, " _L"], ...]:
    """Return the scalars from which `flash_kernel.sparse_kernel` reads the visible blocks of a mask.

    A grid step has `q_blocks_per_step` neighbouring blocks of queries and `block_kv` keys. Each block of queries has a
    list of visible blocks of keys. An entry of a list is the position of the block's first key, relative to the first
    key of the grid step. The lists of a grid step are interleaved. Shorter lists are padded with `NO_BLOCK`.

    Returns:
        Four arrays: for each grid step, the index of its first list entry; for each grid step, the length of its
        longest list; for each block of queries, 1 if it attends to the keys after the last full block, else 0; and the
        entries of all lists.
    """
    block_mask = mask.block_mask(num_queries, num_keys)
    num_full_blocks, blocks_per_step = num_keys // mask.block_kv, block_kv // mask.block_kv
    block_mask = np.pad(block_mask, ((0, -len(block_mask) % q_blocks_per_step), (0, 0)))
    steps = ceil_div(num_keys, block_kv)
    by_step = np.pad(block_mask[:, :num_full_blocks], ((0, 0), (0, steps * blocks_per_step - num_full_blocks)))
    by_step = np.moveaxis(by_step.reshape(-1, q_blocks_per_step, steps, blocks_per_step), 2, 1)
    # The length of the list of each block of queries in each grid step
    columns, counts = column_lists(by_step.reshape(-1, blocks_per_step))
    list_positions = np.arange(columns.shape[1])
    block_start = np.where(list_positions < counts[:, None], columns * mask.block_kv, NO_BLOCK).reshape(
        -1, q_blocks_per_step, len(list_positions)
    )
    longest_lengths = counts.reshape(-1, q_blocks_per_step).max(axis=1)
    list_start = q_blocks_per_step * (np.cumsum(longest_lengths) - longest_lengths)
    entries = np.moveaxis(block_start, 1, 2)[list_positions < longest_lengths[:, None]].reshape(-1)
    entries = entries if len(entries) else np.full(q_blocks_per_step, NO_BLOCK)
    return tuple(np.asarray(x, np.int32) for x in (list_start, longest_lengths, block_mask[:, -1], entries))  # type: ignore[return-value]
