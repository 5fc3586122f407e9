# SPDX-License-Identifier: Apache-2.0
"""The HTTP interface: requests in the shape of OpenAI's former videos API, events, metrics, and the page."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from mimetypes import guess_type
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from wanjax.errors import SettingError, WanjaxError, shown
from wanjax.media.videos import read_metadata
from wanjax.pipelines.record import VERSION
from wanjax.serve import asked, metrics, stored
from wanjax.serve.board import BROKE, Board, ClosedError, FullError, UnknownError, Videos, Watcher
from wanjax.serve.faults import UNEXPECTED, explained, storing
from wanjax.serve.guard import COOKIE, Access, Guard, is_encrypted, refusal
from wanjax.serve.jobs import COMPLETED, PREVIEW, THUMBNAIL, VIDEO, Job, files_in
from wanjax.serve.limits import Limits
from wanjax.serve.mirror import Mirror
from wanjax.serve.owner import AwayError
from wanjax.serve.variants import Known
from wanjax.stores.places import Missing, Remote

PAGE = files("wanjax.serve") / "page"
FIELDS, FILES = 64, 12  # of a form
FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
BODY_SECONDS = 60.0  # in which a request has to arrive
HEARTBEAT = 15.0  # seconds between signs of life of an idle stream
AWAY = "the table of videos is out of reach for a while: try again later"
T = TypeVar("T")
logger = logging.getLogger("wanjax.serve")
CONTENT: dict[str, tuple[str, str | None]] = {
    "video": (VIDEO, "video/mp4"),
    "thumbnail": (THUMBNAIL, "image/webp"),
    "preview": (PREVIEW, "image/png"),
}
NOT_OFFERED = ("/v1/videos/{id}/remix", "/v1/videos/edits", "/v1/videos/extensions", "/v1/videos/characters")
"""Requests of OpenAI's videos API that have no counterpart here."""
RESULTS = ("video", "thumbnail")  # of which there are whole ones alone


class Events(StreamingResponse):
    """A stream of events, which frees the place of its watcher at its end."""

    def __init__(self, board: Videos, watcher: Watcher, content: AsyncIterator[str]):
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # the latter is for nginx
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self.board, self.watcher = board, watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.board.leave(self.watcher)


