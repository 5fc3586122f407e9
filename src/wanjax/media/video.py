# SPDX-License-Identifier: Apache-2.0
"""Write videos with their settings, and read the settings back.

A video's file has its settings as JSON in its metadata. The file appears under its name only when it is complete.
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
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Shaped, UInt8
from PIL import Image, PngImagePlugin

from wanjax.dims import readable_signature
from wanjax.errors import WanjaxError, repr_short, wrap_write_errors
from wanjax.figures import pluralize
from wanjax.media.damage import has_media_signature, is_truncated
from wanjax.media.ffmpeg import container_tags, run_ffmpeg
from wanjax.media.inputs import CLIP_SUFFIXES
from wanjax.media.webp import restore_duration
from wanjax.signals import cleanup_on_exit
from wanjax.stores.paths import AnyPath, RemotePath, check_no_web_address, local_copy, missing_file, parse_path
from wanjax.stores.temporary import sibling_path, temp_dir
from wanjax.stores.writing import atomic_write, check_folder, check_free_space

FRAME_FILE = "frame_{:05d}.png"
FRAME_FILE_PATTERN = re.compile(r"frame_\d{5,}\.png")
PLAYER_WIDTH = 256  # a notebook enlarges smaller videos by a whole factor, to at most this many pixels
H264_ARGUMENTS = ("-c:v", "libx264", "-crf", "17")
VIDEO_ENCODERS = {
    ".mp4": (*H264_ARGUMENTS, "-movflags", "+faststart"),
    ".mov": (
        *H264_ARGUMENTS,
        "-movflags",
        "+faststart+use_metadata_tags",
    ),  # without this flag, metadata in MOV can have at most 64 KiB
    ".webm": ("-c:v", "libvpx-vp9", "-crf", "20", "-b:v", "0", "-row-mt", "1", "-cpu-used", "4"),
}
"""ffmpeg's arguments for the encoder and container of each suffix."""
MAX_PID_DIGITS = 7  # the number of digits of Linux's highest process id, 4,194,304
MAX_NAME_BYTES = 255  # the maximum bytes of a file's name on all common systems
ONE_FRAME_MESSAGE = (
    "{} is a picture, which has one frame: for more frames, give .mp4, .webm, .mov, .gif, .webp or a folder of PNG"
)
EXIF_DESCRIPTION = 0x010E  # the EXIF tag ImageDescription
# Pillow raises these for broken files.
DECODE_ERRORS = (OSError, ValueError, SyntaxError, EOFError, IndexError, RuntimeError, Image.DecompressionBombError)

Frame = UInt8[np.ndarray, "H W 3"]
GUESSED_NAMES = {  # advice for names of other libraries
    **dict.fromkeys(("metadata", "record", "info"), "video.settings is its metadata"),
    **dict.fromkeys(("write", "export", "save_video", "to_file", "to_mp4"), "use video.save('NAME.mp4')"),
    **dict.fromkeys(("images", "videos", "numpy", "array"), "use video.frames, uint8 [T, H, W, 3]"),
    **dict.fromkeys(("show", "play", "display"), "a notebook plays the video, and video.save('NAME.mp4') writes it"),
    "latents": "pipe.denoise(pipe.encode(prompt)) returns latents",
}


