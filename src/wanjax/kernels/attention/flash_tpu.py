# SPDX-License-Identifier: Apache-2.0
"""Exact attention on TPUs: a Pallas kernel whose softmax needs no running maximum, and checks that it needed none.

Scores are laid out keys × queries, exponents are in base 2, and sums in float32 (Milakov and Gimelshein, Online
normalizer calculation for softmax, 2018; Dao et al., FlashAttention, 2022). Softmax does not change when an offset is
subtracted from the logits of a row, and floating point leaves a range for it: any offset up to 60 powers of two from
the row's maximum gives the same result. So a row's offset comes from its first keys. The other keys need no maximum and
no rescaling, and no block waits for another. If a later logit leaves the range, the row's sum of weights shows it. Then
the kernel restores the state from before the block of keys and repeats the block with the offset first raised to its
maximum, as it does for the later blocks of that head. Ragged ends are exact; no key is padding.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from wanjax.errors import WanjaxError
from wanjax.kernels.attention import chunked, flash_gradient
from wanjax.kernels.attention.blocks import by_head
from wanjax.kernels.attention.flash_kernel import (
    CAREFUL_KV,
    CHUNK,
    LANES,
    PROBE,
    REGISTER,
    SPILL_BYTES,
    STRIP_KV,
    STRIP_Q,
    Sizes,
    Sums,
    kernel,
    kernel_of_blocks,
)
from wanjax.kernels.attention.gradient import from_result
from wanjax.kernels.attention.masks import Window, divide_live, first_keys, live_first
from wanjax.kernels.attention.radial import Radial, visits

HEAD_DIMS = (64, 128)
DTYPES = ("float32", "bfloat16")
TILES = ("block_q", "block_kv", "block_kv_compute")
CENTER = "center_keys"
COUNTS_KEYS = True
UNBOUNDED = 1 << 30  # a side of a window that includes all keys
LONGEST_Q = 2048
FEW_KEYS, LONGEST_Q_OF_FEW_KEYS = 512, 10_240  # then a block's first and last steps count beside the others
LONGEST_BODY = {"bfloat16": 8192, "float32": 1024}  # unrolled keys: with more, compiling takes minutes
BODY_OF_BLOCKS = {"bfloat16": 8192, "float32": 512}  # unrolled keys of blocks that need not be side by side
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
            raise WanjaxError(f"block_q={self.block_q}: a multiple of {LANES} would do, best of {STRIP_Q}")
        if self.block_kv_compute < PROBE or self.block_kv_compute % REGISTER:
            raise WanjaxError(
                f"block_kv_compute={self.block_kv_compute}: a multiple of {REGISTER} from {PROBE} on would do"
            )
        if self.block_kv < 1 or self.block_kv % self.block_kv_compute:
            raise WanjaxError(
                f"block_kv={self.block_kv}: a multiple of block_kv_compute={self.block_kv_compute} would do"
            )

    @property
    def chunk(self) -> int:
        """Keys of one step of the careful pass, which computes the maximum before each step."""
        return self._step(CAREFUL_KV)

    @property
    def masked_chunk(self) -> int:
        """Keys of one masked step, and of a step of the careful pass where some are masked."""
        return self._step(CHUNK)

    def _step(self, most: int) -> int:
        counts = range(_ceil(self.block_kv_compute, most), self.block_kv_compute // REGISTER + 1)
        return self.block_kv_compute // next(n for n in counts if self.block_kv_compute % (n * REGISTER) == 0)

    def vmem_bytes(self, head_dim: int, itemsize: int) -> int:
        """Bytes of VMEM that the kernel holds: the buffers of each streamed block, and scratch."""
        width = max(head_dim, LANES)  # rows of 64 occupy rows of 128
        streamed = 2 * itemsize * width * (2 * self.block_q + self.buffers * self.block_kv)
        scratch = self.block_q * (2 * width * itemsize + 2 * 4 * head_dim + 4 * self.chunk + 4 * 40)
        return streamed + scratch


def read_config(text: str) -> Config:
    """Reads tiles from text such as `block_q=2048,block_kv=4096,block_kv_compute=2048`, perhaps with `center_keys`.

    `block_q` is 2,048 if left out; either size of keys is the other one, or 2,048 if both are left out. Raises
    WanjaxError for other text, and for tiles that are not possible.
    """
    given: dict[str, int] = {}
    entries = text.split(",")
    for entry in entries:
        if entry == CENTER:
            continue
        name, _, size = entry.partition("=")
        if name not in TILES or name in given or not (size.isascii() and size.isdigit()):
            raise WanjaxError(f"the tiles {text!r} are not such as block_q=2048,block_kv=4096,block_kv_compute=2048")
        given[name] = int(size)
    keys = given.get("block_kv", given.get("block_kv_compute", 2048))
    return Config(given.get("block_q", 2048), keys, given.get("block_kv_compute", keys), CENTER in entries)


def default_config(vmem_bytes: int, head_dim: int, queries: int, keys: int, dtype: str, ragged: bool = False) -> Config:
    """The tiles that docs/attention.md prices best: long even bodies, and as many keys as a chip's VMEM holds.

    `ragged` says that there is a count or a window: bodies are then of whole masked steps.
    """
    longest, usual = LONGEST_BODY[dtype], (LONGEST_Q, STRIP_Q if queries > STRIP_Q else LANES)
    body = _body(keys, longest) if not ragged or keys <= CHUNK else min(longest, _round_up(keys, CHUNK))
    wide = [(LONGEST_Q_OF_FEW_KEYS, LANES)] if keys <= FEW_KEYS and dtype == "bfloat16" and not ragged else []
    for most, unit in (*wide, usual):
        block_q = _even(queries, most, unit)
        for blocks in range(1, _ceil(keys, body) + 1):
            config = Config(block_q, body * _ceil(_ceil(keys, body), blocks), body)
            if config.vmem_bytes(head_dim, jnp.dtype(dtype).itemsize) + SPILL_BYTES <= vmem_bytes:
                return config
    return Config(_even(queries, *usual), body, body)


def _body(keys: int, longest: int) -> int:
    """The cheapest size of a body that whole careful steps fill and that leaves no long tail to compile."""
    if keys <= min(longest, LONGEST_TAIL):
        return max(PROBE, _round_up(keys, REGISTER))
    longest = min(longest, keys)
    steps = range(CAREFUL_KV // 2, CAREFUL_KV + 1, STRIP_KV)
    sizes = {size for step in steps for size in range(step, longest + 1, step) if 2 * size > longest}
    return min(sizes, key=lambda size: (keys % size > LONGEST_TAIL, _cost(keys, size)))


def _cost(keys: int, body: int) -> int:
    """Three times the cost of all keys: two for scores, one for values in whole strips, and the ends of bodies."""
    count, tail = divmod(keys, body)
    one, other = (2 * size + _round_up(size, STRIP_KV) + 3 * BODY_ENDS for size in (body, tail))
    return count * one + (other if tail else 0)


class Unfinished(NamedTuple):
    """Attention to some of the keys: queries, transposed and scaled as the kernel takes them, and their sums."""

    q: Array
    sums: Sums


def unsupported(q, k, v, *, key_mask, window, scale, bias, config, return_lse) -> str | None:
    """The reason why this call is not supported, or None."""
    head_dim, vmem = q.shape[3], _vmem_bytes()
    if config is not None and not isinstance(config, Config):
        return f"flash_tpu is configured by a flash_tpu.Config, which {type(config).__name__} is not"
    if vmem is None and not (config and config.interpret):
        return "flash_tpu runs on TPUs, and elsewhere only by Config(interpret=True)"
    if head_dim not in HEAD_DIMS:
        return f"flash_tpu has no head size of {head_dim}: {' and '.join(map(str, HEAD_DIMS))} are supported"
    if q.dtype.name not in DTYPES:
        return f"flash_tpu does not run in {q.dtype.name}: {' and '.join(DTYPES)} are supported"
    if bias is not None:
        return "flash_tpu takes no bias: a key mask or a window is supported"
    if key_mask is not None and window is not None:
        return "flash_tpu takes a key mask or a window, not both"
    if vmem is None:
        return None
    ragged = key_mask is not None or window is not None
    if isinstance(window, Radial):
        tiles = _config_of_blocks(window, config, vmem, head_dim, k.shape[1], q.dtype.name)
    else:
        tiles = config or default_config(vmem, head_dim, q.shape[1], k.shape[1], q.dtype.name, ragged)
    need = tiles.vmem_bytes(head_dim, q.dtype.itemsize) + SPILL_BYTES
    if need > vmem:
        right = "a chip with more" if vmem < SPILL_BYTES else "smaller ones"
        return f"flash_tpu's tiles need {need >> 20} MiB of VMEM, and the chip has {vmem >> 20}: {right} would do"
    return None


def _vmem_bytes() -> int | None:
    """Bytes of VMEM of a core of the target TPU; None if the target is no TPU."""
    try:
        return pltpu.get_tpu_info().vmem_capacity_bytes
    except ValueError:
        return None


def attention(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    *,
    key_mask: Bool[Array, "B S"] | None,
    window: Window | Radial | None,
    scale: float,
    bias: None,
    config: Config | None,
    return_lse: bool = False,
    keys: int | Int32[Array, " B"] | None = None,
) -> Float[Array, "B L N D"] | tuple[Float[Array, "B L N D"], Float32[Array, "B L N"]]:
    """Computes what the reference does; the gradient computes the scores again, as `chunked` does.

    Only the first `keys` keys take part (None: all), as many in each example or a number for each; `keys` and
    `key_mask` are not given together. Under a radial mask a number for each is at least that of the video's keys.
    """
    counted = isinstance(keys, Array)
    options = {"window": window, "scale": scale, "config": config, "keys": None if counted else keys}
    masks = key_mask, keys if counted else None
    out, lse = from_result(partial(_attention, **options), partial(_gradient, **options), q, k, v, masks)
    return (out, lse) if return_lse else out


def resumed(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    before: Unfinished | None,
    *,
    last: bool,
    key_mask: Bool[Array, "B S"] | None,
    scale: float,
    config: Config | None,
    keys: Int32[Array, " B"] | None = None,
) -> Unfinished | tuple[Float[Array, "B L N D"], Float32[Array, "B L N"]]:
    """Adds keys to the sums that this returned for others, None at first; the last keys give result and log-sum-exp.

    No mean may be subtracted from the keys: it would not suit the others. The other arguments are `attention`'s.
    """
    options = {"window": None, "scale": scale, "config": config, "keys": None}
    return _attention(q, k, v, (key_mask, keys), **options, before=before, unfinished=not last)


def gradient(
    q, k, v, g, lse, delta, *, key_mask, window: Window | Radial | None, scale: float, config: Config | None, keys=None
) -> tuple[Array, Array, Array]:
    """The gradients of q, k and v; the arguments are those of `chunked.gradient`."""
    options = {"window": window, "scale": scale, "config": config}
    return _gradient(q, k, v, g, lse, delta, (key_mask, keys), **options, keys=None)


def _gradient(q, k, v, g, lse, delta, masks, *, window, scale: float, config: Config | None, keys: int | None):
    """The gradients of q, k and v: by the kernel where all queries see the same first keys, else by `chunked`'s."""
    (key_mask, live), (batch, queries, heads, head_dim) = masks, q.shape
    keys = k.shape[1] if keys is None else keys
    interpret, tiles = config is not None and config.interpret, None
    if key_mask is None and window is None and k.shape[2] == heads:
        vmem = 2 * SPILL_BYTES if interpret else _vmem_bytes() or 0
        tiles = flash_gradient.fitting(queries, keys, head_dim, q.dtype.itemsize, vmem, interpret=interpret)
    if tiles is not None:
        live = jnp.full((batch,), keys, jnp.int32) if live is None else live
        return flash_gradient.gradient(q, k, v, g, lse, delta, live, scale=scale, keys=keys, config=tiles)
    options = {"key_mask": key_mask, "window": window, "scale": scale, "config": None, "keys": live}
    dq, dk, dv = chunked.gradient(q, k[:, :keys], v[:, :keys], g, lse, delta, **options)
    after = ((0, 0), (0, k.shape[1] - keys), (0, 0), (0, 0))
    return dq, jnp.pad(dk, after), jnp.pad(dv, after)


