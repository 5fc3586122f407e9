# SPDX-License-Identifier: Apache-2.0
"""Checkpoints by folder and by hub id: the real client against a small hub on loopback, faults included."""

import hashlib
import json
import math
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
from huggingface_hub import close_session, constants
from huggingface_hub.utils import _http

from wanjax import download, hub
from wanjax.errors import WanjaxError

ID = "owner/video"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "model_index.json": json.dumps(
        {
            "_class_name": "WanPipeline",
            "boundary_ratio": None,
            "transformer": ["diffusers", "WanTransformer3DModel"],
            "vae": ["diffusers", "AutoencoderKLWan"],
            "image_encoder": [None, None],
        }
    ).encode(),
    "README.md": b"# Video",
    "transformer/config.json": b'{"num_layers": 2}',
    "transformer/diffusion_pytorch_model.safetensors.index.json": b"{}",
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors": b"1" * 300_000,
    "transformer/diffusion_pytorch_model-00002-of-00002.safetensors": b"2" * 1000,
    "transformer/diffusion_pytorch_model.fp16.safetensors": b"3" * 1000,
    "transformer/pytorch_model.bin": b"4",
    "vae/config.json": b'{"z_dim": 16}',
    "vae/diffusion_pytorch_model.safetensors": b"5" * 1000,
    "image_encoder/model.safetensors": b"6",
    "assets/video.mp4": b"7",
}
TRANSFORMER = {
    "transformer/config.json",
    "transformer/diffusion_pytorch_model.safetensors.index.json",
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
    "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
}

PIECE = 1 << 18
VAE = {"vae/config.json", "vae/diffusion_pytorch_model.safetensors"}


class Hub(ThreadingHTTPServer):
    """Speaks as much of the hub's protocol as a download needs.

    `status`, `error_code`: what every request is answered with, if set; `refusals`: what the next ones for a file's
    bytes are answered with; `drops`: how many answers break off halfway; `short`: how many bytes answers lack of what
    the file has; `pause`: seconds between pieces; `pieces`: how many of large files have been sent; `limit`: how many
    of them may be.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = dict(FILES)
        self.status, self.error_code, self.drops = None, None, 0
        self.refusals, self.short, self.pause, self.pieces, self.limit = [], 0, 0.0, 0, math.inf
        self.sent = []

    def handle_error(self, request, client_address):
        """Says nothing of clients that are gone."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


