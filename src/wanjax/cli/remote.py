# SPDX-License-Identifier: Apache-2.0
"""`generate --at URL`: videos by a `wanjax serve` that runs elsewhere. One .mp4 is made without importing JAX.

What a request may ask of the server, the server tells: its settings, its pictures, and what it was started with.
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

from wanjax.cli.defaults import SAFE
from wanjax.cli.existing import Existing
from wanjax.cli.names import TOKEN, free_names, video_named, videos_folder
from wanjax.cli.options import SETTINGS, is_given, is_typed, option_of
from wanjax.cli.parsed import CommandOptions, PipelineOptions
from wanjax.cli.report import Report
from wanjax.errors import NetworkError, WanjaxError, reason, repr_short
from wanjax.figures import progress_of_many, quantity
from wanjax.media.inputs import INPUTS
from wanjax.pipelines.request import VideoRequest
from wanjax.pipelines.settings import ALLOW_EMPTY, pixels
from wanjax.pipelines.text.prompt_extension import NoRedirect
from wanjax.stores.paths import AnyPath, base_name, names_in, parse_path
from wanjax.stores.writing import check_folder, writing

PATIENCE = 60.0  # seconds in which a server has to answer
EVERY = 0.05, 1.0  # seconds between two looks at the video, the first and the longest
LARGEST = 2**33  # bytes of an answer
MOST = 10**9  # units of a stage
HOST_AND_PORT = re.compile(r"[\w.-]+:\d{1,5}(/\S*)?", re.ASCII)  # without a scheme
TOLD = {"id": str, "defaults": dict, "settings": dict, "started_with": dict, "loras": list}  # of a model
AHEAD = 4  # of several videos, those that the server has at once: it goes on while one is collected
FULL = 429  # the status of HTTP where a queue is full
WRONG = (400, 404, 409, 413, 415, 422)  # those of a request's own mistakes
HERE = ("folder", "noise", "profile", "preview", "preview_decoder", "extend_prompt", "extend_model")
"""Parameters that mean something where the video is made."""


class Refused(WanjaxError):
    """A server's refusal of a request; `status` is HTTP's."""

    def __init__(self, sentence: str, status: int):
        super().__init__(sentence)
        self.status = status


class Failed(Refused, NetworkError):
    """A server's fault, or one of a proxy before it."""


def generate(
    report: Report,
    request: VideoRequest,
    options: PipelineOptions,
    command: CommandOptions,
    at: str,
    original_metadata: Mapping[str, Any] | None = None,
) -> None:
    """Ask the server at an address for a video, or for several, show their progress, and write them.

    Options of the model that are given have to be the server's. `original_metadata` is the metadata of a video to make
    again.
    """
    server = Server(at)
    offered = server.model(options.model if is_given("model") else None)
    if original_metadata is not None:
        from wanjax.cli.remake import (  # imported late: they need JAX
            check_files,
            parameters_from_record,
            with_original_prompt,
        )

        request = with_original_prompt(request, original_metadata)
        check_files(original_metadata, parameters_from_record(INPUTS))
        if not is_typed("compiler"):
            options = options._replace(compiler=None)  # it decides the last digits alone
    for name in filter(is_given, HERE):
        if getattr(command, name):
            raise WanjaxError(f"{option_of(name)} is for videos of this machine, and --at has one made by {at}")
    _check_options(options, offered["started_with"], at)
    request = replace(request, lora=_strengths(options.lora, offered["loras"], at) if options.lora else {})
    if "seed" not in request.settings:  # the command's own, where the server draws one
        request = request.updated({"seed": _seed(offered["defaults"], at)})
    if command.several:
        _generate_several(report, server, offered, _requests(request, command), command)
    else:
        _generate_one(report, server, offered, request, command)


def _generate_one(
    report: Report, server: "Server", offered: Mapping[str, Any], request: VideoRequest, command: CommandOptions
) -> None:
    """Have a video made, and write it under its own name or --out, unless it is there already."""
    out = command.out
    if out is not None and not command.force and (existing := Existing.find(out, "another --out")) is not None:
        _check_existing(existing, request, offered)
        report.note(f"{existing.file} is there already: --force makes it again")
        return report.print_result(parse_path(out).absolute(), existing.metadata or {}, seconds=report.seconds)
    if out is not None and not _is_mp4(out):
        from wanjax.media.video import check_output  # imported late, as in `_save`

        frames = request.settings.get("frames", offered["defaults"].get("frames"))
        check_output(out, frames if isinstance(frames, int) else 1)
    path = server.submit(_fields(request))
    with _cancelling(server) as waiting, report.stage("video"):
        waiting.append(path)
        job = _awaited(server, path, report, report.count)
        waiting.clear()
        report.count("", 1, 1)  # the server was last asked before its last step
    if job.get("status") != "completed":
        raise WanjaxError(f"{server.url} made no video: {_why(job)}")
    record = server.ask(f"{path}/record")
    name = out or str(video_named(next(free_names(request.settings["prompt"], _seed(record, server.url)))))
    target = _save(server, path, name)
    if report.stats:
        report.table()
    report.print_result(target, record, id=_id(path), seconds=report.seconds)


