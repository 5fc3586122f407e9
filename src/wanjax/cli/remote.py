# SPDX-License-Identifier: Apache-2.0
"""`generate --at URL`: let a running `wanjax serve` make videos. For a single .mp4, this module does not import JAX.
The server's description lists the settings and inputs of a request, and the options with which the server was started.
"""

import base64
import hashlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, build_opener

import click

from wanjax.cli.defaults import SAFE_COMPILER
from wanjax.cli.existing import ExistingFile
from wanjax.cli.names import TOKEN_VARIABLE, unused_names, video_path, videos_folder
from wanjax.cli.options import SETTINGS, is_given, on_command_line, option_of
from wanjax.cli.parsed import CommandOptions, PipelineOptions
from wanjax.cli.report import REMOTE_STAGE, Report
from wanjax.errors import NetworkError, WanjaxError, printable, reason, repr_short
from wanjax.figures import format_batch_progress, pluralize
from wanjax.jobs.worker import INVALID_REQUEST
from wanjax.media.inputs import INPUT_SPECS
from wanjax.pipelines.request import VideoRequest
from wanjax.pipelines.settings import ALLOW_EMPTY, parse_pixels
from wanjax.pipelines.text.prompt_extension import NoRedirect
from wanjax.stores.paths import AnyPath, base_name, file_names_in, is_http_url, parse_path
from wanjax.stores.writing import atomic_write, check_folder, created_output_folder

MODELS_PATH = "/v1/models"
REPLY_TIMEOUT = 60.0  # seconds to wait for a reply of the server
QUEUE_NOTE_DELAY = 2.0  # seconds that a video waits before a note says so
POLL_INTERVALS = 0.05, 1.0  # seconds between two polls of a video, at first and at most
MAX_REPLY_BYTES = 2**33  # the maximum bytes of a reply
MAX_PROGRESS_TOTAL = 10**9  # a larger total in the progress of a stage counts as an error of the server
MAX_CLIP_FRAMES = 10**9  # a clip from the server is read as a whole
SCHEMELESS_URL = re.compile(r"[\w.-]+:\d{1,5}(/\S*)?", re.ASCII)  # matches an address without a scheme
MODEL_FIELDS = {
    "id": str,
    "defaults": dict,
    "settings": dict,
    "started_with": dict,
    "loras": list,
}  # keys of a model in the server's list
MAX_PENDING = 4  # the number of a batch's videos in the server's queue, so that the server works during a download
QUEUE_FULL = 429  # HTTP status of a full queue
REQUEST_ERRORS = (400, 404, 409, 413, 415, 422)  # HTTP statuses of a wrong request
LOCAL_PARAMETERS = ("folder", "noise", "profile", "preview", "preview_decoder", "extend_prompt", "extend_model")
"""Parameters that have no effect on videos that a server makes."""


class RefusedError(WanjaxError):
    """A server's refusal of a request; `status` is the HTTP status."""

    def __init__(self, sentence: str, status: int):
        super().__init__(sentence)
        self.status = status


class ServerError(RefusedError, NetworkError):
    """An error inside the server, or of a proxy in front of the server."""


def generate(
    report: Report,
    request: VideoRequest,
    options: PipelineOptions,
    command: CommandOptions,
    server_url: str,
    original_metadata: Mapping[str, Any] | None = None,
) -> None:
    """Request one or several videos from the server at an address, show the progress, and write the videos.

    Options of the model on the command line must equal those of the server. `original_metadata` is the metadata of the
    video of --from.
    """
    server = Server(server_url)
    model_info = server.model(options.model if is_given("model") else None)
    if original_metadata is not None:
        from wanjax.cli.remake import (  # imported late, because these need JAX
            check_files,
            parameters_from_metadata,
            with_original_prompt,
        )

        request = with_original_prompt(request, original_metadata)
        check_files(original_metadata, parameters_from_metadata(INPUT_SPECS))
        if not on_command_line("compiler"):
            options = options._replace(compiler=None)  # this option changes only the last digits of a video's values
    for name in filter(is_given, LOCAL_PARAMETERS):
        if getattr(command, name):
            raise WanjaxError(
                f"{option_of(name)} is for videos made on this machine: leave it out with --at {server_url}"
            )
    _check_options(options, model_info["started_with"], server_url)
    request = replace(request, lora=_strengths(options.lora, model_info["loras"], server_url) if options.lora else {})
    if "seed" not in request.settings:  # without a seed, the server would draw a random one
        request = request.updated({"seed": _seed(model_info["defaults"], server_url)})
    if command.makes_several:
        _generate_several(report, server, model_info, _requests(request, command), command)
    else:
        _generate_one(report, server, model_info, request, command)


