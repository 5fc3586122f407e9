# SPDX-License-Identifier: Apache-2.0
"""Radial attention's mask: near frames whole, far ones in a band around a query's own place, as blocks known ahead.

Follows Li et al., Radial Attention, 2025: radial_attn/attn_mask.py of its authors. A mask is one for all heads and
steps, so that the blocks to visit are known when a program is compiled.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Bool, Int, Int32

from wanjax.errors import WanjaxError
from wanjax.kernels.alignment import ceil_div

NONE = 1 << 30  # the first key of a block that is none
UNIT = 128  # tokens along each side of a block of the published mask, and the least half width of a band
DECAY = 0.2  # the smallest that the authors use
LARGEST_DECAY = 16.0


@dataclass(frozen=True)
class Radial:
    """The mask of a video's tokens in the order of its frames, and of text tokens after them, which see and are seen.

    A block of `block_q` queries by `block_kv` keys is whole or absent: it is whole where any published block in it is.
    `sink` shows the first frame to all. A larger `decay` keeps more.
    """

    frames: int
    frame_tokens: int
    decay: float
    sink: bool = True
    block_q: int = 256
    block_kv: int = UNIT

    def __post_init__(self):
        if self.frames < 1 or self.frame_tokens < 1 or not 0 < self.decay <= LARGEST_DECAY:
            raise WanjaxError(
                f"a radial mask of {self.frames} frames of {self.frame_tokens} tokens at decay {self.decay}: give "
                f"at least one of both, and a decay above 0, at most {LARGEST_DECAY:g}"
            )
        if any(size < UNIT or size % UNIT for size in (self.block_q, self.block_kv)):
            raise WanjaxError(f"blocks of {self.block_q} by {self.block_kv} tokens: give multiples of {UNIT}")

    def live(self, queries: int, keys: int) -> Bool[np.ndarray, "_L _S"]:
        """Mark the blocks to visit, of a sequence with so many queries and keys in all."""
        return _live(self, queries, keys)

    def share(self, tokens: int) -> float:
        """Return the share of the scores of so many tokens that are computed."""
        rows, columns = (_sizes(tokens, block).astype(np.float64) for block in (self.block_q, self.block_kv))
        return float(rows @ self.live(tokens, tokens) @ columns) / tokens**2

    def seen(self, queries: int, keys: int) -> Bool[np.ndarray, "L S"]:
        """Mark the keys that each query sees, of a sequence with so many of both."""
        rows, columns = np.arange(queries) // self.block_q, np.arange(keys) // self.block_kv
        return self.live(queries, keys)[rows[:, None], columns[None, :]]


@cache
def _live(mask: Radial, queries: int, keys: int) -> Bool[np.ndarray, "_L _S"]:
    """Return `Radial.live`. Queries after the last key are padding and see none."""
    text = mask.frames * mask.frame_tokens // UNIT  # the block in which text begins, if there is any
    fine = np.zeros((ceil_div(queries, UNIT), ceil_div(keys, UNIT)), bool)
    seen = published(mask.frames, mask.frame_tokens, mask.decay, mask.sink)[: len(fine), : fine.shape[1]]
    fine[: len(seen), : seen.shape[1]] = seen
    if keys > mask.frames * mask.frame_tokens:
        fine[text : ceil_div(keys, UNIT)] = fine[:, text:] = True
    for axis, block in enumerate((mask.block_q, mask.block_kv)):
        fine = np.logical_or.reduceat(fine, np.arange(0, fine.shape[axis], block // UNIT), axis=axis)
    fine.setflags(write=False)
    return fine


@cache
def published(frames: int, frame_tokens: int, decay: float, sink: bool) -> Bool[np.ndarray, "_L _S"]:
    """Return the blocks of 128 by 128 video tokens that the published rule keeps.

    It keeps a block if, of its columns that hold a score of one pair of frames, more than three fifths hold scores in
    over a third of the block's rows. Blocks at the end of a frame and of the video count too, where the authors' code
    cuts some off.
    """
    blocks = ceil_div(frames * frame_tokens, UNIT)
    mask = np.zeros((blocks, blocks), bool)
    for query in range(frames):
        for key in range(frames):
            reach = half_width(abs(query - key), frame_tokens, decay)
            if sink and key == 0:
                reach = frame_tokens
            if reach is None:
                continue
            part = _pair(query * frame_tokens, key * frame_tokens, frame_tokens, frames, reach)
            row, column = query * frame_tokens // UNIT, key * frame_tokens // UNIT
            mask[row : row + len(part), column : column + part.shape[1]] |= part
    return mask


def half_width(distance: int, frame_tokens: int, decay: float) -> int | None:
    """Return how far a key may be from a query's place in a frame at this distance; None if it sees none of them."""
    halved = 2.0 ** (frame_tokens.bit_length() - distance.bit_length())
    if halved < UNIT and distance % int(UNIT / halved):
        return None
    if distance <= 1:
        return frame_tokens
    return int(max(halved * decay, UNIT))


