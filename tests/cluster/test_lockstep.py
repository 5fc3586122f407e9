# SPDX-License-Identifier: Apache-2.0
"""A worker of several processes, which are threads here: all make the same runs, or none does."""

import json
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.support.words import says
from wanjax.cluster.hosts import Host, OutOfStep
from wanjax.cluster.lockstep import Leader, follow
from wanjax.cluster.worker import Worker
from wanjax.jobs.processes import Others
from wanjax.pipelines.request import VideoRequest

pytestmark = pytest.mark.usefixtures("kept_programs", "nothing_is_computed")

SMALL = {"size": (32, 32), "frames": 5, "steps": 2}
PATIENCE = 60  # seconds until threads that wait for each other in vain end


class Room:
    """Where so many threads meet."""

    def __init__(self, count):
        self.said, self.barrier = [""] * count, threading.Barrier(count, timeout=PATIENCE)


class Near(Others):
    """The others in a room, seen by the thread of an index."""

    def __init__(self, room, index):
        self.room, self.index = room, index

    def broadcast(self, message=None):
        return json.loads(self.gather(json.dumps(message))[0])

    def gather(self, text):
        self.room.said[self.index] = text
        self.room.barrier.wait()
        said = list(self.room.said)
        self.room.barrier.wait()
        return said


@pytest.fixture
def led(nano, tmp_path):
    """Three workers that are one, each with a folder of its own: the leader, and two that follow in threads."""
    room, folders = Room(3), [tmp_path / str(index) for index in range(3)]
    for folder in folders:
        folder.mkdir()
    leader = Leader(lambda: nano, folders[0], others=Near(room, 0))
    others = [Worker(lambda: nano, folder) for folder in folders[1:]]
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(follow, other, Near(room, index)) for index, other in enumerate(others, 1)]
        yield leader, others, running
        room.barrier.abort()


def jobs_of(leader, *given):
    return leader.planned([VideoRequest.parse(SMALL | one, row=number) for number, one in enumerate(given, 1)])


def test_all_make_the_runs_of_the_first(led):
    leader, others, running = led
    jobs = jobs_of(leader, {"prompt": "a"}, {"prompt": "b", "scheduler": "euler"}, {"prompt": "c", "seed": "random"})
    assert [outcome.error for outcome in leader.make(jobs)] == [None] * 3
    assert [outcome.record for outcome in leader.make(jobs)] == [None] * 3  # they are there, and no one is asked
    assert leader.dismiss()
    assert [run.result(PATIENCE) for run in running] == [None, None]
    names = {job.name for job in jobs}
    assert all(set(os.listdir(worker.folder)) == names for worker in (leader, *others))


def test_what_shows_how_far_a_video_is_is_fitted_by_all(led, monkeypatch):
    leader, _, running = led
    fitted = []
    monkeypatch.setattr(type(leader.pipe), "latent_preview", lambda pipe: fitted.append(pipe) or fitted)
    leader.fit_colours()
    assert leader.dismiss()
    assert [run.result(PATIENCE) for run in running] == [None, None]
    assert len(fitted) == 3


def test_what_one_of_them_cannot_make_none_begins(led, monkeypatch):
    leader, others, running = led
    jobs = jobs_of(leader, {"prompt": "a"}, {"prompt": "b", "steps": 3}, {"prompt": "c"})
    shared = others[1]._shared

    def missing(request):
        if request.settings["prompt"] == "b":
            raise OSError("its host has no such picture")
        return shared(request)

    monkeypatch.setattr(others[1], "_shared", missing)
    outcomes = {outcome.name: outcome for outcome in leader.make(jobs)}
    wrong = outcomes[next(job.name for job in jobs if job.request.settings["prompt"] == "b")]
    assert says(wrong.error, "process 2 of 3 no such picture")
    assert wrong.again
    assert sum(outcome.error is None for outcome in outcomes.values()) == 2
    assert leader.dismiss()
    assert [run.result(PATIENCE) for run in running] == [None, None]
    assert all(len(os.listdir(worker.folder)) == 2 for worker in (leader, *others))


def test_what_the_first_cannot_make_is_not_asked_of_the_others(led):
    leader, _, running = led
    (job,) = jobs_of(leader, {"prompt": "a"})
    wrong = job._replace(request=replace(job.request, inputs={"image": "nowhere.png"}))
    (outcome,) = leader.make([wrong])
    assert says(outcome.error, "nowhere.png")
    assert leader.dismiss()
    assert [run.result(PATIENCE) for run in running] == [None, None]


def test_a_failure_within_a_run_ends_all(led):
    """Of three videos the second cannot be made: it is told, and nothing is tried again in these processes."""
    leader, _, running = led
    making = leader.make(jobs_of(leader, {"prompt": "a"}, {"prompt": "fail"}, {"prompt": "c"}))
    outcomes = [next(making), next(making)]
    with pytest.raises(RuntimeError, match="the device is gone"):
        next(making)
    assert [outcome.error for outcome in outcomes] == [None, "RuntimeError: the device is gone"]
    assert outcomes[1].again
    assert not leader.dismiss()
    for run in running:
        with pytest.raises(RuntimeError, match="the device is gone"):
            run.result(PATIENCE)


@pytest.mark.parametrize("where", [0, 1], ids=["the first", "another"])
def test_a_failure_on_one_host_alone_is_told_as_it_was_there(nano, tmp_path, monkeypatch, where):
    """The others may wait for that host, so whoever started them ends them all: none makes a further video."""
    monkeypatch.setattr(Host, "_meet", lambda host, *_, **__: host.ready())
    room, made = Room(2), Host.made
    hosts = [Host(lambda: nano, tmp_path, force=True, others=Near(room, index)) for index in range(2)]

    def failing(host, jobs, run):
        if host is hosts[where] and jobs[0].request.settings["prompt"] == "b":
            raise RuntimeError("the device is gone")
        return made(host, jobs, run)

    monkeypatch.setattr(Host, "made", failing)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(hosts[1].follow, "", 2, 1)
        making = hosts[0].make(jobs_of(hosts[0], {"prompt": "a"}, {"prompt": "b", "steps": 3}))
        errors = [next(making).error, next(making).error]
        if where == 0:
            assert errors == [None, "RuntimeError: the device is gone"]
            with pytest.raises(OutOfStep, match="RuntimeError: the device is gone"):
                next(making)
            assert not following.done()
        else:
            with pytest.raises(OutOfStep, match="RuntimeError: the device is gone"):
                following.result(PATIENCE)
        room.barrier.abort()


def test_an_error_that_left_processes_behind_goes_to_another_process():
    assert str(pickle.loads(pickle.dumps(OutOfStep("the device is gone")))) == "the device is gone"