def _check_existing(existing: Existing, request: VideoRequest, offered: Mapping[str, Any]) -> None:
    """Raise WanjaxError where a video that is there is not the one that a server would make, as far as it tells."""
    sizes, size = offered.get("sizes"), request.settings.get("size")
    if isinstance(sizes, dict) and (sides := pixels(sizes.get(size, ""))):
        settings = {name: value for name, value in request.settings.items() if name != "size"}
        request = replace(request, settings={**settings, "height": sides[0], "width": sides[1]})
    settings = {**request.under(VideoRequest(offered["defaults"])).settings, "model": offered["id"]}
    existing.check(settings, settings)
    from wanjax.media.metadata import file_digests  # imported late: NumPy comes with it

    digests = file_digests(existing.metadata or {}).values()
    files = [one for value in _fields(request).values() for one in (value if isinstance(value, list) else [value])]
    if any(one.digest not in digests for one in files if isinstance(one, _File)):
        existing.refuse("with another input file")
    if request.lora:
        from wanjax.checkpoints.lora_source import Lora  # imported late, as in `_strengths`

        loras = [Lora.parse(str(text)) for text in (existing.metadata or {}).get("lora") or ()]
        if {one.name: one.strength for one in loras if one.strength} != {k: x for k, x in request.lora.items() if x}:
            existing.refuse("with another lora")


def _requests(request: VideoRequest, command: CommandOptions) -> list[VideoRequest]:
    """Return the request of each of several videos, with its prompt, its seed and its settings."""
    from wanjax.cli.many import requests_of, seeds_of, shared_by_all  # imported late: they need JAX
    from wanjax.jobs.rows import with_seeds
    from wanjax.pipelines.seeds import checked_seed

    requests, shared = requests_of(request, command.prompts), shared_by_all(request)
    numbers = seeds_of(requests, command, request.settings["seed"])
    seeded = [one.under(shared) for one in with_seeds(requests, numbers)]
    return [one.updated({"seed": checked_seed(one.settings["seed"], alone=True)}) for one in seeded]


def _generate_several(
    report: Report,
    server: "Server",
    offered: Mapping[str, Any],
    requests: Sequence[VideoRequest],
    command: CommandOptions,
) -> None:
    """Have a video of each request made, except those that are in the folder already, unless with --force.

    Cancels the videos that wait where this ends before its time. The folder has a manifest, as that of `wanjax batch`.
    """
    from wanjax.cli.many import FAILURE  # imported late: it needs JAX
    from wanjax.jobs.batch import MANIFEST, Manifest
    from wanjax.jobs.maker import Task

    folder = videos_folder(command.out).absolute()
    each: dict[str, tuple[Any, Mapping[str, Any]]] = {}
    for request in requests:
        fields = _fields(request)
        name = _name(fields, offered)
        each[name] = Task(name, request), fields
    if repeated := len(requests) - len(each):
        report.note(f"note: made once, of {len(requests)} videos: {repeated} that repeat another")
    check_folder(folder)
    there = set() if command.force else each.keys() & set(names_in(folder))
    left = [task for name, task in each.items() if name not in there]
    report.videos = len(there)
    report.note(progress_of_many(len(left), len(there), folder))
    report.enable_resume()
    with closing(Manifest(folder)) as manifest, _cancelling(server) as waiting, report.stage("videos"):
        for name in there:
            manifest.add(each[name][0])
        several = _Several(report, server, folder, manifest, waiting, left)
        several.make()
    report.resume_command = None
    if report.stats:
        report.table()
    if several.failed:
        summary = f"{several.failed} of {quantity(len(left), 'video')} failed, as listed in {folder / MANIFEST}"
        report.note(f"{summary}; the same command tries them again")
        raise click.exceptions.Exit(FAILURE)


