# SPDX-License-Identifier: Apache-2.0
"""A pool replaces workers that die, loses no job, and ends its workers when it ends in any way."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial

import psutil
import pytest

from tests.jobs.makers import die, make_files
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.jobs import pool as module
from wanjax.jobs.pool import MAX_DEATHS, Autoscaler, LocalWorker, Pool
from wanjax.jobs.store import COMPLETED, QUEUED, RUNNING, JobStore, NewJob, Unavailable

PATIENCE = 120  # seconds


@pytest.fixture
def store(tmp_path):
    store = JobStore(str(tmp_path / "jobs.sqlite"))
    yield store
    store.close()


def fill(store, count, first=0):
    store.add_all(
        [
            NewJob(f"v{number}", {"settings": {"prompt": "a"}}, "nano", f"v{number}.mp4", "same")
            for number in range(first, first + count)
        ]
    )


def poll_until(pool, condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, pool.store.stats()
        pool.poll()
        time.sleep(0.02)


def count_completed_jobs(store):
    return store.stats().jobs.get(COMPLETED, 0)


class FakeWorker:
    """A worker that does nothing until the test ends it."""

    def __init__(self, number):
        self.name, self.reason, self.terminated, self.killed = f"w{number}", None, False, False

    def exit_reason(self):
        return self.reason

    def terminate(self):
        self.terminated = True

    def kill(self):
        self.killed = True


@pytest.mark.parametrize("kills", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_workers_that_are_killed_are_replaced_and_each_job_ends_once(store, tmp_path, kills):
    count, notes = 4 * kills, []
    fill(store, count)
    options = {"max_batch": 4, "attempts": kills + 1}
    start = partial(LocalWorker, store, partial(make_files, tmp_path, 0.1), options)
    pool = Pool(store, lambda number: start(number=number), Autoscaler(2, 2), notes.append)
    for kill in range(kills):
        poll_until(pool, lambda: store.stats().jobs.get(RUNNING))
        with suppress(ProcessLookupError):
            os.kill(pool.workers[kill % 2].pid, signal.SIGKILL)
        completed = count_completed_jobs(store)
        poll_until(pool, lambda completed=completed: count_completed_jobs(store) > min(completed, count - 1))
    poll_until(pool, lambda: count_completed_jobs(store) == count)
    pool.close()
    assert sorted(job.id for job in store.changes(0, limit=1000)) == sorted(f"v{number}" for number in range(count))
    assert {path.name for path in tmp_path.glob("*.mp4")} == {f"v{number}.mp4" for number in range(count)}
    assert sum("starting another one" in note for note in notes) >= kills / 2
    assert store.stats().workers == {}


def test_workers_that_die_at_once_end_the_pool(store):
    pool = Pool(store, lambda number: LocalWorker(store, die, {}), Autoscaler(1, 1), print)
    with pytest.raises(WanjaxError, match=line_with_words(f"{MAX_DEATHS} workers 9")):
        pool.run(lambda: False)
    pool.close()


def test_a_pool_survives_an_outage_of_the_database(store, monkeypatch):
    """The job of a worker that died meanwhile is requeued when the database is back."""
    monkeypatch.setattr(module, "POLL_INTERVAL", 0.01)
    workers, calls = [], []

    def start(number):
        workers.append(FakeWorker(len(workers)))
        store.register(workers[-1].name, "ready", {})
        return workers[-1]

    fill(store, 1)
    pool = Pool(store, start, Autoscaler(1, 1), lambda note: None)
    pool.poll()
    assert store.lease("w0", ["nano"])
    workers[0].reason = "killed"
    lost, stats = store.requeue_lost, store.stats

    def unavailable(*arguments):
        calls.append(arguments)
        raise Unavailable("the database is out of reach")

    store.requeue_lost = store.stats = unavailable
    pool.run(lambda: len(calls) > 2)
    store.requeue_lost, store.stats = lost, stats
    pool.run(lambda: len(workers) == 2)
    assert [store.get("v0").status, store.get("v0").error["message"]] == [QUEUED, "killed"]
    assert workers[0].killed


def test_the_number_of_workers_follows_the_queue(store, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    workers = []
    pool = Pool(
        store, lambda number: workers.append(FakeWorker(number)) or workers[-1], Autoscaler(1, 3), lambda note: None
    )

    def poll_after(seconds=0.0):
        now[0] += seconds
        pool.poll()
        return [worker.terminated for worker in workers]

    fill(store, 5)
    assert poll_after() == [False]
    assert poll_after(module.SCALE_UP_DELAY) == [False] * 3
    for number in range(5):
        store.cancel(f"v{number}")
    assert poll_after() == [False] * 3
    assert poll_after(module.SCALE_DOWN_DELAY - 1) == [False] * 3
    assert poll_after(1) == [False, True, True]
    workers[2].reason = ""
    assert len(poll_after() and pool.workers) == 2
    fill(store, 5, first=5)
    poll_after()
    poll_after(module.SCALE_UP_DELAY)
    assert len(pool.workers) == 3
    assert len(workers) == 4  # a worker that is still ending keeps its number


def test_workers_that_wait_for_their_folder_are_reported_once(store, monkeypatch):
    now, notes = [0.0], []
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    pool = Pool(store, FakeWorker, Autoscaler(2, 2), notes.append)
    for seconds in (0, module.WAITING_NOTE_DELAY + 1, module.WAITING_NOTE_DELAY + 1):
        now[0] += seconds
        pool.poll()
    assert len(notes) == 1
    for number in range(2):
        store.register(f"w{number}", "ready", {})
    now[0] += module.WAITING_NOTE_DELAY + 1
    pool.poll()
    assert len(notes) == 1


SUPERVISOR = """
import sys, time
from functools import partial
from tests.jobs.makers import make_files
from wanjax.jobs.pool import Autoscaler, LocalWorker, Pool
from wanjax.jobs.store import JobStore

if __name__ == "__main__":
    store = JobStore(sys.argv[1])
    make_maker = partial(make_files, sys.argv[2], 2.0)
    pool = Pool(store, lambda number: LocalWorker(store, make_maker, {}), Autoscaler(1, 1), print)
    pool.run(lambda: False)
"""


def test_workers_end_with_a_supervisor_that_is_killed(store, tmp_path):
    """They end within a step, and their jobs are queued without a counted attempt."""
    fill(store, 2)
    (tmp_path / "supervisor.py").write_text(SUPERVISOR)
    command = [sys.executable, tmp_path / "supervisor.py", store.url, tmp_path]
    supervisor = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.getcwd()})
    end = time.monotonic() + PATIENCE
    while store.get("v0").status != RUNNING:
        assert time.monotonic() < end
        time.sleep(0.05)
    workers = psutil.Process(supervisor.pid).children(recursive=True)
    supervisor.kill()
    supervisor.wait()
    psutil.wait_procs(workers, timeout=PATIENCE)
    assert not any(worker.is_running() for worker in workers)
    assert (store.get("v0").status, store.get("v0").attempts) == (QUEUED, 0)