@dataclass(frozen=True, eq=False, repr=False)
class Video:
    """A video, and the settings with which it was made.

    A `Video` is a sequence of its frames: `len(video)`, `video[0]`, `for frame in video`. In a notebook it plays.

    Args:
        frames: RGB frames, uint8 [T H W 3].
        fps: Frames a second.
        settings: The metadata of the video, which can be written as JSON.
    """

    frames: UInt8[np.ndarray, "T H W 3"]
    fps: int | float
    settings: Mapping[str, Any]

    def save(self, path: str | AnyPath, **unknown: object) -> AnyPath:
        """Write the video and its settings as `write_video` does.

        Args:
            path: A file, here or in a store, whose suffix decides the format.
            **unknown: Other keywords, such as those of diffusers' `export_to_video`, raise WanjaxError with advice.
        """
        for name in unknown:
            is_setting = name in ("fps", "frame_rate")
            advice = (
                "give fps to pipe(prompt, fps=...)"
                if is_setting
                else "leave it out, because the path decides the format"
            )
            raise WanjaxError(f"{repr_short(name)} is not a keyword here: {advice}")
        return write_video(path, self.frames, self.fps, self.settings)

    def to_pil(self) -> list[Image.Image]:
        """Return the frames as Pillow images."""
        return [Image.fromarray(frame) for frame in self.frames]

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int | slice) -> UInt8[np.ndarray, "... H W 3"]:
        return self.frames[index]

    def __iter__(self) -> Iterator[Frame]:
        return iter(self.frames)

    if not TYPE_CHECKING:  # type checkers do not see this method, so they report unknown attributes

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError. For a setting or a guessed name, the message says what to use instead."""
            settings = self.__dict__.get("settings", {})
            if name in settings:
                raise AttributeError(f"a video has no attribute {name}: use video.settings[{name!r}]")
            if name in GUESSED_NAMES:
                raise AttributeError(f"a video has no attribute {name}: {GUESSED_NAMES[name]}")
            return object.__getattribute__(self, name)  # raises the usual AttributeError of Python

    def __repr__(self) -> str:
        count, height, width, _ = self.frames.shape
        parts = [repr(self.settings["prompt"])] if self.settings.get("prompt") else []
        parts += [f"seed {self.settings['seed']}"] if "seed" in self.settings else []
        return ", ".join([f"Video: {pluralize(count, 'frame')} of {width}x{height} at {self.fps} a second", *parts])

    def _repr_html_(self) -> str:
        """Return an HTML element that embeds the video and plays it in a notebook."""
        return _player_html(self)


readable_signature(Video)


def _player_html(video: Video) -> str:
    """Return HTML with the video as MP4, or as GIF if MP4 cannot be written; small videos are enlarged."""
    _, height, width, _ = video.frames.shape
    zoom = max(1, PLAYER_WIDTH // width)
    title = escape(str(video.settings.get("prompt", "")), quote=True)
    attributes = f'width="{zoom * width}" height="{zoom * height}" title="{title}" style="image-rendering: pixelated"'
    with temp_dir() as folder:
        mp4, gif = (folder / f"video.{kind}" for kind in ("mp4", "gif"))
        try:
            video.save(mp4)
            data = b64encode(mp4.read_bytes()).decode()
        except WanjaxError:  # an odd size, or no ffmpeg
            video.save(gif)
            data = b64encode(gif.read_bytes()).decode()
            return f'<img {attributes} src="data:image/gif;base64,{data}">'
    return f'<video {attributes} controls autoplay loop muted playsinline src="data:video/mp4;base64,{data}"></video>'


def write_video(
    path: str | AnyPath,
    frames: Shaped[np.ndarray, "..."] | Iterable[Shaped[np.ndarray, "..."]],
    fps: int | float,
    metadata: Mapping[str, Any] | None = None,
) -> AnyPath:
    """Write RGB frames as a video in the format of the path's suffix.

    `.mp4` and `.mov`: H.264, yuv420p, BT.709, with fast start; `.webm`: VP9 with the same colours; `.gif` and `.webp`:
    a looping animation; `.png`: a picture, of one frame; no suffix or a trailing slash: a folder of PNG. The video
    appears under its name only when it is complete.

    Args:
        path: A path, or the URL of a file in a store.
        frames: RGB frames, uint8 [T, H, W, 3], in one array or in chunks.
        fps: Frames a second.
        metadata: Settings to write into the file as JSON, which `read_metadata` reads.

    Returns:
        The absolute path or URL.

    Raises:
        WanjaxError: The suffix is unknown, the frames are invalid, or the file cannot be written.
    """
    if not (isinstance(fps, int | float | np.number) and 0 < fps < np.inf):
        raise WanjaxError(f"fps must be a number above 0, got {repr_short(fps)}: give one such as 16")
    target = prepare_output_path(path)
    chunks = (frames,) if isinstance(frames, np.ndarray) else frames
    VIDEO_WRITERS[_suffix(path)](target, _single_frames(chunks), fps, json.dumps(dict(metadata or {})))
    return target


def max_name_bytes() -> int:
    """Return the maximum bytes of a file's name. The name of its temporary file, which is longer, must be allowed
    too, also in a process with a longer number."""
    missing_digits = MAX_PID_DIGITS - len(str(os.getpid()))
    return MAX_NAME_BYTES - len(os.fsencode(sibling_path(Path("a")).name)) + 1 - missing_digits


def check_suffix(path: str | AnyPath) -> str:
    """Return the lower-case suffix of a video's name; raise WanjaxError if it is unknown or the name is "-"."""
    if path == "" or not isinstance(path, str | os.PathLike | RemotePath):
        raise WanjaxError(f"{repr_short(path)} is not a name for a video: give the path of a file or folder")
    suffix = _suffix(path)
    if str(path) == "-":
        raise WanjaxError("a video cannot be written to standard output (-): give the name of a file, or ./-")
    if not isinstance(name := parse_path(path), RemotePath):
        size, max_size = len(os.fsencode(name.name)), max_name_bytes()
        if size > max_size:  # the limit also applies to the name of the temporary file
            short = f"{name.name[:40]}..."
            raise WanjaxError(f"the name {short} has {size} bytes: give one of at most {max_size}")
    if suffix not in VIDEO_WRITERS:
        suffixes = ", ".join(suffix for suffix in VIDEO_WRITERS if suffix not in ("", ".png"))
        folder_advice = "no suffix for a folder of PNG, or .png for a video of one frame"
        raise WanjaxError(f"{path} ends in {suffix}: give one of {suffixes}, {folder_advice}")
    return suffix