class _Several:
    """Several videos that a server makes: a few wait there at a time, and are written in their order.

    `left` are jobs and the fields of their requests, and `waiting` the paths at the server of those asked for.
    """

    def __init__(
        self,
        report: Report,
        server: "Server",
        folder: AnyPath,
        manifest: Any,
        waiting: deque[str],
        left: Sequence[tuple[Any, Mapping[str, Any]]],
    ):
        self.report, self.server, self.folder, self.manifest, self.waiting = report, server, folder, manifest, waiting
        self.total, self.ended, self.failed = len(left), 0, 0
        self._left, self._submitted = deque(left), deque[Any]()

    def make(self) -> None:
        """Ask for all videos, and write each."""
        self._count()
        while self._left or self._submitted:
            self._submit()
            if self._submitted:
                self._collect()
            else:
                self.report.stop_if_asked()
                time.sleep(EVERY[1] if self._left else 0)  # the queue is full of others' videos

    def _submit(self) -> None:
        """Ask for the next videos, as many as are to wait and as the server's queue takes."""
        while self._left and len(self._submitted) < AHEAD:
            job, fields = self._left[0]
            try:
                self.waiting.append(self.server.submit(fields))
            except Refused as error:
                if error.status == FULL:
                    return
                if error.status not in WRONG or not (self.ended or self._submitted):
                    raise job.request.wrong(error) from error  # the first tells what all have in common
                self._end(job, error)
            else:
                self._submitted.append(job)
            self._left.popleft()

    def _collect(self) -> None:
        """Wait for the first of the videos that were asked for, and write it."""
        job, path = self._submitted[0], self.waiting[0]
        fault: object = None
        try:
            video = _awaited(
                self.server, path, self.report, lambda unit, done, of: self._count(f"{unit} {done} of {of}")
            )
            if video.get("status") == "completed":
                record = self.server.ask(f"{path}/record")
                self.report.print_result(_save(self.server, path, str(self.folder / job.output)), record, id=_id(path))
            else:
                fault = _why(video)
        except Refused as error:  # as of a video that somebody removed meanwhile
            if error.status not in WRONG:
                raise
            fault = error
        self._submitted.popleft()
        self.waiting.popleft()
        self._end(job, fault)

    def _end(self, job: Any, fault: object = None) -> None:
        """List a video that was made, or that failed."""
        self.ended += 1
        if fault is not None:
            self.failed += 1
            self.report.note(f"{f'row {job.request.row}' if job.request.row else job.output} failed: {fault}")
        self.manifest.add(job, worker=self.server.url, **({} if fault is None else {"error": str(fault)}))
        self._count()

    def _count(self, beside: str = "") -> None:
        failed = f"{self.failed} failed" if self.failed else ""
        self.report.count("video", self.ended, self.total, suffix=", ".join(filter(None, (failed, beside))))


def _name(fields: Mapping[str, Any], offered: Mapping[str, Any]) -> str:
    """Return the name of one of several videos, which is the same wherever the same server makes it again.

    It is that of `wanjax batch`, as far as what is asked for is all that the video's record holds.
    """
    from wanjax.jobs.maker import video_name  # imported late: it needs JAX

    chosen = {name: _digests(value) for name, value in fields.items() if name != ALLOW_EMPTY.name}
    return video_name({**offered["defaults"], **offered["started_with"], **chosen})  # a server chooses no folder


@contextmanager
def _cancelling(server: "Server") -> Iterator[deque[str]]:
    """Yield a queue for the paths of videos that are asked for; cancel those left in it by Ctrl-C or an error."""
    waiting: deque[str] = deque()
    try:
        yield waiting
    except BaseException:
        for path in waiting:
            try:
                server.ask(f"{path}/cancel", {})
            except Refused:  # the video is over, or removed
                continue
            except WanjaxError:  # a server that is gone is asked once
                break
        raise


def _save(server: "Server", path: str, out: str) -> AnyPath:
    """Write a video as the server made it, or its frames and its record in the format of another name."""
    data, target = server.fetch(f"{path}/content"), parse_path(out).absolute()
    if _is_mp4(out):
        check_folder(target.parent)
        with writing(target) as beside:
            beside.write_bytes(data)
        return target
    from wanjax.media.pictures import read_clip  # imported late: they take longer than all else that `--at` needs
    from wanjax.media.video import read_metadata, write_video
    from wanjax.stores.temporary import temp_dir

    with temp_dir() as folder:
        film = folder / "video.mp4"
        film.write_bytes(data)
        record = read_metadata(film)
        fps = SETTINGS["fps"].read(record.get("fps"))
        return write_video(out, read_clip(film, MOST, fps), fps, record)


