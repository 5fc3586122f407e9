# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of flash_tpu, and the defaults, which docs/attention.md prices best."""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from wanjax.errors import WanjaxError
from wanjax.kernels.alignment import LANES, ceil_div, round_up
from wanjax.kernels.attention.radial import Radial

TILE_Q = 256  # queries of a tile of the matrix unit
STRIP_Q, STRIP_KV = 2 * TILE_Q, 256  # queries and keys of one step: a tile for each of the two matrix units of a core
PIPELINE_DEPTH = 2  # strips scored before the first one's values are added: the matrix unit does not wait for softmax
MAX_MASKED_KV = 512  # most keys of a masked step
SAFE_KV, SAFE_Q = 1024, 256  # most keys and queries of a step of the safe path, which takes the maximum first
COMPILER_VMEM_BYTES = 32 << 20  # VMEM that is left to the compiler
REGISTER_ROWS = 16  # rows of keys in a register
PROBE_KV = 32  # keys whose maximum sets a row's offset
HEADROOM = {"bfloat16": 60.0, "float32": 0.0}  # of the offset above that maximum; in float32 it would cost digits
MAX_WEIGHT_SUM = 2.0**64  # a row's sum of weights above this means that a logit left the range of the offset

TILE_NAMES = ("block_q", "block_kv", "block_kv_compute")
CENTER_KEYS = "center_keys"
DEFAULT_TILE = 2048  # queries and keys, where neither is set
MAX_BLOCK_Q = 2048
SHORT_KV, MAX_BLOCK_Q_FOR_SHORT_KV = 512, 10_240  # few keys: setup and write-back of a block of queries count
MAX_COMPUTE_KV = {"bfloat16": 8192, "float32": 1024}  # unrolled keys: with more, compiling takes minutes
Q_BLOCKS_PER_STEP = 4  # mask blocks of queries in a grid step: the products of one fill the waits of another
SPARSE_COMPUTE_KV = {"bfloat16": 4096, "float32": 512}  # unrolled keys of listed blocks
MAX_TAIL_KV = 2048  # keys after the last whole compute block, unrolled too
LOOP_OVERHEAD_KV = 120  # cost of entering and leaving a compute block, in keys


