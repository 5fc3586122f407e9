# SPDX-License-Identifier: Apache-2.0
"""Read the pictures and clips of a request, derive the size of the video from them, and resize them to this size.

A picture is read as a viewer shows it: rotated according to its EXIF data, in RGB, and with a background behind
transparent pixels. The background is white for visible pictures, and black for masks and control clips.
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
from wanjax.media.bounds import MEDIA_LIMITS, largest_size
from wanjax.media.colours import Conversion, srgb_conversion
from wanjax.media.damage import first_frame_with_hole
from wanjax.media.inputs import InputSpec
from wanjax.media.video import DECODE_ERRORS, Video, read_metadata
from wanjax.media.video_reader import read_video_file
from wanjax.stores.paths import missing_file

Picture = UInt8[np.ndarray, "H W 3"]
PictureOfAnySize = UInt8[np.ndarray, "_H _W 3"]  # the height and width in a list whose pictures differ in size
Clip = UInt8[np.ndarray, "T H W 3"]
GreyOfAnySize = Float[np.ndarray, "_H _W"]
Background = Literal["white", "black"]
PictureSource = str | Path | Image.Image | Shaped[np.ndarray, "..."]
ClipSource = str | Path | Sequence[PictureSource] | Shaped[np.ndarray, "..."]
LANCZOS = Image.Resampling.LANCZOS
READER_VERSION = 2  # increase this when the decoded pixels of files change, so that cached latents are encoded again
GIF_TICK_MS = 10  # a GIF's times are multiples of this many milliseconds
# In milliseconds. A frame that lasts at most MIN_DURATION, or has no duration, lasts DEFAULT_DURATION, as in browsers.
MIN_DURATION_MS, DEFAULT_DURATION_MS = 10, 100
DAMAGED_MESSAGE = "{} breaks at frame {}, where it is damaged or ends too early: give a complete copy"
# without MPO, which is a JPEG with thumbnails as further frames
ANIMATED_FORMATS = ("GIF", "WEBP", "PNG", "AVIF", "TIFF")
CHECKED_FOR_HOLES = ("WEBP", "AVIF")
PICTURE_FORMATS = (*ANIMATED_FORMATS, "JPEG", "BMP", "PPM")
"""The formats that are read. Pillow would pass some other formats to external programs, such as PostScript to
Ghostscript."""
JPEG_MARKER = re.compile(rb"\xff([\xc0-\xcf\xd9-\xfe])")  # markers of segments that have a length
START_OF_SCAN, END_OF_IMAGE = 0xDA, 0xD9
MAX_SCANS = 50  # the maximum scans of a progressive JPEG; each scan is a pass over all pixels, and about 10 are usual
MODE_CONVERSIONS = {
    **dict.fromkeys(("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"), ("RGB",)),
    **dict.fromkeys(("LA", "PA", "RGBA", "RGBa"), ("RGBA",)),
    "La": ("LA", "RGBA"),
}
"""The modes through which Pillow converts each 8-bit mode to RGB, or to RGBA if it has transparency."""
WHITE_VALUES = {**dict.fromkeys(("I;16", "I;16L", "I;16B", "I;16N"), (65535,)), "I": (255, 65535), "F": (1, 255, 65535)}
"""The possible values of white in the deep grey modes. The smallest value that no pixel of a picture or clip exceeds is
used."""
WHITE_OVERSHOOT = 0.05  # a filter may exceed white or black by this fraction of white
CHANNELS = (1, 3, 4)  # the numbers of channels of grey, RGB and RGBA
STRIP_ROWS = 256  # rows of a picture that are converted at a time
DECODE_LOCK = RLock()  # Pillow's limit on pixels is global, so only one picture is decoded at a time


class HighBitDepthPicture(NamedTuple):
    """A grey picture of more than 8 bits, the possible values of its white, and the conversion of its 8-bit form to
    sRGB."""

    values: GreyOfAnySize
    whites: tuple[int, ...]
    to_srgb: Conversion | None = None


class Pictures(Mapping[str, Any]):
    """The RGB pictures and clips from which a video is made, by the names of their inputs. Inputs that are None or
    empty are left out.
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

    def picture_list(self, name: str) -> tuple[PictureOfAnySize, ...]:
        """Return the pictures, each [H W 3], of an input that takes several pictures. The list may be empty."""
        return tuple(self.get(name, ()))

    def with_inputs(self, **arrays: Any) -> "Pictures":
        """Return a copy in which these inputs are replaced. None removes an input."""
        return Pictures(**{**self, **arrays})

    @property
    def first(self) -> Picture | None:
        """The picture that gives the video its default aspect ratio, or None."""
        clip = self.clip("video")
        return self.picture("image") if "image" in self or clip is None else clip[0]


