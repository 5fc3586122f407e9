# SPDX-License-Identifier: Apache-2.0
"""Files that go in and out: videos, the stage files by which encode, denoise and decode are joined, and initial noise.

A video keeps its settings as JSON in its own metadata; a stage file keeps the settings that shaped it, so that files
which do not belong together are refused. Every file appears under its name only when it is complete.
"""

import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8
from PIL import Image, PngImagePlugin

from wanjax.checkpoint import SafetensorsFile, save_safetensors, writing
from wanjax.errors import WanjaxError
from wanjax.ffmpeg import run_ffmpeg
from wanjax.pipelines.base import Embeddings

EMBEDDINGS = "stage1_embeddings.safetensors"
LATENTS = "stage2_latents.safetensors"
CONFIG = "generation_config.json"
VIDEO = "output_video.mp4"

OLD_NAMES = {"model_id": "model", "num_inference_steps": "steps", "num_frames": "frames"}
"""Settings whose names in generation_config.json were others before wanjax."""
PICTURE_SETTINGS = ("height", "width", "frames", "resize", "image", "last_image", "video", "mask", "references")
"""Settings that shape what is made of pictures: the video's shape, and the files that the pictures are read from."""
OLD_TEXT_LENGTH = 226  # what Wan's prompts were cut to before wanjax, by mistake
FRAME = "frame_{:05d}.png"
IS_FRAME = re.compile(r"frame_\d{5,}\.png")
DESCRIPTION = 0x010E  # the EXIF field for a text about the image

Frame = UInt8[np.ndarray, "H W C"]
Frames = UInt8[np.ndarray, "T H W C"]


@dataclass(frozen=True, eq=False)
class Video:
    """RGB frames, how many of them make a second, and the settings that they were made with, as JSON."""

    frames: Frames
    fps: float
    settings: Mapping[str, Any]

    def save(self, path: str | Path) -> Path:
        """Writes the video and its settings as `write_video` does."""
        return write_video(path, self.frames, self.fps, self.settings)


def write_video(
    path: str | Path, frames: Frames | Iterable[Frames], fps: float, metadata: Mapping[str, Any] | None = None
) -> Path:
    """Writes RGB frames, an array or chunks of one, in the form that the name asks for; returns where.

    `.mp4`: H.264, yuv420p, BT.709, playable while it loads; `.gif` and `.webp`: an animation that repeats; no suffix or
    a slash at the end: a folder of PNG. `metadata` is kept in it as JSON, which `read_metadata` reads.
    Raises WanjaxError where the name has another suffix, or cannot be written.
    """
    target = check_output(path)
    chunks = (frames,) if isinstance(frames, np.ndarray) else frames
    WRITERS[_suffix(path)](target, _single_frames(chunks), fps, json.dumps(dict(metadata or {})))
    return target


def check_output(path: str | Path) -> Path:
    """Where a video of this name is written, once it is sure that it can be; its folder is made if need be.

    Raises WanjaxError if the suffix is unknown, the folder cannot be written, or a folder of PNG holds other things.
    """
    suffix, target = _suffix(path), Path(path).expanduser().absolute()
    if suffix not in WRITERS:
        known = ", ".join(filter(None, WRITERS))
        raise WanjaxError(f"{path} ends in {suffix}: {known}, or no suffix for a folder of PNG, would do")
    if suffix and target.is_dir():
        raise WanjaxError(f"{path} is a folder: end the name with a slash for a folder of PNG, or name a file")
    if not suffix and target.exists():
        names = sorted(os.listdir(target)) if target.is_dir() else [target.name]
        if others := [name for name in names if not IS_FRAME.fullmatch(name)]:
            raise WanjaxError(f"{path} holds {others[0]}, which is not a frame: a new or empty folder is needed")
    check_folder(target.parent)
    return target


def check_folder(folder: Path) -> None:
    """Makes the folder if need be; raises WanjaxError if files cannot be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = error.strerror or error
        raise WanjaxError(f"the folder {folder} cannot be written, {why}: another one is needed") from error


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The settings that `write_video` put into a video; raises WanjaxError if it has none."""
    file = Path(path) / FRAME.format(0) if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise WanjaxError(f"there is no file {file}")
    try:
        settings = json.loads(_mp4_comment(file) if file.suffix.lower() == ".mp4" else _image_comment(file))
    except (ValueError, OSError):  # not JSON; no image, no video
        settings = None
    if not isinstance(settings, dict):
        raise WanjaxError(f"{file} holds no settings: wanjax did not write it, or something rewrote it")
    return settings


def _suffix(path: str | Path) -> str:
    """What a name asks for: a suffix, or nothing for a folder."""
    return "" if str(path).endswith(("/", os.sep)) else Path(path).suffix.lower()


