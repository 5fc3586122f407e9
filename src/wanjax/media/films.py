# SPDX-License-Identifier: Apache-2.0
"""Frames of a film, by ffmpeg. A damaged film is refused, since ffmpeg itself skips undecodable parts.

A film is decoded for as long as it is used and `BEYOND` further. It is damaged where a decoder or the container says
so, and where the data of a frame hold more zeros than its codec can write, which is what a hole in a file looks like.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Generator, Sequence
from fractions import Fraction
from itertools import accumulate, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from wanjax.errors import WanjaxError
from wanjax.media.bounds import BOUNDS
from wanjax.media.damage import Zeros, ends_within
from wanjax.media.ffmpeg import Film, probe, reading, run
from wanjax.stores.paths import missing_file
from wanjax.stores.temporary import temp_dir

BEYOND = 10  # seconds of a film that are looked at after what is used of it
DECODED_TIMES = 4  # as many pixels are decoded to look for damage as all frames may have that are read
TICK = 90_000  # of a second: the unit in which times are compared
ROUNDED = 0.0011  # seconds by which a container may round the time of a frame
EARLIER = 0.0001  # seconds before its time from which a frame counts as shown
WITHOUT_ZEROS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mpeg1video", "mpeg2video", "flv1", "wmv1", "wmv2")
"""Codecs whose data are dense. Others, such as uncompressed frames and JPEG, write many zeros for what is black."""
TELLING = re.compile(
    r"File ended prematurely|invalid as first byte of an EBML|partial file|CRC mismatch|exceeds containing|"
    r"corrupt input packet|corrupt decoded frame|Error during demuxing|Error submitting packet|Decoding error"
)
"""What ffmpeg says of damage, also where it goes on and ends well. Other messages are common with good films."""
PAM = re.compile(rb"P7\nWIDTH (\d+)\nHEIGHT (\d+)\nDEPTH ([34])\nMAXVAL 255\nTUPLTYPE \w+\nENDHDR\n")
HEADER = 7  # lines of it, before the pixels of each frame
LEVEL = "repeat+level+warning"  # of ffmpeg's messages
CORRUPT, DECODED = re.compile("corrupt decoded frame|slice CRC mismatch"), "decoder -> "  # in its messages on a frame
ENTRY = re.compile(r"0, +-?\d+, +(-?\d+), +\d+, +(\d+), 0x\w+(?:, F=0x(\w+))?")  # a line of `framecrc`
UNKNOWN, DAMAGED = -(2**63), 2  # a time and a flag in it
NULL = ("-c:v", "wrapped_avframe")  # frames that are decoded, and of which nothing is written but their times

Frame = UInt8[np.ndarray, "H W C"]


def read_film(source: str | Path, frames: int, fps: int | float, *, values: bool) -> Generator[Frame]:
    """Yield frames in RGB or RGBA: the frame at each time k/fps, up to that of the last frame.

    A film of fewer frames a second keeps its own. Frames are turned as the file says, and have square pixels.

    Args:
        source: The path of the film.
        frames: The most frames that are read.
        fps: Frames a second.
        values: Whether the film holds values, such as a mask, whose primaries are not converted to those of sRGB.

    Raises:
        WanjaxError: The film cannot be read, is too large or is damaged, and at which frame.
    """
    if not Path(source).is_file():
        raise WanjaxError(missing_file(source))
    with temp_dir() as folder:
        try:
            film = probe(source)
            most = max(1, DECODED_TIMES * BOUNDS.together // max(1, film.pixels))
            decoded, times, rate = _decode(source, film, frames, fps, most, values, folder)
        except OSError as error:
            raise WanjaxError(f"{source} cannot be read as a video: {error}") from error
        shown, complete = 0 if not times else frames, 0 < len(times) < most
        if complete:  # they are all
            last, step = times[-1] - times[0], max(1 / fps, 1 / rate)
            even = round(last * rate) / rate
            last = even if abs(last - even) < ROUNDED else last
            shown = math.floor((last + (EARLIER if rate > fps else step / 2)) / step) + 1
        count = min(shown, frames)
        yield from islice(_frames(decoded, source, count if complete else 1), count)


def _frames(decoded: Path, source: str | Path, count: int) -> Generator[Frame]:
    """Yield the frames of a file of PAM, `count` or more.

    Raises WanjaxError for a frame that is too large, and for too many, before they are read.
    """
    together = 0
    with decoded.open("rb") as file:
        while header := PAM.match(b"".join(islice(file, HEADER))):
            width, height, channels = map(int, header.groups())
            together += width * height
            count = max(0, count - 1)
            allowed = width * height <= BOUNDS.pixels and together + count * width * height <= BOUNDS.together
            data = file.read(width * height * channels) if allowed else b""
            if len(data) < width * height * channels:
                bounds = f"{BOUNDS.pixels:,}, and {BOUNDS.together:,} in all frames,"
                raise WanjaxError(f"{source} has frames of {width}x{height} pixels where {bounds} are allowed at most")
            yield np.frombuffer(data, np.uint8).reshape(height, width, channels)


def _decode(
    source: str | Path, film: Film, frames: int, fps: int | float, most: int, values: bool, folder: Path
) -> tuple[Path, list[float], float]:
    """Write frames as PAM, one or two too many, into a folder.

    Returns their file, the times of all that were decoded, and their number a second.

    Raises OSError where nothing can be read, and WanjaxError where the film is damaged.
    """
    # Pixels become square by their longer side, in bounds: the caller refuses a frame that is larger than allowed.
    width, height = (
        rf"if(gt({ratio}\,1)\,min(trunc({side}*{ratio}+0.5)\,trunc({BOUNDS.pixels}/{other})+2)\,{side})"
        for side, other, ratio in (("iw", "ih", "sar"), ("ih", "iw", "1/sar"))
    )
    square = f"scale=w={width}:h={height}:flags=bicubic+accurate_rnd+full_chroma_int"
    # Times that are even but for rounding are made so, so that all containers tell the same. A frame is shown from its
    # time on, or where all are taken from half a frame earlier. The last one is repeated, since some containers do not
    # tell for how long it is shown.
    since, even = "(PTS-STARTPTS)*TB", r"round((PTS-STARTPTS)*TB*FR)/FR"
    time = rf"if(lt(abs({since}-{even})\,{ROUNDED})\,{even}\,{since})"
    thinned = [
        f"settb=1/{TICK}",
        rf"setpts=({time}-if(gt(FR\,{fps})\,{EARLIER}\,0.5/FR))/TB",
        "tpad=stop=2:stop_mode=clone",
        rf"fps=min(source_fps\,{fps}):round=up",
    ]
    decoded, times, first = folder / "decoded", folder / "times", folder / "first"
    filters = [*film.fields, *thinned, *film.tones(values), square, "format=rgb24|rgba"]
    seconds = f"{frames / min(fps, film.slowest or fps) + BEYOND:.3f}"
    read = ["-max_pixels", str(2 * BOUNDS.pixels + 2**20), *film.decoder, *reading(source)]  # a decoder counts edges
    pictures = [
        *("-map", film.stream, "-vf", ",".join(filters), "-frames:v", str(frames), "-fs", str(4 * BOUNDS.together)),
        *("-f", "image2pipe", "-c:v", "pam", str(decoded)),
    ]
    one = ["-map", film.stream, "-frames:v", "1", *NULL, "-f", "framecrc", str(first)]
    done = run(["-loglevel", LEVEL, "-xerror", *read, *pictures, *_timed(film, seconds, most, times), *one])
    if done.error and done.error.errno:  # of the disk
        raise done.error
    packets = _packets(source, film, seconds, folder)
    faults = bool(done.error) or ends_within(Path(source), film.container) or TELLING.search(done.messages) is not None
    if faults or any(packet.damaged for packet in packets):
        if damage := _damage(source, film, read, seconds, most, packets, folder):
            raise WanjaxError(damage)
        if done.error:
            raise done.error
    return decoded, _times(times), float(1 / _unit(first))


def _timed(film: Film, seconds: str, most: int, file: Path) -> list[str]:
    """Return ffmpeg's arguments to decode at most so much of a film and to write the times of its frames."""
    rising = f"settb=1/{TICK},setpts=if(isnan(PREV_OUTPTS)\\,PTS\\,max(PTS\\,PREV_OUTPTS+1))"  # as `framecrc` insists
    exact = ["-vf", rising, "-fps_mode", "passthrough", "-enc_time_base", f"1/{TICK}"]
    return ["-map", film.stream, "-t", seconds, "-frames:v", str(most), *NULL, *exact, "-f", "framecrc", str(file)]