def prepare_output_path(path: str | AnyPath, frames: int = 1) -> AnyPath:
    """Return the absolute path of a video to be written, and create its folder; a store is not contacted.

    Raises WanjaxError if the suffix is unknown, the folder is not writable, a folder of PNG contains other files or
    would be in a store, or a .png would contain several frames.
    """
    check_no_web_address(path)
    suffix, target = check_suffix(path), parse_path(path).absolute()
    if suffix == ".png" and frames != 1:
        raise WanjaxError(ONE_FRAME_MESSAGE.format(path))
    if isinstance(target, RemotePath):
        if not suffix or not target.parent.path:
            raise WanjaxError(
                f"{path} is a folder of PNG, which a store cannot contain: give a file such as BUCKET/NAME.mp4"
            )
        return target
    if suffix and os.path.isdir(target):  # os.path raises no error for a name that is too long
        raise WanjaxError(f"{path} is a folder: end the name with a slash for a folder of PNG, or name a file")
    if not suffix and os.path.exists(target):
        if not target.is_dir():
            raise WanjaxError(
                f"{path} is a file, not a folder: give a new or empty folder, or a file such as {path}.mp4"
            )
        names = sorted(os.listdir(target))
        if other_files := [name for name in names if not FRAME_FILE_PATTERN.fullmatch(name)]:
            raise WanjaxError(f"{path} contains {other_files[0]}, which is not a frame: give a new or empty folder")
    check_folder(target.parent)
    return target


def write_trial_video(
    path: str | AnyPath, frames: int, size: Sequence[int], fps: int | float, metadata: Mapping[str, Any]
) -> None:
    """Write a trial video of one frame and remove it; raise WanjaxError if it or its settings cannot be written.

    Also raises WanjaxError if the disk has too little room for all frames.

    Args:
        path: The path of the video.
        frames: The number of frames of the video.
        size: The (height, width) of the video.
        fps: Frames a second.
        metadata: The settings of the video.
    """
    target = prepare_output_path(path, frames)
    local_folder = (
        Path(gettempdir()) if isinstance(target, RemotePath) else target.parent
    )  # a video for a store is first written on this machine
    folder = sibling_path(local_folder / "trial")
    trial_file, settings = folder / target.name, json.dumps(dict(metadata))
    try:
        with wrap_write_errors(path):
            folder.mkdir()
            with cleanup_on_exit(partial(shutil.rmtree, folder)):
                VIDEO_WRITERS[_suffix(path)](trial_file, iter([np.zeros((*size, 3), np.uint8)]), fps, settings)
                trial_bytes = sum(file.stat().st_size for file in folder.rglob("*"))
                if read_metadata(trial_file) != json.loads(settings):
                    raise WanjaxError(f"{path} cannot store the settings: give another format")
            if isinstance(target, RemotePath):
                target.parent.check_writable()
    except WanjaxError as error:
        raise WanjaxError(str(error).replace(str(trial_file), str(path))) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    check_free_space(
        local_folder, trial_bytes + int((frames - 1) * math.prod(size) * MIN_BYTES_PER_PIXEL[_suffix(path)]), path
    )


