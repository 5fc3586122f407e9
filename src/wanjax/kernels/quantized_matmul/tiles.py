# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the kernels of quantized products. By the compiler's estimates in docs/quantized_matmul.md, the default
sizes are the fastest."""

from dataclasses import dataclass
from functools import cache, partial

from wanjax.errors import WanjaxError
from wanjax.kernels.alignment import LANES, ceil_div, round_up

CHUNK = 256  # channels that are rotated by one product: the size of a tile of the matrix unit
ROW_TILE = 32  # rows of 8-bit numbers in a tile of memory
COMPILER_VMEM_BYTES = 20 << 20  # VMEM that is left to the compiler, which spills the sums of a strip
MAX_ROWS, MIN_COLUMNS, MAX_COLUMNS = 2304, 512, 1536  # maximum rows of a grid step; more rows are not faster
# Maximum rows of one product. The smaller number is for products with GELU or many input channels, whose sums would
# otherwise be spilled from registers
MAX_STRIP, MAX_SPILLED_STRIP = 704, 352
MAX_INPUT_STRIP, MIN_INPUT_STRIP = 192, 96  # rows that are rotated and quantized together
MAX_QUANTIZED_COLUMNS = 4608  # maximum columns of a column tile whose rows have one scale; more columns are not faster
# In the kernel that only quantizes: rows of a grid step, and rows that are quantized together
QUANTIZED_TILE_ROWS, QUANTIZED_STRIP_ROWS = 256, 128
NORMED_STRIP = 192  # maximum rows of the result that are normed together
# With more input channels, a product does not quantize its rows, because row tiles would be too small
MAX_DEPTH = 8192
# The overheads of a strip and of a row tile, in rows, and the overhead of a column tile
STRIP_OVERHEAD, STEP_OVERHEAD, COLUMN_OVERHEAD = 16, 16, 128
# The overhead of each additional scale of a row, in columns. The next product computes the parts of a row one by one
SCALE_OVERHEAD = 96
ROWS_PER_FETCH = 700  # the number of rows whose products take as long as fetching the weights


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of a product.

    Attributes:
        rows: Rows of a grid step, a multiple of `strip` and of `input_strip`.
        columns: Output channels of a grid step.
        strip: Rows of the result that are computed together.
        input_strip: Rows of the input that are normed, rotated and quantized together.
    """

    rows: int
    columns: int
    strip: int
    input_strip: int

    def __post_init__(self):
        for name, size in (("strip", self.strip), ("input_strip", self.input_strip)):
            if size < 1 or size % ROW_TILE or self.rows % size:
                raise WanjaxError(f"{name}={size}: give a multiple of {ROW_TILE} that divides rows={self.rows}")
        if self.columns < 1 or self.columns % LANES:
            raise WanjaxError(f"columns={self.columns}: give a multiple of {LANES}")


@dataclass(frozen=True)
class Product:
    """The sizes of a product, and the operations before and after it. The tiles depend on these attributes.

    Attributes:
        rows: The number of rows.
        depth: The number of input channels.
        columns: The number of output channels.
        itemsize: Bytes of a number of x and of the result, if they are floats.
        quantizes: Whether x is quantized in the kernel.
        has_residual: Whether the result is added to a residual.
        gelu: Whether GELU is applied.
        quantizes_result: Whether the result is quantized for the next product.
        keeps_rows: Whether whole rows of the result stay in VMEM, to be normed or split into groups of heads.
    """

    rows: int
    depth: int
    columns: int
    itemsize: int
    quantizes: bool = False
    has_residual: bool = False
    gelu: bool = False
    quantizes_result: bool = False
    keeps_rows: bool = False

    def vmem_bytes(self, tiles: Tiles) -> int:
        """Return the bytes of VMEM that the kernel needs: two buffers of each block, and scratch memory."""
        scales = 3 * 4 * LANES  # three numbers for each row; a number occupies all lanes
        row_bytes = self.depth * (2 * self.itemsize + 1 if self.quantizes else 2) + scales
        result_bytes = 2 if self.quantizes_result else (2 + 2 * self.has_residual) * self.itemsize
        result_columns = self.columns if self.keeps_rows else tiles.columns
        row_bytes += 2 * 2 * 4 * LANES if self.keeps_rows else 0  # cosines and sines
        scratch = 4 * (
            tiles.input_strip * self.depth * self.quantizes + tiles.strip * tiles.columns * self.quantizes_result
        )
        return tiles.rows * (row_bytes + result_bytes * result_columns) + 2 * self.depth * tiles.columns + scratch


