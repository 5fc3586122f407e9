# SPDX-License-Identifier: Apache-2.0
"""`wanjax serve` in a new process: signals, restarts, slow clients, and commands that use it."""

import base64
import io
import json
import resource
import signal
import socket
import subprocess
import time
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import openai
import psutil
import pytest
from PIL import Image

from tests.support.commands import refused, succeeded, wanjax
from tests.support.documents import ROOT, blocks
from tests.support.quick import quick
from tests.support.served import PROMPT, SMALL, serving, wait_until_finished
from tests.support.video_files import ANIMATIONS, CONTAINERS, FRAMES, names_broken_frame, write_clip, write_damaged
from tests.support.words import has_line_with_words
from wanjax.cli.report import Report
from wanjax.jobs.sharing import SERVE_FILE, join_namespace
from wanjax.jobs.store import JobStore
from wanjax.media.pictures import read_clip
from wanjax.media.video import read_metadata
from wanjax.signals import INTERRUPTED


@pytest.fixture(scope="module")
def server_client(tmp_path_factory):
    """A client of one server for several tests, with an empty compilation cache."""
    folder = tmp_path_factory.mktemp("served")
    with serving(folder / "videos", "--no-rehearse", JAX_COMPILATION_CACHE_DIR=str(folder / "xla")) as (client, _):
        yield client


def test_a_second_signal_ends_a_server_during_a_long_step(tmp_path):
    """The first signal leaves the worker a minute for its step."""
    with serving(tmp_path, "--no-rehearse", "--max-pixels", "99999999") as (client, process):
        id = client.post("/v1/videos", json=SMALL | {"size": "256x256", "frames": 161}).json()["id"]
        while client.get(f"/v1/videos/{id}").json()["stage"] != "denoise":
            time.sleep(0.01)
        time.sleep(0.5)  # a step takes seconds
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)  # the server has ended its connections and waits for its worker
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == INTERRUPTED
    with closing(JobStore(str(tmp_path / "jobs.sqlite"))) as store:
        join_namespace(store, tmp_path, SERVE_FILE)
        assert store.get(id).status == "in_progress"  # the next start of the server makes it


@pytest.mark.slow
def test_a_kill_and_a_restart_lose_no_video(tmp_path):
    with serving(tmp_path, "--no-rehearse") as (client, process):
        ids = [client.post("/v1/videos", json=SMALL | {"seed": 0, "steps": 2}).json()["id"]]
        assert wait_until_finished(client, ids[0])["status"] == "completed"
        content = client.get(f"/v1/videos/{ids[0]}/content").content
        ids += [client.post("/v1/videos", json=SMALL | {"seed": n, "steps": 200}).json()["id"] for n in (1, 2)]
        while client.get(f"/v1/videos/{ids[1]}").json()["status"] != "in_progress":
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with serving(tmp_path, "--no-rehearse") as (client, process):
        assert client.get(f"/v1/videos/{ids[0]}/content").content == content
        assert [wait_until_finished(client, id)["status"] for id in ids] == ["completed"] * 3
        process.terminate()
        assert process.wait(60) == 0
        assert process.stderr.read().endswith("stopped\n")  # no video waits


@pytest.mark.slow
def test_a_busy_server_ends_at_a_signal_and_resumes(tmp_path):
    with serving(tmp_path, "--no-rehearse") as (client, process):
        id = client.post("/v1/videos", json=SMALL | {"steps": 200}).json()["id"]
        with client.stream("GET", "/v1/events") as stream:
            for line in stream.iter_lines():
                if '"stage": "denoise"' in line:
                    process.terminate()
        assert process.wait(60) == 0
        assert has_line_with_words(process.stderr.read(), "stopped waiting videos started again")
    with serving(tmp_path, "--no-rehearse") as (client, _):
        assert wait_until_finished(client, id)["status"] == "completed"


def connect(client, text=b""):
    """Open a connection, and send only this text."""
    connection = socket.create_connection((client.base_url.host, client.base_url.port))
    connection.sendall(text)
    return connection


