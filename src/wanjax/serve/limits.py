# SPDX-License-Identifier: Apache-2.0
"""The bounds of what a request may ask for."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from wanjax.errors import SettingError, repr_short
from wanjax.figures import quantity
from wanjax.media.bounds import BOUNDS
from wanjax.pipelines.settings import Setting, Settings

CLIP = 8  # times the pixels of all pictures of a request that a clip may have in all its frames
TIMES = 4  # a video may have this many times the pixels of the model's default one


@dataclass(frozen=True)
class Limits:
    """The most that a request may ask for, and the most requests that wait.

    `pixels` counts those of all frames of a video; `upload` is the bytes of a request; `picture` the pixels of all
    pictures of one; `prompt` the characters of a prompt; `streams` the readers of events at a time.
    """

    pixels: int
    steps: int = 200
    fps: int = 240
    prompt: int = 4000
    upload: int = 32 * 2**20
    picture: int = 24 * 10**6
    references: int = 4
    queue: int = 32
    streams: int = 64

    @classmethod
    def of(cls, defaults: Settings, pixels: int | None = None, **others: int) -> "Limits":
        """Return the limits for a model; `pixels` None is a multiple of its default video's."""
        return cls(pixels=pixels or TIMES * pixels_of(defaults), **others)

    def check(self, settings: Settings) -> None:
        """Raise SettingError where a video is larger than allowed."""
        if (pixels := pixels_of(settings)) > self.pixels:
            shape = f"{settings.width}x{settings.height} and {quantity(settings.length, 'frame')}"
            problem = f"{shape} are {quantity(pixels, 'pixel')} where this server makes {self.pixels:,} at most"
            raise SettingError(problem, "size")
        for name in ("steps", "fps"):
            if (value := getattr(settings, name)) > (most := getattr(self, name)):
                raise SettingError(f"{name} is {repr_short(value)} where this server takes {most} at most", name)

    def bound_settings(self, settings: Mapping[str, Setting]) -> dict[str, Setting]:
        """Return settings by name, with this server's own bounds of their values."""
        bounded = dict(settings)
        for name, most in {"steps": self.steps, "fps": self.fps}.items():
            setting = bounded[name]
            usual = None if setting.usual is not None and setting.usual > most else setting.usual
            bounded[name] = setting._replace(most=min(setting.most, most), usual=usual)
        return bounded

    def bound_card(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a server tells of a model, with its own bounds in the settings."""
        settings = {name: dict(words) for name, words in model["settings"].items()}
        for name in ("steps", "fps"):
            if words := settings.get(name):
                words["maximum"] = min(words.get("maximum", math.inf), getattr(self, name))
        return {**model, "settings": settings}

    def bound_pictures(self) -> None:
        """Bounds the pictures and clips that are read in this process."""
        BOUNDS.pixels, BOUNDS.clip_factor = self.picture, CLIP

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def pixels_of(settings: Settings) -> int:
    """Return the pixels of all frames of a video."""
    return settings.height * settings.width * settings.length
