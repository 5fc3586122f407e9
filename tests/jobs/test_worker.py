# SPDX-License-Identifier: Apache-2.0
"""The worker of a job store: every job ends once, whatever fails, is cancelled or disconnected."""

import threading
import time
from functools import partial

import pytest

from tests.jobs.makers import FileMaker
from tests.support.words import has_line_with_words
from wanjax.jobs import worker as module
from wanjax.jobs.sharing import BATCH_FILE, SERVE_FILE, join_namespace, try_join_namespace
from wanjax.jobs.store import COMPLETED, FAILED, QUEUED, RUNNING, JobStore, NewJob, NotFound, Signal
from wanjax.jobs.worker import Lease, work

PATIENCE = 60  # seconds


@pytest.fixture(autouse=True)
def quick_heartbeats(monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT_INTERVAL", 0.02)
    monkeypatch.setattr(module, "POLL_INTERVAL", 0.01)


@pytest.fixture
def store(tmp_path):
    store = JobStore(str(tmp_path / "jobs.sqlite"))
    yield store
    store.close()


@pytest.fixture
def maker(tmp_path):
    return FileMaker(tmp_path)


def new_job(number, prompt="a", batch="same"):
    return NewJob(f"v{number}", {"settings": {"prompt": prompt}}, "nano", f"v{number}/video.mp4", batch)


def fill(store, *prompts):
    store.add_all([new_job(number, prompt) for number, prompt in enumerate(prompts)])


def outcomes(store, count):
    """Return the status, the error code and the attempts of each job."""
    jobs = [store.get(f"v{number}") for number in range(count)]
    return [(job.status, job.error and job.error["code"], job.attempts) for job in jobs]


def start_worker(store, maker, **options):
    """Start a worker in a thread; return the thread, and an event that ends the worker."""
    exit_requested = threading.Event()
    thread = threading.Thread(
        target=work, args=(store, maker), kwargs={"exit_requested": exit_requested.is_set, **options}, daemon=True
    )
    thread.start()
    return thread, exit_requested


def wait(condition):
    end = time.monotonic() + PATIENCE
    while not (result := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return result


@pytest.mark.parametrize("max_batch", [1, 32])
def test_jobs_are_made_in_order_and_finished(store, maker, max_batch):
    fill(store, "a", "b", "c")
    work(store, maker, max_batch=max_batch, until_empty=True)
    assert maker.started_ids() == ["v0", "v1", "v2"]
    assert outcomes(store, 3) == [(COMPLETED, None, 1)] * 3
    assert maker.runs == [["v0", "v1", "v2"]] if max_batch > 1 else [["v0"], ["v1"], ["v2"]]
    progress = store.get("v1").progress
    assert (progress["progress"], progress["stage_total"]) == (100, 4)
    assert progress["worker"].count(":") == 1
    assert store.stats().workers == {}


def test_a_failing_job_does_not_fail_others(store, maker):
    """After a failed run, each job is made alone. Wrong requests fail at once, and other errors are retried."""
    fill(store, "a", "fail once", "wrong", "fail", "e")
    work(store, maker, max_batch=32, retries=2, until_empty=True)
    once = (COMPLETED, None, 1)
    assert outcomes(store, 5) == [once, once, (FAILED, "error", 1), (FAILED, "error", 3), once]
    assert maker.started_ids().count("v0") == 1
    assert has_line_with_words(store.get("v3").error["message"], "the device is gone")


def test_a_full_disk_ends_the_worker_and_the_other_jobs_stay_queued(store, maker):
    fill(store, "full", "b", "c")
    work(store, maker, max_batch=32, until_empty=True)
    assert outcomes(store, 3) == [(FAILED, "storage", 1), (QUEUED, None, 0), (QUEUED, None, 0)]


def test_a_job_is_finished_by_the_existing_file_of_a_dead_worker(store, maker, tmp_path):
    fill(store, "a")
    store.register("dead", "ready", {})
    assert store.lease("dead", ["nano"])
    (tmp_path / "v0").mkdir()
    (tmp_path / "v0" / "video.mp4").write_text("whole")
    store.requeue_lost("dead")
    work(store, maker, until_empty=True)
    assert maker.started_ids() == []
    assert outcomes(store, 1) == [(COMPLETED, None, 2)]


def test_a_worker_finishes_its_leased_jobs_if_the_queue_is_empty(store, maker):
    """A crash of the database may have lost the end of its last job."""
    fill(store, "a")
    store.register("w", "ready", {})
    assert store.lease("w", ["nano"])
    work(store, maker, name="w", max_batch=32, until_empty=True)
    assert outcomes(store, 1) == [(COMPLETED, None, 1)]


def test_a_job_that_kills_its_workers_fails(store, maker):
    fill(store, "die", "b")
    for _ in range(2):
        with pytest.raises(SystemExit):
            work(store, maker, attempts=2)
    assert outcomes(store, 2) == [(QUEUED, None, 2), (QUEUED, None, 0)]
    work(store, maker, attempts=2, until_empty=True)
    assert [end[:2] for end in outcomes(store, 2)] == [(FAILED, "server_stopped"), (COMPLETED, None)]
    assert has_line_with_words(store.get("v0").error["message"], "2 times")


@pytest.mark.parametrize("max_batch", [1, 32])
def test_a_job_is_cancelled_between_two_steps_and_the_others_continue(store, tmp_path, max_batch):
    maker = FileMaker(tmp_path, seconds=0.5)
    fill(store, "a", "b", "c")
    thread, exit_requested = start_worker(store, maker, max_batch=max_batch)
    wait(lambda: store.get("v0").progress.get("stage"))
    store.cancel("v0")
    wait(lambda: all(store.get(f"v{number}").is_over for number in range(3)))
    exit_requested.set()
    thread.join(PATIENCE)
    assert [end[:2] for end in outcomes(store, 3)] == [(FAILED, "cancelled"), (COMPLETED, None), (COMPLETED, None)]
    assert not (tmp_path / "v0" / "video.mp4").exists()


def test_a_job_that_is_removed_while_it_runs_does_not_return(store, tmp_path):
    maker = FileMaker(tmp_path, seconds=0.5)
    fill(store, "a", "b")
    thread, exit_requested = start_worker(store, maker)
    wait(lambda: store.get("v0").progress.get("stage"))
    store.remove("v0")
    wait(lambda: store.get("v1").is_over)
    exit_requested.set()
    thread.join(PATIENCE)
    with pytest.raises(NotFound):
        store.get("v0")
    assert [job.id for job in store.deletable_jobs()] == ["v0"]  # so that their files are removed


def test_a_drained_worker_requeues_its_jobs_within_a_step(store, tmp_path):
    """Either its process or the database asks it to drain."""
    maker = FileMaker(tmp_path, seconds=4.0)
    fill(store, "a", "b")
    for by_database in (False, True):
        thread, exit_requested = start_worker(store, maker, max_batch=2, name=f"w{by_database}")
        wait(lambda: store.get("v0").status == RUNNING)
        start = time.monotonic()
        store.drain(f"w{by_database}") if by_database else exit_requested.set()
        thread.join(PATIENCE)
        assert time.monotonic() - start < 3
        assert outcomes(store, 2) == [(QUEUED, None, 0)] * 2
        assert store.stats().workers == {}


def test_the_file_of_a_worker_disconnected_before_it_finishes_is_used(store, tmp_path, monkeypatch):
    """Its lease expires, another worker finishes the job by the file, and later calls of the first have no effect."""
    disconnected, reconnected = threading.Event(), threading.Event()

    class DisconnectedStore(JobStore):
        def heartbeat(self, *arguments):
            disconnected.is_set() and reconnected.wait(PATIENCE)
            return super().heartbeat(*arguments)

        def finish(self, *arguments):
            disconnected.set()
            reconnected.wait(PATIENCE)
            return super().finish(*arguments)

    fill(store, "a")
    first, second = FileMaker(tmp_path), FileMaker(tmp_path)
    thread, exit_requested = start_worker(DisconnectedStore(store.url), first, name="first", ttl=0.5)
    assert disconnected.wait(PATIENCE)
    wait(lambda: (store.requeue_expired(), store.get("v0").status == QUEUED)[1])
    work(store, second, name="second", until_empty=True)
    assert store.get("v0").status == COMPLETED
    reconnected.set()
    exit_requested.set()
    thread.join(PATIENCE)
    assert (first.runs, second.runs) == ([["v0"]], [])
    assert outcomes(store, 1) == [(COMPLETED, None, 2)]
    assert (tmp_path / "v0" / "video.mp4").read_text() == "v0"


def test_a_worker_whose_lease_ended_stops_and_registers_again(store, tmp_path):
    """Another worker has the job, for example after a suspend; the worker makes the next job."""
    maker = FileMaker(tmp_path, seconds=0.5)
    fill(store, "a")
    thread, exit_requested = start_worker(store, maker, name="slow")
    wait(lambda: store.get("v0").progress.get("stage"))
    store.requeue_lost("slow")
    store.register("other", "ready", {})
    assert [job.id for job in store.lease("other", ["nano"])] == ["v0"]
    store.add(new_job(1, batch=""))
    wait(lambda: store.get("v1").is_over)
    assert store.get("v0").worker == "other"
    assert not (tmp_path / "v0" / "video.mp4").exists()
    exit_requested.set()
    thread.join(PATIENCE)


def test_a_worker_with_a_folder_of_another_database_takes_no_job(tmp_path, maker):
    """The folder has no namespace of a batch yet; the worker says so, and starts when a batch adds it."""
    store, second, worker_store = (JobStore(str(tmp_path / "jobs.sqlite")) for _ in range(3))
    folders = [tmp_path / name for name in ("other", "served")]
    for folder in folders:
        folder.mkdir()
    join_namespace(second, folders[0], BATCH_FILE)
    join_namespace(store, folders[1], SERVE_FILE)
    fill(second, "a")
    notes, check = [], partial(try_join_namespace, folder=folders[1], name=BATCH_FILE)
    thread, exit_requested = start_worker(worker_store, maker, try_join_namespace=check, note=notes.append)
    time.sleep(0.2)
    assert (maker.started_ids(), outcomes(second, 1)) == ([], [(QUEUED, None, 0)])
    assert [has_line_with_words(note, f"{folders[1]} wanjax batch {worker_store.name} --out") for note in notes] == [
        True
    ]
    join_namespace(store, folders[1], BATCH_FILE)
    fill(store, "b", "c")
    wait(lambda: store.get("v1").is_over)
    exit_requested.set()
    thread.join(PATIENCE)
    assert (outcomes(store, 2), outcomes(second, 1)) == ([(COMPLETED, None, 1)] * 2, [(QUEUED, None, 0)])


def test_several_workers_lease_fewer_jobs_towards_the_end(store, tmp_path):
    """A single worker leases up to its limit; several workers share the waiting jobs."""
    fill(store, *"a" * 100)
    store.register("other", "ready", {})
    maker = FileMaker(tmp_path)
    work(store, maker, max_batch=32, until_empty=True)
    sizes = list(map(len, maker.runs))
    assert sum(sizes) == 100
    assert sizes[0] == 13
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def test_progress_never_goes_back(store):
    lease = Lease(store, "w")
    lease.report(progress=40, stage="denoise")
    lease.report(progress=10, stage="encode")
    assert lease.progress == {"progress": 40, "stage": "encode"}
    lease.close()


def test_the_newest_progress_is_reported_and_a_lost_job_ends(store):
    fill(store, "a")
    store.register("w", "ready", {})
    [job] = store.lease("w", ["nano"])
    lease = Lease(store, "w")
    lease.begin(job.id)
    for done in range(50):
        lease.report(progress=done)
    wait(lambda: store.get("v0").progress.get("progress") == 49)
    store.requeue_lost("w")
    wait(lease.should_stop)
    assert not lease.is_cancelled()
    assert lease._signal is Signal.LOST
    lease.close()
