# SPDX-License-Identifier: Apache-2.0
"""`generate --at` with servers that are cut off, hostile, or no wanjax: an error message, and no file."""

import base64
import json
import os
import re
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
from tests.support.words import has_line_with
from wanjax.cli import remote
from wanjax.cli.existing import ExistingFile
from wanjax.cli.report import Report
from wanjax.jobs.batch import MANIFEST

ID, VIDEO = "video_1", b"0123456789"
MODEL = {"id": "nano", "defaults": {"seed": 42}, "settings": {}, "started_with": {}, "loras": []}
METADATA = {"model": "nano", "prompt": "a cat", "seed": 42}
PLACE = f"/v1/videos/{ID}"
Answers = Mapping[str, Any]


def answers(**values: Any) -> dict[str, Any]:
    """Return what a server answers by path, with other answers in place of some."""
    return {
        "/v1/models": values.get("models", {"data": [MODEL]}),
        "/v1/videos": {"id": ID},
        PLACE: values.get("job", {"status": "completed", "notes": []}),
        f"{PLACE}/record": values.get("record", {"prompt": "a cat", "seed": 42}),
        f"{PLACE}/content": values.get("content", VIDEO),
        f"{PLACE}/cancel": {},
    }


@contextmanager
def answering(
    responses: Answers, extra_length: Callable[[str], int] = lambda path: 0, posted: list[tuple[str, Any]] | None = None
) -> Iterator[str]:
    """Run a server that answers by path and yield its address; `extra_length` is added to the announced length.

    An iterator has one answer after another; a number is a status of HTTP, and a pair has both.
    `posted` receives what is posted.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            result = responses[self.path]
            result = next(result, None) if isinstance(result, Iterator) else result
            if result is None:  # a server that ends
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
    with answering(answers()) as url:
        succeeded(wanjax("a cat", "--at", url, "--out", "cat.mp4"))
    assert Path("cat.mp4").read_bytes() == VIDEO


@pytest.mark.parametrize("end", ["/", "/v1", "/v1/"])
def test_an_url_may_end_as_in_other_clients(end):
    with answering(answers()) as url:
        succeeded(wanjax("a cat", "--at", url + end, "--out", "cat.mp4"))
    assert Path("cat.mp4").read_bytes() == VIDEO


def test_progress_reports_each_window(monkeypatch):
    monkeypatch.setattr(remote, "POLL_INTERVALS", (0, 0))
    waiting = {"status": "queued", "window": 1, "settings": {"windows": 3}}
    numbers = [*(1, 1, 2, 3), *("4", 4, None, 10**9)]  # those at the end are no windows
    jobs = [waiting, *(waiting | {"status": "in_progress", "window": number} for number in numbers)]
    single = waiting | {"status": "in_progress", "settings": [7]}
    with answering(answers(job=iter([*jobs, single, waiting | {"status": "completed"}]))) as url:
        output = succeeded(wanjax("a cat", "--at", url, "--out", "cat.mp4")).stderr
    assert [line for line in output.splitlines() if "window" in line] == [
        f"window {number} of 3" for number in (1, 2, 3)
    ]


def test_a_cut_connection_leaves_no_video():
    with answering(answers(), lambda path: 5 * path.endswith("content")) as url:
        assert has_line_with(refused("a cat", "--at", url, "--out", "cat.mp4"), url)
    assert files(".") == []


def test_a_stopped_server_keeps_the_requested_video(monkeypatch):
    monkeypatch.setattr(remote, "POLL_INTERVALS", (0, 0))
    with answering(answers(job=iter([{"status": "queued"}]))) as url:
        output = refused("a cat", "--at", url, "--out", "cat.mp4", status=1)
    assert has_line_with(output, f"{url} {ID} waits {url}{PLACE}/content")
    assert files(".") == []


def test_without_a_server_the_message_says_what_to_start():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    assert has_line_with(refused("a cat", "--at", url, status=1), f"{url} refused: `wanjax serve` address")


def test_https_to_a_server_of_http_suggests_http():
    with answering(answers()) as url:
        https_url = url.replace("http", "https")
        assert f"{https_url} does not speak HTTPS: give {url}" in refused("a cat", "--at", https_url)


@pytest.mark.parametrize("path", ["", "/v2"])
def test_an_address_of_another_path_is_answered_with_the_root(path):
    with answering({f"{path}/v1/models": (404, {"error": {"message": "use /v1/videos, /v1/models"}})}) as url:
        message = refused("a cat", "--at", f"{url}{path}")
    advice = f"give its address without a path, as in {url}" if path else "check the address"
    assert f"{url}{path} is not the address of a wanjax serve: {advice}" in message
    assert "/v1/videos" not in message


def test_a_batch_that_is_stopped_before_its_first_video_leaves_no_folder(monkeypatch):
    def stop(_: Report) -> None:
        raise KeyboardInterrupt

    with answering(several(*[{"status": "queued"}] * 3)) as url:
        monkeypatch.setattr(Report, "stop_if_interrupted", stop)
        assert wanjax("a cat", "--at", url, "--seeds", "1..3", "--out", "cats").exit_code == 130
    assert not Path("cats").exists()


def test_a_run_whose_progress_nobody_reads_still_writes_its_video():
    """As with `2>&1 | head -1`: the first line is read, then the pipe is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    with answering(answers()) as url:
        command = [sys.executable, "-m", "wanjax", "a cat", "--at", url, "--out", "cat.mp4", "--stats"]
        run = subprocess.run(command, stdout=writer, stderr=writer, check=False)
    os.close(writer)
    assert run.returncode == 0
    assert Path("cat.mp4").read_bytes() == VIDEO