class NotAPictureError(WanjaxError):
    """The file is not a single picture, but may be a clip."""


def read_pictures(
    sources: Mapping[str, PictureSource | ClipSource | Iterable[PictureSource]],
    specs: Collection[InputSpec],
    *,
    frames: int,
    fps: int | float,
) -> Pictures:
    """Read pictures and clips from files or arrays.

    A clip is resampled to at most `fps` frames a second, and then cut to `frames` frames. A mask of one picture is
    repeated for every frame of the clip `video`.

    Args:
        sources: Files or arrays by the names of inputs.
        specs: The inputs of the model.
        frames: The maximum number of frames to read from a clip.
        fps: The frames per second of the video.

    Raises:
        WanjaxError: A file is missing, cannot be read, or is a clip where a picture is needed; or the mask and the
            video differ in length.
    """
    arrays: dict[str, Any] = {}
    for name, kind, _, _, background, _ in specs:
        source: Any = sources.get(name)
        if source is None:
            continue
        if kind == "image":
            arrays[name] = _read_picture(source, background, specs)
        elif kind != "images":
            arrays[name] = read_clip(source, frames, fps, background=background)
        elif isinstance(source, str | bytes) or not isinstance(source, Iterable):
            raise WanjaxError(f"{name} must be a list of pictures, got {repr_short(source)}")
        else:
            arrays[name] = tuple(_read_picture(entry, background, specs) for entry in source)
        if kind == "mask":
            arrays[name] = _match_clip(arrays[name], arrays.get("video"))
    return Pictures(**arrays)


def _read_picture(source: Any, background: Background, specs: Iterable[InputSpec]) -> Picture | HighBitDepthPicture:
    """Read a picture. If the file is a clip and the model takes clips, the error suggests the input for clips."""
    try:
        return read_picture(source, background)
    except NotAPictureError as error:
        is_video = (guess_type(str(source))[0] or "").startswith("video/")
        if is_video and any(spec.kind == "clip" for spec in specs):
            raise WanjaxError(f"{error}; give a clip as the input video") from error
        raise


def _match_clip(mask: UInt8[np.ndarray, "_T _H _W 3"], clip: Clip | None) -> UInt8[np.ndarray, "_T _H _W 3"]:
    """Return a mask with as many frames as its clip. Raises WanjaxError if there is no clip, or the lengths differ."""
    if clip is None:
        raise WanjaxError("a mask needs a video: also give the video to change where the mask is white")
    if len(mask) == 1:
        return mask.repeat(len(clip), axis=0)
    if len(mask) != len(clip):
        raise WanjaxError(
            f"the mask has {len(mask)} frames, and the video has {len(clip)}: give {len(clip)} frames, or one picture"
        )
    return mask


def read_picture(source: PictureSource, background: Background = "white") -> Picture:
    """Read a picture from a file or from memory; raise WanjaxError as `read_pictures` does."""
    [picture] = _to_8_bits(
        [_read_unscaled(source, background)], str(source) if isinstance(source, str | Path) else "the picture"
    )
    return picture


def _read_unscaled(source: PictureSource, background: Background) -> Picture | HighBitDepthPicture:
    """Read a picture. A deep grey picture is not scaled to 8 bits yet."""
    if isinstance(source, np.ndarray):
        return _checked_array(source, 3)
    if isinstance(source, Image.Image):
        with _wrap_errors("the picture", MEDIA_LIMITS.max_pixels):
            _check_single(source, "the picture")
            return _render(source.copy(), background)
    if not isinstance(source, str | Path):
        if isinstance(source, Video):
            raise WanjaxError("a Video is not a picture: give one of its frames, such as video[0] or video[-1]")
        expected = "the path of a file, a PIL image or an array uint8 [H, W, 3]"
        raise WanjaxError(f"{repr_short(source)} is not a picture: give {expected}")
    with open_image(source, str(source)) as image:
        _check_single(image, str(source))
        return _render(image, background)


