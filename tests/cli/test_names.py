# SPDX-License-Identifier: Apache-2.0
"""Names of what runs write: no run replaces a finished video, or its stages, unless it is told to."""

import re
import shlex
from datetime import datetime
from pathlib import Path

import pytest

from tests.support.commands import files, refused, succeeded, wanjax
from tests.support.tiny import tiny_checkpoint
from wanjax.cli import names
from wanjax.media import stage_files
from wanjax.media.videos import read_metadata
from wanjax.pipelines.run import Run

pytestmark = pytest.mark.usefixtures("kept_programs")

SMALL = ("--size", "32x16", "--frames", "5", "--steps", "2", "--dtype", "float32")
NAME = r"a-red-circle-moving-right-7-\d{8}-\d{6}(-\d)?"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _always_noon(monkeypatch):
    class Noon(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2030, 1, 2, 12, 0, 0)

    monkeypatch.setattr(names, "datetime", Noon)


def contents() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def test_each_run_has_names_of_its_own(model):
    given = ("a red circle, moving right!", "--model", model, *SMALL, "--seed", "7")
    first = succeeded(wanjax(*given))
    kept = contents()
    second = succeeded(wanjax(*given))
    assert kept.items() <= contents().items()
    assert len(files("wanjax_videos")) == len(files("stage_outputs")) == 2
    for result in (first, second):
        video = Path(result.stdout.strip())
        assert re.fullmatch(NAME, video.stem)
        assert video.parent == Path("wanjax_videos").absolute()
        stages = Path("stage_outputs") / video.stem
        assert files(stages) == [stage_files.CONFIG, stage_files.EMBEDDINGS, stage_files.LATENTS]
        assert read_metadata(video) == stage_files.load_settings(stages)


@pytest.mark.usefixtures("_always_noon")
def test_a_name_that_is_taken_is_numbered():
    runs = [names.own_files("A cat", 42) for _ in range(3)]
    stems = ["a-cat-42-20300102-120000", "a-cat-42-20300102-120000-2", "a-cat-42-20300102-120000-3"]
    assert [str(run.folder) for run in runs] == [f"stage_outputs/{stem}" for stem in stems]
    assert [run.video for run in runs] == [f"wanjax_videos/{stem}.mp4" for stem in stems]
    names.release(runs[0])
    Path("wanjax_videos").mkdir()
    Path(runs[0].video).touch()
    assert names.own_files("A cat", 42).folder.name == stems[0] + "-4"
    assert names.own_files("A cat", 42, "b.mp4") == (Path("stage_outputs") / stems[0], "b.mp4")


@pytest.mark.parametrize(
    ("prompt", "slug"),
    [
        ("A cat, playing the piano", "a-cat-playing-the-piano"),
        ("../../etc/passwd", "etc-passwd"),
        ("一只猫在弹钢琴", "一只猫在弹钢琴"),
        ("Ein Straßenmusikant", "ein-strassenmusikant"),
        ("  \n", "video"),
        ("?!", "video"),
        ("a detailed cinematic scene of a harbour at dawn", "a-detailed-cinematic-scene-of-a-harbour"),
        ("x" * 300, "x" * 40),
    ],
)
def test_a_prompt_in_a_name(prompt, slug):
    assert names.slug(prompt) == slug


def test_a_finished_video_is_replaced_only_by_force(model):
    given = ("--model", model, *SMALL)
    succeeded(wanjax("a", *given, "--dir", "d"))
    kept = contents()
    said = "d holds a finished video, output_video.mp4: another --dir keeps it, --force replaces it"
    for command in (["generate", "b", *given], ["encode", "b", "--model", model], ["denoise", "--seed", "3"]):
        assert refused(*command, "--dir", "d") == said
    assert refused("decode", "--dir", "d") == said.replace("another --dir", "--out")
    assert contents() == kept
    succeeded(wanjax("b", *given, "--dir", "d", "--force"))
    assert read_metadata("d/output_video.mp4")["prompt"] == "b"
    succeeded(wanjax("decode", "--dir", "d", "--out", "elsewhere.mp4"))
    for command in (["denoise", "--seed", "3"], ["decode"]):
        succeeded(wanjax(*command, "--dir", "d", "--force"))
    assert read_metadata("d/output_video.mp4")["seed"] == 3


def test_latents_are_replaced_only_by_force_or_by_other_latents(model):
    succeeded(wanjax("a", "--model", model, *SMALL, "--dir", "d", "--out", "a.mp4"))
    for command in ("generate", "encode"):
        assert "d holds the latents of a video" in refused(command, "b", "--model", model, "--dir", "d")
    for seed in ("1", "2"):  # one prompt, encoded once
        succeeded(wanjax("denoise", "--dir", "d", "--seed", seed))
        succeeded(wanjax("decode", "--dir", "d", "--out", f"d/video_{seed}.mp4"))
    assert [read_metadata(f"d/video_{seed}.mp4")["seed"] for seed in (1, 2)] == [1, 2]
    succeeded(wanjax("encode", "b", "--model", model, "--dir", "d", "--force"))


def test_a_named_file_is_replaced(model):
    for seed in (1, 2):
        succeeded(wanjax("a", "--model", model, *SMALL, "--seed", seed, "--out", "a.mp4"))
    assert read_metadata("a.mp4")["seed"] == 2
    assert len(files("stage_outputs")) == 2


def test_a_stopped_run_goes_on_to_the_video_s_own_name(model, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "frames", interrupted)
        result = wanjax("a", "--model", model, *SMALL)
    assert result.exit_code == 130
    assert files(".") == ["stage_outputs"]
    command = shlex.split(re.search(r"goes on from there: wanjax (.*)", result.stderr)[1])
    succeeded(wanjax(*command))
    [video] = files("wanjax_videos")
    assert [Path(video).stem] == files("stage_outputs")