def test_an_error_that_nobody_reads_keeps_its_status():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "wanjax", "a cat", "--at", "nowhere"]
    assert subprocess.run(command, stdout=writer, stderr=writer, check=False).returncode == 2
    os.close(writer)


NESTED = b"[" * 200_000
HOSTILE = {
    "nested": ({"models": NESTED}, "JSON"),
    "a model without a seed": ({"models": {"data": [MODEL | {"defaults": {}}]}}, "seed"),
    "a video that is nested": ({"job": NESTED}, "JSON"),
    "a record that is nested": ({"record": NESTED}, "JSON"),
    "no state": ({"job": {"notes": 7, "status": [7]}}, "no video"),
    "notes that are no texts": ({"job": {"notes": [[7], {}], "status": "failed"}}, "no video"),
}


REFUSED = [  # what a server answers, the options of the command, and what the sentence names
    *((name, ("--out", "cat.mp4", "--quiet"), f"{{url}} {words}") for name, words in HOSTILE.values()),
    ({"models": {"data": [MODEL | {"loras": ["a", 7]}]}}, ("--lora", "a.safetensors"), "{url} none"),
    ({"models": 404}, (), "{url} not wanjax serve 404 address"),
    ({}, ("--image", "gone.png"), "gone.png"),
    ({}, ("--from", "generation_config.json"), "gone.png --image"),  # which is that of a record
    *(
        ({"record": {"prompt": "a cat", "seed": seed}}, (), "{url} seed")  # which names a folder of its own
        for seed in ("/../../out/x", "7/x", None, [7], 2**64)
    ),
]


@pytest.mark.parametrize(("responses", "options", "words"), REFUSED)
def test_responses_and_options_that_are_refused(responses, options, words):
    written = [record(image=str(Path("gone.png").absolute()))]
    with answering(answers(**responses)) as url:
        assert has_line_with(refused("a cat", "--at", url, *options), words.format(url=url))
    assert files(".") == written


