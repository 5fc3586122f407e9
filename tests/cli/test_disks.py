# SPDX-License-Identifier: Apache-2.0
"""Disks that cannot be written, and disks that are full: an error message with the path, and no partial file."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from PIL import Image

from tests.support.commands import refused, succeeded, wanjax
from tests.support.disks import limit_file_size
from tests.support.quick import quick
from tests.support.words import has_line_with_words
from wanjax.checkpoints.convert import ConversionToWanjax

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="limits the size of files"),
    pytest.mark.usefixtures("cached_programs"),
]
SMALL = ("--size", "32x32", "--frames", "5")
PROMPT = ("a red circle", *SMALL, "--steps", "1")
UNWRITABLE = Path("/sys")  # not even root can create files here on Linux
COMMANDS = {  # commands that write into the folder DISK
    "generate --out": (*PROMPT, "--out", "DISK/a.mp4"),
    "generate --dir": (*PROMPT, "--dir", "DISK/stages"),
    "encode": ("encode", "a red circle", *SMALL, "--dir", "DISK/stages"),
    "batch": ("batch", "prompts.txt", *SMALL, "--steps", "1", "--out", "DISK/videos"),
    "train": ("train", "nano", "clips", "--size", "32x32", "--frames", "1", "--steps", "1", "--out", "DISK/trained"),
    "convert": ("convert", "nano", "DISK/converted"),
    "serve": ("serve", "--dir", "DISK/served", "--port", "0"),
    "denoise": ("denoise", *SMALL, "--steps", "1", "--dir", "DISK/stages"),
    "decode": ("decode", "--dir", "DISK/stages"),
}
WITH_OTHER_DISKS = ("generate --out", "batch", "serve")  # commands that have files on other disks too
STAGES_BEFORE = {"denoise": 1, "decode": 2}  # the number of stages that must run before


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "prompts.txt").write_text("a red circle\n")
    (folder / "clips").mkdir()
    Image.new("RGB", (32, 32)).save(folder / "clips/a.png")
    (folder / "clips/a.txt").write_text("a red circle")
    return folder


@pytest.fixture
def stages(request, inputs, tmp_path, monkeypatch) -> Path:
    """The folder DISK, with the files of the stages before a command."""
    monkeypatch.chdir(inputs)
    disk = tmp_path / "disk"
    disk.mkdir()
    num_stages = STAGES_BEFORE.get(request.node.callspec.params["command"], 0)
    if num_stages >= 1:
        succeeded(wanjax("encode", "a red circle", *SMALL, "--dir", disk / "stages"))
    if num_stages >= 2:
        succeeded(wanjax("denoise", *SMALL, "--steps", "1", "--dir", disk / "stages"))
    return disk


def arguments(command: str, disk: Path) -> list[str]:
    return [text.replace("DISK", str(disk)) for text in COMMANDS[command]]


def files(disk: Path) -> list[Path]:
    return sorted(disk.rglob("*"))


@pytest.mark.skipif(not UNWRITABLE.is_dir(), reason="no folder is unwritable for root")
@pytest.mark.parametrize(
    "command",
    quick(["generate --out", "batch", "train", "convert"], [name for name in COMMANDS if name not in STAGES_BEFORE]),
)
def test_a_disk_that_cannot_be_written_is_reported(inputs, monkeypatch, command):
    monkeypatch.chdir(inputs)
    assert str(UNWRITABLE) in refused(*arguments(command, UNWRITABLE))


@pytest.mark.parametrize(
    "command", quick(["encode", "convert"], [name for name in COMMANDS if name not in WITH_OTHER_DISKS])
)
def test_a_full_disk_is_reported(stages, command):
    """A full disk is not a mistake of the user, so the status is 1."""
    before = files(stages)
    with limit_file_size(100):
        assert str(stages) in refused(*arguments(command, stages), status=1)
    resumable = ("trained", ".converted.partial")  # the same command resumes from these files
    assert not [path for path in files(stages) if path not in before and not {*resumable} & {*path.parts}]


@pytest.mark.skipif(not UNWRITABLE.is_dir(), reason="no folder is unwritable for root")
def test_an_unwritable_latent_cache_names_its_option(inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(inputs)
    message = refused(*arguments("train", tmp_path), "--latent-cache", str(UNWRITABLE))
    assert has_line_with_words(message, f"{UNWRITABLE} cannot be written give another --latent-cache")


@pytest.mark.parametrize("command", ["train", "convert"])
def test_the_command_restarts_if_no_work_is_complete(stages, command, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ConversionToWanjax, "_write", full)
    with limit_file_size(100) if command == "train" else nullcontext():
        result = wanjax(*arguments(command, stages))
    assert result.exit_code == 1
    assert command == "train" or "free some space" in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("no work is complete; start again with: wanjax"), result.stderr


def test_training_stops_before_a_checkpoint_that_a_disk_has_no_room_for(inputs, tmp_path, monkeypatch, machine):
    """Otherwise threads of Orbax print tracebacks, and leave a part of the checkpoint."""
    monkeypatch.chdir(inputs)
    machine.has_disk(free=10_000)
    latents = str(tmp_path / "latents")
    message = refused(*arguments("train", tmp_path), "--latent-cache", latents, status=1)
    assert has_line_with_words(message, f"{tmp_path}/trained a checkpoint has 6.88 MB 10 kB are free: free some space")
    assert not list((tmp_path / "trained").rglob("*orbax*"))
