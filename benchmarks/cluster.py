# SPDX-License-Identifier: Apache-2.0
"""Measure `wanjax batch` with `nano` on a Ray cluster on this machine: rate, overhead, and recovery from kills.

    python -m benchmarks.cluster rate [--requests 200] [--repeats 3]
    python -m benchmarks.cluster overhead [--requests 200]
    python -m benchmarks.cluster plan [--requests 10000]
    python -m benchmarks.cluster chaos [--requests 200] [--workers-killed 10] [--drivers-killed 3] [--nodes-killed 2]
                                       [--hosts 1]

`rate` compares two nodes, each with a worker on one core, with one such worker and with one process on both cores.
Loading and the first video do not count. `overhead` measures workers that do nothing. `plan` measures the driver's
memory, and its time to read, check and name requests; 90 % of the videos already exist. `chaos` kills workers,
drivers and nodes with SIGKILL during a batch, and restarts the driver until the batch is done. With `--hosts 2`, one
worker has both nodes, and one of its processes is killed at a time.
"""

import argparse
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import psutil

from tests.support.batches import read_manifest
from wanjax.jobs.batch import Batch, Manifest
from wanjax.jobs.maker import Task, VideoMaker
from wanjax.jobs.pool import Autoscaler, LocalWorker, Pool
from wanjax.jobs.ray_cluster import LOCAL_ENVIRONMENT
from wanjax.jobs.ray_workers import WorkerActor
from wanjax.jobs.rows import read_requests
from wanjax.jobs.store import Job, JobStore
from wanjax.jobs.worker import Failure, Lease
from wanjax.media.video import read_metadata
from wanjax.pipelines.request import VideoRequest

SMALL_VIDEO_OPTIONS = ("--size", "32x32", "--frames", "5", "--steps", "20")
OBJECT_STORE_BYTES = 80 * 2**20
MAX_STALL_SECONDS = 900.0  # the most seconds between two videos of a driver


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Pin processes that are started in the block to one core."""
    previous_cores = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {sorted(previous_cores)[core % len(previous_cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, previous_cores)


def start_with_retries(start: Callable[[], Any], max_attempts: int = 5) -> Any:
    """Start a node; try again if it fails, since Ray's timeout of 30 seconds is too short on a busy machine."""
    for attempts_left in reversed(range(max_attempts)):
        try:
            return start()
        except Exception:
            if not attempts_left:
                raise


class LocalCluster:
    """A Ray cluster on this machine, only at a local address: a head without cores, and nodes with one core each."""

    def __init__(self) -> None:
        os.environ.update(LOCAL_ENVIRONMENT, JAX_PLATFORMS="cpu")
        from ray.cluster_utils import Cluster

        node_options = {
            "num_cpus": 0,
            "node_ip_address": "127.0.0.1",
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
        self.cluster = start_with_retries(lambda: Cluster(initialize_head=True, head_node_args=node_options))
        self.nodes: list[Any] = []

    @property
    def address(self) -> str:
        return self.cluster.address

    def add(self, core: int | None = None) -> None:
        """Start a node, and pin it to a core if one is named."""
        with pinned(core):
            node_options: Any = {
                "num_cpus": 1,
                "node_ip_address": "127.0.0.1",
                "object_store_memory": OBJECT_STORE_BYTES,
            }
            self.nodes.append(start_with_retries(lambda: self.cluster.add_node(**node_options)))

    def kill(self, index: int) -> None:
        """Kill a node as a power cut does."""
        self.cluster.remove_node(self.nodes.pop(index), allow_graceful=False)

    def close(self) -> None:
        self.cluster.shutdown()


@contextmanager
def local_cluster(nodes: int, *, pin: bool = False) -> Iterator[LocalCluster]:
    """Start a cluster with a number of nodes; with `pin`, each is pinned to its own core."""
    with ExitStack() as stack:
        cluster = LocalCluster()
        stack.callback(cluster.close)
        for core in range(nodes):
            cluster.add(core if pin else None)
        yield cluster


def write_requests(file: Path, count: int) -> Path:
    lines = [json.dumps({"prompt": f"a red circle moving right, take {i}", "seed": i}) for i in range(count)]
    file.write_text("\n".join(lines) + "\n")
    return file


def start_batch(file: Path, out: Path, *options: str, core: int | None = None) -> "subprocess.Popen[str]":
    """Start `wanjax batch`."""
    command = [sys.executable, "-m", "wanjax", "batch", str(file), "--out", str(out), *SMALL_VIDEO_OPTIONS, *options]
    with pinned(core):
        log = (out.parent / f"{out.name}.log").open("a")
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, text=True)


