# SPDX-License-Identifier: Apache-2.0
"""A licence with conditions of its own is told before the weights under it are downloaded."""

from dataclasses import replace

import pytest

import wanjax
from tests.support.hub import ID
from tests.support.tiny import tiny_checkpoint
from wanjax import registry


@pytest.mark.usefixtures("online")
def test_the_licence_is_told_before_the_first_download_alone(server, tmp_path, monkeypatch):
    tiny = tiny_checkpoint(tmp_path / "tiny")
    server.files = {str(path.relative_to(tiny)): path.read_bytes() for path in tiny.rglob("*") if path.is_file()}
    like = replace(registry.presets()["wan2.1-t2v-1.3b"], source=ID, architecture=None)
    known = {"free": replace(like, name="free"), "bound": replace(like, name="bound", licence="licence of its own")}
    monkeypatch.setattr(registry, "presets", lambda: known)
    told: list[str] = []
    wanjax.load("free", note=told.append)
    assert told == []
    pipe = wanjax.load("bound", note=told.append)
    assert told == [f"the weights of bound are under the licence of its own, whose text {ID} on the hub has"]
    with pytest.warns(UserWarning, match="the weights of bound are under the licence of its own"):
        wanjax.load("bound")
    for component in ("tokenizer", "text_encoder", "transformer", "vae"):
        pipe.components.get(component)
    wanjax.load("bound", note=told.append)
    assert len(told) == 1