def to_picture(image: Image.Image, name: str) -> Picture:
    """Convert an image that Pillow opened; raise WanjaxError if it is animated."""
    _check_single(image, name)
    [picture] = _to_8_bits([_render(image, "white")], name)
    return picture


def _check_single(image: Image.Image, name: str) -> None:
    if _is_animated(image):
        raise NotAPictureError(f"{name} is animated: give a picture with one frame")


def _is_animated(image: Image.Image) -> bool:
    return image.format in ANIMATED_FORMATS and getattr(image, "is_animated", False)


def read_clip(source: ClipSource, frames: int, fps: int | float, background: Background = "white") -> Clip:
    """Read a clip from a file, from a folder of pictures in the order of their names, or from memory.

    Numbers in names are sorted by value. `frames`, `fps` and errors are those of `read_pictures`.
    """
    if isinstance(source, np.ndarray):
        return _checked_array(source, 4)[:frames]
    if not isinstance(source, str | Path | Sequence) or isinstance(source, bytes):
        if isinstance(source, Video):
            raise WanjaxError("a Video is not a clip: give its frames, video.frames")
        expected = "the path of a file or folder, a list of pictures or an array uint8 [T, H, W, 3]"
        raise WanjaxError(f"{repr_short(source)} is not a clip: give {expected}")
    name = source if isinstance(source, str | Path) else "the clip"
    with closing(_iterate_pictures(source, frames, fps, background)) as sequence:
        pictures = _to_8_bits(list(islice(sequence, frames)), str(name))
    if not pictures:
        raise WanjaxError(f"{name} contains no pictures: give at least one")
    if any(picture.shape != pictures[0].shape for picture in pictures):
        raise WanjaxError(f"{name} contains pictures of different sizes: give pictures of one size")
    clip = np.empty((len(pictures), *pictures[0].shape), np.uint8)
    for index in reversed(range(len(clip))):
        # Free each picture after copying it, because all pictures together may take gigabytes
        clip[index] = pictures.pop()
    return clip


def _iterate_pictures(
    source: str | Path | Sequence[PictureSource], frames: int, fps: int | float, background: Background
) -> Generator[Picture | HighBitDepthPicture]:
    """Iterate over a clip's pictures: at least the first `frames`, at most `fps` a second."""
    if not isinstance(source, str | Path):
        return (_read_unscaled(picture, background) for picture in source)
    if Path(source).is_dir():
        return (_read_unscaled(path, background) for path in _list_pictures(Path(source)))
    return (
        _read_animation(source, fps, background)
        if _is_picture(source)
        else _read_video_file(source, frames, fps, background)
    )


def is_picture_name(path: Path) -> bool:
    """Return whether a file's suffix is that of a picture or an animation."""
    return Image.registered_extensions().get(path.suffix.lower()) in (*PICTURE_FORMATS, "MPO")


def natural_sort(paths: Iterable[Path]) -> list[Path]:
    """Sort paths by name, with numbers by value: 2 comes before 10."""

    def key(path: Path) -> tuple[list[tuple[str | int, ...]], str]:
        split_components = (
            re.split(r"(\d+)", component.casefold()) for component in path.parts
        )  # odd items are numbers
        return [tuple(int(x) if i % 2 else x for i, x in enumerate(component)) for component in split_components], str(
            path
        )

    return sorted(paths, key=key)


def _list_pictures(folder: Path) -> list[Path]:
    """List the pictures in a folder in order. Warn if there are other files."""
    try:
        files = list(folder.iterdir())
    except OSError as error:
        raise WanjaxError(f"{folder} cannot be read, {reason(error)}: change its permissions") from error
    pictures = natural_sort(
        path for path in files if is_picture_name(path) and not path.name.startswith(".") and path.is_file()
    )
    if pictures and (ignored := len(files) - len(pictures)):
        message = f"{ignored} files in {folder} are ignored: they are hidden or are not pictures"
        warnings.warn(message, WanjaxWarning, stacklevel=2)
    return pictures


