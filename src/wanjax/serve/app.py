# SPDX-License-Identifier: Apache-2.0
"""The HTTP interface: requests in the shape of OpenAI's former videos API, events, metrics, and the page."""

import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from mimetypes import guess_type
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Match, Mount, Route
from starlette.staticfiles import StaticFiles

from wanjax.errors import SettingError, WanjaxError, choice, repr_short
from wanjax.jobs.databases import DatabaseError
from wanjax.jobs.store import COMPLETED, QUEUED, Job, JobStore, NewJob, NotFound, QueueFull, Unavailable
from wanjax.jobs.worker import LOADING, READY
from wanjax.media.video import read_metadata
from wanjax.pipelines.request import VideoRequest, given_twice, unique_fields
from wanjax.pipelines.settings import LOADED
from wanjax.pipelines.video_metadata import VERSION
from wanjax.serve import metrics, openapi, store_files, uploads
from wanjax.serve.auth import COOKIE, Access, Guard, is_encrypted, refusal
from wanjax.serve.events import Changes, Events
from wanjax.serve.faults import UNEXPECTED, fault_of, storing
from wanjax.serve.limits import Limits
from wanjax.serve.sweeping import Sweeper
from wanjax.serve.variants import ServedModels
from wanjax.serve.videos import (
    FILE,
    PREVIEW,
    THUMBNAIL,
    VIDEO,
    names_of,
    new_folder,
    new_id,
    output_of,
    paths_of,
    video_of,
)
from wanjax.stores.paths import AnyPath, Missing, RemotePath

PAGE = files("wanjax.serve") / "page"
FIELDS, FILES = 64, 12  # of a form
FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
BODY_SECONDS = 60.0  # in which a request has to arrive
WORKER_FAILED = "failed"  # a server whose only worker ended
DATABASE_UNAVAILABLE = "the database of videos is out of reach for a while: try again later"
T = TypeVar("T")
logger = logging.getLogger("wanjax.serve")
CONTENT: dict[str, tuple[str, str | None]] = {
    "video": (VIDEO, "video/mp4"),
    "thumbnail": (THUMBNAIL, "image/webp"),
    "preview": (PREVIEW, "image/png"),
}
UNSUPPORTED_ROUTES = ("/v1/videos/{id}/remix", "/v1/videos/edits", "/v1/videos/extensions", "/v1/videos/characters")
"""Requests of OpenAI's videos API that have no counterpart here."""
PATHS = ("/v1/videos", "/v1/videos/ID", "/v1/videos/ID/content", "/v1/models", "/health")  # that most clients ask
LEADING_VERSIONS = re.compile(r"^(?:/v1)+(?=/|$)")
WORKER_SETTINGS = [name for name in LOADED if name != "model"]  # settings that whoever loads the model decides
RESULTS = ("video", "thumbnail")  # of which there are whole ones alone


class ClosedError(Exception):
    """A server that ends, and takes no further request."""


