# SPDX-License-Identifier: Apache-2.0
"""Copy weights from a checkpoint to stored arrays. Memory holds one tensor or stack and a few chunks at a time."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import groupby
from math import prod

import jax.numpy as jnp
import numpy as np

from wanjax.checkpoints.arrays import ChunkSlice, OrbaxCheckpoint, StoredArray, Writer
from wanjax.checkpoints.files import Spec, TensorReader, check_finite
from wanjax.checkpoints.quantize import QuantizedKernel, quantize
from wanjax.checkpoints.to_devices import rearrange
from wanjax.converters.weight_rules import ArraySpec, Assignment


def stored_specs(
    assignments: Sequence[Assignment],
    sources: Mapping[str, Spec],
    targets: Mapping[str, ArraySpec],
    dtype: str | None,
    kernels: Mapping[str, QuantizedKernel],
) -> dict[str, Spec]:
    """Return the shape and dtype of each array to store.

    Args:
        assignments: The tensors of each array.
        sources: Shapes and dtypes of the tensors.
        targets: The parameters of a model that was built with `dtype`. Parameters that have another dtype in the model,
            such as norms, are stored in the dtype of their tensors.
        dtype: The dtype of the stored arrays; None keeps the dtype of the tensors.
        kernels: The kernels that are quantized to 8 bits, by parameter name.
    """

    def spec(assignment: Assignment) -> Spec:
        target = targets[assignment.target]
        source_dtype = reduce(jnp.promote_types, (sources[key].dtype for key in assignment.sources))
        casts = dtype is not None and target.dtype == jnp.dtype(dtype) and jnp.issubdtype(source_dtype, jnp.floating)
        return Spec(tuple(target.shape), np.dtype(target.dtype if casts else source_dtype))

    specs: dict[str, Spec] = {}
    for assignment in assignments:
        if (kernel := kernels.get(assignment.target)) is None:
            specs[assignment.target] = spec(assignment)
        else:
            specs |= kernel.specs
    return specs


def stream(
    assignments: Sequence[Assignment],
    reader: TensorReader,
    arrays: OrbaxCheckpoint,
    kernels: Mapping[str, QuantizedKernel],
    progress: Callable[[int], object],
) -> None:
    """Write the chunks of arrays that are not written yet.

    Args:
        assignments: The tensors of each parameter.
        reader: The tensors.
        arrays: The arrays to write.
        kernels: The kernels that are quantized to 8 bits, by parameter name.
        progress: Called after each group of chunks with the number of its bytes.

    Raises:
        OSError: The chunks cannot be written.
    """
    with Writer() as writer:
        for assignment in assignments:
            kernel = kernels.get(assignment.target)
            array = arrays[assignment.target if kernel is None else kernel.values_name]
            block_range = (lambda chunk: chunk[0]) if assignment.stacked else (lambda chunk: None)
            for block_slice, chunks in groupby(array.chunk_slices(), key=block_range):
                written = {assignment.target: list(chunks)}
                if kernel is not None:
                    scale = arrays[kernel.scale_name].chunk_slices([] if block_slice is None else [block_slice])
                    written = {kernel.values_name: written[assignment.target], kernel.scale_name: list(scale)}
                _write_chunks(assignment, kernel, block_slice, arrays, written, reader, writer)
                progress(sum(_chunk_bytes(arrays[name], chunk) for name in written for chunk in written[name]))


def _write_chunks(
    assignment: Assignment,
    kernel: QuantizedKernel | None,
    block_slice: slice | None,
    arrays: OrbaxCheckpoint,
    chunks: Mapping[str, Sequence[ChunkSlice]],
    reader: TensorReader,
    writer: Writer,
) -> None:
    """Write the chunks of a range of blocks in a stack. A range of None means all chunks of an array that is not a
    stack.

    `chunks` has the chunks of one array, or the chunks of the numbers and the scale of a quantized kernel.
    """
    missing = {
        name: [chunk for chunk in chunk_list if not arrays[name].is_written(chunk)]
        for name, chunk_list in chunks.items()
    }
    if not any(missing.values()):
        return
    keys = assignment.sources if block_slice is None else assignment.sources[block_slice]
    tensors = [assignment.transform.forward(reader.read(key)) for key in keys]
    parts: dict[str, Sequence[np.ndarray]] = {assignment.target: tensors}
    if kernel is not None:
        quantized = [quantize(tensor, kernel.layer) for tensor in tensors]
        parts = {kernel.values_name: [x.values for x in quantized], kernel.scale_name: [x.scale for x in quantized]}
    for name, blocks in parts.items():
        for chunk in missing[name]:
            values = np.empty([_slice_length(axis_slice) for axis_slice in chunk], arrays[name].dtype)
            block_values, inner_slice = (values[None], chunk) if block_slice is None else (values, chunk[1:])
            for block, out in zip(blocks, block_values, strict=True):
                rearrange(block[inner_slice], out)
            check_finite(values, name, arrays[name].path)
            writer.write(arrays[name], chunk, values)


def _chunk_bytes(array: StoredArray, chunk: ChunkSlice) -> int:
    return prod(map(_slice_length, chunk)) * array.dtype.itemsize


def _slice_length(part: slice) -> int:
    return part.stop - part.start
