# SPDX-License-Identifier: Apache-2.0
"""Files get their names when they are complete, and earlier files stay until then."""

from pathlib import Path

import pytest

from wanjax.errors import WanjaxError
from wanjax.stores import user_folders
from wanjax.stores.writing import atomic_write, check_folder


def test_a_failed_write_leaves_the_earlier_file(tmp_path):
    file = tmp_path / "video.mp4"
    file.write_bytes(b"before")

    def write_half() -> None:
        with atomic_write(file) as temporary_file:
            temporary_file.write_bytes(b"half")
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        write_half()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("video.mp4", b"before")]


def test_a_file_appears_when_it_is_complete(tmp_path):
    file = tmp_path / "video.mp4"
    with atomic_write(file) as temporary_file:
        assert temporary_file.suffix == ".mp4"  # from which the writer chooses a format
        temporary_file.write_bytes(b"half")
        assert not file.exists()
        temporary_file.write_bytes(b"whole")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("video.mp4", b"whole")]


@pytest.mark.parametrize(
    ("folder", "name"),
    [("/nowhere-of-wanjax", ""), ("/nowhere-of-wanjax/b", ", the first one of /nowhere-of-wanjax/b")],
)
def test_the_message_names_the_first_missing_folder_once(folder, name):
    with pytest.raises(WanjaxError) as caught:
        check_folder(Path(folder))
    assert str(caught.value) == (
        f"there is no folder /nowhere-of-wanjax{name}: check the path, or create /nowhere-of-wanjax first"
    )


def test_a_missing_home_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_folders.home() == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path / "nope"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_folders.home() is None
    assert user_folders.lasting_cache() is None
