# SPDX-License-Identifier: Apache-2.0
"""`generate --at` with a server that stops, is hostile, or is not wanjax: an error message, and no file."""

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.support.commands import files, refused, succeeded, wanjax
from tests.support.words import has_line_with_words
from wanjax.cli import remote
from wanjax.cli.existing import ExistingFile
from wanjax.cli.report import REMOTE_STAGE, Report
from wanjax.jobs.batch import MANIFEST

ID, VIDEO = "video_1", b"0123456789"
MODEL = {"id": "nano", "defaults": {"seed": 42}, "settings": {}, "started_with": {}, "loras": []}
METADATA = {"model": "nano", "prompt": "a cat", "seed": 42}
JOB_PATH = f"/v1/videos/{ID}"
Responses = Mapping[str, Any]


def responses_with(**values: Any) -> dict[str, Any]:
    """Return the responses of a server by path. Keywords replace some of them."""
    return {
        "/v1/models": values.get("models", {"data": [MODEL]}),
        "/v1/videos": {"id": ID},
        JOB_PATH: values.get("job", {"status": "completed", "notes": []}),
        f"{JOB_PATH}/record": values.get("record", {"prompt": "a cat", "seed": 42}),
        f"{JOB_PATH}/content": values.get("content", VIDEO),
        f"{JOB_PATH}/cancel": {},
    }


@contextmanager
def run_server(
    responses: Responses,
    extra_length: Callable[[str], int] = lambda path: 0,
    posted: list[tuple[str, Any]] | None = None,
) -> Iterator[str]:
    """Run a server with these responses by path, and yield its address. `extra_length` adds to the announced length.

    An iterator has one response after another, a number is an HTTP status, and a pair is status and body.
    `posted` collects the path and body of POST requests.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            result = responses[self.path]
            result = next(result, None) if isinstance(result, Iterator) else result
            if result is None:  # the server stops
                return
            status, result = result if isinstance(result, tuple) else (200, result)
            data = result if isinstance(result, bytes) else json.dumps(result).encode()
            self.send_response(result if isinstance(result, int) else status)
            self.send_header("Content-Length", str(len(data) + extra_length(self.path)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if posted is not None:
                posted.append((self.path, body))
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
def _in_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_video_is_written_as_received():
    with run_server(responses_with()) as url:
        succeeded(wanjax("a cat", "--at", url, "--out", "cat.mp4"))
    assert Path("cat.mp4").read_bytes() == VIDEO


@pytest.mark.parametrize("end", ["/", "/v1", "/v1/"])
def test_a_url_may_end_like_in_other_clients(end):
    with run_server(responses_with()) as url:
        succeeded(wanjax("a cat", "--at", url + end, "--out", "cat.mp4"))
    assert Path("cat.mp4").read_bytes() == VIDEO


def test_progress_reports_each_window(monkeypatch):
    monkeypatch.setattr(remote, "POLL_INTERVALS", (0, 0))
    waiting = {"status": "queued", "window": 1, "settings": {"windows": 3}}
    numbers = [*(1, 1, 2, 3), *("4", 4, None, 10**9)]  # the last four are invalid
    jobs = [waiting, *(waiting | {"status": "in_progress", "window": number} for number in numbers)]
    single = waiting | {"status": "in_progress", "settings": [7]}
    with run_server(responses_with(job=iter([*jobs, single, waiting | {"status": "completed"}]))) as url:
        output = succeeded(wanjax("a cat", "--at", url, "--out", "cat.mp4")).stderr
    assert [line for line in output.splitlines() if "window" in line] == [
        f"window {number} of 3" for number in (1, 2, 3)
    ]


def test_a_video_that_waits_in_the_queue_is_told(monkeypatch):
    monkeypatch.setattr(remote, "POLL_INTERVALS", (0, 0))
    monkeypatch.setattr(remote, "QUEUE_NOTE_DELAY", 0)
    positions = [2, 2, 1, None, "3"]  # the last two are invalid
    jobs = [{"status": "queued", "queue_position": position} for position in positions]
    with run_server(responses_with(job=iter([*jobs, {"status": "in_progress"}, {"status": "completed"}]))) as url:
        output = succeeded(wanjax("a cat", "--at", url, "--out", "cat.mp4")).stderr
    lines = [line for line in output.splitlines() if "waiting" in line]
    assert [has_line_with_words(line, words) for line, words in zip(lines, ("2 videos", "1 video"), strict=True)]


def test_a_cut_connection_leaves_no_video():
    with run_server(responses_with(), lambda path: 5 * path.endswith("content")) as url:
        assert has_line_with_words(refused("a cat", "--at", url, "--out", "cat.mp4"), url)
    assert files(".") == []


def test_the_message_for_a_stopped_server_names_the_requested_video(monkeypatch):
    monkeypatch.setattr(remote, "POLL_INTERVALS", (0, 0))
    with run_server(responses_with(job=iter([{"status": "queued"}]))) as url:
        output = refused("a cat", "--at", url, "--out", "cat.mp4", status=1)
    assert has_line_with_words(output, f"{url} {ID} waits {url}{JOB_PATH}/content")
    assert files(".") == []


def test_without_a_server_the_message_says_what_to_start():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    assert has_line_with_words(refused("a cat", "--at", url, status=1), f"{url} refused: `wanjax serve` address")


def test_https_to_a_server_of_http_suggests_http():
    with run_server(responses_with()) as url:
        https_url = url.replace("http", "https")
        assert f"{https_url} does not speak HTTPS: give {url}" in refused("a cat", "--at", https_url)


@pytest.mark.parametrize("path", ["", "/v2"])
def test_the_message_for_an_address_with_a_path_names_the_root(path):
    with run_server({f"{path}/v1/models": (404, {"error": {"message": "use /v1/videos, /v1/models"}})}) as url:
        message = refused("a cat", "--at", f"{url}{path}")
    advice = f"give its address without a path, as in {url}" if path else "check the address"
    assert f"{url}{path} is not the address of a wanjax server: {advice}" in message
    assert "/v1/videos" not in message


def test_a_batch_that_is_stopped_before_its_first_video_leaves_no_folder(monkeypatch):
    def stop(_: Report) -> None:
        raise KeyboardInterrupt

    with run_server(responses_for_jobs(*[{"status": "queued"}] * 3)) as url:
        monkeypatch.setattr(Report, "stop_if_interrupted", stop)
        assert wanjax("a cat", "--at", url, "--seeds", "1..3", "--out", "cats").exit_code == 130
    assert not Path("cats").exists()


def test_a_run_with_a_closed_stderr_still_writes_its_video():
    """As with `2>&1 | head -1`: the first line is read, then the pipe is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    with run_server(responses_with()) as url:
        command = [sys.executable, "-m", "wanjax", "a cat", "--at", url, "--out", "cat.mp4", "--stats"]
        run = subprocess.run(command, stdout=writer, stderr=writer, check=False)
    os.close(writer)
    assert run.returncode == 0
    assert Path("cat.mp4").read_bytes() == VIDEO


