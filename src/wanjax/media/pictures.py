# SPDX-License-Identifier: Apache-2.0
"""Pictures and clips that a video is made from: how they are read, what size the video takes from them, how they fit.

A picture is shown as it was meant to be: turned as its EXIF says, its palette resolved, what is transparent on white.
"""

import math
import os
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped, UInt8
from PIL import Image, ImageOps, ImageSequence

from wanjax.errors import WanjaxError
from wanjax.ffmpeg import run_ffmpeg

RESIZES = ("crop", "pad", "stretch")
Picture = UInt8[np.ndarray, "H W 3"]
Clip = UInt8[np.ndarray, "T H W 3"]
PPM = re.compile(rb"P6\s(\d+)\s(\d+)\s255\s")
PictureSource = str | Path | Image.Image | Shaped[np.ndarray, "H W 3"]
ClipSource = str | Path | Sequence[PictureSource] | Shaped[np.ndarray, "T H W 3"]
LANCZOS = Image.Resampling.LANCZOS
ANIMATED = ("GIF", "WEBP", "PNG", "AVIF", "TIFF")  # not MPO: a telephone's photograph with its thumbnails
BROKEN = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    Image.DecompressionBombError,
)  # what Pillow raises on bad files


class Pictures(NamedTuple):
    """What a video is made from beside the prompt, in RGB and of any size."""

    image: Picture | None = None
    last_image: Picture | None = None
    video: Clip | None = None
    mask: Clip | None = None
    references: tuple[Picture, ...] = ()

    def given(self) -> list[str]:
        """The names of those that are there."""
        return [name for name, value in zip(self._fields, self, strict=True) if value is not None and len(value)]

    @property
    def first(self) -> Picture | None:
        """The picture whose shape the video takes, if there is one."""
        return self.video[0] if self.image is None and self.video is not None else self.image


def read_pictures(
    *,
    image: PictureSource | None = None,
    last_image: PictureSource | None = None,
    video: ClipSource | None = None,
    mask: ClipSource | None = None,
    references: Iterable[PictureSource] = (),
    frames: int,
    fps: float,
) -> Pictures:
    """Reads each of these, from files or from what is in memory, where it is given.

    Of clips at most `frames` frames are read; those with more than `fps` of them a second are thinned out to that. A
    mask may be one picture, which then holds for every frame. Raises WanjaxError where a file is missing, cannot be
    read, or is a clip where a picture is needed, and where the mask is longer or shorter than the video.
    """
    clip = None if video is None else read_clip(video, frames, fps)
    masks = None if mask is None else read_clip(mask, frames, fps)
    if masks is not None:
        if clip is None:
            raise WanjaxError("a mask is given without a video: the video whose white parts are made anew is needed")
        if len(masks) == 1:
            masks = masks.repeat(len(clip), axis=0)
        if len(masks) != len(clip):
            raise WanjaxError(f"the mask has {len(masks)} frames and the video {len(clip)}: as many, or one, would do")
    return Pictures(
        image=None if image is None else read_picture(image),
        last_image=None if last_image is None else read_picture(last_image),
        video=clip,
        mask=masks,
        references=tuple(read_picture(reference) for reference in references),
    )


def read_picture(source: PictureSource) -> Picture:
    """The picture in a file, or one that is in memory; raises WanjaxError as `read_pictures` does."""
    if isinstance(source, np.ndarray):
        return _checked(source, 3)
    if isinstance(source, Image.Image):
        return _shown(source)
    with _opened(source) as image, _damage_told(source):
        if image.format in ANIMATED and (count := getattr(image, "n_frames", 1)) > 1:
            raise WanjaxError(f"{source} is animated, it has {count} frames: a picture with one is needed")
        return _shown(image)


def read_clip(source: ClipSource, frames: int, fps: float) -> Clip:
    """The clip in a file, in a folder of pictures by their names, or in memory, as `read_pictures` has it."""
    if isinstance(source, np.ndarray):
        return _checked(source[:frames], 4)
    with closing(_pictures(source, frames, fps)) as pictures:
        kept = list(islice(pictures, frames))
    name = source if isinstance(source, str | Path) else "the clip"
    if not kept:
        raise WanjaxError(f"{name} holds no pictures: at least one is needed")
    if any(picture.shape != kept[0].shape for picture in kept):
        raise WanjaxError(f"{name} holds pictures of different sizes: all of a clip have to be alike")
    return np.stack(kept)


