# SPDX-License-Identifier: Apache-2.0
"""Files appear under their names when all of them is there, and what was there before stays until then."""

import pytest

from wanjax.stores.writing import writing


def test_what_fails_half_way_leaves_the_file_before(tmp_path):
    file = tmp_path / "video.mp4"
    file.write_bytes(b"before")

    def stopped() -> None:
        with writing(file) as beside:
            beside.write_bytes(b"half")
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        stopped()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("video.mp4", b"before")]


def test_a_file_appears_when_all_of_it_is_there(tmp_path):
    file = tmp_path / "video.mp4"
    with writing(file) as beside:
        assert beside.suffix == ".mp4"  # by which its writer chooses a format
        beside.write_bytes(b"half")
        assert not file.exists()
        beside.write_bytes(b"whole")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("video.mp4", b"whole")]
