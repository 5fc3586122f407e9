# SPDX-License-Identifier: Apache-2.0
"""`wanjax serve --replicas` on a real Ray cluster of this machine, of which anything may be killed."""

import re
import signal
import subprocess
import sys
import time

import httpx
import numpy as np
import psutil
import pytest
from s3fs import S3FileSystem

from tests.support.media import picture
from tests.support.served import SMALL, finished
from tests.support.stores import BUCKET, running_s3
from tests.support.words import says

pytest.importorskip("ray")
pytest.importorskip("fastapi")

from benchmarks.cluster import actors
from benchmarks.replicas import BAR, measure, service

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own


def family(process):
    return psutil.Process(process.pid).children(recursive=True)


def test_nothing_that_was_taken_is_lost_where_workers_are_killed(tmp_path):
    found = measure(tmp_path / "served", requests=200, clients=20, workers=2, every=20)
    assert found["completed"] == 200, found["outcomes"]
    assert found["kills"] > 1
    assert np.percentile(found["apart"], 99) <= BAR


def test_the_owner_of_the_table_may_be_killed(tmp_path):
    found = measure(tmp_path / "served", requests=60, clients=8, workers=2, every=8, owner=True)
    assert found["completed"] == 60, found["outcomes"]


def test_a_busy_service_ends_at_a_signal_and_goes_on_later(tmp_path):
    folder = tmp_path / "served"
    with (
        service(folder, "1", "--no-rehearse") as (address, process),
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        listening = [each.laddr for one in family(process) for each in one.net_connections() if each.status == "LISTEN"]
        assert {place.ip for place in listening} <= {"127.0.0.1", "::ffff:127.0.0.1"}
        second = [sys.executable, "-m", "wanjax", "serve", "--port", "0", "--dir", str(folder), "--replicas", "1"]
        refused = subprocess.run(second, capture_output=True, text=True)
        assert refused.returncode == 2
        assert says(refused.stderr, f"server {folder} --dir")
        ids = [client.post("/v1/videos", json=SMALL | {"steps": 200, "seed": n}).json()["id"] for n in range(2)]
        with client.stream("GET", f"/v1/videos/{ids[0]}/events") as stream:
            assert any('"stage": "denoise"' in line for line in stream.iter_lines())
        all_of_it = family(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        gone, alive = psutil.wait_procs(all_of_it, 20)
        assert not alive, gone
    with (
        service(folder, "1", "--no-rehearse") as (address, process),
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        assert [finished(client, id)["status"] for id in ids] == ["completed"] * 2


def test_workers_come_with_what_waits(tmp_path):
    options = tmp_path / "served", "1..2", "--no-rehearse"
    with service(*options) as (address, process), httpx.Client(base_url=address, timeout=60) as client:
        assert len(actors(process.pid, "Making")) == 1
        ids = [client.post("/v1/videos", json=SMALL | {"steps": 100, "seed": n}).json()["id"] for n in range(12)]
        seen = set()
        while any(client.get(f"/v1/videos/{id}").json()["status"] in ("queued", "in_progress") for id in ids):
            seen.add(len(actors(process.pid, "Making")))
            time.sleep(0.5)
        assert 2 in seen
        assert {finished(client, id)["status"] for id in ids} == {"completed"}
        served = client.get("/metrics").text
        assert int(re.search(r'videos_total{status="completed"} (\d+)', served)[1]) == 12


def test_a_cluster_that_is_joined_has_one_service(tmp_path):
    """What a killed command has left answers what it knows, and makes room for the next; one that runs does not."""
    from benchmarks.cluster import local_cluster

    with local_cluster(2) as cluster:
        options = "1", "--no-rehearse", "--ray", cluster.address
        with service(tmp_path / "served", *options) as (address, process), httpx.Client(timeout=60) as client:
            id = client.post(f"{address}/v1/videos", json=SMALL | {"steps": 2}).json()["id"]
            client.get(f"{address}/v1/videos/{id}/events")
            process.kill()
            process.wait()
            time.sleep(2)
            assert client.get(f"{address}/v1/videos/{id}").json()["status"] == "completed"
            refused = client.post(f"{address}/v1/videos", json=SMALL)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        with service(tmp_path / "served", *options) as (address, process), httpx.Client(timeout=60) as client:
            assert client.get(f"{address}/v1/videos/{id}/content").status_code == 200
            command = [
                sys.executable,
                "-m",
                "wanjax",
                "serve",
                "--dir",
                str(tmp_path / "other"),
                "--replicas",
                *options,
            ]
            other = subprocess.run(command, capture_output=True, text=True)
            assert other.returncode == 2
            assert says(other.stderr, "Ray Serve cluster")
            assert client.get(f"{address}/health").status_code == 200


def test_videos_and_pictures_of_a_service_are_in_a_bucket(tmp_path):
    with running_s3():
        options = "1", "--no-rehearse", "--table", str(tmp_path)
        bucket = S3FileSystem(use_listings_cache=False)
        with (
            service(f"{BUCKET}/served", *options) as (address, _),
            httpx.Client(base_url=address, timeout=60) as client,
        ):
            files = {"image": ("red.png", picture())}
            id = client.post("/v1/videos", data=SMALL | {"steps": "2"}, files=files).json()["id"]
            assert finished(client, id)["status"] == "completed"
            names = [f"wanjax-videos/served/{id}/{name}" for name in ("image.png", "thumbnail.webp", "video.mp4")]
            assert bucket.find(BUCKET) == names
            whole = bucket.cat_file(names[2])
            assert client.get(f"/v1/videos/{id}/content").content == whole
            part = client.get(f"/v1/videos/{id}/content", headers={"range": "bytes=-9"})
            assert (part.status_code, part.content) == (206, whole[-9:])
            assert client.delete(f"/v1/videos/{id}").status_code == 200
            end = time.monotonic() + 20
            while bucket.find(BUCKET) and time.monotonic() < end:
                time.sleep(0.1)
            assert bucket.find(BUCKET) == []
    assert {each.name.partition("-")[0] for each in tmp_path.iterdir()} == {"serving.lock", "videos.sqlite"}


def test_a_model_that_is_none_is_told(tmp_path):
    command = [sys.executable, "-m", "wanjax", "serve", "--model", "nothing", "--replicas", "1", "--dir", str(tmp_path)]
    refused = subprocess.run([*command, "--port", "0"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert says(refused.stderr, "nothing models")
    assert "Traceback" not in refused.stderr
