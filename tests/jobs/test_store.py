# SPDX-License-Identifier: Apache-2.0
"""The job store, with the same tests on SQLite and on PostgreSQL."""

import multiprocessing
import pickle
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote

import psutil
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.postgres import PASSWORD, STRICT, Server
from tests.support.words import has_line_with_words, line_with_words
from wanjax.errors import WanjaxError
from wanjax.jobs import databases
from wanjax.jobs import store as stores
from wanjax.jobs.databases import DatabaseError, mask_password, public_url
from wanjax.jobs.sharing import BATCH_FILE, SERVE_FILE, join_namespace
from wanjax.jobs.store import (
    ARRIVING,
    CANCELLED,
    COMPLETED,
    FAILED,
    QUEUED,
    REMOVED,
    RUNNING,
    STOPPED,
    JobStore,
    NewJob,
    NotFound,
    QueueFull,
    Signal,
    Unavailable,
)

ERROR = {"code": "server_error", "message": "it failed"}


def new_job(name: int | str, batch: str = "", model: str = "nano") -> NewJob:
    return NewJob(f"v{name}", {"settings": {"prompt": f"p{name}"}}, model, f"v{name}/video.mp4", batch)


def register(store: JobStore, *names: str, ttl: float = 30.0, models: tuple[str, ...] = ("nano",)) -> None:
    for name in names:
        store.register(name, "ready", {"models": list(models)}, ttl)


def lease_ids(store: JobStore, worker: str, **options: Any) -> list[str]:
    return [job.id for job in store.lease(worker, ["nano"], **options)]


def test_jobs_are_made_in_order_and_each_once(store: JobStore) -> None:
    register(store, "a", "b")
    for number in range(3):
        store.add(new_job(number))
    assert store.add(new_job(0)).position == store.get("v0").position  # a retry after a lost response
    assert [store.get(f"v{number}").jobs_ahead for number in range(3)] == [0, 1, 2]
    assert lease_ids(store, "a") == ["v0"]
    assert lease_ids(store, "a") == ["v0"]  # a retry after a lost response
    assert store.get("v0").attempts == 1
    assert [store.get(f"v{number}").jobs_ahead for number in range(3)] == [None, 1, 2]
    assert lease_ids(store, "b") == ["v1"]
    assert store.finish("a", "v0", {"stage_seconds": {"decode": 2.0, "denoise": 3.0}})
    assert not store.finish("a", "v0", {})
    assert store.get("v0").completed_at >= store.get("v0").created_at > time.time() - 60
    assert lease_ids(store, "a") == ["v2"]
    assert store.stats().counters == {COMPLETED: 1, "seconds_decode": 2.0, "seconds_denoise": 3.0}
    assert store.stats().jobs == {COMPLETED: 1, RUNNING: 2}


def test_a_job_is_queued_when_its_files_have_arrived(store: JobStore) -> None:
    store.add(new_job(0), is_arriving=True)
    store.add(new_job(1))
    with pytest.raises(NotFound):
        store.get("v0")
    with pytest.raises(NotFound):
        store.cancel("v0")
    assert [job.id for job in store.page(9)[0]] == ["v1"]
    assert store.add(new_job(0)).status == QUEUED
    assert [job.id for job in store.page(9, newest_first=False)[0]] == ["v1", "v0"]
    store.add(new_job(2), is_arriving=True)
    assert store.remove("v2").status == ARRIVING  # the request was refused


def test_a_queue_limit_holds_with_concurrent_additions(store: JobStore, url: str) -> None:
    stores = [JobStore(url) for _ in range(4)]  # each has one transaction at a time

    def add(number: int) -> int:
        try:
            stores[number % 4].add(new_job(number), limit=5)
        except QueueFull:
            return 0
        return 1

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(add, range(40))) == 5
    assert store.stats().jobs == {QUEUED: 5}
    for each in stores:
        each.close()


def test_jobs_of_dead_workers_are_requeued_first(store: JobStore) -> None:
    register(store, "a", "b")
    store.add_all([new_job(number) for number in range(3)])
    assert lease_ids(store, "a") == ["v0"]
    store.requeue_lost("a", "it was killed")
    job = store.get("v0")
    assert (job.status, job.attempts, job.error) == (QUEUED, 1, {"code": STOPPED, "message": "it was killed"})
    assert lease_ids(store, "a") == []  # the worker must register again
    assert lease_ids(store, "b") == ["v0"]
    assert store.heartbeat("a", "v0", {}) is Signal.LOST
    assert not store.finish("a", "v0", {})
    assert not store.fail("a", "v0", ERROR)
    assert store.begin("a", "v0") is Signal.LOST
    assert store.get("v0").worker == "b"


