# SPDX-License-Identifier: Apache-2.0
"""The container of a WebP animation whose frames are all equal, which its encoder writes as a picture without a time.

The container is a list of chunks: four letters, a size, and bytes padded to an even number (RFC 9649).
"""

from collections.abc import Iterator
from pathlib import Path

ANIMATED, WITH_EXIF = 0x02, 0x08  # flags of the chunk VP8X


def keep_time(path: Path, size: tuple[int, int], milliseconds: int) -> None:
    """Rewrites a picture of this (width, height) as an animation of one frame, shown so long; leaves an animation."""
    chunks = dict(_chunks(path.read_bytes()))
    picture = next(name for name in (b"VP8 ", b"VP8L", b"ANMF") if name in chunks)
    if picture == b"ANMF":
        return
    sides = b"".join((side - 1).to_bytes(3, "little") for side in size)
    flags = ANIMATED | (WITH_EXIF if b"EXIF" in chunks else 0)
    frame = bytes(6) + sides + milliseconds.to_bytes(3, "little") + b"\0" + _chunk(picture, chunks[picture])
    parts = {b"VP8X": flags.to_bytes(4, "little") + sides, b"ANIM": bytes(6), b"ANMF": frame}
    parts |= {b"EXIF": chunks[b"EXIF"]} if b"EXIF" in chunks else {}
    path.write_bytes(_chunk(b"RIFF", b"WEBP" + b"".join(_chunk(name, data) for name, data in parts.items())))


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 12  # after the chunk RIFF's own name and size, and WEBP
    while at < len(data):
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        yield data[at : at + 4], data[at + 8 : at + 8 + size]
        at += 8 + size + size % 2


def _chunk(name: bytes, data: bytes) -> bytes:
    return name + len(data).to_bytes(4, "little") + data + bytes(len(data) % 2)