def test_an_error_with_a_closed_stderr_keeps_its_status():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "wanjax", "a cat", "--at", "nowhere"]
    assert subprocess.run(command, stdout=writer, stderr=writer, check=False).returncode == 2
    os.close(writer)


@pytest.mark.parametrize("url", ["http://localhost:99999", "localhost:99999", "http://localhost:0", "http://[::1"])
def test_a_malformed_address_is_refused(url):
    assert has_line_with_words(refused("a cat", "--at", url), "--at http://localhost:8000")


NESTED = b"[" * 200_000
HOSTILE = {
    "nested": ({"models": NESTED}, "JSON"),
    "a model without a seed": ({"models": {"data": [MODEL | {"defaults": {}}]}}, "seed"),
    "a video that is nested": ({"job": NESTED}, "JSON"),
    "a record that is nested": ({"record": NESTED}, "JSON"),
    "no state": ({"job": {"notes": 7, "status": [7]}}, "no video"),
    "notes that are no texts": ({"job": {"notes": [[7], {}], "status": "failed"}}, "no video"),
}


REFUSED = [  # changed responses of a server, the options of the command, and the words of the message
    *((name, ("--out", "cat.mp4", "--quiet"), f"{{url}} {words}") for name, words in HOSTILE.values()),
    ({"models": {"data": [MODEL | {"loras": ["a", 7]}]}}, ("--lora", "a.safetensors"), "{url} none"),
    ({"models": 404}, (), "{url} not wanjax server 404 address"),
    ({}, ("--image", "gone.png"), "gone.png"),
    ({}, ("--from", "generation_config.json"), "gone.png --image"),  # the picture of the metadata
    *(
        ({"record": {"prompt": "a cat", "seed": seed}}, (), "{url} seed")  # a seed must not name a folder
        for seed in ("/../../out/x", "7/x", None, [7], 2**64)
    ),
]


@pytest.mark.parametrize(("responses", "options", "words"), REFUSED)
def test_responses_and_options_that_are_refused(responses, options, words):
    written = [write_metadata(image=str(Path("gone.png").absolute()))]
    with run_server(responses_with(**responses)) as url:
        assert has_line_with_words(refused("a cat", "--at", url, *options), words.format(url=url))
    assert files(".") == written


