# SPDX-License-Identifier: Apache-2.0
"""A small Hugging Face hub on loopback, with faults that a test sets, for the real client."""

import hashlib
import json
import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from wanjax.checkpoints.hub import COMPONENT_FILES, INDEX, download

ID = "owner/video"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"
COMMITS = f"{COMMIT}|{OLDER}"
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
VAE = {"vae/config.json", "vae/diffusion_pytorch_model.safetensors"}
PIECE = 1 << 18  # bytes sent at a time


class Hub(ThreadingHTTPServer):
    """Speaks the part of the hub's protocol that a download needs.

    `status`, `error_code`: the answer to every request, if set; `refusals`: the statuses of the next answers to
    requests for a file's bytes; `drops`: the number of answers that break off halfway; `short`: the number of bytes
    missing from each answer; `flip`: the name of a file whose last byte is sent wrong; `pause`: seconds between pieces;
    `pieces`: the number of pieces of large files sent so far; `limit`: the maximum of `pieces`.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = dict(FILES)
        self.status, self.error_code, self.drops = None, None, 0
        self.refusals, self.short, self.pause, self.pieces, self.limit = [], 0, 0.0, 0, math.inf
        self.flip = None
        self.revisions = {"main": COMMIT, "v1": OLDER, COMMIT: COMMIT, OLDER: OLDER}
        self.downloads = []

    def handle_error(self, request, client_address):
        """Ignores clients that have disconnected."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


def checksum(data):
    """Return the hub's identifier of a file's contents, which for a large file is its SHA-256."""
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
        repository = re.fullmatch(rf"/api/models/{ID}/revision/(.+)", self.path)
        commit = self.server.revisions.get(repository[1]) if repository else None
        file = re.fullmatch(rf"/{ID}/resolve/({COMMITS})/(.+)", self.path)
        if self.server.status:
            self.reply(self.server.status, b"", with_body, {"X-Error-Code": self.server.error_code or ""})
        elif commit:
            self.reply(200, json.dumps({"id": ID, "sha": commit, "siblings": []}).encode(), with_body)
        elif re.match(rf"/api/models/{ID}/tree/({COMMITS})", self.path):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": checksum(data)}
                for name, data in self.server.files.items()
            ]
            self.reply(200, json.dumps(entries).encode(), with_body)
        elif file and file[2] in self.server.files:
            self.reply_with_file(file[2], file[1], with_body)
        elif f"/{ID}/" in self.path:
            self.reply(404, b"", with_body, {"X-Error-Code": "RevisionNotFound"})
        else:
            self.reply(404, b"", with_body, {"X-Error-Code": "RepoNotFound"})

    def reply_with_file(self, name, commit, with_body):
        data = self.server.files[name]
        headers = {"ETag": f'"{checksum(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        start = int((self.headers["Range"] or "bytes=0-")[6:].split("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if with_body and self.server.refusals:
            return self.reply(self.server.refusals.pop(0), b"", with_body)
        if with_body:
            self.server.downloads.append((name, start))
            data = data[: len(data) - self.server.short]
            if name == self.server.flip:
                data = data[:-1] + bytes([data[-1] ^ 1])
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


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)


@contextmanager
def running_hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def download_components(repository, components) -> Path:
    """Download components of a repository, with its index, as sources do."""
    return download(
        repository, [INDEX, *(f"{component}/{name}" for component in components for name in COMPONENT_FILES)]
    )


def files_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