def _generate_one(
    report: Report, server: "Server", model_info: Mapping[str, Any], request: VideoRequest, command: CommandOptions
) -> None:
    """Request one video, unless it already exists. Write the video to the file of --out, or to a file with a new
    name."""
    out = command.out
    if out is not None and not command.force and (existing := ExistingFile.find(out, "another --out")) is not None:
        _check_existing(existing, request, model_info)
        report.note(f"{existing.file} already exists: give --force to make it again")
        return report.print_result(parse_path(out).absolute(), existing.metadata or {}, seconds=report.seconds)
    if out is not None and not _is_mp4(out):
        from wanjax.media.video import prepare_output_path  # imported late, as in `_save`

        frames = request.settings.get("frames", model_info["defaults"].get("frames"))
        prepare_output_path(out, frames if isinstance(frames, int) else 1)
    path = server.submit(_request_fields(request))
    with _cancelling(server) as pending_paths, report.stage(REMOTE_STAGE):
        pending_paths.append(path)
        video_fields = _wait_for_video(server, path, report, report.set_progress)
        pending_paths.clear()
        if video_fields.get("status") != "completed":
            raise WanjaxError(f"{server.url} failed to make the video: {_failure_reason(video_fields)}")
        report.set_progress("", 1, 1)  # the last poll may have come before the last step
    metadata = server.request_json(f"{path}/record")
    name = out or str(video_path(next(unused_names(request.settings["prompt"], _seed(metadata, server.url)))))
    target = _save(server, path, name)
    if report.stats:
        report.table()
    report.print_result(target, metadata, id=_video_id(path), seconds=report.seconds)


def _check_existing(existing_file: ExistingFile, request: VideoRequest, model_info: Mapping[str, Any]) -> None:
    """Raise WanjaxError if the metadata of an existing video shows that the server would make a different video."""
    sizes, size = model_info.get("sizes"), request.settings.get("size")
    if isinstance(sizes, dict) and (sides := parse_pixels(sizes.get(size, ""))):
        settings = {name: value for name, value in request.settings.items() if name != "size"}
        request = replace(request, settings={**settings, "height": sides[0], "width": sides[1]})
    settings = {**request.with_defaults(VideoRequest(model_info["defaults"])).settings, "model": model_info["id"]}
    existing_file.check(settings, settings)
    from wanjax.media.metadata import file_digests  # imported late, because this needs NumPy

    digests = file_digests(existing_file.metadata or {}).values()
    files = [
        file for value in _request_fields(request).values() for file in (value if isinstance(value, list) else [value])
    ]
    if any(file.digest not in digests for file in files if isinstance(file, _File)):
        existing_file.refuse("with a different input file")
    if request.lora:
        from wanjax.checkpoints.lora_source import Lora  # imported late, as in `_strengths`

        loras = [Lora.parse(str(text)) for text in (existing_file.metadata or {}).get("lora") or ()]
        if {file.name: file.strength for file in loras if file.strength} != {
            k: x for k, x in request.lora.items() if x
        }:
            existing_file.refuse("with another lora")


def _requests(request: VideoRequest, command: CommandOptions) -> list[VideoRequest]:
    """Build the requests for several videos. Each request has its own prompt, seed and settings."""
    from wanjax.cli.many import requests_of, seeds_of  # imported late, because these need JAX
    from wanjax.jobs.rows import shared_by_all, with_seeds, with_shared
    from wanjax.pipelines.seeds import checked_seed

    requests, shared_settings = requests_of(request, command.prompts), shared_by_all(request)
    seeds = seeds_of(requests, command, request.settings["seed"])
    seeded_requests = [with_shared(row_request, shared_settings) for row_request in with_seeds(requests, seeds)]
    return [
        row_request.updated({"seed": checked_seed(row_request.settings["seed"], alone=True)})
        for row_request in seeded_requests
    ]


