# SPDX-License-Identifier: Apache-2.0
"""The HTTP interface: endpoints like those of OpenAI's former videos API, events, metrics and the web page."""

import asyncio
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
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
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from wanjax.errors import SettingError, WanjaxError, json_values, repr_short, suggest_choice
from wanjax.jobs.databases import DatabaseError
from wanjax.jobs.store import COMPLETED, FAILED, QUEUED, Job, JobStore, NewJob, NotFound, QueueFull, Unavailable
from wanjax.jobs.worker import LOADING, READY
from wanjax.media.inputs import INPUT_SPECS
from wanjax.media.video import read_metadata
from wanjax.pipelines.caching.rules import check_separate_forwards
from wanjax.pipelines.request import VideoRequest, duplicate_field, unique_fields
from wanjax.pipelines.settings import LOAD_SETTINGS
from wanjax.pipelines.video_metadata import VERSION
from wanjax.serve import metrics, openapi, store_files, uploads
from wanjax.serve.auth import COOKIE, Access, AuthMiddleware, error_response, is_encrypted
from wanjax.serve.error_details import UNEXPECTED, describe_error, raising_storage_errors
from wanjax.serve.events import ChangeFeed, EventStreamResponse
from wanjax.serve.limits import Limits
from wanjax.serve.request_files import FIELD, RequestFileParser
from wanjax.serve.routing import UNSUPPORTED_ROUTES, checked_route, method_not_allowed, path_not_found
from wanjax.serve.served_models import ServedModels
from wanjax.serve.sweeping import Sweeper
from wanjax.serve.videos import (
    FILE_NAME,
    NOTES,
    PREVIEW,
    THUMBNAIL,
    VIDEO,
    file_names,
    file_paths,
    new_folder,
    new_id,
    output_path,
    video_json,
)
from wanjax.stores.paths import AnyPath, MissingObjectError, RemotePath

PAGE = files("wanjax.serve") / "page"
MAX_FIELDS, MAX_FILES = 64, 12  # the maximum number of fields, and of files, in one form
FORM_TYPES = ("multipart/form-data", "application/x-www-form-urlencoded")
BODY_TIMEOUT = 60.0  # seconds in which the body of a request must arrive
WORKER_FAILED = "failed"  # the state of a server whose only worker has ended
DATABASE_UNAVAILABLE = "the job database is unavailable: try again later"
T = TypeVar("T")
logger = logging.getLogger("wanjax.serve")
CONTENT_VARIANTS: dict[str, tuple[str, str | None]] = {
    "video": (VIDEO, "video/mp4"),
    "thumbnail": (THUMBNAIL, "image/webp"),
    "preview": (PREVIEW, "image/png"),
}
JSON_ADVICE = 'send a JSON object such as {"prompt": "a red circle"}'
WORKER_SETTINGS = [name for name in LOAD_SETTINGS if name != "model"]  # fixed when the model is loaded
LIST_PARAMETERS = ("limit", "after", "order", "query")
# the page changes `after` with each preview, so that the browser does not show a cached preview
CONTENT_PARAMETERS = ("variant", "after")
RESULT_VARIANTS = ("video", "thumbnail")  # written once the video is completed


class ClosedError(Exception):
    """The server is shutting down and accepts no more requests."""


