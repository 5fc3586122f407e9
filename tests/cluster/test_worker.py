# SPDX-License-Identifier: Apache-2.0
"""A worker in this process: what it plans it makes, once, and one request's fault is not another's."""

import os
import pickle

import numpy as np
import pytest

from tests.support.words import naming
from wanjax.cluster.worker import STAGES, Job, Outcome, Worker
from wanjax.errors import SettingError, WanjaxError
from wanjax.media.pictures import read_clip
from wanjax.media.videos import read_metadata
from wanjax.pipelines.request import VideoRequest

pytestmark = pytest.mark.usefixtures("kept_programs")

SMALL = {"size": (32, 32), "frames": 5, "steps": 2}


@pytest.fixture
def worker(nano, tmp_path):
    return Worker(lambda: nano, tmp_path)


def asked(*given):
    return [VideoRequest.parse(SMALL | one, row=number) for number, one in enumerate(given, 1)]


@pytest.mark.slow  # tests/cli/test_many.py has a quick one, by the command
def test_requests_are_made_as_single_calls_make_them(nano, worker, tmp_path):
    requests = asked(
        {"prompt": "a red circle", "seed": 3},
        {"prompt": "a blue square", "steps": 1, "scheduler": "euler"},
        {"prompt": "a blue square", "seed": 4},
    )
    jobs = worker.planned(requests)
    made = {outcome.name: outcome.record for outcome in worker.make(jobs)}
    assert made.keys() == {job.name for job in jobs} == set(os.listdir(tmp_path))
    assert all(read_metadata(tmp_path / name) == record for name, record in made.items())
    nano("a blue square", seed=4, **SMALL).save(tmp_path / "one.mp4")
    np.testing.assert_array_equal(*(read_clip(tmp_path / name, 5, 8) for name in (jobs[1].name, "one.mp4")))


@pytest.mark.usefixtures("nothing_is_computed")
def test_requests_that_differ_in_prompt_and_seed_are_of_one_run(worker):
    jobs = worker.planned(
        asked({"prompt": "a", "seed": 3}, {"prompt": "b", "scheduler": "euler"}, {"prompt": "c", "seed": "random"})
    )
    assert [job.request.row for job in jobs] == [1, 3, 2]
    records = [outcome.record for outcome in worker.make(jobs)]
    assert [(x["prompt"], x["seed"], x["scheduler"]) for x in records] == [
        ("a", 3, "unipc"),
        ("c", jobs[1].request.settings["seed"], "unipc"),
        ("b", 42, "euler"),
    ]


@pytest.mark.usefixtures("nothing_is_computed")
def test_what_is_there_is_not_made_again(worker, tmp_path):
    jobs = worker.planned(asked({"prompt": "a"}, {"prompt": "b"}))
    (tmp_path / jobs[0].name).write_text("there")
    assert {outcome.name for outcome in worker.make(jobs) if outcome.record} == {jobs[1].name}
    assert (tmp_path / jobs[0].name).read_text() == "there"
    worker.force = True
    assert all(outcome.record for outcome in worker.make(jobs[:1]))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"size": (30, 32)}, "row 2 height 30 16 32"),
        ({"frames": 4}, "row 2 4 5"),
        ({"image": "nowhere.png"}, "row 2 nowhere.png"),
        ({"boundary": 0.5}, "row 2 boundary"),
        ({"model": "wan2.1-t2v-1.3b"}, "row 2 wan2.1-t2v-1.3b nano"),
        ({"scheduler": "nobody's"}, "row 2 nobody's unipc"),
    ],
    ids=str,
)
def test_what_the_model_cannot_make_is_told_before_anything_starts(worker, given, said):
    with pytest.raises(WanjaxError, match=naming(said)):
        worker.planned(asked({"prompt": "a"}, {"prompt": "b"} | given))


def test_a_seed_of_a_library_s_request_is_checked_too(worker):
    first, second = asked({"prompt": "a"}, {"prompt": "b"})
    with pytest.raises(WanjaxError, match=naming("row 2 seed 18446744073709551616")):
        worker.planned([first, second.updated({"seed": 2**64})])


@pytest.mark.usefixtures("nothing_is_computed")
def test_one_request_s_failure_is_its_own(worker, tmp_path):
    """The second of three that would be made together fails alone."""
    jobs = worker.planned(asked({"prompt": "a"}, {"prompt": "fail"}, {"prompt": "c"}))
    outcomes = {outcome.name: outcome for outcome in worker.make(jobs)}
    assert [outcomes[job.name].error for job in jobs] == [None, "RuntimeError: the device is gone", None]
    assert [outcomes[job.name].again for job in jobs] == [False, True, False]
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.usefixtures("nothing_is_computed")
def test_a_full_disk_ends_the_batch(worker):
    jobs = worker.planned(asked({"prompt": "a"}, {"prompt": "full"}))
    with pytest.raises(WanjaxError, match="cannot be written"):
        list(worker.make(jobs))


@pytest.mark.slow
def test_stages_apart_make_the_same_video(nano, worker, tmp_path):
    [job] = worker.planned(asked({"prompt": "a red circle", "seed": 3}))
    made, outcome = None, None
    for stage in STAGES:
        assert outcome is None
        made, outcome = worker.staged(stage, job, pickle.loads(pickle.dumps(made)))
    nano("a red circle", seed=3, **SMALL).save(tmp_path / "one.mp4")
    assert outcome.record == read_metadata(tmp_path / job.name) == read_metadata(tmp_path / "one.mp4")
    np.testing.assert_array_equal(*(read_clip(tmp_path / name, 5, 8) for name in (job.name, "one.mp4")))
    assert worker.staged(STAGES[0], job, None) == (None, Outcome(job.name))


def test_what_has_no_stages_is_told_with_its_row(worker):
    jobs = [
        Job("a.mp4", VideoRequest({"prompt": "a"}, row=1)),
        Job("b.mp4", VideoRequest({"prompt": "b", "windows": 2}, row=2)),
    ]
    with pytest.raises(WanjaxError, match=naming("row 2 windows")):
        worker.check_staged(jobs)


def test_an_error_goes_from_one_process_to_another():
    error = pickle.loads(pickle.dumps(SettingError("the size is wrong", "size")))
    assert (str(error), error.setting) == ("the size is wrong", "size")