def _generate_several(
    report: Report,
    server: "Server",
    model_info: Mapping[str, Any],
    requests: Sequence[VideoRequest],
    command: CommandOptions,
) -> None:
    """Request several videos from the server. Videos that are already in the folder are made again only with --force.

    The folder gets a manifest like that of `wanjax batch`. If this function ends early, it cancels the waiting videos.
    """
    from wanjax.cli.many import FAILURE_STATUS  # imported late, because this needs JAX
    from wanjax.jobs.batch import MANIFEST, Manifest
    from wanjax.jobs.maker import Task

    folder = videos_folder(command.out).absolute()
    tasks: dict[str, tuple[Any, Mapping[str, Any]]] = {}
    for request in requests:
        fields = _request_fields(request)
        name = _output_name(fields, model_info)
        tasks[name] = Task(name, request), fields
    if repeated := len(requests) - len(tasks):
        report.note(f"note: {repeated} of {len(requests)} videos are requested more than once and are made once")
    with created_output_folder(folder), closing(Manifest(folder)) as manifest:
        existing = set() if command.force else tasks.keys() & set(file_names_in(folder))
        missing_tasks = [task for name, task in tasks.items() if name not in existing]
        report.num_videos = len(existing)
        report.note(format_batch_progress(len(missing_tasks), len(existing), folder))
        for name in existing:
            manifest.add(tasks[name][0])
        if not missing_tasks:
            return
        report.enable_resume()
        with _cancelling(server) as pending_paths, report.stage("videos"):
            batch = _BatchRequest(report, server, folder, manifest, pending_paths, missing_tasks)
            batch.make()
    report.resume_command = None
    if report.stats:
        report.table()
    if batch.failed:
        summary = f"{batch.failed} of {pluralize(len(missing_tasks), 'video')} failed, as listed in {folder / MANIFEST}"
        retry_advice = "run the same command to try them again"
        report.note(f"{summary}; {'correct their requests' if batch.wrong == batch.failed else retry_advice}")
        raise click.exceptions.Exit(FAILURE_STATUS)


class _BatchRequest:
    """Request several videos from a server. At most a few of the videos are in the server's queue at a time. The
    videos are written in the order of the requests. `missing_tasks` has the remaining tasks with the fields of their
    requests. `pending_paths` has the server's paths of submitted videos.
    """

    def __init__(
        self,
        report: Report,
        server: "Server",
        folder: AnyPath,
        manifest: Any,
        pending_paths: deque[str],
        missing_tasks: Sequence[tuple[Any, Mapping[str, Any]]],
    ):
        self.report, self.server, self.folder, self.manifest, self.pending_paths = (
            report,
            server,
            folder,
            manifest,
            pending_paths,
        )
        self.total, self.ended, self.failed, self.wrong = len(missing_tasks), 0, 0, 0
        self._unsubmitted, self._submitted = deque(missing_tasks), deque[Any]()

    def make(self) -> None:
        """Request all videos, and write each one."""
        self._count()
        while self._unsubmitted or self._submitted:
            self._submit()
            if self._submitted:
                self._collect()
            else:
                self.report.stop_if_interrupted()
                time.sleep(POLL_INTERVALS[1] if self._unsubmitted else 0)  # videos of other clients fill the queue

    def _submit(self) -> None:
        """Submit videos until `MAX_PENDING` are pending or the server's queue is full."""
        while self._unsubmitted and len(self._submitted) < MAX_PENDING:
            task, fields = self._unsubmitted[0]
            try:
                self.pending_paths.append(self.server.submit(fields))
            except RefusedError as error:
                if error.status == QUEUE_FULL:
                    return
                if error.status not in REQUEST_ERRORS or not (self.ended or self._submitted):
                    # all requests probably have the error of the first request
                    raise task.request.add_row_number(error) from error
                self._end(task, error, is_wrong=True)
            else:
                self._submitted.append(task)
            self._unsubmitted.popleft()

    def _collect(self) -> None:
        """Wait for the first submitted video, and write it."""
        task, path = self._submitted[0], self.pending_paths[0]
        failure: object = None
        is_wrong = False
        try:
            video = _wait_for_video(
                self.server, path, self.report, lambda unit, done, total: self._count(f"{unit} {done} of {total}")
            )
            if video.get("status") == "completed":
                metadata = self.server.request_json(f"{path}/record")
                self.report.print_result(
                    _save(self.server, path, str(self.folder / task.output)), metadata, id=_video_id(path)
                )
            else:
                failure, is_wrong = _failure_reason(video), _failure_code(video) == INVALID_REQUEST
        except RefusedError as error:  # for example, somebody removed the video
            if error.status not in REQUEST_ERRORS:
                raise
            failure = error
        self._submitted.popleft()
        self.pending_paths.popleft()
        self._end(task, failure, is_wrong=is_wrong)

    def _end(self, task: Any, failure: object = None, *, is_wrong: bool = False) -> None:
        """Add a video to the manifest after it was made or has failed."""
        self.ended += 1
        if failure is not None:
            self.failed += 1
            self.wrong += is_wrong
            self.report.note(f"{task.request.position or task.output} failed: {failure}")
        self.manifest.add(task, worker=self.server.url, **({} if failure is None else {"error": str(failure)}))
        self._count()

    def _count(self, suffix: str = "") -> None:
        failed = f"{self.failed} failed" if self.failed else ""
        self.report.set_progress("video", self.ended, self.total, suffix=", ".join(filter(None, (failed, suffix))))


