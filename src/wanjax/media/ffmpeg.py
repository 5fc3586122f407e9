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

from wanjax.checkpoints.files import abandoned_by
from wanjax.errors import WanjaxError

FILMS = "mov,matroska,avi,flv,asf,mpeg,mpegts,mpegvideo,m4v,h264,hevc,av1,obu,ivf,ogg,mxf,nut,yuv4mpegpipe,gif,apng"
"""The formats of films that are read. Others, such as playlists, may name further files and addresses to read."""
OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EMFILE, errno.EIO)
"""Errors that ffmpeg tells in the system's words."""


def reading(source: str | Path) -> list[str]:
    """Returns the arguments by which ffmpeg reads this file, and no other."""
    return ["-protocol_whitelist", "file", "-format_whitelist", FILMS, "-i", f"file:{source}"]


def run_ffmpeg(arguments: list[str], pieces: Iterable[bytes] = ()) -> bytes:
    """Feeds the pieces to ffmpeg and returns its output; raises OSError with its last message if it fails."""
    command = [_ffmpeg(), "-hide_banner", "-loglevel", "error", *arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said:
        # In a session of its own it does not receive Ctrl-C; the `finally` below stops it.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=said, start_new_session=True)
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
        if process.returncode:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            last = re.sub(r"^\[.*?\] ", "", lines[-1]) if lines else ""  # without the name and address of its module
            if number := next((n for n in OF_DISKS if last.endswith(os.strerror(n))), None):
                raise OSError(number, os.strerror(number))
            raise OSError(f"ffmpeg said {last!r}" if last else f"ffmpeg ended with {process.returncode}")
        out.seek(0)
        return out.read()


def _ffmpeg() -> str:
    import imageio_ffmpeg  # here: only films need it

    try:
        return imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        why = "there is no ffmpeg: `pip install imageio-ffmpeg` brings one, or IMAGEIO_FFMPEG_EXE can name one"
        raise WanjaxError(why) from error
