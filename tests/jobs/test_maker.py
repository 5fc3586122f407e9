# SPDX-License-Identifier: Apache-2.0
"""The maker of a batch's videos: runs, existing videos, and failures that affect only their request."""

import os
import pickle

import numpy as np
import pytest

from tests.support.jobs import run_tasks
from tests.support.words import line_with_words
from wanjax.errors import SettingError, WanjaxError
from wanjax.jobs.maker import VideoMaker
from wanjax.jobs.worker import DISK_FULL
from wanjax.media.pictures import read_clip
from wanjax.media.video import read_metadata
from wanjax.pipelines.request import VideoRequest

pytestmark = pytest.mark.usefixtures("cached_programs")

SMALL = {"size": (32, 32), "frames": 5, "steps": 2}


@pytest.fixture
def maker(nano, tmp_path):
    (tmp_path / "videos").mkdir()
    return VideoMaker(lambda: nano, tmp_path / "videos")


def requests_of(*arguments):
    return [VideoRequest.parse(SMALL | fields, row=number) for number, fields in enumerate(arguments, 1)]


@pytest.mark.slow  # tests/cli/test_many.py has a quick test with the command
def test_videos_of_a_batch_equal_those_of_single_calls(nano, maker, local_store):
    requests = requests_of(
        {"prompt": "a red circle", "seed": 3},
        {"prompt": "a blue square", "steps": 1, "scheduler": "euler"},
        {"prompt": "a blue square", "seed": 4},
    )
    tasks = maker.tasks_for(requests)
    jobs = run_tasks(local_store, maker, tasks)
    assert {job.status for job in jobs} == {"completed"}
    assert {task.output for task in tasks} == set(os.listdir(maker.folder))
    [request, *_] = maker.prepare_run(tasks[:2]).requests
    assert read_metadata(maker.folder / tasks[0].output) == request.metadata
    nano("a blue square", seed=4, **SMALL).save(maker.folder / "one.mp4")
    np.testing.assert_array_equal(*(read_clip(maker.folder / name, 5, 8) for name in (tasks[1].output, "one.mp4")))
    assert jobs[0].progress["stage_total"] > 0
    assert {"encode", "denoise", "decode"} <= jobs[0].progress["stage_seconds"].keys()
    assert "encode" not in jobs[1].progress["stage_seconds"]  # each stage counts for one video of a run


@pytest.mark.usefixtures("nothing_is_computed")
def test_requests_that_differ_in_prompt_and_seed_share_a_run(maker, local_store, monkeypatch):
    runs, prepare_run = [], VideoMaker.prepare_run
    monkeypatch.setattr(
        VideoMaker, "prepare_run", lambda *arguments: runs.append(arguments[1]) or prepare_run(*arguments)
    )
    tasks = maker.tasks_for(
        requests_of(
            {"prompt": "a", "seed": 3}, {"prompt": "b", "scheduler": "euler"}, {"prompt": "c", "seed": "random"}
        )
    )
    assert [task.request.row for task in tasks] == [1, 3, 2]
    assert [job.status for job in run_tasks(local_store, maker, tasks)] == ["completed"] * 3
    assert [[task.request.row for task in run] for run in runs] == [[1, 3], [2]]
    requests = [request for run in list(runs) for request in maker.prepare_run(run).requests]
    metadata = [(x.metadata["prompt"], x.metadata["seed"], x.metadata["scheduler"]) for x in requests]
    drawn = tasks[1].request.settings["seed"]
    assert metadata == [("a", 3, "unipc"), ("c", drawn, "unipc"), ("b", 42, "euler")]


@pytest.mark.usefixtures("nothing_is_computed")
def test_existing_videos_are_not_made_again(maker, local_store):
    tasks = maker.tasks_for(requests_of({"prompt": "a"}, {"prompt": "b"}))
    (existing := maker.folder / tasks[0].output).write_text("old")
    assert [job.status for job in run_tasks(local_store, maker, tasks)] == ["completed"] * 2
    assert existing.read_text() == "old"
    maker.force = True
    run_tasks(local_store, maker, tasks)
    assert existing.read_text() == "a"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": (30, 32)}, "row 2 height 30 16 32"),
        ({"frames": 4}, "row 2 4 5"),
        ({"image": "nowhere.png"}, "row 2 nowhere.png"),
        ({"boundary": 0.5}, "row 2 boundary"),
        ({"model": "wan2.1-t2v-1.3b"}, "row 2 wan2.1-t2v-1.3b nano"),
        ({"scheduler": "unknown"}, "row 2 unknown unipc"),
    ],
    ids=str,
)
def test_a_request_that_the_model_refuses_is_reported_before_the_first_video(maker, options, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        maker.tasks_for(requests_of({"prompt": "a"}, {"prompt": "b"} | options))


def test_a_seed_of_a_library_s_request_is_checked_too(maker):
    first, second = requests_of({"prompt": "a"}, {"prompt": "b"})
    with pytest.raises(WanjaxError, match=line_with_words("row 2 seed 18446744073709551616")):
        maker.tasks_for([first, second.updated({"seed": 2**64})])


@pytest.mark.usefixtures("nothing_is_computed")
def test_a_failing_request_does_not_fail_others(maker, local_store):
    """The second of three requests of a run fails alone, after its retries."""
    tasks = maker.tasks_for(requests_of({"prompt": "a"}, {"prompt": "fail"}, {"prompt": "c"}))
    jobs = run_tasks(local_store, maker, tasks, retries=2)
    assert [job.status for job in jobs] == ["completed", "failed", "completed"]
    assert [job.attempts for job in jobs] == [1, 3, 1]
    assert jobs[1].error["message"] == "RuntimeError: the device is gone"
    assert len(os.listdir(maker.folder)) == 2


@pytest.mark.usefixtures("nothing_is_computed")
def test_a_full_disk_ends_the_worker(maker, local_store):
    jobs = run_tasks(local_store, maker, maker.tasks_for(requests_of({"prompt": "full"}, {"prompt": "b"})), retries=2)
    assert [job.status for job in jobs] == ["failed", "queued"]
    assert jobs[0].error["code"] == DISK_FULL


@pytest.mark.usefixtures("nothing_is_computed")
def test_a_worker_with_other_options_does_not_overwrite_a_video(nano, maker, local_store):
    tasks = maker.tasks_for(requests_of({"prompt": "a"}))
    [job] = run_tasks(local_store, VideoMaker(lambda: nano, maker.folder, batch_guidance=True), tasks)
    assert job.status == "failed"
    assert tasks[0].output in job.error["message"]
    assert os.listdir(maker.folder) == []


def test_an_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(SettingError("the size is wrong", "size")))
    assert (str(error), error.setting) == ("the size is wrong", "size")
