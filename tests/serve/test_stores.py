# SPDX-License-Identifier: Apache-2.0
"""A server with its videos in a store and its database on this machine."""

import base64
import io
import os
import tempfile
import time
from contextlib import contextmanager

import pytest
from PIL import Image

from tests.support.media import picture
from tests.support.quick import quick
from tests.support.stores import BUCKET, clear_memory_store, failing, objects, running_s3
from tests.support.words import has_line_with_words, line_with_words
from wanjax.cli.serving import check_host, open_store
from wanjax.errors import WanjaxError
from wanjax.jobs.sharing import SERVE_FILE
from wanjax.serve import store_files
from wanjax.stores.paths import RemotePath, parse_path

pytestmark = pytest.mark.usefixtures("cached_programs")

MEMORY_FOLDER = "memory://videos/served"
DENIED = PermissionError("Access Denied for a-secret")


@pytest.fixture(autouse=True)
def _in_temporary_folders(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    clear_memory_store()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield
    clear_memory_store()


@pytest.fixture
def start_server(start, tmp_path):
    """A function that starts servers with the store in memory and one database."""
    return lambda **options: start(
        parse_path(MEMORY_FOLDER), database=str(tmp_path / "table" / "jobs.sqlite"), **options
    )


def red():
    return "data:image/png;base64," + base64.b64encode(picture()).decode()


def write_completed_video(server, content=bytes(range(256)) * 16):
    """Complete a job with this content as its video, and return its id."""
    id = server.post_video()["id"]
    assert server.lease() == [id]
    (server.folder / id / "video.mp4").write(content)
    server.store.finish(server.store.get(id).worker, id, {})
    return id


def names(folder):
    """Return the objects of a folder, without the file that marks it as a server's folder."""
    assert isinstance(folder, RemotePath)
    return {name for name in folder.files() if name != SERVE_FILE}


def is_emptied(folder):
    """Return whether the store is empty within 20 seconds, because files are removed after the response."""
    end = time.monotonic() + 20
    while names(folder) and time.monotonic() < end:
        time.sleep(0.02)
    return not names(folder)


FOLDERS = [(f"{BUCKET}/served", False), (MEMORY_FOLDER, True)]  # and whether the server makes previews


@pytest.mark.parametrize(("url", "preview"), quick(FOLDERS[:1], FOLDERS))
def test_a_video_in_a_store_is_requested_downloaded_and_removed(start, tmp_path, url, preview):
    with running_s3() if url.startswith("s3:") else contextmanager(lambda: iter([None]))():
        server = start(parse_path(url), database=str(tmp_path / "table" / "jobs.sqlite"), preview=preview)
        id = server.post_video(image=red(), steps=6 if preview else 2)["id"]
        result = server.wait_until_finished(id)
        assert result["status"] == "completed", result["error"]
        folder = server.folder / id
        assert names(folder) - {"preview.png"} == {"image.png", "thumbnail.webp", "video.mp4"}
        assert ("preview.png" in names(folder)) == preview
        assert {name.partition("-")[0] for name in os.listdir(tmp_path / "table")} == {"jobs.sqlite"}
        assert os.listdir(tmp_path / "temporary") == []
        content = server.content(id)
        assert content == (folder / "video.mp4").read_object(2**20)
        assert Image.open(io.BytesIO(server.content(id, variant="thumbnail"))).size == (32, 32)
        assert Image.open(io.BytesIO(server.content(id, variant="image"))).size == (40, 30)
        metadata = server.client.get(f"/v1/videos/{id}/record").json()
        assert metadata["image"] == "image.png"
        assert len(metadata["digests"][metadata["image"]]) == 64
        assert "a-secret" not in str(metadata)
        assert server.client.delete(f"/v1/videos/{id}").status_code == 200
        assert server.client.get(f"/v1/videos/{id}/content").status_code == 404
        assert is_emptied(server.folder)
        server.stop()


RANGES = {
    "bytes=0-9": slice(0, 10),
    "bytes=10-": slice(10, None),
    "bytes=-7": slice(-7, None),
    "bytes=3-99999999": slice(3, None),
    "bytes=-99999999": slice(0, None),
    "bytes=4-4": slice(4, 5),
}
IGNORED_RANGES = ["bytes=", "bytes=-", "bytes=9-3", "bytes=0-1,4-5", "lines=0-9", "bytes=a-b", f"bytes={'9' * 40}-"]
UNSATISFIABLE_RANGES = ["bytes=99999999-", "bytes=-0"]


def test_ranges_of_a_video_equal_those_of_the_store(start_server, monkeypatch):
    """The server reads pieces of 1,000 bytes, and no more pieces than requested."""
    monkeypatch.setattr(store_files, "PIECE_BYTES", 1000)
    server, content = start_server(work=False), bytes(range(256)) * 16
    id = write_completed_video(server, content)
    path = f"/v1/videos/{id}/content"
    response = server.client.get(path)
    assert (response.status_code, response.content, response.headers["content-type"]) == (200, content, "video/mp4")
    assert response.headers["accept-ranges"] == "bytes"
    assert response.headers["content-disposition"] == f'inline; filename="{id}.mp4"'
    for options, part in RANGES.items():
        response = server.client.get(path, headers={"range": options})
        assert (response.status_code, response.content) == (206, content[part]), options
        start = len(content[: part.start % len(content)])
        message = f"bytes {start}-{start + len(response.content) - 1}/{len(content)}"
        assert response.headers["content-range"] == message, options
    for options in IGNORED_RANGES:
        response = server.client.get(path, headers={"range": options})
        assert (response.status_code, response.content) == (200, content), options
    for options in UNSATISFIABLE_RANGES:
        response = server.client.get(path, headers={"range": options})
        assert (response.status_code, response.headers["content-range"]) == (416, f"bytes */{len(content)}")
    head = server.client.head(path, headers={"range": "bytes=0-9"})
    assert (head.status_code, head.content, head.headers["content-length"]) == (206, b"", "10")
    with failing("cat_file", DENIED, after=1) as read:
        server.client.get(path, headers={"range": "bytes=0-500"})
    assert len(read) == 1


def test_a_failing_store_is_reported_without_its_names_and_messages(start_server, tmp_path, caplog):
    """The log has the store's message, and the path of the video that was not uploaded."""
    server = start_server()
    with failing("put_file", DENIED):
        assert server.wait_until_finished(server.post_video()["id"])["error"]["code"] == "storage"
        [temporary_file] = (tmp_path / "temporary").glob("wanjax-*/video.mp4")
        assert str(temporary_file) in caplog.text
        refused = server.refused(502, json={"prompt": "a", "image": red()})
    id = server.wait_until_finished(server.post_video()["id"])["id"]
    path = f"/v1/videos/{id}/content"
    with failing("info", DENIED):
        answers = [server.client.get(path), server.client.get(f"/v1/videos/{id}/record")]
    with failing("cat_file", DENIED):
        answers.append(server.client.get(path))
    assert [result.status_code for result in answers] == [502] * 3
    message = {refused, *(result.json()["error"]["message"] for result in answers)}
    assert message == {server.client.get("/v1/videos").json()["data"][1]["error"]["message"]}
    assert not any(word in str(message) for word in ("memory:", "Denied", "secret"))


def test_a_response_is_incomplete_if_the_store_fails(start_server, monkeypatch):
    monkeypatch.setattr(store_files, "PIECE_BYTES", 1000)
    server = start_server(work=False)
    id = write_completed_video(server)
    with failing("cat_file", DENIED, after=1):
        response = server.client.get(f"/v1/videos/{id}/content")
    assert (response.status_code, len(response.content)) == (200, 1000) != int(response.headers["content-length"])


@pytest.mark.parametrize("endpoint", ["content", "record"])
def test_a_video_that_the_store_lacks_is_not_found(start_server, endpoint):
    server = start_server(work=False)
    id = write_completed_video(server)
    (server.folder / id / "video.mp4").remove()
    response = server.client.get(f"/v1/videos/{id}/{endpoint}")
    assert response.status_code == 404
    assert has_line_with_words(response.json()["error"]["message"], "video.mp4")


def test_a_restarted_server_has_its_videos_in_the_store(start_server):
    """One has a video but no finished job, one was running, and one was removed before its files."""
    first = start_server(work=False)
    ids = [first.post_video(seed=seed)["id"] for seed in range(3)]
    complete, running = first.lease(2)
    first.service.close()
    (first.folder / complete / "video.mp4").write(b"a whole video")
    (first.folder / ids[2] / "image.png").write(b"a picture")
    first.store.remove(ids[2])
    first.kill()
    (parse_path(MEMORY_FOLDER) / "video_of_another_server" / "video.mp4").write(b"another video")
    again = start_server()
    assert again.wait_until_finished(complete)["status"] == again.wait_until_finished(running)["status"] == "completed"
    assert again.content(complete) == b"a whole video"
    assert again.client.get(f"/v1/videos/{ids[2]}").status_code == 404
    assert again.is_cleared(ids[2])
    again.stop()
    assert {name.split("/")[0] for name in names(parse_path(MEMORY_FOLDER))} == {*ids[:2], "video_of_another_server"}


def test_a_wrong_database_leaves_no_folder(tmp_path):
    folder = tmp_path / "served" / "videos"
    with pytest.raises(WanjaxError, match=line_with_words("/nope")), open_store(folder, "/nope/x.sqlite"):
        pass
    assert not folder.parent.exists()


@pytest.mark.parametrize("host", ["999.1.1.1", "no host", "." + "a" * 70])
def test_an_invalid_host_is_refused(host):
    with pytest.raises(
        WanjaxError, match=line_with_words(f"--host {host if len(host) < 20 else ''} address 127.0.0.1 0.0.0.0")
    ):
        check_host(host)
    check_host("127.0.0.1")


def test_a_database_in_a_store_is_refused():
    with (
        pytest.raises(WanjaxError, match=line_with_words(f"{MEMORY_FOLDER} --database")),
        open_store(parse_path(MEMORY_FOLDER), None),
    ):
        pass
    assert objects() == {}
