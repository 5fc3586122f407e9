# SPDX-License-Identifier: Apache-2.0
"""The container of WebP (RFC 9649). It consists of chunks with a four-letter name, a size, and data padded to an even
size."""

from collections.abc import Iterator
from pathlib import Path

ANIMATION_FLAG, EXIF_FLAG = 0x02, 0x08  # flags of the chunk VP8X
FIRST_CHUNK_OFFSET = 12  # offset of the first chunk, after RIFF, the size and WEBP
FRAME_HEADER_BYTES = 16  # bytes of ANMF before its chunks: position, size and duration of the frame


def restore_duration(path: Path, size: tuple[int, int], milliseconds: int) -> None:
    """Rewrite a still WebP as an animation of one frame with this duration; leave an animation unchanged.

    The encoder merges equal frames, and writes an animation of equal frames as a still picture without a duration.

    Args:
        path: The file.
        size: The (width, height) of the picture.
        milliseconds: The duration of the frame.
    """
    data = path.read_bytes()
    chunks = {name: data[begin:end] for name, begin, end in chunks_in(data)}
    picture = next(name for name in (b"VP8 ", b"VP8L", b"ANMF") if name in chunks)
    if picture == b"ANMF":
        return
    sides = b"".join((side - 1).to_bytes(3, "little") for side in size)
    flags = ANIMATION_FLAG | (EXIF_FLAG if b"EXIF" in chunks else 0)
    frame = bytes(6) + sides + milliseconds.to_bytes(3, "little") + b"\0" + _chunk(picture, chunks[picture])
    parts = {b"VP8X": flags.to_bytes(4, "little") + sides, b"ANIM": bytes(6), b"ANMF": frame}
    parts |= {b"EXIF": chunks[b"EXIF"]} if b"EXIF" in chunks else {}
    path.write_bytes(_chunk(b"RIFF", b"WEBP" + b"".join(_chunk(name, data) for name, data in parts.items())))


def chunks_in(data: bytes, begin: int = FIRST_CHUNK_OFFSET, end: int | None = None) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name, and the start and end of the data, of each chunk between two offsets."""
    end = len(data) if end is None else end
    while begin + 8 <= end:
        size = int.from_bytes(data[begin + 4 : begin + 8], "little")
        yield data[begin : begin + 4], begin + 8, min(begin + 8 + size, end)
        begin += 8 + size + size % 2


def lossy_frames(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the index, and the start and end of the data, of each lossy frame."""
    index = 0
    for name, begin, end in chunks_in(data):
        if name == b"ANMF":
            yield from (
                (index, first, last)
                for frame_part, first, last in chunks_in(data, begin + FRAME_HEADER_BYTES, end)
                if frame_part == b"VP8 "
            )
            index += 1
        elif name == b"VP8 ":
            yield index, begin, end


def _chunk(name: bytes, data: bytes) -> bytes:
    return name + len(data).to_bytes(4, "little") + data + bytes(len(data) % 2)
