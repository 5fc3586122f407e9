# SPDX-License-Identifier: Apache-2.0
"""Weights on their way from a checkpoint to stored arrays, of which one tensor and a few chunks are in memory."""

from collections.abc import Callable, Mapping
from functools import reduce
from itertools import groupby

import jax.numpy as jnp
import numpy as np

from wanjax.checkpoint import Reader, Spec
from wanjax.converters.engine import Described, Fill, Plan, rearrange
from wanjax.store import Arrays, StoredArray, Writer


def stored(plan: Plan, sources: Mapping[str, Spec], targets: Mapping[str, Described], dtype: str | None) -> dict:
    """The `Spec` of each array that the plan fills: in the dtype of its tensors, or in `dtype` where it is given.

    What the model keeps in another dtype than the one it was made with (`targets`), such as norms, is left as it is.
    """

    def spec(fill: Fill) -> Spec:
        target = targets[fill.target]
        own = reduce(jnp.promote_types, (sources[key].dtype for key in fill.sources))
        asked = dtype is not None and target.dtype == jnp.dtype(dtype) and jnp.issubdtype(own, jnp.floating)
        return Spec(tuple(target.shape), np.dtype(target.dtype if asked else own))

    return {fill.target: spec(fill) for fill in plan}


def stream(plan: Plan, reader: Reader, arrays: Arrays, progress: Callable[[int], object]) -> None:
    """Writes what is not yet written of the arrays; `progress` is told the bytes of each group of chunks.

    Raises OSError if they cannot be written.
    """
    with Writer() as writer:
        for fill in plan:
            array = arrays[fill.target]
            blocks = (lambda piece: piece[0]) if fill.stacked else (lambda piece: None)
            for rows, pieces in groupby(array.pieces(), key=blocks):
                _fill_chunks(fill, array, rows, list(pieces), reader, writer)
                progress(array.spec.nbytes if rows is None else array.spec.nbytes // len(array) * _length(rows))


def _fill_chunks(
    fill: Fill, array: StoredArray, rows: slice | None, pieces: list, reader: Reader, writer: Writer
) -> None:
    """Writes chunks of the same blocks of a stack, or all those of an array that is none."""
    missing = [piece for piece in pieces if not array.has(piece)]
    if not missing:
        return
    keys = fill.sources if rows is None else fill.sources[rows]
    tensors = [fill.transform.forward(reader.read(key)) for key in keys]
    for piece in missing:
        values = np.empty([_length(part) for part in piece], array.dtype)
        parts, inner = (values[None], piece) if rows is None else (values, piece[1:])
        for tensor, part in zip(tensors, parts, strict=True):
            rearrange(tensor[inner], part)
        writer.write(array, piece, values)


def _length(part: slice) -> int:
    return part.stop - part.start
