# SPDX-License-Identifier: Apache-2.0
"""`--quiet` and `--json`: what commands print on stdout, and that nothing else is printed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from PIL import Image

from tests.support.commands import refused, succeeded, wanjax
from tests.support.disks import limit_file_size
from tests.support.quick import quick
from tests.support.tiny import tiny_checkpoint
from tests.support.words import has_line_with_words
from wanjax.cli.report import Report
from wanjax.compile_cache.cache import compile_cache
from wanjax.media import stage_files
from wanjax.media.metadata import load_settings
from wanjax.media.video import read_metadata

pytestmark = pytest.mark.usefixtures("cached_programs")

SMALL = ("--size", "32x16", "--frames", "5", "--steps", "2", "--dtype", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "")  # so that it is restored if a test sets it
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS")


@pytest.mark.parametrize("option", quick(["-q"], ["-q", "--quiet"]))
def test_quiet_prints_only_the_path(model, option):
    empty = [" ", "--allow-empty-prompt"]  # an empty prompt gives a note
    result = succeeded(wanjax(*empty, "--model", model, *SMALL, "--out", "a.mp4", option))
    assert (result.stdout, result.stderr) == (f"{Path('a.mp4').absolute()}\n", "")
    for command in (["encode", "a", "--model", model], ["denoise", *SMALL], ["warmup", "--model", model, *SMALL]):
        assert succeeded(wanjax(*command, option)).output == ""
    assert succeeded(wanjax("decode", option)).output == f"{Path('stage_outputs/output_video.mp4').absolute()}\n"
    many = succeeded(wanjax("a", "--model", model, *SMALL, "--count", "2", "--out", "many", option))
    assert (len(many.stdout.splitlines()), many.stderr) == (2, "")
    assert succeeded(wanjax("convert", model, "there", option)).output == ""


@pytest.mark.parametrize("option", ["-q", "--json"])
def test_quiet_prints_only_errors(model, option):
    assert has_line_with_words(
        refused("a", "--model", model, "--size", "32x16", option, "--frames", "6"), "6 frames 4n + 1"
    )


def test_quiet_prints_how_to_resume(model, failing_in):
    with failing_in("frames", KeyboardInterrupt()):
        output = wanjax("a", "--model", model, *SMALL, "-q", "--dir", "d").stderr
    stopped, resume_command = output.splitlines()
    assert stopped == "wanjax: stopped"
    assert resume_command.endswith(": wanjax decode --dir d")


def test_json_describes_the_video(model):
    result = succeeded(wanjax("a", "--model", model, *SMALL, "--json", "--dir", "d", "--out", "a.mp4"))
    [line] = result.stdout.splitlines()
    data = json.loads(line)
    assert data.keys() == {"file", "folder", "record", "seconds"}
    assert (data["file"], data["folder"]) == (str(Path("a.mp4").absolute()), str(Path("d").absolute()))
    assert data["record"] == read_metadata("a.mp4")
    assert data["seconds"].keys() == {"encode", "denoise", "decode"}
    assert all(0 < seconds < 600 for seconds in data["seconds"].values())
    assert "step 2 of 2" in result.stderr


def test_json_names_no_removed_folder(model):
    [line] = succeeded(wanjax("a", "--model", model, *SMALL, "--json", "--out", "a.mp4")).stdout.splitlines()
    assert json.loads(line).keys() == {"file", "record", "seconds"}


def test_each_stage_prints_json(model):
    for command, name in (
        (["encode", "a", "--model", model, "--dtype", "float32"], stage_files.EMBEDDINGS_FILE),
        (["denoise", *SMALL, "-q"], stage_files.LATENTS_FILE),
        (["decode"], stage_files.VIDEO_FILE),
    ):
        result = succeeded(wanjax(*command, "--json", "--dir", "d"))
        data = json.loads(result.stdout)
        assert data["file"] == str((Path("d") / name).absolute())
        assert data["record"] == load_settings(Path("d"))
        assert list(data["seconds"]) == [command[0]]
        assert (result.stderr == "") == ("-q" in command)


def test_json_of_many_videos_is_a_line_for_each(model):
    Path("prompts.txt").write_text("a red circle\nein Straßenmusikant\n")
    options = ("generate", "--prompts", "prompts.txt", "--seeds", "1,2", "--model", model, *SMALL, "--out", "many")
    result = [json.loads(line) for line in succeeded(wanjax(*options, "--json")).stdout.splitlines()]
    message = [(video["record"]["prompt"], video["record"]["seed"]) for video in result]
    assert message == [(p, s) for p in ("a red circle", "ein Straßenmusikant") for s in (1, 2)]
    for video in result:
        assert video["record"] == read_metadata(video["file"])
        assert video["seconds"]["video"] > 0
    assert {Path(video["file"]).name for video in result} == set(os.listdir("many")) - {"manifest.jsonl"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a file of Linux")
@pytest.mark.parametrize("arguments", [["models"], ["models", "--json"], ["--help"], ["--version"]], ids=" ".join)
def test_output_to_a_full_disk_is_reported(arguments):
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "wanjax", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert run.returncode == 1
    assert len(run.stderr.splitlines()) == 1
    assert "No space left" in run.stderr


@pytest.mark.skipif(os.name != "posix", reason="sets a limit of POSIX")
def test_a_full_compilation_cache_is_reported_once(tmp_path, capsys):
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "xla"))
    compilation_cache.reset_cache()
    try:
        with limit_file_size(10), compile_cache(), Report().print_warnings():
            for i in range(2):
                jax.jit(lambda x, i=i: x + 271828 + i)(1)
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()
    [line] = capsys.readouterr().err.splitlines()
    assert has_line_with_words(line, "cache File too large")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--out", "a.mp4"), "ffmpeg written"),
        (("--count", "2", "--out", "many"), "ffmpeg written"),
        (("--out", "n" * 250 + ".gif"), "name 254 bytes most"),
    ],
)
def test_an_unwritable_output_is_reported_before_the_first_step(model, monkeypatch, options, words):
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "false")
    assert has_line_with_words(refused("a", "--model", model, *SMALL, *options, started=False), words)


def test_settings_that_a_folder_of_pictures_omits_are_reported_once(model):
    Path("clip").mkdir()
    for name in (*(f"{i}.png" for i in range(5)), ".5.png", "notes.pdf"):
        Image.new("RGB", (32, 16)).save(Path("clip") / name, "PNG")
    messages = succeeded(wanjax("encode", "a", "--model", model, "--video", "clip", "--dtype", "float32")).stderr
    assert len([line for line in messages.splitlines() if has_line_with_words(line, "clip 2 pictures")]) == 1


@pytest.mark.parametrize(
    ("num_videos", "words"),
    [(None, "completed kept continue"), (0, "no video complete start again"), (2, "completed kept continue")],
)
def test_a_stopped_command_says_what_is_complete(tmp_path, num_videos, words):
    report = Report()
    assert report.outcome == ""
    report.enable_resume()
    report.num_videos = num_videos
    assert has_line_with_words(report.outcome, words)
    report.print_result(tmp_path / "a.mp4", {})
    assert has_line_with_words(report.outcome, "completed is kept")
