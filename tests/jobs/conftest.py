# SPDX-License-Identifier: Apache-2.0
"""Stores of jobs on both databases."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from wanjax.jobs.store import JobStore


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a new database."""
    if request.param == "sqlite":
        yield str(tmp_path / "jobs.sqlite")
        return
    with request.getfixturevalue("postgres").database() as found:
        yield found


@pytest.fixture
def store(url: str) -> Iterator[JobStore]:
    made = JobStore(url)
    yield made
    made.close()