def _attention(
    q,
    k,
    v,
    masks,
    *,
    window,
    scale: float,
    config: Config | None,
    keys: int | None,
    before: Unfinished | None = None,
    unfinished: bool = False,
) -> Any:
    (key_mask, live), (batch, queries, heads, head_dim) = masks, q.shape
    kv_heads, counted = k.shape[2], live is not None
    keys = k.shape[1] if keys is None else keys
    live = live if counted else jnp.full((batch,), keys, jnp.int32)
    blocks = window if isinstance(window, Radial) else None
    ragged = blocks is None and (key_mask is not None or counted or window is not None)
    if blocks is not None:
        config = _config_of_blocks(blocks, config, _vmem_bytes() or 0, head_dim, keys, q.dtype.name)
    elif config is None:
        config = default_config(_vmem_bytes() or 0, head_dim, queries, keys, q.dtype.name, ragged)
    mean = None
    if config.center_keys:
        k, mean = _center(k, first_keys(live, k.shape[1]) if counted else key_mask)
    if key_mask is not None:
        live, (k, v) = live_first(key_mask, k, v)  # then whole blocks of masked keys are skipped
    side_by_side = head_dim % LANES == 0  # then a block takes the columns of one head, as projections wrote them
    operands = ((x.reshape(*x.shape[:2], -1) if side_by_side else by_head(x)) for x in (q, k, v))
    scalars = (live,) if blocks is None else _listed(blocks, queries, keys, config.block_kv, live)
    sides = (None, None) if window is None or isinstance(window, Radial) else window
    left, right = (UNBOUNDED if side is None else min(side, UNBOUNDED) for side in sides)
    sizes = Sizes(
        queries=queries,
        keys=keys,
        heads=heads,
        block_q=config.block_q,
        block_kv=config.block_kv,
        body=config.block_kv_compute,
        chunk=blocks.block_kv if blocks else config.masked_chunk if ragged else config.chunk,
        ragged=ragged,
        window=(left, right),
        factor=scale * math.log2(math.e),
        resumed=before is not None,
        unfinished=unfinished,
    )
    made = _call(scalars, *operands, before, sizes=sizes, kv_heads=kv_heads, head_dim=head_dim, config=config)
    if unfinished:
        ready, *sums = made if before is None else (before.q, *made)
        return Unfinished(ready, Sums(*sums))
    out, lse = made
    out = out.reshape(q.shape) if side_by_side else jnp.moveaxis(out.reshape(batch, heads, queries, -1), 1, 2)
    lse = jnp.moveaxis(lse.reshape(batch, heads, queries), 1, 2)
    if mean is not None:
        groups = q.astype(jnp.float32).reshape(batch, queries, kv_heads, -1, head_dim)
        lse += scale * jnp.einsum("BLKND,BKD->BLKN", groups, mean, precision="highest").reshape(lse.shape)
    return out, lse