class Entry(NamedTuple):
    """A frame or a packet: its time in seconds, if it has one, its bytes, and whether these are damaged."""

    time: float | None
    size: int
    damaged: bool


def _entries(file: Path) -> list[Entry]:
    """Return the lines of a file that ffmpeg wrote by `framecrc`."""
    unit = _unit(file)
    entries: list[Entry] = []
    for line in file.read_text().splitlines() if file.is_file() else ():
        if row := ENTRY.match(line):
            time, size, flags = int(row[1]), int(row[2]), int(row[3] or "0", 16)
            entries.append(Entry(None if time == UNKNOWN else float(time * unit), size, bool(flags & DAMAGED)))
    return entries


def _times(file: Path) -> list[float]:
    """Return the times of such a file in order."""
    return sorted(entry.time for entry in _entries(file) if entry.time is not None)


def _unit(file: Path) -> Fraction:
    """Return the unit of time of a `framecrc` file, in seconds."""
    unit = re.search(r"^#tb 0: (\d+)/(\d+)$", file.read_text(), re.MULTILINE) if file.is_file() else None
    return Fraction(int(unit[1]), int(unit[2])) if unit and int(unit[1]) and int(unit[2]) else Fraction(1, TICK)


def _packets(source: str | Path, film: Film, seconds: str, folder: Path) -> list[Entry]:
    """Return the packets of a film in the order of the file, without decoding them."""
    file, zeros = folder / "packets", Zeros(film.pixels)
    copied = ["-map", film.stream, "-t", seconds, "-c", "copy", "-copyinkf"]
    run(
        ["-loglevel", "error", *reading(source), *copied, "-f", "data", "pipe:1", *copied, "-f", "framecrc", str(file)],
        take=zeros.take if film.codec in WITHOUT_ZEROS else lambda piece: None,
    )
    entries = _entries(file)
    ends = list(accumulate(entry.size for entry in entries))
    holes = zeros.within(ends)
    return [entry._replace(damaged=entry.damaged or index in holes) for index, entry in enumerate(entries)]