def _single_frames(chunks: Iterable[Frames]) -> Iterator[Frame]:
    size = None
    for chunk in chunks:
        if chunk.dtype != np.uint8 or chunk.ndim != 4 or chunk.shape[-1] != 3 or size not in (None, chunk.shape[1:]):
            raise WanjaxError(f"a video's frames are uint8 [T, H, W, 3], all alike, not {chunk.dtype} {chunk.shape}")
        for frame in chunk:
            size = frame.shape
            yield frame
    if size is None:
        raise WanjaxError("no frames cannot be written as a video: at least 1 is needed")


def _write_mp4(path: Path, frames: Iterator[Frame], fps: float, comment: str) -> None:
    first = next(frames)
    height, width, _ = first.shape
    if height % 2 or width % 2:
        raise WanjaxError(
            f"frames of {width}x{height} cannot become an mp4, whose width and height are even: "
            ".gif, .webp or a folder of PNG would do"
        )
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-framerate", str(fps), "-i", "pipe:0"]
    codec = ["-c:v", "libx264", "-crf", "17", "-pix_fmt", "yuv420p"]
    # The matrix is set together with its tags: what has no tags is shown by BT.601 here and by BT.709 there.
    colours = ["-vf", "scale=out_color_matrix=bt709:out_range=tv", "-color_range", "tv"]
    colours += ["-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709"]
    container = ["-movflags", "+faststart", "-metadata", f"comment={comment}"]
    with writing(path) as beside:
        pieces = (frame.tobytes() for frame in chain([first], frames))
        run_ffmpeg([*source, *codec, *colours, *container, "-y", str(beside)], pieces)


def _mp4_comment(path: Path) -> str:
    """The comment of an mp4; ffmpeg gives it with backslashes before what is special in its own format."""
    lines = run_ffmpeg(["-i", str(path), "-f", "ffmetadata", "pipe:1"]).decode()
    found = re.search(r"^comment=((?:[^\\\n]|\\.)*)", lines, re.MULTILINE | re.DOTALL)
    return re.sub(r"\\(.)", r"\1", found[1], flags=re.DOTALL) if found else ""


def _write_gif(path: Path, frames: Iterator[Frame], fps: float, comment: str) -> None:
    _write_animation(path, frames, fps, 10, comment=comment)


def _write_webp(path: Path, frames: Iterator[Frame], fps: float, comment: str) -> None:
    exif = Image.Exif()
    exif[DESCRIPTION] = comment
    _write_animation(path, frames, fps, 1, quality=90, exif=exif)


def _write_animation(path: Path, frames: Iterator[Frame], fps: float, unit: int, **options: Any) -> None:
    """An animation by Pillow; times are multiples of `unit` milliseconds, rounded so that no error adds up."""
    first, *rest = [Image.fromarray(frame) for frame in frames]
    ends = [round(1000 * i / fps / unit) * unit for i in range(len(rest) + 2)]
    durations = [b - a for a, b in pairwise(ends)]
    with writing(path) as beside:
        first.save(beside, save_all=True, append_images=rest, duration=durations, loop=0, **options)


def _write_pngs(path: Path, frames: Iterator[Frame], fps: float, comment: str) -> None:
    del fps  # which a folder cannot keep, beside the settings
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", comment)
    beside, old = (path.with_name(f".{os.getpid()}.{what}.{path.name}") for what in ("partial", "old"))
    try:
        beside.mkdir()
        for index, frame in enumerate(frames):
            Image.fromarray(frame).save(beside / FRAME.format(index), pnginfo=text)
        if path.exists():
            path.rename(old)
        beside.rename(path)
    except OSError as error:
        raise WanjaxError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        for folder in (beside, old):
            shutil.rmtree(folder, ignore_errors=True)


WRITERS: dict[str, Callable[[Path, Iterator[Frame], float, str], None]] = {
    ".mp4": _write_mp4,
    ".gif": _write_gif,
    ".webp": _write_webp,
    "": _write_pngs,
}


def _image_comment(path: Path) -> str | bytes:
    with Image.open(path) as image:
        return image.info.get("comment") or image.getexif().get(DESCRIPTION, "")


def save_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Writes generation_config.json, from which the later stages take what they are not told."""
    with writing(folder / CONFIG) as beside:
        beside.write_text(json.dumps(dict(settings), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_settings(folder: Path) -> dict[str, Any]:
    """What generation_config.json holds, under today's names; raises WanjaxError if it is missing or no JSON object."""
    file = folder / CONFIG
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WanjaxError(f"{folder} holds no {CONFIG}, which `wanjax encode` writes: run it first") from error
    except (OSError, ValueError) as error:
        raise WanjaxError(f"{file} cannot be read, {error}: run `wanjax encode` again") from error
    if not isinstance(settings, dict):
        raise WanjaxError(f"{file} is not a JSON object: run `wanjax encode` again")
    return {OLD_NAMES.get(name) or name: value for name, value in settings.items()}