def _output_name(fields: Mapping[str, Any], model_info: Mapping[str, Any]) -> str:
    """Choose the name of one of several videos. The name is the same each time the same server makes the video. The
    name equals the name that `wanjax batch` would choose if the request contains all entries of the video's metadata.
    """
    from wanjax.jobs.maker import video_name  # imported late, because this needs JAX

    hashed_fields = {name: _with_digests(value) for name, value in fields.items() if name != ALLOW_EMPTY.name}
    return video_name(
        {**model_info["defaults"], **model_info["started_with"], **hashed_fields}
    )  # this name does not come from the server


@contextmanager
def _cancelling(server: "Server") -> Iterator[deque[str]]:
    """Yield a queue for the paths of submitted videos. On Ctrl-C or an error, cancel the videos that are still in the
    queue."""
    pending_paths: deque[str] = deque()
    try:
        yield pending_paths
    except BaseException:
        for path in pending_paths:
            try:
                server.request_json(f"{path}/cancel", {})
            except RefusedError:  # the video has ended, or was removed
                continue
            except WanjaxError:  # if the server cannot be reached, do not try the next video
                break
        raise


def _save(server: "Server", path: str, out: str) -> AnyPath:
    """Write a video in the server's format, or convert it if the file has the suffix of another format."""
    data, target = server.fetch(f"{path}/content"), parse_path(out).absolute()
    if _is_mp4(out):
        check_folder(target.parent)
        with atomic_write(target) as partial_path:
            partial_path.write_bytes(data)
        return target
    from wanjax.media.pictures import read_clip  # imported late, because the imports are slow
    from wanjax.media.video import read_metadata, write_video
    from wanjax.stores.temporary import temp_dir

    with temp_dir() as folder:
        video_file = folder / "video.mp4"
        video_file.write_bytes(data)
        metadata = read_metadata(video_file)
        fps = SETTINGS["fps"].read(metadata.get("fps"))
        return write_video(out, read_clip(video_file, MAX_CLIP_FRAMES, fps), fps, metadata)


def _is_mp4(out: str) -> bool:
    return Path(out).suffix.lower() == ".mp4"


def _video_id(path: str) -> str:
    return path.rpartition("/")[2]


def _failure_reason(video_fields: Mapping[str, Any]) -> str:
    """Return the reason that the server gives for a failed video."""
    reason = video_fields["error"].get("message") if isinstance(video_fields.get("error"), dict) else None
    return _printable(reason or "the server gave no reason")