def video_files(out: Path) -> list[Path]:
    return sorted(out.glob("[!.]*.mp4"))


def video_rates(out: Path) -> tuple[float, float]:
    """Return the videos per second of all workers, and the sum of the rates of the single workers.

    A rate counts from the end of the first video. The times are the files' modification times.
    """
    by_worker: dict[str, list[float]] = {}
    for entry in read_manifest(out):
        by_worker.setdefault(entry["worker"], []).append((out / entry["file_name"]).stat().st_mtime)
    worker_rates = [(len(times) - 1) / (max(times) - min(times)) for times in by_worker.values() if len(times) > 1]
    times = [time for worker_times in by_worker.values() for time in worker_times]
    return (len(times) - 1) / (max(times) - min(times)), sum(worker_rates)


def compare_rates(requests: int, repeats: int) -> None:
    """Print the rates of two workers, of one worker, and of one process on both cores."""
    with tempfile.TemporaryDirectory() as folder_name, local_cluster(2, pin=True) as cluster:
        folder = Path(folder_name)
        file = write_requests(folder / "requests.jsonl", requests)
        settings = {
            "2 workers of 1 core": ("--workers", "2", "--ray", cluster.address),
            "1 worker of 1 core": ("--workers", "1", "--ray", cluster.address),
            "1 process of 2 cores": (),
        }
        rates: dict[str, list[float]] = {name: [] for name in settings}
        for repeat in range(repeats):
            for index, (name, options) in enumerate(settings.items()):
                out = folder / f"{index}-{repeat}"
                assert start_batch(file, out, *options).wait() == 0, (out.parent / f"{out.name}.log").read_text()
                total_rate, steady_rate = video_rates(out)
                rates[name].append(total_rate)
                rates_text = f"{total_rate:.2f} videos a second, {steady_rate:.2f} once all workers are at work"
                print(f"{name}: {rates_text}, load {os.getloadavg()[0]:.1f}", flush=True)
        are_equal = [
            (folder / "0-0" / path.name).read_bytes() == path.read_bytes() for path in video_files(folder / "1-0")
        ]
        print(f"{sum(are_equal)} of {len(are_equal)} files of 2 workers and of 1 are equal")
        median = {name: statistics.median(total_rate) for name, total_rate in rates.items()}
        first, second, third = median.values()
        print(f"2 workers beside 1: {first / second:.2f}, beside one process: {first / third:.2f}")


class IdleMaker:
    """A maker that does no work."""

    models = ("nano",)

    def warm_up(self, should_stop: Callable[[], bool]) -> None: ...

    def is_published(self, job: Job) -> bool:
        return False

    def make(self, jobs: Sequence[Job], lease: Lease) -> Iterator[Job]:
        yield from jobs

    def explain(self, error: Exception) -> Failure:
        return Failure("", str(error))


def make_idle_maker(store: JobStore) -> IdleMaker:
    return IdleMaker()