def _config_of_blocks(
    mask: Radial, config: Config | None, vmem_bytes: int, head_dim: int, keys: int, dtype: str
) -> Config:
    """Tiles that fit a mask's blocks: its queries, bodies of whole blocks, and as many keys as VMEM holds.

    A head's keys are rather all there, fetched once, than fetched ahead: blocks have few queries, and their live keys
    take less time than fetching all would.
    """
    if config is not None:
        body = _round_up(config.block_kv_compute, mask.block_kv)
        return replace(config, block_q=mask.block_q, block_kv=_round_up(config.block_kv, body), block_kv_compute=body)
    body = _round_up(BODY_OF_BLOCKS[dtype], mask.block_kv)
    bodies = _ceil(keys, body)
    for parts, buffers in [(1, 2), (1, 1), *((parts, 2) for parts in range(2, bodies + 1))]:
        made = Config(mask.block_q, body * _ceil(bodies, parts), body, buffers=buffers)
        if made.vmem_bytes(head_dim, jnp.dtype(dtype).itemsize) + SPILL_BYTES <= vmem_bytes:
            return made
    return Config(mask.block_q, body, body)


def _listed(mask: Radial, queries: int, keys: int, block_kv: int, live: Int32[Array, " B"]) -> tuple[Array, ...]:
    """What `kernel_of_blocks` is told: `radial.visits` without the blocks that `live` ends in or before, and `live`.

    All queries see these blocks, or they are padding and see none.
    """
    first, count, tail, start = visits(mask, queries, keys, block_kv)
    begin = np.arange(0, keys, block_kv) // mask.block_kv
    end = np.minimum(begin + block_kv // mask.block_kv, keys // mask.block_kv)
    dead = jnp.maximum(end[None] - jnp.maximum(live[:, None] // mask.block_kv, begin[None]), 0)  # [B, steps]
    left = jnp.maximum(count.reshape(1, -1, len(begin)) - dead[:, None], 0)
    return tuple(map(jnp.asarray, (first, left.reshape(-1), tail, start, live)))


def _center(k: Float[Array, "B S K D"], key_mask: Bool[Array, "B S"] | None) -> tuple[Array, Float32[Array, "B K D"]]:
    """Subtracts the mean of the keys that take part; returns the keys and the mean."""
    wide = k.astype(jnp.float32)
    live = jnp.ones(k.shape[:2], bool) if key_mask is None else key_mask
    mean = divide_live(
        jnp.where(live[:, :, None, None], wide, 0.0).sum(axis=1),
        live.sum(axis=1, dtype=jnp.float32)[:, None, None],
    )
    return (wide - mean[:, None]).astype(k.dtype), mean


def _ceil(a, b: int):
    return (a + b - 1) // b


def _round_up(a: int, b: int) -> int:
    return b * _ceil(a, b)


def _even(length: int, block: int, unit: int) -> int:
    """The size of even blocks of at most `block` that cover a length, rounded up to whole units.

    They are the fewest, unless more of them pad a tenth less.
    """
    fewest = _ceil(length, block)
    sizes = {count: _round_up(_ceil(length, count), unit) for count in range(fewest, _ceil(length, unit) + 1)}
    best = min(sizes, key=lambda count: (count * sizes[count], count))
    return sizes[best if 1.1 * best * sizes[best] < fewest * sizes[fewest] else fewest]


def _call(scalars: tuple, q, k, v, before: Unfinished | None, *, sizes: Sizes, kv_heads: int, head_dim: int, config):
    """The kernel over a grid of heads, blocks of queries and blocks of keys.

    q, k and v are [B L N·D] and [B S K·D], or [B·N L D] and [B·K S D]. `scalars` are the number of keys that take part
    in each example, or those of listed blocks. Sums are written where those before them were.
    """
    listed = len(scalars) > 1
    heads, block_q, block_kv = sizes.heads, sizes.block_q, sizes.block_kv
    rows, queries, beside = q.shape[0], q.shape[1], q.shape[2] // head_dim  # heads side by side in a row
    batch, group = rows * beside // heads, heads // kv_heads
    split = q.dtype == jnp.bfloat16  # q times the factor, as a sum of two: one alone would lose three digits
    if split and 2 * head_dim <= LANES:  # fills rows that would be padded; the kernel doubles wider rows
        k = jnp.concatenate([k, k], axis=2)

    def kv_block(h, i, j, live, *_):
        j = _seen_block(h, i, j, live, sizes) if sizes.ragged else j
        row, column = (h // group, 0) if beside == 1 else (h // heads, h % heads // group)
        return row, j, column

    kv_spec = partial(pl.BlockSpec, index_map=kv_block, pipeline_mode=pl.Buffered(1) if config.buffers == 1 else None)
    k_width = k.shape[2] if beside == 1 else head_dim
    q_spec = pl.BlockSpec((None, block_q, head_dim), lambda h, i, j, *_: (h // beside, i, h % beside))

    def rows_spec(rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, block_q), lambda h, i, j, *_: (h, 0, i))

    ready, sums = (head_dim * (1 + split), q.dtype), [(rows, jnp.float32) for rows in (1, 8, head_dim)]
    after = [] if not sizes.unfinished else sums if before else [ready, *sums]
    row_shape = partial(_rows_of_heads, batch * heads, queries if not after else _round_up(queries, block_q))
    operands = (q, k, v) if before is None else (before.q, k, v, *before.sums)
    return pl.pallas_call(
        partial(kernel_of_blocks if listed else kernel, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch * heads, _ceil(queries, block_q), _ceil(sizes.keys, block_kv)),
            in_specs=[
                rows_spec(ready[0]) if before else q_spec,
                kv_spec((None, block_kv, k_width)),
                kv_spec((None, block_kv, head_dim)),
                *(rows_spec(rows) for rows, _ in sums if before),
            ],
            out_specs=[rows_spec(rows) for rows, _ in after] or [q_spec, rows_spec(1)],
            scratch_shapes=_scratch(sizes, ready[0], head_dim, q.dtype),
        ),
        out_shape=[row_shape(*kept) for kept in after]
        or [jax.ShapeDtypeStruct(q.shape, q.dtype), row_shape(1, jnp.float32)],
        input_output_aliases={len(scalars) + 3 + n: n for n in range(3)} if before and after else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=config.vmem_bytes(head_dim, q.dtype.itemsize) + SPILL_BYTES,
        ),
        cost_estimate=_estimate(q, k, v, sizes.keys, head_dim),
        interpret=config.interpret,
        name="flash_blocks" if listed else "flash_attention",
    )(*scalars, *operands)


def _rows_of_heads(heads: int, columns: int, rows: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((heads, rows, columns), dtype)


def _seen_block(h, i, j, live, sizes: Sizes):
    """The block of keys to fetch in grid step (h, i, j): j, or the nearest block that a query sees."""
    left, right = sizes.window
    first = (i * sizes.block_q - left) // sizes.block_kv
    last = jnp.minimum(live[h // sizes.heads], i * sizes.block_q + sizes.block_q + right) - 1
    return jnp.clip(j, jnp.maximum(first, 0), jnp.maximum(last // sizes.block_kv, 0))


def _estimate(q, k, v, keys: int, head_dim: int) -> pl.CostEstimate:
    """The kernel's work, by which the compiler schedules other work beside it."""
    return pl.CostEstimate(
        flops=4 * q.size * keys,
        transcendentals=q.size // head_dim * keys,
        bytes_accessed=q.dtype.itemsize * (2 * q.size + k.size + v.size),
    )


def _scratch(sizes: Sizes, q_rows: int, head_dim: int, dtype: jnp.dtype) -> list[Any]:
    """The memory of the kernel's `State`, in the order of its fields."""
    queries = sizes.block_q
    return [
        pltpu.VMEM((q_rows, queries), dtype),
        pltpu.VMEM((1, queries), jnp.float32),
        pltpu.VMEM((8, queries), jnp.float32),
        pltpu.VMEM((head_dim, queries), jnp.float32),
        pltpu.VMEM((8, queries), jnp.float32),
        pltpu.VMEM((head_dim, queries), jnp.float32),
        pltpu.VMEM((sizes.chunk, queries), jnp.float32),
        pltpu.VMEM((8, queries), jnp.float32),
        pltpu.SMEM((2,), jnp.int32),
    ]