def _failure_code(video_fields: Mapping[str, Any]) -> object:
    """Return the error code that the server gives for a failed video, or None."""
    return video_fields["error"].get("code") if isinstance(video_fields.get("error"), dict) else None


def _seed(settings: Mapping[str, Any], server_url: str) -> int:
    """Read the seed in a server's settings; raise WanjaxError if it is invalid."""
    try:
        return SETTINGS["seed"].read(settings.get("seed"))
    except WanjaxError as error:
        raise WanjaxError(
            f"{server_url} gives no seed of a video: give the address of a `wanjax serve` of this version"
        ) from error


def _wait_for_video(
    server: "Server", path: str, report: Report, on_progress: Callable[[str, int, int], Any]
) -> dict[str, Any]:
    """Wait until a video is completed or failed. Print the notes on the video, and pass the progress of its stages to
    `on_progress`."""
    pause, max_pause = POLL_INTERVALS
    shown_notes: set[str] = set()
    start = time.monotonic()
    while True:
        try:
            video_fields = server.request_json(path)
        except RefusedError:
            raise
        except WanjaxError as error:
            advice = f"{_video_id(path)} waits there until it runs again: {server.url}{path}/content"
            raise WanjaxError(f"{error}; {advice}") from error
        notes = video_fields.get("notes")
        new_notes = [f"note: {_printable(note)}" for note in (notes if isinstance(notes, list) else [])]
        queue_text = _queue_text(video_fields) if time.monotonic() - start > QUEUE_NOTE_DELAY else ""
        for note in filter(None, (*new_notes, _window_text(video_fields), queue_text)):
            if note not in shown_notes:
                shown_notes.add(note)
                report.note(note)
        if video_fields.get("status") not in ("queued", "in_progress"):
            return video_fields
        stage, done, total = (video_fields.get(name) for name in ("stage", "stage_done", "stage_total"))
        if (
            isinstance(done, int)
            and isinstance(total, int)
            and 0 <= done <= total
            and 0 < total <= MAX_PROGRESS_TOTAL
            and stage
        ):
            on_progress(_printable(stage), done, total)
        report.stop_if_interrupted()
        time.sleep(pause)
        pause = min(1.2 * pause, max_pause)


def _queue_text(video_fields: Mapping[str, Any]) -> str:
    """Describe how many videos are before a waiting video. The text is empty for a video that is being made."""
    ahead = video_fields.get("queue_position")
    if video_fields.get("status") != "queued" or not isinstance(ahead, int):
        return ""
    return f"waiting on the server: {pluralize(ahead, 'video')} before this one"


def _window_text(video_fields: Mapping[str, Any]) -> str:
    """Describe which window of a video is being made. The text is empty for a waiting video or a single window."""
    settings = video_fields.get("settings")
    number, count = video_fields.get("window"), settings.get("windows") if isinstance(settings, dict) else 1
    has_several = isinstance(number, int) and isinstance(count, int) and 0 < number <= count and count > 1
    return f"window {number} of {count}" if has_several and video_fields.get("status") == "in_progress" else ""


def _request_fields(request: VideoRequest) -> dict[str, Any]:
    """Build the fields of a request, including its files. The server refuses fields that its model does not support."""
    files = {
        name: [*map(_File.of, file)] if isinstance(file, list) else _File.of(file)
        for name, file in request.inputs.items()
    }
    empty = not request.settings["prompt"].strip()  # this command has already checked the empty prompt
    return {**request.fields, **files, **({ALLOW_EMPTY.name: True} if empty else {})}


def _strengths(loras: Sequence[Any], served_loras: Any, server_url: str) -> dict[str, float]:
    """Map each of the server's LoRAs to its strength, which is 0 if this command does not name it. Raises WanjaxError
    for a LoRA that the server does not have.
    """
    from wanjax.checkpoints.lora_source import Lora  # imported late, because the import is slow

    names = [str(lora.get("name")) for lora in served_loras if isinstance(lora, dict)]
    strengths = {lora.name: lora.strength for lora in map(Lora.parse, loras)}
    for name in strengths.keys() - set(names):
        available_names = _printable(" and ".join(names)) or "none"
        raise WanjaxError(
            f"the LoRA {name} must be one with which the server was started, and {server_url} has {available_names}: "
            "leave it out, or start a server with it"
        )
    return dict.fromkeys(names, 0.0) | strengths


