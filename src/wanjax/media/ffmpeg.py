# SPDX-License-Identifier: Apache-2.0
"""Run ffmpeg, an external program, to read and write video files."""

import errno
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from wanjax.errors import DISK_FULL_ERRNOS, WanjaxError
from wanjax.signals import cleanup_on_exit

DEMUXERS = "mov,matroska,avi,flv,asf,mpeg,mpegts,mpegvideo,m4v,h264,hevc,av1,obu,ivf,ogg,mxf,nut,yuv4mpegpipe,gif,apng"
"""The formats that ffmpeg may read. Other formats, such as playlists, could make ffmpeg read other files and URLs."""
DISK_ERRORS = (*DISK_FULL_ERRNOS, errno.EROFS, errno.EACCES, errno.EMFILE, errno.EIO)
"""Errors that ffmpeg reports with the operating system's text."""

GENERAL_MESSAGE = re.compile(
    r"Conversion failed!|Error (opening|while|marking|submitting|sending)|Task finished|Terminating thread|\s*$|"
    r"Nothing was written|Could not open encoder|Cannot determine format|\s*Last message repeated|(frame|size)="
)
"""Matches messages of ffmpeg that follow from an earlier message, which has the cause of a failure."""
ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}  # ffmpeg's own decoders of these formats drop transparency
HDR_TRANSFERS = ("smpte2084", "arib-std-b67")  # transfer functions PQ and HLG
HDR_WHITE, HDR_PEAK = (
    203,
    1000,
)  # cd/m² of diffuse white (BT.2408), and of the brightest light that tone mapping preserves
HDR_KNEE = 0.8  # tones above this fraction of diffuse white, in linear light, are compressed
WIDE_PRIMARIES = ("bt2020", "smpte431", "smpte432")  # primaries BT.2020 and P3
# transfer functions that zscale supports
SDR_TRANSFERS = ("bt709", "smpte170m", "iec61966-2-1", "bt2020-10", "bt2020-12", "linear")
FLOAT_FORMAT = "format=gbrpf32le|gbrapf32le"
DEINTERLACE = "bwdif=mode=send_frame:parity=auto:deint=all"
NO_VIDEO = "it has no video stream"
METADATA_ENTRY = re.compile(r"^([^=\\\n;]+)=((?:[^\\\n]|\\.)*)", re.MULTILINE | re.DOTALL)
"""A name and a value as ffmpeg writes metadata; a backslash is before each =, ;, #, \\ and line end."""
READ_BYTES = 2**20  # bytes of output that are read at a time


def input_arguments(source: str | Path) -> list[str]:
    """Return ffmpeg's arguments to read this file and no other file or URL."""
    return ["-protocol_whitelist", "file", "-format_whitelist", DEMUXERS, "-i", f"file:{source}"]


class VideoStream(NamedTuple):
    """The video stream of a file, as ffmpeg describes it.

    Args:
        stream: ffmpeg's specifier of the stream, such as 0:1.
        codec: ffmpeg's name of the codec.
        container: ffmpeg's name of the file's format.
        decoder: Arguments that choose the decoder; empty for ffmpeg's default.
        deinterlace: The filter that deinterlaces the video; empty for a progressive video.
        colours: The part of ffmpeg's description that names matrix, primaries and transfer.
        width: Pixels of a row; 0 if ffmpeg prints no size.
        height: Pixels of a column; 0 if ffmpeg prints no size.
        min_fps: The lowest of the frame rates that ffmpeg prints; 0 if ffmpeg prints none.
        duration: The duration in seconds; None if ffmpeg prints no duration.
    """

    stream: str
    codec: str
    container: str
    decoder: list[str]
    deinterlace: list[str]
    colours: str
    width: int
    height: int
    min_fps: float
    duration: float | None

    @property
    def pixels(self) -> int:
        """The pixels of a frame."""
        return self.width * self.height

    def colour_filters(self, is_non_colour: bool) -> list[str]:
        """Return filters that convert colours to BT.709. If the stream already has the primaries of BT.709, there are
        no filters.

        In high dynamic range (PQ, HLG), the diffuse white of BT.2408 becomes white. Tones up to the fraction `HDR_KNEE`
        of diffuse white do not change, and brighter tones are compressed. Standard dynamic range with wide primaries is
        converted in linear light.

        Args:
            is_non_colour: Whether pixels are values, such as a mask, not colours. Their primaries are not converted.
        """
        match = re.search(r"\b([\w-]+)/([\w-]+)/([\w-]+)[,)]", self.colours)
        # Ffmpeg prints one name if all three are equal
        single = re.search(r"[(,] ?(bt2020nc|bt2020)[,)]", self.colours)
        matrix, primaries, transfer = match.groups() if match else (single[1],) * 3 if single else ("",) * 3
        if transfer in HDR_TRANSFERS:
            unknown = [
                option for option, name in (("min=bt2020nc", matrix), ("pin=bt2020", primaries)) if name == "unknown"
            ]
            linear = ":".join(["t=linear", f"npl={HDR_WHITE}", *unknown])
            tonemap = f"tonemap=mobius:param={HDR_KNEE}:peak={HDR_PEAK / HDR_WHITE:.3f}:desat=0"
            return [f"zscale={linear}", FLOAT_FORMAT, "zscale=p=bt709", tonemap, "zscale=t=bt709"]
        if is_non_colour or primaries not in WIDE_PRIMARIES:
            return []
        assumed_matrix = "bt2020nc" if primaries == "bt2020" else "bt709"
        unknown = [f"min={assumed_matrix}"] if matrix in ("unknown", "bt2020") else []
        transfer_in = transfer if transfer in SDR_TRANSFERS else "bt709"
        linear = ":".join(["t=linear", f"tin={transfer_in}", *unknown])
        return [f"zscale={linear}", FLOAT_FORMAT, "zscale=p=bt709", f"zscale=t={transfer_in}"]


