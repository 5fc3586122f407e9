# SPDX-License-Identifier: Apache-2.0
"""The settings of a video; the defaults are those that a model's authors recommend."""

import dataclasses
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar, get_type_hints

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from wanjax.errors import WanjaxError, shown
from wanjax.media.pictures import RESIZES
from wanjax.pipelines.cache_rules import AUTO, NONE, Guidance, cache_rule, cache_rule_name

DTYPES = ("bfloat16", "float32")
SomeSettings = TypeVar("SomeSettings", bound="Settings")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that every model has; a family's own class adds its own.

    `size` is (height, width) in pixels; `dtype` is the dtype in which the networks compute; `resize`, one of `RESIZES`,
    is the way in which pictures are brought to the size; `strength` is the share of the steps that a given video takes;
    `cache` names a step cache, as `cache_rule` reads it.
    """

    model: str
    prompt: str
    negative_prompt: str
    height: int
    width: int
    frames: int
    fps: int
    steps: int
    guidance_scale: float
    seed: int
    dtype: str
    resize: str
    strength: float
    cache: str = NONE.name

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def guidance_scales(self) -> tuple[float, ...]:
        """The guidance scales that occur in a video's steps."""
        return (self.guidance_scale,)

    @property
    def guided(self) -> bool:
        """True where some step also runs the negative prompt."""
        return max(self.guidance_scales) > 1

    @property
    def split(self) -> bool:
        """True where it helps that a mesh splits the two prompts of a step; a guidance cache needs them apart."""
        return self.guided and cache_rule_name(self.cache) != Guidance.name

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def updated(self: SomeSettings, values: Mapping[str, Any]) -> SomeSettings:
        """Returns these settings with the given values; ignores unknown names and values that are None."""
        names = {field.name for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **{k: v for k, v in values.items() if k in names and v is not None})

    def typed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns values as their settings' types, so that a NumPy number becomes Python's; None stays None.

        Raises WanjaxError for a value of another type.
        """
        kinds = get_type_hints(type(self))
        return {k: v if v is None else _typed(k, v, kinds[k], getattr(self, k)) for k, v in values.items()}

    def check(self, *, spatial: int, temporal: int) -> None:
        """Raises WanjaxError unless sizes are multiples of `spatial`, frames `temporal`·n + 1, and the rest valid."""
        for name, text in (("prompt", self.prompt), ("negative prompt", self.negative_prompt)):
            if not is_text(text):
                raise WanjaxError(f"the {name} {text!r} is no text: one text, in UTF-8 on a command line, is right")
        for name, pixels in (("height", self.height), ("width", self.width)):
            if pixels <= 0 or pixels % spatial:
                legal = _neighbours(pixels, spatial, 0)
                raise WanjaxError(f"the {name} {pixels} is not a multiple of {spatial}: {legal} would do")
        if self.frames <= 0 or (self.frames - 1) % temporal:
            legal = _neighbours(self.frames, temporal, 1)
            raise WanjaxError(f"{self.frames} frames are not of the form {temporal}n + 1: {legal} would do")
        if self.steps < 1:
            raise WanjaxError(f"{self.steps} steps cannot make a video: at least 1 is needed")
        for scale in self.guidance_scales:
            if not 0 <= scale < math.inf:
                raise WanjaxError(f"the guidance scale {scale} is not a finite number from 0 on: 1 is none, 5 usual")
        if not 0 < self.strength <= 1:
            raise WanjaxError(f"the strength {self.strength} is not above 0 and at most 1: 0.8 is usual")
        if self.fps < 1:
            raise WanjaxError(f"{self.fps} frames a second cannot be played: at least 1 is needed")
        if self.resize not in RESIZES:
            raise WanjaxError(f"pictures cannot be resized by {self.resize!r}: {', '.join(RESIZES)} would do")
        if self.cache != AUTO:
            cache_rule(self.cache)

    @property
    def strong_steps(self) -> int:
        """The number of steps that a given video takes; raises WanjaxError where it is 0."""
        if not (steps := int(self.steps * self.strength)):
            least = math.ceil(1000 / self.steps) / 1000
            raise WanjaxError(f"a strength of {self.strength} takes none of {self.steps} steps: {least} takes one")
        return steps


def _typed(name: str, value: Any, kind: Any, usual: Any) -> str | bool | int | float:
    """Returns a setting's value as a `str`, `bool`, `int`, or else a `float`; `usual` is a value to name as right."""
    if kind is str:
        if isinstance(value, str):
            return value
        right = "one text is"
    elif kind is bool:
        if isinstance(value, bool | np.bool_):
            return bool(value)
        right = "True or False is"
    elif kind is int:
        if (number := whole(value)) is not None:
            return number
        right = f"a whole number such as {usual} is"
    else:
        if isinstance(value, Real) and not isinstance(value, bool):
            return float(value)
        right = f"a number such as {1.0 if usual is None else usual} is"
    raise WanjaxError(f"{name} is given as {shown(value)} where {right} right")


def height_and_width(size: Any) -> tuple[int, int]:
    """Returns a size as (height, width); raises WanjaxError unless it is two whole numbers."""
    if isinstance(size, tuple | list) and len(size) == 2:
        height, width = (whole(n) for n in size)
        if height is not None and width is not None:
            return height, width
    raise WanjaxError(f"size is given as {shown(size)} where (height, width) such as (480, 832) is right")


def whole(value: Any) -> int | None:
    """Returns a whole number of Python or NumPy as an int, and None for any other value."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def dtype_name(dtype: DTypeLike | None, role: str = "dtype") -> str | None:
    """Returns the name of a dtype, given by its name or as JAX's or NumPy's; None for None.

    Raises WanjaxError, which calls it by its role, for any other dtype than those of `DTYPES`.
    """
    if dtype is None:
        return None
    try:
        name = jnp.dtype(dtype).name
    except (TypeError, ValueError):
        name = str(dtype)
    if name not in DTYPES:
        raise WanjaxError(f"the {role} {name} is not offered: {' and '.join(DTYPES)} are")
    return name


def is_text(text: Any) -> bool:
    """Tells whether this is a text that can be written; bytes of a command line that are not UTF-8 cannot."""
    try:
        return isinstance(text, str) and text.encode() is not None
    except UnicodeEncodeError:
        return False


def _neighbours(value: int, unit: int, offset: int) -> str:
    """Returns the nearest legal values of an illegal one, as text."""
    below = (value - offset) // unit * unit + offset
    return f"{below} or {below + unit}" if below > 0 else f"{unit if offset == 0 else offset}"