@cache
def default_tiles(product: Product, vmem_bytes: int) -> Tiles | None:
    """Return the cheapest tiles of a product that fit in VMEM. Return None if even small tiles do not fit."""
    tiles = [
        Tiles(rows, columns, strip, _input_strip(rows))
        for columns in _column_sizes(product)
        for rows, strip in _row_sizes(product)
    ]
    limit = vmem_bytes - COMPILER_VMEM_BYTES
    return min((x for x in tiles if product.vmem_bytes(x) <= limit), key=partial(_cost, product), default=None)


def row_quantizer_vmem_bytes(depth: int, itemsize: int) -> int:
    """Return the bytes of VMEM that the kernel `quantize` needs. A row has `depth` numbers of `itemsize` bytes."""
    return depth * (2 * QUANTIZED_TILE_ROWS * (itemsize + 1) + 4 * QUANTIZED_STRIP_ROWS)


def column_chunk_size(columns: int) -> int:
    """Return the number of columns that are computed together, if the result is quantized. This number is a multiple of
    CHUNK and divides the column tile."""
    return max(size for size in range(CHUNK, MAX_COLUMNS + 1, CHUNK) if columns % size == 0)


def _cost(product: Product, tiles: Tiles) -> float:
    """Return the cost of a product with these tiles. Costs are comparable for products with equally many input
    channels. The formula is fitted to the compiler's estimates for v6e."""
    row_steps, column_steps = ceil_div(product.rows, tiles.rows), ceil_div(product.columns, tiles.columns)
    overhead = COLUMN_OVERHEAD / tiles.columns
    if product.quantizes_result:
        overhead = COLUMN_OVERHEAD / column_chunk_size(tiles.columns) + SCALE_OVERHEAD / tiles.columns
    rows = row_steps * (tiles.rows * (1 + STRIP_OVERHEAD / tiles.strip) + STEP_OVERHEAD)
    columns = column_steps * tiles.columns * (1 + overhead)
    return max(rows, ROWS_PER_FETCH * row_steps) * columns


def _column_sizes(product: Product) -> set[int]:
    """Return the possible sizes of column tiles. If the result is quantized, a column tile consists of whole chunks. If
    rows of the result are normed, a row consists of whole column tiles."""
    columns = product.columns
    if product.quantizes_result:
        sizes = {size for size in range(CHUNK, MAX_QUANTIZED_COLUMNS + 1, CHUNK) if columns % size == 0}
        return {size for size in sizes if column_chunk_size(size) >= min(MIN_COLUMNS, columns)} or sizes
    if product.keeps_rows:
        sizes = {size for size in range(LANES, MAX_COLUMNS + 1, LANES) if columns % size == 0}
        return {size for size in sizes if size >= min(MIN_COLUMNS, columns)} or sizes
    counts = range(ceil_div(columns, MAX_COLUMNS), ceil_div(columns, MIN_COLUMNS) + 1)
    return {round_up(ceil_div(columns, count), LANES) for count in counts}


def _row_sizes(product: Product) -> set[tuple[int, int]]:
    """Return the possible sizes of row tiles, with the sizes of their strips."""
    spills_sums = product.gelu or product.quantizes_result or product.depth > MAX_DEPTH
    max_strip, min_count = MAX_SPILLED_STRIP if spills_sums else MAX_STRIP, ceil_div(product.rows, MAX_ROWS)
    sizes = set()
    for count in range(min_count, min(16 * min_count, ceil_div(product.rows, ROW_TILE)) + 1):
        rows = ceil_div(product.rows, count)
        strips = ceil_div(rows, max_strip)
        strip = round_up(ceil_div(rows, strips), ROW_TILE)
        sizes.add((strips * strip, strip))
    return sizes


def _input_strip(rows: int) -> int:
    """Return the largest strip of at most MAX_INPUT_STRIP rows that divides a row tile."""
    return max(size for size in range(ROW_TILE, MAX_INPUT_STRIP + 1, ROW_TILE) if rows % size == 0)
