# SPDX-License-Identifier: Apache-2.0
"""Who may ask, and how much: a layer around the application, before anything of a request is read.

Without a token only this machine is answered, and only by its own names, so that no page of the web reaches the server
through the user's browser. A request that shows that a proxy forwarded it comes from elsewhere, even where the proxy
runs here. With a token, all but the page's files and the health needs it, and a request that changes something has to
come from the server's own page or from no page at all.
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
OPEN = ("/login", HEALTH)  # paths that need no token, beside the page and its files
PAGE, PAGE_FOLDER = "/", "/page/"
TOGETHER = 8  # of the largest requests may arrive at a time
SEND_SECONDS = 60.0
SAFE = ("GET", "HEAD", "OPTIONS")
FORWARDED = ("forwarded", "via", "x-real-ip")  # headers of a request that a proxy sends on
FORWARDED_PREFIX = "x-forwarded"  # of -For, -Host, -Proto, -Port and their like
PORTS = {"http": 80, "https": 443}
PROXY = "{} tells of a proxy, and a server behind one needs a token: start it with --token"
SHORTEST = 16  # characters of a token
HEADERS = {
    b"content-security-policy": b"default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; "
    b"frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"same-origin",  # so that the page tells this server, and no other, where it was opened
}


def refusal(
    status: int, message: str, code: str = "invalid_request", param: str | None = None, **headers: str
) -> JSONResponse:
    """Return an error as OpenAI's API writes one; `param` is the field that is wrong, where it is one."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status, {name.replace("_", "-"): text for name, text in headers.items()})


class Origin(NamedTuple):
    """Where a page is from: the address that a browser sends in the header Origin."""

    scheme: str
    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> "Origin | None":
        """Return the origin in a text such as https://videos.example:8443; None where the text is none."""
        try:
            parts = urlsplit(text)
            port = parts.port or PORTS[parts.scheme]
        except (ValueError, KeyError):
            return None
        extra = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
        return None if extra or not parts.hostname else cls(parts.scheme, parts.hostname, port)


class Access(NamedTuple):
    """Who may ask: those who know the token, or this machine alone where it is None.

    `origins` are the addresses, beside the server's own, from which the page may be opened.
    """

    token: str | None = None
    origins: tuple[Origin, ...] = ()

    @classmethod
    def read(cls, host: str, token: str | None, origins: Iterable[str]) -> "Access":
        """Return the access to a server that listens at `host`.

        Raises:
            WanjaxError: The token is missing where one is needed, or is easily guessed, or an origin is no address.
        """
        if token is None and not is_loopback(host):
            raise WanjaxError(f"{host} is open to other machines, for which a token is needed: --token sets it")
        if token is not None and (len(token) < SHORTEST or not token.isascii() or not token.isprintable()):
            raise WanjaxError(f"the token is to have {SHORTEST} or more characters of ASCII, so that no one guesses it")
        accepted = []
        for text in origins:
            if token is None:
                raise WanjaxError(f"--origin {text} is for a server with a token, which a proxy needs: --token sets it")
            if (origin := Origin.read(text)) is None:
                right = "https://videos.example, without a path,"
                raise WanjaxError(f"--origin is given as {repr_short(text)}: use an address such as {right}")
            accepted.append(origin)
        return cls(token, tuple(accepted))


class CutShort(Exception):
    """An answer that began and cannot be completed."""