def measure_overhead(requests: int) -> None:
    """Print the seconds per request of two workers and their driver, when making a video takes no time."""
    tasks = [Task(f"{i}.mp4", VideoRequest({"prompt": f"a circle {i}", "seed": i}, row=i)) for i in range(requests)]
    for label, max_batch in (("batches as they come", 32), ("one at a time", 1)):
        with tempfile.TemporaryDirectory() as name:
            store = JobStore(f"{name}/jobs.sqlite")
            start = partial(LocalWorker, store, make_idle_maker, {"max_batch": max_batch})
            pool = Pool(store, lambda number, start=start: start(number=number), Autoscaler(2, 2), print)
            while store.stats().workers.get("ready") != 2:
                pool.poll()
            start, cpu = time.perf_counter(), time.process_time()
            batch = Batch(store, tasks, Manifest(Path(name)), "nano")
            while batch.ended_count < batch.total:
                list(batch.poll())
                time.sleep(0.01)
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            pool.close()
            times = f"{1000 * seconds / requests:.2f} ms a request, {1000 * cpu / requests:.2f} of them the driver's"
            print(f"{label}: {times}, load {os.getloadavg()[0]:.1f}")


def measure_plan(requests: int) -> None:
    """Print the seconds and the memory to read, check and name requests. Most of their videos exist already."""
    from wanjax.loading import load

    jax.config.update("jax_platforms", "cpu")  # as in the driver; otherwise an installed libtpu adds 94 MiB
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file, pipe = write_requests(folder / "requests.jsonl", requests), load("nano")
        bytes_before, start = psutil.Process().memory_info().rss, time.perf_counter()
        cpu = time.process_time()
        tasks = VideoMaker(lambda: pipe, folder).tasks_for(read_requests(str(file)))
        plan_seconds = time.perf_counter() - start
        manifest, store = Manifest(folder), JobStore(str(folder / "jobs.sqlite"))
        for task in tasks[: requests * 9 // 10]:
            (folder / task.output).touch()
            manifest.add(task, seconds=1.0)
        start_again = time.perf_counter()
        existing, manifest = set(os.listdir(folder)), Manifest(folder)
        batch = Batch(store, [task for task in tasks if task.output not in existing], manifest, "nano")
        assert batch.total == requests - requests * 9 // 10
        assert len(manifest.done_names) == requests * 9 // 10
        resume_seconds, cpu = time.perf_counter() - start_again, time.process_time() - cpu
        memory_growth, peak = (
            psutil.Process().memory_info().rss - bytes_before,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        )
        print(
            f"{requests} requests: planned in {plan_seconds:.2f} s, resumed in {resume_seconds:.2f} s, "
            f"{cpu:.2f} s of a core"
        )
        print(f"memory: {memory_growth / 2**20:.0f} MiB more, {peak / 2**10:.0f} MiB with JAX and the library")
    print(f"a driver of two workers: {driver_memory(requests):.0f} MiB, with 10 requests {driver_memory(10):.0f} MiB")


def driver_memory(requests: int) -> float:
    """Return the MiB of a driver after it planned requests, before the first video, including Ray."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "videos"
        process = start_batch(write_requests(Path(name) / "requests.jsonl", requests), out, "--workers", "2")
        while f"videos: {requests}, into" not in out.with_suffix(".log").read_text():
            assert process.poll() is None, out.with_suffix(".log").read_text()
            time.sleep(0.1)
        memory = psutil.Process(process.pid).memory_info().rss / 2**20
        process.send_signal(signal.SIGINT)
        process.wait()
        return memory


def actors(pid: int, title: str) -> list[psutil.Process]:
    """Return the processes of actors whose title begins with `title`, the oldest first; process `pid` started them."""
    actor_processes = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):  # the process may have ended
            if any(word.startswith(f"ray::{title}") for word in process.cmdline()):
                actor_processes.append((process.create_time(), process.pid, process))
    return [process for *_, process in sorted(actor_processes)]


def victims(kind: str, out: Path) -> list[psutil.Process]:
    """Return a batch's processes of a kind: "worker", or "leader" or "follower" of workers with several processes."""
    if kind == "worker":
        return actors(os.getpid(), WorkerActor.__name__)
    leaders = {int(entry["worker"].rpartition(":")[2]) for entry in read_manifest(out) if "worker" in entry}
    hosts = actors(os.getpid(), WorkerActor.__name__)
    if not any(host.pid in leaders for host in hosts):
        return []  # the leader is unknown until one of them has made a video
    return [host for host in hosts if (host.pid in leaders) is (kind == "leader")]


def chaos(
    folder: Path, requests: int, workers: int, drivers: int, nodes: int, *, hosts: int = 1, seed: int = 0
) -> dict[str, Any]:
    """Make a batch on two nodes while workers, drivers and nodes are killed; return the outcome.

    With two hosts, both nodes form one worker, and its mesh has a device of each node.
    """
    file, out, rng = write_requests(folder / "requests.jsonl", requests), folder / "videos", random.Random(seed)
    process_kinds = ("worker",) if hosts == 1 else ("leader", "follower")
    kills = [process_kinds[i % len(process_kinds)] for i in range(workers)] + ["driver"] * drivers + ["node"] * nodes
    rng.shuffle(kills)
    kill_after = sorted(
        rng.sample(range(1, max(requests - 1, len(kills) + 1)), len(kills))
    )  # the number of videos before each kill
    remaining_kills, start = list(zip(kill_after, kills, strict=True)), time.perf_counter()
    with local_cluster(2) as cluster:
        worker_options = ("--workers", "2") if hosts == 1 else ("--hosts", str(hosts), "--mesh", f"dp={hosts}")
        options = (*worker_options, "--ray", cluster.address, "--retries", "5")
        process, num_videos, last_progress = start_batch(file, out, *options), 0, time.monotonic()
        while (status := process.poll()) != 0:
            if status is not None:
                log_text = (folder / "videos.log").read_text()  # a driver may fail if its node was just killed
                assert status == -signal.SIGKILL or "cannot be reached" in log_text.splitlines()[-1], log_text
                process = start_batch(file, out, *options)
            if (new_count := len(video_files(out))) > num_videos:
                num_videos, last_progress = new_count, time.monotonic()
            assert time.monotonic() - last_progress < MAX_STALL_SECONDS, (folder / "videos.log").read_text()
            if remaining_kills and num_videos >= remaining_kills[0][0]:
                _, kind = remaining_kills.pop(0)
                if kind == "driver":
                    process.kill()
                    process.wait()
                elif kind == "node":
                    cluster.kill(0)
                    cluster.add()
                elif processes := victims(kind, out):
                    with suppress(psutil.Error):
                        rng.choice(processes).kill()
                else:
                    remaining_kills.insert(0, (num_videos, kind))
                    time.sleep(0.1)
                    continue
                print(f"{num_videos} of {requests}: {kind} killed, load {os.getloadavg()[0]:.1f}", flush=True)
            time.sleep(0.1)
    entries = [entry["file_name"] for entry in read_manifest(out) if "error" not in entry]
    all_metadata = [read_metadata(path) for path in video_files(out)]
    return {
        "videos": len(all_metadata),
        "seeds": sorted(record["seed"] for record in all_metadata),
        "listed": sorted(entries) == [path.name for path in video_files(out)],
        "spared": len(remaining_kills),
        "failed": [entry for entry in read_manifest(out) if "error" in entry],
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="cluster", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("benchmark", choices=["rate", "overhead", "plan", "chaos"])
    parser.add_argument("--requests", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers-killed", type=int, default=10)
    parser.add_argument("--drivers-killed", type=int, default=3)
    parser.add_argument("--nodes-killed", type=int, default=2)
    parser.add_argument("--hosts", type=int, choices=[1, 2], default=1)
    arguments = parser.parse_args()
    if arguments.benchmark == "rate":
        compare_rates(arguments.requests or 200, arguments.repeats)
    elif arguments.benchmark == "overhead":
        measure_overhead(arguments.requests or 200)
    elif arguments.benchmark == "plan":
        measure_plan(arguments.requests or 10_000)
    else:
        with tempfile.TemporaryDirectory() as folder:
            kills = arguments.workers_killed, arguments.drivers_killed, arguments.nodes_killed
            outcome = chaos(Path(folder), arguments.requests or 200, *kills, hosts=arguments.hosts)
            assert outcome["seeds"] == list(range(arguments.requests or 200))
            print({name: value for name, value in outcome.items() if name != "seeds"})


if __name__ == "__main__":
    main()
