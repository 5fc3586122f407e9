# SPDX-License-Identifier: Apache-2.0
"""Downloads by the real client from a faulty hub: bytes are correct, and files are sent once."""

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress

import pytest
from huggingface_hub.utils import _http

from tests.support.hub import FILES, ID, TRANSFORMER, VAE, checksum, download_components, files_in, wait_until
from tests.support.words import has_line_with_words, line_with_words
from wanjax.checkpoints import hub
from wanjax.errors import WanjaxError
from wanjax.registry import open_source

WEIGHTS = "vae/diffusion_pytorch_model.safetensors"


def error_message(components):
    """Return the message with which a download fails."""
    with pytest.raises(WanjaxError) as caught:
        download_components(ID, components)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("online")
def test_a_dropped_download_resumes(server):
    server.files[WEIGHTS] = bytes(range(256)) * 100_000  # more than two of the pieces of 10 MiB that the client writes
    server.drops = 1
    folder = download_components(ID, ["vae"])
    assert (folder / WEIGHTS).read_bytes() == server.files[WEIGHTS]
    assert [start for name, start in server.downloads if name == WEIGHTS] == [0, 10 << 20]


@pytest.fixture
def no_pauses(monkeypatch):
    """Remove the client's pauses between attempts; return their list."""
    pauses = []
    monkeypatch.setattr(_http.time, "sleep", pauses.append)
    return pauses


@pytest.mark.usefixtures("online")
def test_a_busy_hub_is_retried(server, no_pauses):
    server.refusals = [429, 503, 429]
    with suppress(WanjaxError):  # a 503 for a file's bytes is an error; the next run resumes
        download_components(ID, ["vae"])
    folder = download_components(ID, ["vae"])
    assert (folder / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    assert not server.refusals


@pytest.mark.usefixtures("online", "no_pauses")
@pytest.mark.parametrize(
    ("status", "words"),
    [
        (429, "requests wait minutes"),
        (503, "Server '503 Service Unavailable'"),
        (404, "downloaded"),
    ],
)
def test_an_unreachable_file_is_reported(server, status, words):
    server.refusals = [status] * 100
    assert has_line_with_words(error_message(["vae"]), words)
    server.refusals = []
    assert files_in(download_components(ID, ["vae"])) == {"model_index.json"} | VAE


@pytest.mark.usefixtures("online")
def test_a_file_of_another_length_than_the_hub_lists_is_refused(server):
    download_components(ID, ())
    server.short = 7
    assert has_line_with_words(error_message(["vae"]), "Consistency check failed")
    server.short = 0
    folder = download_components(ID, ["vae"])
    assert all((folder / name).read_bytes() == FILES[name] for name in VAE)


ATTEMPTS = """
import os, sys
from tests.support.hub import download_components
for _ in sys.stdin:
    if (child := os.fork()) == 0:
        download_components("owner/video", ["vae", "transformer"])
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def test_killed_downloads_resume_to_the_same_bytes(server, tmp_path):
    """Kill ten downloads at random moments: only complete files have their names, and these are not sent again."""
    for name in FILES:
        if name.endswith(".safetensors") and "/diffusion" in name:
            server.files[name] = random.Random(name).randbytes(4_000_000)  # 16 pieces each
    server.pause = 0.01
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "NO_PROXY": "*"}
    rng = random.Random(1)
    complete: dict[str, int] = {}  # how often each complete file was sent so far
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", ATTEMPTS],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as attempts:
        for kill in [True] * 10 + [False]:
            enough = server.pieces + rng.randrange(20)
            server.limit = enough + 1 if kill else math.inf
            print(file=attempts.stdin, flush=True)
            child = int(attempts.stdout.readline())
            if kill:
                wait_until(lambda enough=enough: server.pieces >= enough)
                time.sleep(rng.uniform(0, 0.02))
                os.kill(child, signal.SIGKILL)
            status = int(attempts.stdout.readline())
            assert os.WIFSIGNALED(status) if kill else status == 0
            for folder in tmp_path.glob("hub/models--owner--video/snapshots/*"):
                for name in files_in(folder):
                    assert (folder / name).read_bytes() == server.files[name]
                    complete.setdefault(name, Counter(name for name, _ in server.downloads)[name])
        attempts.stdin.close()
    assert complete.keys() == {"model_index.json"} | TRANSFORMER | VAE
    assert complete == Counter(name for name, _ in server.downloads)


@pytest.mark.usefixtures("online")
def test_a_file_that_differs_from_its_checksum_is_downloaded_again(server):
    server.files[WEIGHTS] = random.Random(0).randbytes(2_000_000)
    server.flip = WEIGHTS
    expected = checksum(server.files[WEIGHTS])
    actual = checksum(server.files[WEIGHTS][:-1] + bytes([server.files[WEIGHTS][-1] ^ 1]))
    message = error_message(["vae"])
    assert has_line_with_words(message, f"{WEIGHTS.rpartition('/')[2]} {expected} {actual}")
    assert len(message.splitlines()) == 1
    server.flip = None
    folder = download_components(ID, ["vae"])
    assert (folder / WEIGHTS).read_bytes() == server.files[WEIGHTS]
    assert hub.cached_checksum(folder / WEIGHTS) == checksum(server.files[WEIGHTS])
    assert hub.cached_checksum(folder / "vae/config.json") is None
    assert [name for name, _ in server.downloads].count(WEIGHTS) == 2


@pytest.mark.usefixtures("online")
def test_a_disk_that_is_too_small_is_reported_before_the_first_byte(server, machine):
    machine.has_disk(100_000)
    assert has_line_with_words(error_message(["transformer"]), "301 kB more 100 kB free")
    assert not [name for name, _ in server.downloads if name.endswith(".safetensors")]
    source = open_source(ID)
    with pytest.raises(WanjaxError, match=line_with_words(f"{ID} room HF_HOME")):
        source.storage.check_room()
    machine.has_disk(10_000_000)
    source.storage.check_room()