def _is_picture(source: str | Path) -> bool:
    """Return whether Pillow can read a file, judged by its name or else by its contents."""
    if is_picture_name(Path(source)) or not os.path.isfile(source):
        return is_picture_name(Path(source))
    try:
        with _pixel_limit(MEDIA_LIMITS.max_pixels), Image.open(source, formats=PICTURE_FORMATS):
            return True
    except Image.DecompressionBombError:
        return True
    except DECODE_ERRORS:
        return False


def _read_animation(
    source: str | Path, fps: int | float, background: Background
) -> Generator[Picture | HighBitDepthPicture]:
    """Yield the pictures of an animation that Pillow reads. A single picture is a clip of one frame."""
    with open_image(source, str(source)) as image:
        if image.format not in ANIMATED_FORMATS:
            yield _render(image, background)
            return
        num_skipped = int(
            image.format == "PNG" and bool(image.info.get("default_image"))
        )  # the first image is a fallback, not a frame
        durations = []
        for frame_count, frame in enumerate(_decode_frames(image, str(source)), 1):
            _check_size(image, str(source), MEDIA_LIMITS.max_pixels)
            if (
                frame_count > MEDIA_LIMITS.max_animation_frames
                or frame_count * image.width * image.height > MEDIA_LIMITS.max_clip_pixels
            ):
                raise WanjaxError(
                    f"{source} has at least {frame_count} frames of {image.width}x{image.height} pixels, and the "
                    f"limit is {MEDIA_LIMITS.max_animation_frames:,} frames and "
                    f"{MEDIA_LIMITS.max_clip_pixels:,} in all: use fewer or smaller ones"
                )
            durations.append(frame.info.get("duration"))
        frame_durations, tick = _frame_durations(
            durations[num_skipped:], _saved_fps(source), ignores_times=image.format == "TIFF"
        )
        tick = tick or 1000 / fps
        tolerance = GIF_TICK_MS / 2 + 1 if image.format == "GIF" else 1
        frames = (_render(frame, background) for frame in islice(_decode_frames(image, str(source)), num_skipped, None))
        timed = zip(frames, (duration or tick for duration in frame_durations), strict=True)
        yield from _resample(timed, sum(duration or tick for duration in frame_durations), tick, 1000 / fps, tolerance)


def _decode_frames(image: Image.Image, name: str) -> Iterator[Image.Image]:
    """Yield the decoded frames of an animation; raise WanjaxError with the number of the first broken frame."""
    frames = ImageSequence.Iterator(image)
    for number in count(1):
        try:
            frame = next(frames)
            frame.load()  # some formats give the duration only after the frame is decoded
        except StopIteration:
            return
        except Image.DecompressionBombError:
            raise
        except DECODE_ERRORS as error:
            if number == 1:
                raise
            raise WanjaxError(DAMAGED_MESSAGE.format(name, number)) from error
        yield frame


def _frame_durations(
    durations: Sequence[float | None], fps: float | None, *, ignores_times: bool
) -> tuple[list[float | None], float | None]:
    """Return the milliseconds of each frame, None for a frame without a time, and the milliseconds of one tick.

    Missing durations, and durations of at most 10 ms, become 100 ms, as in browsers, unless the frame rate in the
    file's metadata is as high.
    """
    known_durations = [duration for duration in durations if duration]
    if known_durations and fps is not None and 1000 / fps < min(known_durations) + GIF_TICK_MS:
        return list(durations), 1000 / fps
    if ignores_times and not known_durations:
        return list(durations), None
    corrected_durations = [
        duration if duration and duration > MIN_DURATION_MS else DEFAULT_DURATION_MS for duration in durations
    ]
    return list(corrected_durations), _estimate_tick(corrected_durations)


def _saved_fps(source: str | Path) -> float | None:
    """Return the frames a second in the metadata of a video that this library wrote, or None."""
    with suppress(WanjaxError):
        fps = read_metadata(source).get("fps")
        return fps if isinstance(fps, int | float) and fps > 0 else None


def _estimate_tick(durations: Sequence[float]) -> float:
    """Estimate the milliseconds of one frame before the encoder merged equal frames into longer frames.

    The shortest frames, which differ only by rounding, last one tick. The other frames last whole multiples of a tick.
    """
    longest_duration = min(durations) + GIF_TICK_MS
    shortest_duration = fmean(duration for duration in durations if duration <= longest_duration)
    return sum(durations) / sum(max(1, round(duration / shortest_duration)) for duration in durations)