@pytest.mark.parametrize(
    ("options", "server_options", "message"),
    [
        ("--window 9", {"attention": "auto:window=9"}, "--attention auto:window=9"),
        ("--block-q 512", {"attention": "flash_tpu:block_q=512"}, "--attention flash_tpu:block_q=512"),
        ("--use_fsdp", {"rules": "fsdp"}, "--rules fsdp"),
        ("--mesh sp=2", {"mesh": "dp=1,sp=2,tp=1"}, "--mesh dp=1,sp=2,tp=1"),
    ],
)
def test_an_option_that_the_server_lacks_is_refused_from_any_source(options, server_options, message):
    arguments = ("a cat", *options.split(), "--out", "cat.mp4", "--at")
    with run_server(responses_with()) as url:
        assert has_line_with_words(refused(*arguments, url), f"{message} server {url} none")
    with run_server(responses_with(models={"data": [MODEL | {"started_with": server_options}]})) as url:
        succeeded(wanjax(*arguments, url))


def test_a_failed_video_is_reported():
    with run_server(responses_with(job={"status": "failed", "error": {"message": "the lamp is out"}})) as url:
        result = wanjax("a cat", "--at", url)
    assert has_line_with_words(result.stderr, f"{url} failed to make the video the lamp is out")
    assert "done" not in result.stderr


def write_metadata(**settings: Any) -> str:
    """Write the metadata of a video; return the name of the file."""
    Path("generation_config.json").write_text(json.dumps({"model": "nano", "prompt": "a cat", "seed": 7, **settings}))
    return "generation_config.json"


@pytest.mark.parametrize("options", [{}, {"compiler": "fast"}])
@pytest.mark.parametrize("server_options", [{}, {"compiler": "fast"}])
def test_a_compiler_that_was_not_typed_need_not_match_the_server(options, server_options):
    posted: list[Any] = []
    with run_server(
        responses_with(models={"data": [MODEL | {"started_with": server_options | {"model": "nano"}}]}), posted=posted
    ) as url:
        command = ("generate", "--from", write_metadata(steps=3, **options), "--at", url, "--out", "cat.mp4", "--force")
        succeeded(wanjax(*command))
        usual = server_options.get("compiler", "safe")
        succeeded(wanjax(*command, "--compiler", usual))
        different = "safe" if server_options else "fast"
        assert has_line_with_words(refused(*command, "--compiler", different), f"--compiler {different} {url}")
    assert [(body["prompt"], body["seed"], body["steps"]) for _, body in posted] == [("a cat", 7, 3)] * 2


def test_the_original_prompt_is_sent_with_the_extended_one():
    posted: list[Any] = []
    command = ("generate", "--from", write_metadata(original_prompt="cat"), "--at")
    models = {"data": [MODEL | {"started_with": {"model": "nano"}}]}
    with run_server(responses_with(models=models), posted=posted) as url:
        succeeded(wanjax(*command, url, "--out", "cat.mp4"))
        succeeded(wanjax(*command, url, "a dog", "--out", "dog.mp4"))
    with run_server(responses_for_jobs(DONE, DONE) | {"/v1/models": models}, posted=posted) as url:
        succeeded(wanjax(*command, url, "--count", "2", "--out", "cats"))
    bodies = [(body["prompt"], body.get("original_prompt")) for _, body in posted]
    assert bodies == [("a cat", "cat"), ("a dog", None), ("a cat", "cat"), ("a cat", "cat")]


def test_a_picture_is_sent_with_each_video_and_shapes_its_name():
    posted: list[Any] = []
    names = []
    for content in (b"one", b"two"):
        Path("a.png").write_bytes(content)
        with run_server(responses_for_jobs(DONE, DONE), posted=posted) as url:
            command = ("a cat", "--image", "a.png", "--count", "2", "--out", "cats", "--at", url)
            names += succeeded(wanjax(*command)).stdout.split()
    assert len({*names}) == 4
    pictures = [base64.b64decode(body["image"].partition(",")[2]) for _, body in posted]
    assert pictures == [b"one", b"one", b"two", b"two"]


def test_the_last_line_names_a_finished_video(monkeypatch):
    monkeypatch.setattr(remote, "POLL_INTERVALS", (0, 0))
    in_progress = {"status": "in_progress", "stage": "step", "stage_done": 3, "stage_total": 4}
    with run_server(responses_with(job=iter([in_progress, {"status": "completed"}]))) as url:
        message = succeeded(wanjax("a cat", "--at", url, "--out", "cat.mp4")).stderr.splitlines()
    assert re.fullmatch(r"video: done, .* in all", message[-1]), message


