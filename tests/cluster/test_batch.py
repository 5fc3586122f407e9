# SPDX-License-Identifier: Apache-2.0
"""A batch: each job ends once, whatever fails or dies, and the manifest is readable after any end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.support.batches import read_manifest
from tests.support.words import naming
from wanjax.cluster.batch import HOPELESS, MANIFEST, TOGETHER, Batch, Manifest
from wanjax.cluster.worker import Job, Outcome
from wanjax.errors import WanjaxError
from wanjax.pipelines.request import VideoRequest


class Nowhere(Manifest):
    """A manifest that is not written."""

    def __init__(self):
        self.entries = []

    def add(self, job, **told):
        self.entries.append((job.name, "error" in told))


def job(number):
    return Job(f"{number}.mp4", VideoRequest({"prompt": f"prompt {number}", "seed": number - 1}, row=number))


@settings(deadline=None)  # other work may share the cores
@given(some.integers(1, 100), some.integers(1, 5), some.integers(0, 3), some.randoms(use_true_random=False))
def test_each_job_ends_once(count, workers, retries, random):
    """Workers take jobs in turn; any job may fail or take its worker with it, and one is never made."""
    batch, made, tries = Batch(map(job, range(1, count + 1)), retries, Nowhere()), [], {}
    busy, done_once = [], False
    while batch.ended < batch.total:
        while len(busy) < workers and (jobs := batch.take(workers)):
            assert len(jobs) <= TOGETHER
            busy.append(jobs)
        jobs = busy.pop(random.randrange(len(busy)))
        while jobs:
            tries[jobs[0].name] = tries.get(jobs[0].name, 0) + 1
            what = random.choice(["made", "made", "fails", "dies"]) if done_once else "made"
            if what == "dies":
                batch.lost(jobs)
                break
            first, *jobs = jobs
            done_once = True
            if what == "made":
                made.append(first.name)
            batch.finish(Outcome(first.name, error="no" if what == "fails" else None, again=True))
    ended = [name for name, _ in batch.manifest.entries]
    assert sorted(ended) == sorted({job(number).name for number in range(1, count + 1)})
    assert len(set(made)) == len(made) == batch.done
    assert all(tries[outcome.name] == retries + 1 for outcome in batch.failed)


def test_jobs_that_were_not_tried_are_given_back_as_they_were():
    batch = Batch(map(job, range(1, 4)), 0, Nowhere())
    first, *rest = batch.take(1)
    assert batch.lost([first, *rest[:1]]) is not None  # which counts as the one try of the first
    batch.give_back(rest[1:])
    assert batch.take(1) == [rest[1], rest[0]]
    assert [outcome.name for outcome in batch.failed] == [first.name]
    assert batch.lost([]) is None


def test_a_job_that_ends_its_worker_again_and_again_is_listed_with_what_failed_there(tmp_path):
    batch = Batch([job(1), job(2)], 2, Manifest(tmp_path))
    assert batch.finish(Outcome(batch.take(1)[1].name)) is not None
    assert [batch.lost([job(1)], "the device is gone") for _ in range(2)] == [None, None]
    assert batch.lost([job(1)], "the device is gone") == batch.failed[0]
    [entry] = [entry for entry in read_manifest(tmp_path) if "error" in entry]
    assert (entry["file_name"], entry["error"], entry["tries"]) == ("1.mp4", "the device is gone", 3)


def test_a_manifest_knows_what_failed(tmp_path):
    manifest = Manifest(tmp_path)
    manifest.add(job(1), error="the device is gone")
    manifest.add(job(2), seconds=1.0)
    again = Manifest(tmp_path)
    assert (again.failed, again.listed) == ({"1.mp4"}, {"2.mp4"})


def test_one_process_takes_many_and_several_share_to_the_end():
    assert len(Batch(map(job, range(1, 101)), 0, Nowhere()).take(1)) == TOGETHER
    batch, sizes = Batch(map(job, range(1, 101)), 0, Nowhere()), []
    while jobs := batch.take(2):
        sizes.append(len(jobs))
    assert sum(sizes) == 100
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def test_a_request_s_own_fault_is_not_tried_again():
    batch = Batch([job(1), job(2)], 5, Nowhere())
    batch.take(1)
    assert batch.finish(Outcome("1.mp4", error="no", again=False)) is not None
    assert batch.take(1) == []
    assert [outcome.error for outcome in batch.failed] == ["no"]


def test_a_batch_in_which_nothing_succeeds_is_ended():
    batch = Batch(map(job, range(1, 100)), 0, Nowhere())
    failed = (Outcome(one.name, error="broken") for one in batch.take(1))
    with pytest.raises(WanjaxError, match=naming(f"row {HOPELESS} broken")):
        list(map(batch.finish, failed))
    with pytest.raises(WanjaxError, match=naming("row 1 broken")):
        Batch([job(1)], 0, Nowhere()).finish(Outcome("1.mp4", error="broken"))


@pytest.mark.parametrize("cut", [0, 1, 20, -1])
def test_a_manifest_is_whole_after_any_end(tmp_path, cut):
    """Lines that are not whole, as after a disk was full, are neither read nor mixed with those that follow."""
    Manifest(tmp_path).add(job(1), seconds=2.5)
    Manifest(tmp_path).add(job(2), error="no", tries=3)
    file = tmp_path / MANIFEST
    data = file.read_bytes()
    file.write_bytes(data + data.splitlines()[1][:cut])
    again = Manifest(tmp_path)
    assert again.listed == {"1.mp4"}
    again.add(job(1))
    again.add(job(2), seconds=1.0)
    entries = read_manifest(tmp_path)
    assert [entry["file_name"] for entry in entries if "error" not in entry] == ["1.mp4", "2.mp4"]
    assert entries[0] == {"file_name": "1.mp4", "row": 1, "prompt": "prompt 1", "seed": 0, "seconds": 2.5}
    assert entries[1]["error"] == "no"
