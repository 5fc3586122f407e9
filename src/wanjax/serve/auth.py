# SPDX-License-Identifier: Apache-2.0
"""Authentication and limits of request bodies, checked by a middleware before the application reads a request.

Without a token, the server answers only requests from its own machine that use a loopback host name. The check of the
host name prevents web pages from reaching the server through the user's browser (DNS rebinding). A request with proxy
headers counts as remote, even if the proxy runs on this machine. With a token, every path requires the token except the
page's files, /login and /health. A browser request that changes something must come from the server's own page.
"""

import asyncio
import hmac
import ipaddress
from collections import Counter
from collections.abc import Iterable, Iterator
from http.cookies import CookieError, SimpleCookie
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wanjax.errors import WanjaxError, repr_short

COOKIE = "wanjax_token"
HEALTH = "/health"
PUBLIC_PATHS = ("/login", HEALTH)  # paths that need no token, in addition to the page and its files
PAGE_PATH, PAGE_FOLDER = "/", "/page/"
MAX_PARALLEL_UPLOADS = 8  # all bodies that arrive at the same time may have this many times `max_body_bytes`
SEND_TIMEOUT = 60.0  # seconds in which a client must accept a part of a response
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
PROXY_HEADERS = ("forwarded", "via", "x-real-ip")  # headers that proxies add
PROXY_HEADER_PREFIX = "x-forwarded"  # X-Forwarded-For, -Host, -Proto, -Port and others
DEFAULT_PORTS = {"http": 80, "https": 443}
PROXY_MESSAGE = "{} shows that a proxy forwarded this request, which requires a token: start the server with --token"
FOREIGN_PAGE_MESSAGE = (
    "requests from the page of another site, {}, are blocked: behind a proxy, start the server with --token and, if "
    "the proxy does not send X-Forwarded-Host, with --origin URL"
)
MIN_TOKEN_LENGTH = 16  # characters
SECURITY_HEADERS = {
    b"content-security-policy": b"default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; "
    b"frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"same-origin",  # sends the page's URL to this server and to no other site
}


def error_response(
    status: int, message: str, code: str = "invalid_request", param: str | None = None, **headers: str
) -> JSONResponse:
    """Build an error response in the format of OpenAI's API. `param` is the wrong field, or None."""
    error_type = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": error_type, "param": param, "code": code}
    return JSONResponse({"error": error}, status, {name.replace("_", "-"): text for name, text in headers.items()})


class Origin(NamedTuple):
    """The origin of a web page, as a browser sends it in the Origin header."""

    scheme: str
    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> "Origin | None":
        """Parse an origin such as https://videos.example:8443. Return None if the text is not an origin."""
        try:
            parts = urlsplit(text)
            port = DEFAULT_PORTS[parts.scheme] if parts.port is None else parts.port
        except (ValueError, KeyError):
            return None
        has_extra_parts = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
        return None if has_extra_parts or not parts.hostname or not port else cls(parts.scheme, parts.hostname, port)


class Access(NamedTuple):
    """The clients that may send requests: clients with the token, or only this machine if the token is None.

    Args:
        token: The token of the server.
        origins: Origins from which the page may be opened, in addition to the server's own origin.
    """

    token: str | None = None
    origins: tuple[Origin, ...] = ()

    @classmethod
    def read(cls, host: str, token: str | None, origins: Iterable[str]) -> "Access":
        """Parse the options for a server that listens at `host`.

        Raises:
            WanjaxError: The token is missing or too short, or an origin is invalid.
        """
        if token is None and not is_loopback(host):
            raise WanjaxError(
                f"--host {host} may let other machines in, which requires a token: set one of {MIN_TOKEN_LENGTH} "
                "characters or more with --token or WANJAX_TOKEN"
            )
        if token is not None and (len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable()):
            raise WanjaxError(
                f"the token must have at least {MIN_TOKEN_LENGTH} characters, all printable ASCII: use a longer one"
            )
        accepted_origins = []
        for text in origins:
            if token is None:
                raise WanjaxError(
                    f"--origin {text} requires a token: set one of {MIN_TOKEN_LENGTH} characters or more with --token"
                )
            if (origin := Origin.read(text)) is None:
                example = "https://videos.example, without a path"
                raise WanjaxError(f"--origin {repr_short(text)} is not an origin: use one such as {example}")
            accepted_origins.append(origin)
        return cls(token, tuple(accepted_origins))


