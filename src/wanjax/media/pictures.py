# SPDX-License-Identifier: Apache-2.0
"""Reads the pictures and clips that a video is made from, finds the video's size from theirs, and fits them to it.

A picture is read as a viewer shows it: turned as its EXIF says, its palette resolved, and what is transparent lies on
a page. The page is white for what is looked at, and black for masks and control clips, which paint on black.
"""

import math
import os
import re
import warnings
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from io import BytesIO
from itertools import count, islice
from mimetypes import guess_type
from pathlib import Path
from statistics import fmean
from threading import RLock
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Shaped, UInt8
from PIL import Image, ImageOps, ImageSequence, UnidentifiedImageError

from wanjax.errors import WanjaxError, WanjaxWarning, reason, repr_short
from wanjax.media.bounds import BOUNDS
from wanjax.media.colours import Conversion, conversion
from wanjax.media.damage import holed_frame
from wanjax.media.films import read_film
from wanjax.media.inputs import InputSpec
from wanjax.media.video import BROKEN, read_metadata
from wanjax.stores.paths import missing_file

Picture = UInt8[np.ndarray, "H W 3"]
PictureOfAnySize = UInt8[np.ndarray, "_H _W 3"]  # in a list whose pictures differ in size
Clip = UInt8[np.ndarray, "T H W 3"]
GreyOfAnySize = Float[np.ndarray, "_H _W"]
Page = Literal["white", "black"]
PictureSource = str | Path | Image.Image | Shaped[np.ndarray, "..."]
ClipSource = str | Path | Sequence[PictureSource] | Shaped[np.ndarray, "..."]
LANCZOS = Image.Resampling.LANCZOS
READING = 2  # another number where files are read to other values, so that what was made of them is made again
ROUNDING = 10  # a GIF's times are multiples of so many milliseconds
TOO_SHORT, SLOW = 10, 100  # milliseconds: a frame of so few or of none is shown for so many, as in Chromium and Firefox
BREAKS = "{} breaks at frame {}, where it is damaged or ends too early: give a whole copy"
ANIMATED = ("GIF", "WEBP", "PNG", "AVIF", "TIFF")  # not MPO, a JPEG: a photograph with its thumbnails
HOLED = ("WEBP", "AVIF")  # whose data are dense
FORMATS = (*ANIMATED, "JPEG", "BMP", "PPM")
"""The formats that are read. Pillow knows more: some it hands to other programs, such as PostScript to Ghostscript."""
MARKER = re.compile(rb"\xff([\xc0-\xcf\xd9-\xfe])")  # of a JPEG's segment, which has a length
START_OF_SCAN, END = 0xDA, 0xD9
SCANS = 50  # of a progressive JPEG, each of which is a pass over all pixels; some 10 are usual
COLOURS = {
    **dict.fromkeys(("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"), ("RGB",)),
    **dict.fromkeys(("LA", "PA", "RGBA", "RGBa"), ("RGBA",)),
    "La": ("LA", "RGBA"),
}
"""The conversions by which Pillow makes the modes of 8 bits a channel RGB, or RGBA where a part may be transparent."""
WHITES = {**dict.fromkeys(("I;16", "I;16L", "I;16B", "I;16N"), (65535,)), "I": (255, 65535), "F": (1, 255, 65535)}
"""The values that white may have in the modes of grey with more bits; the least that fits a picture or clip holds."""
BEYOND = 0.05  # of white that filters may leave above it, and below black
ROWS = 256  # of a picture that are converted at a time
DECODING = RLock()  # so that one picture at a time is decoded, within the bound that Pillow has for all threads


class DeepPicture(NamedTuple):
    """A grey picture of more than 8 bits, its possible values of white, and the conversion of 8 bits to sRGB."""

    values: GreyOfAnySize
    whites: tuple[int, ...]
    to_srgb: Conversion | None = None


