# SPDX-License-Identifier: Apache-2.0
"""Two processes of four devices each, against one process with one device."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.compare import error
from tests.support.devices import free_port
from tests.support.tiny import tiny_checkpoint
from tests.support.words import naming
from wanjax.cli import processes
from wanjax.errors import WanjaxError
from wanjax.media import stage_files

RUN = ("a red circle", "--size", "32x32", "--frames", "5", "--steps", "2", "--dtype", "float32")
RUNS = ("one", "two")
CODE = "from wanjax.cli import main; main()"
BOUND = 1e-5


def start(folder: Path, devices: int, *arguments: str | Path, **environment: str) -> subprocess.Popen:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-c", CODE, "generate", *map(str, arguments)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "XDG_CACHE_HOME": str(folder)} | environment,
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
    given = (*RUN, "--model", model)
    address = f"localhost:{free_port()}"
    two = ("--mesh", "dp=2,sp=2,tp=2", "--out")
    runs = [
        start(folder, 1, *given, "--dir", "one", "--out", "one/frames"),
        start(folder, 4, *given, "--dir", "two", *two, "two/frames", "--processes", f"{address},2,0"),
        start(
            folder,
            4,
            *given,
            *("--dir", "other", *two, "other/frames"),
            JAX_COORDINATOR_ADDRESS=address,
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID="1",
        ),
    ]
    told = [run.communicate(timeout=600) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], "".join(map(str, told))[-6000:]
    (folder / "told").write_text("".join(told[2]))
    return folder


def kept(folder: Path) -> tuple[np.ndarray, ...]:
    settings = stage_files.load_settings(folder)
    encoded = stage_files.load_encoded(folder, settings)
    return (*map(np.asarray, encoded.values()), np.asarray(stage_files.load_latents(folder, settings)))


def test_two_processes_make_the_video_of_one(folder):
    for two, one in zip(kept(folder / "two"), kept(folder / "one"), strict=True):
        assert error(two, one) <= BOUND
    frames = [
        [np.asarray(Image.open(path), int) for path in sorted((folder / run / "frames").iterdir())] for run in RUNS
    ]
    assert np.abs(np.subtract(*frames)).max() <= 1


def test_only_the_first_process_writes_and_reports(folder):
    assert not (folder / "other").exists()
    names = [sorted(path.name for path in (folder / run).rglob("*")) for run in RUNS]
    assert names[0] == names[1]
    assert len(list((folder / "two/frames").iterdir())) == 5
    assert "wanjax" not in (folder / "told").read_text()


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("localhost,2,0", "'localhost,2,0' ADDRESS,COUNT,INDEX 10.0.0.1:8476,2,0"),
        ("localhost:1,2", "cannot be read"),
        ("localhost:1,2,-1", "cannot be read"),
        ("localhost:1,2,2", "process index 2 count"),
    ],
)
def test_invalid_processes_are_refused(asked, why):
    with pytest.raises(WanjaxError, match=naming(why)):
        processes.join(asked)


def test_one_process_is_the_default(monkeypatch):
    monkeypatch.setattr(processes.jax.distributed, "initialize", lambda *given: asked.append(given))
    asked: list[tuple] = []
    for environment in (
        {},
        {"TPU_WORKER_HOSTNAMES": "localhost"},
        {"TPU_WORKER_HOSTNAMES": "a,b"},
        {"JAX_COORDINATOR_ADDRESS": "a:1"},
        {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
    ):
        processes.join(None, environment)
    assert asked == [(None, None, None), (None, None, None), ("a:1", 2, 1)]