class Service:
    """All that answers need. Several services may share a store and its folder.

    Args:
        store: The jobs.
        folder: The folder of the videos' folders, here or in a store.
        models: The models that requests may name, of which it needs no weights.
        model_cards: What clients are told of the models, the served one first.
        limits: What a request may ask for.
        access: Who may ask.
        is_broken: Returns True where the server's only worker has ended.
    """

    def __init__(
        self,
        store: JobStore,
        folder: AnyPath,
        models: ServedModels,
        model_cards: Sequence[dict[str, Any]],
        limits: Limits,
        access: Access,
        is_broken: Callable[[], bool] = lambda: False,
    ):
        self.store = store
        self.folder: AnyPath = folder.expanduser().absolute() if isinstance(folder, Path) else folder
        self.served, self.model_cards = models, model_cards
        self.limits, self.access, self.is_broken = limits, access, is_broken
        self.answers: Counter[int] = Counter()
        self.changes, self.sweeper = Changes(store, self._video), Sweeper(store, self.folder)
        self._closed = False

    def start(self) -> None:
        """Begin to look after the jobs: to remove what is left of videos, and to requeue jobs of silent workers."""
        self.sweeper.start()

    def end(self) -> None:
        """Take no further request, and end all streams of events; may be called in a handler of signals."""
        self._closed = self.changes.closed = True

    def close(self) -> None:
        """End the threads."""
        self.end()
        self.changes.close()
        self.sweeper.close()

    def application(self) -> Guard:
        """Return the application, behind its guard."""
        routes = [
            Route("/v1/videos", self.create, methods=["POST"]),
            Route("/v1/videos", self.videos, methods=["GET"]),
            Route("/v1/videos/{id}", self.show, methods=["GET"]),
            Route("/v1/videos/{id}", self.remove, methods=["DELETE"]),
            Route("/v1/videos/{id}/cancel", self.cancel, methods=["POST"]),
            Route("/v1/videos/{id}/content", self.content, methods=["GET"]),
            Route("/v1/videos/{id}/record", self.metadata, methods=["GET"]),
            Route("/v1/videos/{id}/events", self.events, methods=["GET"]),
            *(Route(path, self.not_offered, methods=["POST"]) for path in UNSUPPORTED_ROUTES),
            Route("/v1/events", self.events, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{id}", self.show_model, methods=["GET"]),
            Route("/login", self.login, methods=["POST"]),
            Route("/openapi.json", self.show_document, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.show_metrics, methods=["GET"]),
            Route("/", lambda request: FileResponse(str(PAGE / "index.html")), methods=["GET"]),
            Mount("/page", StaticFiles(directory=str(PAGE))),
        ]
        handlers: dict[Any, Callable[..., Any]] = {
            404: _no_path,
            405: _no_method,
            HTTPException: lambda request, error: refusal(error.status_code, error.detail),
            WanjaxError: self._error_response,
            QueueFull: lambda request, error: refusal(429, str(error), "queue_full", retry_after="5"),
            ClosedError: lambda request, error: refusal(503, str(error), "ending", retry_after="30"),
            Unavailable: lambda request, error: refusal(503, DATABASE_UNAVAILABLE, "away", retry_after="5"),
            NotFound: lambda request, error: refusal(404, str(error), "not_found"),
            ClientDisconnect: lambda request, error: Response(status_code=400),
            Exception: lambda request, error: refusal(500, UNEXPECTED, "internal"),
        }
        application = Starlette(routes=routes, exception_handlers=handlers)
        application.router.redirect_slashes = False  # to a full address, which is not the client's behind a proxy
        guard = Guard(application, self.access, self.limits.upload, self.answers)
        guard.application.state.guard = guard  # pyright: ignore[reportFunctionMemberAccess]
        return guard

    def _error_response(self, request: Request, error: Exception) -> Response:
        """Answer an error that is told in a sentence."""
        fault = fault_of(error, [self.folder, *self.served.folders])
        if fault.is_ours:
            logger.error("%s %s: %s", request.method, request.url.path, error)
        return refusal(fault.status, fault.message, fault.code, getattr(error, "setting", None))

    async def create(self, request: Request) -> JSONResponse:
        """Take a request for a video, as a form or as JSON, and answers at once."""
        await run_in_threadpool(self._check_room)  # before a large picture is read
        with storing():  # large files of a form, beside it
            fields, pictures = await _read_in_time(_body(request))
        with uploads.naming_size(fields):
            job = await run_in_threadpool(self._accept, fields, pictures)
        return JSONResponse(self._video(job))

    def _check_room(self) -> None:
        """Raise QueueFull where the queue takes no further request, ClosedError where the server ends."""
        if self._closed:
            raise ClosedError("this server is ending: ask again when it has started anew")
        if self.store.waiting() >= self.limits.queue:
            raise QueueFull(self.limits.queue)

    @storing()
    def _accept(self, fields: Mapping[str, Any], files: Mapping[str, list[bytes]]) -> Job:
        """Check a request, keep its pictures and add its job; leave nothing of one that is refused."""
        request, uploaded = uploads.read(fields, files, self.served, self.limits)
        pipe = self.served.model(request.model)
        id = new_id()
        new = NewJob(id, {}, pipe.defaults.model, output_of(id))
        if not uploaded:
            return self.store.add(self._complete(new, request, {}), limit=self.limits.queue)
        arriving = self.store.add(new, arriving=True)  # so that a server that is killed leaves no folder for ever
        try:
            with new_folder(self.folder / id) as folder_path:
                takes_clips = "video" in pipe.model.spec.takes
                saved = uploads.save_pictures(
                    uploaded, uploads.inputs_of(pipe), folder_path, self.limits, takes_clips=takes_clips
                )
                new = self._complete(new, replace(request, inputs=saved), paths_of(saved, folder_path))
            return self.store.add(new, limit=self.limits.queue)
        except BaseException:
            with suppress(WanjaxError, NotFound):
                self.store.remove(id)
                self.sweeper.clear(arriving)
            raise

    def _complete(self, new: NewJob, request: VideoRequest, files: Mapping[str, Any]) -> NewJob:
        """Return a job with all settings of its request; raise WanjaxError where they make no video."""
        settings = uploads.complete_settings(request, self.served.model(request.model), files, self.limits).to_json()
        for name in WORKER_SETTINGS:
            settings.pop(name, None)
        return replace(new, request=replace(request, settings=settings, model=new.model).to_json())

    async def videos(self, request: Request) -> JSONResponse:
        """List videos, the newest first unless `order` is asc, at most `limit` after the one named `after`.

        With `query` only those whose prompt contains all of its words.
        """
        query = request.query_params
        limit, order = query.get("limit", "20"), query.get("order", "desc")
        if not re.fullmatch("[1-9][0-9]?|100", limit):
            raise SettingError(f"limit is {repr_short(limit)}: give a whole number from 1 to 100", "limit")
        if order not in ("asc", "desc"):
            raise SettingError(f"order is {repr_short(order)}: give asc or desc", "order")
        if len(text := query.get("query", "")) > self.limits.prompt:
            raise SettingError(f"query has {len(text)} characters: give {self.limits.prompt} at most", "query")
        after, newest = query.get("after"), order == "desc"
        matches = _matcher(text) if text.split() else None
        page, more = await run_in_threadpool(
            lambda: self.store.page(int(limit), after=after, newest=newest, matches=matches)
        )
        ids = [job.id for job in page] or [None]
        data = [self._video(job) for job in page]
        return JSONResponse({"object": "list", "data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": more})

    async def show(self, request: Request) -> JSONResponse:
        return JSONResponse(self._video(await self._find(request)))

    async def remove(self, request: Request) -> JSONResponse:
        """Remove a video; one that waits or is under way is cancelled before."""
        id = request.path_params["id"]
        await run_in_threadpool(self._remove, id)
        return JSONResponse({"id": id, "object": "video.deleted", "deleted": True})

    def _video(self, job: Job) -> dict[str, Any]:
        """Return a job as clients see it."""
        pipe = self.served.pipes.get(job.model)
        return video_of(job, {name: getattr(pipe.defaults, name) for name in WORKER_SETTINGS} if pipe else {})

    def _remove(self, id: str) -> None:
        """Remove a video, its files as soon as nobody works on them; raise NotFound."""
        try:
            job = self.store.remove(id)
        except DatabaseError as error:
            video = self.folder / output_of(id)
            if not error.is_full or not isinstance(video, Path):
                raise
            self.store.get(id)
            with storing(), suppress(FileNotFoundError):
                video.unlink()  # a full disk may have no room for the note: that of the video is taken
            self.store.reclaim()
            job = self.store.remove(id)
        if not job.worker and isinstance(self.folder, Path):
            self.sweeper.clear(job)
        else:
            self.sweeper.wake()  # nobody waits for a store

    async def cancel(self, request: Request) -> JSONResponse:
        return JSONResponse(self._video(await run_in_threadpool(self.store.cancel, request.path_params["id"])))

    async def not_offered(self, request: Request) -> JSONResponse:
        """Answer a request of OpenAI's videos API that this server does not offer."""
        name = request.url.path.rpartition("/")[2]
        why = f"{name} is not offered: POST /v1/videos asks for another video, with a picture or a clip if the model"
        return refusal(400, f"{why} takes one, which /v1/models tells", "not_offered")

    async def content(self, request: Request) -> Response:
        """Send a finished video, or its middle frame as `thumbnail`.

        `preview` shows one that is under way too, and other variants are what it is made from.
        """
        variant = request.query_params.get("variant", "video")
        job = await self._find(request)
        inputs = {Path(name).stem: (name, None) for name in names_of(job.request["inputs"]) if FILE.fullmatch(name)}
        if variant not in (variants := CONTENT | inputs):
            raise SettingError(
                f"the variant {repr_short(variant)} is not offered: {', '.join(variants)} are", "variant"
            )
        if job.status != COMPLETED and variant in RESULTS:
            return _unfinished(job)
        name, kind = variants[variant]
        file = self.folder / job.id / name
        kind, own_name = kind or guess_type(name)[0] or "application/octet-stream", f"{job.id}{file.suffix}"
        if isinstance(file, RemotePath):
            with suppress(Missing):
                return await store_files.range_response(request, file, kind, own_name)
        elif file.is_file():
            return FileResponse(file, media_type=kind, filename=own_name, content_disposition_type="inline")
        return _gone(name)

    async def metadata(self, request: Request) -> Response:
        """Send the metadata of a finished video: everything that shaped it, as its file has it."""
        job = await self._find(request)
        if job.status != COMPLETED:
            return _unfinished(job)
        video = self.folder / output_of(job.id)
        if not await run_in_threadpool(video.is_file):
            return _gone(VIDEO)
        with storing():
            return JSONResponse(await run_in_threadpool(read_metadata, video))

    async def events(self, request: Request) -> Response:
        """Streams changes as server-sent events: those of one video until its end, or of all."""
        only = request.path_params.get("id")
        if only is not None:
            await self._find(request)
        if self.changes.watchers >= self.limits.streams:
            return refusal(429, f"{self.limits.streams} streams of events are open, as many as this server has")
        watcher = self.changes.watch()  # counted before another request is looked at
        return Events(self.changes.stream(only, watcher[1]), lambda: self.changes.leave(watcher))

    async def models(self, request: Request) -> JSONResponse:
        """List the models, the served one first: all that a request may ask, and what the server was started with."""
        return JSONResponse({"object": "list", "data": self._models()})

    async def show_model(self, request: Request) -> JSONResponse:
        """Send what `models` lists of one model."""
        id, models = request.path_params["id"], {model["id"]: model for model in self._models()}
        if id not in models:
            return refusal(404, f"no model is named {id[:40]!r} here: {choice(id, models)}", "not_found")
        return JSONResponse(models[id])

    def _models(self) -> list[dict[str, Any]]:
        about = {"object": "model", "owned_by": "wanjax", "limits": self.limits.to_json()}
        return [about | self.limits.bound_card(model) for model in self.model_cards]

    async def show_document(self, request: Request) -> JSONResponse:
        """Describe this interface in the words of OpenAPI."""
        return JSONResponse(openapi.document(self._models(), VERSION, self.limits.prompt))

    async def login(self, request: Request) -> Response:
        """Keep the token of a form in a cookie, for the page."""
        token = await _read_in_time(_token(request))
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
        state, waiting, unserved = await run_in_threadpool(self._health)
        health = {"status": state, "model": self.served.first, "queue": waiting, "version": VERSION}
        if unserved:
            health["waits_for_workers_of"] = unserved
        return JSONResponse(health, 503 if state == WORKER_FAILED else 200)

    def _health(self) -> tuple[str, int, list[str]]:
        """Return the state of the workers, how many videos wait, and the models of those that no worker makes."""
        stats = self.store.stats()
        state = READY if stats.workers.get(READY) else WORKER_FAILED if self.is_broken() else LOADING
        return state, stats.jobs.get(QUEUED, 0), self.store.unserved()

    async def show_metrics(self, request: Request) -> PlainTextResponse:
        stats = await run_in_threadpool(self.store.stats)
        text = metrics.text(stats, self.answers, self.changes.watchers)
        return PlainTextResponse(text, headers={"content-type": metrics.CONTENT_TYPE})

    async def _find(self, request: Request) -> Job:
        """Return the video that a path names; raise NotFound."""
        return await run_in_threadpool(self.store.get, request.path_params["id"])


def _matcher(text: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return a function that tells whether a request's prompt has all words of a text, in any case of letters."""
    words = text.casefold().split()

    def matches(request: Mapping[str, Any]) -> bool:
        prompt = str(request["settings"].get("prompt", "")).casefold()
        return all(word in prompt for word in words)

    return matches


def _no_path(request: Request, error: Exception) -> JSONResponse:
    """Answer a request for a path that there is not, with the one that is meant where it is nearly right."""
    path = request.scope["path"]
    rest = LEADING_VERSIONS.sub("", path.rstrip("/"))
    meant = [one for one in (f"/v1{rest}", rest) if _methods(request, one)]
    right = f"did you mean {meant[0][:80]}?" if meant else f"use one of {', '.join(PATHS)}; /openapi.json lists all"
    return refusal(404, f"there is no path {path[:80]!r} here: {right}", "not_found")


def _no_method(request: Request, error: Exception) -> JSONResponse:
    """Answer a request with a method that its path does not take."""
    path = request.scope["path"]
    methods = ", ".join(_methods(request, path) or ("GET", "HEAD"))  # the latter of the page's files
    return refusal(405, f"{path[:80]} takes no {request.method[:20]}: use {methods}", "not_allowed", allow=methods)


def _methods(request: Request, path: str) -> list[str]:
    """Return the methods of the routes of a path."""
    scope = {**request.scope, "path": path, "root_path": ""}
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    return sorted({x for route in routes if route.matches(scope)[0] != Match.NONE for x in route.methods or ()})


def _unfinished(job: Job) -> JSONResponse:
    return refusal(409, f"the video is {job.status.replace('_', ' ')}: only a completed one has content")


def _gone(name: str) -> JSONResponse:
    return refusal(404, f"the file {name} of this video is gone", "not_found")


async def _read_in_time(body: Coroutine[Any, Any, T]) -> T:
    """Return what a request holds; raise HTTPException where it does not arrive in time."""
    try:
        return await asyncio.wait_for(body, BODY_SECONDS)
    except TimeoutError:
        raise HTTPException(408, f"the request did not arrive within {BODY_SECONDS:g} s") from None


async def _token(request: Request) -> Any:
    async with request.form(max_files=0, max_fields=1) as form:
        return form.get("token", "")


async def _body(request: Request) -> tuple[dict[str, Any], dict[str, list[bytes]]]:
    """Return the fields of a request and its files; raise WanjaxError for a body that is neither form nor JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in FORMS:
        async with request.form(max_files=FILES, max_fields=FIELDS) as form:
            if any(name.lstrip().startswith(("{", "[")) for name in form):  # as curl -d sends it
                raise HTTPException(415, f"the body is JSON and its Content-Type says {kind}: send application/json")
            return await _form(form)
    if kind != "application/json":
        raise HTTPException(415, f"a video is asked for by application/json, {' or '.join(FORMS)}")
    try:
        fields = json.loads(await request.body(), object_pairs_hook=unique_fields, parse_constant=_refuse_constant)
    except SettingError:
        raise
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the request is no JSON: {str(error)[:100]}") from error
    if not isinstance(fields, dict):
        raise HTTPException(400, 'the request is no JSON object: {"prompt": "a red circle"} is one')
    return fields, {}


async def _form(form: FormData) -> tuple[dict[str, Any], dict[str, list[bytes]]]:
    """Return a form's fields and files; an empty field counts as one that is not given.

    So does an empty file without a name, which a browser sends for a field that nobody touched.
    """
    fields: dict[str, Any] = {}
    files: dict[str, list[bytes]] = {}
    for field, value in form.multi_items():
        name = field.removesuffix("[]")
        if isinstance(value, UploadFile):
            if data := await value.read():
                files.setdefault(name, []).append(data)
            elif value.filename:
                raise uploads.empty_file(name)
        elif name in fields:
            raise given_twice(name)
        elif value != "" or name == "prompt":  # which may be empty
            fields[name] = value
    return fields, files


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