@pytest.mark.parametrize(
    ("options", "same", "message"),
    [
        ("--window 9", {"attention": "auto:window=9"}, "--attention auto:window=9"),
        ("--block-q 512", {"attention": "flash_tpu:block_q=512"}, "--attention flash_tpu:block_q=512"),
        ("--use_fsdp", {"rules": "fsdp"}, "--rules fsdp"),
        ("--mesh sp=2", {"mesh": "dp=1,sp=2,tp=1"}, "--mesh dp=1,sp=2,tp=1"),
    ],
)
def test_an_option_of_the_server_is_compared_from_any_source(options, same, message):
    arguments = ("a cat", *options.split(), "--out", "cat.mp4", "--at")
    with answering(answers()) as url:
        assert has_line_with(refused(*arguments, url), f"{message} server {url} none")
    with answering(answers(models={"data": [MODEL | {"started_with": same}]})) as url:
        succeeded(wanjax(*arguments, url))


def test_a_video_that_failed_is_not_done():
    with answering(answers(job={"status": "failed", "error": {"message": "the lamp is out"}})) as url:
        result = wanjax("a cat", "--at", url)
    assert has_line_with(result.stderr, f"{url} failed to make the video the lamp is out")
    assert "done" not in result.stderr


def record(**more: Any) -> str:
    """Write the record of a video; return the name of its file."""
    Path("generation_config.json").write_text(json.dumps({"model": "nano", "prompt": "a cat", "seed": 7, **more}))
    return "generation_config.json"


@pytest.mark.parametrize("options", [{}, {"compiler": "fast"}])
@pytest.mark.parametrize("theirs", [{}, {"compiler": "fast"}])
def test_a_compiler_set_that_nobody_typed_is_no_difference(options, theirs):
    posted: list[Any] = []
    with answering(
        answers(models={"data": [MODEL | {"started_with": theirs | {"model": "nano"}}]}), posted=posted
    ) as url:
        again = ("generate", "--from", record(steps=3, **options), "--at", url, "--out", "cat.mp4", "--force")
        succeeded(wanjax(*again))
        usual = theirs.get("compiler", "safe")
        succeeded(wanjax(*again, "--compiler", usual))
        different = "safe" if theirs else "fast"
        assert has_line_with(refused(*again, "--compiler", different), f"--compiler {different} {url}")
    assert [(body["prompt"], body["seed"], body["steps"]) for _, body in posted] == [("a cat", 7, 3)] * 2


def test_the_original_prompt_is_sent_with_the_extended_one():
    posted: list[Any] = []
    again = ("generate", "--from", record(original_prompt="cat"), "--at")
    models = {"data": [MODEL | {"started_with": {"model": "nano"}}]}
    with answering(answers(models=models), posted=posted) as url:
        succeeded(wanjax(*again, url, "--out", "cat.mp4"))
        succeeded(wanjax(*again, url, "a dog", "--out", "dog.mp4"))
    with answering(several(DONE, DONE) | {"/v1/models": models}, posted=posted) as url:
        succeeded(wanjax(*again, url, "--count", "2", "--out", "cats"))
    bodies = [(body["prompt"], body.get("original_prompt")) for _, body in posted]
    assert bodies == [("a cat", "cat"), ("a dog", None), ("a cat", "cat"), ("a cat", "cat")]


def test_a_picture_is_sent_with_each_video_and_shapes_its_name():
    posted: list[Any] = []
    names = []
    for content in (b"one", b"two"):
        Path("a.png").write_bytes(content)
        with answering(several(DONE, DONE), posted=posted) as url:
            ask = ("a cat", "--image", "a.png", "--count", "2", "--out", "cats", "--at", url)
            names += succeeded(wanjax(*ask)).stdout.split()
    assert len({*names}) == 4
    pictures = [base64.b64decode(body["image"].partition(",")[2]) for _, body in posted]
    assert pictures == [b"one", b"one", b"two", b"two"]


def test_the_last_line_names_a_finished_video(monkeypatch):
    monkeypatch.setattr(remote, "POLL_INTERVALS", (0, 0))
    under_way = {"status": "in_progress", "stage": "step", "stage_done": 3, "stage_total": 4}
    with answering(answers(job=iter([under_way, {"status": "completed"}]))) as url:
        message = succeeded(wanjax("a cat", "--at", url, "--out", "cat.mp4")).stderr.splitlines()
    assert re.fullmatch(r"video: done, .* in all", message[-1]), message


