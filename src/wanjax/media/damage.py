# SPDX-License-Identifier: Apache-2.0
"""Signs of an unfinished copy: long runs of zero bytes in dense data (holes), and a file that ends too early.

Decoders of arithmetic codes take such bytes for any others, and return a picture that is wrong without a word. A coder
never writes as many.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from wanjax.media.webp import coded_frames

HOLE = 256  # zero bytes in a row, the least; VP8 writes some for large parts that are alike
DENSE = 10_000  # pixels of a frame, for each of which a coder may write one zero byte in a row
PACKETS = (188, 192, 204)  # bytes of a packet of MPEG-TS, with a time or a checksum beside it
PAGE, HEAD = 2**16, 27  # the most bytes of a page of Ogg, and those of its header but for the lengths of its parts
EBML, SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"  # the first part of a WebM, and the one of all its data
UNKNOWN_LENGTH = 2**56 - 1  # of a part of WebM, as of one that is still written
START_CODE = 1  # the first byte after zeros, of those that begin a part of a stream


class Zeros:
    """Notes runs of zero bytes in data that come in pieces, of frames of that many pixels."""

    def __init__(self, pixels: int):
        self._least = max(HOLE, pixels // DENSE)
        self._runs: list[tuple[int, int, int]] = []  # begin, end, and the byte behind
        self._seen, self._begin = 0, 0  # bytes, and where the zeros at their end begin

    def take(self, piece: bytes | memoryview) -> None:
        """Look at the next piece."""
        values = np.frombuffer(piece, np.uint8)
        others = np.flatnonzero(values) + self._seen
        begins = np.concatenate([[self._begin], others[:-1] + 1])[: len(others)]
        for index in np.flatnonzero(others - begins >= self._least):
            end = int(others[index])
            self._runs.append((int(begins[index]), end, int(values[end - self._seen])))
        self._seen += len(piece)
        self._begin = int(others[-1]) + 1 if len(others) else self._begin

    def within(self, ends: Sequence[int]) -> set[int]:
        """Return the indices of packets with a hole; a packet is given by its end.

        Zeros at the end of a packet, or before a start code (00 00 01), may be padding, unless they are all of it.
        """
        last = [(self._begin, self._seen, 0)] if self._seen - self._begin >= self._least else []
        holed: set[int] = set()
        for begin, end, behind in [*self._runs, *last]:
            for index in range(bisect_right(ends, begin), len(ends)):
                first = ends[index - 1] if index else 0
                if first >= end:
                    break
                padding = begin > first and (end >= ends[index] or behind == START_CODE)
                if min(end, ends[index]) - max(begin, first) >= self._least and not padding:
                    holed.add(index)
        return holed


def holed_frame(data: bytes, form: str, pixels: int, others: Sequence[bytes]) -> int | None:
    """Return the index of the first frame of a WebP or AVIF whose data have a hole; None without one.

    `pixels` are those of a frame, and `others` is what the file holds beside its frames, such as EXIF. A WebP without
    losses is not looked at: it may hold many zeros.
    """
    if form == "WEBP":
        frames = coded_frames(data)
    elif form == "AVIF":
        frames = _avif_frames(data)
    else:
        return None
    apart = [(at, at + len(x)) for x in others if x and (at := data.find(x)) >= 0]
    for index, begin, end in frames:
        zeros, at = Zeros(pixels), begin
        for first, behind in sorted(apart):
            if at <= first and behind <= end:
                zeros.take(memoryview(data)[at:first])
                at = behind
        zeros.take(memoryview(data)[at:end])
        if zeros.within([end - begin]):
            return index
    return None


def _avif_frames(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the index, begin and end of the frames of an AVIF; of a still picture, the whole of its data."""

    def number(at: int) -> int:
        return int.from_bytes(data[at : at + 4])

    sizes, places = data.find(b"stsz"), data.find(b"stco")  # the boxes of the frames' sizes, and of where they begin
    if min(sizes, places) >= 0 and number(places + 8) == 1 and number(sizes + 8) == 0:  # in one piece
        begin, total = number(places + 12), min(number(sizes + 12), (len(data) - sizes) // 4)
        for index in range(total):
            end = begin + number(sizes + 16 + 4 * index)
            yield index, begin, min(end, len(data))
            begin = end
        return
    yield from ((0, begin, end) for kind, begin, end in _boxes(data) if kind == b"mdat")


def _boxes(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the kind, begin and end of the outermost boxes of an AVIF."""
    begin = 0
    while begin + 8 <= len(data):
        size, kind, head = int.from_bytes(data[begin : begin + 4]), data[begin + 4 : begin + 8], 8
        if size == 1:
            size, head = int.from_bytes(data[begin + 8 : begin + 16]), 16
        end = begin + size if size else len(data)
        yield kind, begin + head, min(end, len(data))
        begin = max(end, begin + 8)


def ends_within(file: Path, container: str) -> bool:
    """Return whether a file of MPEG-TS or Ogg ends within a packet or page; others say it of themselves."""
    size = file.stat().st_size
    if container == "mpegts":
        return all(size % packet for packet in PACKETS)
    if container != "ogg":
        return False
    with file.open("rb") as opened:
        opened.seek(max(0, size - 2 * PAGE))
        data = opened.read()
    last = data.rfind(b"OggS")
    parts = data[last + HEAD : last + HEAD + data[last + HEAD - 1]] if 0 <= last <= len(data) - HEAD else b""
    return last < 0 or len(data) < last + HEAD + len(parts) + sum(parts) or not parts


def is_cut_short(file: Path) -> bool:
    """Return whether a film, an animation or a picture ends before its own parts do, as a copy that was stopped.

    Reads the headers of the outermost parts alone, of MP4 and MOV, WebM, WebP, PNG and GIF.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        head = opened.read(64)
        if head[4:8] == b"ftyp":
            begin = 0
            while begin < size:
                opened.seek(begin)
                part = opened.read(16)
                length = int.from_bytes(part[:4])
                length = int.from_bytes(part[8:]) if length == 1 else length or size - begin
                if len(part) < 8 or length < 8 or begin + length > size:
                    return True
                begin += length
            return False
        if head.startswith(b"RIFF"):
            return 8 + int.from_bytes(head[4:8], "little") > size
        if (at := head.find(SEGMENT)) >= 0 and head.startswith(EBML):
            length = int.from_bytes(head[at + 4 : at + 12]) - (1 << 56)  # in eight bytes, of which one bit says so
            return at + 12 + length > size and 0 <= length < UNKNOWN_LENGTH
        opened.seek(max(0, size - 64))
        tail = opened.read()
    if head.startswith(b"\x89PNG"):
        return b"IEND" not in tail
    return head.startswith(b"GIF8") and not tail.rstrip(b"\0").endswith(b";")
