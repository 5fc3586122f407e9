# SPDX-License-Identifier: Apache-2.0
"""Detect incomplete copies: holes (long runs of zero bytes in compressed data) and truncated files.

Decoders of arithmetic codes accept such zeros, and return a wrong picture without an error. Encoders never write such
long runs of zeros.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from wanjax.media.webp import lossy_frames

MIN_HOLE_BYTES = 256  # shorter runs of zeros are normal: VP8 writes some for large uniform areas
PIXELS_PER_ZERO_BYTE = 10_000  # an encoder may write a run of one zero byte per this many pixels of a frame
TS_PACKET_SIZES = (188, 192, 204)  # bytes of an MPEG-TS packet: plain, with a timestamp, with a checksum
OGG_MAX_PAGE_BYTES = 2**16  # bytes
OGG_HEADER_BYTES = 27  # bytes of a page's header before its segment table
EBML_ID, SEGMENT_ID = (
    b"\x1a\x45\xdf\xa3",
    b"\x18\x53\x80\x67",
)  # IDs of a WebM's header and of the element with all data
SIGNATURES = (EBML_ID, b"RIFF", b"\x89PNG", b"GIF8", b"\xff\xd8")  # the first bytes of WebM, WebP, PNG, GIF and JPEG
MP4_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free")  # the boxes with which an MP4 or MOV may begin
UNKNOWN_LENGTH = 2**56 - 1  # the size of a WebM element that the writer has not finished
START_CODE_BYTE = 1  # the last byte of a start code (00 00 01)


class ZeroRuns:
    """Find long runs of zero bytes in data that arrive in pieces.

    Args:
        pixels: Pixels of a frame; larger frames may have longer runs.
    """

    def __init__(self, pixels: int):
        self._min_run = max(MIN_HOLE_BYTES, pixels // PIXELS_PER_ZERO_BYTE)
        self._runs: list[tuple[int, int, int]] = []  # the start and the end of each run, and the byte after the run
        # the number of bytes so far, and the start of the zeros at the end of these bytes
        self._size, self._tail_begin = 0, 0

    def feed(self, piece: bytes | memoryview) -> None:
        """Scan the next piece."""
        values = np.frombuffer(piece, np.uint8)
        nonzero = np.flatnonzero(values) + self._size
        run_begins = np.concatenate([[self._tail_begin], nonzero[:-1] + 1])[: len(nonzero)]
        for index in np.flatnonzero(nonzero - run_begins >= self._min_run):
            end = int(nonzero[index])
            self._runs.append((int(run_begins[index]), end, int(values[end - self._size])))
        self._size += len(piece)
        self._tail_begin = int(nonzero[-1]) + 1 if len(nonzero) else self._tail_begin

    def packets_with_holes(self, ends: Sequence[int]) -> set[int]:
        """Return the indices of the packets that have a hole.

        Zeros at the end of a packet or before a start code (00 00 01) count as padding, unless they fill the packet.

        Args:
            ends: The offset of the end of each packet.
        """
        tail_run = [(self._tail_begin, self._size, 0)] if self._size - self._tail_begin >= self._min_run else []
        packets: set[int] = set()
        for begin, end, next_byte in [*self._runs, *tail_run]:
            for index in range(bisect_right(ends, begin), len(ends)):
                packet_begin = ends[index - 1] if index else 0
                if packet_begin >= end:
                    break
                padding = begin > packet_begin and (end >= ends[index] or next_byte == START_CODE_BYTE)
                if min(end, ends[index]) - max(begin, packet_begin) >= self._min_run and not padding:
                    packets.add(index)
        return packets


def first_frame_with_hole(data: bytes, image_format: str, pixels: int, skipped_data: Sequence[bytes]) -> int | None:
    """Return the index of the first frame with a hole in its data, in a WebP or AVIF. Return None without a hole.

    Lossless WebP is not checked, because it may contain many zeros.

    Args:
        data: The contents of the file.
        image_format: Pillow's name of the format; only WEBP and AVIF are checked.
        pixels: Pixels of a frame.
        skipped_data: Data to skip, such as EXIF, which may be between the bytes of a frame.
    """
    if image_format == "WEBP":
        frames = lossy_frames(data)
    elif image_format == "AVIF":
        frames = _avif_frames(data)
    else:
        return None
    skipped_ranges = [
        (position, position + len(blob)) for blob in skipped_data if blob and (position := data.find(blob)) >= 0
    ]
    for index, begin, end in frames:
        zero_runs, position = ZeroRuns(pixels), begin
        for first, after in sorted(skipped_ranges):
            if position <= first and after <= end:
                zero_runs.feed(memoryview(data)[position:first])
                position = after
        zero_runs.feed(memoryview(data)[position:end])
        if zero_runs.packets_with_holes([end - begin]):
            return index
    return None


def _avif_frames(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the index, start and end of each frame of an AVIF. A still picture is one frame with all the data."""

    def read_uint(offset: int) -> int:
        return int.from_bytes(data[offset : offset + 4])

    sizes, offsets = data.find(b"stsz"), data.find(b"stco")  # the boxes with the sizes and offsets of frames
    if min(sizes, offsets) >= 0 and read_uint(offsets + 8) == 1 and read_uint(sizes + 8) == 0:  # one contiguous chunk
        begin, total = read_uint(offsets + 12), min(read_uint(sizes + 12), (len(data) - sizes) // 4)
        for index in range(total):
            end = begin + read_uint(sizes + 16 + 4 * index)
            yield index, begin, min(end, len(data))
            begin = end
        return
    yield from ((0, begin, end) for box_type, begin, end in _top_level_boxes(data) if box_type == b"mdat")


def _top_level_boxes(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the type, begin and end of the top-level boxes of an AVIF."""
    begin = 0
    while begin + 8 <= len(data):
        size, box_type, header = int.from_bytes(data[begin : begin + 4]), data[begin + 4 : begin + 8], 8
        if size == 1:
            size, header = int.from_bytes(data[begin + 8 : begin + 16]), 16
        end = begin + size if size else len(data)
        yield box_type, begin + header, min(end, len(data))
        begin = max(end, begin + 8)


def ends_mid_packet(file: Path, container: str) -> bool:
    """Return whether an MPEG-TS or Ogg file ends inside a packet or page. For other containers, ffmpeg reports this."""
    size = file.stat().st_size
    if container == "mpegts":
        return all(size % packet for packet in TS_PACKET_SIZES)
    if container != "ogg":
        return False
    with file.open("rb") as stream:
        stream.seek(max(0, size - 2 * OGG_MAX_PAGE_BYTES))
        data = stream.read()
    page = data.rfind(b"OggS")
    segment_sizes = (
        data[page + OGG_HEADER_BYTES : page + OGG_HEADER_BYTES + data[page + OGG_HEADER_BYTES - 1]]
        if 0 <= page <= len(data) - OGG_HEADER_BYTES
        else b""
    )
    return (
        page < 0 or len(data) < page + OGG_HEADER_BYTES + len(segment_sizes) + sum(segment_sizes) or not segment_sizes
    )


def has_media_signature(file: Path) -> bool:
    """Return whether a file begins like an MP4, MOV, WebM, WebP, PNG, GIF or JPEG."""
    with file.open("rb") as stream:
        first_bytes = stream.read(8)
    return first_bytes[4:8] in MP4_BOXES or first_bytes.startswith(SIGNATURES)


def is_truncated(file: Path) -> bool:
    """Return whether a video or picture is shorter than its headers say, as after an interrupted copy.

    Reads only the top-level headers of MP4, MOV, WebM, WebP, PNG and GIF.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        first_bytes = stream.read(64)
        if first_bytes[4:8] == b"ftyp":
            begin = 0
            while begin < size:
                stream.seek(begin)
                box_header = stream.read(16)
                length = int.from_bytes(box_header[:4])
                length = int.from_bytes(box_header[8:]) if length == 1 else length or size - begin
                if len(box_header) < 8 or length < 8 or begin + length > size:
                    return True
                begin += length
            return False
        if first_bytes.startswith(b"RIFF"):
            return 8 + int.from_bytes(first_bytes[4:8], "little") > size
        if (segment := first_bytes.find(SEGMENT_ID)) >= 0 and first_bytes.startswith(EBML_ID):
            length = int.from_bytes(first_bytes[segment + 4 : segment + 12]) - (
                1 << 56
            )  # the size has 8 bytes; the top bit marks this width
            return segment + 12 + length > size and 0 <= length < UNKNOWN_LENGTH
        stream.seek(max(0, size - 64))
        tail = stream.read()
    if first_bytes.startswith(b"\x89PNG"):
        return b"IEND" not in tail
    return first_bytes.startswith(b"GIF8") and not tail.rstrip(b"\0").endswith(b";")