def test_a_lease_that_expired_is_not_renewed(store: JobStore) -> None:
    register(store, "a", ttl=0.2)
    store.add(new_job(0))
    assert lease_ids(store, "a", ttl=0.2) == ["v0"]
    assert store.heartbeat("a", "v0", {"progress": 1}, 0.2) is Signal.CONTINUE
    time.sleep(0.3)
    assert store.workers() == []
    store.requeue_expired()
    assert store.get("v0").status == QUEUED
    assert store.heartbeat("a", "v0", {"progress": 2}) is Signal.LOST
    assert lease_ids(store, "a") == []
    store.requeue_expired()  # a second call changes nothing
    assert store.get("v0").attempts == 1


def test_cancelled_and_removed_jobs_end(store: JobStore) -> None:
    register(store, "a", "b")
    for number in range(4):
        store.add(new_job(number))
    assert lease_ids(store, "a") + lease_ids(store, "b") == ["v0", "v1"]
    assert store.cancel("v0").status == RUNNING
    assert store.cancel("v2").error["code"] == CANCELLED
    assert store.heartbeat("a", "v0", {"progress": 7}) is Signal.CANCEL
    assert store.remove("v1").status == RUNNING
    store.remove("v3")
    assert store.heartbeat("b", "v1", {}) is Signal.CANCEL
    assert store.fail("a", "v0", ERROR)
    assert store.get("v0").error["code"] == CANCELLED
    for method in (store.get, store.cancel, store.remove):
        with pytest.raises(NotFound):
            method("v1")
    assert [job.id for job in store.deletable_jobs()] == ["v3"]  # a worker still has the other job
    store.finish("b", "v1", {})
    assert sorted(job.id for job in store.deletable_jobs()) == ["v1", "v3"]
    store.purge("v3")
    assert [job.id for job in store.deletable_jobs()] == ["v1"]
    assert store.add(new_job(3)).status == REMOVED  # a removed job does not return
    assert store.stats().counters == {CANCELLED: 3, COMPLETED: 1}


def test_cancelled_jobs_of_dead_workers_end(store: JobStore) -> None:
    register(store, "a", "b")
    store.add_all([new_job(0), new_job(1)])
    assert lease_ids(store, "a") + lease_ids(store, "b") == ["v0", "v1"]
    store.cancel("v0")
    store.remove("v1")
    store.requeue_lost("a")
    store.requeue_lost("b")
    assert store.get("v0").error["code"] == CANCELLED
    assert [job.id for job in store.deletable_jobs()] == ["v1"]