class Pictures(Mapping[str, Any]):
    """The pictures and clips that a video is made from, by the names of their inputs, in RGB and of any size.

    Those that are None, or no pictures, are left out.
    """

    def __init__(self, **arrays: Any):
        self._arrays = {name: array for name, array in arrays.items() if array is not None and len(array)}

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def picture(self, name: str) -> Picture | None:
        """Return a picture [H W 3], or None."""
        return self.get(name)

    def clip(self, name: str) -> Clip | None:
        """Return a clip [T H W 3], or None."""
        return self.get(name)

    def several(self, name: str) -> tuple[PictureOfAnySize, ...]:
        """Return several pictures, each [H W 3]; may be empty."""
        return tuple(self.get(name, ()))

    def replaced(self, **arrays: Any) -> "Pictures":
        """Return the same pictures and clips but for these; None leaves one out."""
        return Pictures(**{**self, **arrays})

    @property
    def first(self) -> Picture | None:
        """The picture whose proportions the video takes, if there is one."""
        clip = self.clip("video")
        return self.picture("image") if "image" in self or clip is None else clip[0]


class NoPicture(WanjaxError):
    """A file that is not one picture, and may be a clip."""


def read_pictures(
    sources: Mapping[str, PictureSource | ClipSource | Iterable[PictureSource]],
    specs: Collection[InputSpec],
    *,
    frames: int,
    fps: int | float,
) -> Pictures:
    """Read pictures and clips from files or arrays.

    A clip is thinned out to `fps` frames a second, and then cut to `frames` frames. A mask of one picture holds for
    every frame of the clip `video`.

    Args:
        sources: What is given, by name.
        specs: The inputs of the model.
        frames: Of a clip, so many are read at most.
        fps: The frames a second of the video.

    Raises:
        WanjaxError: A file is missing, cannot be read, or is a clip where a picture is needed; or a mask is longer or
            shorter than the video.
    """
    arrays: dict[str, Any] = {}
    for name, kind, _, _, page, _ in specs:
        source: Any = sources.get(name)
        if source is None:
            continue
        if kind == "image":
            arrays[name] = _read_picture(source, page, specs)
        elif kind != "images":
            arrays[name] = read_clip(source, frames, fps, page=page)
        elif isinstance(source, str | bytes) or not isinstance(source, Iterable):
            raise WanjaxError(f"the {name} are given as {repr_short(source)}: give a list of pictures")
        else:
            arrays[name] = tuple(_read_picture(one, page, specs) for one in source)
        if kind == "mask":
            arrays[name] = _of_clip(arrays[name], arrays.get("video"))
    return Pictures(**arrays)


def _read_picture(source: Any, page: Page, specs: Iterable[InputSpec]) -> Picture | DeepPicture:
    """Return a picture; say how a clip is given if the file's name is that of one, and the model takes one."""
    try:
        return read_picture(source, page)
    except NoPicture as error:
        is_film = (guess_type(str(source))[0] or "").startswith("video/")
        if is_film and any(spec.kind == "clip" for spec in specs):
            raise WanjaxError(f"{error}; give a clip as video (--video)") from error
        raise


def _of_clip(mask: UInt8[np.ndarray, "_T _H _W 3"], clip: Clip | None) -> UInt8[np.ndarray, "_T _H _W 3"]:
    """Return a mask of as many frames as its clip; raise WanjaxError where there is none, or of other length."""
    if clip is None:
        raise WanjaxError("a mask is given without a video: give the video whose white parts are made anew")
    if len(mask) == 1:
        return mask.repeat(len(clip), axis=0)
    if len(mask) != len(clip):
        raise WanjaxError(f"the mask has {len(mask)} frames and the video {len(clip)}: give as many, or one")
    return mask


def read_picture(source: PictureSource, page: Page = "white") -> Picture:
    """Return a picture, from a file or from memory; raise WanjaxError as `read_pictures` does."""
    [picture] = _levelled([_read(source, page)], str(source) if isinstance(source, str | Path) else "the picture")
    return picture


def _read(source: PictureSource, page: Page) -> Picture | DeepPicture:
    """Return a picture whose white may have to be found yet."""
    if isinstance(source, np.ndarray):
        return _checked(source, 3)
    if isinstance(source, Image.Image):
        with _decoding("the picture", BOUNDS.pixels):
            _check_single(source, "the picture")
            return _shown(source.copy(), page)
    if not isinstance(source, str | Path):
        right = "the path of a file, a PIL image or uint8 [H, W, 3]"
        raise WanjaxError(f"{repr_short(source)} is given as a picture: give {right}")
    with opened(source, str(source)) as image:
        _check_single(image, str(source))
        return _shown(image, page)


