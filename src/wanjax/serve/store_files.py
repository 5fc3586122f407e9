# SPDX-License-Identifier: Apache-2.0
"""Files in a store as answers, whole or in the part that a request's Range names (RFC 9110, section 14)."""

import logging
import re
from collections.abc import AsyncIterator
from itertools import pairwise

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from wanjax.errors import WanjaxError
from wanjax.serve.auth import CutShort
from wanjax.stores.paths import RemotePath

PIECE = 2 * 2**20  # bytes that are in memory at a time
RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)
logger = logging.getLogger("wanjax.serve")


async def range_response(request: Request, file: RemotePath, kind: str, name: str) -> Response:
    """Return the answer with an object of a store, which is read while it is sent; `name` is that of the download.

    Raises Missing where there is none, and StoreError where the store is out of reach before the answer begins.
    """
    size = await run_in_threadpool(file.size)
    headers = {"accept-ranges": "bytes", "content-disposition": f'inline; filename="{name}"'}
    part = part_of(request.headers.get("range"), size)
    start, end = part or (0, size)
    if part is not None and start >= end:
        return Response(status_code=416, headers=headers | {"content-range": f"bytes */{size}"})
    status = 200 if part is None else 206
    headers |= {"content-length": str(end - start)}
    headers |= {} if part is None else {"content-range": f"bytes {start}-{end - 1}/{size}"}
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=kind)
    first = await run_in_threadpool(file.read_part, start, min(start + PIECE, end)) if end > start else b""
    return StreamingResponse(_pieces(file, first, start, end), status, headers, media_type=kind)


async def _pieces(file: RemotePath, first: bytes, start: int, end: int) -> AsyncIterator[bytes]:
    """Yield the pieces of an object of which the first is read; raise CutShort where another cannot be."""
    yield first
    for begin, until in pairwise([*range(start + PIECE, end, PIECE), end]):
        try:
            yield await run_in_threadpool(file.read_part, begin, until)
        except WanjaxError as error:
            logger.error("%s", error)
            raise CutShort from error


def part_of(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the start and the end of the part that a Range names, or None for all of the file.

    The part is empty where the file has none such. All is also what a Range means that is none, or names several parts.
    """
    match = RANGE.fullmatch(header or "")
    first, last = match.groups() if match else ("", "")
    if not first:
        return (max(0, size - int(last)), size) if last else None
    if last and int(last) < int(first):
        return None
    return int(first), min(size, int(last) + 1) if last else size