def test_removed_rows_are_deleted_after_a_day(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add_all([new_job(0), new_job(1), new_job(2)])
    store.remove("v0")
    store.remove("v1")
    store.purge("v0")
    store.requeue_expired()
    assert [job.id for job in store.changes(0)] == ["v2", "v0", "v1"]
    monkeypatch.setattr(stores, "REMOVED_RETENTION", -1.0)
    store.requeue_expired()
    assert [job.id for job in store.changes(0)] == ["v2", "v1"]  # the files of v1 still exist


def test_old_failures_and_interrupted_arrivals_are_deletable(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "RETAINED_FAILURES", 2)
    for number in range(4):
        store.add(new_job(number))
        store.cancel(f"v{number}")
    store.add(new_job("x"), is_arriving=True)
    assert [job.id for job in store.deletable_jobs()] == ["v0", "v1"]
    monkeypatch.setattr(stores, "ARRIVAL_TIMEOUT", -1.0)
    assert sorted(job.id for job in store.deletable_jobs()) == ["v0", "v1", "vx"]


def test_jobs_of_one_batch_are_leased_together(store: JobStore) -> None:
    register(store, "a", "b")
    store.add_all([new_job(number, batch="even" if number % 2 == 0 else "odd") for number in range(8)])
    store.add_all([new_job(0, batch="even"), new_job(8, batch="even")])
    assert lease_ids(store, "a", limit=3) == ["v0", "v2", "v4"]
    assert store.begin("a", "v0") is Signal.CONTINUE
    assert store.begin("a", "v0") is Signal.CONTINUE  # a retry after a lost response
    assert lease_ids(store, "b", limit=9) == ["v1", "v3", "v5", "v7"]
    store.requeue_lost("a")
    assert [store.get(f"v{number}").attempts for number in (0, 2, 4)] == [1, 0, 0]
    register(store, "a")
    assert lease_ids(store, "a", limit=3) == ["v0", "v2", "v4"]
    store.cancel("v2")
    assert store.begin("a", "v2") is Signal.LOST  # it was cancelled at once
    store.requeue("b")
    assert (store.get("v1").attempts, store.get("v1").worker) == (0, "")
    store.begin("a", "v0")
    assert store.fail("a", "v0", ERROR, retries=2)
    assert (store.get("v0").status, store.get("v0").error) == (QUEUED, ERROR)
    register(store, "b")
    assert lease_ids(store, "b", limit=9) == ["v1", "v3", "v5", "v7"]
    store.begin("a", "v4")
    store.requeue("a")
    assert store.get("v4").attempts == 0
    register(store, "a")
    assert lease_ids(store, "a", limit=9) == ["v4", "v6", "v8", "v0"]  # failed jobs are retried last
    store.begin("a", "v0")
    assert store.fail("a", "v0", ERROR, retries=2)
    assert (store.get("v0").status, store.get("v0").attempts) == (FAILED, 3)


def test_finished_jobs_may_be_added_again(store: JobStore) -> None:
    register(store, "a")
    store.add_all([new_job(number) for number in range(5)])
    for id in ("v0", "v1"):
        assert lease_ids(store, "a") == [id]
        store.finish("a", id, {}) if id == "v0" else store.fail("a", id, ERROR)
    store.remove("v2")
    assert lease_ids(store, "a") == ["v3"]
    store.add_all([new_job(number, batch="x") for number in range(6)])
    jobs = {job.id: job for job in store.page(9)[0]}
    assert [jobs[f"v{number}"].batch for number in range(6)] == ["x", "x", "x", "", "", "x"]
    assert [job.id for job in sorted(jobs.values(), key=lambda job: job.position) if job.status == QUEUED] == [
        *("v4", "v0", "v1", "v2", "v5")
    ]
    assert [(job.attempts, job.cancel, job.error, job.completed_at) for job in jobs.values() if job.batch] == [
        (0, False, None, None)
    ] * 4


def test_jobs_wait_for_a_worker_of_their_model(store: JobStore) -> None:
    register(store, "a")
    store.add(new_job(0, model="other"))
    store.add(new_job(1))
    assert store.models_without_worker() == ["other"]
    assert lease_ids(store, "a") == ["v1"]
    register(store, "b", models=("other", "nano"))
    assert store.models_without_worker() == []
    assert [job.id for job in store.lease("b", ["nano", "other"])] == ["v0"]
    assert [(each.name, each.state) for each in store.workers()] == [("a", "ready"), ("b", "ready")]


def test_jobs_are_read_in_pages_and_by_changes(store: JobStore) -> None:
    register(store, "a")
    start = store.version()
    for number in range(5):
        store.add(new_job(number))
    changes = store.changes(start)
    assert [job.id for job in changes] == [f"v{number}" for number in range(5)]
    lease_ids(store, "a")
    store.remove("v3")
    assert [(job.id, job.status) for job in store.changes(changes[-1].version)] == [("v0", RUNNING), ("v3", REMOVED)]
    assert [job.id for job in store.changes(0, job_id="v4")] == ["v4"]
    before = store.version()
    store.heartbeat("a", "v0", {"progress": 1})
    [job] = store.changes(before)
    assert job.progress == {"progress": 1}
    store.heartbeat("a", "v0", {"progress": 1})  # no change
    assert store.version() == job.version
    page, more = store.page(2)
    assert ([job.id for job in page], more) == (["v4", "v2"], True)
    page, more = store.page(5, after="v2")
    assert ([job.id for job in page], more) == (["v1", "v0"], False)
    page, more = store.page(2, after="v1", newest_first=False)
    assert ([job.id for job in page], more) == (["v2", "v4"], False)
    with pytest.raises(NotFound):
        store.page(2, after="v3")


def test_a_search_reads_all_jobs_and_pages_its_matches(store: JobStore) -> None:
    store.add_all([new_job(number) for number in range(1200)])

    def matches(request: Mapping[str, Any]) -> bool:
        return request["settings"]["prompt"].endswith("7")

    page, more = store.page(20, matches=matches)
    assert ([job.id for job in page], more) == ([f"v{number}" for number in range(1197, 997, -10)], True)
    page, more = store.page(1000, matches=matches, newest_first=False, after="v1000")
    assert ([job.id for job in page], more) == ([f"v{number}" for number in range(1007, 1200, 10)], False)
    assert store.page(5, matches=lambda request: False) == ([], False)


def test_pages_of_a_long_queue_are_read_quickly(store: JobStore) -> None:
    store.add_all([new_job(number) for number in range(5000)])
    start = time.perf_counter()
    page, more = store.page(20, newest_first=False)
    assert time.perf_counter() - start < 1  # separate counts took four seconds
    assert [job.jobs_ahead for job in page] == list(range(20))
    assert more
    assert store.get("v4999").jobs_ahead is None  # only the first 1,000 jobs have a number


def test_a_draining_worker_requeues_its_jobs(store: JobStore) -> None:
    register(store, "a")
    store.add(new_job(0))
    lease_ids(store, "a")
    store.drain("a")
    assert store.heartbeat("a", "v0", {"stage": "denoise"}) is Signal.DRAIN
    store.requeue("a")
    job = store.get("v0")
    assert (job.status, job.attempts, job.progress) == (QUEUED, 0, {})
    assert lease_ids(store, "a") == []
    assert store.workers() == []


def test_a_draining_worker_gets_no_more_jobs(store: JobStore) -> None:
    register(store, "a")
    store.drain("a")
    register(store, "a")  # its next heartbeat
    store.add(new_job(0))
    assert lease_ids(store, "a") == []
    assert [each.draining for each in store.workers()] == [True]


def test_two_namespaces_of_one_database_are_separate(store: JobStore, url: str, tmp_path: Path) -> None:
    """A server and a batch, or two batches, do not affect each other's jobs, workers and counters."""
    second = JobStore(url)
    for each, name in ((store, "one"), (second, "two")):
        (tmp_path / name).mkdir()
        join_namespace(each, tmp_path / name, BATCH_FILE)
        each.add_all([new_job(0, batch=name), new_job(1, batch=name)])
        register(each, f"{name} a", f"{name} b")
    again = JobStore(url)
    join_namespace(again, tmp_path / "one", BATCH_FILE)
    assert again.namespace == store.namespace != second.namespace
    assert lease_ids(store, "one a") + lease_ids(store, "one b") == ["v0", "v1"]
    assert lease_ids(store, "one b") == ["v1"]
    assert (store.num_waiting(), second.num_waiting()) == (0, 2)
    assert [second.get(f"v{number}").jobs_ahead for number in range(2)] == [0, 1]
    assert (store.stats().jobs, second.stats().jobs) == ({RUNNING: 2}, {QUEUED: 2})
    assert [[worker.name for worker in each.workers()] for each in (store, second)] == [
        ["one a", "one b"],
        ["two a", "two b"],
    ]
    store.finish("one a", "v0", {"stage_seconds": {"decode": 1.0}})
    second.cancel("v0")
    second.cancel_all(["v0", "v1"])
    assert [each.stats().counters for each in (store, second)] == [
        {COMPLETED: 1, "seconds_decode": 1.0},
        {CANCELLED: 2},
    ]
    assert (store.get("v1").cancel, store.get("v0").status) == (False, COMPLETED)
    second.remove("v1")
    second.purge("v1")
    second.add(new_job(2, model="other"), limit=1)
    with pytest.raises(NotFound):
        store.get("v2")
    assert [[job.id for job in each.page(9)[0]] for each in (store, second)] == [["v1", "v0"], ["v2", "v0"]]
    assert {job.id for job in again.changes(0)} == {"v0", "v1"}
    assert (store.models_without_worker(), second.models_without_worker()) == ([], ["other"])
    assert store.deletable_jobs() == []
    second.requeue_lost("two a")
    second.requeue_expired()
    assert store.get("v1").worker == "one b"
    again.close()
    second.close()


def test_a_store_with_another_retry_limit_shares_the_connections(store: JobStore) -> None:
    retrying = store.with_retry_seconds(9.0)
    assert (retrying.retry_seconds, store.retry_seconds) == (9.0, stores.RETRY_SECONDS)
    assert retrying._database is store._database


def test_concurrent_processes_give_a_folder_one_namespace(store: JobStore, url: str, tmp_path: Path) -> None:
    stores = [JobStore(url) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda each: join_namespace(each, tmp_path, SERVE_FILE), stores))
    assert len({each.namespace for each in stores}) == 1
    for each in stores:
        each.close()