class Service:
    """The state and the handlers of the HTTP interface. Several services may share a store and its folder.

    Args:
        store: The jobs.
        folder: The folder that contains one folder per video, local or in a store.
        models: The models that requests may name. The weights of these models are not used.
        model_cards: Descriptions of the models for clients, the served model first.
        limits: Limits of a request.
        access: Who may send requests.
        is_broken: Returns True if the server's only worker has ended.
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
        self.models, self.model_cards = models, model_cards
        self.limits, self.access, self.is_broken = limits, access, is_broken
        self.status_counts: Counter[int] = Counter()
        self.change_feed, self.sweeper = ChangeFeed(store, self._video_json), Sweeper(store, self.folder)
        self._closed = False

    def start(self) -> None:
        """Start the thread that deletes files of removed videos and requeues jobs of dead workers."""
        self.sweeper.start()

    def end(self) -> None:
        """Accept no more requests and end all event streams. Safe to call in a signal handler."""
        self._closed = self.change_feed.closed = True

    def close(self) -> None:
        """Stop the threads."""
        self.end()
        self.change_feed.close()
        self.sweeper.close()

    def application(self) -> AuthMiddleware:
        """Return the ASGI application, with authentication."""
        routes = [
            *(Route(path, self.reject_unsupported, methods=["GET", "POST"]) for path in UNSUPPORTED_ROUTES),
            checked_route("POST", "/v1/videos", self.create_video),
            checked_route("GET", "/v1/videos", self.list_videos, *LIST_PARAMETERS),
            checked_route("GET", "/v1/videos/{id}", self.get_video),
            checked_route("DELETE", "/v1/videos/{id}", self.delete_video),
            checked_route("POST", "/v1/videos/{id}/cancel", self.cancel_video),
            checked_route("GET", "/v1/videos/{id}/content", self.send_content, *CONTENT_PARAMETERS),
            checked_route("GET", "/v1/videos/{id}/record", self.send_metadata),
            checked_route("GET", "/v1/videos/{id}/events", self.stream_events),
            checked_route("GET", "/v1/events", self.stream_events),
            checked_route("POST", "/v1/requests", self.read_request_file),
            checked_route("GET", "/v1/models", self.list_models),
            checked_route("GET", "/v1/models/{id}", self.get_model),
            Route("/login", self.login, methods=["POST"]),
            Route("/openapi.json", self.send_openapi, methods=["GET"]),
            Route("/health", self.get_health, methods=["GET"]),
            Route("/metrics", self.get_metrics, methods=["GET"]),
            Route("/", lambda request: FileResponse(str(PAGE / "index.html")), methods=["GET"]),
            Mount("/page", StaticFiles(directory=str(PAGE))),
        ]
        handlers: dict[Any, Callable[..., Any]] = {
            404: path_not_found,
            405: method_not_allowed,
            HTTPException: lambda request, error: error_response(error.status_code, error.detail),
            WanjaxError: self._error_response,
            QueueFull: lambda request, error: error_response(429, str(error), "queue_full", retry_after="5"),
            ClosedError: lambda request, error: error_response(503, str(error), "ending", retry_after="30"),
            Unavailable: lambda request, error: error_response(503, DATABASE_UNAVAILABLE, "away", retry_after="5"),
            NotFound: _video_not_found,
            ClientDisconnect: lambda request, error: Response(status_code=400),
            Exception: lambda request, error: error_response(500, UNEXPECTED, "internal"),
        }
        application = Starlette(routes=routes, exception_handlers=handlers)
        # a redirect would contain this server's own address, which clients behind a proxy may not reach
        application.router.redirect_slashes = False
        auth_middleware = AuthMiddleware(application, self.access, self.limits.upload, self.status_counts)
        auth_middleware.application.state.auth_middleware = auth_middleware  # pyright: ignore[reportFunctionMemberAccess]
        return auth_middleware

    def _error_response(self, request: Request, error: Exception) -> Response:
        """Convert a WanjaxError to a response."""
        details = describe_error(error, [self.folder, *self.models.folders])
        if details.is_server_error:
            logger.error("%s %s: %s", request.method, request.url.path, error)
        return error_response(details.status, details.message, details.code, getattr(error, "setting", None))

    async def create_video(self, request: Request) -> JSONResponse:
        """Add a job for a form or a JSON object, and respond without waiting for the video."""
        await run_in_threadpool(self._check_queue)  # checked before a large upload is read
        with raising_storage_errors():  # uploads are spooled to temporary files
            fields, pictures = await _read_in_time(_read_body(request))
        with uploads.reporting_size_errors(fields):
            job = await run_in_threadpool(self._add_job, fields, pictures)
        return JSONResponse(self._video_json(job))

    def _check_queue(self) -> None:
        """Check that the queue has room for another request.

        Raises:
            QueueFull: The queue is full.
            ClosedError: The server is shutting down.
        """
        if self._closed:
            raise ClosedError("this server is shutting down: try again after it was restarted")
        if self.store.num_waiting() >= self.limits.queue:
            raise QueueFull(self.limits.queue)

    @raising_storage_errors()
    def _add_job(self, fields: Mapping[str, Any], files: Mapping[str, list[bytes]]) -> Job:
        """Check a request, save its pictures and add its job. A rejected request leaves no files."""
        request, pictures = uploads.read_request(self._without_shared(fields), files, self.models, self.limits)
        pipe = self.models.model(request.model)
        id = new_id()
        new_job = NewJob(id, {}, pipe.model_name, output_path(id))
        if not pictures:
            return self.store.add(self._with_request(new_job, request, {}), limit=self.limits.queue)
        # if the server is killed before the request is complete, this row marks the folder for deletion
        incomplete_job = self.store.add(new_job, is_arriving=True)
        try:
            with new_folder(self.folder / id) as folder_path:
                takes_clips = "video" in pipe.model.spec.input_names
                saved_files = uploads.save_pictures(
                    pictures, uploads.inputs_of(pipe), folder_path, self.limits, takes_clips=takes_clips
                )
                new_job = self._with_request(
                    new_job, replace(request, inputs=saved_files), file_paths(saved_files, folder_path)
                )
            return self.store.add(new_job, limit=self.limits.queue)
        except BaseException:
            with suppress(WanjaxError, NotFound):
                self.store.remove(id)
                self.sweeper.remove_files(incomplete_job)
            raise

    def _without_shared(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Remove the fields that equal a value with which the server was started, so that metadata can be sent as a
        request."""
        # lists replace tuples, as in the fields of a request
        shared = json.loads(json.dumps(self._shared_settings(fields.get("model"))))
        return {name: value for name, value in fields.items() if name not in shared or value != shared[name]}

    def _shared_settings(self, model: object) -> dict[str, Any]:
        """Return the values with which the server was started. None means the served model."""
        name = model or self.models.default_name
        return next((card["started_with"] for card in self.model_cards if card["id"] == name), {})

    def _with_request(self, new_job: NewJob, request: VideoRequest, files: Mapping[str, Any]) -> NewJob:
        """Complete the settings of a request, and add the request to a job.

        Raises:
            WanjaxError: No video can be made with these settings.
        """
        complete, notes = uploads.complete_settings(request, self.models.model(request.model), files, self.limits)
        check_separate_forwards(
            complete.cache, batch_guidance=self._shared_settings(request.model).get("batch_guidance", False)
        )
        settings = complete.to_json()
        for name in WORKER_SETTINGS:
            settings.pop(name, None)
        complete_request = replace(request, settings=settings, model=new_job.model)
        return replace(new_job, request={**complete_request.to_json(), NOTES: notes})

    async def list_videos(self, request: Request) -> JSONResponse:
        """List at most `limit` videos after the video with the id `after`.

        The newest videos come first, unless `order` is asc. With `query`, only videos whose prompt contains all words
        of the query are listed.
        """
        params = request.query_params
        limit, order = params.get("limit", "20"), params.get("order", "desc")
        if not re.fullmatch("[1-9][0-9]?|100", limit):
            raise SettingError(f"limit must be a whole number from 1 to 100, got {repr_short(limit)}", "limit")
        if order not in ("asc", "desc"):
            raise SettingError(f"order must be asc or desc, got {repr_short(order)}", "order")
        if len(query := params.get("query", "")) > self.limits.prompt:
            raise SettingError(f"query has {len(query)} characters: use at most {self.limits.prompt}", "query")
        after, newest = params.get("after"), order == "desc"
        matches = _prompt_matcher(query) if query.split() else None
        try:
            jobs, has_more = await run_in_threadpool(
                lambda: self.store.page(int(limit), after=after, newest_first=newest, matches=matches)
            )
        except NotFound:
            message = f"after must be the id of a video, got {repr_short(after)}: give the last_id of the previous page"
            return error_response(404, message, "not_found", "after")
        ids = [job.id for job in jobs] or [None]
        data = [self._video_json(job) for job in jobs]
        return JSONResponse(
            {"object": "list", "data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": has_more}
        )

    async def get_video(self, request: Request) -> JSONResponse:
        return JSONResponse(self._video_json(await self._find_job(request)))

    async def delete_video(self, request: Request) -> JSONResponse:
        """Delete a video. A waiting or running video is cancelled first."""
        id = request.path_params["id"]
        await run_in_threadpool(self._remove, id)
        return JSONResponse({"id": id, "object": "video.deleted", "deleted": True})

    def _video_json(self, job: Job) -> dict[str, Any]:
        """Convert a job to the JSON that clients receive."""
        pipe = self.models.pipes.get(job.model)
        return video_json(job, {name: getattr(pipe.defaults, name) for name in WORKER_SETTINGS} if pipe else {})

    def _remove(self, id: str) -> None:
        """Remove a video from the store. The files of the video are deleted as soon as no worker uses them.

        Raises:
            NotFound: There is no such video.
        """
        try:
            job = self.store.remove(id)
        except DatabaseError as error:
            video = self.folder / output_path(id)
            if not error.is_full or not isinstance(video, Path):
                raise
            self.store.get(id)
            with raising_storage_errors(), suppress(FileNotFoundError):
                # on a full disk the database may fail to record the removal, so delete the files first to free
                # space
                video.unlink()
            self.store.reclaim()
            job = self.store.remove(id)
        if not job.worker and isinstance(self.folder, Path):
            self.sweeper.remove_files(job)
        else:
            self.sweeper.wake()  # deleting from a remote store is slow, so the sweeper does it

    async def cancel_video(self, request: Request) -> JSONResponse:
        return JSONResponse(self._video_json(await run_in_threadpool(self.store.cancel, request.path_params["id"])))

    async def reject_unsupported(self, request: Request) -> JSONResponse:
        """Reject a request of OpenAI's videos API that this server does not support."""
        name = request.url.path.rpartition("/")[2]
        message = f"{name} is not supported: use POST /v1/videos, with the pictures and clips that /v1/models lists"
        return error_response(400, message, "not_offered")

    async def send_content(self, request: Request) -> Response:
        """Send a file of a video. The query `variant` selects it.

        `video` is the default, and `thumbnail` is the middle frame of the video. Both exist once the video is
        completed. `preview` exists while the video is made. The other variants are the pictures and clips of the
        request.
        """
        variant = request.query_params.get("variant", "video")
        job = await self._find_job(request)
        inputs = {
            Path(name).stem: (name, None) for name in file_names(job.request["inputs"]) if FILE_NAME.fullmatch(name)
        }
        if variant not in (variants := CONTENT_VARIANTS | inputs):
            raise self._variant_error(job, variant, variants)
        if job.status != COMPLETED and variant in RESULT_VARIANTS:
            return _unfinished_response(job)
        name, media_type = variants[variant]
        file = self.folder / job.id / name
        media_type, download_name = (
            media_type or guess_type(name)[0] or "application/octet-stream",
            f"{job.id}{file.suffix}",
        )
        if isinstance(file, RemotePath):
            with suppress(MissingObjectError):
                return await store_files.range_response(request, file, media_type, download_name)
        elif file.is_file():
            byte_range = store_files.parse_range(request.headers.get("range"), size := file.stat().st_size)
            if byte_range is None:  # an invalid header means the whole file; Starlette would refuse such a header
                request.scope["headers"] = [item for item in request.scope["headers"] if item[0] != b"range"]
            elif byte_range[0] >= byte_range[1]:
                return store_files.unsatisfiable_response(request, size)
            return FileResponse(file, media_type=media_type, filename=download_name, content_disposition_type="inline")
        return _missing_file_response(name)

    def _variant_error(self, job: Job, variant: str, variants: Collection[str]) -> SettingError:
        """Create the error for a variant that a video does not have, with the reason if it is one of the inputs."""
        pipe = self.models.pipes.get(job.model)
        problem = f"this video has no variant {repr_short(variant)}"
        for spec in (INPUT_SPECS if pipe is None else uploads.inputs_of(pipe)).values():
            stems = [uploads.file_stem(spec, index) for index in range(self.limits.references)]
            if variant in stems and spec.name not in job.request["inputs"]:
                problem = f"{problem}, because it was requested without {spec.noun}"
        return SettingError(f"{problem}: {suggest_choice(variant, variants)}", "variant")

    async def send_metadata(self, request: Request) -> Response:
        """Send the metadata of a completed video, read from its file."""
        job = await self._find_job(request)
        if job.status != COMPLETED:
            return _unfinished_response(job)
        video = self.folder / output_path(job.id)
        if not await run_in_threadpool(video.is_file):
            return _missing_file_response(VIDEO)
        with raising_storage_errors():
            return JSONResponse(await run_in_threadpool(read_metadata, video))

    async def stream_events(self, request: Request) -> Response:
        """Stream the changes of one video until it ends, or of all videos, as server-sent events."""
        video_id = request.path_params.get("id")
        if video_id is not None:
            await self._find_job(request)
        if self.change_feed.watcher_count >= self.limits.streams:
            return error_response(
                429, f"{self.limits.streams} streams of events are open, which is the limit: try again later"
            )
        # counted before the response starts, so that the next request counts this stream too
        watcher = self.change_feed.add_watcher()
        return EventStreamResponse(
            self.change_feed.stream(video_id, watcher[1]), lambda: self.change_feed.remove_watcher(watcher)
        )

    async def read_request_file(self, request: Request) -> JSONResponse:
        """Read a workflow of ComfyUI or a video of wanjax as the fields of a request. This makes no video."""
        with raising_storage_errors():
            name, data = await _read_in_time(_read_single_file(request))
            reader = RequestFileParser(self.models, self._bounded_cards(), self.limits)
            return JSONResponse(await run_in_threadpool(reader.read, name, data))

    async def list_models(self, request: Request) -> JSONResponse:
        """List the models, the served model first, each with the settings of a request and of the server."""
        return JSONResponse({"object": "list", "data": self._bounded_cards()})

    async def get_model(self, request: Request) -> JSONResponse:
        """Send the entry of one model."""
        id, models = request.path_params["id"], {model["id"]: model for model in self._bounded_cards()}
        if id not in models:
            return error_response(404, f"unknown model {id[:40]!r}: {suggest_choice(id, models)}", "not_found", "id")
        return JSONResponse(models[id])

    def _bounded_cards(self) -> list[dict[str, Any]]:
        common_fields = {"object": "model", "owned_by": "wanjax", "limits": self.limits.to_json()}
        return [common_fields | self.limits.limit_model_card(model) for model in self.model_cards]

    async def send_openapi(self, request: Request) -> JSONResponse:
        """Send the OpenAPI description of this interface."""
        return JSONResponse(openapi.build_document(self._bounded_cards(), VERSION, self.limits.prompt))

    async def login(self, request: Request) -> Response:
        """Store the token from a form in a cookie, for the web page."""
        token = await _read_in_time(_read_token(request))
        auth_middleware = request.app.state.auth_middleware
        if not isinstance(token, str) or not auth_middleware.is_token(token.strip()):
            message = f"the token is {'wrong' if token else 'missing'}: use the token that the server was started with"
            return error_response(401, message, "invalid_token", "token")
        response = Response(status_code=204)
        options: Any = {"httponly": True, "samesite": "strict", "max_age": 30 * 86400}
        options["secure"] = is_encrypted(request.scope, request.headers)
        # without a path, browsers limit the cookie to the folder of the page's URL, which the server may not know
        response.set_cookie(COOKIE, token.strip(), path=None, **options)
        return response

    async def get_health(self, request: Request) -> JSONResponse:
        state, num_waiting, models_without_worker = await run_in_threadpool(self._health)
        health = {"status": state, "model": self.models.default_name, "queue": num_waiting, "version": VERSION}
        if models_without_worker:
            health["waits_for_workers_of"] = models_without_worker
        return JSONResponse(health, 503 if state == WORKER_FAILED else 200)

    def _health(self) -> tuple[str, int, list[str]]:
        """Return the state of the workers, the number of waiting videos and the models that lack a worker."""
        stats = self.store.stats()
        state = READY if stats.workers.get(READY) else WORKER_FAILED if self.is_broken() else LOADING
        return state, stats.jobs.get(QUEUED, 0), self.store.models_without_worker()

    async def get_metrics(self, request: Request) -> PlainTextResponse:
        stats = await run_in_threadpool(self.store.stats)
        text = metrics.format_metrics(stats, self.status_counts, self.change_feed.watcher_count)
        return PlainTextResponse(text, headers={"content-type": metrics.CONTENT_TYPE})

    async def _find_job(self, request: Request) -> Job:
        """Return the job whose id is in the path.

        Raises:
            NotFound: There is no such job.
        """
        return await run_in_threadpool(self.store.get, request.path_params["id"])


