# SPDX-License-Identifier: Apache-2.0
"""Open a file of initial noise without JAX. A command can then refuse a wrong file at once."""

from pathlib import Path

import ml_dtypes
import numpy as np

from wanjax.checkpoints.files import SafetensorsFile
from wanjax.errors import WanjaxError, comma_list

NOISE_TENSOR = "noise"  # the tensor with the initial noise
EXAMPLE = "safetensors.numpy.save_file(dict(noise=x), 'noise.safetensors')"
FLOATS = (np.floating, ml_dtypes.bfloat16)


class NoiseFile(SafetensorsFile):
    """A safetensors file with the initial noise of a video."""

    valid_file_text = f"a safetensors file whose tensor 'noise' contains floats, as `{EXAMPLE}` writes"


def open_noise(path: str | Path) -> NoiseFile:
    """Open a file of initial noise.

    Raises WanjaxError if the file is not a safetensors file, or if its tensor `noise` is missing or has no floats.
    """
    file = NoiseFile(path)
    if NOISE_TENSOR not in file.specs:
        tensors = f"only {comma_list(list(file.specs))}" if file.specs else "and no other"
        raise WanjaxError(f"{path} contains no tensor '{NOISE_TENSOR}', {tensors}: give {file.valid_file_text}")
    shape, dtype = file.specs[NOISE_TENSOR]
    if not any(np.issubdtype(dtype, kind) for kind in FLOATS):
        raise WanjaxError(f"'{NOISE_TENSOR}' in {path} is {dtype} {list(shape)}: give floats")
    return file
