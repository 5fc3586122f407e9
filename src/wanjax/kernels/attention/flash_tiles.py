# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of flash_tpu. The defaults are the fastest ones by the compiler's estimates in docs/attention.md."""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from wanjax.errors import WanjaxError
from wanjax.kernels.alignment import LANES, ceil_div, round_up
from wanjax.kernels.attention.radial import Radial

TILE_Q = 256  # queries of a tile of the matrix unit
STRIP_Q, STRIP_KV = 2 * TILE_Q, 256  # queries and keys of one step: one tile for each of the two matrix units of a core
# Number of strips whose scores are computed before the values of the first strip are added; the matrix unit then does
# not wait for the softmax
PIPELINE_DEPTH = 2
MAX_MASKED_KV = 512  # maximum keys of a masked step
# Maximum keys and queries of a step of the running-max path, which computes the maximum of a step first
RUNNING_MAX_STEP_KV, RUNNING_MAX_STEP_Q = 1024, 256
COMPILER_VMEM_BYTES = 32 << 20  # VMEM that is left to the compiler
REGISTER_ROWS = 16  # rows of keys in a register
INT8_REGISTER_ROWS = 32
PROBE_KV = 32  # the maximum score of the first 32 keys determines a row's offset
# The offset is larger than this maximum by the margin. In float32, a margin would reduce precision
OFFSET_MARGIN = {"bfloat16": 60.0, "float32": 0.0}
UNBOUNDED_SIDE = 1 << 30  # the size of a side of a window that has no bound
MAX_WEIGHT_SUM = 2.0**64  # if a row's sum of weights is larger, a logit was out of the range of the offset

TILE_NAMES = ("block_q", "block_kv", "block_kv_compute")
CENTER_KEYS = "center_keys"
QK_PREFIX = "qk="
INT8_NAME = "int8"
DEFAULT_TILE_TOKENS = 2048  # the default of `block_q`, and of `block_kv` if no number of keys is set
MAX_BLOCK_Q = 2048
# If there are at most SHORT_KV keys, blocks of queries are larger, because each block costs setup and write-back
SHORT_KV, MAX_BLOCK_Q_FOR_SHORT_KV = 512, 10_240
MAX_COMPUTE_KV = {"bfloat16": 8192, "float32": 1024}  # unrolled keys; with more, compiling takes minutes
Q_BLOCKS_PER_STEP = 4  # mask blocks of queries in a grid step; while one block waits, the products of another run
SPARSE_COMPUTE_KV = {"bfloat16": 4096, "float32": 512}  # unrolled keys of listed blocks
MAX_TAIL_KV = 2048  # maximum keys after the last full compute block; these keys are unrolled too
LOOP_OVERHEAD_KV = 120  # cost of entering and leaving a compute block, in keys


