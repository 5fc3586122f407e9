# SPDX-License-Identifier: Apache-2.0
"""`generate --at URL`: a video by a `wanjax serve` that runs elsewhere. Nothing of JAX is imported here.

What a request may ask of the server, the server tells: its settings, its pictures, and what it was started with.
"""

import base64
import json
import os
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, build_opener

from wanjax.cli.names import own_files
from wanjax.cli.options import SETTINGS, is_given, option_of
from wanjax.cli.report import Report
from wanjax.errors import WanjaxError, reason, shown
from wanjax.pipelines.settings import ALLOW_EMPTY, LOADED, PICTURES
from wanjax.pipelines.text.extending import NoRedirect
from wanjax.stores.places import name_alone, place
from wanjax.stores.writing import check_folder, writing

TOKEN = "WANJAX_TOKEN"  # the variable with what the server wants to be shown
PATIENCE = 60.0  # seconds in which a server has to answer
EVERY = 0.05, 1.0  # seconds between two looks at the video, the first and the longest
LARGEST = 2**33  # bytes of an answer
MOST = 10**9  # units of a stage
TOLD = {"id": str, "defaults": dict, "settings": dict, "started_with": dict, "loras": list}  # of a model
HERE = (
    *("prompts", "seeds", "count", "folder", "noise", "profile", "preview", "preview_decoder"),
    *("extend_prompt", "extend_model"),
)
"""Parameters that mean something where the video is made."""


def generate(report: Report, *, at: str, prompt: str, out: str | None, **given: Any) -> None:
    """Asks the server at an address for a video, shows its progress, and writes it under its own name or `out`."""
    server = Server(at)
    offered = server.model(given["model"] if is_given("model") else None)
    if out is not None and Path(out).suffix != ".mp4":
        raise WanjaxError(f"--out names {out} for a video of {at}, which makes .mp4: a name with this suffix is right")
    own = given.keys() - {"force"}
    chosen = {name: given[name] for name in own if is_given(name) and given[name] not in (None, ())}
    chosen.setdefault("seed", _seed(offered["defaults"], at))  # the command's own, where the server draws one
    empty = {} if prompt.strip() else {ALLOW_EMPTY.name: True}  # which this command has asked about
    job = server.ask("/v1/videos", {"prompt": prompt, **empty, **_fields(chosen, offered, at)})
    if not isinstance(id := job.get("id"), str) or not id.replace("_", "").isalnum():
        raise WanjaxError(f"{at} answers with no id of a video: it is no wanjax serve of this version")
    path = f"/v1/videos/{id}"
    try:
        with report.stage("video"):
            job = _awaited(server, path, report)
    except KeyboardInterrupt:
        server.ask(f"{path}/cancel", {})
        raise
    if job.get("status") != "completed":
        why = job["error"].get("message") if isinstance(job.get("error"), dict) else None
        raise WanjaxError(f"{at} made no video: {_plain(why or 'it tells no reason')}")
    record = server.ask(f"{path}/record")
    target = place(out or own_files(prompt, _seed(record, at), reserve=False).video).absolute()
    check_folder(target.parent)
    with writing(target) as beside:
        beside.write_bytes(server.fetch(f"{path}/content"))
    if report.stats:
        report.table()
    report.made(target, record, id=id, seconds=report.seconds)


def _seed(told: Mapping[str, Any], at: str) -> int:
    """Returns the seed among settings that a server tells; raises WanjaxError where it is none."""
    try:
        return SETTINGS["seed"].read(told.get("seed"))
    except WanjaxError as error:
        raise WanjaxError(f"{at} tells no seed of a video: it is no wanjax serve of this version") from error


def _awaited(server: "Server", place: str, report: Report) -> dict[str, Any]:
    """Returns a video that is over; shows its progress meanwhile."""
    pause, longest = EVERY
    told: set[str] = set()
    while True:
        job = server.ask(place)
        notes = job.get("notes")
        for note in (*map(_plain, notes if isinstance(notes, list) else []), _window(job)):
            if note and note not in told:
                told.add(note)
                report.note(note)
        if job.get("status") not in ("queued", "in_progress"):
            return job
        stage, done, total = (job.get(name) for name in ("stage", "stage_done", "stage_total"))
        if isinstance(done, int) and isinstance(total, int) and 0 <= done <= total <= MOST and stage:
            report.count(_plain(stage), done, total)
        report.stop_if_asked()
        time.sleep(pause)
        pause = min(1.2 * pause, longest)


def _window(job: Mapping[str, Any]) -> str:
    """Returns which window of a video is made; nothing of one that has no others, or waits."""
    settings = job.get("settings")
    number, count = job.get("window"), settings.get("windows") if isinstance(settings, dict) else 1
    several = isinstance(number, int) and isinstance(count, int) and 0 < number <= count and count > 1
    return f"window {number} of {count}" if several and job.get("status") == "in_progress" else ""