def probe(source: str | Path) -> VideoStream:
    """Describe a file's video stream from ffmpeg's messages. Raises OSError if the file is unreadable or has no video
    stream."""
    result = run_with_messages(["-loglevel", "info", *input_arguments(source), "-f", "ffmetadata", "pipe:1"])
    if result.error:
        raise result.error
    duration = re.search(r"^  Duration: (\d+):(\d+):([\d.]+)", result.messages, re.MULTILINE)
    container = re.search(r"^Input #0, ([^,]+),", result.messages, re.MULTILINE)
    seconds = (
        sum(float(x) * unit for x, unit in zip(duration.groups(), (3600, 60, 1), strict=True)) if duration else None
    )
    for stream in re.split(r"^ +(?=Stream #)", result.messages, flags=re.MULTILINE):
        video = re.match(r"Stream #(0:\d+).*?: Video: (\w+)(.*)", stream)
        if video and "(attached pic)" not in video[3]:
            alpha = re.search(r"^ *alpha_mode *: 1$", stream, re.MULTILINE | re.IGNORECASE)
            size = re.search(r", (\d+)x(\d+)[, ]", video[3])
            return VideoStream(
                stream=video[1],
                codec=video[2],
                container=container[1] if container else "",
                decoder=["-c:v", ALPHA_DECODERS[video[2]]] if alpha and video[2] in ALPHA_DECODERS else [],
                deinterlace=[DEINTERLACE] if re.search(r"\b(top|bottom) (coded )?first\b", video[3]) else [],
                colours=video[3],
                width=int(size[1]) if size else 0,
                height=int(size[2]) if size else 0,
                min_fps=min(map(float, re.findall(r", ([\d.]+) (?:fps|tbr)\b", video[3])), default=0),
                duration=seconds,
            )
    raise OSError(NO_VIDEO)


def container_tags(source: str | Path) -> dict[str, str]:
    """Return the metadata of a video file by lower-case names. Raises OSError if the file is unreadable."""
    text = run_ffmpeg([*input_arguments(source), "-f", "ffmetadata", "pipe:1"]).decode(errors="replace")
    # the first entry with a name belongs to the file, and later entries belong to its streams
    entries = reversed(METADATA_ENTRY.findall(text))
    return {name.lower(): re.sub(r"\\(.)", r"\1", value, flags=re.DOTALL) for name, value in entries}


class FfmpegResult(NamedTuple):
    """The output and messages of ffmpeg, and the error of its last message if it failed."""

    output: bytes
    messages: str
    error: OSError | None


def run_ffmpeg(arguments: list[str], pieces: Iterable[bytes] = ()) -> bytes:
    """Write the pieces to ffmpeg's input, and return its output. If ffmpeg fails, raise OSError with its last
    message."""
    result = run_with_messages(["-loglevel", "error", *arguments], pieces)
    if result.error:
        raise result.error
    return result.output


def run_with_messages(
    arguments: list[str], pieces: Iterable[bytes] = (), consume: Callable[[bytes], object] | None = None
) -> FfmpegResult:
    """Write the pieces to ffmpeg's input. Pass ffmpeg's output to `consume` piece by piece, or return the whole
    output."""
    command = [_ffmpeg_path(), "-hide_banner", *arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
        # In its own session, ffmpeg does not receive Ctrl-C; the `finally` below stops it.
        output = subprocess.PIPE if consume else out
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=log, start_new_session=True)
        assert process.stdin is not None
        try:
            with cleanup_on_exit(process.kill):
                for piece in pieces:
                    process.stdin.write(piece)
                process.stdin.close()
                if consume and process.stdout is not None:
                    while piece := process.stdout.read(READ_BYTES):
                        consume(piece)
                process.wait()
        except BrokenPipeError:  # ffmpeg failed; its messages say why
            process.wait()
        finally:
            process.kill()
            with suppress(BrokenPipeError):  # raised by flushing the buffer
                process.stdin.close()
            if process.stdout is not None:
                process.stdout.close()
            process.wait()
        log.seek(0)
        messages = log.read().decode(errors="replace")
        out.seek(0)
        return FfmpegResult(
            b"" if process.returncode else out.read(), messages, _ffmpeg_error(process.returncode, messages)
        )


def _ffmpeg_error(status: int, messages: str) -> OSError | None:
    """Return an error with the last message of ffmpeg that has the cause of the failure. Return None for status 0.

    If the disk is full from the first byte on, ffmpeg prints no message. The exit status is then 256 minus the system's
    error number.
    """
    if not status:
        return None
    lines = messages.strip().splitlines()
    last = _without_prefix(lines[-1]) if lines else ""
    status_number = next((number for number in DISK_FULL_ERRNOS if status == 256 - number), None)
    if number := next((number for number in DISK_ERRORS if last.endswith(os.strerror(number))), status_number):
        return OSError(number, os.strerror(number))
    line = next((text for text in map(_without_prefix, reversed(lines)) if not GENERAL_MESSAGE.match(text)), last)
    return OSError(f"ffmpeg failed with {line!r}" if line else f"ffmpeg failed with exit status {status}")


def _without_prefix(line: str) -> str:
    """Return a line of ffmpeg's log without the names of its module and level."""
    return re.sub(r"^(\[[^]]*\] )+", "", line)


def _ffmpeg_path() -> str:
    import imageio_ffmpeg  # imported late, because only video files need ffmpeg

    try:
        return imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        message = "ffmpeg is missing: run `pip install imageio-ffmpeg`, or set IMAGEIO_FFMPEG_EXE to its path"
        raise WanjaxError(message) from error
