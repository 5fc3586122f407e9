# SPDX-License-Identifier: Apache-2.0
"""`wanjax serve --workers` and several servers with one database, when any of their processes is killed."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from threading import Thread

import numpy as np
import psutil
import pytest
from s3fs import S3FileSystem

from benchmarks.replicas import MAX_RESPONSE_SECONDS, measure, ready_process_ids
from tests.support.commands import refused as refused_command
from tests.support.media import picture
from tests.support.quick import quick
from tests.support.served import SMALL, serving, wait_until_finished
from tests.support.stores import BUCKET, running_s3
from tests.support.tiny import tiny_checkpoint
from tests.support.words import has_line_with_words
from wanjax.jobs.batch import Batch, Manifest
from wanjax.jobs.databases import ENV_VARIABLE
from wanjax.jobs.maker import VideoMaker
from wanjax.jobs.ray_workers import WorkerActor
from wanjax.jobs.sharing import BATCH_FILE, SERVE_FILE, join_namespace
from wanjax.jobs.store import JobStore
from wanjax.jobs.worker import work
from wanjax.pipelines.request import VideoRequest

FAST = SMALL | {"steps": 2}


def child_processes(process):
    return psutil.Process(process.pid).children(recursive=True)


def end_and_check(process):
    """End a command by a signal, and check that all its child processes end."""
    started = child_processes(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    assert not psutil.wait_procs(started, 20)[1]


def test_a_worker_that_is_killed_loses_no_video(tmp_path):
    """A new worker makes the video, and a second server without workers shows it too."""
    with serving(tmp_path, "--workers", "1", "--no-rehearse") as (client, process):
        join_namespace(store := JobStore(str(tmp_path / "jobs.sqlite")), tmp_path, SERVE_FILE)
        with serving(tmp_path, "--workers", "0", "--database", str(tmp_path / "jobs.sqlite")) as (
            second_client,
            second,
        ):
            id = second_client.post("/v1/videos", json=SMALL | {"steps": 20}).json()["id"]
            while client.get(f"/v1/videos/{id}").json()["status"] == "queued":
                time.sleep(0.05)
            [worker] = ready_process_ids(store)
            os.kill(worker, signal.SIGKILL)
            assert wait_until_finished(client, id)["status"] == "completed"
            assert ready_process_ids(store) != [worker]
            assert store.get(id).attempts == 2
            assert (
                client.get(f"/v1/videos/{id}/content").content == second_client.get(f"/v1/videos/{id}/content").content
            )
            with second_client.stream("GET", f"/v1/videos/{id}/events") as stream:
                assert any('"completed"' in line for line in stream.iter_lines())
            end_and_check(second)
        assert client.get("/health").json()["status"] == "ready"
        end_and_check(process)
        store.close()


def test_a_server_without_workers_reports_waiting_jobs(tmp_path):
    with serving(tmp_path, "--workers", "0", "--database", str(tmp_path / "jobs.sqlite")) as (client, _):
        assert client.get("/health").json()["status"] == "loading"
        [model] = client.get("/v1/models").json()["data"]
        assert "devices" not in model["started_with"]  # the devices of this process make no video
        assert client.post("/v1/videos", json=FAST).json()["queue_position"] == 0
        assert client.get("/health").json()["waits_for_workers_of"] == ["nano"]
    model = tiny_checkpoint(tmp_path / "other")
    options = ("--workers", "0", "--database", str(tmp_path / "jobs.sqlite"), "--model", str(model))
    with serving(tmp_path, *options) as (_, process):
        assert has_line_with_words(process.stderr.readline(), "waiting videos of nano server worker")


@pytest.mark.parametrize("kind", quick(["sqlite"], ["sqlite", "postgresql"]))
def test_a_batch_and_a_server_share_one_database(start, pipe, tmp_path, request, kind):
    """Neither shows or makes the jobs of the other."""
    with ExitStack() as stack:
        url = str(tmp_path / "jobs.sqlite")
        if kind == "postgresql":
            url = stack.enter_context(request.getfixturevalue("postgres").database())
        server = start(database=url, work=False)
        stack.callback(server.stop)
        out = tmp_path / "videos"
        out.mkdir()
        maker, store = VideoMaker(lambda: pipe, out), stack.enter_context(closing(JobStore(url)))
        join_namespace(store, out, BATCH_FILE)
        tasks = maker.tasks_for([VideoRequest.parse(FAST | {"seed": seed}) for seed in range(2)])
        batch = Batch(store, tasks, Manifest(out), "nano")
        id = server.post_video()["id"]
        server.worker.start()
        assert server.wait_until_finished(id)["status"] == "completed"
        assert store.stats().jobs == {"queued": 2}
        assert [video["id"] for video in server.client.get("/v1/videos").json()["data"]] == [id]
        assert server.client.get(f"/v1/videos/{tasks[0].output}").status_code == 404
        assert server.client.get("/health").json()["queue"] == 0
        assert "waits_for_workers_of" not in server.client.get("/health").json()
        assert 'videos_total{status="completed"} 1.0' in server.client.get("/metrics").text
        server.post_video(steps=200)
        work(store, maker, until_empty=True)
        assert {job.output for job in batch.poll()} == {path.name for path in out.glob("*.mp4")}
        assert batch.done_count == 2
        assert len(server.jobs()) == 2


@pytest.mark.slow
def test_no_accepted_job_is_lost_if_workers_are_killed(tmp_path):
    counts = measure(tmp_path / "served", requests=200, clients=20, workers=2, kill_interval=20)
    assert counts["completed"] == 200, counts["outcomes"]
    assert counts["kills"] > 1
    assert np.percentile(counts["otherwise"], 99) <= MAX_RESPONSE_SECONDS


@pytest.mark.slow
def test_no_job_is_lost_if_servers_workers_and_the_database_are_killed(tmp_path, postgres):
    """Two servers share a database; one is killed with its worker, and the database twice."""
    with postgres.database() as url, ExitStack() as stack:
        environment = {ENV_VARIABLE: url}
        options = ("--workers", "1", "--no-rehearse", "--max-queue", "100")
        first, process = stack.enter_context(serving(tmp_path, *options, **environment))
        second, _ = stack.enter_context(serving(tmp_path, *options, **environment))
        ids = [client.post("/v1/videos", json=FAST).json()["id"] for client in (first, second) for _ in range(15)]

        def kill_processes():
            for _ in range(2):
                time.sleep(4)
                postgres.stop("immediate")
                time.sleep(2)
                postgres.start()
            process.kill()

        killer = Thread(target=kill_processes)
        killer.start()
        for id in ids:
            while (result := second.get(f"/v1/videos/{id}")).status_code == 503 or not result.json()["completed_at"]:
                assert result.status_code in (200, 503)
                time.sleep(0.1)
            assert result.json()["status"] == "completed", result.text
        killer.join()
        videos = second.get("/v1/videos?limit=100").json()["data"]
        assert sorted(video["id"] for video in videos) == sorted(ids)


@pytest.mark.slow
def test_a_busy_service_ends_at_a_signal_and_resumes(tmp_path):
    options = tmp_path, "--workers", "1", "--no-rehearse"
    with serving(*options) as (client, process):
        listening = [
            connection.laddr
            for child in child_processes(process)
            for connection in child.net_connections()
            if connection.status == "LISTEN"
        ]
        assert not listening
        second = [sys.executable, "-m", "wanjax", "serve", "--port", "0", "--dir", str(tmp_path), "--workers", "1"]
        refused = subprocess.run(second, capture_output=True, text=True)
        assert refused.returncode == 2
        assert has_line_with_words(refused.stderr, f"server {tmp_path} --dir")
        ids = [client.post("/v1/videos", json=SMALL | {"steps": 200, "seed": n}).json()["id"] for n in range(2)]
        with client.stream("GET", f"/v1/videos/{ids[0]}/events") as stream:
            assert any('"stage": "denoise"' in line for line in stream.iter_lines())
        end_and_check(process)
    with serving(*options) as (client, process):
        assert [wait_until_finished(client, id)["status"] for id in ids] == ["completed"] * 2


@pytest.mark.slow
def test_workers_scale_with_the_queue(tmp_path):
    with serving(tmp_path, "--workers", "1..2", "--no-rehearse") as (client, _):
        join_namespace(store := JobStore(str(tmp_path / "jobs.sqlite")), tmp_path, SERVE_FILE)
        assert len(store.workers()) == 1
        ids = [client.post("/v1/videos", json=SMALL | {"steps": 100, "seed": n}).json()["id"] for n in range(12)]
        seen = set()
        while any(not client.get(f"/v1/videos/{id}").json()["completed_at"] for id in ids):
            seen.add(len(store.workers()))
            time.sleep(0.5)
        assert 2 in seen
        assert {wait_until_finished(client, id)["status"] for id in ids} == {"completed"}
        metrics = client.get("/metrics").text
        assert int(re.search(r'videos_total{status="completed"} (\d+)', metrics)[1]) == 12
        store.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of Ray
def test_no_job_is_lost_if_workers_or_the_store_in_a_ray_cluster_are_killed(tmp_path):
    pytest.importorskip("ray")
    from benchmarks.cluster import actors, local_cluster

    with local_cluster(2) as cluster:
        options = "--workers", "2", "--ray", cluster.address, "--no-rehearse"
        with serving(tmp_path, *options) as (client, process):
            ids = [client.post("/v1/videos", json=SMALL | {"steps": 100, "seed": n}).json()["id"] for n in range(8)]
            for name in (WorkerActor.__name__, JobStore.__name__):
                time.sleep(3)
                actors(os.getpid(), name)[0].kill()
            assert {wait_until_finished(client, id)["status"] for id in ids} == {"completed"}
            end_and_check(process)


@pytest.mark.slow
def test_videos_and_pictures_of_a_service_are_in_a_bucket(tmp_path):
    database = str(tmp_path / "jobs.sqlite")
    with running_s3():
        options = "--workers", "1", "--no-rehearse", "--database", database
        bucket = S3FileSystem(use_listings_cache=False)

        def files():
            return [name for name in bucket.find(BUCKET) if not name.endswith(SERVE_FILE)]

        with serving(f"{BUCKET}/served", *options) as (client, _):
            id = client.post("/v1/videos", data=FAST, files={"image": ("red.png", picture())}).json()["id"]
            assert wait_until_finished(client, id)["status"] == "completed"
            names = [
                f"wanjax-videos/served/{id}/{name}"
                for name in ("image.png", "preview.png", "thumbnail.webp", "video.mp4")
            ]
            assert files() == names
            content = bucket.cat_file(names[-1])
            assert client.get(f"/v1/videos/{id}/content").content == content
            part = client.get(f"/v1/videos/{id}/content", headers={"range": "bytes=-9"})
            assert (part.status_code, part.content) == (206, content[-9:])
            assert client.delete(f"/v1/videos/{id}").status_code == 200
            end = time.monotonic() + 20
            while files() and time.monotonic() < end:
                time.sleep(0.1)
            assert files() == []


@pytest.mark.parametrize("workers", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_an_unknown_model_is_reported(tmp_path, workers):
    command = [sys.executable, "-m", "wanjax", "serve", "--model", "nothing", "--workers", workers]
    refused = subprocess.run([*command, "--dir", str(tmp_path), "--port", "0"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert has_line_with_words(refused.stderr, "nothing models")
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("options", quick(["option"], ["option", "environment"]))
def test_an_unreachable_database_is_reported_without_its_password(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    url = "postgresql://me:a-secret@127.0.0.1:1/jobs"
    if options == "environment":
        monkeypatch.setenv(ENV_VARIABLE, url)
    output = refused_command("serve", "--port", "0", *(["--database", url] if options == "option" else []))
    assert has_line_with_words(output, "postgresql://me@127.0.0.1:1/jobs connection refused")
    assert "a-secret" not in output


@pytest.mark.parametrize(("old", "new"), [("--replicas=2", "--workers"), ("--table=here", "--database")])
def test_the_message_for_an_old_option_names_the_new_one(tmp_path, monkeypatch, old, new):
    monkeypatch.chdir(tmp_path)
    assert has_line_with_words(refused_command("serve", old), f"{old.partition('=')[0]} {new}")