def responses_for_jobs(*jobs: Any) -> dict[str, Any]:
    """Return the responses of a server for several videos with ids from 0; `jobs` are their states."""
    responses: dict[str, Any] = responses_with() | {
        "/v1/videos": iter([{"id": f"video_{number}"} for number in range(len(jobs))])
    }
    for number, job in enumerate(jobs):
        path = f"/v1/videos/video_{number}"
        output = {"/record": {"prompt": "a cat", "seed": number}, "/content": VIDEO + bytes([number]), "/cancel": {}}
        responses |= {path: job} | {f"{path}{part}": result for part, result in output.items()}
    return responses


DONE = {"status": "completed"}


def test_several_videos_are_requested_ahead_and_written_in_order():
    posted: list[Any] = []
    with run_server(responses_for_jobs(*[DONE] * 7), posted=posted) as url:
        result = succeeded(wanjax("a cat", "--at", url, "--seeds", "1..7", "--out", "cats")).stdout.split()
    assert [body["seed"] for _, body in posted] == list(range(1, 8))
    assert [Path(file).read_bytes()[-1] for file in result] == list(range(7))
    assert [int(Path(file).name.split("-")[2]) for file in result] == list(range(1, 8))


def test_a_server_cannot_choose_the_folder_of_the_videos():
    hostile = {"prompt": "../../x", "seed": "/../../x"}
    responses = responses_for_jobs(DONE, DONE)
    responses["/v1/models"] = {"data": [MODEL | {"started_with": hostile, "defaults": hostile | {"seed": 1}}]}
    with run_server(responses) as url:
        succeeded(wanjax("a cat", "--at", url, "--count", "2", "--out", "cats"))
    assert [name.split("-")[:3] for name in files("cats")[:-1]] == [["a", "cat", "1"], ["a", "cat", "2"]]


def test_a_row_may_have_its_seed_drawn():
    Path("p.jsonl").write_text('{"prompt": "a", "seed": -1}\n')
    posted: list[Any] = []
    with run_server(responses_for_jobs(DONE), posted=posted) as url:
        succeeded(wanjax("--prompts", "p.jsonl", "--at", url, "--out", "videos"))
    ((_, body),) = posted
    assert body["seed"] >= 0
    assert str(body["seed"]) in files("videos")[0]


def test_existing_videos_are_not_requested_again():
    command = ("a cat", "--seeds", "1..3", "--out", "cats", "--at")
    with run_server(responses_for_jobs(DONE, DONE, DONE)) as url:
        result = succeeded(wanjax(*command, url)).stdout.split()
    Path(result[1]).unlink()
    posted: list[Any] = []
    with run_server(responses_for_jobs(DONE), posted=posted) as url:
        succeeded(wanjax(*command, url))
    assert [body["seed"] for _, body in posted] == [2]
    with run_server(responses_for_jobs()) as url:
        assert "video 0 of 0" not in succeeded(wanjax(*command, url)).stderr
    with run_server(responses_for_jobs(DONE, DONE, DONE), posted=posted) as url:
        succeeded(wanjax(*command, url, "--force"))
    assert len(posted) == 4


BROKEN = {"status": "failed", "error": {"message": "the lamp is out"}}


@pytest.mark.parametrize(("broken", "why"), [(BROKEN, "lamp"), (404, "404")])
def test_a_failed_request_of_a_file_is_reported_and_the_others_are_made(broken, why):
    Path("p.jsonl").write_text('{"prompt": "a", "size": "64x32"}\n{"prompt": "b", "seed": 5}\n{"prompt": "c"}\n')
    posted: list[Any] = []
    with run_server(responses_for_jobs(DONE, broken, DONE), posted=posted) as url:
        result = wanjax("--prompts", "p.jsonl", "--at", url, "--steps", "2", "--out", "videos")
    assert result.exit_code == 1
    assert has_line_with_words(result.stderr, f"line 2 failed {why}")
    assert len(files("videos")) == 2 + len([MANIFEST])
    rows = [json.loads(line) for line in (Path("videos") / MANIFEST).read_text().splitlines()]
    assert [(row["row"], row["prompt"], row["seed"]) for row in rows] == [(1, "a", 42), (2, "b", 5), (3, "c", 42)]
    assert [why in row.get("error", "") for row in rows] == [False, True, False]
    assert {row["file_name"] for row in rows if "error" not in row} == {*files("videos")} - {MANIFEST}
    bodies = [{name: body.get(name) for name in ("prompt", "height", "width", "seed", "steps")} for _, body in posted]
    assert bodies == [
        {"prompt": "a", "height": 32, "width": 64, "seed": 42, "steps": 2},
        {"prompt": "b", "height": None, "width": None, "seed": 5, "steps": 2},
        {"prompt": "c", "height": None, "width": None, "seed": 42, "steps": 2},
    ]


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (None, "needs a token WANJAX_TOKEN started"),
        ("not the right one", "refuses token WANJAX_TOKEN started"),
        ("line\nline", "WANJAX_TOKEN ASCII"),
    ],
)
def test_the_message_for_a_wrong_token_names_the_variable(monkeypatch, token, words):
    if token is not None:
        monkeypatch.setenv("WANJAX_TOKEN", token)
    with run_server({"/v1/models": (401, {"error": {"message": "the token is missing or wrong"}})}) as url:
        output = refused("generate", "a", "--at", url)
    assert has_line_with_words(output, words)
    assert token is None or token not in output