def _resample(
    timed_pictures: Iterable[tuple[Picture | HighBitDepthPicture, float]],
    length: float,
    tick: float,
    step: float,
    tolerance: float,
) -> Iterator[Picture | HighBitDepthPicture]:
    """Yield the picture at each multiple of `step` or, if it is longer, of `tick`, up to the last tick.

    Because times are rounded, a picture is taken to start a little earlier than its time says: half a tick earlier if
    no picture is skipped.

    Args:
        timed_pictures: Pictures with their durations in milliseconds.
        length: The sum of the durations.
        tick: The duration of one frame.
        step: The distance between the yielded pictures.
        tolerance: The maximum rounding error of a time.
    """
    step, lead_ms = (step, min(tolerance, tick / 2)) if step > tick else (tick, tick / 2)
    end, index = 0.0, 0
    for picture, duration in timed_pictures:
        end += duration
        while index * step + lead_ms < end and index * step < length - tick + lead_ms:
            yield picture
            index += 1


def _read_video_file(source: str | Path, frames: int, fps: int | float, background: Background) -> Generator[Picture]:
    """Yield the pictures of a video file that ffmpeg reads, with the background behind transparent pixels."""
    with closing(read_video_file(source, frames, fps, is_non_colour=background == "black")) as video_frames:
        for frame in video_frames:
            yield frame if frame.shape[-1] == 3 else _flatten(Image.fromarray(frame), background)


def _checked_array(array: np.ndarray, rank: int) -> np.ndarray:
    if array.dtype != np.uint8 or array.ndim != rank or array.shape[-1] != 3 or 0 in array.shape:
        expected = f"uint8 [{'T, ' * (rank - 3)}H, W, 3]"
        problem = f"pictures must be {expected}, got {array.dtype} {list(array.shape)}"
        raise WanjaxError(f"{problem}: {_array_advice(array, rank)}")
    return array


def _array_advice(array: np.ndarray, rank: int) -> str:
    """Write advice for an array x of another dtype or layout: the expression that converts x to pictures."""
    shape, x = list(array.shape), "x"
    if 0 in shape:
        return "give an array with pixels"
    if len(shape) == rank + 1:  # a batch, or a clip with a single picture
        shape, x = shape[1:], f"{x}[0]"
    # one picture in place of a clip
    elif len(shape) == rank - 2 > 1 or (len(shape) == rank - 1 and shape[-1] in (3, 4)):
        shape, x = [1, *shape], f"{x}[None]"
    if len(shape) == rank - 1:
        shape, x = [*shape, 1], f"{x}[..., None]"
    if len(shape) != rank:
        return "give an array with these axes"
    if shape[-1] not in CHANNELS and shape[-3] in CHANNELS:
        shape, x = [*shape[:-3], *shape[-2:], shape[-3]], f"np.moveaxis({x}, -3, -1)"
    if shape[-1] not in CHANNELS:
        return f"give 3 channels, not {shape[-1]}"
    x = {1: f"np.repeat({x}, 3, axis=-1)", 3: x, 4: f"{x}[..., :3]"}[shape[-1]]
    if array.dtype == np.uint8:
        return f"give {x}"
    if array.dtype.kind in "iu":
        return f'for values from 0 to 255, give {x}.astype("uint8")'
    if array.dtype.kind == "b":
        return f'give (255 * {x}).astype("uint8")'
    return f'for values in [0, 1], give (255 * {x}).round().astype("uint8")'


@contextmanager
def _pixel_limit(pixels: int) -> Iterator[None]:
    """Make Pillow refuse frames with more pixels, also after the first frame."""
    with DECODE_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        limit = Image.MAX_IMAGE_PIXELS
        Image.MAX_IMAGE_PIXELS = max(1, pixels // 2)  # Pillow refuses only pictures with more than twice the limit
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _check_size(image: Image.Image, name: str, max_pixels: int) -> None:
    if image.width * image.height > max_pixels or max(image.size) > MEDIA_LIMITS.max_side:
        limits_text = f"{max_pixels:,} pixels, and {MEDIA_LIMITS.max_side:,} in a row or column"
        raise WanjaxError(
            f"{name} has {image.width}x{image.height} pixels, and the limit is {limits_text}: scale it down to "
            f"{largest_size(image.width, image.height, max_pixels)}"
        )


def _count_scans(data: bytes) -> int:
    """Return the number of scans of a JPEG."""
    count, position = 0, 0
    while (marker := JPEG_MARKER.search(data, position)) and (marker_code := marker[1][0]) != END_OF_IMAGE:
        count += marker_code == START_OF_SCAN
        position = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])
    return count


