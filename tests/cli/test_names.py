# SPDX-License-Identifier: Apache-2.0
"""Names of output files: a run replaces a finished video or its stage files only if the user forces it.

Stage files in the user's cache are removed when they are no longer needed.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import files, refused, succeeded, wanjax
from tests.support.disks import limit_file_size
from tests.support.quick import quick
from tests.support.tiny import tiny_checkpoint
from tests.support.words import has_line_with_words
from wanjax.cli import names, runs
from wanjax.cli import stages as cli_stages
from wanjax.errors import WanjaxError
from wanjax.media import stage_files
from wanjax.media.video import Video, read_metadata
from wanjax.stores import user_folders
from wanjax.stores.locks import FileLock

pytestmark = pytest.mark.usefixtures("cached_programs")

SMALL = ("--size", "32x16", "--frames", "5", "--steps", "2", "--dtype", "float32")
NAME = r"a-red-circle-moving-right-7-\d{8}-\d{6}(-\d)?"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def runs_folder(tmp_path) -> Path:
    return tmp_path / "cache" / "wanjax" / "runs"


@pytest.fixture
def _always_noon(monkeypatch):
    class Noon(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2030, 1, 2, 12, 0, 0)

    monkeypatch.setattr(names, "datetime", Noon)


def contents() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def test_each_run_has_unique_names(model, runs_folder):
    options = ("a red circle, moving right!", "--model", model, *SMALL, "--seed", "7")
    first = succeeded(wanjax(*options))
    before = contents()
    second = succeeded(wanjax(*options))
    assert before.items() <= contents().items()
    assert len(files("wanjax_videos")) == 2
    assert files(".") == ["wanjax_videos"]
    assert list(runs_folder.iterdir()) == []
    for result in (first, second):
        video = Path(result.stdout.strip())
        assert re.fullmatch(NAME, video.stem)
        assert video.parent == Path("wanjax_videos").absolute()
        assert str(runs_folder) not in result.stderr


@pytest.mark.usefixtures("_always_noon")
def test_a_used_name_gets_a_number(runs_folder):
    result = [runs.create_run_folder(partial(names.unused_names, "A cat", 42)) for _ in range(3)]
    stems = ["a-cat-42-20300102-120000", "a-cat-42-20300102-120000-2", "a-cat-42-20300102-120000-3"]
    assert [run.folder for run in result] == [runs_folder / stem for stem in stems]
    for run in result:
        run.close(is_complete=False)
    assert list(runs_folder.iterdir()) == []
    Path("wanjax_videos").mkdir()
    Path("wanjax_videos", stems[0] + ".mp4").touch()
    assert next(names.unused_names("A cat", 42)) == stems[1]


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
def test_a_prompt_is_shortened_for_a_file_name(prompt, slug):
    assert names.slug(prompt) == slug


def test_existing_files_are_replaced_only_by_force(model):
    """One rule for every command: the same video is not made twice, and another is refused."""
    options = ("--model", model, *SMALL)
    stages = {
        f"d/{stage_files.EMBEDDINGS_FILE}": ("encode", "a", "--model", model, *SMALL[:4]),
        f"d/{stage_files.LATENTS_FILE}": ("denoise", "--steps", "1", "--seed", "7"),
        f"d/{stage_files.VIDEO_FILE}": ("decode",),
    }
    for command in stages.values():
        succeeded(wanjax(*command, "--dir", "d"))
    succeeded(wanjax("a", *options, "--out", "a.mp4"))
    before = contents()
    for file, command in stages.items():
        assert has_line_with_words(succeeded(wanjax(*command, "--dir", "d")).stderr, f"{file} already exists --force")
    again = succeeded(wanjax("a", *options, "--out", "a.mp4", "--json"))
    assert json.loads(again.stdout)["file"] == str(Path("a.mp4").absolute())
    commands = {
        "prompt": ("encode", "b", "--model", model),
        "height": ("encode", "a", "--model", model, "--size", "48x32"),
        "seed": ("denoise", "--seed", "3"),
        "steps": ("denoise", "--steps", "2"),
        "fps": ("decode", "--fps", "3"),
    }
    for name, command in commands.items():
        assert has_line_with_words(refused(*command, "--dir", "d", started=False), f"d/ another {name} --force")
    Path("foreign.mp4").write_bytes(b"a user's")
    before |= contents()
    for out, command, words in (
        ("a.mp4", ("generate", "b", *options), "prompt"),
        ("a.mp4", ("generate", "a", *options, "--guidance-scale", "2"), "guidance"),
        ("a.mp4", ("decode", "--dir", "d"), "steps"),
        ("foreign.mp4", ("generate", "a", *options), "not written"),
    ):
        assert has_line_with_words(
            refused(*command, "--out", out, started=False), f"{out} {words} another --out --force"
        )
    assert has_line_with_words(
        refused("generate", "b", *options, "--dir", "d", started=False), f"d/{stage_files.VIDEO_FILE} prompt --force"
    )
    assert contents() == before


@pytest.mark.skipif(os.name != "posix", reason="has a root that users of POSIX may write")
def test_folders_are_created_but_none_at_the_root(model):
    succeeded(wanjax("a", "--model", model, *SMALL, "--out", "new/folder/a.mp4"))
    assert files("new/folder") == ["a.mp4"]
    for options in (("--out", "/nowhere-of-wanjax/b/a.mp4"), ("--dir", "/nowhere-of-wanjax/b")):
        assert has_line_with_words(
            refused("a", "--model", model, *SMALL, *options), "no folder /nowhere-of-wanjax path create"
        )
    assert not Path("/nowhere-of-wanjax").exists()


def test_force_replaces_existing_files(model):
    options = ("--model", model, *SMALL)
    succeeded(wanjax("a", *options, "--dir", "d"))
    succeeded(wanjax("b", *options, "--dir", "d", "--force"))
    assert read_metadata(f"d/{stage_files.VIDEO_FILE}")["prompt"] == "b"
    for command in (("denoise", "--seed", "3"), ("decode",)):
        succeeded(wanjax(*command, "--dir", "d", "--force"))
    assert read_metadata(f"d/{stage_files.VIDEO_FILE}")["seed"] == 3


def test_another_prompt_does_not_replace_latents_without_a_video(model):
    succeeded(wanjax("a", "--model", model, *SMALL, "--dir", "d", "--out", "a.mp4"))
    file = "d/stage2_latents.safetensors"
    options = ("--model", model, *SMALL, "--dir", "d")
    assert has_line_with_words(refused("generate", "b", *options), f"{file} different prompt --dir --force")
    assert has_line_with_words(refused("generate", "a", *options, "--guidance-scale", "9"), f"{file} guidance --dir")


def test_the_same_command_decodes_the_latents_of_its_folder(model):
    command = ("a", "--model", model, *SMALL, "--dir", "d", "--out", "a.mp4")
    succeeded(wanjax(*command))
    video = Path("a.mp4").read_bytes()
    Path("a.mp4").unlink()
    assert has_line_with_words(succeeded(wanjax(*command)).stderr, "d/stage2_latents.safetensors only decoded")
    assert Path("a.mp4").read_bytes() == video


def test_an_incomplete_video_does_not_count_as_made(model):
    command = ("a", "--model", model, *SMALL, "--out")
    for name in ("a.mp4", "empty.mp4", "frames"):
        succeeded(wanjax(*command, name))
    Path("a.mp4").write_bytes(Path("a.mp4").read_bytes()[:-100])
    Path("empty.mp4").write_bytes(b"")
    Path("frames/frame_00002.png").unlink()
    for name in ("a.mp4", "empty.mp4", "frames"):
        assert has_line_with_words(refused(*command, name), f"{name} incomplete --out --force")
        succeeded(wanjax(*command, name, "--force"))
        assert "already exists" in succeeded(wanjax(*command, name)).stderr


def test_nothing_is_loaded_if_the_output_exists(model, monkeypatch):
    """The refusal comes before a download of gigabytes."""
    Path("a.mp4").write_bytes(b"a user's")
    monkeypatch.setattr(cli_stages, "load", None)
    for command in (("a", "--model", "wan2.1-t2v-14b"), ("a", "--model", model)):
        assert has_line_with_words(refused(*command, "--out", "a.mp4"), "a.mp4 --force")


@pytest.mark.parametrize("stage", ["latents", "frames"])
@pytest.mark.parametrize("has_home", quick([True], [True, False]))
def test_a_stopped_run_resumes_to_the_same_file_name(
    model, tmp_path, monkeypatch, runs_folder, failing_in, stage, has_home
):
    if not has_home:
        _without_home(monkeypatch)
    with failing_in(stage, KeyboardInterrupt()):
        result = wanjax("a", "--model", model, *SMALL)
    assert result.exit_code == 130
    assert files(".") == []
    [resume_command] = [line for line in result.stderr.splitlines() if "completed work is kept" in line]
    command = shlex.split(resume_command.partition("continue with: wanjax ")[2])
    folder = Path(command[command.index("--dir" if command[0] == "decode" else "--from") + 1])
    assert resume_command.count(str(folder)) == 1
    assert stage_files.EMBEDDINGS_FILE in files(folder)
    assert folder.is_relative_to(runs_folder if has_home else tmp_path)
    succeeded(wanjax(*command))
    [video] = files("wanjax_videos")
    assert Path(video).stem == folder.name
    assert not folder.exists()
    if has_home:
        assert has_line_with_words(refused(*command), f"{folder} removed video")
    assert list(tmp_path.glob(f"{runs.TEMP_PREFIX}*")) == []


@pytest.mark.parametrize("stage", ["encoded", "denoised"])
def test_ctrl_c_before_a_stage_is_saved_loses_nothing(model, monkeypatch, stage):
    save = getattr(cli_stages.StageFileObserver, stage)

    def interrupt_and_save(*args):
        signal.raise_signal(signal.SIGINT)
        save(*args)

    monkeypatch.setattr(cli_stages.StageFileObserver, stage, interrupt_and_save)
    result = wanjax("a", "--model", model, *SMALL, "--dir", "d")
    assert result.exit_code == 130
    assert "completed work is kept; continue with: wanjax" in result.stderr.splitlines()[-1]
    assert (stage_files.LATENTS_FILE in files("d")) == (stage == "denoised")


def test_another_video_from_a_stopped_run_keeps_its_steps(model, runs_folder, failing_in):
    with failing_in("latents", KeyboardInterrupt()):
        wanjax("a", "--model", model, *SMALL, "--out", "a.mp4")
    [folder] = runs_folder.iterdir()
    before = files(folder)
    succeeded(wanjax("generate", "--from", str(folder), "--seed", "6", "--out", "b.mp4"))
    assert files(folder) == before
    assert list(runs_folder.iterdir()) == [folder]
    succeeded(wanjax("generate", "--from", str(folder), "--out", "a.mp4"))
    assert not folder.exists()


@pytest.mark.slow  # tests/pipelines/test_windows.py has a quick test of a command that resumes
def test_a_long_video_stopped_in_its_first_window_resumes(runs_folder, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    long = ("--size", "32x32", "--frames", "5", "--steps", "2", "--windows", "2")
    with monkeypatch.context() as patch:
        patch.setattr(cli_stages.ReportObserver, "stepped", stop)
        result = wanjax("a red circle", *long, "--out", "a.mp4")
    assert result.exit_code == 130
    [folder] = runs_folder.iterdir()
    command = ["generate", "--from", str(folder), "--out", "a.mp4"]
    assert result.stderr.endswith(f"completed work is kept; continue with: {shlex.join(['wanjax', *command])}\n")
    assert {stage_files.CONFIG, "stage2_state_1.safetensors"} <= {*files(folder)}
    assert "resumed after 1 of 2 steps" in succeeded(wanjax(*command)).stderr
    assert not folder.exists()


@pytest.mark.parametrize("command", [("encode", "a blue circle"), ("generate", "a blue circle")])
def test_stage_settings_are_not_written_beside_the_frames_of_a_video(command):
    """`info` would show the settings of the stage as those of the frames."""
    Video(np.zeros((2, 16, 32, 3), np.uint8), 8, {"prompt": "a red circle"}).save("frames/")
    before = files("frames")
    assert has_line_with_words(
        refused(*command, "--dir", "frames", started=False), "frames frame_00000.png --dir --force"
    )
    assert files("frames") == before
    assert read_metadata("frames")["prompt"] == "a red circle"


def test_a_stopped_run_with_a_drawn_seed_resumes_from_its_folder(model, failing_in):
    """The same command would draw another seed."""
    with failing_in("latents", KeyboardInterrupt()):
        result = wanjax("a", "--model", model, *SMALL, "--seed", "random", "--dir", "d", "--out", "a.mp4")
    assert "continue with: wanjax generate --from d --dir d --out a.mp4\n" in result.stderr


def _without_home(monkeypatch):
    def unknown():
        raise RuntimeError("Could not determine home directory.")  # the error for a user without an entry in the system

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", unknown)


def test_a_folder_that_cannot_be_written_is_replaced_by_a_temporary_one(tmp_path, runs_folder):
    runs_folder.parent.mkdir(parents=True)
    runs_folder.write_text("a file")
    with closing_run(runs.create_run_folder(lambda: iter(["a"]))) as run:
        assert run.folder.is_dir()
        assert run.folder.is_relative_to(tmp_path)
    assert runs_folder.read_text() == "a file"
    assert list(tmp_path.glob(f"{runs.TEMP_PREFIX}*")) == []


def test_a_folder_that_cannot_be_locked_is_replaced_by_a_temporary_one(tmp_path, runs_folder, monkeypatch):
    """The home folders of some clusters have no locks."""

    def lock_or_refuse(file: Path, *message: str) -> FileLock:
        if file.is_relative_to(runs_folder):
            raise WanjaxError(f"{file} cannot be written: locking protocol")
        return FileLock(file, *message)

    monkeypatch.setattr(runs, "FileLock", lock_or_refuse)
    with closing_run(runs.create_run_folder(lambda: iter(["a"]))) as run:
        assert run.folder.parent.parent == tmp_path
    assert list(runs_folder.iterdir()) == []


@contextmanager
def closing_run(run: runs.LockedRun) -> Iterator[runs.LockedRun]:
    yield run
    run.close(is_complete=False)


def test_a_user_without_a_home_gets_a_cache_until_the_process_ends(tmp_path, monkeypatch):
    _without_home(monkeypatch)
    assert user_folders.home() is None
    assert user_folders.lasting_cache() is None
    assert user_folders.user_cache() == user_folders.user_cache()
    assert user_folders.user_cache().is_dir()


def test_a_name_in_a_missing_home_is_refused(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(
        "pwd.getpwuid", lambda number: {}[number]
    )  # the error for a user without an entry in the system
    assert "~" in refused("info", "~/a.mp4")


DAY = 24 * 3600


def age(file: Path, days: float) -> None:
    used = time.time() - days * DAY
    os.utime(file, (used, used))


def write_stopped_run(runs_folder: Path, name: str, *, days: float, size: int = 0) -> Path:
    """Write the folder of a run that was stopped so many days ago."""
    folder = runs_folder / name
    folder.mkdir(parents=True)
    locked_run = runs.LockedRun(folder)
    with (folder / stage_files.LATENTS_FILE).open("wb") as file:
        file.truncate(size)  # a sparse file
    locked_run.close(is_complete=False)
    age(folder / stage_files.LATENTS_FILE, days)
    return folder


def test_old_runs_and_the_oldest_of_too_many_are_removed(runs_folder):
    old, young = write_stopped_run(runs_folder, "old", days=14.1), write_stopped_run(runs_folder, "young", days=13.9)
    runs.remove_old_runs()
    assert (old.exists(), young.exists()) == (False, True)
    large = [write_stopped_run(runs_folder, f"large-{days}", days=days, size=9 * 10**9) for days in (3, 2, 1)]
    runs.remove_old_runs()
    assert [folder.exists() for folder in large] == [False, True, True]
    assert young.exists()


@pytest.mark.parametrize("command", [["info", "a.mp4"], ["denoise", "--dir", "d"]])
def test_any_command_removes_old_runs(runs_folder, command):
    old = write_stopped_run(runs_folder, "old", days=15)
    wanjax(*command)
    assert not old.exists()


def test_an_active_run_is_not_removed_by_another_process(runs_folder):
    """Its age and size do not matter until its process is killed."""
    folder = str(runs_folder / "old")
    code = f"from pathlib import Path; from wanjax.cli.runs import LockedRun; LockedRun(Path({folder!r})); "
    write_stopped_run(runs_folder, "old", days=15, size=30 * 10**9)
    with subprocess.Popen([sys.executable, "-c", code + "print(flush=True); input()"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        runs.remove_old_runs()
        assert (runs_folder / "old" / stage_files.LATENTS_FILE).exists()
        process.kill()
    runs.remove_old_runs()
    assert not (runs_folder / "old").exists()


def test_used_folders_and_files_of_the_user_stay(runs_folder, tmp_path):
    used, with_video = (
        write_stopped_run(runs_folder, "used", days=30),
        write_stopped_run(runs_folder, "with-a-video", days=30),
    )
    killed = write_stopped_run(runs_folder, "killed", days=30)
    part = killed / ".1@elsewhere.partial.stage2_latents.safetensors"  # a file of a killed process
    part.touch()
    age(part, 30)
    (with_video / stage_files.VIDEO_FILE).write_bytes(b"a user's")
    user_files = [
        runs_folder / "notes",
        runs_folder / "a-folder" / "notes",
        tmp_path / "elsewhere" / stage_files.LATENTS_FILE,
    ]
    for file in user_files:
        file.parent.mkdir(exist_ok=True)
        file.touch()
        age(file, 30)
    (runs_folder / "a-link").symlink_to(tmp_path / "elsewhere")
    resumed_run = write_stopped_run(runs_folder, "resumed", days=30)
    with closing(FileLock(used / runs.LOCK_FILE, "run", "--dir")):
        runs.remove_old_runs(keep=resumed_run)
    assert (used / stage_files.LATENTS_FILE).exists()
    assert (resumed_run / stage_files.LATENTS_FILE).exists()
    assert files(with_video) == [stage_files.VIDEO_FILE, runs.LOCK_FILE]
    assert all(file.exists() for file in user_files)
    assert not killed.exists()


def test_two_runs_cannot_use_the_same_folder(model, runs_folder):
    folder = write_stopped_run(runs_folder, "held", days=0)
    (folder / stage_files.CONFIG).write_text("{}")
    with closing(FileLock(folder / runs.LOCK_FILE, "run", "--dir")):
        assert "another run uses" in refused("a", "--model", model, *SMALL, "--dir", str(folder), "--force")
    assert (folder / stage_files.LATENTS_FILE).exists()


def test_a_preview_stays_with_the_video(model, tmp_path, runs_folder):
    succeeded(wanjax("a", "--model", model, *SMALL, "--preview", "--out", "a.mp4"))
    assert files(".") == ["a.mp4", "a.preview.png"]
    longest = "é" * 115  # 230 bytes, too long for .preview.png
    succeeded(wanjax("a", "--model", model, *SMALL, "--preview", "--out", f"{longest}.mp4"))
    [preview] = [name for name in files(".") if name.startswith("é") and name.endswith(".preview.png")]
    assert longest.startswith(preview.removesuffix(".preview.png"))
    assert list(runs_folder.iterdir()) == []


def test_a_run_killed_while_it_decodes_only_decodes(model, runs_folder, failing_in):
    with failing_in("frames", KeyboardInterrupt()):
        wanjax("a", "--model", model, *SMALL)
    [folder] = runs_folder.iterdir()
    from_folder = ("generate", "--from", str(folder))
    other = succeeded(wanjax(*from_folder, "--seed", "6", "--out", "b.mp4"))
    assert "only decoded" not in other.stderr
    with failing_in("latents", AssertionError()):
        same = succeeded(wanjax(*from_folder, "--out", "a.mp4"))
    assert has_line_with_words(same.stderr, "stage2_latents.safetensors only decoded")
    assert not folder.exists()


@pytest.mark.skipif(os.name != "posix", reason="sets a limit of POSIX")
def test_a_full_cache_loses_no_video(model, runs_folder):
    """Without --dir, stage files are optional: a full quota of the home folder does not stop the video."""
    options = ("a", "--model", model, *SMALL, "--out", "a.mp4", "--force")
    succeeded(wanjax(*options))  # caches its programs
    with limit_file_size(4000):
        result = succeeded(wanjax(*options))
        assert re.search(f"note: .*{stage_files.EMBEDDINGS_FILE}.*too large", result.stderr)
        assert files(".") == ["a.mp4"]
        output = refused(*options, "--dir", "d", status=1)
    assert stage_files.EMBEDDINGS_FILE in output
    assert "too large" in output
    assert not os.path.exists("d")  # the command removed the folder that it had created
    assert list(runs_folder.iterdir()) == []


def test_a_folder_of_the_user_stays(model, runs_folder):
    succeeded(wanjax("a", "--model", model, *SMALL, "--dir", "d", "--out", "a.mp4"))
    assert files("d") == [stage_files.CONFIG, stage_files.EMBEDDINGS_FILE, stage_files.LATENTS_FILE]
    assert not runs_folder.exists()


@pytest.mark.parametrize("name", ["stage2_state", "stage2_state_3", "stage2_state_pass_2", "stage2_state_3_pass_2"])
def test_every_state_file_is_removed_with_its_run(tmp_path, name):
    """Also the state files of windows and later passes, and no other files."""
    run = runs.create_run_folder(lambda: iter(["a"]))
    state, text_file = run.folder / f"{name}.safetensors", run.folder / f"{name}.txt"
    state.touch()
    text_file.touch()
    run.close(is_complete=True)
    assert (state.exists(), text_file.exists()) == (False, True)