def picture_of(image: Image.Image, name: str) -> Picture:
    """Return the picture in a file of Pillow's; raise WanjaxError where it has several."""
    _check_single(image, name)
    [picture] = _levelled([_shown(image, "white")], name)
    return picture


def _check_single(image: Image.Image, name: str) -> None:
    if _is_animated(image):
        raise NoPicture(f"{name} is animated: give a picture with one frame")


def _is_animated(image: Image.Image) -> bool:
    return image.format in ANIMATED and getattr(image, "is_animated", False)


def read_clip(source: ClipSource, frames: int, fps: int | float, page: Page = "white") -> Clip:
    """Return a clip, from a file, from a folder of pictures in the order of their names, or from memory.

    Numbers in names count as numbers. `frames`, `fps` and errors are those of `read_pictures`.
    """
    if isinstance(source, np.ndarray):
        return _checked(source, 4)[:frames]
    if not isinstance(source, str | Path | Sequence) or isinstance(source, bytes):
        right = "the path of a file or folder, a list of pictures or uint8 [T, H, W, 3]"
        raise WanjaxError(f"{repr_short(source)} is given as a clip: give {right}")
    name = source if isinstance(source, str | Path) else "the clip"
    with closing(_pictures(source, frames, fps, page)) as sequence:
        pictures = _levelled(list(islice(sequence, frames)), str(name))
    if not pictures:
        raise WanjaxError(f"{name} holds no pictures: give at least one")
    if any(picture.shape != pictures[0].shape for picture in pictures):
        raise WanjaxError(f"{name} holds pictures of different sizes: all pictures of a clip have the same size")
    clip = np.empty((len(pictures), *pictures[0].shape), np.uint8)
    for index in reversed(range(len(clip))):
        clip[index] = pictures.pop()  # which is free now, since all together may take gigabytes
    return clip


def _pictures(
    source: str | Path | Sequence[PictureSource], frames: int, fps: int | float, page: Page
) -> Generator[Picture | DeepPicture]:
    """Return an iterator over a clip's pictures: at least the first `frames`, at most `fps` per second."""
    if not isinstance(source, str | Path):
        return (_read(picture, page) for picture in source)
    if Path(source).is_dir():
        return (_read(path, page) for path in _in_folder(Path(source)))
    return _animation(source, fps, page) if _is_picture(source) else _film(source, frames, fps, page)


def is_picture_name(path: Path) -> bool:
    """Return whether a file's name is that of a picture or an animation."""
    return Image.registered_extensions().get(path.suffix.lower()) in (*FORMATS, "MPO")


def in_order(paths: Iterable[Path]) -> list[Path]:
    """Return paths in the order of their names, in which numbers count as numbers: 2 comes before 10."""

    def key(path: Path) -> tuple[list[tuple[str | int, ...]], str]:
        parts = (re.split(r"(\d+)", part.casefold()) for part in path.parts)  # texts and numbers in turn
        return [tuple(int(x) if i % 2 else x for i, x in enumerate(part)) for part in parts], str(path)

    return sorted(paths, key=key)


def _in_folder(folder: Path) -> list[Path]:
    """Return the pictures in a folder in order; warn of how many other things are there."""
    try:
        files = list(folder.iterdir())
    except OSError as error:
        raise WanjaxError(f"{folder} cannot be read: {reason(error)}") from error
    pictures = in_order(
        path for path in files if is_picture_name(path) and not path.name.startswith(".") and path.is_file()
    )
    if pictures and (others := len(files) - len(pictures)):
        message = f"files left out of {folder}, which are hidden or no pictures: {others}"
        warnings.warn(message, WanjaxWarning, stacklevel=2)
    return pictures


def _is_picture(source: str | Path) -> bool:
    """Return whether a file is one for Pillow, by its name or else by its contents."""
    if is_picture_name(Path(source)) or not os.path.isfile(source):
        return is_picture_name(Path(source))
    try:
        with _bounded(BOUNDS.pixels), Image.open(source, formats=FORMATS):
            return True
    except Image.DecompressionBombError:
        return True
    except BROKEN:
        return False