@dataclass(frozen=True)
class Service:
    """All that answers need: the videos or a copy of them, and the models as they are known and told to clients."""

    board: Board | Mirror
    known: Known
    told: Sequence[dict[str, Any]]
    limits: Limits
    access: Access

    def application(self) -> Guard:
        """Returns the application, behind its guard."""
        routes = [
            Route("/v1/videos", self.create, methods=["POST"]),
            Route("/v1/videos", self.videos, methods=["GET"]),
            Route("/v1/videos/{id}", self.show, methods=["GET"]),
            Route("/v1/videos/{id}", self.remove, methods=["DELETE"]),
            Route("/v1/videos/{id}/cancel", self.cancel, methods=["POST"]),
            Route("/v1/videos/{id}/content", self.content, methods=["GET"]),
            Route("/v1/videos/{id}/record", self.record, methods=["GET"]),
            Route("/v1/videos/{id}/events", self.events, methods=["GET"]),
            *(Route(path, self.not_offered, methods=["POST"]) for path in NOT_OFFERED),
            Route("/v1/events", self.events, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/login", self.login, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.measured, methods=["GET"]),
            Route("/", lambda request: FileResponse(str(PAGE / "index.html")), methods=["GET"]),
            Mount("/page", StaticFiles(directory=str(PAGE))),
        ]
        handlers: dict[Any, Callable[..., Any]] = {
            HTTPException: lambda request, error: refusal(error.status_code, error.detail),
            WanjaxError: self._refused,
            FullError: lambda request, error: refusal(429, str(error), "queue_full", retry_after="5"),
            ClosedError: lambda request, error: refusal(503, str(error), "ending", retry_after="30"),
            AwayError: lambda request, error: refusal(503, AWAY, "away", retry_after="5"),
            UnknownError: lambda request, error: refusal(404, str(error), "not_found"),
            ClientDisconnect: lambda request, error: Response(status_code=400),
            Exception: lambda request, error: refusal(500, UNEXPECTED, "internal"),
        }
        application = Starlette(routes=routes, exception_handlers=handlers)
        application.router.redirect_slashes = False  # to a full address, which is not the client's behind a proxy
        guard = Guard(application, self.access, self.limits.upload, self.board.answers)
        guard.application.state.guard = guard  # pyright: ignore[reportFunctionMemberAccess]
        return guard

    def _refused(self, request: Request, error: Exception) -> Response:
        """Answers an error that is told in a sentence."""
        found = explained(error, [self.board.shelf.folder, *self.known.folders])
        if found.own:
            logger.error("%s %s: %s", request.method, request.url.path, error)
        return refusal(found.status, found.message, found.code, getattr(error, "setting", None))

    async def create(self, request: Request) -> JSONResponse:
        """Takes a request for a video, as a form or as JSON, and answers at once."""
        self.board.check_room()
        with storing():  # large files of a form, beside it
            fields, pictures = await _arrived(_body(request))
        job = await run_in_threadpool(self._accept, fields, pictures)
        return self._shown(job)

    @storing()
    def _accept(self, fields: Mapping[str, Any], pictures: Mapping[str, list[bytes]]) -> Job:
        """Checks a request, keeps its pictures and puts it on the board; leaves nothing of one that is refused."""
        request, given = asked.read(fields, pictures, self.known, self.limits)
        pipe = self.known.model(request.model)
        id = self.board.shelf.make_place().name
        try:
            with self.board.shelf.filled(id) as here:
                saved = asked.save_pictures(given, asked.inputs_of(pipe), here, self.limits)
                job = Job(id, {}, saved, scheduler=request.scheduler, lora=dict(request.lora))
                job.settings = asked.completed(request, pipe, files_in(here, job), self.limits).to_json()
            return self.board.add(job)
        except BaseException:
            self.board.shelf.remove(id)
            raise

    async def videos(self, request: Request) -> JSONResponse:
        """Lists videos, the newest first unless `order` is asc, at most `limit` after the one named `after`."""
        query = request.query_params
        limit, order = query.get("limit", "20"), query.get("order", "desc")
        if not re.fullmatch("[1-9][0-9]?|100", limit):
            raise SettingError(f"limit is {shown(limit)}: give a whole number from 1 to 100", "limit")
        if order not in ("asc", "desc"):
            raise SettingError(f"order is {shown(order)}: give asc or desc", "order")
        if "after" in query:
            await self._find(query["after"])
        jobs = list(self.board.jobs.values())  # in the table's order: a clock may be set back
        if order == "desc":
            jobs.reverse()
        ids = [job.id for job in jobs]
        start = ids.index(self.board.find(query["after"]).id) + 1 if "after" in query else 0
        page = jobs[start : start + int(limit)]
        return JSONResponse(
            {
                "object": "list",
                "data": [self._told(job) for job in page],
                "first_id": page[0].id if page else None,
                "last_id": page[-1].id if page else None,
                "has_more": start + len(page) < len(jobs),
            }
        )

    async def show(self, request: Request) -> JSONResponse:
        return self._shown(await self._find(request.path_params["id"]))

    async def remove(self, request: Request) -> JSONResponse:
        """Removes a video; one that waits or is under way is cancelled before."""
        id = request.path_params["id"]
        await run_in_threadpool(self.board.remove, id)
        return JSONResponse({"id": id, "object": "video.deleted", "deleted": True})

    async def cancel(self, request: Request) -> JSONResponse:
        return self._shown(await run_in_threadpool(self.board.cancel, request.path_params["id"]))

    async def not_offered(self, request: Request) -> JSONResponse:
        """Answer a request of OpenAI's videos API that this server does not offer."""
        name = request.url.path.rpartition("/")[2]
        why = f"{name} is not offered: POST /v1/videos asks for another video, with a picture or a clip if the model"
        return refusal(400, f"{why} takes one, which /v1/models tells", "not_offered")

    async def content(self, request: Request) -> Response:
        """Sends a finished video, or its middle frame as `thumbnail`.

        `preview` shows one that is under way too, and other variants are what it is made from.
        """
        variant = request.query_params.get("variant", "video")
        job = await self._find(request.path_params["id"], over=variant in RESULTS)
        own = {Path(name).stem: (name, None) for name in job.files}
        if variant not in (known := CONTENT | own):
            raise SettingError(f"the variant {shown(variant)} is not offered: {', '.join(known)} are", "variant")
        if job.status != COMPLETED and variant in RESULTS:
            return _unfinished(job)
        name, kind = known[variant]
        file = self.board.shelf.place(job.id) / name
        kind, own_name = kind or guess_type(name)[0] or "application/octet-stream", f"{job.id}{file.suffix}"
        if isinstance(file, Remote):
            with suppress(Missing):
                return await stored.answered(request, file, kind, own_name)
        elif file.is_file():
            return FileResponse(file, media_type=kind, filename=own_name, content_disposition_type="inline")
        return _gone(name)

    async def record(self, request: Request) -> Response:
        """Sends the record of a finished video: everything that shaped it, as its file has it."""
        job = await self._find(request.path_params["id"], over=True)
        if job.status != COMPLETED:
            return _unfinished(job)
        video = self.board.shelf.place(job.id) / VIDEO
        if not await run_in_threadpool(video.is_file):
            return _gone(VIDEO)
        with storing():
            return JSONResponse(await run_in_threadpool(read_metadata, video))

    async def events(self, request: Request) -> Response:
        """Streams changes as server-sent events: those of one video until its end, or of all."""
        only = request.path_params.get("id")
        if only is not None:
            await self._find(only)
        if self.board.watchers >= self.limits.streams:
            return refusal(429, f"{self.limits.streams} streams of events are open, as many as this server has")
        watcher = self.board.watch()  # counted before another request is looked at
        return Events(self.board, watcher, self._stream(only, watcher[1]))

    async def _stream(self, only: str | None, woken: asyncio.Event) -> AsyncIterator[str]:
        """Yields each change of a video, or of all videos."""
        version = 0 if only is not None else self.board.version
        yield "retry: 2000\n\n"
        while not self.board.closed:
            woken.clear()
            version, changed, removed = self.board.since(version, only)
            for job in changed:
                yield f"data: {json.dumps(self._told(job))}\n\n"
            for id in removed:
                yield f"data: {json.dumps({'id': id, 'object': 'video.deleted', 'deleted': True})}\n\n"
            if only is not None and (only not in self.board.jobs or self.board.jobs[only].over):
                return
            try:
                await asyncio.wait_for(woken.wait(), HEARTBEAT)
            except TimeoutError:
                yield ": still here\n\n"

    async def models(self, request: Request) -> JSONResponse:
        """Lists the models, the served one first: all that a request may ask, and what the server was started with."""
        about = {"object": "model", "owned_by": "wanjax", "limits": self.limits.to_json()}
        return JSONResponse({"object": "list", "data": [about | self.limits.telling(model) for model in self.told]})

    async def login(self, request: Request) -> Response:
        """Keeps the token of a form in a cookie, for the page."""
        token = await _arrived(_token(request))
        guard = request.app.state.guard
        if not isinstance(token, str) or not guard.knows(token.strip()):
            why = "the token is wrong: show the one with which the server was started"
            return refusal(401, why, "invalid_token")
        answer = Response(status_code=204)
        options: Any = {"httponly": True, "samesite": "strict", "max_age": 30 * 86400}
        options["secure"] = is_encrypted(request.scope, request.headers)
        # without a path a browser takes the folder of this address, which behind a proxy this server does not know
        answer.set_cookie(COOKIE, token.strip(), path=None, **options)
        return answer

    async def health(self, request: Request) -> JSONResponse:
        state = self.board.state
        found = {"status": state, "model": self.known.first, "queue": self.board.waiting, "version": VERSION}
        return JSONResponse(found, 503 if state == BROKE else 200)

    async def measured(self, request: Request) -> PlainTextResponse:
        return PlainTextResponse(metrics.text(self.board), headers={"content-type": metrics.CONTENT_TYPE})

    async def _find(self, id: str, *, over: bool = False) -> Job:
        """Returns a video; raises UnknownError.

        A copy of the board is renewed before it has no such video, or none that is `over` where that is asked for: who
        asks may have heard of it by another front.
        """
        if (job := self.board.jobs.get(id)) is None or (over and not job.over):
            await run_in_threadpool(self.board.renew)
        return self.board.find(id)

    def _told(self, job: Job) -> dict[str, Any]:
        return {**job.to_json(), "queue_position": self.board.position(job)}

    def _shown(self, job: Job) -> JSONResponse:
        return JSONResponse(self._told(job))


def _unfinished(job: Job) -> JSONResponse:
    return refusal(409, f"the video is {job.status.replace('_', ' ')}: only a completed one has content")


def _gone(name: str) -> JSONResponse:
    return refusal(404, f"the file {name} of this video is gone", "not_found")


async def _arrived(body: Coroutine[Any, Any, T]) -> T:
    """Returns what a request holds; raises HTTPException where it does not arrive in time."""
    try:
        return await asyncio.wait_for(body, BODY_SECONDS)
    except TimeoutError:
        raise HTTPException(408, f"the request did not arrive within {BODY_SECONDS:g} s") from None


async def _token(request: Request) -> Any:
    async with request.form(max_files=0, max_fields=1) as form:
        return form.get("token", "")


async def _body(request: Request) -> tuple[dict[str, Any], dict[str, list[bytes]]]:
    """Returns the fields of a request and its files; raises WanjaxError for a body that is neither form nor JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in FORMS:
        async with request.form(max_files=FILES, max_fields=FIELDS) as form:
            return await _form(form)
    if kind != "application/json":
        raise HTTPException(415, f"a video is asked for by application/json, {' or '.join(FORMS)}")
    try:
        found = json.loads(await request.body(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the request is no JSON: {str(error)[:100]}") from error
    if not isinstance(found, dict):
        raise HTTPException(400, 'the request is no JSON object: {"prompt": "a red circle"} is one')
    return found, {}


async def _form(form: FormData) -> tuple[dict[str, Any], dict[str, list[bytes]]]:
    """Returns a form's fields and files; an empty field counts as one that is not given."""
    fields: dict[str, Any] = {}
    files: dict[str, list[bytes]] = {}
    for given, value in form.multi_items():
        name = given.removesuffix("[]")
        if isinstance(value, UploadFile):
            if data := await value.read():
                files.setdefault(name, []).append(data)
        elif name in fields:
            raise SettingError(f"{name[:40]} is given twice: give it once", name[:40])
        elif value != "" or name == "prompt":  # which may be empty
            fields[name] = value
    return fields, files


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
