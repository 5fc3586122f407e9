# SPDX-License-Identifier: Apache-2.0
"""Several processes that make videos together, compared with one process, and their end when one is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.batches import read_manifest
from tests.support.compare import error
from tests.support.devices import free_port
from tests.support.tiny import tiny_checkpoint
from tests.support.words import has_line_with_words, line_with_words
from wanjax.errors import WanjaxError
from wanjax.jobs import multihost
from wanjax.media import stage_files
from wanjax.media.metadata import load_settings

RUN = ("a red circle", "--size", "32x32", "--frames", "5", "--steps", "2", "--dtype", "float32")
SMALL = ("--size", "32x32", "--frames", "5", "--steps", "2")
RUNS = ("one", "two")
CODE = "from wanjax.cli import main; main()"
MAX_ERROR = 1e-5
PEER_GROUP_SCRIPT = """
import json, sys
from wanjax.pipelines import seeds
from wanjax.jobs.multihost import PeerGroup, join_processes
index = int(sys.argv[1].split(",")[-1])
join_processes(sys.argv[1])
group = PeerGroup()
received = [group.broadcast([index, "é" * 5000]), group.broadcast(None if index else {"a": 1.5}), group.broadcast()]
print(json.dumps([received, group.gather("" if index else "a fault, é"), seeds.draw(), seeds.draw()]))
print(json.dumps(seeds.draw(alone=True) if index else 0))
"""


def start(folder: Path, devices: int, *arguments: str | Path, **environment: str) -> subprocess.Popen:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-c", CODE, *map(str, arguments)],
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "XDG_CACHE_HOME": str(folder / "cache")}
        | environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The outputs of one process, and of two processes that make the same video.

    One of the two joins by its options, the other by its environment.
    """
    folder = tmp_path_factory.mktemp("processes")
    model = tiny_checkpoint(folder / "tiny")
    options = (*RUN, "--model", model)
    address = f"localhost:{free_port()}"
    two = ("--mesh", "dp=2,sp=2,tp=2", "--out")
    runs = [
        start(folder, 1, "generate", *options, "--dir", "one", "--out", "one/frames"),
        start(folder, 4, "generate", *options, "--dir", "two", *two, "two/frames", "--processes", f"{address},2,0"),
        start(
            folder,
            4,
            "generate",
            *options,
            *("--dir", "other", *two, "other/frames"),
            JAX_COORDINATOR_ADDRESS=address,
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID="1",
        ),
    ]
    message = [run.communicate(timeout=600) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], "".join(map(str, message))[-6000:]
    (folder / "messages").write_text("".join(message[2]))
    return folder


def saved_latents(folder: Path) -> tuple[np.ndarray, ...]:
    settings = load_settings(folder)
    encoded = stage_files.load_conditioning(folder, settings)
    return (*map(np.asarray, encoded.values()), np.asarray(stage_files.load_latents(folder, settings)))


def test_two_processes_make_the_same_video_as_one(folder):
    for two, single in zip(saved_latents(folder / "two"), saved_latents(folder / "one"), strict=True):
        assert error(two, single) <= MAX_ERROR
    frames = [
        [np.asarray(Image.open(path), int) for path in sorted((folder / run / "frames").iterdir())] for run in RUNS
    ]
    assert np.abs(np.subtract(*frames)).max() <= 1


def test_only_the_first_process_writes_and_reports(folder):
    assert not (folder / "other").exists()
    names = [sorted(path.name for path in (folder / run).rglob("*")) for run in RUNS]
    assert names[0] == names[1]
    assert len(list((folder / "two/frames").iterdir())) == 5
    assert "wanjax" not in (folder / "messages").read_text()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("localhost,2,0", "'localhost,2,0' ADDRESS,COUNT,INDEX 10.0.0.1:8476,2,0"),
        ("localhost:1,2", "malformed"),
        ("localhost:1,2,-1", "malformed"),
        ("localhost:99999,2,0", "--processes 'localhost:99999' HOST:PORT 65535"),
        ("localhost:0,2,0", "--processes 'localhost:0' HOST:PORT 65535"),
        ("host 1:80,2,0", "--processes 'host 1:80' HOST:PORT"),
        ("localhost:1,2,2", "process index 2 count"),
    ],
)
def test_invalid_processes_are_refused(value, why):
    with pytest.raises(WanjaxError, match=line_with_words(why)):
        multihost.join_processes(value)


@pytest.mark.parametrize("others", [{}, {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}], ids=["auto", "all"])
def test_an_invalid_port_in_the_environment_is_refused(others):
    words = "JAX_COORDINATOR_ADDRESS 'localhost:99999' 65535"
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        multihost.join_processes(None, {"JAX_COORDINATOR_ADDRESS": "localhost:99999", **others})