# Concurrency


def finish_all_jobs(url: str, name: str, results: Any) -> None:
    store = JobStore(url, retry_seconds=60)
    store.register(name, "ready", {})
    result = []
    while jobs := store.lease(name, ["nano"]):
        result.append(jobs[0].id)
        store.heartbeat(name, jobs[0].id, {"stage": "denoise", "progress": len(result)})
        assert store.finish(name, jobs[0].id, {})
    results.put(result)
    store.close()


def test_processes_share_the_jobs(store: JobStore, url: str) -> None:
    store.add_all([new_job(number) for number in range(100)])
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=finish_all_jobs, args=(url, f"w{number}", results)) for number in range(2)]
    for worker in workers:
        worker.start()
    result = [id for _ in workers for id in results.get(timeout=120)]
    for worker in workers:
        worker.join()
    assert sorted(result) == sorted(f"v{number}" for number in range(100))
    versions = [job.version for job in store.changes(0, limit=1000)]
    assert len(set(versions)) == 100


def test_a_reader_of_changes_misses_none(store: JobStore, url: str) -> None:
    stopped, changes = threading.Event(), {}

    def read_changes() -> None:
        since = 0
        while not stopped.is_set() or store.changes(since):
            for job in store.changes(since):
                changes[job.id], since = job.status, job.version

    def write(number: int) -> None:
        worker_store = JobStore(url, retry_seconds=60)
        register(worker_store, name := f"w{number}")
        for count in range(15):
            worker_store.add(new_job(f"{number}-{count}"))
            for id in lease_ids(worker_store, name):
                worker_store.finish(name, id, {})
        worker_store.close()

    reader = threading.Thread(target=read_changes)
    reader.start()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    stopped.set()
    reader.join(60)
    assert changes == {job.id: job.status for job in store.changes(0, limit=1000)}
    assert len(changes) == 60


