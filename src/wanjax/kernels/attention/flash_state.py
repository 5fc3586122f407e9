# SPDX-License-Identifier: Apache-2.0
"""What the kernel of flash_tpu knows and carries: its sizes, its state over the keys, and which keys are seen."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

TILE_Q = 256  # queries of a tile of the matrix unit
STRIP_Q, STRIP_KV = 2 * TILE_Q, 256  # queries and keys of one step: a tile for each of the two matrix units of a core
LEAD = 2  # strips that are scored before their values are added, so that the matrix unit does not wait for softmax
CHUNK = 512  # the most keys of a masked step
CAREFUL_KV, CAREFUL_Q = 1024, 256  # the most keys and queries of a step of the careful pass
LANES = 128
SPILL_BYTES = 32 << 20  # the compiler's own share of VMEM, beside a kernel's
REGISTER = 16  # rows of keys in a register
PROBE = 32  # keys whose maximum sets a row's offset
HEADROOM = {"bfloat16": 60.0, "float32": 0.0}  # of the offset above that maximum; in float32 it would cost digits
LARGEST_SUM = 2.0**64  # of a row's weights: a larger sum means that a logit left the range of the offset

CAREFUL, PROBED = 0, 1  # flags: this head left the range; the offset is set


class Sizes(NamedTuple):
    """Static arguments of the kernel."""

    queries: int
    keys: int
    heads: int  # of one example
    block_q: int
    block_kv: int
    body: int  # keys that are unrolled
    chunk: int  # keys of a careful step, of a masked one, or of a listed block; they divide a body
    ragged: bool  # a count or a window hides some keys from some queries
    window: tuple[int, int]  # keys before and after a query's own position
    factor: float  # of q, so that logits are exponents of two
    resumed: bool = False  # the sums start from those of other keys
    unfinished: bool = False  # the sums are the result, to which other keys are to be added

    @property
    def only(self) -> bool:
        """Tells whether all keys are in one block."""
        return self.keys <= self.block_kv and not self.ragged


class State(NamedTuple):
    """References to the state that one block of queries carries over the keys."""

    q: jax.Ref  # [D L], times the factor; for bfloat16 [2·D L], with the rounding error of the first half behind it
    offset: jax.Ref  # [1 L]
    weight: jax.Ref  # [8 L], the sum of weights in eight parts
    total: jax.Ref  # [D L], the sum of weighted values
    kept_weight: jax.Ref  # both as before this block of keys
    kept_total: jax.Ref
    scores: jax.Ref  # [S L], of the next careful step
    top: jax.Ref  # [8 L], the largest of them in eight parts
    flags: jax.Ref


class Sums(NamedTuple):
    """What attention to some of the keys leaves to that to others: the first fields of `State`, for all queries."""

    q: Any
    offset: Any
    weight: Any
    total: Any


class Mask(NamedTuple):
    """The keys of a step that take part: those before `live` and within the window; the first is `ahead` of query 0."""

    live: Array | int
    window: tuple[int, int] | None = None
    ahead: Array | int = 0

    def spares(self, keys: slice) -> bool:
        """Tells if it is known that all these keys take part."""
        return isinstance(self.live, int) and keys.stop <= self.live

    def rows(self, keys: slice) -> Bool[Array, "S 1"]:
        return positions(keys, 0) < self.live

    def seen(self, keys: slice, strip: slice) -> Bool[Array, "S L"] | Bool[Array, "S 1"]:
        if self.window is None:
            return self.rows(keys)
        left, right = self.window
        ahead = self.ahead + positions(keys, 0) - positions(strip, 1)
        return self.rows(keys) & (ahead >= -left) & (ahead <= right)


class Pieces(NamedTuple):
    """Keys that are not side by side: the starts of pieces of so many keys each."""

    size: int
    starts: tuple[Array, ...]


def size_of(x: slice) -> int:
    return x.stop - x.start


def positions(x: slice, axis: int) -> Array:
    """The positions of a slice along an axis of a matrix."""
    return x.start + jax.lax.broadcasted_iota(jnp.int32, (1,) * axis + (size_of(x),) + (1,) * (1 - axis), axis)
