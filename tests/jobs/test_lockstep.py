# SPDX-License-Identifier: Apache-2.0
"""A worker of several processes, simulated by threads: all make the same runs, or none does."""

import json
import operator
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from tests.support.jobs import run_tasks
from tests.support.words import has_line_with_words, line_with_words
from wanjax.cli import many
from wanjax.errors import WanjaxError
from wanjax.jobs.lockstep import Leader, OutOfSync, follow_leader
from wanjax.jobs.maker import VideoMaker
from wanjax.jobs.multihost import PeerGroup
from wanjax.jobs.ray_workers import WorkerActor
from wanjax.jobs.sharing import BATCH_FILE, join_namespace
from wanjax.jobs.store import NewJob, Signal
from wanjax.jobs.worker import Lease
from wanjax.pipelines.request import VideoRequest

pytestmark = pytest.mark.usefixtures("cached_programs", "nothing_is_computed")

SMALL = {"size": (32, 32), "frames": 5, "steps": 2}
PATIENCE = 60  # seconds until a blocked thread ends


class Exchange:
    """Messages and a barrier that threads share."""

    def __init__(self, count):
        self.messages, self.barrier = [""] * count, threading.Barrier(count, timeout=PATIENCE)


class ThreadPeerGroup(PeerGroup):
    """The peer group of one thread."""

    def __init__(self, exchange, index):
        self.exchange, self.index = exchange, index

    def broadcast(self, message=None):
        return json.loads(self.gather(json.dumps(message))[0])

    def gather(self, text):
        self.exchange.messages[self.index] = text
        self.exchange.barrier.wait()
        output = list(self.exchange.messages)
        self.exchange.barrier.wait()
        return output


@pytest.fixture
def leader_and_followers(nano, tmp_path):
    """A leader and two followers in threads, each with a maker and a folder."""
    exchange, folders = Exchange(3), [tmp_path / str(index) for index in range(3)]
    for folder in folders:
        folder.mkdir()
    leader = Leader(lambda: nano, folders[0], peers=ThreadPeerGroup(exchange, 0))
    followers = [VideoMaker(lambda: nano, folder) for folder in folders[1:]]
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(follow_leader, follower, ThreadPeerGroup(exchange, index))
            for index, follower in enumerate(followers, 1)
        ]
        yield leader, followers, running
        exchange.barrier.abort()


def tasks_for(leader, *arguments):
    return leader.tasks_for(
        [VideoRequest.parse(SMALL | fields, row=number) for number, fields in enumerate(arguments, 1)]
    )


def test_all_hosts_make_the_runs_of_the_leader(leader_and_followers, local_store):
    leader, followers, running = leader_and_followers
    tasks = tasks_for(leader, {"prompt": "a"}, {"prompt": "b", "scheduler": "euler"}, {"prompt": "c", "seed": "random"})
    for _ in range(2):  # the second time all videos exist
        assert [job.status for job in run_tasks(local_store, leader, tasks)] == ["completed"] * 3
    assert leader.dismiss()
    assert [run.result(PATIENCE) for run in running] == [None, None]
    names = {task.output for task in tasks}
    assert all(set(os.listdir(maker.folder)) == names for maker in (leader, *followers))


def test_all_hosts_fit_the_preview_colours(leader_and_followers, monkeypatch):
    leader, _, running = leader_and_followers
    pipes = []
    monkeypatch.setattr(type(leader.pipe), "latent_preview", lambda pipe: pipes.append(pipe) or pipes)
    leader.fit_latent_preview()
    assert leader.dismiss()
    assert [run.result(PATIENCE) for run in running] == [None, None]
    assert len(pipes) == 3


def test_no_host_starts_a_run_that_one_refuses(leader_and_followers, local_store, monkeypatch):
    leader, followers, running = leader_and_followers
    tasks = tasks_for(leader, {"prompt": "a"}, {"prompt": "b", "steps": 3}, {"prompt": "c"})
    shared = followers[1].batch_setup

    def missing(request):
        if request.settings["prompt"] == "b":
            raise OSError("its host has no such picture")
        return shared(request)

    monkeypatch.setattr(followers[1], "batch_setup", missing)
    jobs = {job.request["settings"]["prompt"]: job for job in run_tasks(local_store, leader, tasks, retries=1)}
    assert has_line_with_words(jobs["b"].error["message"], "process 2 of 3 no such picture")
    assert [jobs[prompt].attempts for prompt in "abc"] == [1, 2, 1]
    assert [jobs[prompt].status for prompt in "abc"] == ["completed", "failed", "completed"]
    assert leader.dismiss()
    assert [run.result(PATIENCE) for run in running] == [None, None]
    assert all(len(os.listdir(maker.folder)) == 2 for maker in (leader, *followers))


