# SPDX-License-Identifier: Apache-2.0
"""A batch: each task ends once, whatever fails, and the manifest is readable after any end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batches import read_manifest
from tests.support.words import line_with_words
from wanjax.errors import RequestError, WanjaxError, is_failure
from wanjax.jobs.batch import MANIFEST, MAX_FIRST_FAILURES, Batch, Manifest
from wanjax.jobs.maker import Task
from wanjax.jobs.store import JobStore
from wanjax.jobs.worker import DISK_FULL
from wanjax.pipelines.request import VideoRequest


def task(number):
    return Task(f"{number}.mp4", VideoRequest({"prompt": f"prompt {number}", "seed": number - 1}, row=number))


@pytest.fixture
def store(tmp_path):
    store = JobStore(str(tmp_path / "jobs.sqlite"))
    yield store
    store.close()


def lease_and_begin(store, worker="w", limit=32):
    """Lease jobs to a worker, begin all of them, and return them."""
    store.register(worker, "ready", {})
    jobs = store.lease(worker, ["nano"], limit=limit)
    for job in jobs:
        store.begin(worker, job.id)
    return jobs


def fail(store, job, retries=0, message="no", code="server_error"):
    store.fail("w", job.id, {"code": code, "message": message, "worker": "host:1"}, retries=retries)


@settings(deadline=None, max_examples=8)  # other work may share the cores
@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 3), st.randoms(use_true_random=False))
def test_each_task_ends_once(tmp_path_factory, count, workers, retries, random):
    """Any job may fail or kill its worker, and drivers die and are restarted."""
    folder = tmp_path_factory.mktemp("batch")
    store = JobStore(str(folder / "jobs.sqlite"))
    ended, finished, names = [], set(), iter(range(10**6))

    def new_batch():
        manifest = Manifest(folder)
        batch = Batch(store, [task(n) for n in range(1, count + 1) if f"{n}.mp4" not in finished], manifest, "nano")
        batch._raise_if_all_failed = lambda task: None  # another test covers batches without success
        return batch

    batch, busy = new_batch(), []
    while batch.ended_count < batch.total:
        while len(busy) < workers and store.stats().jobs.get("queued"):
            worker = f"w{next(names)}"
            store.register(worker, "ready", {})
            if not (jobs := store.lease(worker, ["nano"], limit=random.choice([1, 3, 32]))):
                break
            busy.append((worker, jobs))
        worker, jobs = busy.pop(random.randrange(len(busy)))
        for job in jobs:
            store.begin(worker, job.id)
            outcome = random.choice(["made", "made", "fails", "dies"]) if finished else "made"
            if outcome == "dies":
                store.requeue_lost(worker)
                break
            if outcome == "made":
                finished.add(job.output)
                store.finish(worker, job.id, {})
            else:
                store.fail(worker, job.id, {"code": "x", "message": "no"}, retries=retries)
        else:
            store.requeue(worker)
        ended += [job.output for job in batch.poll()]
        if random.random() < 0.1:  # the driver is killed, and another one starts
            batch = new_batch()
            ended = [name for name in ended if name in finished]
    entries = read_manifest(folder)
    names_in_manifest = [entry["file_name"] for entry in entries if "error" not in entry]
    assert sorted(names_in_manifest) == sorted(finished)
    failed = {entry["file_name"] for entry in entries if "error" in entry}
    assert finished | failed == {f"{n}.mp4" for n in range(1, count + 1)}
    store.close()


def test_a_task_is_tried_again_and_then_listed_with_its_error(store, tmp_path):
    batch = Batch(store, [task(1), task(2)], Manifest(tmp_path), "nano")
    first, second = lease_and_begin(store)
    store.finish("w", second.id, {"seconds": 2.5, "worker": "host:1"})
    fail(store, first, retries=2)
    store.requeue("w")
    for _ in range(2):
        [job] = lease_and_begin(store)
        fail(store, job, retries=2, message="the device is gone")
        store.requeue("w")
    assert [job.output for job in batch.poll()] == ["2.mp4", "1.mp4"]
    done, failed = read_manifest(tmp_path)
    assert done == {
        **{"file_name": "2.mp4", "row": 2, "prompt": "prompt 2", "seed": 1},
        **{"seconds": 2.5, "worker": "host:1"},
    }
    assert (failed["file_name"], failed["error"], failed["tries"]) == ("1.mp4", "the device is gone", 3)
    assert failed["worker"] == "host:1"


def test_a_manifest_lists_finished_and_failed_videos(tmp_path):
    manifest = Manifest(tmp_path)
    manifest.add(task(1), error="the device is gone")
    manifest.add(task(2), seconds=1.0)
    again = Manifest(tmp_path)
    assert (again.failed, again.done_names) == ({"1.mp4"}, {"2.mp4"})


def test_earlier_failures_are_made_separately_and_last(store, tmp_path):
    Manifest(tmp_path).add(task(1), error="no")
    Batch(store, [task(2), task(3), task(1)], Manifest(tmp_path), "nano")
    assert [job.output for job in lease_and_begin(store)] == ["2.mp4", "3.mp4"]


@pytest.mark.parametrize(("count", "failures"), [(99, MAX_FIRST_FAILURES), (1, 1)])
def test_a_batch_without_any_success_is_stopped(store, tmp_path, count, failures):
    batch = Batch(store, map(task, range(1, count + 1)), Manifest(tmp_path), "nano")
    for job in lease_and_begin(store):
        fail(store, job, message="broken")
    with pytest.raises(WanjaxError, match=line_with_words(f"row {failures} broken")):
        list(batch.poll())
    batch.close()
    assert set(store.stats().jobs) == {"failed"}


@pytest.mark.parametrize(("code", "kind"), [("invalid_request", RequestError), ("server_error", WanjaxError)])
def test_a_batch_of_wrong_requests_raises_a_request_error(store, tmp_path, code, kind):
    batch = Batch(store, map(task, range(1, 3)), Manifest(tmp_path), "nano")
    for job in lease_and_begin(store):
        fail(store, job, code=code, message="broken")
    with pytest.raises(WanjaxError, match=line_with_words("row 2 broken")) as raised:
        list(batch.poll())
    assert type(raised.value) is kind
    assert batch.only_wrong_requests == (kind is RequestError)


def test_a_full_disk_ends_a_batch_without_a_failed_video(store, tmp_path):
    batch = Batch(store, [task(1), task(2)], Manifest(tmp_path), "nano")
    first, second = lease_and_begin(store)
    store.finish("w", first.id, {})
    fail(store, second, code=DISK_FULL, message="2.mp4 cannot be written")
    with pytest.raises(WanjaxError, match=line_with_words("2.mp4 written")) as raised:
        list(batch.poll())
    assert is_failure(raised.value)
    assert [entry["file_name"] for entry in read_manifest(tmp_path)] == ["1.mp4"]


def test_jobs_of_a_closed_batch_are_cancelled(store, tmp_path):
    batch = Batch(store, map(task, range(1, 5)), Manifest(tmp_path), "nano")
    [job] = lease_and_begin(store, limit=1)
    batch.close()
    assert store.heartbeat("w", job.id, None).value == "cancel"
    assert store.stats().jobs == {"failed": 3, "in_progress": 1}


@pytest.mark.parametrize("cut", [0, 1, 20, -1])
def test_a_manifest_is_complete_after_any_end(tmp_path, cut):
    """An incomplete line, as after a full disk, is not read and does not damage the next lines."""
    Manifest(tmp_path).add(task(1), seconds=2.5)
    Manifest(tmp_path).add(task(2), error="no", tries=3)
    file = tmp_path / MANIFEST
    data = file.read_bytes()
    file.write_bytes(data + data.splitlines()[1][:cut])
    again = Manifest(tmp_path)
    assert again.done_names == {"1.mp4"}
    again.add(task(1))
    again.add(task(2), seconds=1.0)
    entries = read_manifest(tmp_path)
    assert [entry["file_name"] for entry in entries if "error" not in entry] == ["1.mp4", "2.mp4"]
    assert entries[0] == {"file_name": "1.mp4", "row": 1, "prompt": "prompt 1", "seed": 0, "seconds": 2.5}
    assert entries[1]["error"] == "no"
