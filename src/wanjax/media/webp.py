# SPDX-License-Identifier: Apache-2.0
"""The container of WebP: a list of chunks, each four letters, a size, and bytes padded to an even number (RFC 9649)."""

from collections.abc import Iterator
from pathlib import Path

ANIMATED, WITH_EXIF = 0x02, 0x08  # flags of the chunk VP8X
FIRST = 12  # where chunks begin: after the chunk RIFF's own name and size, and WEBP
FRAME = 16  # bytes of an animation's frame (ANMF) before its chunks: where, how large, for how long


def keep_time(path: Path, size: tuple[int, int], milliseconds: int) -> None:
    """Rewrites a picture of this (width, height) as an animation of one frame, shown so long; leaves an animation.

    The encoder writes an animation whose frames are all equal as a picture without a time.
    """
    data = path.read_bytes()
    chunks = {name: data[begin:end] for name, begin, end in chunks_in(data)}
    picture = next(name for name in (b"VP8 ", b"VP8L", b"ANMF") if name in chunks)
    if picture == b"ANMF":
        return
    sides = b"".join((side - 1).to_bytes(3, "little") for side in size)
    flags = ANIMATED | (WITH_EXIF if b"EXIF" in chunks else 0)
    frame = bytes(6) + sides + milliseconds.to_bytes(3, "little") + b"\0" + _chunk(picture, chunks[picture])
    parts = {b"VP8X": flags.to_bytes(4, "little") + sides, b"ANIM": bytes(6), b"ANMF": frame}
    parts |= {b"EXIF": chunks[b"EXIF"]} if b"EXIF" in chunks else {}
    path.write_bytes(_chunk(b"RIFF", b"WEBP" + b"".join(_chunk(name, data) for name, data in parts.items())))


def chunks_in(data: bytes, begin: int = FIRST, end: int | None = None) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name of each chunk in a part of a file, and where its bytes begin and end."""
    end = len(data) if end is None else end
    while begin + 8 <= end:
        size = int.from_bytes(data[begin + 4 : begin + 8], "little")
        yield data[begin : begin + 4], begin + 8, min(begin + 8 + size, end)
        begin += 8 + size + size % 2


def coded_frames(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the index of each frame that is coded with losses, and where its bytes begin and end."""
    index = 0
    for name, begin, end in chunks_in(data):
        if name == b"ANMF":
            yield from ((index, at, to) for part, at, to in chunks_in(data, begin + FRAME, end) if part == b"VP8 ")
            index += 1
        elif name == b"VP8 ":
            yield index, begin, end


def _chunk(name: bytes, data: bytes) -> bytes:
    return name + len(data).to_bytes(4, "little") + data + bytes(len(data) % 2)
