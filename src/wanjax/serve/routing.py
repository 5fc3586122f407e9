# SPDX-License-Identifier: Apache-2.0
"""The routes of the HTTP interface, and answers to requests for paths and methods that it does not have."""

import re
from collections.abc import Awaitable, Callable, Iterable
from difflib import SequenceMatcher

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Route

from wanjax.errors import SettingError, repr_short, suggest_choice
from wanjax.serve.auth import error_response

UNSUPPORTED_ROUTES = ("/v1/videos/{id}/remix", "/v1/videos/edits", "/v1/videos/extensions", "/v1/videos/characters")
"""Endpoints of OpenAI's videos API that this server does not support."""
MIN_SIMILARITY = 0.7  # the minimum similarity of each part of a mistyped path: "video" and "videos" have 0.9
PATHS_OF_OTHER_SERVERS = re.compile(
    r"(/v\d+)?/(api/)?(generate|generations?|prompt|predict(ions)?|txt2vid|t2v|text-to-video|(images?|videos?)/generat\w+|"
    r"sdapi/.*)",
    re.IGNORECASE,
)
"""Matches the paths with which other servers make a picture or a video."""
VERSION_PREFIX = re.compile(r"^(?:/v\d+)+(?=/|$)", re.IGNORECASE)


def checked_route(method: str, path: str, handler: Callable[[Request], Awaitable[Response]], *parameters: str) -> Route:
    """Return a route that accepts only these query parameters, each at most once."""

    async def checked(request: Request) -> Response:
        for name in (query := request.query_params):
            if name not in parameters:
                advice = suggest_choice(name, parameters) if parameters else "this path takes none, so leave it out"
                raise SettingError(f"{repr_short(name)} is not a query parameter here: {advice}", name[:40])
            if (count := len(query.getlist(name))) > 1:
                raise SettingError(f"{name} is given {count} times: give it once", name)
        return await handler(request)

    return Route(path, checked, methods=[method])


def path_not_found(request: Request, error: Exception) -> JSONResponse:
    """Answer a request for an unknown path, and suggest a similar one that exists."""
    path = request.scope["path"]
    methods = _methods_by_path(request.app.routes)
    if PATHS_OF_OTHER_SERVERS.fullmatch(path.rstrip("/")):
        advice = "POST /v1/videos makes a video"
    elif (similar := _similar_path(path, methods)) is not None:
        template, suggestion = similar
        advice = f"did you mean {suggestion[:80]} ({', '.join(methods[template])})?"
    else:
        advice = "GET /openapi.json lists all paths"
    return error_response(404, f"unknown path {path[:80]!r}: {advice}", "not_found")


def _methods_by_path(routes: Iterable[BaseRoute]) -> dict[str, list[str]]:
    """Return the methods of each supported path, such as /v1/videos/{id}. HEAD is left out, because each GET includes
    it."""
    methods: dict[str, list[str]] = {}
    for route in routes:
        if isinstance(route, Route) and route.path not in UNSUPPORTED_ROUTES:
            methods.setdefault(route.path, []).extend((route.methods or set()) - {"HEAD"})
    return {path: sorted(names) for path, names in methods.items()}


def _similar_path(path: str, templates: Iterable[str]) -> tuple[str, str] | None:
    """Return the path template that is most similar to a path, and the template with the id of the path. Return None if
    no template is similar.

    A version such as /v1, case, a trailing slash and one part after a name are ignored.
    """
    parts = VERSION_PREFIX.sub("", path).strip("/").split("/")
    candidates: list[tuple[float, str, str]] = []
    for template in templates:
        names = VERSION_PREFIX.sub("", template).strip("/").split("/")
        spare_parts = (0,) if names[-1] == "{id}" else (0, 1)
        if not names[0] or len(parts) - len(names) not in spare_parts:
            continue
        pairs = list(zip(names, parts, strict=False))
        ratios = [
            float(bool(part)) if name == "{id}" else SequenceMatcher(None, name, part[:40].lower()).ratio()
            for name, part in pairs
        ]
        if min(ratios) >= MIN_SIMILARITY:
            id = next((part for name, part in pairs if name == "{id}"), "")
            candidates.append((len(names) + min(ratios), template, template.replace("{id}", id)))
    return max(candidates)[1:] if candidates else None


def method_not_allowed(request: Request, error: Exception) -> JSONResponse:
    """Answer a request whose method the path does not support."""
    path = request.scope["path"]
    methods = ", ".join(_methods_of(request, path) or ("GET", "HEAD"))  # the fallback is for static files
    method, parent = request.method[:20], path.rstrip("/").rpartition("/")[0]
    other_path = f", or {method} {parent[:80]}" if request.method in _methods_of(request, parent) else ""
    return error_response(
        405, f"{path[:80]} does not support {method}: use {methods}{other_path}", "not_allowed", allow=methods
    )


def _methods_of(request: Request, path: str) -> list[str]:
    """Return the methods that a path supports."""
    scope = {**request.scope, "path": path, "root_path": ""}
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = [route for route in routes if route.matches(scope)[0] != Match.NONE]
    return sorted({method for route in matching for method in route.methods or ()})
