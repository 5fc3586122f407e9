# SPDX-License-Identifier: Apache-2.0
"""Limits of a request."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from wanjax.errors import SettingError, repr_short
from wanjax.figures import pluralize
from wanjax.media.bounds import MEDIA_LIMITS
from wanjax.pipelines.settings import Setting, Settings

CLIP_FACTOR = 8  # all frames of a clip together may have `picture` pixels times this factor
MIN_SIZE_RATIO = 0.4  # a message suggests no size whose sides are smaller than this share of the requested sides
PIXEL_FACTOR = 4  # a video may have this many times the pixels of the model's default video


@dataclass(frozen=True)
class Limits:
    """Limits of a request, and of the server's queue and streams.

    Args:
        pixels: Pixels of a video, in all frames together.
        steps: Denoising steps.
        fps: Frames per second.
        prompt: Characters of a prompt.
        upload: Bytes of a request.
        picture: Pixels of all pictures of a request together.
        references: Reference pictures of a request.
        queue: Videos that may wait.
        streams: Event streams that may be open.
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
        """Return the limits for a model.

        Args:
            defaults: The model's default settings.
            pixels: Limit of a video's pixels; None is a multiple of the pixels of the default video.
            **others: Other limits.
        """
        return cls(pixels=pixels or PIXEL_FACTOR * count_pixels(defaults), **others)

    def check(self, settings: Settings, *, spatial: int = 1, temporal: int = 1) -> None:
        """Check a video against the limits.

        Args:
            settings: The settings of the video.
            spatial: Height and width must be multiples of this number of pixels.
            temporal: The number of frames must be `temporal`·n + 1.

        Raises:
            SettingError: The video is too large, or has too many steps or frames per second.
        """
        if (pixels := count_pixels(settings)) > self.pixels:
            length = f"{pluralize(settings.length, 'frame')} ({settings.length / settings.fps:.4g} s)"
            shape = f"{settings.width}x{settings.height} and {length}"
            message = f"{shape} have {pluralize(pixels, 'pixel')}, and this server allows {self.pixels:,} at most"
            raise SettingError(f"{message}: {self._advise_smaller_video(settings, spatial, temporal)}", "size")
        for name in ("steps", "fps"):
            if (value := getattr(settings, name)) > (limit := getattr(self, name)):
                raise SettingError(f"{name} is {repr_short(value)}: this server allows {limit} at most", name)

    def _advise_smaller_video(self, settings: Settings, spatial: int, temporal: int) -> str:
        """Say how many frames the server allows at this size, and which size it allows for this number of frames. A
        size or a number of frames that the model does not support is not repeated."""
        max_length = self.pixels // (settings.height * settings.width)
        ratio = math.sqrt(self.pixels / count_pixels(settings))
        width, height = (int(side * ratio) // spatial * spatial for side in (settings.width, settings.height))
        has_valid_size = settings.height % spatial == settings.width % spatial == 0
        advice: list[str] = []
        if max_length and settings.windows == 1 and has_valid_size:
            frames = (max_length - 1) // temporal * temporal + 1
            advice.append(f"at most {pluralize(frames, 'frame')} ({frames / settings.fps:.4g} s) of this size")
        if settings.windows > 1 and max_length >= settings.frames and has_valid_size:
            advice.append(f"at most {pluralize(self._most_windows(settings), 'window')}")
        if width and height and ratio >= MIN_SIZE_RATIO:
            valid_frames = (settings.frames - 1) // temporal * temporal + 1
            other_frames = "" if settings.frames == valid_frames else f" and {pluralize(valid_frames, 'frame')}"
            advice.append(f"a size of {width}x{height}{other_frames}")
        return f"use {' or '.join(advice)}" if advice else "use a smaller size and fewer frames"

    def _most_windows(self, settings: Settings) -> int:
        """Return the largest number of windows of a video that the server allows; one window must be allowed."""
        allowed = (
            n for n in range(settings.windows, 1, -1) if count_pixels(settings.updated({"windows": n})) <= self.pixels
        )
        return next(allowed, 1)

    def limit_settings(self, settings: Mapping[str, Setting]) -> dict[str, Setting]:
        """Tighten the bounds of settings to the limits of this server."""
        bounded = dict(settings)
        for name, limit in {"steps": self.steps, "fps": self.fps}.items():
            setting = bounded[name]
            example = None if setting.example is not None and setting.example > limit else setting.example
            bounded[name] = setting._replace(maximum=min(setting.maximum, limit), example=example)
        return bounded

    def limit_model_card(self, card: Mapping[str, Any]) -> dict[str, Any]:
        """Tighten the bounds in a model card to the limits of this server."""
        schemas = {name: dict(schema) for name, schema in card["settings"].items()}
        for name in ("steps", "fps"):
            if schema := schemas.get(name):
                schema["maximum"] = min(schema.get("maximum", math.inf), getattr(self, name))
        return {**card, "settings": schemas}

    def limit_pictures(self) -> None:
        """Apply the limits to all pictures and clips that this process reads."""
        MEDIA_LIMITS.max_pixels, MEDIA_LIMITS.clip_factor = self.picture, CLIP_FACTOR

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def count_pixels(settings: Settings) -> int:
    """Return the number of pixels of a video, in all frames together."""
    return settings.height * settings.width * settings.length