def seconds_to_health(client):
    """Request the server's health on a new connection, and return the seconds until the response."""
    start = time.perf_counter()
    with closing(connect(client, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")) as connection:
        connection.settimeout(10)
        assert connection.recv(12) == b"HTTP/1.1 200"
    return time.perf_counter() - start


def test_a_monitor_with_http_1_0_can_read_the_health(server_client):
    """Many load balancers send no Host. Older versions of nginx send a Host with HTTP/1.0 for every client."""
    for request, status in {
        b"GET /health HTTP/1.0\r\n\r\n": b"200",
        b"GET /v1/videos HTTP/1.0\r\n\r\n": b"403",
        b"GET /health HTTP/1.0\r\nX-Forwarded-For: 192.0.2.1\r\n\r\n": b"403",
        b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n": b"403",
    }.items():
        with closing(connect(server_client, request)) as connection:
            assert connection.recv(12).partition(b" ")[2] == status, request


@pytest.mark.parametrize("count", quick([600], [600, 2000]))
def test_slow_clients_do_not_block_others(tmp_path, count):
    """The server answers while other clients are silent, send partial headers or bodies, or read events."""
    half = b"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n"
    with serving(tmp_path, "--no-rehearse") as (client, process), ExitStack() as stack:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))  # the limit for the clients
        health = []
        for text in (b"", half, half + b"\r\n{"):
            for number in range(count // 3):
                stack.enter_context(closing(connect(client, text)))
                if number % 50 == 0:
                    health.append(seconds_to_health(client))
            assert psutil.Process(process.pid).num_fds() < 700
        id = client.post("/v1/videos", json=SMALL | {"steps": 2}).json()["id"]
        assert wait_until_finished(client, id)["status"] == "completed"
        request_body = b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
        answers = [stack.enter_context(closing(connect(client, request_body))) for _ in range(200)]
        statuses = Counter(stream.recv(12) for stream in answers)
        assert statuses == {b"HTTP/1.1 200": 64, b"HTTP/1.1 429": 136}
        health += [seconds_to_health(client) for _ in range(10)]
        print(f"{len(health)} answers of /health, the slowest in {max(health):.2f} s")  # by `-rP`


UPLOADABLE = (*(name for name in CONTAINERS if name.endswith(("mp4", "mov", "mkv", "webm"))), *ANIMATIONS)
"""The formats that a request may contain."""


@pytest.mark.parametrize("name", quick(("parts.mp4", "a.webp"), (*CONTAINERS, *ANIMATIONS)))
def test_the_message_for_a_damaged_video_names_the_broken_frame(server_client, tmp_path, name):
    """In a form and in JSON. An intact video is stored unchanged."""
    request_body = SMALL | {"frames": len(FRAMES), "fps": 25, "steps": 2}
    intact = write_clip(tmp_path / name)
    for kind, file in {
        "intact": intact,
        "cut": write_damaged(intact, "cut"),
        "hole": write_damaged(intact, "hole"),
    }.items():
        data = file.read_bytes()
        url = "data:;base64," + base64.b64encode(data).decode()
        for request in (
            {"data": request_body, "files": {"video": ("any", data)}},
            {"json": request_body | {"video": url}},
        ):
            result = server_client.post("/v1/videos", **request)
            if kind == "intact" and name in UPLOADABLE:
                assert result.status_code == 200, result.text
                path = f"/v1/videos/{result.json()['id']}"
                assert server_client.get(f"{path}/content", params={"variant": "clip"}).content == data
                assert server_client.delete(path).status_code == 200
                continue
            assert result.status_code == 422, result.text
            error = result.json()["error"]
            assert error["param"] == "video"
            assert str(tmp_path) not in error["message"]
            assert names_broken_frame(error["message"], name, kind) or name not in UPLOADABLE


def picture():
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 30, 30)).save(file, "PNG")
    return {"name": "red.png", "mimeType": "image/png", "buffer": file.getvalue()}