@dataclass(frozen=True)
class Config:
    """Tile sizes of the kernel.

    Attributes:
        block_q: Queries of a grid step.
        block_kv: Keys of a grid step.
        block_kv_compute: Keys of a compute block, which the fast path unrolls. This number divides `block_kv`.
        center_keys: Whether to subtract the mean of the keys. All logits of a row then change by the same number, and
            the weights do not change.
        interpret: Whether to run the kernel without a TPU, slowly, for tests.
        buffers: The number of buffers for blocks of keys. With 2, the next block is prefetched; 1 needs less VMEM.
    """

    block_q: int
    block_kv: int
    block_kv_compute: int
    center_keys: bool = False
    interpret: bool = False
    buffers: int = 2

    def __post_init__(self):
        if self.block_q < 1 or self.block_q % LANES:
            raise WanjaxError(f"block_q={self.block_q}: give a multiple of {LANES}, preferably of {STRIP_Q}")
        if self.block_kv_compute < PROBE_KV or self.block_kv_compute % REGISTER_ROWS:
            raise WanjaxError(
                f"block_kv_compute={self.block_kv_compute}: give a multiple of {REGISTER_ROWS}, at least {PROBE_KV}"
            )
        if self.block_kv < 1 or self.block_kv % self.block_kv_compute:
            raise WanjaxError(f"block_kv={self.block_kv}: give a multiple of block_kv_compute={self.block_kv_compute}")

    @property
    def running_max_step_kv(self) -> int:
        """Keys of one step of the running-max path."""
        return self._even_step(RUNNING_MAX_STEP_KV)

    @property
    def masked_step_kv(self) -> int:
        """Keys of one masked step, and of a step of the running-max path if some keys are masked."""
        return self._even_step(MAX_MASKED_KV)

    def _even_step(self, max_keys: int) -> int:
        counts = range(ceil_div(self.block_kv_compute, max_keys), self.block_kv_compute // REGISTER_ROWS + 1)
        return self.block_kv_compute // next(n for n in counts if self.block_kv_compute % (n * REGISTER_ROWS) == 0)

    def vmem_bytes(self, head_dim: int, itemsize: int) -> int:
        """Return the bytes of VMEM that the kernel needs: buffers of input and output blocks, and scratch memory."""
        padded_head_dim = max(head_dim, LANES)  # rows of 64 occupy rows of 128
        streamed_bytes = 2 * itemsize * padded_head_dim * (2 * self.block_q + self.buffers * self.block_kv)
        scratch = self.block_q * (
            2 * padded_head_dim * itemsize + 2 * 4 * head_dim + 4 * self.running_max_step_kv + 4 * 40
        )
        return streamed_bytes + scratch


@dataclass(frozen=True)
class Int8Config:
    """The configuration of flash_tpu with q kᵀ in int8. If `tiles` is None, the default tiles are used.

    The mean of the keys is always subtracted.
    """

    tiles: Config | None = None

    def __post_init__(self):
        if self.tiles is not None and self.tiles.block_kv_compute % INT8_REGISTER_ROWS:
            raise WanjaxError(
                f"block_kv_compute={self.tiles.block_kv_compute}: give a multiple of {INT8_REGISTER_ROWS} for qk=int8"
            )

    @property
    def interpret(self) -> bool:
        """Whether the kernel runs without a TPU."""
        return self.tiles is not None and self.tiles.interpret


@dataclass(frozen=True)
class Tiles:
    """Tile sizes as the user sets them. A size of None is derived from the other sizes.

    `qk` is the dtype of the product of queries and keys: `int8`, or None for the dtype of the operands.
    """

    block_q: int | None = None
    block_kv: int | None = None
    block_kv_compute: int | None = None
    center_keys: bool = False
    qk: str | None = None

    def __post_init__(self):
        self.config()

    @classmethod
    def parse(cls, text: str) -> "Tiles":
        """Parse text such as `block_q=2048,block_kv=4096`. The text may include `center_keys` or `qk=int8`.

        Raises WanjaxError if the text is malformed or the tiles are not possible.
        """
        sizes: dict[str, int] = {}
        entries = text.split(",")
        for entry in entries:
            if entry in (CENTER_KEYS, QK_PREFIX + INT8_NAME):
                continue
            if entry.startswith(QK_PREFIX):
                raise WanjaxError(f"{entry}: give {QK_PREFIX}{INT8_NAME}, or leave it out for the dtype of q and k")
            name, _, size = entry.partition("=")
            if name not in TILE_NAMES or name in sizes or not (size.isascii() and size.isdigit()):
                raise WanjaxError(
                    f"the tiles {text!r} cannot be read: write tiles such as "
                    "block_q=2048,block_kv=4096,block_kv_compute=2048"
                )
            sizes[name] = int(size)
        return cls(
            **sizes, center_keys=CENTER_KEYS in entries, qk=INT8_NAME if QK_PREFIX + INT8_NAME in entries else None
        )

    def __str__(self) -> str:
        sizes = [f"{name}={size}" for name in TILE_NAMES if (size := getattr(self, name)) is not None]
        flags = [CENTER_KEYS] * self.center_keys + [f"{QK_PREFIX}{self.qk}"] * (self.qk is not None)
        return ",".join([*sizes, *flags])

    def config(self) -> Config | Int8Config:
        """Return the config with all sizes set.

        The default of `block_q` is 2,048. If only one of `block_kv` and `block_kv_compute` is set, the other one is
        equal to it; if neither is set, both are 2,048. With `qk` and no size, the config has no tiles: the default
        tiles then depend on the shapes. Raises WanjaxError if the tiles are not possible.
        """
        if self.qk is not None and all(getattr(self, name) is None for name in TILE_NAMES):
            return Int8Config()
        keys = _first_set(self.block_kv, self.block_kv_compute, DEFAULT_TILE_TOKENS)
        config = Config(
            _first_set(self.block_q, DEFAULT_TILE_TOKENS),
            keys,
            _first_set(self.block_kv_compute, keys),
            self.center_keys,
        )
        return config if self.qk is None else Int8Config(config)


def _first_set(*sizes: int | None) -> int:
    return next(size for size in sizes if size is not None)


def default_config(
    vmem_bytes: int,
    head_dim: int,
    num_queries: int,
    num_keys: int,
    dtype: str,
    ragged: bool = False,
    unit_kv: int = REGISTER_ROWS,
) -> Config:
    """Return the fastest tiles by docs/attention.md: large compute blocks of equal size, and as many keys as fit in
    VMEM.

    Set `ragged` if there is a number of keys for each example, or a window. Compute blocks then consist of whole masked
    steps.
    """
    max_compute_kv, default_block_q = (
        MAX_COMPUTE_KV[dtype],
        min(MAX_BLOCK_Q, round_up(num_queries, STRIP_Q if num_queries > STRIP_Q else LANES)),
    )
    compute_kv = (
        _choose_compute_kv(num_keys, max_compute_kv, unit_kv)
        if not ragged or num_keys <= MAX_MASKED_KV
        else min(max_compute_kv, round_up(num_keys, MAX_MASKED_KV))
    )
    is_short = num_keys <= SHORT_KV and dtype == "bfloat16" and not ragged
    for block_q in ([_even_block(num_queries, MAX_BLOCK_Q_FOR_SHORT_KV, LANES)] if is_short else []) + [
        default_block_q
    ]:
        for steps in range(1, ceil_div(num_keys, compute_kv) + 1):
            config = Config(block_q, compute_kv * ceil_div(ceil_div(num_keys, compute_kv), steps), compute_kv)
            if config.vmem_bytes(head_dim, jnp.dtype(dtype).itemsize) + COMPILER_VMEM_BYTES <= vmem_bytes:
                return config
    return Config(default_block_q, compute_kv, compute_kv)


def _choose_compute_kv(num_keys: int, max_compute_kv: int, unit_kv: int) -> int:
    """Return the cheapest size of a compute block. A compute block consists of whole running-max steps. A long tail
    after the last compute block is avoided, because it takes long to compile."""
    if num_keys <= min(max_compute_kv, MAX_TAIL_KV):
        return max(PROBE_KV, round_up(num_keys, unit_kv))
    max_compute_kv = min(max_compute_kv, num_keys)
    steps = range(RUNNING_MAX_STEP_KV // 2, RUNNING_MAX_STEP_KV + 1, STRIP_KV)
    sizes = {size for step in steps for size in range(step, max_compute_kv + 1, step) if 2 * size > max_compute_kv}
    return min(sizes, key=lambda size: (num_keys % size > MAX_TAIL_KV, _relative_cost(num_keys, size)))


def _relative_cost(num_keys: int, compute_kv: int) -> int:
    """Return three times the cost of all keys, in keys. Per key, scores cost 2 and values 1. Values are computed in
    whole strips. Each compute block adds the overhead of the loop."""
    count, tail = divmod(num_keys, compute_kv)
    compute_cost, tail_cost = (
        2 * size + round_up(size, STRIP_KV) + 3 * LOOP_OVERHEAD_KV for size in (compute_kv, tail)
    )
    return count * compute_cost + (tail_cost if tail else 0)


def sparse_config(
    mask: Radial, config: Config | None, vmem_bytes: int, head_dim: int, num_keys: int, dtype: str
) -> Config:
    """Return tiles that consist of whole blocks of a mask: a few blocks of queries, and as many keys as fit in VMEM.

    If all keys of a head fit only without prefetching, prefetching is turned off. For a block of few queries, fetching
    all keys again would take longer than computing with the visible keys.
    """
    if config is not None:
        compute_kv = round_up(config.block_kv_compute, mask.block_kv)
        block_q = round_up(config.block_q, mask.block_q)
        return replace(
            config, block_q=block_q, block_kv=round_up(config.block_kv, compute_kv), block_kv_compute=compute_kv
        )
    compute_kv = round_up(SPARSE_COMPUTE_KV[dtype], mask.block_kv)
    compute_blocks, block_q = ceil_div(num_keys, compute_kv), mask.block_q * Q_BLOCKS_PER_STEP
    for steps, buffers in [(1, 2), (1, 1), *((steps, 2) for steps in range(2, compute_blocks + 1))]:
        candidate = Config(block_q, compute_kv * ceil_div(compute_blocks, steps), compute_kv, buffers=buffers)
        if candidate.vmem_bytes(head_dim, jnp.dtype(dtype).itemsize) + COMPILER_VMEM_BYTES <= vmem_bytes:
            return candidate
    return Config(block_q, compute_kv, compute_kv)


def _even_block(length: int, max_size: int, unit: int) -> int:
    """Return the size of equal blocks of at most `max_size` that cover a length. The size is rounded up to whole units.

    There are as few blocks as possible, unless more blocks reduce the padded length by more than a tenth.
    """
    min_blocks = ceil_div(length, max_size)
    sizes = {count: round_up(ceil_div(length, count), unit) for count in range(min_blocks, ceil_div(length, unit) + 1)}
    best = min(sizes, key=lambda count: (count * sizes[count], count))
    return sizes[best if 1.1 * best * sizes[best] < min_blocks * sizes[min_blocks] else min_blocks]