@contextmanager
def open_image(source: str | Path | BytesIO, name: str, *, pixels: int | None = None) -> Iterator[Image.Image]:
    """Open a picture after its header is checked.

    Args:
        source: A path, or the contents of a file.
        name: The name of the picture in messages.
        pixels: The most pixels; None is the limit of `MEDIA_LIMITS`.

    Raises:
        WanjaxError: The picture is missing, too large or damaged, or the file is not a picture.
    """
    max_pixels = MEDIA_LIMITS.max_pixels if pixels is None else pixels
    if not isinstance(source, BytesIO) and not os.path.isfile(source):
        raise WanjaxError(f"{name} is a folder: give a picture" if os.path.isdir(source) else missing_file(source))
    with ExitStack() as stack:
        with _wrap_errors(name, max_pixels, is_opening=True):
            # Pillow memory-maps a file opened by name, and then decodes a rotated TIFF wrongly.
            file = source if isinstance(source, BytesIO) else stack.enter_context(open(source, "rb"))
            image = stack.enter_context(Image.open(file, formats=PICTURE_FORMATS))
        _check_size(image, name, max_pixels)
        if image.format in ("JPEG", "MPO"):
            data = source.getvalue() if isinstance(source, BytesIO) else Path(source).read_bytes()
            if (scans := _count_scans(data)) > MAX_SCANS:
                raise WanjaxError(f"{name} is a JPEG with {scans} scans, and the limit is {MAX_SCANS}: save it again")
        _check_holes(image, source, name)
        stack.enter_context(_wrap_errors(name, max_pixels))
        yield image


def _check_holes(image: Image.Image, source: str | Path | BytesIO, name: str) -> None:
    """Raise WanjaxError for a picture or animation with a hole, which decoders do not detect."""
    if image.format in CHECKED_FOR_HOLES:
        data = source.getvalue() if isinstance(source, BytesIO) else Path(source).read_bytes()
        blobs = [blob for key in ("exif", "xmp", "icc_profile") if isinstance(blob := image.info.get(key), bytes)]
        if (frame := first_frame_with_hole(data, image.format, image.width * image.height, blobs)) is not None:
            raise WanjaxError(DAMAGED_MESSAGE.format(name, frame + 1))


@contextmanager
def _wrap_errors(name: str, max_pixels: int, *, is_opening: bool = False) -> Iterator[None]:
    """Turn Pillow's errors in decoding, or in `is_opening`, into WanjaxError."""
    try:
        with _pixel_limit(
            2 * max_pixels if is_opening else max_pixels
        ):  # Pillow's limit is twice as high, so `_check_size` can report a size slightly above the limit
            yield
    except WanjaxError:
        raise
    except Image.DecompressionBombError as error:
        pixels = int("".join(re.findall(r"\d+", str(error))[:1]))  # Pillow's message has the number of pixels
        raise WanjaxError(f"{name} has {pixels:,} pixels, and the limit is {max_pixels:,}: scale it down") from error
    except UnidentifiedImageError as error:
        if os.path.isfile(name) and not os.path.getsize(name):
            raise WanjaxError(f"{name} is empty: give a complete copy of the picture") from error
        raise NotAPictureError(f"{name} is not a picture: give one of {', '.join(PICTURE_FORMATS)}") from error
    except (*DECODE_ERRORS, MemoryError) as error:
        problem = "cannot be read as a picture" if is_opening else "is damaged before its end"
        raise WanjaxError(f"{name} {problem} ({error}): give a complete copy") from error