def _animation(source: str | Path, fps: int | float, page: Page) -> Generator[Picture | DeepPicture]:
    """Yield the pictures of an animation that Pillow reads; a single picture is a clip of one."""
    with opened(source, str(source)) as image:
        if image.format not in ANIMATED:
            yield _shown(image, page)
            return
        apart = int(image.format == "PNG" and bool(image.info.get("default_image")))  # shown where nothing moves
        durations = []
        for total, frame in enumerate(_frames(image, str(source)), 1):
            _check_size(image, str(source), BOUNDS.pixels)
            if total > BOUNDS.frames or total * image.width * image.height > BOUNDS.together:
                raise WanjaxError(
                    f"{source} has {total} and more frames of {image.width}x{image.height} pixels where "
                    f"{BOUNDS.frames:,}, and {BOUNDS.together:,} pixels in all, are allowed at most"
                )
            durations.append(frame.info.get("duration"))
        lasting, tick = _times(durations[apart:], _own_fps(source), timeless=image.format == "TIFF")
        tick = tick or 1000 / fps
        rounded = ROUNDING / 2 + 1 if image.format == "GIF" else 1
        frames = (_shown(frame, page) for frame in islice(_frames(image, str(source)), apart, None))
        timed = zip(frames, (duration or tick for duration in lasting), strict=True)
        yield from _sampled(timed, sum(duration or tick for duration in lasting), tick, 1000 / fps, rounded)


def _frames(image: Image.Image, name: str) -> Iterator[Image.Image]:
    """Yield the decoded frames of an animation; raise WanjaxError that names the one at which it breaks."""
    frames = ImageSequence.Iterator(image)
    for number in count(1):
        try:
            frame = next(frames)
            frame.load()  # some formats tell the duration only now
        except StopIteration:
            return
        except Image.DecompressionBombError:
            raise
        except BROKEN as error:
            if number == 1:
                raise
            raise WanjaxError(BREAKS.format(name, number)) from error
        yield frame


def _times(
    durations: Sequence[float | None], fps: float | None, *, timeless: bool
) -> tuple[list[float | None], float | None]:
    """Return the milliseconds of each frame and of one tick; None if the file has none.

    Times of 10 ms and less, and those that are missing, are 100 ms, as in browsers, unless they are of a file that
    tells so many frames a second.
    """
    positive = [duration for duration in durations if duration]
    if positive and fps is not None and 1000 / fps < min(positive) + ROUNDING:
        return list(durations), 1000 / fps
    if timeless and not positive:
        return list(durations), None
    slowed = [duration if duration and duration > TOO_SHORT else SLOW for duration in durations]
    return list(slowed), _tick(slowed)


def _own_fps(source: str | Path) -> float | None:
    """Return the frames a second in the settings that a video keeps, if it is one of this library's."""
    with suppress(WanjaxError):
        fps = read_metadata(source).get("fps")
        return fps if isinstance(fps, int | float) and fps > 0 else None


def _tick(durations: Sequence[float]) -> float:
    """Return the milliseconds of one frame, before equal frames in a row became one that is shown for longer.

    The shortest frames, equal but for rounding, are one tick, and the others are whole numbers of ticks.
    """
    longest = min(durations) + ROUNDING
    shortest = fmean(duration for duration in durations if duration <= longest)
    return sum(durations) / sum(max(1, round(duration / shortest)) for duration in durations)


def _sampled(
    timed: Iterable[tuple[Picture | DeepPicture, float]], length: float, tick: float, step: float, rounded: float
) -> Iterator[Picture | DeepPicture]:
    """Yield the pictures that are shown at each multiple of `step`, or of a longer tick, up to the last tick.

    Times are milliseconds and may be `rounded`, so a picture counts as shown a little earlier: half a tick, where all
    are taken.
    """
    step, earlier = (step, min(rounded, tick / 2)) if step > tick else (tick, tick / 2)
    end, number = 0.0, 0
    for picture, duration in timed:
        end += duration
        while number * step + earlier < end and number * step < length - tick + earlier:
            yield picture
            number += 1


