# SPDX-License-Identifier: Apache-2.0
"""The worker of a job store: every job ends once, whatever fails, is cancelled or cut off."""

import threading
import time
from functools import partial

import pytest

from tests.jobs.makers import FileMaker
from tests.support.words import has_line_with
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


def new(number, prompt="a", batch="same"):
    return NewJob(f"v{number}", {"settings": {"prompt": prompt}}, "nano", f"v{number}/video.mp4", batch)


def fill(store, *prompts):
    store.add_all([new(number, prompt) for number, prompt in enumerate(prompts)])


def ends(store, count):
    """Return each job's status, code of its error and attempts."""
    jobs = [store.get(f"v{number}") for number in range(count)]
    return [(job.status, job.error and job.error["code"], job.attempts) for job in jobs]


def at_work(store, maker, **how):
    """Start a worker in a thread; return it with what ends it."""
    exit_requested = threading.Event()
    thread = threading.Thread(
        target=work, args=(store, maker), kwargs={"exit_requested": exit_requested.is_set, **how}, daemon=True
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
    assert maker.begun() == ["v0", "v1", "v2"]
    assert ends(store, 3) == [(COMPLETED, None, 1)] * 3
    assert maker.runs == [["v0", "v1", "v2"]] if max_batch > 1 else [["v0"], ["v1"], ["v2"]]
    progress = store.get("v1").progress
    assert (progress["progress"], progress["stage_total"]) == (100, 4)
    assert progress["worker"].count(":") == 1
    assert store.stats().workers == {}


def test_a_failing_job_does_not_fail_others(store, maker):
    """Of a run that fails each job is made alone: one whose fault it is fails at once, another one is tried again."""
    fill(store, "a", "fail once", "wrong", "fail", "e")
    work(store, maker, max_batch=32, retries=2, until_empty=True)
    once = (COMPLETED, None, 1)
    assert ends(store, 5) == [once, once, (FAILED, "error", 1), (FAILED, "error", 3), once]
    assert maker.begun().count("v0") == 1
    assert has_line_with(store.get("v3").error["message"], "the device is gone")


def test_a_full_disk_ends_the_worker_and_the_other_jobs_wait(store, maker):
    fill(store, "full", "b", "c")
    work(store, maker, max_batch=32, until_empty=True)
    assert ends(store, 3) == [(FAILED, "storage", 1), (QUEUED, None, 0), (QUEUED, None, 0)]


def test_a_job_is_finished_by_the_file_of_a_worker_that_died(store, maker, tmp_path):
    fill(store, "a")
    store.register("dead", "ready", {})
    assert store.lease("dead", ["nano"])
    (tmp_path / "v0").mkdir()
    (tmp_path / "v0" / "video.mp4").write_text("whole")
    store.requeue_lost("dead")
    work(store, maker, until_empty=True)
    assert maker.begun() == []
    assert ends(store, 1) == [(COMPLETED, None, 2)]


def test_a_worker_finishes_what_it_has_where_no_job_waits(store, maker):
    """As after a crash of the database that lost the end of its last job."""
    fill(store, "a")
    store.register("w", "ready", {})
    assert store.lease("w", ["nano"])
    work(store, maker, name="w", max_batch=32, until_empty=True)
    assert ends(store, 1) == [(COMPLETED, None, 1)]


def test_a_job_that_kills_its_workers_fails(store, maker):
    fill(store, "die", "b")
    for _ in range(2):
        with pytest.raises(SystemExit):
            work(store, maker, attempts=2)
    assert ends(store, 2) == [(QUEUED, None, 2), (QUEUED, None, 0)]
    work(store, maker, attempts=2, until_empty=True)
    assert [end[:2] for end in ends(store, 2)] == [(FAILED, "server_stopped"), (COMPLETED, None)]
    assert has_line_with(store.get("v0").error["message"], "2 times")


@pytest.mark.parametrize("max_batch", [1, 32])
def test_a_job_is_cancelled_between_two_steps_and_the_others_continue(store, tmp_path, max_batch):
    maker = FileMaker(tmp_path, seconds=0.5)
    fill(store, "a", "b", "c")
    thread, exit_requested = at_work(store, maker, max_batch=max_batch)
    wait(lambda: store.get("v0").progress.get("stage"))
    store.cancel("v0")
    wait(lambda: all(store.get(f"v{number}").is_over for number in range(3)))
    exit_requested.set()
    thread.join(PATIENCE)
    assert [end[:2] for end in ends(store, 3)] == [(FAILED, "cancelled"), (COMPLETED, None), (COMPLETED, None)]
    assert not (tmp_path / "v0" / "video.mp4").exists()


def test_a_job_that_is_removed_while_it_runs_does_not_return(store, tmp_path):
    maker = FileMaker(tmp_path, seconds=0.5)
    fill(store, "a", "b")
    thread, exit_requested = at_work(store, maker)
    wait(lambda: store.get("v0").progress.get("stage"))
    store.remove("v0")
    wait(lambda: store.get("v1").is_over)
    exit_requested.set()
    thread.join(PATIENCE)
    with pytest.raises(NotFound):
        store.get("v0")
    assert [job.id for job in store.deletable_jobs()] == ["v0"]  # for whoever removes files


def test_a_drained_worker_requeues_its_jobs_within_a_step(store, tmp_path):
    """By the word of its process, or by the database's."""
    maker = FileMaker(tmp_path, seconds=4.0)
    fill(store, "a", "b")
    for by_database in (False, True):
        thread, exit_requested = at_work(store, maker, max_batch=2, name=f"w{by_database}")
        wait(lambda: store.get("v0").status == RUNNING)
        start = time.monotonic()
        store.drain(f"w{by_database}") if by_database else exit_requested.set()
        thread.join(PATIENCE)
        assert time.monotonic() - start < 3
        assert ends(store, 2) == [(QUEUED, None, 0)] * 2
        assert store.stats().workers == {}


def test_a_worker_cut_off_between_publishing_and_finishing_leaves_its_file(store, tmp_path, monkeypatch):
    """Its lease ends, another worker finishes the job by the file, and what the first one says then changes nothing."""
    cut_off, reached = threading.Event(), threading.Event()

    class CutOff(JobStore):
        def heartbeat(self, *arguments):
            cut_off.is_set() and reached.wait(PATIENCE)
            return super().heartbeat(*arguments)

        def finish(self, *arguments):
            cut_off.set()
            reached.wait(PATIENCE)
            return super().finish(*arguments)

    fill(store, "a")
    first, second = FileMaker(tmp_path), FileMaker(tmp_path)
    thread, exit_requested = at_work(CutOff(store.url), first, name="first", ttl=0.5)
    assert cut_off.wait(PATIENCE)
    wait(lambda: (store.requeue_expired(), store.get("v0").status == QUEUED)[1])
    work(store, second, name="second", until_empty=True)
    assert store.get("v0").status == COMPLETED
    reached.set()
    exit_requested.set()
    thread.join(PATIENCE)
    assert (first.runs, second.runs) == ([["v0"]], [])
    assert ends(store, 1) == [(COMPLETED, None, 2)]
    assert (tmp_path / "v0" / "video.mp4").read_text() == "v0"


def test_a_worker_whose_lease_ended_stops_and_registers_again(store, tmp_path):
    """As after a sleep of the machine: the job is another's, and the next one is made."""
    maker = FileMaker(tmp_path, seconds=0.5)
    fill(store, "a")
    thread, exit_requested = at_work(store, maker, name="slow")
    wait(lambda: store.get("v0").progress.get("stage"))
    store.requeue_lost("slow")
    store.register("other", "ready", {})
    assert [job.id for job in store.lease("other", ["nano"])] == ["v0"]
    store.add(new(1, batch=""))
    wait(lambda: store.get("v1").is_over)
    assert store.get("v0").worker == "other"
    assert not (tmp_path / "v0" / "video.mp4").exists()
    exit_requested.set()
    thread.join(PATIENCE)


def test_a_worker_without_its_folder_says_why_and_takes_no_job(tmp_path, maker):
    """Others of the database have a place, and this one's folder has none; nor has a server's folder a batch's."""
    store, second, lone = (JobStore(str(tmp_path / "jobs.sqlite")) for _ in range(3))
    folders = [tmp_path / name for name in ("other", "own")]
    for folder in folders:
        folder.mkdir()
    join_namespace(second, folders[0], BATCH_FILE)
    join_namespace(store, folders[1], SERVE_FILE)
    fill(second, "a")
    notes, why_not = [], partial(try_join_namespace, folder=folders[1], name=BATCH_FILE)
    thread, exit_requested = at_work(lone, maker, try_join_namespace=why_not, note=notes.append)
    time.sleep(0.2)
    assert (maker.begun(), ends(second, 1)) == ([], [(QUEUED, None, 0)])
    assert [has_line_with(note, f"{folders[1]} wanjax batch {lone.name} --out") for note in notes] == [True]
    join_namespace(store, folders[1], BATCH_FILE)
    fill(store, "b", "c")
    wait(lambda: store.get("v1").is_over)
    exit_requested.set()
    thread.join(PATIENCE)
    assert (ends(store, 2), ends(second, 1)) == ([(COMPLETED, None, 1)] * 2, [(QUEUED, None, 0)])


def test_several_workers_lease_fewer_jobs_towards_the_end(store, tmp_path):
    """One worker leases as many as it may; of several each leases a part of what waits."""
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
