# SPDX-License-Identifier: Apache-2.0
"""Runs ffmpeg, a program of its own, which reads and writes films."""

import errno
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from wanjax.errors import WanjaxError
from wanjax.signals import abandoned_by

FILMS = "mov,matroska,avi,flv,asf,mpeg,mpegts,mpegvideo,m4v,h264,hevc,av1,obu,ivf,ogg,mxf,nut,yuv4mpegpipe,gif,apng"
"""The formats of films that are read. Others, such as playlists, may name further files and addresses to read."""
OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EMFILE, errno.EIO)
"""Errors that ffmpeg tells in the system's words."""

ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}  # ffmpeg's own decoders of these formats drop transparency
HIGH_RANGE = ("smpte2084", "arib-std-b67")  # PQ and HLG
WHITE, PEAK = 203, 1000  # cd/m² of the white of text and paper (BT.2408), and of the brightest light that is kept apart
KNEE = 0.8  # of that white, in linear light


def reading(source: str | Path) -> list[str]:
    """Returns the arguments by which ffmpeg reads this file, and no other."""
    return ["-protocol_whitelist", "file", "-format_whitelist", FILMS, "-i", f"file:{source}"]


class Film(NamedTuple):
    """A film's stream of pictures, and what ffmpeg has to be told of it: its decoder, and filters of its tones."""

    stream: str
    decoder: list[str]
    tones: list[str]


def described(source: str | Path) -> Film:
    """Describes a film from what ffmpeg prints of it; raises OSError where it cannot be read, or has no pictures."""
    said = _run(["-loglevel", "info", *reading(source), "-f", "ffmetadata", "pipe:1"])[1]
    for stream in re.split(r"^  (?=Stream #)", said, flags=re.MULTILINE):
        found = re.match(r"Stream #(0:\d+).*?: Video: (\w+)(.*)", stream)
        if found and "(attached pic)" not in found[3]:
            alpha = re.search(r"^ *alpha_mode *: 1$", stream, re.MULTILINE | re.IGNORECASE)
            decoder = ["-c:v", ALPHA_DECODERS[found[2]]] if alpha and found[2] in ALPHA_DECODERS else []
            return Film(found[1], decoder, _tones(found[3]))
    raise OSError("it holds no pictures")


def _tones(described: str) -> list[str]:
    """Returns filters by which a film of high dynamic range becomes one of BT.709, none for another film.

    The white of BT.2408 becomes white. Tones up to `KNEE` of it stay as they are, and brighter ones are compressed.
    """
    if not (found := re.search(rf"(\w+)/(\w+)/({'|'.join(HIGH_RANGE)})\b", described)):
        return []
    unknown = [way for way, name in (("min=bt2020nc", found[1]), ("pin=bt2020", found[2])) if name == "unknown"]
    linear = ":".join(["t=linear", f"npl={WHITE}", *unknown])
    tonemap = f"tonemap=mobius:param={KNEE}:peak={PEAK / WHITE:.3f}:desat=0"
    return [f"zscale={linear}", "format=gbrpf32le|gbrapf32le", "zscale=p=bt709", tonemap, "zscale=t=bt709"]


def run_ffmpeg(arguments: list[str], pieces: Iterable[bytes] = ()) -> bytes:
    """Feeds the pieces to ffmpeg and returns its output; raises OSError with its last message if it fails."""
    return _run(["-loglevel", "error", *arguments], pieces)[0]


def _run(arguments: list[str], pieces: Iterable[bytes] = ()) -> tuple[bytes, str]:
    """Returns what ffmpeg wrote, and what it said; raises as `run_ffmpeg` does."""
    command = [_ffmpeg(), "-hide_banner", *arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as told:
        # In a session of its own it does not receive Ctrl-C; the `finally` below stops it.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=told, start_new_session=True)
        assert process.stdin is not None
        try:
            with abandoned_by(process.kill):
                for piece in pieces:
                    process.stdin.write(piece)
                process.stdin.close()
                process.wait()
        except BrokenPipeError:  # it has failed, and said why
            process.wait()
        finally:
            process.kill()
            with suppress(BrokenPipeError):  # raised by flushing the buffer
                process.stdin.close()
            process.wait()
        told.seek(0)
        said = told.read().decode(errors="replace")
        if process.returncode:
            lines = said.strip().splitlines()
            last = re.sub(r"^\[.*?\] ", "", lines[-1]) if lines else ""  # without the name and address of its module
            if number := next((n for n in OF_DISKS if last.endswith(os.strerror(n))), None):
                raise OSError(number, os.strerror(number))
            raise OSError(f"ffmpeg said {last!r}" if last else f"ffmpeg ended with {process.returncode}")
        out.seek(0)
        return out.read(), said


def _ffmpeg() -> str:
    import imageio_ffmpeg  # here: only films need it

    try:
        return imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        why = "there is no ffmpeg: `pip install imageio-ffmpeg` brings one, or IMAGEIO_FFMPEG_EXE can name one"
        raise WanjaxError(why) from error
