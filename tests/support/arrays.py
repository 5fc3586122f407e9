# SPDX-License-Identifier: Apache-2.0
"""Write a module's weights in the format of converted checkpoints, without a conversion."""

from pathlib import Path

import numpy as np

from wanjax.checkpoints.arrays import OrbaxCheckpoint, Writer, chunk_shape
from wanjax.checkpoints.files import Spec
from wanjax.checkpoints.modules import parameters


def save(module, folder: Path) -> None:
    """Write the module's weights to a new folder."""
    weights = {name: np.asarray(x) for name, x in parameters(module).items()}
    specs = {name: Spec(x.shape, x.dtype) for name, x in weights.items()}
    arrays = OrbaxCheckpoint.create(folder, specs, {name: chunk_shape(spec, False) for name, spec in specs.items()})
    for name, x in weights.items():
        with Writer() as writer:
            writer.write(arrays[name], tuple(slice(0, size) for size in x.shape), x)
