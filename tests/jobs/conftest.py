# SPDX-License-Identifier: Apache-2.0
"""Job stores on SQLite and PostgreSQL, a small model, and runs that compute nothing."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

import wanjax
from wanjax.errors import WanjaxError
from wanjax.jobs import maker
from wanjax.jobs.store import JobStore
from wanjax.pipelines.run import Run


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a new database."""
    if request.param == "sqlite":
        yield str(tmp_path / "jobs.sqlite")
        return
    with request.getfixturevalue("postgres").database() as result:
        yield result


@pytest.fixture
def store(url: str) -> Iterator[JobStore]:
    result = JobStore(url)
    yield result
    result.close()


@pytest.fixture
def local_store(tmp_path: Path) -> Iterator[JobStore]:
    """A store on SQLite."""
    result = JobStore(str(tmp_path / "jobs.sqlite"))
    yield result
    result.close()


@pytest.fixture(scope="session")
def nano() -> wanjax.Pipeline:
    return wanjax.load("nano")


@pytest.fixture
def nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write files without frames. The prompt "fail" raises an error, and "full" fails like a full disk."""

    def run(self):
        for request in self.requests:
            if request.settings.prompt == "fail":
                raise RuntimeError("the device is gone")
            yield request, iter(())

    def write(path, frames, request):
        if request.settings.prompt == "full":
            raise WanjaxError(f"{path} cannot be written") from OSError(errno.ENOSPC, "No space left on device")
        path.write_text(request.settings.prompt)

    monkeypatch.setattr(Run, "__iter__", run)
    monkeypatch.setattr(maker, "write_frames", write)
