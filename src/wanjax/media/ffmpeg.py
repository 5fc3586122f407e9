# SPDX-License-Identifier: Apache-2.0
"""Runs ffmpeg, a program of its own, which reads and writes films."""

import errno
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from wanjax.errors import FULL, WanjaxError
from wanjax.signals import cleanup_on_exit

FILMS = "mov,matroska,avi,flv,asf,mpeg,mpegts,mpegvideo,m4v,h264,hevc,av1,obu,ivf,ogg,mxf,nut,yuv4mpegpipe,gif,apng"
"""The formats of films that are read. Others, such as playlists, may name further files and addresses to read."""
OF_DISKS = (*FULL, errno.EROFS, errno.EACCES, errno.EMFILE, errno.EIO)
"""Errors that ffmpeg tells in the system's words."""

ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}  # ffmpeg's own decoders of these formats drop transparency
HIGH_RANGE = ("smpte2084", "arib-std-b67")  # PQ and HLG
WHITE, PEAK = 203, 1000  # cd/m² of the white of text and paper (BT.2408), and of the brightest light that is kept apart
KNEE = 0.8  # of that white, in linear light
WIDE = ("bt2020", "smpte431", "smpte432")  # primaries of BT.2020 and of P3
TONES = ("bt709", "smpte170m", "iec61966-2-1", "bt2020-10", "bt2020-12", "linear")  # transfers that zscale knows
FLOATS = "format=gbrpf32le|gbrapf32le"
WHOLE_FRAMES = "bwdif=mode=send_frame:parity=auto:deint=all"
PIECE = 2**20  # bytes of output that are taken at a time


def reading(source: str | Path) -> list[str]:
    """Return ffmpeg's arguments to read this file and no other."""
    return ["-protocol_whitelist", "file", "-format_whitelist", FILMS, "-i", f"file:{source}"]


class Film(NamedTuple):
    """A film's stream of pictures, as ffmpeg describes it.

    `decoder` holds what ffmpeg needs to be told to decode it, and `fields` the filter that makes whole frames of
    interlaced ones. `colours` is the text that names matrix, primaries and transfer, `pixels` are those of a frame,
    `slowest` is the least of the numbers of frames a second, 0 where none is known, and `length` are the seconds.
    """

    stream: str
    codec: str
    container: str
    decoder: list[str]
    fields: list[str]
    colours: str
    pixels: int
    slowest: float
    length: float | None

    def tones(self, values: bool) -> list[str]:
        """Return filters that convert colours to BT.709; none for its primaries.

        Light of a high dynamic range (PQ, HLG): the white of BT.2408 becomes white, tones up to `KNEE` of it stay as
        they are, and brighter ones are compressed. Wide primaries of a standard range are converted in linear light,
        but for a film of `values`, such as a mask.
        """
        match = re.search(r"\b([\w-]+)/([\w-]+)/([\w-]+)[,)]", self.colours)
        same = re.search(r"[(,] ?(bt2020nc|bt2020)[,)]", self.colours)  # which stands alone where all are equal
        matrix, primaries, transfer = match.groups() if match else (same[1],) * 3 if same else ("",) * 3
        if transfer in HIGH_RANGE:
            unknown = [way for way, name in (("min=bt2020nc", matrix), ("pin=bt2020", primaries)) if name == "unknown"]
            linear = ":".join(["t=linear", f"npl={WHITE}", *unknown])
            tonemap = f"tonemap=mobius:param={KNEE}:peak={PEAK / WHITE:.3f}:desat=0"
            return [f"zscale={linear}", FLOATS, "zscale=p=bt709", tonemap, "zscale=t=bt709"]
        if values or primaries not in WIDE:
            return []
        assumed = "bt2020nc" if primaries == "bt2020" else "bt709"
        unknown = [f"min={assumed}"] if matrix in ("unknown", "bt2020") else []
        tone = transfer if transfer in TONES else "bt709"
        linear = ":".join(["t=linear", f"tin={tone}", *unknown])
        return [f"zscale={linear}", FLOATS, "zscale=p=bt709", f"zscale=t={tone}"]


