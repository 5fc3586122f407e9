# SPDX-License-Identifier: Apache-2.0
"""A small model, and runs that compute nothing."""

import errno

import pytest

import wanjax
from wanjax.cluster import worker as module
from wanjax.errors import WanjaxError
from wanjax.pipelines.run import Run


@pytest.fixture(scope="module")
def nano():
    return wanjax.load("nano")


@pytest.fixture
def nothing_is_computed(monkeypatch):
    """Videos without frames are written; the prompts "fail" and "full" cannot be made, and find no room."""

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
    monkeypatch.setattr(module, "write", write)