def several(*jobs: Any) -> dict[str, Any]:
    """Return what a server answers of several videos, whose ids count from 0; `jobs` are what each has come to."""
    responses: dict[str, Any] = answers() | {"/v1/videos": iter([{"id": f"video_{each}"} for each in range(len(jobs))])}
    for each, job in enumerate(jobs):
        path = f"/v1/videos/video_{each}"
        output = {"/record": {"prompt": "a cat", "seed": each}, "/content": VIDEO + bytes([each]), "/cancel": {}}
        responses |= {path: job} | {f"{path}{part}": result for part, result in output.items()}
    return responses


DONE = {"status": "completed"}


def test_several_videos_are_requested_ahead_and_written_in_order():
    posted: list[Any] = []
    with answering(several(*[DONE] * 7), posted=posted) as url:
        result = succeeded(wanjax("a cat", "--at", url, "--seeds", "1..7", "--out", "cats")).stdout.split()
    assert [body["seed"] for _, body in posted] == list(range(1, 8))
    assert [Path(file).read_bytes()[-1] for file in result] == list(range(7))
    assert [int(Path(file).name.split("-")[2]) for file in result] == list(range(1, 8))


def test_a_server_chooses_no_folder_of_several():
    hostile = {"prompt": "../../x", "seed": "/../../x"}
    responses = several(DONE, DONE)
    responses["/v1/models"] = {"data": [MODEL | {"started_with": hostile, "defaults": hostile | {"seed": 1}}]}
    with answering(responses) as url:
        succeeded(wanjax("a cat", "--at", url, "--count", "2", "--out", "cats"))
    assert [name.split("-")[:3] for name in files("cats")[:-1]] == [["a", "cat", "1"], ["a", "cat", "2"]]


def test_a_row_may_have_its_seed_drawn():
    Path("p.jsonl").write_text('{"prompt": "a", "seed": -1}\n')
    posted: list[Any] = []
    with answering(several(DONE), posted=posted) as url:
        succeeded(wanjax("--prompts", "p.jsonl", "--at", url, "--out", "made"))
    ((_, body),) = posted
    assert body["seed"] >= 0
    assert str(body["seed"]) in files("made")[0]


def test_existing_videos_are_not_requested_again():
    ask = ("a cat", "--seeds", "1..3", "--out", "cats", "--at")
    with answering(several(DONE, DONE, DONE)) as url:
        result = succeeded(wanjax(*ask, url)).stdout.split()
    Path(result[1]).unlink()
    posted: list[Any] = []
    with answering(several(DONE), posted=posted) as url:
        succeeded(wanjax(*ask, url))
    assert [body["seed"] for _, body in posted] == [2]
    with answering(several()) as url:
        assert "video 0 of 0" not in succeeded(wanjax(*ask, url)).stderr
    with answering(several(DONE, DONE, DONE), posted=posted) as url:
        succeeded(wanjax(*ask, url, "--force"))
    assert len(posted) == 4


BROKEN = {"status": "failed", "error": {"message": "the lamp is out"}}


@pytest.mark.parametrize(("broken", "why"), [(BROKEN, "lamp"), (404, "404")])
def test_requests_of_a_file_of_which_one_fails(broken, why):
    Path("p.jsonl").write_text('{"prompt": "a", "size": "64x32"}\n{"prompt": "b", "seed": 5}\n{"prompt": "c"}\n')
    posted: list[Any] = []
    with answering(several(DONE, broken, DONE), posted=posted) as url:
        result = wanjax("--prompts", "p.jsonl", "--at", url, "--steps", "2", "--out", "made")
    assert result.exit_code == 1
    assert has_line_with(result.stderr, f"line 2 failed {why}")
    assert len(files("made")) == 2 + len([MANIFEST])
    rows = [json.loads(line) for line in (Path("made") / MANIFEST).read_text().splitlines()]
    assert [(row["row"], row["prompt"], row["seed"]) for row in rows] == [(1, "a", 42), (2, "b", 5), (3, "c", 42)]
    assert [why in row.get("error", "") for row in rows] == [False, True, False]
    assert {row["file_name"] for row in rows if "error" not in row} == {*files("made")} - {MANIFEST}
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
def test_a_wrong_token_is_answered_with_the_variable(monkeypatch, token, words):
    if token is not None:
        monkeypatch.setenv("WANJAX_TOKEN", token)
    with answering({"/v1/models": (401, {"error": {"message": "the token is missing or wrong"}})}) as at:
        output = refused("generate", "a", "--at", at)
    assert has_line_with(output, words)
    assert token is None or token not in output