def read_metadata(path: str | AnyPath) -> dict[str, Any]:
    """Return the settings that `write_video` wrote into a video. Raise WanjaxError if the video has no settings."""
    if not isinstance(path := parse_path(path), Path):
        with local_copy(path) as file:
            return read_metadata(file)
    file = path / FRAME_FILE.format(0) if path.is_dir() else path
    if not file.is_file():
        raise WanjaxError(missing_file(file))
    read_comment = _container_comment if file.suffix.lower() in VIDEO_ENCODERS else _image_comment
    try:
        settings = json.loads(read_comment(file))
    except WanjaxError:  # ffmpeg is missing
        raise
    except DECODE_ERRORS:  # raised if the metadata is not JSON, or the file is neither a picture nor a video
        settings = None
    if not isinstance(settings, dict):
        raise WanjaxError(f"{file} contains no settings: {reason_without_settings(file)}")
    return settings


def is_incomplete(path: AnyPath) -> bool:
    """Return whether a video that wanjax wrote is empty or truncated, or is a folder with a gap between its frames.

    Videos in a store count as complete, because checking them would download them.
    """
    if isinstance(path, RemotePath):
        return False
    if not path.is_dir():
        return not path.stat().st_size or is_truncated(path)
    frames = sorted(name for name in os.listdir(path) if FRAME_FILE_PATTERN.fullmatch(name))
    has_gap = frames != [FRAME_FILE.format(index) for index in range(len(frames))]
    return has_gap or any(is_incomplete(path / name) for name in frames)


def reason_without_settings(file: Path) -> str:
    """Return the probable reason why a video's or stage's file has no settings."""
    with suppress(OSError):
        if file.is_file() and not file.stat().st_size:
            return "it is empty: get a complete copy"
        if is_truncated(file):
            return "it is truncated: get a complete copy"
    match file.suffix.lower():
        case ".safetensors":
            return "it contains weights or arrays alone: give a LoRA to --lora, and a model to --model"
        case ".json":
            return "it is neither wanjax's metadata nor a workflow of ComfyUI: give one of them, or a video"
        case suffix if suffix in (*CLIP_SUFFIXES, *VIDEO_WRITERS, ".png", ".jpg", ".jpeg"):
            if file.is_file() and not has_media_signature(file):
                return "it is damaged, or neither a video nor a picture: give a video as wanjax saved it"
            return "it is a preview, or another program wrote it: give a video as wanjax saved it"
    return "it is neither a video nor a picture: give a video, a picture or a stage's file"


def _suffix(path: str | AnyPath) -> str:
    """Return a path's lower-case suffix, empty for a folder."""
    return "" if str(path).endswith(("/", os.sep)) else Path(str(path)).suffix.lower()


def _single_frames(chunks: Iterable[Shaped[np.ndarray, "..."]]) -> Iterator[Frame]:
    """Yield the frames of all chunks one at a time. Raise WanjaxError if there are no frames, or if frames differ in
    size."""
    size = None
    for chunk in chunks:
        if chunk.dtype != np.uint8 or chunk.ndim != 4 or chunk.shape[-1] != 3 or size not in (None, chunk.shape[1:]):
            raise WanjaxError(f"frames must be uint8 [T, H, W, 3] of one size, got {chunk.dtype} {list(chunk.shape)}")
        for frame in chunk:
            size = frame.shape
            yield frame
    if size is None:
        raise WanjaxError("the video has no frames: give 1 or more")


def _write_encoded(path: AnyPath, frames: Iterator[Frame], fps: int | float, comment: str) -> None:
    first = next(frames)
    height, width, _ = first.shape
    suffix = path.suffix.lower()
    if suffix != ".webm" and (height % 2 or width % 2):
        raise WanjaxError(
            f"frames of {width}x{height} cannot be written as {suffix}, which needs an even width and height: "
            "give .webm, .gif, .webp or a folder of PNG"
        )
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-framerate", str(fps), "-i", "pipe:0"]
    # Convert by the matrix and tag it: players guess BT.601 or BT.709 for untagged videos.
    tags = "colorspace=bt709:color_primaries=bt709:color_trc=bt709:range=tv"
    colours = ["-vf", f"scale=out_color_matrix=bt709:out_range=tv,format=yuv420p,setparams={tags}"]
    with atomic_write(path) as partial_file, _ffmetadata(comment) as metadata_arguments:
        pieces = (frame.tobytes() for frame in chain([first], frames))
        run_ffmpeg([*source, *metadata_arguments, *VIDEO_ENCODERS[suffix], *colours, "-y", str(partial_file)], pieces)


