# SPDX-License-Identifier: Apache-2.0
"""A batch with workers in a real Ray cluster on this machine, when any of its processes is killed."""

import json
import operator
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

import jax
import pytest

import wanjax
from tests.support.batches import read_manifest
from tests.support.words import has_line_with_words, line_with_words
from wanjax.cli import many
from wanjax.errors import WanjaxError
from wanjax.jobs import maker
from wanjax.jobs.batch import Batch, Manifest
from wanjax.jobs.maker import VideoMaker
from wanjax.jobs.pool import Autoscaler, Pool
from wanjax.jobs.ray_cluster import connect_ray, parse_resources
from wanjax.jobs.ray_placement import (
    POD_LABEL,
    SLICE_LABEL,
    WORKER_ID_LABEL,
    placement_bundles,
    start_group,
    start_single,
)
from wanjax.jobs.ray_workers import RayWorker, RemoteStore, WorkerActor
from wanjax.jobs.sharing import BATCH_FILE, join_namespace
from wanjax.jobs.store import JobStore, NewJob
from wanjax.pipelines.request import VideoRequest

SMALL = ("--size", "32x32", "--frames", "5", "--steps", "2")


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray")
    from benchmarks.cluster import local_cluster

    with local_cluster(2) as result:
        yield result


def batch(folder, *options, **more):
    out = () if "--out" in options else ("--out", "videos")
    command = [sys.executable, "-m", "wanjax", "batch", "requests.jsonl", *out, *SMALL, *options]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def succeeded(process):
    result, message = process.communicate()
    assert process.returncode == 0, message
    return result, message


def initializer_result(worker):
    """Wait until a worker has started, and return the result of its initializer."""
    end = time.monotonic() + 120
    while (result := worker.initializer_result()) is None and time.monotonic() < end:
        time.sleep(0.1)
    return result


def write_requests(folder, *rows):
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of Ray
def test_no_video_is_lost_if_any_process_is_killed(tmp_path):
    pytest.importorskip("ray")
    from benchmarks.cluster import chaos

    result = chaos(tmp_path, 16, workers=2, drivers=1, nodes=1)
    assert result["seeds"] == list(range(16))
    assert result["listed"]
    assert result["failed"] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_video_is_lost_if_a_host_of_a_slice_is_killed(tmp_path):
    """Each host of a worker is killed, and one of its nodes: Ray takes most of a minute for each on a busy machine."""
    pytest.importorskip("ray")
    from benchmarks.cluster import chaos

    result = chaos(tmp_path, 12, workers=2, drivers=0, nodes=1, hosts=2)
    assert result["seeds"] == list(range(12))
    assert result["spared"] == 0
    assert result["listed"]
    assert result["failed"] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("failing_host", [0, 1], ids=["the first", "another"])