def test_concurrent_workers_cause_no_deadlock(postgres: Server) -> None:
    with postgres.database() as url:
        first = JobStore(url, retry_seconds=60)
        first.add_all([new_job(number, batch="x") for number in range(120)])

        def work(number: int) -> None:
            worker_store, name = JobStore(url, retry_seconds=60), f"w{number}"
            for turn in range(12):
                register(worker_store, name)
                jobs = lease_ids(worker_store, name, limit=3)
                for id in jobs:
                    worker_store.begin(name, id)
                    worker_store.heartbeat(name, id, {"progress": turn})
                worker_store.cancel(f"v{(number * 31 + turn * 7) % 120}")
                worker_store.requeue_expired()
                for id in jobs[:2]:
                    worker_store.finish(name, id, {})
                [worker_store.requeue, worker_store.requeue_lost, worker_store.drain][turn % 3](name)
            worker_store.close()

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
        first.close()
        time.sleep(0.2)
        name = url.rpartition("/")[2]
        with psycopg.connect(postgres.url("postgres")) as admin:
            admin.execute("SELECT pg_stat_force_next_flush()")
            row = admin.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = %s", (name,)).fetchone()
    assert row == (0,)


def test_a_process_opens_two_connections(postgres: Server) -> None:
    with postgres.database() as url:
        store = JobStore(url)

        def use(number: int) -> None:
            store.add(new_job(number))
            store.get(f"v{number}")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(use, range(40)))
        with psycopg.connect(postgres.url("postgres")) as admin:
            text = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
            assert admin.execute(text, (url.rpartition("/")[2],)).fetchone() == (2,)
        store.close()


# Faults


def test_calls_are_retried_while_the_database_is_unreachable(postgres: Server) -> None:
    with postgres.database() as url:
        retrying, impatient = JobStore(url, retry_seconds=60), JobStore(url, retry_seconds=0.3)
        retrying.add(new_job(0))
        postgres.stop("immediate")
        try:
            with pytest.raises(Unavailable):
                impatient.get("v0")
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(retrying.add, new_job(1))
                postgres.start()
                assert waiting.result(60).id == "v1"
        except BaseException:
            postgres.start()
            raise
        assert [job.id for job in impatient.page(9)[0]] == ["v1", "v0"]  # no acknowledged job is lost
        retrying.close()
        impatient.close()


def test_a_reader_of_changes_misses_none_after_a_crash(postgres: Server) -> None:
    """A version that was read and then lost in a crash is not used again."""
    with postgres.database() as url, closing(JobStore(url, retry_seconds=60)) as store:
        postgres.suspend_writer()  # the crash then loses writes that are not durable
        register(store, "a")
        store.add_all([new_job(number) for number in range(2)])
        lease_ids(store, "a", limit=1)
        store.finish("a", "v0", {})
        since = store.changes(0)[-1].version
        postgres.stop("immediate")
        postgres.start()
        assert store.get("v0").status == QUEUED  # the crash has lost the writes after the jobs were added
        register(store, "a")
        [first] = lease_ids(store, "a", limit=1)
        store.finish("a", first, {})
        assert [(job.id, job.status) for job in store.changes(since)] == [("v0", COMPLETED)]