def _check_options(options: PipelineOptions, server_options: Mapping[str, Any], server_url: str) -> None:
    """Raise WanjaxError unless the server was started with the same options as this command."""
    for name in options._fields:
        if is_given(name) and name not in ("model", "lora") and (value := getattr(options, name)) is not None:
            _compare_option(name, value, server_options, server_url)


def _compare_option(name: str, value: Any, server_options: Mapping[str, Any], server_url: str) -> None:
    """Raise WanjaxError unless the server was started with this value of the option."""
    server_value = server_options.get(
        "tiling" if name == "tile" else name, SAFE_COMPILER if name == "compiler" else None
    )  # metadata without this entry means the set `safe`
    is_same = (
        value == bool(server_value)
        if isinstance(value, bool)
        else list(map(base_name, _as_texts(value))) == _as_texts(server_value)
    )
    if not is_same:
        server_text = _printable("none" if server_value in (None, [], ()) else ", ".join(_as_texts(server_value)))
        option_text = "" if isinstance(value, bool) else f" {', '.join(_as_texts(value))}"
        raise WanjaxError(
            f"{option_of(name)}{option_text} must be the value with which the server was started, and {server_url} has "
            f"{server_text}: leave {option_of(name)} out, or start a server with it"
        )


def _as_texts(value: Any) -> list[str]:
    is_list = type(value) in (list, tuple)  # not a mesh, which is a tuple of another type
    return [str(item) for item in (value if is_list else [value])]


@dataclass(frozen=True)
class _File:
    """A file of a request. The object stores the digest, and reads the contents only when they are sent."""

    name: str
    digest: str

    @classmethod
    def of(cls, name: str) -> "_File":
        """Compute the digest of a file. Raises WanjaxError if the file cannot be read."""
        return cls(name, hashlib.sha256(cls._read(name)).hexdigest())

    def as_url(self) -> str:
        """Encode the contents as a data: URL. Raises WanjaxError if the file cannot be read."""
        return f"data:application/octet-stream;base64,{base64.b64encode(self._read(self.name)).decode()}"

    @staticmethod
    def _read(name: str) -> bytes:
        try:
            return Path(name).expanduser().read_bytes()
        except OSError as error:
            folder = "it is a folder, but a server accepts only a video or an animation"
            raise WanjaxError(f"{name} cannot be sent: {folder if Path(name).is_dir() else reason(error)}") from error


def _with_digests(value: Any) -> Any:
    """Replace each file in a field's value by its digest."""
    if isinstance(value, list):
        return list(map(_with_digests, value))
    return value.digest if isinstance(value, _File) else value


def _printable(text: Any) -> str:
    """Cut a server's text to 1000 characters, without control characters."""
    return printable(str(text)[:1000])