def probe(source: str | Path) -> Film:
    """Describe a film from ffmpeg's messages; raise OSError if it is unreadable or has no pictures."""
    done = run(["-loglevel", "info", *reading(source), "-f", "ffmetadata", "pipe:1"])
    if done.error:
        raise done.error
    length = re.search(r"^  Duration: (\d+):(\d+):([\d.]+)", done.messages, re.MULTILINE)
    container = re.search(r"^Input #0, ([^,]+),", done.messages, re.MULTILINE)
    seconds = sum(float(x) * unit for x, unit in zip(length.groups(), (3600, 60, 1), strict=True)) if length else None
    for stream in re.split(r"^ +(?=Stream #)", done.messages, flags=re.MULTILINE):
        video = re.match(r"Stream #(0:\d+).*?: Video: (\w+)(.*)", stream)
        if video and "(attached pic)" not in video[3]:
            alpha = re.search(r"^ *alpha_mode *: 1$", stream, re.MULTILINE | re.IGNORECASE)
            sides = re.search(r", (\d+)x(\d+)[, ]", video[3])
            return Film(
                stream=video[1],
                codec=video[2],
                container=container[1] if container else "",
                decoder=["-c:v", ALPHA_DECODERS[video[2]]] if alpha and video[2] in ALPHA_DECODERS else [],
                fields=[WHOLE_FRAMES] if re.search(r"\b(top|bottom) (coded )?first\b", video[3]) else [],
                colours=video[3],
                pixels=int(sides[1]) * int(sides[2]) if sides else 0,
                slowest=min(map(float, re.findall(r", ([\d.]+) (?:fps|tbr)\b", video[3])), default=0),
                length=seconds,
            )
    raise OSError("it holds no pictures")


class FfmpegResult(NamedTuple):
    """The output and messages of ffmpeg, and the error of its last message if it failed."""

    output: bytes
    messages: str
    error: OSError | None


def run_ffmpeg(arguments: list[str], pieces: Iterable[bytes] = ()) -> bytes:
    """Feed the pieces to ffmpeg and return its output; raise OSError with its last message if it fails."""
    done = run(["-loglevel", "error", *arguments], pieces)
    if done.error:
        raise done.error
    return done.output


def run(
    arguments: list[str], pieces: Iterable[bytes] = (), take: Callable[[bytes], object] | None = None
) -> FfmpegResult:
    """Feed the pieces to ffmpeg, and pass its output to `take`, a piece at a time, or return it whole."""
    command = [_ffmpeg(), "-hide_banner", *arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
        # In a session of its own it does not receive Ctrl-C; the `finally` below stops it.
        output = subprocess.PIPE if take else out
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=log, start_new_session=True)
        assert process.stdin is not None
        try:
            with cleanup_on_exit(process.kill):
                for piece in pieces:
                    process.stdin.write(piece)
                process.stdin.close()
                if take and process.stdout is not None:
                    while piece := process.stdout.read(PIECE):
                        take(piece)
                process.wait()
        except BrokenPipeError:  # it has failed, and said why
            process.wait()
        finally:
            process.kill()
            with suppress(BrokenPipeError):  # raised by flushing the buffer
                process.stdin.close()
            if process.stdout is not None:
                process.stdout.close()
            process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace")
        out.seek(0)
        return FfmpegResult(b"" if process.returncode else out.read(), said, _error(process.returncode, said))


def _error(status: int, said: str) -> OSError | None:
    """Return the error of ffmpeg's last message, without the names of its module and level.

    Where a disk is full from the first byte on, its status alone tells at last: a negative number of the system.
    """
    if not status:
        return None
    lines = said.strip().splitlines()
    last = re.sub(r"^(\[[^]]*\] )+", "", lines[-1]) if lines else ""
    full = next((n for n in FULL if status == 256 - n), None)
    if number := next((n for n in OF_DISKS if last.endswith(os.strerror(n))), full):
        return OSError(number, os.strerror(number))
    return OSError(f"ffmpeg said {last!r}" if last else f"ffmpeg ended with {status}")


def _ffmpeg() -> str:
    import imageio_ffmpeg  # here: only films need it

    try:
        return imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        why = "there is no ffmpeg: `pip install imageio-ffmpeg` brings one, or IMAGEIO_FFMPEG_EXE can name one"
        raise WanjaxError(why) from error