def _is_mp4(out: str) -> bool:
    return Path(out).suffix.lower() == ".mp4"


def _id(path: str) -> str:
    return path.rpartition("/")[2]


def _why(job: Mapping[str, Any]) -> str:
    """Return why a video was not made, as the server tells it."""
    why = job["error"].get("message") if isinstance(job.get("error"), dict) else None
    return _plain(why or "it tells no reason")


def _seed(job: Mapping[str, Any], at: str) -> int:
    """Return the seed among settings that a server tells; raise WanjaxError where it is none."""
    try:
        return SETTINGS["seed"].read(job.get("seed"))
    except WanjaxError as error:
        raise WanjaxError(f"{at} tells no seed of a video: it is no wanjax serve of this version") from error


def _awaited(server: "Server", place: str, report: Report, show: Callable[[str, int, int], Any]) -> dict[str, Any]:
    """Return a video that is over; meanwhile its notes are printed, and `show` receives how far a stage is."""
    pause, longest = EVERY
    noted: set[str] = set()
    while True:
        try:
            job = server.ask(place)
        except Refused:
            raise
        except WanjaxError as error:
            advice = f"{_id(place)} waits there and is made once it runs again: {server.url}{place}/content"
            raise WanjaxError(f"{error}; {advice}") from error
        notes = job.get("notes")
        for note in (*map(_plain, notes if isinstance(notes, list) else []), _window(job)):
            if note and note not in noted:
                noted.add(note)
                report.note(note)
        if job.get("status") not in ("queued", "in_progress"):
            return job
        stage, done, total = (job.get(name) for name in ("stage", "stage_done", "stage_total"))
        if isinstance(done, int) and isinstance(total, int) and 0 <= done <= total and 0 < total <= MOST and stage:
            show(_plain(stage), done, total)
        report.stop_if_asked()
        time.sleep(pause)
        pause = min(1.2 * pause, longest)


def _window(job: Mapping[str, Any]) -> str:
    """Return which window of a video is made; nothing of one that has no others, or waits."""
    settings = job.get("settings")
    number, count = job.get("window"), settings.get("windows") if isinstance(settings, dict) else 1
    several = isinstance(number, int) and isinstance(count, int) and 0 < number <= count and count > 1
    return f"window {number} of {count}" if several and job.get("status") == "in_progress" else ""


def _fields(request: VideoRequest) -> dict[str, Any]:
    """Return the fields of a request with its files; the server refuses what its model has no use for."""
    files = {
        name: [*map(_File.of, file)] if isinstance(file, list) else _File.of(file)
        for name, file in request.inputs.items()
    }
    empty = not request.settings["prompt"].strip()  # which this command has asked about
    return {**request.fields, **files, **({ALLOW_EMPTY.name: True} if empty else {})}


def _strengths(loras: Sequence[Any], served: Any, at: str) -> dict[str, float]:
    """Return the strength of each of the server's LoRAs, 0 where it is not among the given ones.

    Raises WanjaxError for one that the server does not have.
    """
    from wanjax.checkpoints.lora_source import Lora  # imported late: it takes half of the time of all others

    names = [str(one.get("name")) for one in served if isinstance(one, dict)]
    strengths = {lora.name: lora.strength for lora in map(Lora.parse, loras)}
    for name in strengths.keys() - set(names):
        has = _plain(" and ".join(names)) or "none"
        raise WanjaxError(f"the LoRA {name} is for the server to be started with, and {at} has {has}")
    return dict.fromkeys(names, 0.0) | strengths


def _check_options(options: PipelineOptions, has: Mapping[str, Any], at: str) -> None:
    """Raise WanjaxError unless the server was started with the options that are given here."""
    for name in options._fields:
        if is_given(name) and name not in ("model", "lora") and (value := getattr(options, name)) is not None:
            _compare(name, value, has, at)


def _compare(name: str, value: Any, has: Mapping[str, Any], at: str) -> None:
    """Raise WanjaxError unless the server was started with an option of this value."""
    other = has.get("tiling" if name == "tile" else name, SAFE if name == "compiler" else None)  # which no record names
    same = value == bool(other) if isinstance(value, bool) else list(map(base_name, _texts(value))) == _texts(other)
    if not same:
        theirs = _plain("none" if other in (None, [], ()) else ", ".join(_texts(other)))
        ours = "" if isinstance(value, bool) else f" {', '.join(_texts(value))}"
        raise WanjaxError(f"{option_of(name)}{ours} is for the server to be started with, and {at} has {theirs}")