def _pair(row: int, column: int, tokens: int, frames: int, reach: int) -> Bool[np.ndarray, "_L _S"]:
    """Return the blocks that are kept for one pair of frames, from the blocks in which their first tokens lie on."""
    before = column % UNIT
    starts = np.arange(-(row % UNIT), tokens, UNIT)[:, None]  # of blocks of queries, from the frame's first token
    keys = np.arange(tokens)[None, :]
    first = np.maximum(np.maximum(starts, 0), keys - reach)
    last = np.minimum(np.minimum(starts + UNIT, tokens), keys + reach + 1)
    count = np.maximum(last - first, 0)  # queries of the block that see each key
    count = np.pad(count, ((0, 0), (before, -(before + tokens) % UNIT))).reshape(len(starts), -1, UNIT)
    rows = np.minimum(UNIT, frames * tokens - (row + starts))[..., None]  # the video's last block may have fewer
    some, many = (count > 0).sum(axis=2), (3 * count > rows).sum(axis=2)
    return 5 * many > 3 * some


def _sizes(tokens: int, block: int) -> Int[np.ndarray, " _L"]:
    """Return the number of tokens in each block of a sequence."""
    return np.minimum(block, tokens - np.arange(0, tokens, block))


def lists(live: Bool[np.ndarray, "_L _S"]) -> tuple[Int32[np.ndarray, "_L _S"], Int32[np.ndarray, " _L"]]:
    """Return each row's live columns, filled up with zeros to the longest row, and their numbers."""
    counts = live.sum(axis=1, dtype=np.int32)
    order = np.argsort(~live, axis=1, kind="stable")[:, : max(1, counts.max())].astype(np.int32)
    return np.where(np.arange(order.shape[1]) < counts[:, None], order, 0).astype(np.int32), counts


def kernel_lists(
    mask: Radial, queries: int, keys: int, block_kv: int, together: int
) -> tuple[Int32[np.ndarray, " _L"], ...]:
    """Return the scalars of a kernel that holds `block_kv` keys at a time, and visits whole live blocks in them.

    A cell of its grid has `together` neighbouring blocks of queries, each with a list of its own, and the held keys. In
    the order of cells: where its lists begin, and how many blocks the longest of them has; for each block of queries 1
    if the last keys are live; and all lists, of first keys counted from the first held key. The lists of a cell are
    interleaved, and the shorter ones filled up with `NONE`.
    """
    live, whole, held = mask.live(queries, keys), keys // mask.block_kv, block_kv // mask.block_kv
    live = np.pad(live, ((0, -len(live) % together), (0, 0)))
    steps = ceil_div(keys, block_kv)
    shown = np.pad(live[:, :whole], ((0, 0), (0, steps * held - whole))).reshape(-1, together, steps, held)
    columns, counts = lists(np.moveaxis(shown, 2, 1).reshape(-1, held))  # of each block of queries in each cell
    places = np.arange(columns.shape[1])
    start = np.where(places < counts[:, None], columns * mask.block_kv, NONE).reshape(-1, together, len(places))
    count = counts.reshape(-1, together).max(axis=1)
    first = together * (np.cumsum(count) - count)
    entries = np.moveaxis(start, 1, 2)[places < count[:, None]].reshape(-1)
    entries = entries if len(entries) else np.full(together, NONE)
    return tuple(np.asarray(x, np.int32) for x in (first, count, live[:, -1], entries))  # type: ignore[return-value]