@contextmanager
def _ffmetadata(comment: str) -> Iterator[list[str]]:
    """Write a comment to a file, and yield ffmpeg's arguments that read the file. An argument could have at most 128
    KiB."""
    with temp_dir() as folder:
        escaped = re.sub(r"([=;#\\\n])", r"\\\1", comment)
        (folder / "comment.txt").write_bytes(f";FFMETADATA1\ncomment={escaped}\n".encode())
        yield ["-f", "ffmetadata", "-i", str(folder / "comment.txt"), "-map", "0:v", "-map_metadata", "1"]


def _container_comment(path: Path) -> str:
    return container_tags(path).get("comment", "")


def _write_gif(path: AnyPath, frames: Iterator[Frame], fps: int | float, comment: str) -> None:
    _write_animation(path, frames, fps, 10, comment=comment)


def _write_webp(path: AnyPath, frames: Iterator[Frame], fps: int | float, comment: str) -> None:
    exif = Image.Exif()
    exif[EXIF_DESCRIPTION] = comment
    _write_animation(path, frames, fps, 1, quality=90, exif=exif)


def _write_animation(path: AnyPath, frames: Iterator[Frame], fps: int | float, unit: int, **options: Any) -> None:
    """Write an animation with Pillow.

    Times are rounded to multiples of `unit` milliseconds. The rounding errors do not add up.
    """
    first_image, *other_images = [Image.fromarray(frame) for frame in frames]
    end_times = [round(1000 * i / fps / unit) * unit for i in range(len(other_images) + 2)]
    durations = [b - a for a, b in pairwise(end_times)]
    with atomic_write(path) as partial_file:
        first_image.save(partial_file, save_all=True, append_images=other_images, duration=durations, loop=0, **options)
        if other_images and path.suffix.lower() == ".webp":
            restore_duration(partial_file, first_image.size, end_times[-1])


def _write_picture(path: AnyPath, frames: Iterator[Frame], fps: int | float, comment: str) -> None:
    del fps  # unused: for a picture, fps is only in the settings
    first_frame, *other_frames = frames
    if other_frames:
        raise WanjaxError(ONE_FRAME_MESSAGE.format(path))
    with atomic_write(path) as partial_file:
        Image.fromarray(first_frame).save(partial_file, pnginfo=_png_text(comment))


def _png_text(comment: str) -> PngImagePlugin.PngInfo:
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", comment)
    return text


def _write_pngs(path: AnyPath, frames: Iterator[Frame], fps: int | float, comment: str) -> None:
    del fps  # unused: for a folder of PNG, fps is only in the settings
    assert isinstance(path, Path), "a store cannot contain a folder of PNG"
    text = _png_text(comment)
    partial_folder, replaced_folder = (sibling_path(path, kind) for kind in ("partial", "old"))
    try:
        with wrap_write_errors(path):
            partial_folder.mkdir()
            with cleanup_on_exit(partial(shutil.rmtree, partial_folder)):
                for index, frame in enumerate(frames):
                    Image.fromarray(frame).save(partial_folder / FRAME_FILE.format(index), pnginfo=text)
            if path.exists():
                path.rename(replaced_folder)
            partial_folder.rename(path)
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)
        if path.exists():
            shutil.rmtree(replaced_folder, ignore_errors=True)
        elif replaced_folder.exists():
            with suppress(OSError):
                replaced_folder.rename(path)


MIN_BYTES_PER_PIXEL = {**dict.fromkeys(VIDEO_ENCODERS, 0.01), ".gif": 0.05, ".webp": 0.02, ".png": 0.1, "": 0.1}
"""A lower bound of a video's bytes per pixel. Only nearly uniform videos are smaller."""
VIDEO_WRITERS: dict[str, Callable[[AnyPath, Iterator[Frame], float, str], None]] = {
    **dict.fromkeys(VIDEO_ENCODERS, _write_encoded),
    ".gif": _write_gif,
    ".webp": _write_webp,
    ".png": _write_picture,
    "": _write_pngs,
}


def _image_comment(path: Path) -> str | bytes:
    with Image.open(path, formats=("PNG", "GIF", "WEBP")) as image:
        return image.info.get("comment") or image.getexif().get(EXIF_DESCRIPTION, "")