def _pictures(source: str | Path | Sequence[PictureSource], frames: int, fps: float) -> Generator[Picture]:
    """The pictures of a clip in turn, of which `frames` are wanted, no more than `fps` for a second of it."""
    if not isinstance(source, str | Path):
        return (read_picture(picture) for picture in source)
    suffixes = Image.registered_extensions()
    if Path(source).is_dir():
        return (read_picture(path) for path in sorted(Path(source).iterdir()) if path.suffix.lower() in suffixes)
    return _animation(source, fps) if Path(source).suffix.lower() in suffixes else _film(source, frames, fps)


def _animation(source: str | Path, fps: float) -> Generator[Picture]:
    """The pictures of what Pillow reads; one picture is a clip of one."""
    with _opened(source) as image, _damage_told(source):
        image.load()  # some formats tell the duration of a frame that is loaded
        duration = image.info.get("duration")
        frames = (_shown(frame) for frame in ImageSequence.Iterator(image))
        yield from _thinned(frames, 1000 / duration if duration else fps, fps)


def _film(source: str | Path, frames: int, fps: float) -> Generator[Picture]:
    """The pictures of what ffmpeg reads, turned as the file says."""
    if not Path(source).is_file():
        raise WanjaxError(f"there is no file {source}")
    thinned = ["-vf", rf"fps=min(source_fps\,{fps})", "-frames:v", str(frames)]
    try:
        data = run_ffmpeg(["-i", os.fspath(source), *thinned, "-f", "image2pipe", "-c:v", "ppm", "pipe:1"])
    except OSError as error:
        raise WanjaxError(f"{source} cannot be read as a video: {error}") from error
    at = 0
    while header := PPM.match(data, at):  # pictures end to end, each with its size
        width, height = int(header[1]), int(header[2])
        at = header.end() + width * height * 3
        yield np.frombuffer(data[header.end() : at], np.uint8).reshape(height, width, 3)


def _thinned(pictures: Iterable[Picture], rate: float, fps: float) -> Iterator[Picture]:
    """As many of the pictures, of which `rate` make a second, as keep their speed at no more than `fps`."""
    share = min(1.0, fps / rate)
    return (picture for i, picture in enumerate(pictures) if math.floor(i * share) != math.floor((i - 1) * share))


def _checked(array: np.ndarray, rank: int) -> np.ndarray:
    if array.dtype != np.uint8 or array.ndim != rank or array.shape[-1] != 3 or 0 in array.shape:
        right = f"uint8 [{'T, ' * (rank - 3)}H, W, 3]"
        raise WanjaxError(f"{array.dtype} {list(array.shape)} is given as pictures, where {right} is right")
    return array


def _opened(source: str | Path) -> Image.Image:
    if not Path(source).is_file():
        raise WanjaxError(f"there is no file {source}")
    try:
        return Image.open(source)
    except BROKEN as error:
        raise WanjaxError(f"{source} cannot be read as a picture: {error}") from error


@contextmanager
def _damage_told(source: str | Path) -> Iterator[None]:
    try:
        yield
    except BROKEN as error:
        raise WanjaxError(f"{source} cannot be read to its end, it is damaged: {error}") from error


def _shown(image: Image.Image) -> Picture:
    """The picture as a viewer would show it on a white page."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):  # 16 bits of grey, which Pillow would clip
        image = Image.fromarray((np.asarray(image, np.float32) / 257.0 + 0.5).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.array(image.convert("RGB"))


def size_within(picture: tuple[int, ...], area: int, grid: int) -> tuple[int, int]:
    """The (height, width) of a video with about the proportions of a picture's [H W 3] and at most about `area` pixels.

    Both are multiples of `grid`, rounded down, as in the reference.
    """
    ratio = picture[0] / picture[1]
    height, width = (max(grid, round(math.sqrt(area * r)) // grid * grid) for r in (ratio, 1 / ratio))
    return height, width


def fit(picture: Picture, size: tuple[int, int], resize: str) -> Picture:
    """The picture in a (height, width): its edges cut off, black bars added, or its proportions changed."""
    height, width = size
    if picture.shape[:2] == size:
        return picture
    image = Image.fromarray(picture)
    if resize == "stretch":
        return np.array(image.resize((width, height), LANCZOS))
    if resize == "pad":
        return np.array(ImageOps.pad(image, (width, height), LANCZOS))
    scale = max(width / image.width, height / image.height)
    image = image.resize((round(image.width * scale), round(image.height * scale)), LANCZOS)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return np.array(image.crop((left, top, left + width, top + height)))