def test_acknowledged_writes_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, changes = JobStore(str(tmp_path / "jobs.sqlite")), []
    register(store, "a")
    connect = sqlite3.connect

    def connect_with_trace(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.set_trace_callback(lambda text: changes.append(text) if "synchronous" in text else None)
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_with_trace)
    store._database._writer._drop()
    for operation, durable in [
        (lambda: store.add(new_job(0)), "FULL"),
        (lambda: store.lease("a", ["nano"]), "NORMAL"),
        (lambda: store.heartbeat("a", "v0", {"progress": 1}), "NORMAL"),
        (lambda: store.cancel("v0"), "FULL"),
        (lambda: store.finish("a", "v0", {}), "NORMAL"),
        (lambda: store.remove("v0"), "FULL"),
    ]:
        changes.clear()
        operation()
        assert [text.rpartition(" ")[2] for text in changes] == [durable]
    store.close()


def test_a_newer_database_is_refused_and_unchanged(store: JobStore, url: str) -> None:
    store._run(lambda db: db.execute("INSERT INTO schema_version VALUES (99)"))
    with pytest.raises(WanjaxError) as caught:
        JobStore(url)
    assert has_line_with_words(str(caught.value), "99 --database")


def test_concurrent_processes_create_a_database_once(url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        result = list(pool.map(lambda number: JobStore(url), range(4)))
    assert {store.version() for store in result} == {1}
    for store in result:
        store.close()


def test_a_store_can_be_pickled(store: JobStore) -> None:
    store.add(new_job(0))
    copy = pickle.loads(pickle.dumps(store))
    assert copy.get("v0") == store.get("v0")
    copy.close()


WRONG_DATABASES = [  # URLs with placeholders, and the words of the message
    ("mysql://user:p%40ss%2Fword@host/jobs", ["mysql", "postgresql://"]),
    (f"postgresql://{STRICT}:wrong-{{secret}}@{{server}}/postgres", [STRICT, "--database"]),
    (f"postgresql://{STRICT}@{{server}}/postgres", ["password"]),
    ("postgresql://postgres@{server}/absent", ["absent"]),
    ("postgresql://user:{secret}@127.0.0.1:1/jobs", ["does not answer"]),
    ("postgresql://user:{password}@127.0.0.1:1/jobs", []),
    ("postgresql://user:{secret}@127.0.0.1:port/jobs", ["'port'", "65535"]),
    ("postgresql://user:{secret}@127.0.0.1:99999/jobs", ["'99999'", "65535"]),
    ("postgresql://user:{secret}@localhost/jobs?nonsense=1", []),
    ("{folder}/notes.txt", ["notes.txt"]),
    ("{folder}/jobs", ["jobs", ".sqlite", ".db"]),
    ("postgres:user:{secret}@{server}/jobs", ["that file", ".sqlite"]),
    ("{folder}/notes.txt/jobs.sqlite", ["notes.txt"]),
    ("{folder}/shared/jobs.sqlite", ["nfs4", "--database"]),
]


@pytest.mark.parametrize(("url", "words"), WRONG_DATABASES, ids=[url for url, _ in WRONG_DATABASES])
def test_invalid_databases_are_refused(
    postgres: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, words: list[str]
) -> None:
    (tmp_path / "notes.txt").write_text("these are notes, and no table of SQLite at all" * 99)
    (tmp_path / "shared").mkdir()
    network = type("Disk", (), {"mountpoint": str(tmp_path / "shared"), "fstype": "nfs4"})
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [network])
    secret, server = quote(PASSWORD, safe=""), f"127.0.0.1:{postgres.port}"
    start = time.monotonic()
    with pytest.raises(WanjaxError) as caught:
        JobStore(url.format(secret=secret, password=PASSWORD, server=server, folder=tmp_path), retry_seconds=0.5)
    messages = str(caught.value)
    assert time.monotonic() - start < 10
    assert "\n" not in messages
    assert all(word in messages for word in words), messages
    assert not any(part in messages for part in (PASSWORD, secret, "ss/word", "p%40ss")), messages


