# SPDX-License-Identifier: Apache-2.0
"""`generate --at` beside servers that are cut off, hostile, or no wanjax: one sentence, and no file."""

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.support.commands import files, refused, succeeded, wanjax
from tests.support.words import says
from wanjax.cli import remote

ID, VIDEO = "video_1", b"0123456789"
MODEL = {"id": "nano", "defaults": {"seed": 42}, "settings": {}, "started_with": {}, "loras": []}
PLACE = f"/v1/videos/{ID}"
Answers = Mapping[str, Any]


def answers(**other: Any) -> dict[str, Any]:
    """Returns what a server answers by path, with other answers in place of some."""
    return {
        "/v1/models": other.get("models", {"data": [MODEL]}),
        "/v1/videos": {"id": ID},
        PLACE: other.get("job", {"status": "completed", "notes": []}),
        f"{PLACE}/record": other.get("record", {"prompt": "a cat", "seed": 42}),
        f"{PLACE}/content": other.get("content", VIDEO),
        f"{PLACE}/cancel": {},
    }


@contextmanager
def answering(told: Answers, whole: Callable[[str], int] = lambda path: 0) -> Iterator[str]:
    """Runs a server that answers by path, and yields its address; `whole` are bytes that it promises beside.

    An iterator has one answer after another.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = told[self.path]
            answer = next(answer) if isinstance(answer, Iterator) else answer
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data) + whole(self.path)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_video_is_written_as_it_was_answered():
    with answering(answers()) as url:
        succeeded(wanjax("a cat", "--at", url, "--out", "cat.mp4"))
    assert Path("cat.mp4").read_bytes() == VIDEO


def test_each_window_is_told_as_it_is_made(monkeypatch):
    monkeypatch.setattr(remote, "EVERY", (0, 0))
    waiting = {"status": "queued", "window": 1, "settings": {"windows": 3}}
    numbers = [*(1, 1, 2, 3), *("4", 4, None, 10**9)]  # those at the end are no windows
    jobs = [waiting, *(waiting | {"status": "in_progress", "window": number} for number in numbers)]
    alone = waiting | {"status": "in_progress", "settings": [7]}
    with answering(answers(job=iter([*jobs, alone, waiting | {"status": "completed"}]))) as url:
        said = succeeded(wanjax("a cat", "--at", url, "--out", "cat.mp4")).stderr
    assert [line for line in said.splitlines() if "window" in line] == [f"window {number} of 3" for number in (1, 2, 3)]


def test_a_connection_that_is_cut_leaves_no_video():
    with answering(answers(), lambda path: 5 * path.endswith("content")) as url:
        assert says(refused("a cat", "--at", url, "--out", "cat.mp4"), url)
    assert files(".") == []


@pytest.mark.parametrize("seed", ["/../../out/x", "7/x", None, [7], 2**64])
def test_a_server_chooses_no_folder(seed):
    with answering(answers(record={"prompt": "a cat", "seed": seed})) as url:
        assert says(refused("a cat", "--at", url), f"{url} seed")
    assert files(".") == []


NESTED = b"[" * 200_000
HOSTILE = {
    "nested": ({"models": NESTED}, "JSON"),
    "a model without a seed": ({"models": {"data": [MODEL | {"defaults": {}}]}}, "seed"),
    "a video that is nested": ({"job": NESTED}, "JSON"),
    "a record that is nested": ({"record": NESTED}, "JSON"),
    "no state": ({"job": {"notes": 7, "status": [7]}}, "no video"),
    "notes that are no texts": ({"job": {"notes": [[7], {}], "status": "failed"}}, "no video"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_answers_are_one_sentence(kind):
    told, sentence = HOSTILE[kind]
    with answering(answers(**told)) as url:
        assert says(refused("a cat", "--at", url, "--out", "cat.mp4", "--quiet"), f"{url} {sentence}")
    assert files(".") == []


def test_loras_that_are_none():
    with answering(answers(models={"data": [MODEL | {"loras": ["a", 7]}]})) as url:
        assert says(refused("a cat", "--at", url, "--lora", "a.safetensors"), f"{url} none")


@pytest.mark.parametrize(
    ("options", "same", "told"),
    [
        ("--window 9", {"attention": "auto:window=9"}, "--attention auto:window=9"),
        ("--block-q 512", {"attention": "flash_tpu:block_q=512"}, "--attention flash_tpu:block_q=512"),
        ("--use_fsdp", {"rules": "fsdp"}, "--rules fsdp"),
        ("--mesh sp=2", {"mesh": "dp=1,sp=2,tp=1"}, "--mesh dp=1,sp=2,tp=1"),
    ],
)
def test_an_option_of_the_server_is_compared_however_it_is_given(options, same, told):
    given = ("a cat", *options.split(), "--out", "cat.mp4", "--at")
    with answering(answers()) as url:
        assert says(refused(*given, url), f"{told} server {url} none")
    with answering(answers(models={"data": [MODEL | {"started_with": same}]})) as url:
        succeeded(wanjax(*given, url))


def test_a_server_that_is_silent_and_one_that_hangs_up(monkeypatch):
    monkeypatch.setattr(remote, "PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert says(refused("a cat", "--at", url), f"{url} timed out")

        def hang_up() -> None:
            for _ in range(2):  # the first is the silent one's
                server.accept()[0].close()

        Thread(target=hang_up, daemon=True).start()
        told = refused("a cat", "--at", url)
        assert url in told
        assert "None" not in told


def test_a_picture_that_is_not_there():
    with answering(answers()) as url:
        told = refused("a cat", "--at", url, "--image", "gone.png")
    assert says(told, "gone.png No such file")
    assert "it is No" not in told