def _prompt_matcher(text: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return a function that returns True if a request's prompt contains all words of a text, ignoring case."""
    words = text.casefold().split()

    def matches(request: Mapping[str, Any]) -> bool:
        prompt = str(request["settings"].get("prompt", "")).casefold()
        return all(word in prompt for word in words)

    return matches


def _video_not_found(request: Request, error: Exception) -> JSONResponse:
    """Answer a request for a video that does not exist."""
    id = request.path_params["id"]
    return error_response(404, f"there is no video {id[:40]!r}: GET /v1/videos lists the videos", "not_found", "id")


def _unfinished_response(job: Job) -> JSONResponse:
    """Answer a request for the result of a video that is not completed, or that has failed."""
    message = f"the video is {job.status.replace('_', ' ')}: its files exist once it is completed"
    if job.status == FAILED:
        outcome = "was cancelled" if job.cancel else "failed"
        message = f"the video {outcome}, so it has no files: request another one with POST /v1/videos"
    return error_response(409, message)


def _missing_file_response(name: str) -> JSONResponse:
    message = f"the file {name} of this video was deleted: request the video again with POST /v1/videos"
    if name == PREVIEW:
        message = "this video has no preview yet: ask again after some steps (with --no-preview, a server makes none)"
    return error_response(404, message, "not_found")


async def _read_in_time(body: Coroutine[Any, Any, T]) -> T:
    """Await the body of a request.

    Raises:
        HTTPException: The body did not arrive in time.
    """
    try:
        return await asyncio.wait_for(body, BODY_TIMEOUT)
    except TimeoutError:
        raise HTTPException(408, f"the body of the request did not arrive within {BODY_TIMEOUT:g} s") from None


async def _read_token(request: Request) -> Any:
    if (media_type := _media_type(request)) not in FORM_TYPES:
        raise HTTPException(415, f"unsupported Content-Type {media_type!r}: send the token as the form token=TOKEN")
    try:
        form = await request.form(max_files=0, max_fields=1)
    except HTTPException as error:
        problem = error.detail.rstrip(".")
        raise HTTPException(400, f"the form cannot be read ({problem}): send token=TOKEN alone, as text") from error
    return form.get("token", "")


async def _read_single_file(request: Request) -> tuple[str, bytes]:
    """Read a form with one file, and return its name and contents.

    Raises:
        HTTPException: The body is not a form with one file.
        SettingError: The file is empty.
    """
    if (media_type := _media_type(request)) != FORM_TYPES[0]:
        raise HTTPException(415, f"unsupported Content-Type {media_type!r}: send the form {FORM_TYPES[0]} with {FIELD}")
    form = await _parse_form(request)
    try:
        files = [value for name, value in form.multi_items() if name == FIELD and isinstance(value, UploadFile)]
        if len(files) != 1 or len(form) != 1:
            raise HTTPException(
                400,
                f"the form must have only the field {FIELD}, a file: send it as curl does with -F {FIELD}=@FILE",
            )
        if not (data := await files[0].read()):
            raise uploads.empty_file_error(FIELD)
        return files[0].filename or "", data
    finally:
        await form.close()


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _read_body(request: Request) -> tuple[dict[str, Any], dict[str, list[bytes]]]:
    """Read the fields and files of a request.

    Raises:
        WanjaxError: A field is given twice, or a file is empty.
        HTTPException: The body is neither a form nor a JSON object.
    """
    media_type = _media_type(request)
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise HTTPException(415, f"the body has the Content-Encoding {encoding[:40]!r}: send it without one")
    if media_type in FORM_TYPES:
        form = await _parse_form(request)
        try:
            # `curl -d` sends JSON with the content type of a form
            if any(name.lstrip().startswith(("{", "[")) for name in form):
                raise HTTPException(
                    415, f"the body is JSON, but its Content-Type is {media_type}: use application/json"
                )
            return await _read_form(form)
        finally:
            await form.close()
    if media_type != "application/json":
        raise HTTPException(
            415, f"unsupported Content-Type {media_type!r}: use application/json, {' or '.join(FORM_TYPES)}"
        )
    if not (body := await request.body()).strip():
        raise HTTPException(400, f"the body is empty: {JSON_ADVICE}")
    try:
        fields = json.loads(
            body, object_pairs_hook=unique_fields, parse_constant=_refuse_constant, parse_float=_parse_float
        )
    except SettingError:
        raise
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not valid JSON ({str(error)[:100]}): {JSON_ADVICE}") from error
    if not isinstance(fields, dict):
        with json_values():
            raise HTTPException(400, f"the body is not a JSON object, got {repr_short(fields)}: {JSON_ADVICE}")
    uploads.check_json_types(fields)
    return fields, {}


async def _parse_form(request: Request) -> FormData:
    """Parse a form.

    Raises:
        HTTPException: The form is malformed or too large.
    """
    try:
        return await request.form(max_files=MAX_FILES, max_fields=MAX_FIELDS)
    except HTTPException as error:
        advice = f"send {MAX_FIELDS} fields and {MAX_FILES} files at most, each as curl -F sends it, pictures as files"
        raise HTTPException(400, f"the form cannot be read ({error.detail.rstrip('.')}): {advice}") from error


async def _read_form(form: FormData) -> tuple[dict[str, Any], dict[str, list[bytes]]]:
    """Read the fields and files of a form. Empty fields are left out, except an empty prompt.

    A file without a name or content is left out too, because browsers send such a file for an empty file field.
    """
    fields: dict[str, Any] = {}
    files: dict[str, list[bytes]] = {}
    for field, value in form.multi_items():
        name = field.removesuffix("[]")
        if isinstance(value, UploadFile):
            if data := await value.read():
                files.setdefault(name, []).append(data)
            elif value.filename:
                raise uploads.empty_file_error(name)
        elif name in fields:
            raise duplicate_field(name)
        elif value != "" or name == "prompt":  # an empty prompt is allowed
            fields[name] = value
    return fields, files


def _parse_float(text: str) -> float | uploads.LargeNumber:
    """Parse a number of JSON. If the number is too large, return its text for the message about its field."""
    return number if math.isfinite(number := float(text)) else uploads.LargeNumber(text)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
