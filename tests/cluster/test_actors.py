# SPDX-License-Identifier: Apache-2.0
"""Workers as actors of a real Ray cluster on this machine, of which anything may be killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.support.words import naming, says
from wanjax.cluster.actors import resources_of
from wanjax.cluster.batch import read_manifest
from wanjax.errors import WanjaxError

SMALL = ("--size", "32x32", "--frames", "5", "--steps", "2")


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray")
    from benchmarks.cluster import local_cluster

    with local_cluster(2) as made:
        yield made


def batch(folder, *options, **more):
    command = [sys.executable, "-m", "wanjax", "batch", "requests.jsonl", "--out", "videos", *SMALL, *options]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def succeeded(process):
    made, told = process.communicate()
    assert process.returncode == 0, told
    return made, told


def write(folder, *rows):
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_nothing_is_lost_whatever_is_killed(tmp_path):
    pytest.importorskip("ray")
    from benchmarks.cluster import chaos

    found = chaos(tmp_path, 16, workers=2, drivers=1, nodes=1)
    assert found["seeds"] == list(range(16))
    assert found["listed"]
    assert found["failed"] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_s_videos_are_those_of_one_process(cluster, tmp_path):
    write(tmp_path, *({"prompt": f"a red circle {i}", "seed": i} for i in range(4)))
    made, told = succeeded(batch(tmp_path, "--workers", "2", "--ray", cluster.address, "--json"))
    listed = [json.loads(line) for line in made.splitlines()]
    assert sorted(one["record"]["seed"] for one in listed) == [0, 1, 2, 3], told
    succeeded(batch(tmp_path, "--out", "alone"))
    listed = [read_manifest(tmp_path / name) for name in ("videos", "alone")]
    two, one = ({entry["file_name"]: entry["worker"] for entry in entries} for entries in listed)
    assert two.keys() == one.keys()
    assert not {*two.values()} & {*one.values()}
    stages = ("--encode-workers", "1", "--decode-workers", "1", "--resources", "cpu=0.5")
    succeeded(batch(tmp_path, "--out", "stages", *stages, "--ray", cluster.address))
    apart = read_manifest(tmp_path / "stages")
    assert {entry["file_name"] for entry in apart} == one.keys()
    assert len({entry["worker"] for entry in apart}) == 1  # the one that decodes
    for name in one:
        assert len({(tmp_path / folder / name).read_bytes() for folder in ("videos", "alone", "stages")}) == 1
    again, told = succeeded(batch(tmp_path, "--workers", "2", "--ray", cluster.address))
    assert again == ""
    assert "4 of the videos are there" in told


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_the_model_cannot_make_is_told_with_its_row(cluster, tmp_path):
    write(tmp_path, {"prompt": "a"}, {"prompt": "b", "frames": 4})
    process = batch(tmp_path, "--workers", "2", "--ray", cluster.address)
    told = process.communicate()[1]
    assert process.returncode == 2
    assert says(told, "row 2 4 5")
    assert "Traceback" not in told


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(os.name != "posix", reason="sends a signal of POSIX")
def test_ctrl_c_ends_it_and_the_same_command_goes_on(cluster, tmp_path):
    write(tmp_path, *({"prompt": f"a red circle {i}", "seed": i, "steps": 40} for i in range(12)))
    options = ("--workers", "2", "--ray", cluster.address)
    process, end = batch(tmp_path, *options), time.monotonic() + 300
    while not list(tmp_path.glob("videos/[!.]*.mp4")) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 130, told
    assert re.search(r"goes on from there: wanjax batch .*--workers 2", told)
    assert 0 < len(list(tmp_path.glob("videos/[!.]*.mp4"))) < 12
    succeeded(batch(tmp_path, *options))
    assert sorted(entry["seed"] for entry in read_manifest(tmp_path / "videos")) == list(range(12))


def test_resources_are_read_or_refused():
    assert resources_of(None) == {}
    assert resources_of("cpu=2,gpu=0.5, TPU=4") == {"": {"num_cpus": 2, "num_gpus": 0.5, "resources": {"TPU": 4}}}
    apart = resources_of("cpu=1,denoise.gpu=1", ("encode", "denoise", "decode"))
    assert apart == {"": {"num_cpus": 1}, "denoise": {"num_gpus": 1}}
    for wrong in ("denoise.gpu=1", "cpu", "cpu=many", "cpu=-1", "=2", "TPU=inf"):
        with pytest.raises(WanjaxError, match=naming(f"{wrong!r} cpu=1,TPU=4")):
            resources_of(wrong)