def _film(source: str | Path, frames: int, fps: int | float, page: Page) -> Generator[Picture]:
    """Yield the pictures of a film that ffmpeg reads, on the page."""
    with closing(read_film(source, frames, fps, values=page == "black")) as film:
        for frame in film:
            yield frame if frame.shape[-1] == 3 else _on(Image.fromarray(frame), page)


def _checked(array: np.ndarray, rank: int) -> np.ndarray:
    if array.dtype != np.uint8 or array.ndim != rank or array.shape[-1] != 3 or 0 in array.shape:
        right = f"uint8 [{'T, ' * (rank - 3)}H, W, 3]"
        raise WanjaxError(f"{array.dtype} {list(array.shape)} is given as pictures: give {right}")
    return array


@contextmanager
def _bounded(pixels: int) -> Iterator[None]:
    """Have Pillow refuse larger frames, which may come after the first."""
    with DECODING, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        limit, Image.MAX_IMAGE_PIXELS = (
            Image.MAX_IMAGE_PIXELS,
            max(1, pixels // 2),
        )  # it refuses more than twice as many
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _check_size(image: Image.Image, name: str, most: int) -> None:
    if image.width * image.height > most or max(image.size) > BOUNDS.side:
        bounds = f"{most:,}, and {BOUNDS.side:,} in a row,"
        raise WanjaxError(f"{name} has {image.width}x{image.height} pixels where {bounds} are allowed at most")


def _scans(data: bytes) -> int:
    """Return the number of passes in which a JPEG holds its picture."""
    count, at = 0, 0
    while (marker := MARKER.search(data, at)) and (kind := marker[1][0]) != END:
        count += kind == START_OF_SCAN
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])
    return count


@contextmanager
def opened(source: str | Path | BytesIO, name: str, *, pixels: int | None = None) -> Iterator[Image.Image]:
    """Open a picture that is not too large by its header; messages call it `name`.

    `pixels` None is that of `BOUNDS`. Raises WanjaxError where it is missing, too large, damaged or no picture.
    """
    most = BOUNDS.pixels if pixels is None else pixels
    if not isinstance(source, BytesIO) and not os.path.isfile(source):
        raise WanjaxError(f"{name} is a folder: give a picture" if os.path.isdir(source) else missing_file(source))
    with ExitStack() as stack:
        with _decoding(name, most, opening=True):
            # Pillow maps a file that it opens by name, and then reads a TIFF wrongly that is to be turned.
            file = source if isinstance(source, BytesIO) else stack.enter_context(open(source, "rb"))
            image = stack.enter_context(Image.open(file, formats=FORMATS))
        _check_size(image, name, most)
        if image.format in ("JPEG", "MPO"):
            data = source.getvalue() if isinstance(source, BytesIO) else Path(source).read_bytes()
            if (scans := _scans(data)) > SCANS:
                raise WanjaxError(f"{name} holds its picture in {scans} passes where {SCANS} are allowed at most")
        _check_whole(image, source, name)
        stack.enter_context(_decoding(name, most))
        yield image


def _check_whole(image: Image.Image, source: str | Path | BytesIO, name: str) -> None:
    """Raise WanjaxError for a picture or animation with a hole, which its decoder does not see."""
    if image.format in HOLED:
        data = source.getvalue() if isinstance(source, BytesIO) else Path(source).read_bytes()
        others = [other for key in ("exif", "xmp", "icc_profile") if isinstance(other := image.info.get(key), bytes)]
        if (frame := holed_frame(data, image.format, image.width * image.height, others)) is not None:
            raise WanjaxError(BREAKS.format(name, frame + 1))


@contextmanager
def _decoding(name: str, most: int, *, opening: bool = False) -> Iterator[None]:
    """Turn Pillow's errors, in decoding or in `opening`, into WanjaxError."""
    try:
        with _bounded(2 * most if opening else most):  # one that is not far too large is told with its sides
            yield
    except WanjaxError:
        raise
    except Image.DecompressionBombError as error:
        pixels = int("".join(re.findall(r"\d+", str(error))[:1]))  # which the message tells
        raise WanjaxError(f"{name} has {pixels:,} pixels where {most:,} are allowed at most") from error
    except UnidentifiedImageError as error:
        if os.path.isfile(name) and not os.path.getsize(name):
            raise WanjaxError(f"{name} is empty: give a complete copy of the picture") from error
        raise NoPicture(f"{name} cannot be read as a picture: it is none of {', '.join(FORMATS)}") from error
    except (*BROKEN, MemoryError) as error:
        how = "as a picture" if opening else "to its end, it is damaged"
        raise WanjaxError(f"{name} cannot be read {how}: {error}") from error