@pytest.mark.parametrize(("status", "exit_status"), [(503, 1), (500, 1), (403, 2)])
def test_a_failing_server_is_not_a_user_mistake(status, exit_status):
    with answering(answers(models=status)) as url:
        assert has_line_with(refused("a cat", "--at", url, status=exit_status), f"{url} {status}")


def test_an_existing_video_of_a_server_is_not_replaced(monkeypatch):
    posted: list[Any] = []
    with answering(answers(), posted=posted) as url:
        monkeypatch.setattr(ExistingFile, "find", lambda file, other: ExistingFile(file, {**METADATA, "fps": 8}, other))
        ask = ("a cat", "--at", url, "--out", "cat.mp4")
        assert succeeded(wanjax(*ask)).stdout == f"{Path('cat.mp4').absolute()}\n"
        for more, name in ((("--seed", "3"), "seed"), (("--steps", "4"), "steps"), (("--image", __file__), "file")):
            assert has_line_with(refused(*ask, *more), f"cat.mp4 another {name} --out --force")
        assert posted == []
        succeeded(wanjax(*ask, "--force"))


def test_the_command_waits_for_a_full_queue_and_skips_a_wrong_request(monkeypatch):
    monkeypatch.setattr(remote, "POLL_INTERVALS", (0, 0))
    responses = several(DONE, DONE)
    responses["/v1/videos"] = iter([429, {"id": "video_0"}, 429, 422, {"id": "video_1"}])
    with answering(responses) as url:
        result = wanjax("a cat", "--at", url, "--seeds", "1..3", "--out", "cats")
    assert result.exit_code == 1
    assert has_line_with(result.stderr, "cat-2- failed 422")
    assert len(files("cats")) == 2 + len([MANIFEST])
    with answering(answers() | {"/v1/videos": 422}) as url:
        assert has_line_with(refused("a cat", "--at", url, "--seeds", "1..3"), f"{url} 422")


def test_ctrl_c_cancels_queued_jobs(monkeypatch):
    posted: list[Any] = []
    queued = {"status": "queued"}
    with answering(several(DONE, *[queued] * 8), posted=posted) as url:

        def pressed(report: Report) -> None:
            if len(list(Path("cats").glob("*.mp4"))) == 1:
                raise KeyboardInterrupt

        monkeypatch.setattr(Report, "stop_if_interrupted", pressed)
        assert wanjax("a cat", "--at", url, "--seeds", "1..9", "--out", "cats").exit_code == 130
    cancelled = [path for path, _ in posted if path.endswith("/cancel")]
    requested = [path for path, _ in posted if path == "/v1/videos"]
    assert cancelled == [f"/v1/videos/video_{each}/cancel" for each in range(1, len(requested))]
    assert 1 < len(requested) < 9


def is_silent(server: socket.socket) -> None:
    """Take no connection."""


def hangs_up(server: socket.socket) -> None:
    server.accept()[0].close()


@pytest.mark.parametrize(("server_that", "words"), [(is_silent, "timed out"), (hangs_up, "")])
def test_a_server_that_does_not_answer(server_that, words, monkeypatch):
    monkeypatch.setattr(remote, "REPLY_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        Thread(target=server_that, args=(server,), daemon=True).start()
        message = refused("a cat", "--at", url.removeprefix("http://"), status=1)
    assert has_line_with(message, f"{url} {words}")
    assert "None" not in message