@pytest.mark.parametrize(("status", "exit_status"), [(503, 1), (500, 1), (403, 2)])
def test_a_failing_server_is_not_a_user_mistake(status, exit_status):
    with run_server(responses_with(models=status)) as url:
        assert has_line_with_words(refused("a cat", "--at", url, status=exit_status), f"{url} {status}")


def test_an_existing_video_of_a_server_is_not_replaced(monkeypatch):
    posted: list[Any] = []
    with run_server(responses_with(), posted=posted) as url:
        monkeypatch.setattr(ExistingFile, "find", lambda file, other: ExistingFile(file, {**METADATA, "fps": 8}, other))
        command = ("a cat", "--at", url, "--out", "cat.mp4")
        assert succeeded(wanjax(*command)).stdout == f"{Path('cat.mp4').absolute()}\n"
        for more, name in ((("--seed", "3"), "seed"), (("--steps", "4"), "steps"), (("--image", __file__), "file")):
            assert has_line_with_words(refused(*command, *more), f"cat.mp4 another {name} --out --force")
        assert posted == []
        succeeded(wanjax(*command, "--force"))


def test_the_command_waits_for_a_full_queue_and_skips_a_wrong_request(monkeypatch):
    monkeypatch.setattr(remote, "POLL_INTERVALS", (0, 0))
    responses = responses_for_jobs(DONE, DONE)
    responses["/v1/videos"] = iter([429, {"id": "video_0"}, 429, 422, {"id": "video_1"}])
    with run_server(responses) as url:
        result = wanjax("a cat", "--at", url, "--seeds", "1..3", "--out", "cats")
    assert result.exit_code == 1
    assert has_line_with_words(result.stderr, "cat-2- failed 422")
    assert len(files("cats")) == 2 + len([MANIFEST])
    with run_server(responses_with() | {"/v1/videos": 422}) as url:
        assert has_line_with_words(refused("a cat", "--at", url, "--seeds", "1..3"), f"{url} 422")


def test_ctrl_c_says_that_the_server_s_video_is_cancelled(capsys):
    report = Report()
    with report.stage(REMOTE_STAGE):
        signal.raise_signal(signal.SIGINT)
    assert "cancelling the video on the server; press Ctrl-C again" in capsys.readouterr().err


def test_ctrl_c_cancels_queued_jobs(monkeypatch):
    posted: list[Any] = []
    queued = {"status": "queued"}
    with run_server(responses_for_jobs(DONE, *[queued] * 8), posted=posted) as url:

        def press_ctrl_c(report: Report) -> None:
            if len(list(Path("cats").glob("*.mp4"))) == 1:
                raise KeyboardInterrupt

        monkeypatch.setattr(Report, "stop_if_interrupted", press_ctrl_c)
        assert wanjax("a cat", "--at", url, "--seeds", "1..9", "--out", "cats").exit_code == 130
    cancelled = [path for path, _ in posted if path.endswith("/cancel")]
    requested = [path for path, _ in posted if path == "/v1/videos"]
    assert cancelled == [f"/v1/videos/video_{number}/cancel" for number in range(1, len(requested))]
    assert 1 < len(requested) < 9


def never_answers(server: socket.socket) -> None:
    """Take no connection."""


def closes_the_connection(server: socket.socket) -> None:
    server.accept()[0].close()


@pytest.mark.parametrize(("behaviour", "words"), [(never_answers, "timed out"), (closes_the_connection, "")])
def test_a_server_that_does_not_answer(behaviour, words, monkeypatch):
    monkeypatch.setattr(remote, "REPLY_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        Thread(target=behaviour, args=(server,), daemon=True).start()
        message = refused("a cat", "--at", url.removeprefix("http://"), status=1)
    assert has_line_with_words(message, f"{url} {words}")
    assert "None" not in message
