# SPDX-License-Identifier: Apache-2.0
"""Streams weights from a checkpoint to stored arrays, with one tensor and a few chunks in memory."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import groupby

import jax.numpy as jnp
import numpy as np

from wanjax.checkpoints.arrays import Arrays, Piece, StoredArray, Writer
from wanjax.checkpoints.files import Reader, Spec, check_finite
from wanjax.checkpoints.to_devices import rearrange
from wanjax.converters.weight_rules import Assignment, Described


def stored(
    assignments: Sequence[Assignment],
    sources: Mapping[str, Spec],
    targets: Mapping[str, Described],
    dtype: str | None,
) -> dict[str, Spec]:
    """Return the `Spec` of each array to store: in its tensors' dtype, or in `dtype`.

    targets: the parameters of a model that was made with `dtype`. Those that it keeps in another dtype all the same,
    such as norms, are stored in their tensors' dtype.
    """

    def spec(assignment: Assignment) -> Spec:
        target = targets[assignment.target]
        source_dtype = reduce(jnp.promote_types, (sources[key].dtype for key in assignment.sources))
        casts = dtype is not None and target.dtype == jnp.dtype(dtype) and jnp.issubdtype(source_dtype, jnp.floating)
        return Spec(tuple(target.shape), np.dtype(target.dtype if casts else source_dtype))

    return {assignment.target: spec(assignment) for assignment in assignments}


def stream(
    assignments: Sequence[Assignment], reader: Reader, arrays: Arrays, progress: Callable[[int], object]
) -> None:
    """Write the chunks of the arrays that are not yet written; `progress` receives the bytes of each group of chunks.

    Raises OSError if they cannot be written.
    """
    with Writer() as writer:
        for assignment in assignments:
            array = arrays[assignment.target]
            blocks = (lambda piece: piece[0]) if assignment.stacked else (lambda piece: None)
            for rows, pieces in groupby(array.pieces(), key=blocks):
                _write_chunks(assignment, array, rows, list(pieces), reader, writer)
                progress(array.spec.nbytes if rows is None else array.spec.nbytes // len(array) * _length(rows))


def _write_chunks(
    assignment: Assignment,
    array: StoredArray,
    rows: slice | None,
    pieces: Sequence[Piece],
    reader: Reader,
    writer: Writer,
) -> None:
    """Write the chunks of the same blocks (`rows`) of a stack, or all chunks of an array that is not a stack."""
    missing = [piece for piece in pieces if not array.has(piece)]
    if not missing:
        return
    keys = assignment.sources if rows is None else assignment.sources[rows]
    tensors = [assignment.transform.forward(reader.read(key)) for key in keys]
    for piece in missing:
        values = np.empty([_length(part) for part in piece], array.dtype)
        parts, inner = (values[None], piece) if rows is None else (values, piece[1:])
        for tensor, part in zip(tensors, parts, strict=True):
            rearrange(tensor[inner], part)
        check_finite(values, assignment.target, array.path)
        writer.write(array, piece, values)


def _length(part: slice) -> int:
    return part.stop - part.start