@dataclass(frozen=True)
class Config:
    """Tile sizes of the kernel.

    Attributes:
        block_q: Queries of a grid step.
        block_kv: Keys of a grid step.
        block_kv_compute: Unrolled keys of the fast path, a compute block; divides `block_kv`.
        center_keys: Subtract the mean of the keys. It shifts all logits of a row equally and changes no weight.
        interpret: Run the kernel without a TPU, slowly, for tests.
        buffers: 2 to prefetch the next block of keys; 1 saves that VMEM.
    """

    block_q: int
    block_kv: int
    block_kv_compute: int
    center_keys: bool = False
    interpret: bool = False
    buffers: int = 2

    def __post_init__(self):
        if self.block_q < 1 or self.block_q % LANES:
            raise WanjaxError(f"block_q={self.block_q}: give a multiple of {LANES}, best of {STRIP_Q}")
        if self.block_kv_compute < PROBE_KV or self.block_kv_compute % REGISTER_ROWS:
            raise WanjaxError(
                f"block_kv_compute={self.block_kv_compute}: give a multiple of {REGISTER_ROWS} from {PROBE_KV} on"
            )
        if self.block_kv < 1 or self.block_kv % self.block_kv_compute:
            raise WanjaxError(f"block_kv={self.block_kv}: give a multiple of block_kv_compute={self.block_kv_compute}")

    @property
    def safe_step_kv(self) -> int:
        """Keys of one step of the safe path, which computes the maximum before each step."""
        return self._even_step(SAFE_KV)

    @property
    def masked_step_kv(self) -> int:
        """Keys of one masked step, and of a step of the safe path where some keys are masked."""
        return self._even_step(MAX_MASKED_KV)

    def _even_step(self, max_keys: int) -> int:
        counts = range(ceil_div(self.block_kv_compute, max_keys), self.block_kv_compute // REGISTER_ROWS + 1)
        return self.block_kv_compute // next(n for n in counts if self.block_kv_compute % (n * REGISTER_ROWS) == 0)

    def vmem_bytes(self, head_dim: int, itemsize: int) -> int:
        """Return the bytes of VMEM of the kernel: the buffers of its input and output blocks, and scratch."""
        padded_head_dim = max(head_dim, LANES)  # rows of 64 occupy rows of 128
        streamed_bytes = 2 * itemsize * padded_head_dim * (2 * self.block_q + self.buffers * self.block_kv)
        scratch = self.block_q * (2 * padded_head_dim * itemsize + 2 * 4 * head_dim + 4 * self.safe_step_kv + 4 * 40)
        return streamed_bytes + scratch


@dataclass(frozen=True)
class Tiles:
    """Tile sizes as the user gives them: one that is None follows from the others."""

    block_q: int | None = None
    block_kv: int | None = None
    block_kv_compute: int | None = None
    center_keys: bool = False

    def __post_init__(self):
        self.config()

    @classmethod
    def parse(cls, text: str) -> "Tiles":
        """Read text such as `block_q=2048,block_kv=4096,block_kv_compute=2048`, perhaps with `center_keys`.

        Raises WanjaxError for other text, and for tiles that are not possible.
        """
        sizes: dict[str, int] = {}
        entries = text.split(",")
        for entry in entries:
            if entry == CENTER_KEYS:
                continue
            name, _, size = entry.partition("=")
            if name not in TILE_NAMES or name in sizes or not (size.isascii() and size.isdigit()):
                raise WanjaxError(
                    f"the tiles {text!r} are not such as block_q=2048,block_kv=4096,block_kv_compute=2048"
                )
            sizes[name] = int(size)
        return cls(**sizes, center_keys=CENTER_KEYS in entries)

    def __str__(self) -> str:
        sizes = [f"{name}={size}" for name in TILE_NAMES if (size := getattr(self, name)) is not None]
        return ",".join([*sizes, CENTER_KEYS] if self.center_keys else sizes)

    def config(self) -> Config:
        """Return all sizes: `block_q` is 2,048 if left out, and either size of keys is the other one, or 2,048.

        Raises WanjaxError for tiles that are not possible.
        """
        keys = _first_set(self.block_kv, self.block_kv_compute, DEFAULT_TILE)
        return Config(
            _first_set(self.block_q, DEFAULT_TILE), keys, _first_set(self.block_kv_compute, keys), self.center_keys
        )


def _first_set(*sizes: int | None) -> int:
    return next(size for size in sizes if size is not None)


def default_config(vmem_bytes: int, head_dim: int, queries: int, keys: int, dtype: str, ragged: bool = False) -> Config:
    """Return the tiles that docs/attention.md prices best: large even compute blocks, and as many keys as VMEM holds.

    With `ragged`, a key count or a window, compute blocks consist of whole masked steps.
    """
    max_compute_kv, default_block_q = (
        MAX_COMPUTE_KV[dtype],
        min(MAX_BLOCK_Q, round_up(queries, STRIP_Q if queries > STRIP_Q else LANES)),
    )
    compute_kv = (
        _choose_compute_kv(keys, max_compute_kv)
        if not ragged or keys <= MAX_MASKED_KV
        else min(max_compute_kv, round_up(keys, MAX_MASKED_KV))
    )
    is_short = keys <= SHORT_KV and dtype == "bfloat16" and not ragged
    for block_q in ([_even_block(queries, MAX_BLOCK_Q_FOR_SHORT_KV, LANES)] if is_short else []) + [default_block_q]:
        for steps in range(1, ceil_div(keys, compute_kv) + 1):
            config = Config(block_q, compute_kv * ceil_div(ceil_div(keys, compute_kv), steps), compute_kv)
            if config.vmem_bytes(head_dim, jnp.dtype(dtype).itemsize) + COMPILER_VMEM_BYTES <= vmem_bytes:
                return config
    return Config(default_block_q, compute_kv, compute_kv)


def _choose_compute_kv(keys: int, max_compute_kv: int) -> int:
    """Return the cheapest size of a compute block: whole safe steps fill it, and it leaves no long tail to compile."""
    if keys <= min(max_compute_kv, MAX_TAIL_KV):
        return max(PROBE_KV, round_up(keys, REGISTER_ROWS))
    max_compute_kv = min(max_compute_kv, keys)
    steps = range(SAFE_KV // 2, SAFE_KV + 1, STRIP_KV)
    sizes = {size for step in steps for size in range(step, max_compute_kv + 1, step) if 2 * size > max_compute_kv}
    return min(sizes, key=lambda size: (keys % size > MAX_TAIL_KV, _cost(keys, size)))


def _cost(keys: int, compute_kv: int) -> int:
    """Return three times the cost of all keys: twice for scores, once for values in whole strips, and loop overhead."""
    count, tail = divmod(keys, compute_kv)
    compute_cost, tail_cost = (
        2 * size + round_up(size, STRIP_KV) + 3 * LOOP_OVERHEAD_KV for size in (compute_kv, tail)
    )
    return count * compute_cost + (tail_cost if tail else 0)


def sparse_config(mask: Radial, config: Config | None, vmem_bytes: int, head_dim: int, keys: int, dtype: str) -> Config:
    """Return tiles in whole blocks of a mask: a few of its blocks of queries, and as many keys as VMEM holds.

    Holding all keys of a head comes before prefetching them: a block of few queries computes with its visible keys in
    less time than fetching all keys again takes.
    """
    if config is not None:
        compute_kv = round_up(config.block_kv_compute, mask.block_kv)
        block_q = round_up(config.block_q, mask.block_q)
        return replace(
            config, block_q=block_q, block_kv=round_up(config.block_kv, compute_kv), block_kv_compute=compute_kv
        )
    compute_kv = round_up(SPARSE_COMPUTE_KV[dtype], mask.block_kv)
    compute_blocks, block_q = ceil_div(keys, compute_kv), mask.block_q * Q_BLOCKS_PER_STEP
    for steps, buffers in [(1, 2), (1, 1), *((steps, 2) for steps in range(2, compute_blocks + 1))]:
        candidate = Config(block_q, compute_kv * ceil_div(compute_blocks, steps), compute_kv, buffers=buffers)
        if candidate.vmem_bytes(head_dim, jnp.dtype(dtype).itemsize) + COMPILER_VMEM_BYTES <= vmem_bytes:
            return candidate
    return Config(block_q, compute_kv, compute_kv)


def _even_block(length: int, block: int, unit: int) -> int:
    """Return the size of even blocks of at most `block` that cover a length, rounded up to whole units.

    It is that of the fewest blocks, unless more blocks save a tenth by less padding.
    """
    min_blocks = ceil_div(length, block)
    sizes = {count: round_up(ceil_div(length, count), unit) for count in range(min_blocks, ceil_div(length, unit) + 1)}
    best = min(sizes, key=lambda count: (count * sizes[count], count))
    return sizes[best if 1.1 * best * sizes[best] < min_blocks * sizes[min_blocks] else min_blocks]