def test_a_password_is_not_shown(postgres: Server) -> None:
    with postgres.database() as url:
        url = url.replace("postgres@", f"postgres:{quote(PASSWORD, safe='')}@")
        store = JobStore(url)
        assert "p%40ss" not in repr(store) + store.name
        store.close()
    assert public_url("postgresql://me:a@b:c@host:1/db?password=x") == "postgresql://me@host:1/db"
    assert (
        mask_password("of me:s3cret and s3cr+t", "postgresql://me:s3cret@host/db?sslpassword=s3cr%2Bt")
        == "of me:*** and ***"
    )
    assert public_url("/some/where.sqlite") == "/some/where.sqlite"


# Comparison with a model in memory


@dataclass
class Row:
    """A job in the model."""

    place: int
    batch: str
    status: str = QUEUED
    worker: str = ""
    attempts: int = 0
    cancel: bool = False


@dataclass
class Model:
    """The behaviour of the store, in simple code."""

    rows: dict[str, Row] = field(default_factory=dict)
    workers: dict[str, bool] = field(default_factory=dict)  # by name, whether the worker drains
    place: int = 0

    def queue(self) -> list[str]:
        return sorted((id for id, row in self.rows.items() if row.status == QUEUED), key=lambda id: self.rows[id].place)

    def add(self, id: str, batch: str) -> None:
        self.place += 1
        self.rows.setdefault(id, Row(self.place, batch))

    def visible(self, id: str) -> Row | None:
        row = self.rows.get(id)
        return None if row is None or row.status == REMOVED else row

    def leased_row(self, worker: str, id: str) -> Row | None:
        row = self.rows.get(id)
        return row if row is not None and row.worker == worker and row.status not in (COMPLETED, FAILED) else None

    def lease(self, worker: str, limit: int) -> list[str]:
        if self.workers.get(worker) is not False:
            return []
        leased = [id for id, row in self.rows.items() if row.worker == worker and row.status in (QUEUED, RUNNING)]
        if leased:
            return sorted(leased, key=lambda id: self.rows[id].place)
        free = [id for id in self.queue() if not self.rows[id].worker]
        if not free:
            return []
        batch = self.rows[free[0]].batch
        if limit == 1 or not batch:
            row = self.rows[free[0]]
            row.worker, row.status, row.attempts = worker, RUNNING, row.attempts + 1
            return free[:1]
        batch_ids = [id for id in free if self.rows[id].batch == batch][:limit]
        for id in batch_ids:
            self.rows[id].worker = worker
        return batch_ids

    def begin(self, worker: str, id: str) -> Signal:
        if (row := self.leased_row(worker, id)) is None:
            return Signal.LOST
        if row.cancel:
            return Signal.CANCEL
        if row.status == QUEUED:
            row.status, row.attempts = RUNNING, row.attempts + 1
        return Signal.CONTINUE

    def heartbeat(self, worker: str, id: str) -> Signal:
        if worker not in self.workers or (row := self.leased_row(worker, id)) is None:
            return Signal.LOST
        return Signal.CANCEL if row.cancel else Signal.DRAIN if self.workers[worker] else Signal.CONTINUE

    def finish(self, worker: str, id: str) -> bool:
        if (row := self.leased_row(worker, id)) is None:
            return False
        row.worker = ""
        row.status = COMPLETED if row.status != REMOVED else REMOVED
        return True

    def fail(self, worker: str, id: str, retries: int) -> bool:
        if (row := self.leased_row(worker, id)) is None:
            return False
        row.worker = ""
        if row.status != REMOVED:
            again = not row.cancel and row.attempts <= retries
            self.place += 1
            row.status, row.place = (QUEUED, self.place) if again else (FAILED, row.place)
        return True

    def cancel(self, id: str) -> None:
        if (row := self.visible(id)) is not None and row.status in (QUEUED, RUNNING):
            row.cancel = True
            if row.status == QUEUED:
                row.status, row.worker = FAILED, ""

    def remove(self, id: str) -> None:
        if (row := self.visible(id)) is not None:
            row.status, row.cancel = REMOVED, True

    def requeue(self, worker: str, attempts: int) -> None:
        self.workers.pop(worker, None)
        for row in self.rows.values():
            if row.worker == worker:
                row.worker = ""
                if row.status == RUNNING and row.cancel:
                    row.status = FAILED
                elif row.status == RUNNING:
                    row.status, row.attempts = QUEUED, row.attempts + attempts


