# SPDX-License-Identifier: Apache-2.0
"""The names of a video's noise arrays, and checks of the arrays that a caller provides.

Programs draw the noise that a caller does not provide from the seed.

`noise` is the initial noise, and `step_noise` is the noise that the steps of a stochastic solver add. Names for another
modality of latents start with the name of the modality, and names for a second pass end with `_2`. A family may define
further names.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from wanjax.errors import WanjaxError, repr_short
from wanjax.pipelines.frames import LatentsInput
from wanjax.pipelines.validation import check_noise

INITIAL, STEP_NOISE = "noise", "step_noise"
VIDEO = "video"  # the name of the modality that is the video
NoiseInput = LatentsInput | Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


def noise_name(modality: str, kind: str, pass_index: int = 0) -> str:
    """Name the noise of a modality. `kind` is `INITIAL` or `STEP_NOISE`, and `pass_index` is the index of the pass."""
    return (kind if modality == VIDEO else f"{modality}_{kind}") + (f"_{pass_index + 1}" if pass_index else "")


def checked_noise_inputs(noise: NoiseInput | None, expected: Shapes) -> dict[str, Float[np.ndarray, "..."]]:
    """Check the noise that a caller provides, and return it by name, on the host. A single array is the initial noise.

    Raises WanjaxError for a name that the video does not use, for an array without floats, for an array of another
    shape, and for values that are not finite.
    """
    if noise is None:
        return {}
    arrays = noise if isinstance(noise, Mapping) else {INITIAL: noise}
    host_arrays: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if name not in expected:
            raise WanjaxError(f"this video uses no noise named {repr_short(name)}: give {' or '.join(expected)}")
        check_noise(array, expected[name], name)
        host_arrays[name] = np.asarray(array)
        if not np.isfinite(host_arrays[name]).all():
            raise WanjaxError(f"{name!r} has values that are not finite: generate it again, or leave it out")
    return host_arrays


def noise_of_window(noise: NoiseInput | None, number: int) -> NoiseInput | None:
    """Select the arrays of one window from arrays whose first axis has an entry for each window."""
    if noise is None:
        return None
    arrays = noise if isinstance(noise, Mapping) else {INITIAL: noise}
    return {name: np.asarray(array)[number : number + 1] for name, array in arrays.items()}