@pytest.mark.filterwarnings("ignore:The Sora API")
def test_the_client_of_openai_makes_a_video(server_client, tmp_path):
    """It makes, awaits, downloads, lists and deletes a video, and raises errors with the server's message."""
    client = openai.OpenAI(base_url=f"{server_client.base_url}/v1", api_key="none")
    with client:
        reference = ("red.png", picture()["buffer"], "image/png")
        request_body = {"prompt": PROMPT, "size": "64x32", "extra_body": {"frames": 5, "steps": 2, "seed": 3}}
        result = client.videos.create_and_poll(**request_body, input_reference=reference, poll_interval_ms=50)
        assert (result.status, result.size, result.seconds) == ("completed", "64x32", "0.625")
        client.videos.download_content(result.id).write_to_file(tmp_path / "video.mp4")
        assert read_metadata(tmp_path / "video.mp4")["seed"] == 3
        thumbnail = client.videos.download_content(result.id, variant="thumbnail").read()
        assert Image.open(io.BytesIO(thumbnail)).size == (64, 32)
        assert result.id in [video.id for video in client.videos.list(limit=1)]  # page by page
        with pytest.raises(openai.UnprocessableEntityError) as wrong:
            client.videos.create(prompt=PROMPT, size="33x32")
        assert wrong.value.body["message"]
        assert client.videos.delete(result.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.videos.retrieve(result.id)


@pytest.mark.slow
def test_the_commands_of_the_documentation_work(tmp_path):
    page = blocks(ROOT / "docs/guides/server.md")
    [block] = [block for block in page if block.run == "run: server"]
    with serving(tmp_path / "served", "--no-rehearse") as (client, _):
        script = block.text.replace("localhost:8000", client.base_url.netloc.decode())
        subprocess.run(["bash", "-euc", script], check=True, stdout=subprocess.PIPE, cwd=tmp_path)
        videos = client.get("/v1/videos").json()["data"]
        assert [wait_until_finished(client, video["id"])["status"] for video in videos] == ["completed"] * 2
    assert read_metadata(tmp_path / "circle.mp4")["steps"] == 4


def test_the_command_requests_a_video_from_a_server(server_client, tmp_path, monkeypatch):
    """`generate --at` writes the same file as without a server, and names options that only the server can choose."""
    monkeypatch.chdir(tmp_path)
    at_option = ("--at", str(server_client.base_url))
    small = ("--size", "32x32", "--frames", "5", "--steps", "2")
    succeeded(wanjax(PROMPT, *small, *at_option, "--out", "served.mp4"))
    succeeded(wanjax(PROMPT, *small, "--out", "local.mp4"))
    assert (tmp_path / "served.mp4").read_bytes() == (tmp_path / "local.mp4").read_bytes()
    assert read_metadata("served.mp4")["seed"] == 42
    Image.new("RGB", (64, 32), "red").save("wide.png")
    arguments = (*small, "--image", "wide.png", "--seed", "random")
    data = json.loads(succeeded(wanjax(PROMPT, *arguments, *at_option, "--json")).stdout)
    assert data["record"]["seed"] != 42
    assert data["record"]["image"].endswith("image.png")
    assert read_metadata(data["file"]) == data["record"]
    refusals = {
        "--dtype bfloat16": "--dtype bfloat16 float32",
        "--lora a.safetensors": "LoRA a none",
        "--model wan2.1-t2v-14b": "wan2.1-t2v-14b nano",
        "--frames 6": "6 frames 4n + 1",
        "--dir here": "--dir",
        "--out a.avi": "a.avi .mp4 .gif",
        "--out a.png": "a.png one",
    }
    for options, message in refusals.items():
        assert has_line_with_words(refused("a", *at_option, *options.split()), message)
    assert has_line_with_words(refused("a", "--at", "http://127.0.0.1:1", status=1), "http://127.0.0.1:1 refused")


def test_the_command_gets_the_same_files_from_a_server(server_client, tmp_path, monkeypatch):
    """Several videos, a video from metadata, and other formats equal those made without a server."""
    monkeypatch.chdir(tmp_path)
    at_option = ("--at", str(server_client.base_url))
    small = ("--size", "32x32", "--frames", "5", "--steps", "2")
    succeeded(wanjax(PROMPT, *small, "--seeds", "3,4", "--out", "local"))
    local_files = {file.name: file.read_bytes() for file in Path("local").glob("*.mp4")}
    assert len(local_files) == 2
    succeeded(wanjax(PROMPT, *small, "--seeds", "3,4", *at_option, "--out", "served"))
    assert {file.name: file.read_bytes() for file in Path("served").glob("*.mp4")} == local_files
    names_in_manifest = [
        json.loads(line)["file_name"] for line in Path("served/manifest.jsonl").read_text().splitlines()
    ]
    assert sorted(names_in_manifest) == sorted(local_files)
    first = next(Path("local").glob("*-3-*.mp4"))
    succeeded(wanjax("generate", "--from", str(first), *at_option, "--out", "again.mp4"))
    assert Path("again.mp4").read_bytes() == first.read_bytes()
    frames = read_clip(first, 100, 8)
    for name in ("again.webp", "again.gif", "again/"):
        succeeded(wanjax("generate", "--from", str(first), *at_option, "--out", name))
        assert read_metadata(name) == read_metadata(first)
        assert len(read_clip(name.rstrip("/"), 100, 8)) == len(frames) == 5
    np.testing.assert_array_equal(read_clip("again", 100, 8), frames)


def test_ctrl_c_cancels_the_job_of_a_server(server_client, tmp_path, monkeypatch):
    def press_ctrl_c(report):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Report, "stop_if_interrupted", press_ctrl_c)
    result = wanjax(PROMPT, "--steps", "200", "--at", str(server_client.base_url))
    assert result.exit_code == 130
    newest = server_client.get("/v1/videos?limit=1").json()["data"][0]
    assert wait_until_finished(server_client, newest["id"])["error"]["code"] == "cancelled"
    assert list(tmp_path.iterdir()) == []
