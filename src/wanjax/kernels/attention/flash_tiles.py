# SPDX-License-Identifier: Apache-2.0
"""Tiles of flash_tpu: how many queries and keys it holds and unrolls, by what docs/attention.md prices best."""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from wanjax.errors import WanjaxError
from wanjax.kernels.alignment import LANES, ceil_div, round_up
from wanjax.kernels.attention.radial import Radial

TILE_Q = 256  # queries of a tile of the matrix unit
STRIP_Q, STRIP_KV = 2 * TILE_Q, 256  # queries and keys of one step: a tile for each of the two matrix units of a core
LEAD = 2  # strips that are scored before their values are added, so that the matrix unit does not wait for softmax
CHUNK = 512  # the most keys of a masked step
CAREFUL_KV, CAREFUL_Q = 1024, 256  # the most keys and queries of a step of the careful pass
SPILL_BYTES = 32 << 20  # the compiler's own share of VMEM, beside a kernel's
REGISTER = 16  # rows of keys in a register
PROBE = 32  # keys whose maximum sets a row's offset
HEADROOM = {"bfloat16": 60.0, "float32": 0.0}  # of the offset above that maximum; in float32 it would cost digits
LARGEST_SUM = 2.0**64  # of a row's weights: a larger sum means that a logit left the range of the offset

TILES = ("block_q", "block_kv", "block_kv_compute")
CENTER = "center_keys"
USUAL = 2048  # queries and keys, where neither is set
LONGEST_Q = 2048
FEW_KEYS, LONGEST_Q_OF_FEW_KEYS = 512, 10_240  # then a block's first and last steps count beside the others
LONGEST_BODY = {"bfloat16": 8192, "float32": 1024}  # unrolled keys: with more, compiling takes minutes
BLOCKS_TOGETHER = 4  # of queries with a list of keys each: the products of one fill the waits of another
BODY_OF_BLOCKS = {"bfloat16": 4096, "float32": 512}  # unrolled keys of blocks that need not be side by side
LONGEST_TAIL = 2048  # keys after the last whole body, unrolled too
BODY_ENDS = 120  # the cost of the two ends of a body, in keys