def test_a_run_that_the_leader_refuses_is_not_sent_to_the_others(leader_and_followers, local_store):
    leader, _, running = leader_and_followers
    (task,) = tasks_for(leader, {"prompt": "a"})
    wrong = task._replace(request=replace(task.request, inputs={"image": "nowhere.png"}))
    (job,) = run_tasks(local_store, leader, [wrong])
    assert has_line_with_words(job.error["message"], "nowhere.png")
    assert leader.dismiss()
    assert [run.result(PATIENCE) for run in running] == [None, None]


def test_only_an_exit_of_the_worker_stops_a_run_early(nano, local_store, tmp_path):
    """Followers do not know of a cancelled job; a leader that stopped alone would leave them in a collective."""
    leader, exiting = Leader(lambda: nano, tmp_path), threading.Event()
    lease = Lease(local_store, "w", exit_requested=exiting.is_set)
    lease.close()
    lease._signal = Signal.CANCEL
    assert lease.should_stop()
    assert not leader.should_stop(lease)()
    exiting.set()
    assert leader.should_stop(lease)()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_failure_in_a_run_ends_all_processes(leader_and_followers, local_store, restarts):
    """The second of three videos fails; it is reported, and these processes retry nothing."""
    leader, _, running = leader_and_followers
    leader.can_restart = restarts
    tasks = tasks_for(leader, {"prompt": "a"}, {"prompt": "fail"}, {"prompt": "c"})
    jobs = run_tasks(local_store, leader, tasks, retries=1)
    assert [job.status for job in jobs] == ["completed", "queued" if restarts else "failed", "queued"]
    assert [job.attempts for job in jobs] == [1, 1, 0]
    assert jobs[1].error["message"] == str(f"RuntimeError: {leader.sync_error}") == "RuntimeError: the device is gone"
    assert not leader.dismiss()
    for run in running:
        with pytest.raises(RuntimeError, match="the device is gone"):
            run.result(PATIENCE)


@pytest.mark.parametrize("failing_host", [0, 1], ids=["the first", "another"])
def test_a_failure_on_one_host_is_reported_unchanged(nano, local_store, tmp_path, monkeypatch, failing_host):
    """Other hosts may wait for that host, so all are ended, and none makes another video."""
    exchange, run = Exchange(2), VideoMaker.make_videos
    makers = [
        Leader(lambda: nano, tmp_path, force=True, peers=ThreadPeerGroup(exchange, 0)),
        VideoMaker(lambda: nano, tmp_path),
    ]

    def failing(maker, tasks, prepared_run):
        if maker is makers[failing_host] and tasks[0].request.settings["prompt"] == "b":
            raise RuntimeError("the device is gone")
        return run(maker, tasks, prepared_run)

    monkeypatch.setattr(VideoMaker, "make_videos", failing)
    host = WorkerActor()
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(host._follow_leader, makers[1], peers=ThreadPeerGroup(exchange, 1))
        tasks = tasks_for(makers[0], {"prompt": "a"}, {"prompt": "b", "steps": 3})
        if failing_host == 0:
            jobs = run_tasks(local_store, makers[0], tasks)
            assert [job.error and job.error["message"] for job in jobs] == [None, "RuntimeError: the device is gone"]
            assert not following.done()
        else:
            run_tasks(local_store, makers[0], tasks)
            with pytest.raises(OutOfSync, match="RuntimeError: the device is gone"):
                following.result(PATIENCE)
        exchange.barrier.abort()


@pytest.mark.parametrize("with_request", [False, True])
def test_a_host_with_another_folder_takes_no_job(local_store, tmp_path, with_request):
    """The caller gets the reason, and no video is written to a folder that other hosts do not see."""
    join_namespace(local_store, tmp_path, BATCH_FILE)
    local_store.add(NewJob("a", {}, "nano", "a.mp4"))
    (elsewhere := tmp_path / "elsewhere").mkdir()
    start = partial(many._make_maker, {"load": None, "folder": elsewhere})
    initialize = operator.attrgetter("models") if with_request else None
    host, message = WorkerActor(), pickle.dumps((local_store, start, "w", {"until_empty": True}, initialize))
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(host.work, message)
        with pytest.raises(WanjaxError, match=line_with_words(f"{elsewhere} another folder")):
            host.initializer_result() if with_request else working.result(PATIENCE)
        host.drain()
    assert local_store.get("a").attempts == 0


def test_the_maker_of_a_worker_with_several_hosts_leads_them(local_store, tmp_path):
    maker = many._make_maker({"load": lambda: None, "folder": tmp_path}, local_store, leads=True)
    assert isinstance(maker, Leader)
    assert maker.can_restart


def test_an_out_of_sync_error_can_be_pickled():
    assert str(pickle.loads(pickle.dumps(OutOfSync("the device is gone")))) == "the device is gone"