IDS, WORKERS = [f"v{number}" for number in range(5)], ["a", "b"]
ids, workers = st.sampled_from(IDS), st.sampled_from(WORKERS)
OPERATIONS = st.one_of(
    st.tuples(st.just("add"), ids, st.sampled_from(["", "x", "y"])),
    st.tuples(st.just("register"), workers),
    st.tuples(st.just("lease"), workers, st.sampled_from([1, 2])),
    st.tuples(st.just("begin"), workers, ids),
    st.tuples(st.just("heartbeat"), workers, ids),
    st.tuples(st.just("finish"), workers, ids),
    st.tuples(st.just("fail"), workers, ids, st.sampled_from([0, 2])),
    st.tuples(st.just("cancel"), ids),
    st.tuples(st.just("remove"), ids),
    st.tuples(st.just("requeue"), workers),
    st.tuples(st.just("requeue_lost"), workers),
    st.tuples(st.just("drain"), workers),
)


def apply(store: JobStore, model: Model, name: str, *arguments: Any) -> tuple[Any, Any]:
    """Apply an operation to the store and to the model, and return both results."""

    def unless_missing(operation: Callable[[str], Any], id: str) -> None:
        try:
            operation(id)
        except NotFound:
            assert model.visible(id) is None

    match name, arguments:
        case "add", (id, batch):
            return store.add(new_job(id[1:], batch)).id, model.add(id, batch) or id
        case "register", (worker,):
            model.workers.setdefault(worker, False)
            register(store, worker)
        case "lease", (worker, limit):
            return lease_ids(store, worker, limit=limit), model.lease(worker, limit)
        case "begin", (worker, id):
            return store.begin(worker, id), model.begin(worker, id)
        case "heartbeat", (worker, id):
            return store.heartbeat(worker, id, {"progress": model.place}), model.heartbeat(worker, id)
        case "finish", (worker, id):
            return store.finish(worker, id, {}), model.finish(worker, id)
        case "fail", (worker, id, retries):
            return store.fail(worker, id, ERROR, retries=retries), model.fail(worker, id, retries)
        case "cancel", (id,):
            return unless_missing(store.cancel, id), model.cancel(id)
        case "remove", (id,):
            return unless_missing(store.remove, id), model.remove(id)
        case "requeue", (worker,):
            return store.requeue(worker), model.requeue(worker, -1)
        case "requeue_lost", (worker,):
            return store.requeue_lost(worker), model.requeue(worker, 0)
        case "drain", (worker,):
            store.drain(worker)
            model.workers.update({worker: True} if worker in model.workers else {})
    return None, None


def check_against_the_model(store: JobStore, steps: list[tuple[Any, ...]]) -> None:
    store._run(lambda db: [db.execute(f"DELETE FROM {table}") for table in ("jobs", "workers")])
    model = Model()
    for step in [("register", "a"), ("add", "v0", "x"), ("lease", "a", 2), *steps]:
        before = store.version()
        result, expected = apply(store, model, *step)
        assert result == expected, step
        rows = {job.id: job for job in store.changes(0)}
        assert {id: (x.status, x.worker, x.attempts, x.cancel) for id, x in rows.items()} == {
            id: (x.status, x.worker, x.attempts, x.cancel) for id, x in model.rows.items()
        }, step
        queue = sorted((x for x in rows.values() if x.status == QUEUED), key=lambda x: x.position)
        assert [x.id for x in queue] == model.queue(), step
        running = sum(x.status == RUNNING for x in rows.values())
        assert [x.jobs_ahead for x in queue] == list(range(running, running + len(queue)))
        assert all(x.version <= store.version() for x in rows.values())
        assert store.version() >= before


@pytest.mark.parametrize("url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
def test_any_sequence_of_operations_matches_the_model(store: JobStore) -> None:
    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(OPERATIONS, min_size=10, max_size=30))
    def check(steps: list[tuple[Any, ...]]) -> None:
        check_against_the_model(store, steps)

    check()


@pytest.mark.parametrize(("free", "message"), [(0, "disk full"), (2**30, "disk I/O error")])
def test_an_io_error_on_a_full_disk_is_reported_as_a_full_disk(tmp_path, monkeypatch, free, message):
    """SQLite raises an I/O error if its journal files do not fit on the disk."""
    with closing(JobStore(str(tmp_path / "jobs.sqlite"), retry_seconds=0)) as store:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorname = "SQLITE_IOERR_SHMSIZE"
        monkeypatch.setattr(databases.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        monkeypatch.setattr(store._database, "transaction", Mock(side_effect=error))
        with pytest.raises(DatabaseError, match=line_with_words(f"{tmp_path}/jobs.sqlite {message}")) as raised:
            store.stats()
    assert raised.value.is_full == (free == 0)