class Guard:
    """The application, for those who may ask. `upload` is the most bytes of a request; `answers` counts by status."""

    def __init__(self, application: ASGIApp, access: Access, upload: int, answers: Counter[int]):
        self.application = application
        self.token, self.origins = access
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
        """Return the answer to a request that is not let in."""
        if self.token is None and (why := _why_not_local(scope, headers)) is not None:
            return refusal(403, why, "forbidden")
        if scope["method"] not in SAFE and "origin" in headers and not self._is_own(headers["origin"], headers):
            why = "a page of another site may ask nothing of this server: behind a proxy, start it with --origin URL"
            return refusal(403, why, "forbidden")
        is_open = scope["path"] in OPEN or _is_page(scope["path"])
        if self.token is not None and not is_open and not any(map(self.knows, _tokens(headers))):
            why = "the token is missing or wrong: the header `Authorization: Bearer TOKEN` has it"
            return refusal(401, why, "invalid_token", www_authenticate="Bearer")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self.upload:
            return refusal(413, self._too_large(), "too_large", connection="close")
        return None

    def _is_own(self, text: str, headers: Headers) -> bool:
        """Tell whether a header Origin names an address of this server, so that its own page asks.

        X-Forwarded-Host may be trusted here, though any client can send it. What is to be kept out is another site's
        page in the browser of somebody who has this server's cookie. Such a page cannot choose its Origin, and may not
        add X-Forwarded-Host to a request to another site, unless the server allows it in answer to a preflight, and
        this one allows none. Programs other than browsers choose all their headers, but have nobody's cookie.
        """
        if (origin := Origin.read(text)) is None:
            return False
        host = headers.get("host", "")
        return origin in (*self.origins, forwarded_origin(headers)) or urlsplit(text).netloc == host

    def knows(self, token: str) -> bool:
        """Return whether this is the token, in a time that does not depend on where it differs."""
        return self.token is None or hmac.compare_digest(token.encode(), self.token.encode())

    def _bounded(self, receive: Receive, taken: list[int]) -> Receive:
        """Return the stream of a request's body, whose parts are counted in `taken`.

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


def _tokens(headers: Headers) -> Iterator[str]:
    """Yield the tokens of a request: that of its header, else those of its cookies.

    A browser sends several cookies where the paths of several servers on one host lie in each other.
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


def _why_not_local(scope: Scope, headers: Headers) -> str | None:
    """Return why a request is not this machine's; None where nothing shows that it is not.

    Nothing shows it where a program asks a proxy that runs here, calls this server by its own address and adds no
    header. That is nginx's default since 1.29.7; before, it spoke HTTP/1.0, which no browser does.
    """
    client, host = (scope.get("client") or ("",))[0], headers.get("host")
    is_check = host is None and scope["path"] == HEALTH  # of a monitor by HTTP/1.0, and of no browser or proxy
    if not is_loopback(client) or not (is_check or is_loopback(_host(f"//{host or ''}"))):
        return "this server answers its own machine alone, because it has no token"
    for name in headers:
        if name in FORWARDED or name.startswith(FORWARDED_PREFIX):
            return PROXY.format(f"the header {name}")
    if scope["http_version"] == "1.0" and not is_check:
        return PROXY.format("HTTP/1.0")
    page = _host(headers.get("origin") or headers.get("referer", ""))
    was_followed = headers.get("sec-fetch-mode") == "navigate"  # a link may stand on any page
    if page and not is_loopback(page) and not was_followed and not _is_page(scope["path"]):
        return (
            f"a page of another site, {repr_short(page)}, may ask nothing of this server: behind a proxy, use --token"
        )
    return None


def _is_page(path: str) -> bool:
    """Tell whether a path is that of the page or of a file that it loads, which are nobody's secret."""
    return path == PAGE or path.startswith(PAGE_FOLDER)


def forwarded_origin(headers: Headers) -> Origin | None:
    """Return the address that a browser asked of a proxy, by the proxy's headers; None where they do not tell it.

    Of several proxies the first in each list is the one that the browser asked. Without a scheme it is taken from
    Origin, and without a port it is that of the header beside, else the scheme's.
    """
    host, scheme, port = (_first(headers, f"x-forwarded-{part}") for part in ("host", "proto", "port"))
    scheme = scheme or headers.get("origin", "").partition(":")[0]
    if host and (origin := Origin.read(f"{scheme.lower()}://{host}")) is not None:
        has_port = urlsplit(f"//{host}").port is not None
        return origin if has_port or not port.isdecimal() else origin._replace(port=int(port[:5]))
    return None


def is_encrypted(scope: Scope, headers: Headers) -> bool:
    """Tell whether a browser asks by https, here or of a proxy."""
    schemes = scope["scheme"], _first(headers, "x-forwarded-proto"), headers.get("origin", "").partition(":")[0]
    return "https" in schemes


def _first(headers: Headers, name: str) -> str:
    """Return the first entry of a header's list; "" where there is none."""
    return headers.get(name, "").partition(",")[0].strip()


def _host(url: str) -> str:
    """Return the host of a URL, without its port; "" where it has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is this machine's own."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