class Server:
    """A `wanjax serve` at an address."""

    def __init__(self, url: str):
        """Set the address, such as http://localhost:8000; it may end in /v1. Raises WanjaxError for a malformed
        address."""
        url = f"http://{url}" if SCHEMELESS_URL.fullmatch(url) else url
        if not is_http_url(url):
            raise WanjaxError(f"--at got {repr_short(url)}: give an address such as http://localhost:8000")
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")  # clients of OpenAI's API expect an address with /v1
        self._opener = build_opener(NoRedirect)

    def model(self, name: str | None) -> dict[str, Any]:
        """Return the server's description of the model with this name, by default of its first model.

        Raises WanjaxError if the server has no such model, or if the reply did not come from a wanjax server.
        """
        models_field = self.request_json(MODELS_PATH).get("data")
        models = [model for model in models_field if isinstance(model, dict)] if isinstance(models_field, list) else []
        if not models or not all(
            isinstance(model.get(field), field_type) for model in models for field, field_type in MODEL_FIELDS.items()
        ):
            raise WanjaxError(
                f"{self.url} does not describe its models: give the address of a `wanjax serve` of this version"
            )
        for model in models:
            if name is None or base_name(name) == model["id"]:
                return model
        ids = _printable(" and ".join(model["id"] for model in models))
        raise WanjaxError(
            f"the model {name} must be one with which the server was started, and {self.url} has {ids}: leave the "
            "model out, or start a server with it"
        )

    def submit(self, fields: Mapping[str, Any]) -> str:
        """Request a video; return its path at the server. Raises WanjaxError as `fetch` does."""
        video_fields = self.request_json("/v1/videos", fields)
        if not isinstance(id := video_fields.get("id"), str) or not id.replace("_", "").isalnum():
            raise WanjaxError(
                f"{self.url} replied without the id of a video: give the address of a `wanjax serve` of this version"
            )
        return f"/v1/videos/{id}"

    def request_json(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a GET request, or a POST request with `body`, and return the JSON object of the reply. Raises
        WanjaxError as `fetch` does."""
        response = self.fetch(path, body)
        try:
            parsed = json.loads(response)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise WanjaxError(
                f"{self.url}{path} did not reply with JSON: give the address of a `wanjax serve` of this version"
            )
        return parsed

    def fetch(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Return the bytes of a reply. Raises WanjaxError with the server's message if it refuses, and if no server
        replies."""
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(TOKEN_VARIABLE):
            # checked here, because the library's message would contain the token
            if not token.isascii() or not token.isprintable():
                raise WanjaxError(
                    f"the token in {TOKEN_VARIABLE} has characters that are not printable ASCII: set another"
                )
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body, default=_File.as_url).encode()
        try:
            with self._opener.open(Request(f"{self.url}{path}", data, headers), timeout=REPLY_TIMEOUT) as reply:
                content = reply.read(MAX_REPLY_BYTES)
                if reply.length:  # `read` does not raise if the connection ends early
                    raise IncompleteRead(content, reply.length)
                return content
        except HTTPError as error:
            error_type = ServerError if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR else RefusedError
            if (message := _error_message(error)) is None:
                reply = f"{error.code} {_printable(error.reason)}"
                raise error_type(
                    f"{self.url} is not a wanjax server, it replied {reply}: check the address", error.code
                ) from error
            if error.code == HTTPStatus.NOT_FOUND and path == MODELS_PATH:
                parts = urlsplit(self.url)
                root = f"{parts.scheme}://{parts.netloc}"
                advice = "check the address" if self.url == root else f"give its address without a path, as in {root}"
                raise error_type(f"{self.url} is not the address of a wanjax server: {advice}", error.code) from error
            if error.code == HTTPStatus.UNAUTHORIZED:
                raise error_type(_token_advice(self.url), error.code) from error
            raise error_type(f"{self.url} refuses this: {message}", error.code) from error
        except (OSError, HTTPException, ValueError) as error:
            message = getattr(error, "reason", None) or error
            if getattr(message, "reason", None) == "WRONG_VERSION_NUMBER":  # an ssl.SSLError
                plain_url = self.url.replace("https://", "http://", 1)
                raise WanjaxError(f"{self.url} does not speak HTTPS: give {plain_url}") from error
            cause = _printable(reason(message) if isinstance(message, Exception) else message)
            advice = ": start `wanjax serve` there, or give another address" if isinstance(error, OSError) else ""
            raise WanjaxError(f"no wanjax serve answers at {self.url}: {cause}{advice}") from error


def _token_advice(url: str) -> str:
    """Return the message that a server refuses the token in the environment, or that the environment has no token."""
    advice = f"set {TOKEN_VARIABLE} in the environment to the token that the server was started with"
    if os.environ.get(TOKEN_VARIABLE):
        return f"{url} refuses the token in {TOKEN_VARIABLE}: {advice}"
    return f"{url} needs a token: {advice}"


def _error_message(error: HTTPError) -> str | None:
    """Read the error message of a reply in OpenAI's format. Return None if there is no message."""
    try:
        return _printable(json.loads(error.read(10**6))["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError, OSError, HTTPException):
        return None
