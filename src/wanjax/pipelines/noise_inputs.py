# SPDX-License-Identifier: Apache-2.0
"""The random arrays that a video takes, by name: given by the caller, or else drawn from the seed by a program.

`noise` is the initial noise, and `step_noise` the noise that the steps of a stochastic solver add; those of another
stream of latents than the video's begin with its name, and those of a second pass end with `_2`. A family may have
others.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from wanjax.errors import WanjaxError, repr_short
from wanjax.pipelines.frames import GivenLatents
from wanjax.pipelines.validation import check_noise

INITIAL, STEP_NOISE = "noise", "step_noise"
VIDEO = "video"  # the name of the video's latents among those that are denoised together
NoiseInput = GivenLatents | Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


def noise_name(stream: str, kind: str, number: int = 0) -> str:
    """Return the name of a stream's noise, of the kind `INITIAL` or `STEP_NOISE`, in the pass of this number."""
    return (kind if stream == VIDEO else f"{stream}_{kind}") + (f"_{number + 1}" if number else "")


def checked_noise_inputs(draws: NoiseInput | None, expected: Shapes) -> dict[str, Float[np.ndarray, "..."]]:
    """Return the given arrays by name, on the host; an array alone is the initial noise.

    Raises WanjaxError for a name that the video does not use, and unless each is an array of floats of its right shape.
    """
    if draws is None:
        return {}
    arrays = draws if isinstance(draws, Mapping) else {INITIAL: draws}
    for name, array in arrays.items():
        if name not in expected:
            raise WanjaxError(
                f"there is noise named {repr_short(name)} where this video uses {' and '.join(expected)} alone"
            )
        check_noise(array, expected[name], name)
    return {name: np.asarray(array) for name, array in arrays.items()}