def _fields(chosen: Mapping[str, Any], offered: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Returns the fields of a request; raises WanjaxError for an option that the server has another value for."""
    fields: dict[str, Any] = {}
    for name, value in chosen.items():
        if name == "size":
            fields[name] = value if isinstance(value, str) else f"{value[1]}x{value[0]}"
        elif name in PICTURES:
            fields[name] = [_as_url(one) for one in value] if name == "references" else _as_url(value)
        elif name == "lora":
            fields[name] = _strengths(value, offered["loras"], at)
        elif name in HERE:
            raise WanjaxError(f"{option_of(name)} is for videos of this machine, and --at has one made by {at}")
        elif name in SETTINGS.keys() - {*LOADED} | {"scheduler"}:  # the server refuses what its model has no use for
            fields[name] = value
        else:
            _compare(name, value, offered["started_with"], at)
    return fields


def _strengths(given: Sequence[str], known: Any, at: str) -> dict[str, float]:
    """Returns the strength of each of the server's LoRAs, 0 where it is not among the given ones.

    Raises WanjaxError for one that the server does not have.
    """
    from wanjax.checkpoints.lora import Lora  # imported late: it takes half of the time of all others

    names = [str(one.get("name")) for one in known if isinstance(one, dict)]
    asked = {lora.name: lora.strength for lora in map(Lora.parse, given)}
    for name in asked.keys() - set(names):
        has = _plain(" and ".join(names)) or "none"
        raise WanjaxError(f"the LoRA {name} is for the server to be started with, and {at} has {has}")
    return dict.fromkeys(names, 0.0) | asked


def _compare(name: str, value: Any, has: Mapping[str, Any], at: str) -> None:
    """Raises WanjaxError unless the server was started with an option of this value."""
    known = has.get("tiling" if name == "tile" else name)
    same = value == bool(known) if isinstance(value, bool) else list(map(name_alone, _texts(value))) == _texts(known)
    if not same:
        told = "none" if known in (None, [], ()) else ", ".join(_texts(known))
        asked = "" if isinstance(value, bool) else f" {', '.join(_texts(value))}"
        raise WanjaxError(f"{option_of(name)}{asked} is for the server to be started with, and {at} has {_plain(told)}")


def _texts(value: Any) -> list[str]:
    several = type(value) in (list, tuple)  # and not a mesh, which is a tuple of its own type
    return [str(one) for one in (value if several else [value])]


def _as_url(file: str) -> str:
    """Returns a file as a data: URL; raises WanjaxError where it cannot be read."""
    try:
        data = Path(file).expanduser().read_bytes()
    except OSError as error:
        folder = "it is a folder, and a server takes a film or an animation"
        raise WanjaxError(f"{file} cannot be sent: {folder if Path(file).is_dir() else reason(error)}") from error
    return f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"


def _plain(text: Any) -> str:
    """Returns a server's text without characters that would steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:1000])


class Server:
    """A `wanjax serve` at an address."""

    def __init__(self, url: str):
        """Takes an address such as http://localhost:8000; raises WanjaxError for one of another kind."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise WanjaxError(f"--at is given as {shown(url)} where an address such as http://localhost:8000 is right")
        self.url = url.rstrip("/")
        self._opener = build_opener(NoRedirect)

    def model(self, name: str | None) -> dict[str, Any]:
        """Returns what the server tells of its first model, or of the one of this name.

        Raises WanjaxError where there is none, or where that is no wanjax server's answer.
        """
        listed = self.ask("/v1/models").get("data")
        models = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        if not models or not all(isinstance(one.get(part), kind) for one in models for part, kind in TOLD.items()):
            raise WanjaxError(f"{self.url} does not tell what it makes: it is no wanjax serve of this version")
        for model in models:
            if name is None or name_alone(name) == model["id"]:
                return model
        ids = _plain(" and ".join(model["id"] for model in models))
        raise WanjaxError(f"the model {name} is for the server to be started with, and {self.url} has {ids}")

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the JSON object that is answered; posts one where it is given. Raises WanjaxError as `fetch`."""
        told = self.fetch(path, body)
        try:
            answer = json.loads(told)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise WanjaxError(f"{self.url}{path} answers with no JSON: it is no wanjax serve of this version")
        return answer

    def fetch(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Returns the bytes that are answered; raises WanjaxError with the server's reason, or where none answers."""
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(TOKEN):
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with self._opener.open(Request(f"{self.url}{path}", data, headers), timeout=PATIENCE) as answer:
                found = answer.read(LARGEST)
                if answer.length:  # a read of so many bytes is no error where the connection ends before them
                    raise IncompleteRead(found, answer.length)
                return found
        except HTTPError as error:
            raise WanjaxError(f"{self.url} refuses this: {_reason(error)}") from error
        except (OSError, HTTPException, ValueError) as error:
            why = getattr(error, "reason", None) or error
            told = _plain(reason(why) if isinstance(why, Exception) else why)
            raise WanjaxError(f"no wanjax serve answers at {self.url}: {told}") from error


def _reason(error: HTTPError) -> str:
    """Returns the reason in a server's refusal, which has OpenAI's form."""
    try:
        return _plain(json.loads(error.read(10**6))["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError, OSError, HTTPException):
        return f"{error.code} {_plain(error.reason)}"
