# SPDX-License-Identifier: Apache-2.0
"""Check the types of the numbers in a training's settings, which people write in Python."""

from numbers import Integral, Real
from typing import Any, get_args, get_type_hints

from wanjax.errors import WanjaxError, repr_short


def check_numbers(settings: Any) -> None:
    """Raise WanjaxError unless each field of a dataclass that is annotated as a number is a number, or an allowed
    None."""
    for name, kind in get_type_hints(type(settings)).items():
        value, kinds = getattr(settings, name), get_args(kind) or (kind,)
        if not {int, float} & {*kinds} or (value is None and type(None) in kinds):
            continue
        expected, words = (Real, "a number") if float in kinds else (Integral, "a whole number")
        if isinstance(value, bool) or not isinstance(value, expected):
            raise WanjaxError(f"{name} must be {words}, got {repr_short(value)}")
