# SPDX-License-Identifier: Apache-2.0
"""Who may ask, and how much: a layer around the application, before anything of a request is read.

Without a token only this machine is answered, and only by its own names, so that no page of the web reaches the server
through the user's browser. With one, all but the page's files and the health needs it.
"""

import asyncio
import hmac
import ipaddress
from collections import Counter
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "wanjax_token"
OPEN = ("/", "/login", "/health")  # paths that need no token
OPEN_FOLDER = "/page/"
TOGETHER = 8  # of the largest requests may arrive at a time
SEND_SECONDS = 60.0
SAFE = ("GET", "HEAD", "OPTIONS")
HEADERS = {
    b"content-security-policy": b"default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'; "
    b"base-uri 'none'; form-action 'self'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
}


def refusal(
    status: int, message: str, code: str = "invalid_request", param: str | None = None, **headers: str
) -> JSONResponse:
    """Returns an error as OpenAI's API writes one; `param` is the field that is wrong, where it is one."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status, {name.replace("_", "-"): text for name, text in headers.items()})


class CutShort(Exception):
    """An answer that began and cannot be completed."""


class Guard:
    """The application, for those who may ask. `upload` is the most bytes of a request; `answers` counts by status."""

    def __init__(self, application: ASGIApp, token: str | None, upload: int, answers: Counter[int]):
        self.application = application
        self.token = token
        self.upload = upload
        self.answers = answers
        self.arriving = 0  # bytes of the bodies of all requests that are under way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.application(scope, receive, send)
        if scope["type"] != "http":
            return None

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.answers[message["status"]] += 1
                message["headers"] = [*message.get("headers", ()), *HEADERS.items()]
            await asyncio.wait_for(send(message), SEND_SECONDS)  # for which a client may leave the last part unread

        headers = Headers(scope=scope)
        if (refused := self._refusal(scope, headers)) is not None:
            return await refused(scope, receive, answer)
        taken: list[int] = []
        try:
            return await self.application(scope, self._bounded(receive, taken), answer)
        except (TimeoutError, CutShort):  # the former where the client does not read
            return None  # an answer that is not complete closes its connection
        finally:
            self.arriving -= sum(taken)

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        """Returns the answer to a request that is not let in."""
        client, host = (scope.get("client") or ("",))[0], headers.get("host", "")
        if self.token is None and not (is_loopback(client) and is_loopback(_name(host))):
            return refusal(403, "this server answers its own machine alone, because it has no token", "forbidden")
        if scope["method"] not in SAFE and "origin" in headers and _origin(headers["origin"]) != host:
            return refusal(403, "a page of another site may ask nothing of this server", "forbidden")
        if self.token is not None and not self._is_open(scope["path"]) and not self.knows(_given(headers)):
            why = "the token is missing or wrong: the header `Authorization: Bearer TOKEN` has it"
            return refusal(401, why, "invalid_token", www_authenticate="Bearer")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self.upload:
            return refusal(413, self._too_large(), "too_large", connection="close")
        return None

    def _is_open(self, path: str) -> bool:
        return path in OPEN or path.startswith(OPEN_FOLDER)

    def knows(self, given: str) -> bool:
        """Tells whether this is the token, in a time that does not depend on where it differs."""
        return self.token is None or hmac.compare_digest(given.encode(), self.token.encode())

    def _bounded(self, receive: Receive, taken: list[int]) -> Receive:
        """Returns the stream of a request's body, whose parts are counted in `taken`.

        It ends with 413 where it is longer than its header said, and with 503 where all bodies are too long together.
        """

        async def read() -> Message:
            message = await receive()
            taken.append(len(message.get("body", b"")))
            self.arriving += taken[-1]
            if sum(taken) > self.upload:
                raise HTTPException(413, self._too_large())
            if self.arriving > TOGETHER * self.upload:
                raise HTTPException(503, "too many large requests arrive at once: try again later")
            return message

        return read

    def _too_large(self) -> str:
        return f"a request may have {self.upload / 2**20:g} MiB at most"


def _given(headers: Headers) -> str:
    """Returns the token of a request, in its header or its cookie."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    try:
        found: Any = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


def _origin(address: str) -> str | None:
    """Returns the host and port of an Origin header; None where it is none."""
    try:
        return urlsplit(address).netloc
    except ValueError:
        return None


def _name(host: str) -> str:
    """Returns the host of a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Tells whether a host's name or address is this machine's own."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
