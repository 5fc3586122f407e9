# SPDX-License-Identifier: Apache-2.0
"""Paths in stores: invalid names, complete videos, and messages of failing stores."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.stores import GCS_BUCKET, clear_memory_store, failing, objects, running_gcs
from tests.support.words import has_line_with_words
from wanjax.errors import WanjaxError
from wanjax.media.metadata import find_metadata
from wanjax.media.video import Video, read_metadata, write_trial_video, write_video
from wanjax.stores.paths import RemotePath, file_names_in, parse_path
from wanjax.stores.temporary import temp_dir

RECORD = {"prompt": "a red circle", "seed": 1}
DENIED = PermissionError("Access Denied")
VIDEO_URL = "memory://videos/a.mp4"


@pytest.fixture(autouse=True)
def _in_temporary_folders(tmp_path, monkeypatch):
    clear_memory_store()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    clear_memory_store()


def clip(frames: int = 5) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (frames, 32, 32, 3), np.uint8)


def refused(call, *arguments) -> str:
    with pytest.raises(WanjaxError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "a.webp", "a.png"])
def test_a_video_in_a_store_equals_the_local_file(tmp_path, name):
    frames = clip(1 if name == "a.png" else 5)
    write_trial_video(f"memory://videos/new/{name}", len(frames), (32, 32), 8, RECORD)
    assert objects() == {}
    result = write_video(f"memory://videos/new/{name}", frames, 8, RECORD)
    local_file = write_video(tmp_path / name, frames, 8, RECORD)
    assert objects() == {f"videos/new/{name}": Path(str(local_file)).read_bytes()}
    assert str(result) == f"memory://videos/new/{name}"
    assert read_metadata(str(result)) == RECORD
    assert find_metadata(str(result))["seed"] == 1
    assert os.listdir(tmp_path) == [name]


def test_a_local_file_may_be_a_url(tmp_path):
    result = Video(clip(), 8, RECORD).save(f"file://{tmp_path}/a.gif")
    assert result == tmp_path / "a.gif"
    assert read_metadata(f"file://{tmp_path}/a.gif") == RECORD


INVALID_NAMES = {
    "memory://someone:a-secret@videos/a.mp4": "memory://BUCKET/NAME",
    "memory://videos/../a.mp4": "memory://BUCKET/NAME",
    "memory://videos//a.mp4": "memory://BUCKET/NAME",
    "memory://": "memory://BUCKET/NAME",
    "memory://a.mp4": "memory://a.mp4 BUCKET/NAME.mp4",
    "memory://videos/frames/": "PNG BUCKET/NAME.mp4",
    "memory://videos/a.avi": ".avi .mp4",
    "file://a.mp4": "file://a.mp4 file:///PATH",
    "ftp://videos/a.mp4": "ftp:// s3:// gs:// file://",
    "gs://videos/a.mp4": "gcsfs pip install '.[cloud]'",
}


@pytest.mark.parametrize(("name", "words"), INVALID_NAMES.items(), ids=INVALID_NAMES)
def test_an_invalid_name_in_a_store_is_reported(monkeypatch, name, words):
    if name.startswith("gs:"):  # as if its library were not installed
        monkeypatch.setattr("wanjax.stores.paths.find_spec", lambda name: None)
    output = refused(write_trial_video, name, 5, (32, 32), 8, RECORD)
    assert has_line_with_words(output, words), output
    assert "a-secret" not in output


FAILING_CALLS = {  # the failing call of a store, its error, a call of wanjax, and words of the message
    "no writing": (
        *("pipe_file", DENIED, lambda: write_trial_video(VIDEO_URL, 5, (32, 32), 8, RECORD)),
        "memory://videos Access Denied",
    ),
    "a long message": (
        *("cat_file", RuntimeError("no\n" + "so " * 1000), lambda: RemotePath("memory", "videos/a").read_object(10)),
        "memory://videos/a read, no:",
    ),
}


@pytest.mark.parametrize("name", FAILING_CALLS)
def test_the_message_names_the_failing_store(tmp_path, name):
    operation, error, call, words = FAILING_CALLS[name]
    with failing(operation, error):
        output = refused(call)
    assert has_line_with_words(output, words)
    assert len(output) < 300
    assert os.listdir(tmp_path) == []


def test_a_full_local_disk_is_not_reported_as_an_error_of_the_store(tmp_path):
    with (
        failing("get_file", OSError(errno.ENOSPC, "No space left on device")),
        pytest.raises(OSError, match="space"),
    ):
        RemotePath("memory", "videos").download_all(["a"], tmp_path / "new")


def test_a_video_that_cannot_be_published_stays_local(tmp_path):
    with failing("put_file", DENIED):
        output = refused(write_video, "memory://videos/a.mp4", clip(), 8, RECORD)
    assert has_line_with_words(output, "memory://videos/a.mp4 Access Denied")
    assert objects() == {}
    [temporary_file] = tmp_path.glob("wanjax-*/a.mp4")
    assert str(temporary_file) in output
    assert read_metadata(temporary_file) == RECORD


def test_a_failed_video_leaves_the_earlier_one(tmp_path):
    write_video("memory://videos/a.gif", clip(), 8, RECORD)
    before = objects()

    def frames():
        yield clip(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_video("memory://videos/a.gif", frames(), 8, {"prompt": "another"})
    assert objects() == before
    assert os.listdir(tmp_path) == []


KILLED_PROCESS = """
import os, signal, sys
from pathlib import Path
from wanjax.stores.temporary import temp_dir
with temp_dir() as one, temp_dir(Path(sys.argv[1])) as other:
    for folder in (one, other):
        (folder / "part").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_process_removes_temporary_folders_of_a_killed_one(tmp_path, monkeypatch):
    """Folders of a running process and a video that could not be published stay."""
    (models := tmp_path / "models").mkdir()
    process = subprocess.run(
        [sys.executable, "-c", KILLED_PROCESS, str(models)], env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    assert process.returncode == -signal.SIGKILL
    part_files = [*tmp_path.glob(".*/part"), *models.glob(".*/part")]
    assert len(part_files) == 2
    with failing("put_file", DENIED):
        refused(write_video, "memory://videos/a.gif", clip(), 8, RECORD)
    [remaining] = tmp_path.glob("wanjax-*/a.gif")
    RemotePath("memory", "videos/b").write(b"0")
    with temp_dir() as folder:
        RemotePath("memory", "videos").download_all(["b"], models)
        assert folder.is_dir()
    assert sorted(os.listdir(tmp_path)) == ["models", remaining.parent.name]
    assert os.listdir(models) == ["b"]


def test_the_files_of_a_folder_are_listed(tmp_path):
    for name in ("a.mp4", "b.mp4", "below/c.mp4"):
        RemotePath("memory", f"videos/{name}").write(b"0")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"0")
    assert file_names_in(parse_path("memory://videos")) == file_names_in(tmp_path) == {"a.mp4", "b.mp4"}
    assert file_names_in(parse_path("memory://videos/none")) == file_names_in(tmp_path / "none") == set()


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "a/./b", "a\\b", "a\nb"])
def test_names_outside_the_folder_are_ignored(name):
    RemotePath("memory", "videos/good").write(b"0")
    MemoryFileSystem.store[f"/videos/{name}"] = MemoryFileSystem.store["/videos/good"]
    assert parse_path("memory://videos").files() == {"good": 1}  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:Sending a large body")  # by gcsfs