def test_one_process_is_the_default(monkeypatch):
    monkeypatch.setattr(multihost.jax.distributed, "initialize", lambda *arguments, **options: calls.append(arguments))
    calls: list[tuple] = []
    for environment in (
        {},
        {"TPU_WORKER_HOSTNAMES": "localhost"},
        {"TPU_WORKER_HOSTNAMES": "a,b"},
        {"JAX_COORDINATOR_ADDRESS": "a:1"},
        {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
    ):
        multihost.join_processes(None, environment)
    assert calls == [(None, None, None), (None, None, None), ("a:1", 2, 1)]


def test_all_processes_receive_the_broadcasts_and_draw_the_same_seed():
    address = f"localhost:{free_port()}"
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", PEER_GROUP_SCRIPT, f"{address},2,{index}"],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    messages = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], messages
    received = [json.loads(out.splitlines()[-2]) for out, _ in messages]
    assert received[0] == received[1]
    assert received[0][:2] == [[[0, "é" * 5000], {"a": 1.5}, None], ["a fault, é", ""]]
    assert received[0][2] != received[0][3]


def start_batch(folder: Path, out: str, devices: int, count: int) -> list[subprocess.Popen]:
    """Start `wanjax batch` in `count` processes with `devices` devices together."""
    command = ("batch", "requests.jsonl", "--out", out, "--mesh", f"dp=2,sp={devices // 2}", *SMALL)
    address = f"localhost:{free_port()}"
    addresses = [("--processes", f"{address},{count},{index}") for index in range(count)] if count > 1 else [()]
    return [start(folder, devices // count, *command, *address) for address in addresses]


def stderr_of(runs: Sequence[subprocess.Popen], timeout: float = 600) -> list[str]:
    """Wait for processes, and return the stderr of each."""
    return [run.communicate(timeout=timeout)[1] for run in runs]


def write_requests(folder: Path, count: int, **more: int) -> None:
    rows = [{"prompt": f"a red circle {seed}", "seed": seed, **more} for seed in range(count)]
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.slow  # tests/jobs/test_lockstep.py has quick tests with threads
@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_make_the_same_batch_as_one(tmp_path, count):
    write_requests(tmp_path, 2)
    devices = 2 * count
    single = start_batch(tmp_path, "alone", devices, 1)
    message = stderr_of(single) + stderr_of(together := start_batch(tmp_path, "together", devices, count))
    assert [run.returncode for run in (*single, *together)] == [0] * (count + 1), message
    expected = {path.name: path.read_bytes() for path in (tmp_path / "alone").glob("*.mp4")}
    assert len(expected) == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "together").glob("*.mp4")} == expected


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="sends a signal of POSIX")
@pytest.mark.parametrize("killed", [0, 1])
def test_all_processes_end_if_one_is_killed_and_the_same_command_resumes(tmp_path, killed):
    write_requests(tmp_path, 4, steps=30)
    runs, end = start_batch(tmp_path, "videos", 4, 2), time.monotonic() + 300
    while not list(tmp_path.glob("videos/[!.]*.mp4")) and time.monotonic() < end:
        assert [run.poll() for run in runs] == [None, None], stderr_of(runs, 60)
        time.sleep(0.05)
    runs[killed].send_signal(signal.SIGKILL)
    start_of_end = time.monotonic()
    stderr_of(runs, 60)
    assert time.monotonic() - start_of_end < 30
    assert runs[1 - killed].returncode != 0
    before = {path: path.read_bytes() for path in tmp_path.glob("videos/[!.]*.mp4")}
    assert 0 < len(before) < 4
    message = stderr_of(again := start_batch(tmp_path, "videos", 4, 2))
    assert [run.returncode for run in again] == [0, 0], message
    assert all(path.read_bytes() == contents for path, contents in before.items())
    seeds = [entry["seed"] for entry in read_manifest(tmp_path / "videos") if "error" not in entry]
    assert sorted(seeds) == list(range(4))
    assert len(list((tmp_path / "videos").iterdir())) == 5  # nothing half-written is left


@pytest.mark.slow
def test_several_processes_show_previews_of_many_videos(tmp_path):
    write_requests(tmp_path, 2)
    address = f"localhost:{free_port()}"
    command = ("generate", "--prompts", "requests.jsonl", "--out", "videos", "--preview", "--mesh", "dp=2,sp=2", *SMALL)
    runs = [start(tmp_path, 2, *command, "--processes", f"{address},2,{index}") for index in range(2)]
    message = stderr_of(runs, 300)
    assert [run.returncode for run in runs] == [0, 0], message
    assert len(list((tmp_path / "videos").glob("*.mp4"))) == 2
    assert (tmp_path / "videos" / stage_files.PREVIEW_FILE).is_file()


@pytest.mark.slow
def test_a_mistake_ends_the_other_processes(tmp_path):
    write_requests(tmp_path, 1, frames=4)
    message = stderr_of(runs := start_batch(tmp_path, "videos", 4, 2), 120)
    assert [run.returncode for run in runs] == [2, 0], message
    assert has_line_with_words(message[0], "line 1 4 5")
    assert message[1] == ""