def _shown(image: Image.Image, page: Page) -> Picture | DeepPicture:
    """Return the picture as a viewer shows it on a page, which it turns in place."""
    ImageOps.exif_transpose(image, in_place=True)
    to_srgb = conversion(image) if page == "white" else None  # a mask or a control clip holds values, not colours
    if image.mode in WHITES:
        whites = (65535,) if image.mode == "I" and image.format == "PPM" else WHITES[image.mode]  # a PGM of 16 bits
        grey = np.asarray(image).astype(np.float32)
        if (hidden := image.info.get("transparency")) is not None:  # the one value that is transparent
            grey[grey == hidden] = whites[0] if page == "white" else 0
        return DeepPicture(grey, whites, to_srgb)
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top in range(0, image.height, ROWS):  # each conversion is a copy of its part alone
        rows = pixels[top : top + ROWS]
        rows[:] = _on(image.crop((0, top, image.width, top + len(rows))), page, to_srgb)
    return pixels


def _on(image: Image.Image, page: Page, to_srgb: Conversion | None = None) -> Picture:
    """Return a picture of 8 bits a channel on a page of that colour."""
    one_colour = "transparency" in image.info and image.mode in ("1", "L", "P", "RGB")
    if to_srgb is not None and image.mode == "CMYK":
        return np.asarray(to_srgb(image))
    for mode in ("RGBA",) if one_colour else COLOURS[image.mode]:
        image = image.convert(mode)
    if to_srgb is not None:
        image = to_srgb(image)
    if image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, page), image)
    return np.asarray(image.convert("RGB"))


def _levelled(pictures: Sequence[PictureOfAnySize | DeepPicture], name: str) -> list[PictureOfAnySize]:
    """Return the pictures of one source in 8 bits a channel; raise WanjaxError for values that have no meaning."""
    values: dict[tuple[int, ...], list[GreyOfAnySize]] = {}
    for picture in pictures:
        if isinstance(picture, DeepPicture):
            values.setdefault(picture.whites, []).append(picture.values)
    chosen = {whites: _white(whites, values[whites], name) for whites in values}
    return [_grey(x, chosen[x.whites]) if isinstance(x, DeepPicture) else x for x in pictures]


def _white(whites: tuple[int, ...], values: Sequence[GreyOfAnySize], name: str) -> int:
    """Return the least value of white that fits all of these; NaN fits none."""
    low, high = float(np.min([x.min() for x in values])), float(np.max([x.max() for x in values]))
    white = next((white for white in whites if high <= (1 + BEYOND) * white), 0)
    if white and low >= -BEYOND * white:
        return white
    right = " or ".join(f"0 to {white}" for white in whites)
    raise WanjaxError(f"{name} has values from {low:g} to {high:g} where those from {right} mean black to white")


def _grey(picture: DeepPicture, white: int) -> PictureOfAnySize:
    grey = (picture.values * np.float32(255 / white) + np.float32(0.5)).clip(0, 255).astype(np.uint8)
    if picture.to_srgb is not None:
        with DECODING:  # a transform is used by one thread at a time
            return np.array(picture.to_srgb(Image.fromarray(grey)))
    return np.repeat(grey[..., None], 3, axis=-1)


def size_within(picture: tuple[int, ...], area: int, grid: int) -> tuple[int, int]:
    """Return the (height, width) of a video with about the proportions of a picture, given by its shape [H W 3].

    Both are rounded down to multiples of `grid` from exactly `area` pixels, as in the reference.
    """
    ratio = picture[0] / picture[1]
    height, width = (max(grid, round(math.sqrt(area * r)) // grid * grid) for r in (ratio, 1 / ratio))
    return height, width


def fit(picture: Picture, size: tuple[int, int], resize: str) -> UInt8[np.ndarray, "_H _W 3"]:
    """Return the picture in a (height, width): its edges cut off, black bars added, or its proportions changed."""
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
