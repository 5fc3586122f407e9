# SPDX-License-Identifier: Apache-2.0
"""Locks on folders: one process at a time, and no file afterwards."""

import pytest

from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.stores.locks import locked


def test_a_folder_is_locked_by_one_process_and_left_unchanged(tmp_path):
    for _ in range(2):
        with locked(tmp_path / "a.lock", "training", "folder"):
            with pytest.raises(WanjaxError, match=line_with_words(f"training {tmp_path} folder")):
                locked(tmp_path / "a.lock", "training", "folder").__enter__()
            assert (tmp_path / "a.lock").exists()
        assert list(tmp_path.iterdir()) == []
