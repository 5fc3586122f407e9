# SPDX-License-Identifier: Apache-2.0
"""Read the frames of a video file with ffmpeg, and refuse damaged files. Without this check, ffmpeg would skip the
broken parts.

The file is decoded up to `CHECKED_SECONDS` after the last frame that is used. The file counts as damaged if ffmpeg
reports an error, or if the data of a frame has a longer run of zeros than its codec ever writes. Such a run comes from
a hole in the file.
"""

import math
import os
import re
from bisect import bisect_left
from collections.abc import Generator, Sequence
from fractions import Fraction
from itertools import accumulate, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from wanjax.errors import WanjaxError, reason
from wanjax.media.bounds import MEDIA_LIMITS
from wanjax.media.damage import ZeroRuns, ends_mid_packet, is_truncated
from wanjax.media.ffmpeg import NO_VIDEO, VideoStream, input_arguments, probe, run_with_messages
from wanjax.stores.paths import missing_file
from wanjax.stores.temporary import temp_dir

CHECKED_SECONDS = 10  # seconds after the last used frame that are checked for damage
CHECKED_FACTOR = 4  # the check for damage decodes at most this many times the pixels that a clip may have
TICKS_PER_SECOND = 90_000  # times are compared in this unit
TIME_ROUNDING = 0.0011  # seconds by which a container may round the time of a frame
TIME_TOLERANCE = 0.0001  # a frame counts as shown this many seconds before its time
DENSE_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mpeg1video", "mpeg2video", "flv1", "wmv1", "wmv2")
"""Codecs that never write long runs of zeros. Other codecs, such as raw frames and JPEG, write such runs for black
areas."""
DAMAGE_MESSAGES = re.compile(
    r"File ended prematurely|invalid as first byte of an EBML|partial file|CRC mismatch|exceeds containing|"
    r"corrupt input packet|corrupt decoded frame|Error during demuxing|Error submitting packet|Decoding error"
)
"""Messages of ffmpeg about damage, even if it exits with 0. Other messages are common for intact files."""
PAM_HEADER = re.compile(rb"P7\nWIDTH (\d+)\nHEIGHT (\d+)\nDEPTH ([34])\nMAXVAL 255\nTUPLTYPE \w+\nENDHDR\n")
PAM_HEADER_LINES = 7
FFMPEG_LOG_LEVEL = "repeat+level+warning"
CORRUPT_FRAME = re.compile("corrupt decoded frame|slice CRC mismatch")  # matches ffmpeg's messages about a single frame
DECODED_FRAME_LOG = "decoder -> "  # matches a line of ffmpeg's log about a decoded frame
FRAMECRC_LINE = re.compile(r"0, +-?\d+, +(-?\d+), +\d+, +(\d+), 0x\w+(?:, F=0x(\w+))?")
NO_TIME, DAMAGED_FLAG = -(2**63), 2  # values in a line of `framecrc`
TIMES_ONLY = ("-c:v", "wrapped_avframe")  # decode frames and write only their times

Frame = UInt8[np.ndarray, "H W C"]