def save_embeddings(folder: Path, embeddings: Embeddings, settings: Mapping[str, Any]) -> None:
    """Writes what was made of the prompts, [1, S, E] each, and of pictures, with the settings that shaped it."""
    of_pictures = any(x is not None for x in embeddings[2:])
    shaping = ("prompt", "negative_prompt", *(PICTURE_SETTINGS if of_pictures else ()))
    record = {name: settings[name] for name in shaping if name in settings}
    _save_stage(folder / EMBEDDINGS, {name: x for name, x in embeddings._asdict().items() if x is not None}, record)


def load_embeddings(folder: Path, settings: Mapping[str, Any]) -> Embeddings:
    """The embeddings of the folder's first stage; `settings` as `load_settings` gives them.

    Raises WanjaxError if they are missing, broken, of another shape than [1, S, E], or of other texts than `settings`
    tell. Warns where they are shorter than Wan's, as they were before wanjax.
    """
    file = _open_stage(folder, EMBEDDINGS, settings, "wanjax encode PROMPT")
    optional = set(Embeddings._field_defaults) - set(file.keys())
    ranks = {"condition": 5, "video_latents": 5}
    names = [name for name in Embeddings._fields if name not in optional]
    embeddings = Embeddings(**{name: _read(file, name, rank=ranks.get(name, 3)) for name in names})
    positive, negative = (embeds.shape for embeds in embeddings[:2])
    if positive != negative:
        raise WanjaxError(f"{file.path} holds embeddings of {positive} and {negative}, where their shapes are equal")
    if positive[1] == OLD_TEXT_LENGTH:
        warnings.warn(
            f"{file.path} has {OLD_TEXT_LENGTH} tokens where Wan reads 512: the video will differ", stacklevel=2
        )
    return embeddings


def save_latents(folder: Path, latents: Float[Array, "B C T H W"], settings: Mapping[str, Any]) -> None:
    """Writes the latents of a denoised video, [1, C, T, h, w], with the settings that shaped them."""
    record = {name: value for name, value in settings.items() if name != "fps"}
    _save_stage(folder / LATENTS, {"latents": latents}, record)


def load_latents(folder: Path, settings: Mapping[str, Any]) -> Float[Array, "B C T H W"]:
    """The latents of the folder's second stage; `settings` as `load_settings` gives them.

    Raises WanjaxError if they are missing, broken, not finite, of another shape than [1, C, T, h, w], or made by other
    settings.
    """
    file = _open_stage(folder, LATENTS, settings, "wanjax denoise")
    latents = _read(file, "latents", rank=5)
    if not jnp.isfinite(latents).all():
        raise WanjaxError(f"{file.path} holds latents that are not finite: `wanjax denoise` has to run again")
    return latents


def load_noise(path: str | Path) -> Float[Array, "B C T H W"]:
    """Initial noise, the tensor `noise` of a safetensors file; raises WanjaxError if there is none."""
    return _read(SafetensorsFile(path), "noise", rank=5)


def _save_stage(path: Path, tensors: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    save_safetensors(path, {name: np.asarray(x) for name, x in tensors.items()}, {"settings": json.dumps(record)})


def _open_stage(folder: Path, name: str, settings: Mapping[str, Any], command: str) -> SafetensorsFile:
    """A stage's file, once it is sure that it and the folder's settings belong together."""
    if not (folder / name).is_file():
        raise WanjaxError(f"{folder} holds no {name}: run `{command} --dir {folder}` first")
    file = SafetensorsFile(folder / name)
    for key, value in _table(file, "settings").items():
        if key in settings and settings[key] != value:
            raise WanjaxError(
                f"{name} and {CONFIG} in {folder} do not belong together: {key} is {_short(value)} in the one and "
                f"{_short(settings[key])} in the other, so `{command} --dir {folder}` has to run again"
            )
    return file


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read(file: SafetensorsFile, name: str, *, rank: int) -> Array:
    """A tensor of one video; in bfloat16 where the file says that it was so before it was stored as float32."""
    if name not in file.keys():  # noqa: SIM118
        raise WanjaxError(f"{file.path} holds no tensor {name!r}, only {', '.join(file.keys()) or 'none at all'}")
    shape, dtype = file.spec(name)
    if len(shape) != rank or shape[0] != 1 or not jnp.issubdtype(dtype, jnp.floating):
        right = f"floats of {rank} axes, of which the first has size 1, are right"
        raise WanjaxError(f"{name!r} in {file.path} is {dtype} {list(shape)}, where {right}")
    was_bfloat16 = "bfloat16" in str(_table(file, "dtype_info").get(name))
    return jnp.asarray(file.read(name), jnp.bfloat16 if was_bfloat16 else None)


def _table(file: SafetensorsFile, name: str) -> dict[str, Any]:
    """The JSON object that the file's metadata has under a name; empty where it has none."""
    try:
        return dict(json.loads(file.metadata.get(name, "{}")))
    except (ValueError, TypeError) as error:
        raise WanjaxError(f"{file.path} has {name!r} in its metadata that is no JSON object: write it again") from error
