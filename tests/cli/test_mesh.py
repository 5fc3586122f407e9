# SPDX-License-Identifier: Apache-2.0
"""The mesh that "auto" chooses for the settings of a run, on eight devices."""

import pytest
from click.testing import CliRunner

import wanjax
from tests.support.quick import quick
from tests.support.tiny import tiny_checkpoint
from wanjax.cli import main
from wanjax.media.video import read_metadata

pytestmark = pytest.mark.usefixtures("cached_programs")


def test_without_guidance_no_devices_repeat_work():
    guided, free = (wanjax.load("nano", mesh="auto", video={"guidance_scale": scale}) for scale in (3.0, 1.0))
    assert guided.partitioner.axis_size("dp") == 2
    assert free.partitioner.axis_size("dp") == 1
    assert free.defaults == guided.defaults == wanjax.load("nano").defaults


@pytest.mark.parametrize(("scale", "mesh"), quick([("1", "dp=1")], [("1", "dp=1"), ("4", "dp=2")]))
def test_the_mesh_follows_the_guidance_and_is_reported_and_stored(tmp_path, monkeypatch, scale, mesh):
    monkeypatch.chdir(tmp_path)
    model = str(tiny_checkpoint(tmp_path / "tiny"))
    options = ["--size", "32x32", "--frames", "5", "--steps", "1", "--guidance-scale", scale, "--mesh", "auto"]
    messages = CliRunner().invoke(main, ["generate", "a", "--model", model, *options, "--out", "a.mp4"])
    assert messages.exit_code == 0, messages.output
    assert f"mesh {mesh}" in messages.stderr
    assert read_metadata("a.mp4")["mesh"].startswith(mesh)