def test_a_video_that_fails_on_one_host_of_a_slice_is_listed_and_the_others_are_made(tmp_path, failing_host):
    """Each attempt restarts the slice, and costs no attempt of another video."""
    pytest.importorskip("ray")
    prompts = ["a", "fail", "b", "fail", "c"]

    def load():  # in each host's process
        pipe, write_frames = wanjax.load("nano", mesh="dp=2"), maker.write_frames

        def failing(path, frames, request):
            if request.settings.prompt == "fail" and jax.process_index() == failing_host:
                raise RuntimeError("the device is gone")
            write_frames(path, frames, request)

        maker.write_frames = failing
        return pipe

    small = {"size": (32, 32), "frames": 5, "steps": 2}
    requests = [
        VideoRequest.parse(small | {"prompt": prompt, "seed": row}, row=row) for row, prompt in enumerate(prompts, 1)
    ]
    with connect_ray(None, 2) as ray:
        arguments = {"load": partial(maker.with_program_cache, load, {}), "folder": tmp_path}
        join_namespace(local := JobStore(str(tmp_path / "jobs.sqlite")), tmp_path, BATCH_FILE)
        store, notes, tasks = RemoteStore.start(ray, local), [], []
        options = {"max_batch": 32, "retries": 1, "attempts": 2}
        start_actors, follower = partial(start_group, ray, [{"CPU": 1}] * 2, False), partial(VideoMaker, **arguments)
        worker = partial(
            RayWorker, ray, store, partial(many._make_maker, arguments, leads=True), options, start_actors, follower
        )
        initialize = operator.methodcaller("tasks_for", requests)
        pool = Pool(store, lambda number: worker(None if tasks else initialize), Autoscaler(1, 1), notes.append)
        while not tasks:
            pool.poll()
            tasks += pool.workers[0].initializer_result() or []
        batch, ended_jobs = Batch(store, tasks, Manifest(tmp_path), "nano"), []
        while batch.ended_count < batch.total:
            pool.poll()
            ended_jobs += batch.poll()
            time.sleep(0.1)
        pool.kill()
    result, failed = (
        [entry for entry in read_manifest(tmp_path) if ("error" in entry) is wrong] for wrong in (False, True)
    )
    assert len(ended_jobs) == 5
    assert sorted(entry["prompt"] for entry in result) == ["a", "b", "c"]
    assert sorted(entry["file_name"] for entry in result) == sorted(path.name for path in tmp_path.glob("*.mp4"))
    message = {(entry["row"], entry["error"], entry["tries"]) for entry in failed}
    assert message == {(row, "RuntimeError: the device is gone", 2) for row in (2, 4)}
    assert failing_host == 0 or sum("a worker died" in note for note in notes) >= 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_worker_with_another_folder_makes_nothing_and_reports_it(tmp_path, hosts):
    """The hosts of a cluster may not share the folder; then no video is written to the folder of another host."""
    pytest.importorskip("ray")
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    for folder in (shared, elsewhere):
        folder.mkdir()
    join_namespace(local := JobStore(str(tmp_path / "jobs.sqlite")), shared, BATCH_FILE)
    local.add(NewJob("a", {}, "nano", "a.mp4"))
    with connect_ray(None, 2) as ray:
        store, arguments = RemoteStore.start(ray, local), {"load": partial(wanjax.load, "nano"), "folder": elsewhere}
        start_actors = partial(start_single, ray, {"num_cpus": 1})
        if hosts > 1:
            start_actors = partial(start_group, ray, [{"CPU": 1}] * hosts, False)
        start, follower = partial(many._make_maker, arguments, leads=hosts > 1), partial(VideoMaker, **arguments)
        worker = RayWorker(ray, store, start, {}, start_actors, follower, operator.attrgetter("models"))
        with pytest.raises(WanjaxError, match=line_with_words(f"{elsewhere} another folder")):
            initializer_result(worker)
        assert worker.exit_reason() is None  # the caller ends it, because a new worker would fail as well
        worker.kill()
        assert store.get("a").attempts == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_videos_of_a_slice_equal_those_of_one_process(tmp_path, monkeypatch):
    """The slice has two hosts with two devices each, in a cluster that the command starts."""
    pytest.importorskip("ray")
    write_requests(tmp_path, *({"prompt": f"a red circle {i}", "seed": i} for i in range(3)))
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2")
        succeeded(batch(tmp_path, "--hosts", "2", "--ray", "local", "--mesh", "dp=2,sp=2"))
    assert {entry["worker"].count(":") for entry in read_manifest(tmp_path / "videos")} == {1}
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4")
    succeeded(batch(tmp_path, "--out", "single", "--mesh", "dp=2,sp=2"))
    slices, single_process = (
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.mp4")} for name in ("videos", "single")
    )
    assert len(single_process) == 3
    assert slices == single_process


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_hosts_of_a_worker_are_those_of_one_tpu_slice_in_its_order():
    """The nodes of two slices have the labels and the head resources that Ray gives to TPUs."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for node in range(4):
            name, host = "ab"[node % 2], node // 2
            head = {"TPU-v6e-8-head": 1} if host == 0 else {}
            labels = {SLICE_LABEL: name, WORKER_ID_LABEL: str(host), POD_LABEL: "v6e-8"}
            message = {"num_cpus": 1, "resources": {"TPU": 4, **head}, "labels": labels, "include_dashboard": False}
            cluster.add_node(**message, object_store_memory=80 * 2**20)
        ray.init(cluster.address, log_to_driver=False)
        bundles = placement_bundles(ray, {"": {"resources": {"TPU": 4}}}, 2)
        assert bundles == [{"TPU": 4, "TPU-v6e-8-head": 1}, {"TPU": 4}]
        workers = [start_group(ray, bundles, True, WorkerActor) for _ in range(2)]
        node_labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
        result = []
        for actors, group in workers:
            ray.get([actor.address.remote() for actor in actors])  # wait until they are placed
            nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
            result.append(
                [
                    (node_labels[nodes[host]][SLICE_LABEL], node_labels[nodes[host]][WORKER_ID_LABEL])
                    for host in range(2)
                ]
            )
        assert sorted(result) == [[("a", "0"), ("a", "1")], [("b", "0"), ("b", "1")]]
        with pytest.raises(WanjaxError, match=line_with_words("--hosts 3 2 v6e-8")):
            placement_bundles(ray, {"": {"resources": {"TPU": 4}}}, 3)
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_videos_of_a_cluster_equal_those_of_one_process(cluster, tmp_path):
    write_requests(tmp_path, *({"prompt": f"a red circle {i}", "seed": i} for i in range(4)))
    result, message = succeeded(batch(tmp_path, "--workers", "2", "--ray", cluster.address, "--json"))
    entries = [json.loads(line) for line in result.splitlines()]
    assert sorted(entry["record"]["seed"] for entry in entries) == [0, 1, 2, 3], message
    succeeded(batch(tmp_path, "--out", "single"))
    manifests = [read_manifest(tmp_path / name) for name in ("videos", "single")]
    two, single_process = ({entry["file_name"]: entry["worker"] for entry in entries} for entries in manifests)
    assert two.keys() == single_process.keys()
    assert not {*two.values()} & {*single_process.values()}
    succeeded(batch(tmp_path, "--out", "processes", "--workers", "2"))
    local = {entry["file_name"]: entry["worker"] for entry in read_manifest(tmp_path / "processes")}
    assert local.keys() == single_process.keys()
    for name in single_process:
        assert len({(tmp_path / folder / name).read_bytes() for folder in ("videos", "single", "processes")}) == 1
    again, message = succeeded(batch(tmp_path, "--workers", "2", "--ray", cluster.address))
    assert again == ""
    assert has_line_with_words(message, "4 videos exist already")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_request_that_the_model_refuses_is_reported_with_its_row(cluster, tmp_path):
    write_requests(tmp_path, {"prompt": "a"}, {"prompt": "b", "frames": 4})
    process = batch(tmp_path, "--workers", "2", "--ray", cluster.address)
    messages = process.communicate()[1]
    assert process.returncode == 2
    assert has_line_with_words(messages, "line 2 4 5")
    assert "Traceback" not in messages


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(os.name != "posix", reason="sends a signal of POSIX")
def test_ctrl_c_ends_a_batch_and_the_same_command_resumes(cluster, tmp_path):
    write_requests(tmp_path, *({"prompt": f"a red circle {i}", "seed": i, "steps": 40} for i in range(12)))
    options = ("--workers", "2", "--ray", cluster.address)
    process, end = batch(tmp_path, *options), time.monotonic() + 300
    while not list(tmp_path.glob("videos/[!.]*.mp4")) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    message = process.communicate(timeout=60)[1]
    assert process.returncode == 130, message
    assert re.search(r"continue with: wanjax batch .*--workers 2", message)
    assert 0 < len(list(tmp_path.glob("videos/[!.]*.mp4"))) < 12
    succeeded(batch(tmp_path, *options))
    assert sorted(entry["seed"] for entry in read_manifest(tmp_path / "videos")) == list(range(12))


def test_without_a_cluster_the_message_says_how_to_start_one(monkeypatch):
    ray = pytest.importorskip("ray")

    def find_no_cluster(*_, **__):
        raise ConnectionError(
            "Could not find any running Ray instance. Please specify the one to connect to by setting `--address` flag "
            "or `RAY_ADDRESS` environment variable."
        )

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", find_no_cluster)  # a real search would find the clusters of other tests
    with pytest.raises(WanjaxError, match=line_with_words("cluster Ray ray start --head --ray local")) as caught:
        connect_ray("auto", min_cores=1).__enter__()
    assert "--address" not in str(caught.value)


def test_resources_are_read_or_refused():
    assert parse_resources(None) == {}
    assert parse_resources("cpu=2,gpu=0.5, TPU=4") == {"": {"num_cpus": 2, "num_gpus": 0.5, "resources": {"TPU": 4}}}
    first = parse_resources("TPU=4,first.TPU-v6e-16-head=1", ("first",))
    assert placement_bundles(None, first, 3) == [{"TPU": 4, "TPU-v6e-16-head": 1}, {"TPU": 4}, {"TPU": 4}]
    assert placement_bundles(None, {"": {"num_cpus": 2}}, 2) == [{"CPU": 2}] * 2
    for wrong in ("denoise.gpu=1", "cpu", "cpu=many", "cpu=-1", "=2", "TPU=inf"):
        with pytest.raises(WanjaxError, match=line_with_words(f"{wrong!r} cpu=1,TPU=4")):
            parse_resources(wrong)
