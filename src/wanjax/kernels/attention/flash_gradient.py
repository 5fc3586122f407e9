# SPDX-License-Identifier: Apache-2.0
"""The gradient of attention on TPUs: a Pallas kernel with five products for each pair of blocks.

Scores are laid out keys × queries, as in `flash_kernel`, and come out as exponents of two less the row's log-sum-exp:
the weights need no maximum and no sum. A block of keys and values stays while the queries of a head pass. The gradients
of the keys are summed in scratch meanwhile, and those of the queries over all blocks of keys, for as many queries as
VMEM holds: longer sequences take several calls.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from wanjax.kernels.alignment import LANES, ceil_div, round_up
from wanjax.kernels.attention.blocks import even, from_rows, iota, product, to_rows
from wanjax.kernels.attention.flash_tiles import SPILL_BYTES
from wanjax.kernels.attention.masks import finite_max
from wanjax.sharding import pad_to

LONGEST_Q, LONGEST_KV = 2048, 2048  # of a grid step
UNROLLED = 2048  # keys
STRIP = 256  # queries and keys of one step, a tile of a matrix unit
LEAD = 2  # steps whose weights are computed before their products are added, so that the matrix units do not wait


@dataclass(frozen=True)
class Config:
    """Tiles: queries and keys of a grid step, keys that are unrolled, and queries of one call, in whole grid steps.

    `body` divides `block_kv`. `interpret` runs the kernel without a TPU, slowly, for tests.
    """

    block_q: int
    block_kv: int
    body: int
    held: int
    interpret: bool = False

    def vmem_bytes(self, head_dim: int, itemsize: int) -> int:
        """Bytes of VMEM that the kernel holds: the buffers of each streamed block, and scratch."""
        width = max(head_dim, LANES)  # rows of 64 occupy rows of 128
        streamed = 2 * width * (3 * itemsize * self.block_q + (2 * itemsize + 2 * 4) * self.block_kv)
        scratch = 2 * itemsize * self.block_q + (itemsize + 2 * 4) * self.block_kv + 4 * self.held
        return streamed + head_dim * scratch + 2 * 2 * 4 * 8 * self.block_q


class Sizes(NamedTuple):
    """Static arguments of the kernel."""

    queries: int
    heads: int  # of one example
    block_q: int
    block_kv: int
    body: int  # keys that are unrolled
    scale: float


class State(NamedTuple):
    """References to what is kept: transposed operands, and sums [D L] and [D S] in float32."""

    q: jax.Ref
    g: jax.Ref
    k: jax.Ref
    dq: jax.Ref  # of all blocks of queries, side by side
    dk: jax.Ref
    dv: jax.Ref


def kernel(
    live_ref, q_ref, g_ref, lse_ref, delta_ref, k_ref, v_ref, dq_ref, dk_ref, dv_ref, *scratch, sizes: Sizes
) -> None:
    """The grid runs over heads, blocks of keys, and blocks of queries."""
    state = State(*scratch)
    j, i = pl.program_id(1), pl.program_id(2)
    live = live_ref[pl.program_id(0) // sizes.heads] - j * sizes.block_kv  # keys of this block that take part
    held = pl.ds(pl.multiple_of(i * sizes.block_q, LANES), sizes.block_q)

    @pl.when(i == 0)
    def _():
        rows = iota((sizes.block_kv, 1), 0)
        state.k[...] = jnp.where(rows < live, k_ref[...], jnp.zeros_like(k_ref)).T
        state.dk[...] = jnp.zeros(state.dk.shape)
        state.dv[...] = jnp.zeros(state.dv.shape)

    @pl.when(j == 0)
    def _():
        state.dq[:, held] = jnp.zeros((state.dq.shape[0], sizes.block_q))

    past = sizes.queries - i * sizes.block_q  # memory past the last query holds anything
    some = iota((sizes.block_q, 1), 0) < past
    state.q[...] = jnp.where(some, q_ref[...], jnp.zeros_like(q_ref)).T
    state.g[...] = jnp.where(some, g_ref[...], jnp.zeros_like(g_ref)).T
    beside = iota((1, sizes.block_q), 1) < past
    lse, delta = (jnp.where(beside, x[...], 0.0) for x in (lse_ref, delta_ref))

    def add(index: Array, masked: bool) -> None:
        _add(k_ref, v_ref, state, lse, delta, index * sizes.body, i * sizes.block_q, live if masked else None, sizes)

    whole = jnp.clip(live, 0, sizes.block_kv) // sizes.body
    jax.lax.fori_loop(0, whole, lambda index, _: add(index, False), None)
    pl.when((live > whole * sizes.body) & (whole < sizes.block_kv // sizes.body))(lambda: add(whole, True))

    @pl.when(i == pl.num_programs(2) - 1)
    def _():
        dk_ref[...] = (sizes.scale * state.dk[...]).T.astype(dk_ref.dtype)
        dv_ref[...] = state.dv[...].T.astype(dv_ref.dtype)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        dq_ref[...] = (sizes.scale * state.dq[:, held]).T.astype(dq_ref.dtype)


def _add(k_ref, v_ref, state: State, lse, delta, start, first_q, live: Array | None, sizes: Sizes) -> None:
    """Add a body of keys, of which only those before `live` take part."""
    factor = sizes.scale * math.log2(math.e)
    waiting: list[tuple[slice, Any, Array, Array]] = []
    for first in range(0, sizes.body, STRIP):
        count = min(STRIP, sizes.body - first)
        keys = pl.ds(pl.multiple_of(start + first, LANES), count)
        k, v = k_ref[keys, :], v_ref[keys, :]
        for strip in range(0, sizes.block_q, STRIP):
            queries = slice(strip, min(strip + STRIP, sizes.block_q))
            weights = jnp.exp2(factor * product(k, state.q[:, queries]) - lse[:, queries])
            of_logits = weights * (product(v, state.g[:, queries]) - delta[:, queries])
            if live is not None:
                rows = iota((count, 1), 0) < live - start - first
                weights, of_logits = (jnp.where(rows, x, 0.0) for x in (weights, of_logits))
            waiting.append((queries, keys, weights.astype(k.dtype), of_logits.astype(k.dtype)))
            if len(waiting) > LEAD:
                _add_products(state, first_q, *waiting.pop(0))
    for products in waiting:
        _add_products(state, first_q, *products)


def _add_products(state: State, first_q: Array, queries: slice, keys: Any, weights: Array, of_logits: Array) -> None:
    """Add the three products with the weights [S L] and the gradients of the logits."""
    state.dv[:, keys] += product(state.g[:, queries], weights, transposed=True)
    state.dk[:, keys] += product(state.q[:, queries], of_logits, transposed=True)
    at = pl.ds(pl.multiple_of(first_q + queries.start, LANES), queries.stop - queries.start)
    state.dq[:, at] += product(state.k[:, keys], of_logits)


def fitting(
    queries: int, keys: int, head_dim: int, itemsize: int, vmem_bytes: int, *, interpret: bool = False
) -> Config | None:
    """The tiles for these sizes; None for a chip whose VMEM holds too few queries."""
    block_q, block_kv = (round_up(even(n, most)[1], LANES) for n, most in ((queries, LONGEST_Q), (keys, LONGEST_KV)))
    body = next(size for size in range(min(UNROLLED, block_kv), 0, -LANES) if block_kv % size == 0)
    least = Config(block_q, block_kv, body, block_q, interpret)
    room = vmem_bytes - SPILL_BYTES - least.vmem_bytes(head_dim, itemsize)
    if room < 0:
        return None
    more = min(room // (4 * head_dim * block_q), ceil_div(queries, block_q) - 1)
    return replace(least, held=block_q * (1 + more))


def gradient(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S N D"],
    v: Float[Array, "B S N D"],
    g: Float[Array, "B L N D"],
    lse: Float32[Array, "B L N"],
    delta: Float32[Array, "B L N"],
    live: Int32[Array, " B"],
    *,
    scale: float,
    keys: int,
    config: Config,
) -> tuple[Float[Array, "B L N D"], Float[Array, "B S N D"], Float[Array, "B S N D"]]:
    """Return the gradients of q, k and v, as `gradient.from_result` asks for them.

    Of the first `keys` keys the first `live` of each example take part.
    """
    run = partial(_call, scale=scale, keys=keys, config=config)
    if config.held >= q.shape[1]:
        return run(q, k, v, g, lse, delta, live, sums=k.dtype)
    gradients = []
    for start in range(0, q.shape[1], config.held):
        some_q, some_g, some_lse, some_delta = (x[:, start : start + config.held] for x in (q, g, lse, delta))
        gradients.append(run(some_q, k, v, some_g, some_lse, some_delta, live, sums=jnp.float32))
    of_q, of_k, of_v = zip(*gradients, strict=True)
    return jnp.concatenate(of_q, axis=1), reduce(jnp.add, of_k).astype(k.dtype), reduce(jnp.add, of_v).astype(v.dtype)


@partial(jax.jit, static_argnames=("scale", "keys", "config", "sums"), inline=True)  # is traced once
def _call(q, k, v, g, lse, delta, live, *, scale: float, keys: int, config: Config, sums: Any) -> tuple:
    """The kernel over a grid of heads, blocks of keys and blocks of queries; `sums` is the dtype of dk and dv."""
    batch, queries, heads, head_dim = q.shape
    grid = (batch * heads, ceil_div(keys, config.block_kv), ceil_div(queries, config.block_q))
    lse, delta = (jnp.moveaxis(x, 1, 2).reshape(-1, 1, queries) for x in (math.log2(math.e) * finite_max(lse), delta))
    operands = [to_rows(x) for x in (q, g, k, v)]
    rows, _, width = operands[0].shape
    in_specs, out_specs = _specs(grid, width // head_dim, head_dim, config)
    gradients = pl.pallas_call(
        partial(kernel, sizes=Sizes(queries, heads, config.block_q, config.block_kv, config.body, scale)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=_scratch(grid[2], head_dim, q.dtype, config),
        ),
        out_shape=[
            jax.ShapeDtypeStruct((rows, n, width), dtype)
            for n, dtype in ((queries, q.dtype), (keys, sums), (keys, sums))
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=config.vmem_bytes(head_dim, q.dtype.itemsize) + SPILL_BYTES,
        ),
        cost_estimate=pl.CostEstimate(
            flops=10 * q.size * keys,
            transcendentals=q.size // head_dim * keys,
            bytes_accessed=q.dtype.itemsize * (3 * q.size + 4 * k.size),
        ),
        interpret=config.interpret,
        name="flash_gradient",
    )(live, *operands[:2], lse, delta, *operands[2:])
    dq, dk, dv = (from_rows(x, heads, head_dim) for x in gradients)
    return dq, pad_to(dk, 1, k.shape[1]), pad_to(dv, 1, k.shape[1])


def _specs(grid: tuple[int, int, int], beside: int, head_dim: int, config: Config) -> tuple[list, list]:
    """The blocks of operands and results, of which `beside` heads lie side by side in a row."""

    def block(rows: int, place: Callable[[Any, Any], Any]) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, head_dim), lambda h, j, i, *_: (h // beside, place(j, i), h % beside))

    queries, keys = block(config.block_q, lambda j, i: i), block(config.block_kv, lambda j, i: j)
    row = pl.BlockSpec((None, 1, config.block_q), lambda h, j, i, *_: (h, 0, i))
    once = block(config.block_q, lambda j, i: jnp.where(j == grid[1] - 1, i, 0))  # else each pass would write it
    return [queries, queries, row, row, keys, keys], [once, keys, keys]


def _scratch(blocks: int, head_dim: int, dtype: jnp.dtype, config: Config) -> list[Any]:
    """The memory of the kernel's `State`, in the order of its fields."""
    operands = (config.block_q, config.block_q, config.block_kv)
    totals = (blocks * config.block_q, config.block_kv, config.block_kv)
    transposed = [pltpu.VMEM((head_dim, n), dtype) for n in operands]
    return transposed + [pltpu.VMEM((head_dim, n), jnp.float32) for n in totals]