def _render(image: Image.Image, background: Background) -> Picture | HighBitDepthPicture:
    """Return the picture as a viewer shows it on this background. The function rotates the image in place."""
    ImageOps.exif_transpose(image, in_place=True)
    to_srgb = (
        srgb_conversion(image) if background == "white" else None
    )  # masks and control clips contain values, not colours
    if image.mode in WHITE_VALUES:
        whites = (
            (65535,) if image.mode == "I" and image.format == "PPM" else WHITE_VALUES[image.mode]
        )  # a PGM of 16 bits
        grey = np.asarray(image).astype(np.float32)
        if (hidden := image.info.get("transparency")) is not None:  # one grey value is transparent
            grey[grey == hidden] = whites[0] if background == "white" else 0
        return HighBitDepthPicture(grey, whites, to_srgb)
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top in range(0, image.height, STRIP_ROWS):  # converted in strips, so that the copies stay small
        rows = pixels[top : top + STRIP_ROWS]
        rows[:] = _flatten(image.crop((0, top, image.width, top + len(rows))), background, to_srgb)
    return pixels


def _flatten(image: Image.Image, background: Background, to_srgb: Conversion | None = None) -> Picture:
    """Convert an 8-bit image to RGB on this background."""
    has_transparent_colour = "transparency" in image.info and image.mode in ("1", "L", "P", "RGB")
    if to_srgb is not None and image.mode == "CMYK":
        return np.asarray(to_srgb(image))
    for mode in ("RGBA",) if has_transparent_colour else MODE_CONVERSIONS[image.mode]:
        image = image.convert(mode)
    if to_srgb is not None:
        image = to_srgb(image)
    if image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, background), image)
    return np.asarray(image.convert("RGB"))


def _to_8_bits(pictures: Sequence[PictureOfAnySize | HighBitDepthPicture], name: str) -> list[PictureOfAnySize]:
    """Scale the pictures of one source to 8 bits a channel; raise WanjaxError for values outside of every range."""
    values: dict[tuple[int, ...], list[GreyOfAnySize]] = {}
    for picture in pictures:
        if isinstance(picture, HighBitDepthPicture):
            values.setdefault(picture.whites, []).append(picture.values)
    white_by_range = {whites: _find_white(whites, values[whites], name) for whites in values}
    return [_scale_grey(x, white_by_range[x.whites]) if isinstance(x, HighBitDepthPicture) else x for x in pictures]


def _find_white(whites: tuple[int, ...], values: Sequence[GreyOfAnySize], name: str) -> int:
    """Return the lowest value of white that no picture exceeds. NaN exceeds every value."""
    low, high = float(np.min([x.min() for x in values])), float(np.max([x.max() for x in values]))
    white = next((white for white in whites if high <= (1 + WHITE_OVERSHOOT) * white), 0)
    if white and low >= -WHITE_OVERSHOOT * white:
        return white
    ranges_text = " or ".join(f"0 to {white}" for white in whites)
    raise WanjaxError(f"{name} has values from {low:g} to {high:g}: give values from {ranges_text}")


def _scale_grey(picture: HighBitDepthPicture, white: int) -> PictureOfAnySize:
    grey = (picture.values * np.float32(255 / white) + np.float32(0.5)).clip(0, 255).astype(np.uint8)
    if picture.to_srgb is not None:
        with DECODE_LOCK:  # a transform may run in one thread at a time
            return np.array(picture.to_srgb(Image.fromarray(grey)))
    return np.repeat(grey[..., None], 3, axis=-1)


def size_for_area(shape: tuple[int, ...], area: int, grid: int) -> tuple[int, int]:
    """Return the (height, width) of a video with about the aspect ratio of a picture of shape [H W 3].

    Both sides of the exact rectangle of `area` pixels are rounded down to multiples of `grid`, as in the reference.
    """
    ratio = shape[0] / shape[1]
    height, width = (max(grid, round(math.sqrt(area * r)) // grid * grid) for r in (ratio, 1 / ratio))
    return height, width


def visible_share(shape: tuple[int, ...], size: tuple[int, int]) -> float:
    """Return the share of a picture [H W 3] that is visible after scaling and cropping to a (height, width)."""
    ratio = shape[0] * size[1] / (shape[1] * size[0])
    return min(ratio, 1 / ratio)


def fit_to_size(picture: Picture, size: tuple[int, int], resize: str) -> UInt8[np.ndarray, "_H _W 3"]:
    """Resize a picture to a (height, width): by cropping, by adding black bars (`pad`), or by `stretch`."""
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