def read_video_file(source: str | Path, frames: int, fps: int | float, *, is_non_colour: bool) -> Generator[Frame]:
    """Yield frames in RGB or RGBA: the frame at each time k/fps, up to the last frame.

    A file with a lower frame rate keeps its frame rate. Frames are rotated as the file says, and have square pixels.

    Args:
        source: The path of the file.
        frames: The maximum number of frames to read.
        fps: Frames a second.
        is_non_colour: Whether pixels are values, such as a mask, not colours. Their primaries are not converted to
            sRGB.

    Raises:
        WanjaxError: The file cannot be read, is too large, or is damaged; the message has the frame.
    """
    if not Path(source).is_file():
        raise WanjaxError(missing_file(source))
    with temp_dir() as folder:
        try:
            stream = probe(source)
            max_frames = max(1, CHECKED_FACTOR * MEDIA_LIMITS.max_clip_pixels // max(1, stream.pixels))
            decoded, times, rate = _decode(source, stream, frames, fps, max_frames, is_non_colour, folder)
        except OSError as error:
            raise WanjaxError(unreadable_message(source, reason(error))) from error
        visible_frames, complete = 0 if not times else frames, 0 < len(times) < max_frames
        if complete:  # all frames of the file were decoded
            last_seconds, frame_seconds = times[-1] - times[0], max(1 / fps, 1 / rate)
            rounded_end = round(last_seconds * rate) / rate
            last_seconds = rounded_end if abs(last_seconds - rounded_end) < TIME_ROUNDING else last_seconds
            visible_frames = (
                math.floor((last_seconds + (TIME_TOLERANCE if rate > fps else frame_seconds / 2)) / frame_seconds) + 1
            )
        count = min(visible_frames, frames)
        yield from islice(_read_pam_frames(decoded, source, count if complete else 1), count)


def unreadable_message(source: str | Path, problem: str) -> str:
    """Format the message that a file cannot be read as a video, with the reason and advice."""
    if not os.path.getsize(source):
        return f"{source} is empty: give a complete copy of the clip"
    if is_truncated(Path(source)):
        return f"{source} cannot be read as a video, because it is truncated ({problem}): give a complete copy"
    if problem == NO_VIDEO:
        return f"{source} cannot be read as a video, because {problem}: give another file"
    return (
        f"{source} cannot be read as a video, because it is damaged or of another kind ({problem}): give a "
        "complete copy"
    )


def _read_pam_frames(decoded: Path, source: str | Path, count: int) -> Generator[Frame]:
    """Yield the frames of a file of PAM images. The file has at least `count` images.

    Raises WanjaxError before it reads a frame that is too large, or more pixels than a clip may have.
    """
    clip_pixels = 0
    with decoded.open("rb") as file:
        while header := PAM_HEADER.match(b"".join(islice(file, PAM_HEADER_LINES))):
            width, height, channels = map(int, header.groups())
            clip_pixels += width * height
            count = max(0, count - 1)
            is_allowed = (
                width * height <= MEDIA_LIMITS.max_pixels
                and clip_pixels + count * width * height <= MEDIA_LIMITS.max_clip_pixels
            )
            data = file.read(width * height * channels) if is_allowed else b""
            if len(data) < width * height * channels:
                problem = f"{source} has frames of {width}x{height} pixels"
                limits = f"{MEDIA_LIMITS.max_pixels:,}, and {MEDIA_LIMITS.max_clip_pixels:,} in all frames"
                raise WanjaxError(f"{problem}, and the limit is {limits}: give a shorter or smaller clip")
            yield np.frombuffer(data, np.uint8).reshape(height, width, channels)


def _decode(
    source: str | Path,
    stream: VideoStream,
    frames: int,
    fps: int | float,
    max_frames: int,
    is_non_colour: bool,
    folder: Path,
) -> tuple[Path, list[float], float]:
    """Decode the needed frames, and one or two more, into a file of PAM images in a folder.

    Returns:
        The file of PAM images, the times of all decoded frames, and the frame rate.

    Raises:
        OSError: Nothing can be read.
        WanjaxError: The file is damaged.
    """
    # Pixels become square by scaling their longer side up to a bound: the caller refuses a frame above the limits.
    width, height = (
        rf"if(gt({ratio}\,1)\,min(trunc({side}*{ratio}+0.5)\,trunc({MEDIA_LIMITS.max_pixels}/{other})+2)\,{side})"
        for side, other, ratio in (("iw", "ih", "sar"), ("ih", "iw", "1/sar"))
    )
    square_pixels = f"scale=w={width}:h={height}:flags=bicubic+accurate_rnd+full_chroma_int"
    # Times that differ from multiples of the frame time only by rounding are set to multiples, so that all containers
    # agree. A frame is shown from its time on, or from half a frame earlier if all frames are taken. The last frame is
    # repeated, because some containers do not say how long it is shown.
    elapsed_expr, rounded_expr = "(PTS-STARTPTS)*TB", r"round((PTS-STARTPTS)*TB*FR)/FR"
    frame_time = rf"if(lt(abs({elapsed_expr}-{rounded_expr})\,{TIME_ROUNDING})\,{rounded_expr}\,{elapsed_expr})"
    frame_rate_filters = [
        f"settb=1/{TICKS_PER_SECOND}",
        rf"setpts=({frame_time}-if(gt(FR\,{fps})\,{TIME_TOLERANCE}\,0.5/FR))/TB",
        "tpad=stop=2:stop_mode=clone",
        rf"fps=min(source_fps\,{fps}):round=up",
    ]
    decoded, times, first_time = folder / "decoded", folder / "times", folder / "first"
    filters = [
        *stream.deinterlace,
        *frame_rate_filters,
        *stream.colour_filters(is_non_colour),
        square_pixels,
        "format=rgb24|rgba",
    ]
    seconds = f"{frames / min(fps, stream.min_fps or fps) + CHECKED_SECONDS:.3f}"
    input_options = [
        "-max_pixels",
        str(2 * MEDIA_LIMITS.max_pixels + 2**20),
        *stream.decoder,
        *input_arguments(source),
    ]  # a decoder may count padding as frames
    pictures = [
        *(
            "-map",
            stream.stream,
            "-vf",
            ",".join(filters),
            "-frames:v",
            str(frames),
            "-fs",
            str(4 * MEDIA_LIMITS.max_clip_pixels),
        ),
        *("-f", "image2pipe", "-c:v", "pam", str(decoded)),
    ]
    time_base_arguments = ["-map", stream.stream, "-frames:v", "1", *TIMES_ONLY, "-f", "framecrc", str(first_time)]
    result = run_with_messages(
        [
            "-loglevel",
            FFMPEG_LOG_LEVEL,
            "-xerror",
            *input_options,
            *pictures,
            *_times_arguments(stream, seconds, max_frames, times),
            *time_base_arguments,
        ]
    )
    if result.error and result.error.errno:  # raised if the disk failed
        raise result.error
    packets = _list_packets(source, stream, seconds, folder)
    is_suspect = (
        bool(result.error)
        or ends_mid_packet(Path(source), stream.container)
        or DAMAGE_MESSAGES.search(result.messages) is not None
    )
    if is_suspect or any(packet.is_damaged for packet in packets):
        if damage := _describe_damage(source, stream, input_options, seconds, max_frames, packets, folder):
            raise WanjaxError(damage)
        if result.error:
            raise result.error
    return decoded, _read_frame_times(times), float(1 / _time_base(first_time))


def _times_arguments(stream: VideoStream, seconds: str, max_frames: int, file: Path) -> list[str]:
    """Return ffmpeg's arguments to decode at most `seconds` and `max_frames`, and to write the frames' times."""
    # `framecrc` needs strictly increasing times.
    increasing_times = f"settb=1/{TICKS_PER_SECOND},setpts=if(isnan(PREV_OUTPTS)\\,PTS\\,max(PTS\\,PREV_OUTPTS+1))"
    passthrough = ["-vf", increasing_times, "-fps_mode", "passthrough", "-enc_time_base", f"1/{TICKS_PER_SECOND}"]
    return [
        "-map",
        stream.stream,
        "-t",
        seconds,
        "-frames:v",
        str(max_frames),
        *TIMES_ONLY,
        *passthrough,
        "-f",
        "framecrc",
        str(file),
    ]


class FramecrcEntry(NamedTuple):
    """A line of ffmpeg's `framecrc` format: a frame or packet, with its time in seconds and its size in bytes."""

    time: float | None
    size: int
    is_damaged: bool


def _parse_framecrc(file: Path) -> list[FramecrcEntry]:
    """Parse a file in ffmpeg's `framecrc` format."""
    time_base = _time_base(file)
    entries: list[FramecrcEntry] = []
    for line in file.read_text().splitlines() if file.is_file() else ():
        if match := FRAMECRC_LINE.match(line):
            time, size, flags = int(match[1]), int(match[2]), int(match[3] or "0", 16)
            entries.append(
                FramecrcEntry(None if time == NO_TIME else float(time * time_base), size, bool(flags & DAMAGED_FLAG))
            )
    return entries


def _read_frame_times(file: Path) -> list[float]:
    """Return the times in a `framecrc` file in ascending order."""
    return sorted(entry.time for entry in _parse_framecrc(file) if entry.time is not None)


def _time_base(file: Path) -> Fraction:
    """Return the time base of a `framecrc` file, in seconds."""
    time_base = re.search(r"^#tb 0: (\d+)/(\d+)$", file.read_text(), re.MULTILINE) if file.is_file() else None
    return (
        Fraction(int(time_base[1]), int(time_base[2]))
        if time_base and int(time_base[1]) and int(time_base[2])
        else Fraction(1, TICKS_PER_SECOND)
    )


def _list_packets(source: str | Path, stream: VideoStream, seconds: str, folder: Path) -> list[FramecrcEntry]:
    """Return the packets of a stream in the order of the file, without decoding them."""
    file, zero_runs = folder / "packets", ZeroRuns(stream.pixels)
    copy_arguments = ["-map", stream.stream, "-t", seconds, "-c", "copy", "-copyinkf"]
    run_with_messages(
        [
            "-loglevel",
            "error",
            *input_arguments(source),
            *copy_arguments,
            "-f",
            "data",
            "pipe:1",
            *copy_arguments,
            "-f",
            "framecrc",
            str(file),
        ],
        consume=zero_runs.feed if stream.codec in DENSE_CODECS else lambda piece: None,
    )
    entries = _parse_framecrc(file)
    ends = list(accumulate(entry.size for entry in entries))
    holes = zero_runs.packets_with_holes(ends)
    return [entry._replace(is_damaged=entry.is_damaged or index in holes) for index, entry in enumerate(entries)]


def _describe_damage(
    source: str | Path,
    stream: VideoStream,
    input_options: Sequence[str],
    seconds: str,
    max_frames: int,
    packets: Sequence[FramecrcEntry],
    folder: Path,
) -> str | None:
    """Return a message that names the frame at which a file breaks. Return None if the whole file can be decoded.

    Raises OSError if not even the first frame can be decoded.
    """
    file = folder / "second_times"
    # One thread, so that ffmpeg's messages about a frame come before the line with the frame's time.
    result = run_with_messages(
        [
            "-loglevel",
            "repeat+level+info",
            "-threads",
            "1",
            "-debug_ts",
            *input_options,
            *_times_arguments(stream, seconds, max_frames, file),
        ]
    )
    times = _read_frame_times(file)
    truncated = (
        0 < len(times) < max_frames
        and times[-1] + 1 < float(seconds)
        and ends_mid_packet(Path(source), stream.container)
    )
    if not (
        result.error
        or truncated
        or DAMAGE_MESSAGES.search(result.messages)
        or any(packet.is_damaged for packet in packets)
    ):
        return None
    if not times:
        raise result.error or OSError("no frame of it can be decoded")
    corrupt = CORRUPT_FRAME.search(result.messages)
    good_frames = (
        [result.messages.count(DECODED_FRAME_LOG, 0, corrupt.start())] if corrupt else []
    )  # the number of frames before each fault
    good_frames += [len(times) - 1] if truncated else []
    good_frames += [
        _frames_before(times, packet.time, index) for index, packet in enumerate(packets) if packet.is_damaged
    ]
    frames = min(good_frames, default=_first_gap(times, packets, stream.duration))
    position = f"{times[min(frames, len(times) - 1)]:.1f}" + (f" of {stream.duration:.1f}" if stream.duration else "")
    return (
        f"{source} breaks at frame {frames + 1} ({position} s), where the file is damaged or ends too early: "
        "give a complete copy, or cut it before that frame and encode it again"
    )


def _frames_before(times: Sequence[float], time: float | None, index: int) -> int:
    """Return the number of frames before a packet with this time and index in the file."""
    return index if time is None else bisect_left(times, time - TIME_ROUNDING)


def _first_gap(times: Sequence[float], packets: Sequence[FramecrcEntry], duration: float | None) -> int:
    """Return the number of frames before the first packet without a frame, or before the first gap in time."""
    before_missing = [
        index
        for packet in packets
        if packet.time is not None
        and (
            (index := bisect_left(times, packet.time - TIME_ROUNDING)) == len(times)
            or times[index] > packet.time + TIME_ROUNDING
        )
    ]
    intervals = np.diff(times)
    # If the last frame is at the end of the video, lost frames leave a gap. Otherwise the file breaks after this frame.
    gaps = (
        np.flatnonzero(intervals > 1.5 * np.median(intervals)) + 1 if duration and times[-1] > 0.97 * duration else []
    )
    return min([*before_missing, *map(int, gaps)], default=len(times))