def test_uploads_to_google_cloud_storage_are_complete(tmp_path):
    """Its library ends a file with a marker that the file may contain; then the upload is cut off and reported."""
    with running_gcs():
        folder = parse_path(f"{GCS_BUCKET}/videos")
        folder.check_writable()
        for content in (b"", b"a\r", bytes(range(256)) * 2**13):
            (folder / "a").write(content)
            assert (folder / "a").read_object(2**22) == content
        assert (folder / "a").read_part(65, 68) == b"ABC"
        assert ((folder / "a").size(), (folder / "a").is_file(), folder.is_file()) == (2**21, True, False)
        (tmp_path / "b").write_bytes(b"b")
        folder.upload_all({"b": tmp_path / "b", "below/c": tmp_path / "b"})
        assert folder.files() == {"a": 2**21, "b": 1, "below/c": 1}
        assert has_line_with_words(refused((folder / "d").write, b"1\n--==0=="), f"{folder}/d")
        folder.remove_all()
        assert not folder.exists()
        assert has_line_with_words(refused(parse_path("gs://no-such-bucket/a").read_object, 9), "gs://no-such-bucket/a")


def test_only_one_process_creates_an_object():
    lease = RemotePath("memory", "cache/lease")
    assert lease.create(b"1")
    assert not lease.create(b"2")
    assert lease.read_object(10) == b"1"
    assert has_line_with_words(refused(lease.read_object, 0), "memory://cache/lease 0")