@dataclass(frozen=True)
class Config:
    """Tiles: queries of a grid step, keys in VMEM at a time, keys of one unrolled body of the quick pass.

    `center_keys` subtracts the mean of the keys, which shifts all logits of a row equally and changes no weight.
    `interpret` runs the kernel without a TPU, slowly, for tests. `buffers` of 1 in place of 2 fetches no keys ahead,
    for the VMEM that this takes.
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
        if self.block_kv_compute < PROBE or self.block_kv_compute % REGISTER:
            raise WanjaxError(
                f"block_kv_compute={self.block_kv_compute}: give a multiple of {REGISTER} from {PROBE} on"
            )
        if self.block_kv < 1 or self.block_kv % self.block_kv_compute:
            raise WanjaxError(f"block_kv={self.block_kv}: give a multiple of block_kv_compute={self.block_kv_compute}")

    @property
    def chunk(self) -> int:
        """Keys of one step of the careful pass, which computes the maximum before each step."""
        return self._step(CAREFUL_KV)

    @property
    def masked_chunk(self) -> int:
        """Keys of one masked step, and of a step of the careful pass where some are masked."""
        return self._step(CHUNK)

    def _step(self, most: int) -> int:
        counts = range(ceil_div(self.block_kv_compute, most), self.block_kv_compute // REGISTER + 1)
        return self.block_kv_compute // next(n for n in counts if self.block_kv_compute % (n * REGISTER) == 0)

    def vmem_bytes(self, head_dim: int, itemsize: int) -> int:
        """Bytes of VMEM that the kernel holds: the buffers of each streamed block, and scratch."""
        width = max(head_dim, LANES)  # rows of 64 occupy rows of 128
        streamed = 2 * itemsize * width * (2 * self.block_q + self.buffers * self.block_kv)
        scratch = self.block_q * (2 * width * itemsize + 2 * 4 * head_dim + 4 * self.chunk + 4 * 40)
        return streamed + scratch


@dataclass(frozen=True)
class Tiles:
    """Tiles as they are asked for: a size of None follows from the others."""

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
            if entry == CENTER:
                continue
            name, _, size = entry.partition("=")
            if name not in TILES or name in sizes or not (size.isascii() and size.isdigit()):
                raise WanjaxError(
                    f"the tiles {text!r} are not such as block_q=2048,block_kv=4096,block_kv_compute=2048"
                )
            sizes[name] = int(size)
        return cls(**sizes, center_keys=CENTER in entries)

    def __str__(self) -> str:
        sizes = [f"{name}={size}" for name in TILES if (size := getattr(self, name)) is not None]
        return ",".join([*sizes, CENTER] if self.center_keys else sizes)

    def config(self) -> Config:
        """Return all sizes: `block_q` is 2,048 if left out, and either size of keys is the other one, or 2,048.

        Raises WanjaxError for tiles that are not possible.
        """
        keys = _first_set(self.block_kv, self.block_kv_compute, USUAL)
        return Config(_first_set(self.block_q, USUAL), keys, _first_set(self.block_kv_compute, keys), self.center_keys)


def _first_set(*sizes: int | None) -> int:
    return next(size for size in sizes if size is not None)


def default_config(vmem_bytes: int, head_dim: int, queries: int, keys: int, dtype: str, ragged: bool = False) -> Config:
    """The tiles that docs/attention.md prices best: long even bodies, and as many keys as a chip's VMEM holds.

    `ragged` says that there is a count or a window: bodies are then of whole masked steps.
    """
    longest, usual = LONGEST_BODY[dtype], min(LONGEST_Q, round_up(queries, STRIP_Q if queries > STRIP_Q else LANES))
    body = _body(keys, longest) if not ragged or keys <= CHUNK else min(longest, round_up(keys, CHUNK))
    few = keys <= FEW_KEYS and dtype == "bfloat16" and not ragged
    for block_q in ([_even(queries, LONGEST_Q_OF_FEW_KEYS, LANES)] if few else []) + [usual]:
        for blocks in range(1, ceil_div(keys, body) + 1):
            config = Config(block_q, body * ceil_div(ceil_div(keys, body), blocks), body)
            if config.vmem_bytes(head_dim, jnp.dtype(dtype).itemsize) + SPILL_BYTES <= vmem_bytes:
                return config
    return Config(usual, body, body)


def _body(keys: int, longest: int) -> int:
    """The cheapest size of a body that whole careful steps fill and that leaves no long tail to compile."""
    if keys <= min(longest, LONGEST_TAIL):
        return max(PROBE, round_up(keys, REGISTER))
    longest = min(longest, keys)
    steps = range(CAREFUL_KV // 2, CAREFUL_KV + 1, STRIP_KV)
    sizes = {size for step in steps for size in range(step, longest + 1, step) if 2 * size > longest}
    return min(sizes, key=lambda size: (keys % size > LONGEST_TAIL, _cost(keys, size)))


def _cost(keys: int, body: int) -> int:
    """Three times the cost of all keys: two for scores, one for values in whole strips, and the ends of bodies."""
    count, tail = divmod(keys, body)
    one, other = (2 * size + round_up(size, STRIP_KV) + 3 * BODY_ENDS for size in (body, tail))
    return count * one + (other if tail else 0)


def config_of_blocks(
    mask: Radial, config: Config | None, vmem_bytes: int, head_dim: int, keys: int, dtype: str
) -> Config:
    """Tiles that fit a mask's blocks: some of its blocks of queries, bodies of whole blocks of keys, all keys that fit.

    A head's keys are rather all there, fetched once, than fetched ahead: blocks have few queries, and their live keys
    take less time than fetching all would.
    """
    if config is not None:
        body = round_up(config.block_kv_compute, mask.block_kv)
        rows = round_up(config.block_q, mask.block_q)
        return replace(config, block_q=rows, block_kv=round_up(config.block_kv, body), block_kv_compute=body)
    body = round_up(BODY_OF_BLOCKS[dtype], mask.block_kv)
    bodies, rows = ceil_div(keys, body), mask.block_q * BLOCKS_TOGETHER
    for parts, buffers in [(1, 2), (1, 1), *((parts, 2) for parts in range(2, bodies + 1))]:
        tiles = Config(rows, body * ceil_div(bodies, parts), body, buffers=buffers)
        if tiles.vmem_bytes(head_dim, jnp.dtype(dtype).itemsize) + SPILL_BYTES <= vmem_bytes:
            return tiles
    return Config(rows, body, body)


def _even(length: int, block: int, unit: int) -> int:
    """The size of even blocks of at most `block` that cover a length, rounded up to whole units.

    They are the fewest, unless more of them pad a tenth less.
    """
    fewest = ceil_div(length, block)
    sizes = {count: round_up(ceil_div(length, count), unit) for count in range(fewest, ceil_div(length, unit) + 1)}
    best = min(sizes, key=lambda count: (count * sizes[count], count))
    return sizes[best if 1.1 * best * sizes[best] < fewest * sizes[fewest] else fewest]