class TruncatedResponse(Exception):
    """A response started but cannot be completed."""


class AuthMiddleware:
    """ASGI middleware that checks access and limits the size of request bodies.

    Args:
        application: The wrapped application.
        access: Who may send requests.
        max_body_bytes: The maximum size of one request body.
        status_counts: Receives the number of responses by status.
    """

    def __init__(self, application: ASGIApp, access: Access, max_body_bytes: int, status_counts: Counter[int]):
        self.application = application
        self.token, self.origins = access
        self.max_body_bytes = max_body_bytes
        self.status_counts = status_counts
        self.pending_bytes = 0  # the bytes that have arrived of all request bodies that are not complete

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.application(scope, receive, send)
        if scope["type"] != "http":
            return None

        async def send_response(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status_counts[message["status"]] += 1
                message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS.items()]
            await asyncio.wait_for(send(message), SEND_TIMEOUT)  # disconnects a client that stops reading

        headers = Headers(scope=scope)
        if (error := self._access_error(scope, headers)) is not None:
            return await error(scope, receive, send_response)
        part_sizes: list[int] = []
        try:
            return await self.application(scope, self._limit_body(receive, part_sizes), send_response)
        except (TimeoutError, TruncatedResponse):  # TimeoutError means that the client does not read
            return None  # returning with an incomplete response closes the connection
        finally:
            self.pending_bytes -= sum(part_sizes)

    def _access_error(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        """Return an error response for a request that is not allowed; return None for an allowed request."""
        if self.token is None and (reason := _remote_reason(scope, headers)) is not None:
            return error_response(403, reason, "forbidden")
        if (
            scope["method"] not in SAFE_METHODS
            and "origin" in headers
            and not self._is_own_origin(headers["origin"], headers)
        ):
            message = FOREIGN_PAGE_MESSAGE.format(repr_short(headers["origin"]))
            return error_response(403, message, "forbidden")
        is_public = scope["path"] in PUBLIC_PATHS or _is_page(scope["path"])
        if self.token is not None and not is_public and not any(map(self.is_token, _request_tokens(headers))):
            message = "the token is missing or wrong: send the header `Authorization: Bearer TOKEN`"
            return error_response(401, message, "invalid_token", www_authenticate="Bearer")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self.max_body_bytes:
            return error_response(413, self._size_message(), "too_large", connection="close")
        return None

    def _is_own_origin(self, text: str, headers: Headers) -> bool:
        """Return True if an Origin header names an address of this server.

        The request then comes from the server's own page.

        X-Forwarded-Host can be trusted here, although any client can send it. The attack to prevent is another site's
        page in the browser of a user who has this server's cookie. Such a page cannot choose its Origin. To add
        X-Forwarded-Host to a cross-site request, the page would need the server's permission in a preflight response,
        and this server never gives that permission. Programs other than browsers can set any header, but do not have
        the user's cookie.
        """
        if (origin := Origin.read(text)) is None:
            return False
        host = headers.get("host", "")
        return origin in (*self.origins, forwarded_origin(headers)) or urlsplit(text).netloc == host

    def is_token(self, token: str) -> bool:
        """Compare a token with the server's, in constant time."""
        return self.token is None or hmac.compare_digest(token.encode(), self.token.encode())

    def _limit_body(self, receive: Receive, part_sizes: list[int]) -> Receive:
        """Wrap the stream of a request's body. The wrapper appends the size of each part to `part_sizes`.

        Raises:
            HTTPException: 413 if the body is longer than the limit, or 503 if all current bodies together are too long.
        """

        async def read() -> Message:
            message = await receive()
            part_sizes.append(len(message.get("body", b"")))
            self.pending_bytes += part_sizes[-1]
            if sum(part_sizes) > self.max_body_bytes:
                raise HTTPException(413, self._size_message())
            if self.pending_bytes > MAX_PARALLEL_UPLOADS * self.max_body_bytes:
                raise HTTPException(503, "too many large requests at the same time: try again later")
            return message

        return read

    def _size_message(self) -> str:
        return f"the request is too large: it may have {self.max_body_bytes / 2**20:g} MiB at most"


def _request_tokens(headers: Headers) -> Iterator[str]:
    """Yield the tokens of a request: from the Authorization header, otherwise from the cookies.

    A browser sends several cookies if several servers run under nested paths of one host.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield token.strip()
        return
    for part in ";".join(headers.getlist("cookie")).split(";"):
        try:
            yield from (cookie.value for name, cookie in SimpleCookie(part).items() if name == COOKIE)
        except CookieError:
            continue


def _remote_reason(scope: Scope, headers: Headers) -> str | None:
    """Return the reason why a request counts as remote. Return None if nothing shows that it comes from another
    machine.

    One case cannot be recognised: the request of a program through a proxy on this machine, if the proxy uses this
    server's own address and adds no header. nginx has behaved like this by default since 1.29.7. Older versions of
    nginx use HTTP/1.0, which reveals them, because no browser uses HTTP/1.0.
    """
    client, host = (scope.get("client") or ("",))[0], headers.get("host")
    # only monitors send HTTP/1.0 without Host; browsers and proxies do not
    is_health_check = host is None and scope["path"] == HEALTH
    if not is_loopback(client) or not (is_health_check or is_loopback(_host_of(f"//{host or ''}"))):
        return "a server without a token answers only its own machine: start it with --token"
    for name in headers:
        if name in PROXY_HEADERS or name.startswith(PROXY_HEADER_PREFIX):
            return PROXY_MESSAGE.format(f"the header {name}")
    if scope["http_version"] == "1.0" and not is_health_check:
        return PROXY_MESSAGE.format("HTTP/1.0")
    page_host = _host_of(headers.get("origin") or headers.get("referer", ""))
    is_navigation = headers.get("sec-fetch-mode") == "navigate"  # other sites may link to the page of this server
    if page_host and not is_loopback(page_host) and not is_navigation and not _is_page(scope["path"]):
        return FOREIGN_PAGE_MESSAGE.format(repr_short(page_host))
    return None


def _is_page(path: str) -> bool:
    """Return True if a path belongs to the page or its files, which are public."""
    return path == PAGE_PATH or path.startswith(PAGE_FOLDER)


def forwarded_origin(headers: Headers) -> Origin | None:
    """Return the origin that a browser requested from a proxy; return None if the headers do not contain it.

    If there are several proxies, the first entry of each header comes from the proxy closest to the browser. A missing
    scheme is taken from Origin. A missing port is taken from X-Forwarded-Port or, if that is missing, from the scheme.
    """
    host, scheme, port = (_first_entry(headers, f"x-forwarded-{part}") for part in ("host", "proto", "port"))
    scheme = scheme or headers.get("origin", "").partition(":")[0]
    if host and (origin := Origin.read(f"{scheme.lower()}://{host}")) is not None:
        has_port = urlsplit(f"//{host}").port is not None
        return origin if has_port or not port.isdecimal() else origin._replace(port=int(port[:5]))
    return None


def is_encrypted(scope: Scope, headers: Headers) -> bool:
    """Return True if the browser uses HTTPS, to this server or to a proxy."""
    schemes = scope["scheme"], _first_entry(headers, "x-forwarded-proto"), headers.get("origin", "").partition(":")[0]
    return "https" in schemes


def _first_entry(headers: Headers, name: str) -> str:
    """Return the first entry of a comma-separated header; return "" if the header is missing."""
    return headers.get(name, "").partition(",")[0].strip()


def _host_of(url: str) -> str:
    """Return the host of a URL without its port, or "" if there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Return True if a host name or address is a loopback name or address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