def _texts(value: Any) -> list[str]:
    several = type(value) in (list, tuple)  # and not a mesh, which is a tuple of its own type
    return [str(one) for one in (value if several else [value])]


@dataclass(frozen=True)
class _File:
    """A file that goes with a request: its digest until then, and its contents only while they are sent."""

    name: str
    digest: str

    @classmethod
    def of(cls, name: str) -> "_File":
        """Return a file; raises WanjaxError where it cannot be read."""
        return cls(name, hashlib.sha256(cls._read(name)).hexdigest())

    def as_url(self) -> str:
        """Return the contents as a data: URL; raises WanjaxError where they cannot be read."""
        return f"data:application/octet-stream;base64,{base64.b64encode(self._read(self.name)).decode()}"

    @staticmethod
    def _read(name: str) -> bytes:
        try:
            return Path(name).expanduser().read_bytes()
        except OSError as error:
            folder = "it is a folder, and a server takes a film or an animation"
            raise WanjaxError(f"{name} cannot be sent: {folder if Path(name).is_dir() else reason(error)}") from error


def _digests(value: Any) -> Any:
    """Return the value of a field with digests in place of files."""
    if isinstance(value, list):
        return list(map(_digests, value))
    return value.digest if isinstance(value, _File) else value


def _plain(text: Any) -> str:
    """Return a server's text without characters that would steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:1000])


class Server:
    """A `wanjax serve` at an address."""

    def __init__(self, url: str):
        """Take an address such as http://localhost:8000, also with /v1; raise WanjaxError for one of another kind."""
        url = f"http://{url}" if HOST_AND_PORT.fullmatch(url) else url
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise WanjaxError(f"--at is given as {repr_short(url)}: give an address such as http://localhost:8000")
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")  # as the clients of OpenAI's API take it
        self._opener = build_opener(NoRedirect)

    def model(self, name: str | None) -> dict[str, Any]:
        """Return what the server tells of its first model, or of the one of this name.

        Raises WanjaxError where there is none, or where that is no wanjax server's answer.
        """
        listed = self.ask("/v1/models").get("data")
        models = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        if not models or not all(isinstance(one.get(part), kind) for one in models for part, kind in TOLD.items()):
            raise WanjaxError(f"{self.url} does not tell what it makes: it is no wanjax serve of this version")
        for model in models:
            if name is None or base_name(name) == model["id"]:
                return model
        ids = _plain(" and ".join(model["id"] for model in models))
        raise WanjaxError(f"the model {name} is for the server to be started with, and {self.url} has {ids}")

    def submit(self, fields: Mapping[str, Any]) -> str:
        """Ask for a video; return its path at the server. Raises WanjaxError as `fetch`."""
        job = self.ask("/v1/videos", fields)
        if not isinstance(id := job.get("id"), str) or not id.replace("_", "").isalnum():
            raise WanjaxError(f"{self.url} answers with no id of a video: it is no wanjax serve of this version")
        return f"/v1/videos/{id}"

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON object that is answered; post one where it is given. Raises WanjaxError as `fetch`."""
        response = self.fetch(path, body)
        try:
            answer = json.loads(response)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise WanjaxError(f"{self.url}{path} answers with no JSON: it is no wanjax serve of this version")
        return answer

    def fetch(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Return the bytes that are answered; raise WanjaxError with the server's reason, or where none answers."""
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(TOKEN):
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body, default=_File.as_url).encode()
        try:
            with self._opener.open(Request(f"{self.url}{path}", data, headers), timeout=PATIENCE) as answer:
                content = answer.read(LARGEST)
                if answer.length:  # a read of so many bytes is no error where the connection ends before them
                    raise IncompleteRead(content, answer.length)
                return content
        except HTTPError as error:
            kind = Failed if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR else Refused
            if (why := _reason(error)) is None:
                answer = f"{error.code} {_plain(error.reason)}"
                raise kind(
                    f"{self.url} is no wanjax serve, it answers {answer}: check the address", error.code
                ) from error
            raise kind(f"{self.url} refuses this: {why}", error.code) from error
        except (OSError, HTTPException, ValueError) as error:
            why = getattr(error, "reason", None) or error
            cause = _plain(reason(why) if isinstance(why, Exception) else why)
            raise WanjaxError(f"no wanjax serve answers at {self.url}: {cause}") from error


def _reason(error: HTTPError) -> str | None:
    """Return the reason in a server's refusal, which has OpenAI's form; None where there is none."""
    try:
        return _plain(json.loads(error.read(10**6))["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError, OSError, HTTPException):
        return None