def checksum(data):
    """The name of a file's contents: for a large one its SHA-256, as on the hub."""
    return (hashlib.sha256 if len(data) > 1_000_000 else hashlib.sha1)(data).hexdigest()


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body):
        self.path = unquote(self.path)
        repository = re.fullmatch(rf"/api/models/{ID}/revision/(main|{COMMIT})", self.path)
        file = re.fullmatch(rf"/{ID}/resolve/{COMMIT}/(.+)", self.path)
        if self.server.status:
            self.reply(self.server.status, b"", with_body, {"X-Error-Code": self.server.error_code or ""})
        elif repository:
            self.reply(200, json.dumps({"id": ID, "sha": COMMIT, "siblings": []}).encode(), with_body)
        elif self.path.startswith(f"/api/models/{ID}/tree/{COMMIT}"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": checksum(data)}
                for name, data in self.server.files.items()
            ]
            self.reply(200, json.dumps(entries).encode(), with_body)
        elif file and file[1] in self.server.files:
            self.reply_with_file(file[1], with_body)
        elif f"/{ID}/" in self.path:
            self.reply(404, b"", with_body, {"X-Error-Code": "RevisionNotFound"})
        else:
            self.reply(404, b"", with_body, {"X-Error-Code": "RepoNotFound"})

    def reply_with_file(self, name, with_body):
        data = self.server.files[name]
        headers = {"ETag": f'"{checksum(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = int((self.headers["Range"] or "bytes=0-")[6:].split("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if with_body and self.server.refusals:
            return self.reply(self.server.refusals.pop(0), b"", with_body)
        if with_body:
            self.server.sent.append((name, start))
            data = data[: len(data) - self.server.short]
        self.reply(206 if start else 200, data[start:], with_body, headers)

    def reply(self, status, body, with_body, headers=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body and self.server.drops and len(body) > 1_000_000:
            self.server.drops -= 1
            self.wfile.write(body[: len(body) // 2])
        elif with_body:
            is_large = len(body) > 1_000_000
            for begin in range(0, len(body), PIECE):
                wait_until(lambda: not is_large or self.server.pieces < self.server.limit)
                self.wfile.write(body[begin : begin + PIECE])
                self.server.pieces += is_large
                time.sleep(self.server.pause)


@pytest.fixture
def server():
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def hub_at(tmp_path, monkeypatch):
    """Points the client at a hub; it reads its settings from the environment once, when it is imported."""

    def point(url, offline=False):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setenv("NO_PROXY", "*")
        close_session()

    yield point
    close_session()


@pytest.fixture
def online(server, hub_at):
    hub_at(server.url)


def fault(*args, **options):
    """The one sentence that `resolve` fails with."""
    with pytest.raises(WanjaxError) as caught:
        hub.resolve(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def files_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# --- folders ---


def test_a_folder_that_is_there_is_taken_as_it_is(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    assert hub.resolve(tmp_path, ["transformer"]) == tmp_path
    assert hub.resolve(str(tmp_path)) == tmp_path


def test_a_folder_without_an_index_is_refused(tmp_path):
    with pytest.raises(WanjaxError, match=f"{tmp_path} holds no model_index.json"):
        hub.resolve(tmp_path)


@pytest.mark.parametrize("source", ["nowhere", "./no/where", "/no/where", "a/b/c", "", "a b/c", "ä/b"])
def test_a_source_that_is_neither_folder_nor_id_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WanjaxError, match=r"there is no folder|holds no"):
        hub.resolve(source)


# --- repositories ---


@pytest.mark.usefixtures("online")
def test_only_the_wanted_files_are_downloaded(server):
    folder = hub.resolve(ID, ["transformer"])
    assert files_in(folder) == {"model_index.json"} | TRANSFORMER
    assert all((folder / name).read_bytes() == FILES[name] for name in files_in(folder))
    assert hub.resolve(ID) == folder  # the components of the index; those that are there are not fetched again
    assert files_in(folder) == {"model_index.json"} | TRANSFORMER | VAE
    assert sorted(server.sent) == sorted((name, 0) for name in files_in(folder))


def test_offline_the_cache_is_used_and_what_it_lacks_is_said(server, hub_at):
    hub_at(server.url, offline=True)
    assert "unset HF_HUB_OFFLINE" in fault(ID, ["vae"])
    hub_at(server.url)
    folder = hub.resolve(ID, ["vae"])
    server.sent.clear()
    hub_at(server.url, offline=True)
    assert hub.resolve(ID, ["vae"]) == folder
    assert "unset HF_HUB_OFFLINE" in fault(ID, ["transformer"])
    assert not server.sent


@pytest.mark.usefixtures("online")
def test_an_unknown_repository_or_revision_is_named(server):
    assert f"no folder owner/typo and {server.url}/owner/typo is not public" in fault("owner/typo")
    assert f"{ID} has no revision v9" in fault(ID, revision="v9")


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize(
    ("status", "error_code", "what"),
    [
        (401, None, "is not public: check the spelling or `hf auth login`"),
        (403, "GatedRepo", "owner/video is gated: accept its terms at http://127.0.0.1:"),
        (401, "GatedRepo", "owner/video is gated: accept its terms at http://127.0.0.1:"),
        (429, None, "has had too many requests from here: wait some minutes"),
        (404, "RepoNotFound", "there is no folder owner/video"),
        (500, None, "cannot be reached (Server error '500 Internal Server Error'"),
    ],
)
def test_a_refusal_is_explained(server, status, error_code, what):
    server.status, server.error_code = status, error_code
    assert what in fault(ID)


@pytest.mark.usefixtures("online")
def test_a_repository_without_an_index_is_refused(server):
    del server.files["model_index.json"]
    assert f"{ID} holds no model_index.json" in fault(ID)


@pytest.mark.usefixtures("online")
def test_a_broken_index_is_named(server):
    server.files["model_index.json"] = b"[]"
    assert "model_index.json cannot be read" in fault(ID)


@pytest.mark.usefixtures("online")
def test_a_dropped_connection_is_taken_up_where_it_broke_off(server):
    name = "vae/diffusion_pytorch_model.safetensors"
    server.files[name] = bytes(range(256)) * 100_000  # more than two of the pieces of 10 MiB that the client writes
    server.drops = 1
    folder = hub.resolve(ID, ["vae"])
    assert (folder / name).read_bytes() == server.files[name]
    assert [start for sent, start in server.sent if sent == name] == [0, 10 << 20]


def test_a_hub_that_is_down_is_named(hub_at):
    hub_at("http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached" in fault(ID)


@pytest.mark.usefixtures("online")
def test_a_disk_that_is_full_is_told(server):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        message = fault(ID, ["transformer"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{server.url}/{ID} could not be downloaded ([Errno 27] File too large)" in message


@pytest.fixture
def impatient(monkeypatch):
    """The client does not wait between attempts."""
    waited = []
    monkeypatch.setattr(_http.time, "sleep", waited.append)
    return waited


@pytest.mark.usefixtures("online")
def test_a_hub_that_is_busy_for_a_while_is_asked_again(server, impatient):
    server.refusals = [429, 503, 429]
    name = "vae/diffusion_pytorch_model.safetensors"
    with suppress(WanjaxError):  # 503 for a file's bytes is told, and the next run goes on
        hub.resolve(ID, ["vae"])
    folder = hub.resolve(ID, ["vae"])
    assert (folder / name).read_bytes() == FILES[name]
    assert not server.refusals


@pytest.mark.usefixtures("online", "impatient")
@pytest.mark.parametrize(
    ("status", "what"),
    [
        (429, "has had too many requests from here: wait some minutes"),
        (503, "could not be downloaded (Server error '503 Service Unavailable'"),
        (404, "could not be downloaded ("),
    ],
)
def test_a_file_that_stays_out_of_reach_is_told(server, status, what):
    server.refusals = [status] * 100
    assert what in fault(ID, ["vae"])
    server.refusals = []
    assert files_in(hub.resolve(ID, ["vae"])) == {"model_index.json"} | VAE


@pytest.mark.usefixtures("online")
def test_a_file_of_another_length_than_the_hub_lists_is_not_taken(server):
    hub.resolve(ID, ())
    server.short = 7
    assert "could not be downloaded (Consistency check failed" in fault(ID, ["vae"])
    server.short = 0
    folder = hub.resolve(ID, ["vae"])
    assert all((folder / name).read_bytes() == FILES[name] for name in VAE)


ATTEMPTS = """
import os, sys
from huggingface_hub import constants
from wanjax import hub
constants.DOWNLOAD_CHUNK_SIZE = 1 << 16  # what it writes at a time, so that there is something to go on from
for _ in sys.stdin:
    if (child := os.fork()) == 0:
        hub.resolve("owner/video", ["vae", "transformer"])
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def wait_until(true):
    end = time.monotonic() + 60
    while not true() and time.monotonic() < end:
        time.sleep(0.001)


def test_killed_while_downloading_it_goes_on_to_the_same_bytes(server, tmp_path):
    """Killed 20 times at random moments; in the end every byte is right, and hardly anything was sent again."""
    name = "vae/diffusion_pytorch_model.safetensors"
    server.files[name] = random.Random(0).randbytes(17_500_000)  # more than 20 attempts can get
    server.pause = 0.01
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "NO_PROXY": "*"}
    moments = random.Random(1)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", ATTEMPTS],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as attempts:
        for kill in [True] * 20 + [False]:
            enough = server.pieces + moments.randrange(3)  # of the 67, or before the first
            server.limit = enough + 1 if kill else math.inf
            print(file=attempts.stdin, flush=True)
            child = int(attempts.stdout.readline())
            if kill:
                wait_until(lambda enough=enough: server.pieces >= enough)
                time.sleep(moments.uniform(0, 0.02))
                os.kill(child, signal.SIGKILL)
            status = int(attempts.stdout.readline())
            assert os.WIFSIGNALED(status) if kill else status == 0
        attempts.stdin.close()
    (folder,) = (tmp_path / "hub/models--owner--video/snapshots").iterdir()
    assert files_in(folder) == {"model_index.json"} | TRANSFORMER | VAE
    assert all((folder / name).read_bytes() == server.files[name] for name in files_in(folder))
    starts = [start for sent, start in server.sent if sent == name]
    assert len(starts) - starts.count(0) >= 5  # it went on from where it was
    assert not list(tmp_path.rglob("*.incomplete"))


@pytest.mark.usefixtures("online")
def test_what_is_left_of_an_attempt_is_compared_with_the_checksum(server, tmp_path):
    name = "vae/diffusion_pytorch_model.safetensors"
    server.files[name] = random.Random(0).randbytes(11_000_000)
    folder = hub.resolve(ID, ())
    blobs = folder.parents[1] / "blobs"
    partial = blobs / (checksum(server.files[name]) + download.SUFFIX)
    partial.write_bytes(b"x" * 5_000_000)
    assert "arrived with another checksum than the hub gives" in fault(ID, ["vae"])
    assert not partial.exists()
    partial.write_bytes(b"x" * 12_000_000)  # longer than the file
    hub.resolve(ID, ["vae"])
    assert (folder / name).read_bytes() == server.files[name]
    partial.write_bytes(b"left by another process")
    assert hub.resolve(ID, ["vae"]) == folder
    assert [start for sent, start in server.sent if sent == name] == [5_000_000, 0]


@pytest.mark.usefixtures("online")
def test_progress_is_told_in_bytes_up_to_all_of_them(server, capfd):
    server.files["vae/diffusion_pytorch_model.safetensors"] = bytes(25_000_000)
    server.pause = 0.01
    told = []
    hub.resolve(ID, ["vae"], progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    total = sum(len(server.files[name]) for name in VAE)
    assert told[-1] == (total, total)
    assert len({done for done, _ in told}) > 2
    assert capfd.readouterr() == ("", "")


# --- single files ---


@pytest.mark.usefixtures("online")
def test_a_single_file_of_the_hub_or_of_the_disk(server, tmp_path):
    server.files["loras/style 1.safetensors"] = b"L" * 100
    found = hub.locate_file(f"{ID}/loras/style 1.safetensors")
    assert found.read_bytes() == b"L" * 100
    assert [name for name, _ in server.sent] == ["loras/style 1.safetensors"]
    assert hub.locate_file(found) == found
    assert hub.locate_file(str(tmp_path / found)) == found


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("source", ["a.safetensors", "/a/b/c.safetensors", f"{ID}/../../x", "", f"{ID}/a*.safetensors"])
def test_what_is_no_file_is_refused(source):
    with pytest.raises(WanjaxError, match="and it is not one of the hub, which is OWNER/NAME/FILE"):
        hub.locate_file(source)


@pytest.mark.usefixtures("online")
def test_a_file_that_a_repository_lacks_is_named():
    with pytest.raises(WanjaxError, match=r"owner/video on the hub holds no lora\.safetensors"):
        hub.locate_file(f"{ID}/lora.safetensors")
    with pytest.raises(WanjaxError, match="there is no folder owner/typo"):
        hub.locate_file("owner/typo/lora.safetensors")


def test_the_clients_settings_come_from_the_environment(server, tmp_path):
    """In a process of its own, for the client reads them when it is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    run = subprocess.run(
        [sys.executable, "-c", f"from wanjax import hub; print(hub.resolve({ID!r}, ['vae']))"],
        env=environment | {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        check=True,
    )
    folder = Path(run.stdout.strip())
    assert folder.is_relative_to(tmp_path / "hub")
    assert files_in(folder) == {"model_index.json"} | VAE
