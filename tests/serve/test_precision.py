# SPDX-License-Identifier: Apache-2.0
"""A server has the precision of its model, in its responses and in its videos."""

import wanjax
from tests.support.served import SMALL
from tests.support.words import has_line_with_words
from wanjax.media.video import read_metadata
from wanjax.serve.served_models import LoadedModels


def test_a_server_has_one_precision(start, tmp_path):
    server = start(loaded_models=LoadedModels(wanjax.load("nano", precision="int8")))
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["started_with"]["precision"] == "int8"
    assert "precision" not in model["settings"]
    for precision in ("none", "int4"):  # the server's own precision is accepted, so that metadata can be sent unchanged
        assert has_line_with_words(
            server.refused(422, json=SMALL | {"precision": precision}), "precision server starts leave out"
        )
    video = server.wait_until_finished(server.post_video(steps=1)["id"])
    assert (video["status"], video["settings"]["precision"]) == ("completed", "int8")
    (tmp_path / "a.mp4").write_bytes(server.content(video["id"]))
    assert read_metadata(tmp_path / "a.mp4")["precision"] == "int8"
