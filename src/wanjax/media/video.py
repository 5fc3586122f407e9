# SPDX-License-Identifier: Apache-2.0
"""Writes videos, and reads the settings back that they were made with.

A video keeps its settings as JSON in its own metadata. It appears under its name only when it is complete.
"""

import json
import math
import os
import re
import shutil
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import chain, pairwise
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
from jaxtyping import Shaped, UInt8
from PIL import Image, PngImagePlugin

from wanjax.dims import readable
from wanjax.errors import WanjaxError, repr_short, write_errors
from wanjax.figures import quantity
from wanjax.media.damage import is_cut_short
from wanjax.media.ffmpeg import reading, run_ffmpeg
from wanjax.media.webp import keep_time
from wanjax.signals import cleanup_on_exit
from wanjax.stores.paths import AnyPath, RemotePath, local_copy, missing_file, parse_path
from wanjax.stores.temporary import sibling_path, temp_dir
from wanjax.stores.writing import check_folder, check_room, writing

FRAME = "frame_{:05d}.png"
IS_FRAME = re.compile(r"frame_\d{5,}\.png")
PLAYER_WIDTH = 256  # pixels that a notebook shows of a small video, at least half of them
H264 = ("-c:v", "libx264", "-crf", "17")
FILMS = {
    ".mp4": (*H264, "-movflags", "+faststart"),
    ".mov": (*H264, "-movflags", "+faststart+use_metadata_tags"),  # QuickTime's own metadata have at most 64 KiB
    ".webm": ("-c:v", "libvpx-vp9", "-crf", "20", "-b:v", "0", "-row-mt", "1", "-cpu-used", "4"),
}
"""The encoders of films and their containers by suffix, as ffmpeg's arguments."""
PICTURE = "{} is one picture, for a video of one frame: .mp4, .webm, .mov, .gif, .webp or a folder of PNG holds more"
DESCRIPTION = 0x010E  # the EXIF field for a text about the image
# Pillow raises these on broken files.
BROKEN = (OSError, ValueError, SyntaxError, EOFError, IndexError, RuntimeError, Image.DecompressionBombError)

Frame = UInt8[np.ndarray, "H W 3"]


@dataclass(frozen=True, eq=False, repr=False)
class Video:
    """A video and everything that it was made with.

    It is a sequence of its frames: `len(video)`, `video[0]`, `for frame in video`. In a notebook it plays.

    Args:
        frames: RGB frames, uint8 [T H W 3].
        fps: Frames a second.
        settings: Its metadata, as JSON.
    """

    frames: UInt8[np.ndarray, "T H W 3"]
    fps: int | float
    settings: Mapping[str, Any]

    def save(self, path: str | AnyPath) -> AnyPath:
        """Write the video and its settings as `write_video` does.

        Args:
            path: A file, here or in a store, whose suffix decides the format.
        """
        return write_video(path, self.frames, self.fps, self.settings)

    def to_pil(self) -> list[Image.Image]:
        """Return the frames as images of Pillow."""
        return [Image.fromarray(frame) for frame in self.frames]

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int | slice) -> UInt8[np.ndarray, "... H W 3"]:
        return self.frames[index]

    def __iter__(self) -> Iterator[Frame]:
        return iter(self.frames)

    def __repr__(self) -> str:
        count, height, width, _ = self.frames.shape
        parts = [repr(self.settings["prompt"])] if self.settings.get("prompt") else []
        parts += [f"seed {self.settings['seed']}"] if "seed" in self.settings else []
        return ", ".join([f"Video: {quantity(count, 'frame')} of {width}x{height} at {self.fps} a second", *parts])

    def _repr_html_(self) -> str:
        """Return an element that plays the video in a notebook, which keeps the video inside itself."""
        return _player(self)


readable(Video)


