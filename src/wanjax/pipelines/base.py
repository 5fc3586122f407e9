# SPDX-License-Identifier: Apache-2.0
"""What every pipeline speaks of: the settings of a video, embeddings, a step on the way, parts that load late."""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from wanjax.errors import WanjaxError
from wanjax.pictures import RESIZES

IN_FLIGHT = 2  # steps that may wait for the device: more would hold memory, and it is never idle with two


@dataclass(frozen=True)
class Settings:
    """All that shapes a video.

    `size` is (height, width) in pixels; `dtype` is what the networks compute in; `resize`, one of `RESIZES`, is how
    pictures are brought to the size; `strength` is the share of the steps that a given video is changed by. Models of
    two experts have a `boundary` between them, a noise level in [0, 1]: steps that begin below it are the second
    expert's, under `guidance_scale_2`. Both are None for other models.
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
    guidance_scale_2: float | None
    boundary: float | None
    flow_shift: float
    sigmas: str
    seed: int
    dtype: str
    resize: str
    strength: float

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def updated(self, values: Mapping[str, Any]) -> "Settings":
        """These settings with those of `values` that are known by name and are not None."""
        names = {field.name for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **{k: v for k, v in values.items() if k in names and v is not None})

    def check(self, *, spatial: int, temporal: int) -> None:
        """Raises WanjaxError unless sizes are multiples of `spatial`, frames `temporal`·n + 1, the rest in bounds."""
        for name, pixels in (("height", self.height), ("width", self.width)):
            if pixels <= 0 or pixels % spatial:
                legal = _neighbours(pixels, spatial, 0)
                raise WanjaxError(f"the {name} {pixels} is not a multiple of {spatial}: {legal} would do")
        if self.frames <= 0 or (self.frames - 1) % temporal:
            legal = _neighbours(self.frames, temporal, 1)
            raise WanjaxError(f"{self.frames} frames are not of the form {temporal}n + 1: {legal} would do")
        if self.steps < 1:
            raise WanjaxError(f"{self.steps} steps cannot make a video: at least 1 is needed")
        for scale in (self.guidance_scale, self.guidance_scale_2 or 0.0):
            if not 0 <= scale < math.inf:
                raise WanjaxError(f"the guidance scale {scale} is not a finite number from 0 on: 1 is none, 5 usual")
        if not 0 <= (self.boundary or 0.0) <= 1:
            raise WanjaxError(f"the boundary {self.boundary} is not a noise level from 0 to 1: 0.875 is usual")
        if not 0 < self.strength <= 1:
            raise WanjaxError(f"the strength {self.strength} is not above 0 and at most 1: 0.8 is usual")
        if not 0 < self.flow_shift < math.inf:
            raise WanjaxError(f"the flow shift {self.flow_shift} is not a finite number above 0: 3 to 12 is usual")
        if self.fps < 1:
            raise WanjaxError(f"{self.fps} frames a second cannot be played: at least 1 is needed")
        if self.resize not in RESIZES:
            raise WanjaxError(f"pictures cannot be resized by {self.resize!r}: {', '.join(RESIZES)} would do")


def _neighbours(value: int, unit: int, offset: int) -> str:
    """The legal values next to an illegal one, as words."""
    below = (value - offset) // unit * unit + offset
    return f"{below} or {below + unit}" if below > 0 else f"{unit if offset == 0 else offset}"


class Embeddings(NamedTuple):
    """What was made of a prompt and of the negative prompt, zeros behind their last tokens, and of pictures.

    `condition` stands beside the latents and is in their layout; `image_embeds` are features of images;
    `video_latents` are what the steps begin from, under noise.
    """

    prompt_embeds: Float[Array, "B S E"]
    negative_prompt_embeds: Float[Array, "B S E"]
    condition: Float[Array, "B C T H W"] | None = None
    image_embeds: Float[Array, "B _S _E"] | None = None
    video_latents: Float[Array, "B C T H W"] | None = None


class Step(NamedTuple):
    """A denoising step that was taken, `index` of `total` from 0; latents and predicted clean ones [B C T H W]."""

    index: int
    total: int
    timestep: float
    latents: jax.Array
    x0: jax.Array


class InFlight:
    """The steps, a few at most, that the device has not been seen to finish; notices those that went wrong."""

    def __init__(self, total: int):
        self.total = total
        self._finite: deque[tuple[int, jax.Array]] = deque()

    def add(self, index: int, finite: jax.Array) -> None:
        """One more step; `finite` will say whether its latents are. Waits for the oldest if there are too many."""
        self._finite.append((index, finite))
        self.wait(IN_FLIGHT)

    def wait(self, left: int = 0) -> None:
        """Waits until `left` steps are left; raises WanjaxError that names the first whose latents are not finite."""
        while len(self._finite) > left:
            index, finite = self._finite.popleft()
            if not finite:
                raise WanjaxError(f"the latents are not finite after step {index + 1} of {self.total}: use float32")


class Cancelled(Exception):
    """A callback returned False; `step` was the last one taken."""

    def __init__(self, step: int):
        super().__init__(f"cancelled after step {step + 1}")
        self.step = step


class Parts:
    """The networks of a pipeline: each is loaded when it is first asked for and stays until it is freed."""

    def __init__(self, loaders: Mapping[str, Callable[[], Any]]):
        self._loaders = dict(loaders)
        self._loaded: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._loaders[name]()
        return self._loaded[name]

    def has(self, name: str) -> bool:
        """Whether the part is loaded."""
        return name in self._loaded

    def put(self, name: str, part: Any) -> None:
        """Gives a part that need not be loaded."""
        self._loaded[name] = part

    def free(self, *names: str) -> None:
        """Forgets parts (all if none is named), so that their memory is given back."""
        for name in names or tuple(self._loaded):
            self._loaded.pop(name, None)