def _damage(
    source: str | Path, film: Film, read: Sequence[str], seconds: str, most: int, packets: Sequence[Entry], folder: Path
) -> str | None:
    """Return a sentence that says at which frame a film breaks; None for a film that can be decoded.

    Raises OSError where there is no frame before.
    """
    file = folder / "again"
    # In one thread, so that what ffmpeg says of a frame stands before the line that tells the frame's time.
    done = run(
        ["-loglevel", "repeat+level+info", "-threads", "1", "-debug_ts", *read, *_timed(film, seconds, most, file)]
    )
    times = _times(file)
    ended = 0 < len(times) < most and times[-1] + 1 < float(seconds) and ends_within(Path(source), film.container)
    if not (done.error or ended or TELLING.search(done.messages) or any(packet.damaged for packet in packets)):
        return None
    if not times:
        raise done.error or OSError("it holds no frame that can be decoded")
    corrupt = CORRUPT.search(done.messages)
    breaks = (
        [done.messages.count(DECODED, 0, corrupt.start())] if corrupt else []
    )  # of each fault, the frames before it
    breaks += [len(times) - 1] if ended else []
    breaks += [_before(times, packet.time, index) for index, packet in enumerate(packets) if packet.damaged]
    frames = min(breaks, default=_first_gap(times, packets, film.length))
    when = f"{times[min(frames, len(times) - 1)]:.1f}" + (f" of {film.length:.1f}" if film.length else "")
    return (
        f"{source} breaks at frame {frames + 1} ({when} s), where the file is damaged or ends too early: "
        "a whole copy is needed, or one that is cut before that frame and encoded again"
    )


def _before(times: Sequence[float], time: float | None, index: int) -> int:
    """Return the number of frames before a packet, which is the `index`-th of the file."""
    return index if time is None else bisect_left(times, time - ROUNDED)


def _first_gap(times: Sequence[float], packets: Sequence[Entry], length: float | None) -> int:
    """Return the number of frames before the first packet of which no frame was made, or the first gap in time."""
    lost = [
        index
        for packet in packets
        if packet.time is not None
        and ((index := bisect_left(times, packet.time - ROUNDED)) == len(times) or times[index] > packet.time + ROUNDED)
    ]
    steps = np.diff(times)
    # Frames that go on to about the film's end leave a gap where some are lost; others end where it breaks.
    gaps = np.flatnonzero(steps > 1.5 * np.median(steps)) + 1 if length and times[-1] > 0.97 * length else []
    return min([*lost, *map(int, gaps)], default=len(times))