def _player(video: Video) -> str:
    """Return HTML with the video as an mp4, or as a GIF where an mp4 cannot be written; small ones are enlarged."""
    _, height, width, _ = video.frames.shape
    times = max(1, PLAYER_WIDTH // width)
    title = escape(str(video.settings.get("prompt", "")), quote=True)
    shape = f'width="{times * width}" height="{times * height}" title="{title}" style="image-rendering: pixelated"'
    with temp_dir() as folder:
        film, animation = (folder / f"video.{kind}" for kind in ("mp4", "gif"))
        try:
            video.save(film)
            data = b64encode(film.read_bytes()).decode()
        except WanjaxError:  # an odd size, or no ffmpeg
            video.save(animation)
            data = b64encode(animation.read_bytes()).decode()
            return f'<img {shape} src="data:image/gif;base64,{data}">'
    return f'<video {shape} controls autoplay loop muted playsinline src="data:video/mp4;base64,{data}"></video>'


def write_video(
    path: str | AnyPath,
    frames: Shaped[np.ndarray, "..."] | Iterable[Shaped[np.ndarray, "..."]],
    fps: int | float,
    metadata: Mapping[str, Any] | None = None,
) -> AnyPath:
    """Write RGB frames, uint8 [T, H, W, 3], whole or in chunks, in the format of the name; return the place.

    `.mp4` and `.mov`: H.264, yuv420p, BT.709, playable while it loads; `.webm`: VP9, the same colours; `.gif` and
    `.webp`: an animation that repeats; `.png`: a picture, of one frame; no suffix or a slash at the end: a folder of
    PNG. The name may be a URL of a store, where the video appears when all of it is there. It keeps `metadata` as JSON,
    which `read_metadata` reads. Raises WanjaxError if the suffix is another one, the frames do not fit, or the file
    cannot be written.
    """
    target = check_output(path)
    chunks = (frames,) if isinstance(frames, np.ndarray) else frames
    WRITERS[_suffix(path)](target, _single_frames(chunks), fps, json.dumps(dict(metadata or {})))
    return target


def check_suffix(path: str | AnyPath) -> str:
    """Return the suffix of a video's name, in small letters; raise WanjaxError for one that is unknown, and for "-"."""
    if path == "" or not isinstance(path, str | os.PathLike | RemotePath):
        raise WanjaxError(f"the video's name is given as {repr_short(path)}: give that of a file or folder")
    suffix = _suffix(path)
    if str(path) == "-":
        raise WanjaxError("a video cannot be written to the standard output, -: give the name of a file, or ./-")
    if suffix not in WRITERS:
        suffixes = ", ".join(filter(None, WRITERS))
        raise WanjaxError(f"{path} ends in {suffix}: give {suffixes}, or no suffix for a folder of PNG")
    return suffix


def check_output(path: str | AnyPath, frames: int = 1) -> AnyPath:
    """Return the place, with an absolute path, of a video of this name and number of frames; make its folder here.

    Raises WanjaxError if the suffix is unknown, the folder cannot be written, a folder of PNG holds other things or is
    to be in a store, or one picture is to hold several frames. No store is asked.
    """
    suffix, target = check_suffix(path), parse_path(path).absolute()
    if suffix == ".png" and frames != 1:
        raise WanjaxError(PICTURE.format(path))
    if isinstance(target, RemotePath):
        if not suffix or not target.parent.path:
            raise WanjaxError(f"{path} is no file in a store, which holds no folder of PNG: BUCKET/NAME.mp4 is one")
        return target
    if suffix and os.path.isdir(target):  # which raises nothing for a name that is too long
        raise WanjaxError(f"{path} is a folder: end the name with a slash for a folder of PNG, or name a file")
    if not suffix and os.path.exists(target):
        names = sorted(os.listdir(target)) if target.is_dir() else [target.name]
        if others := [name for name in names if not IS_FRAME.fullmatch(name)]:
            raise WanjaxError(f"{path} holds {others[0]}, which is not a frame: give a new or empty folder")
    check_folder(target.parent)
    return target


def try_output(
    path: str | AnyPath, frames: int, size: Sequence[int], fps: int | float, metadata: Mapping[str, Any]
) -> None:
    """Raise WanjaxError where a video of a size (height, width) could not be written, or its settings not be read.

    Writes one frame and the settings beside it, and removes them.
    """
    target = check_output(path, frames)
    near = Path(gettempdir()) if isinstance(target, RemotePath) else target.parent  # where it is made
    folder = sibling_path(near / "trial")
    trial, settings = folder / target.name, json.dumps(dict(metadata))
    try:
        with write_errors(path):
            folder.mkdir()
            with cleanup_on_exit(partial(shutil.rmtree, folder)):
                WRITERS[_suffix(path)](trial, iter([np.zeros((*size, 3), np.uint8)]), fps, settings)
                alone = sum(file.stat().st_size for file in folder.rglob("*"))
                if read_metadata(trial) != json.loads(settings):
                    raise WanjaxError(f"{path} cannot keep the settings: give another format")
            if isinstance(target, RemotePath):
                target.parent.check_writable()
    except WanjaxError as error:
        raise WanjaxError(str(error).replace(str(trial), str(path))) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    check_room(near, alone + int((frames - 1) * math.prod(size) * LEAST_BYTES[_suffix(path)]), path)


def read_metadata(path: str | AnyPath) -> dict[str, Any]:
    """Return the settings that `write_video` put into a video; raise WanjaxError if it has none."""
    if not isinstance(path := parse_path(path), Path):
        with local_copy(path) as file:
            return read_metadata(file)
    file = path / FRAME.format(0) if path.is_dir() else path
    if not file.is_file():
        raise WanjaxError(missing_file(file))
    comment = _film_comment if file.suffix.lower() in FILMS else _image_comment
    try:
        settings = json.loads(comment(file))
    except WanjaxError:  # there is no ffmpeg
        raise
    except BROKEN:  # neither JSON nor a picture nor a video
        settings = None
    if not isinstance(settings, dict):
        raise WanjaxError(f"{file} holds no settings: {why_without_settings(file)}")
    return settings


def why_without_settings(file: Path) -> str:
    """Return why a file of a video or a stage may have no settings."""
    with suppress(OSError):
        if is_cut_short(file):
            return "it is cut short, so get a whole copy"
    return "wanjax did not write it, or something rewrote it"


def _suffix(path: str | AnyPath) -> str:
    """Return a name's suffix, which is empty for a folder."""
    return "" if str(path).endswith(("/", os.sep)) else Path(str(path)).suffix.lower()


def _single_frames(chunks: Iterable[Shaped[np.ndarray, "..."]]) -> Iterator[Frame]:
    """Yield the chunks' frames one at a time; raise WanjaxError if there are none, or they do not fit."""
    size = None
    for chunk in chunks:
        if chunk.dtype != np.uint8 or chunk.ndim != 4 or chunk.shape[-1] != 3 or size not in (None, chunk.shape[1:]):
            raise WanjaxError(f"a video's frames are uint8 [T, H, W, 3], all alike, not {chunk.dtype} {chunk.shape}")
        for frame in chunk:
            size = frame.shape
            yield frame
    if size is None:
        raise WanjaxError("no frames cannot be written as a video: give 1 or more")


def _write_film(path: AnyPath, frames: Iterator[Frame], fps: int | float, comment: str) -> None:
    first = next(frames)
    height, width, _ = first.shape
    kind = path.suffix.lower()
    if kind != ".webm" and (height % 2 or width % 2):
        raise WanjaxError(
            f"frames of {width}x{height} cannot become an {kind[1:]}, whose width and height are even: "
            "give .webm, .gif, .webp or a folder of PNG"
        )
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-framerate", str(fps), "-i", "pipe:0"]
    # The matrix is set together with its tags: players take untagged videos for BT.601 or for BT.709.
    tags = "colorspace=bt709:color_primaries=bt709:color_trc=bt709:range=tv"
    colours = ["-vf", f"scale=out_color_matrix=bt709:out_range=tv,format=yuv420p,setparams={tags}"]
    with writing(path) as beside, _ffmetadata(comment) as metadata_arguments:
        pieces = (frame.tobytes() for frame in chain([first], frames))
        run_ffmpeg([*source, *metadata_arguments, *FILMS[kind], *colours, "-y", str(beside)], pieces)


@contextmanager
def _ffmetadata(comment: str) -> Iterator[list[str]]:
    """Yield ffmpeg's arguments for a comment, which is in a file since an argument has at most 128 KiB."""
    with temp_dir() as folder:
        escaped = re.sub(r"([=;#\\\n])", r"\\\1", comment)
        (folder / "comment.txt").write_bytes(f";FFMETADATA1\ncomment={escaped}\n".encode())
        yield ["-f", "ffmetadata", "-i", str(folder / "comment.txt"), "-map", "0:v", "-map_metadata", "1"]


def _film_comment(path: Path) -> str:
    """Return the comment of a film, without the backslashes by which ffmpeg escapes its own special characters."""
    lines = run_ffmpeg([*reading(path), "-f", "ffmetadata", "pipe:1"]).decode()
    match = re.search(r"^comment=((?:[^\\\n]|\\.)*)", lines, re.MULTILINE | re.DOTALL | re.IGNORECASE)
    return re.sub(r"\\(.)", r"\1", match[1], flags=re.DOTALL) if match else ""


def _write_gif(path: AnyPath, frames: Iterator[Frame], fps: int | float, comment: str) -> None:
    _write_animation(path, frames, fps, 10, comment=comment)


def _write_webp(path: AnyPath, frames: Iterator[Frame], fps: int | float, comment: str) -> None:
    exif = Image.Exif()
    exif[DESCRIPTION] = comment
    _write_animation(path, frames, fps, 1, quality=90, exif=exif)


def _write_animation(path: AnyPath, frames: Iterator[Frame], fps: int | float, unit: int, **options: Any) -> None:
    """Write an animation by Pillow; times are multiples of `unit` milliseconds, rounded without a growing error."""
    first, *rest = [Image.fromarray(frame) for frame in frames]
    ends = [round(1000 * i / fps / unit) * unit for i in range(len(rest) + 2)]
    durations = [b - a for a, b in pairwise(ends)]
    with writing(path) as beside:
        first.save(beside, save_all=True, append_images=rest, duration=durations, loop=0, **options)
        if rest and path.suffix.lower() == ".webp":
            keep_time(beside, first.size, ends[-1])


def _write_picture(path: AnyPath, frames: Iterator[Frame], fps: int | float, comment: str) -> None:
    del fps  # a picture keeps it in the settings alone
    first, *rest = frames
    if rest:
        raise WanjaxError(PICTURE.format(path))
    with writing(path) as beside:
        Image.fromarray(first).save(beside, pnginfo=_text(comment))


def _text(comment: str) -> PngImagePlugin.PngInfo:
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", comment)
    return text


def _write_pngs(path: AnyPath, frames: Iterator[Frame], fps: int | float, comment: str) -> None:
    del fps  # a folder keeps it in the settings alone
    assert isinstance(path, Path), "no store holds a folder of PNG"
    text = _text(comment)
    beside, old = (sibling_path(path, kind) for kind in ("partial", "old"))
    try:
        with write_errors(path):
            beside.mkdir()
            with cleanup_on_exit(partial(shutil.rmtree, beside)):
                for index, frame in enumerate(frames):
                    Image.fromarray(frame).save(beside / FRAME.format(index), pnginfo=text)
            if path.exists():
                path.rename(old)
            beside.rename(path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        elif old.exists():
            with suppress(OSError):
                old.rename(path)


LEAST_BYTES = {**dict.fromkeys(FILMS, 0.01), ".gif": 0.05, ".webp": 0.02, ".png": 0.1, "": 0.1}
"""Bytes of a pixel that a video takes at least, unless it shows next to nothing."""
WRITERS: dict[str, Callable[[AnyPath, Iterator[Frame], float, str], None]] = {
    **dict.fromkeys(FILMS, _write_film),
    ".gif": _write_gif,
    ".webp": _write_webp,
    ".png": _write_picture,
    "": _write_pngs,
}


def _image_comment(path: Path) -> str | bytes:
    with Image.open(path, formats=("PNG", "GIF", "WEBP")) as image:
        return image.info.get("comment") or image.getexif().get(DESCRIPTION, "")
