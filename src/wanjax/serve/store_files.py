# SPDX-License-Identifier: Apache-2.0
"""Send a file of a remote store, or the part of it that a Range header selects (RFC 9110, section 14)."""

import logging
import re
from collections.abc import AsyncIterator
from itertools import pairwise

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from wanjax.errors import WanjaxError, repr_short
from wanjax.serve.auth import TruncatedResponse, error_response
from wanjax.stores.paths import RemotePath

PIECE_BYTES = 2 * 2**20  # the maximum number of bytes in memory at a time
RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)
logger = logging.getLogger("wanjax.serve")


async def range_response(request: Request, file: RemotePath, media_type: str, download_name: str) -> Response:
    """Create a response that reads a file of a store while it is sent.

    Args:
        request: The request.
        file: The file.
        media_type: The media type.
        download_name: The file name for a download.

    Raises:
        MissingObjectError: The file does not exist.
        StoreError: The store cannot be reached when the response is created.
    """
    size = await run_in_threadpool(file.size)
    headers = {"accept-ranges": "bytes", "content-disposition": f'inline; filename="{download_name}"'}
    byte_range = parse_range(request.headers.get("range"), size)
    start, end = byte_range or (0, size)
    if byte_range is not None and start >= end:
        return unsatisfiable_response(request, size)
    status = 200 if byte_range is None else 206
    headers |= {"content-length": str(end - start)}
    headers |= {} if byte_range is None else {"content-range": f"bytes {start}-{end - 1}/{size}"}
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=media_type)
    first_piece = await run_in_threadpool(file.read_part, start, min(start + PIECE_BYTES, end)) if end > start else b""
    return StreamingResponse(_read_pieces(file, first_piece, start, end), status, headers, media_type=media_type)


def unsatisfiable_response(request: Request, size: int) -> Response:
    """Return the response to a range that lies outside a file."""
    message = f"the range {repr_short(request.headers['range'])} lies outside the file: it has {size:,} bytes from 0"
    return error_response(416, message, param="Range", accept_ranges="bytes", content_range=f"bytes */{size}")


async def _read_pieces(file: RemotePath, first_piece: bytes, start: int, end: int) -> AsyncIterator[bytes]:
    """Yield a file in pieces. The first piece is `first_piece`, which the caller has already read.

    Raises:
        TruncatedResponse: A later piece cannot be read.
    """
    yield first_piece
    for piece_start, piece_end in pairwise([*range(start + PIECE_BYTES, end, PIECE_BYTES), end]):
        try:
            yield await run_in_threadpool(file.read_part, piece_start, piece_end)
        except WanjaxError as error:
            logger.error("%s", error)
            raise TruncatedResponse from error


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Parse a Range header into the start and the end of a range. Return None for the whole file.

    The range is empty if it lies outside the file. An invalid header and a header with several ranges mean the whole
    file.
    """
    match = RANGE.fullmatch(header or "")
    first_byte, last_byte = match.groups() if match else ("", "")
    if not first_byte:
        return (max(0, size - int(last_byte)), size) if last_byte else None
    if last_byte and int(last_byte) < int(first_byte):
        return None
    return int(first_byte), min(size, int(last_byte) + 1) if last_byte else size
