# SPDX-License-Identifier: Apache-2.0
"""Every option that takes a file or a number, with an invalid value: an error message, which names the value."""

import errno
import io
from pathlib import Path

import pytest

from tests.support.clips import write_clips
from tests.support.commands import refused, wanjax
from tests.support.words import has_line_with_words
from wanjax.checkpoints.lora_source import Lora
from wanjax.errors import WanjaxError
from wanjax.loading import load
from wanjax.pipelines.model import min_step_bytes
from wanjax.registry import model_description

LONG = "x" * 300  # longer than a file name may be
FILES = {
    "folder": None,
    "missing": None,
    "empty": b"",
    "binary": bytes(range(256)) * 8,
    "latin.txt": "caf\xe9".encode("latin-1"),
    LONG: None,
}
VIDEO_OPTIONS = (
    *("--image", "--last-image", "--video", "--reference", "--noise", "--lora", "--decoder", "--preview-decoder"),
    "--model",
)
COMMANDS = {
    **{option: ("generate", "a", option) for option in VIDEO_OPTIONS},
    "--mask": ("generate", "a", "--video", "clip", "--mask"),
    "--prompts": ("generate", "--prompts"),
    "--config": ("generate", "a", "--config"),
    "--from": ("generate", "--from"),
    "info": ("info",),
    "convert": ("convert", "--to", "wanjax", "--", "to"),
    "denoise": ("denoise", "--dir"),
    "decode": ("decode", "--dir"),
    "plan": ("plan", "--chip", "cpu", "--image"),
    "train": ("train", "nano", "--out", "out"),
}
RAW_WORDS = ("Errno", "codec", "Traceback", "{", "['")  # parts of an exception or of a Python value


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, contents in FILES.items():
        if contents is not None:
            Path(name).write_bytes(contents)
    for folder in ("folder", "clip"):
        Path(folder).mkdir()


def error_message(*arguments: str | Path) -> str:
    """Return the error message of a command, which must have no raw Python text."""
    output = refused(*arguments)
    assert not [raw for raw in RAW_WORDS if raw in output], output
    return output


UNSUPPORTED_BY_NANO = ("--last-image", "--reference", "--mask")  # nano refuses these before it reads the file


@pytest.mark.parametrize("name", COMMANDS)
def test_invalid_files_are_refused(name):
    command = COMMANDS[name]
    for file in FILES:
        if (name, file) == ("--config", "empty"):  # an empty config file is valid
            continue
        options = ("convert", file, "to") if name == "convert" else (*command, file)
        assert ("cannot use" if name in UNSUPPORTED_BY_NANO else file[:100]) in error_message(*options)


def test_an_input_that_a_model_cannot_use_is_refused_with_a_model_that_can():
    assert has_line_with_words(refused("generate", "a cat", "--mask", "m.png"), "nano mask wan2.1-vace-1.3b takes")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "convert"])
def test_an_empty_name_does_not_mean_the_current_folder(name):
    assert "empty name" in error_message(*COMMANDS[name], "")


@pytest.mark.parametrize("name", ["--prompts", "--config", "denoise"])
def test_a_file_without_permission_is_reported(name, monkeypatch):
    """Simulated, because root may read every file."""
    file = Path("stages/generation_config.json" if name == "denoise" else "forbidden")
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}")
    original_open = io.open

    def open_without_permission(path, *arguments, **options):
        if Path(str(path)).name == file.name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original_open(path, *arguments, **options)

    monkeypatch.setattr(io, "open", open_without_permission)
    inputs = file.parent if name == "denoise" else file
    assert has_line_with_words(error_message(*COMMANDS[name], inputs), f"{file} Permission denied")


VIDEO_NUMBERS = {  # of options that are no fields of a request
    "--count": (0, -1),
    "--seeds": ("", "5..1", "0..99999999999"),
    "--window": (0, -1),
    "--max-picture": (0, -1),
    "--mesh": ("", "dp=0"),
    "--attention": ("radial:0", "radial:-1"),
}
TRAINING_NUMBERS = {
    **dict.fromkeys(("--batch-size", "--grad-accum-steps", "--lora-rank", "--min-frames"), (0, -1)),
    **dict.fromkeys(("--save-every", "--sample-every", "--validation-every"), (0, -1)),
    **dict.fromkeys(("--lora-alpha", "--learning-rate", "--shift", "--logit-std"), (0, -1)),
    **dict.fromkeys(("--max-grad-norm", "--weight-decay", "--warmup-steps", "--holdout-every", "--seed"), (-1,)),
    **dict.fromkeys(("--lora-dropout", "--ema-decay", "--caption-dropout", "--uncaptioned-preservation"), (-1, 2)),
    "--logit-mean": (),
}


@pytest.mark.parametrize("option", VIDEO_NUMBERS)
def test_invalid_numbers_of_a_video_are_refused(option):
    for value in (*VIDEO_NUMBERS[option], "nan", "inf", "many"):
        output = error_message("generate", "a", option, str(value))
        wrong = str(value).rpartition(":")[2]
        assert wrong in output


@pytest.mark.parametrize("option", TRAINING_NUMBERS)
def test_invalid_numbers_of_a_training_are_refused(option):
    data = write_clips(Path("data"), 1)
    for value in (*TRAINING_NUMBERS[option], "nan", "inf", "many"):
        assert str(value) in error_message("train", "nano", data, "--out", "out", option, str(value))
    assert not [path for path in Path().rglob("*.safetensors")]


def test_an_unknown_option_beside_version_is_refused():
    run = wanjax("--version", "--foo")
    assert (run.exit_code, run.stdout) == (2, "")
    assert has_line_with_words(run.stderr, "wanjax: --foo")


def test_a_folder_names_its_only_lora():
    assert Lora.parse("folder:0.5").file == "folder"
    Path("folder/a.safetensors").write_bytes(b"")
    Path("folder/readme.md").write_text("")
    assert Lora.parse("folder:0.5").resolve_folder() == Lora("folder/a.safetensors", 0.5)
    Path("folder/b.safetensors").write_bytes(b"")
    with pytest.raises(WanjaxError, match=r"a\.safetensors, b\.safetensors"):
        Lora("folder").resolve_folder()


def test_a_picture_in_place_of_a_clip_needs_one_frame(tmp_path):
    from PIL import Image

    Image.new("RGB", (64, 64)).save("picture.png")
    for more in ((), ("--image", "picture.png")):
        assert has_line_with_words(
            error_message("generate", "a", "--video", "picture.png", *more), "1 frame picture image"
        )
    _, chosen = load("nano").prepare(video="picture.png", frames=1)
    assert chosen.frames == 1


def test_a_video_larger_than_the_memory_is_refused_before_anything_is_loaded(machine):
    pipe = load("nano")
    weights = pipe.components.sizes["transformer"]
    _, settings = pipe.prepare()
    required = weights + min_step_bytes(pipe.model, settings)
    machine.has_memory(required)
    pipe.prepare()
    assert has_line_with_words(
        error_message("generate", "a", "--size", "128x64", "--frames", "33"), "128x64 33 frames memory"
    )
    machine.has_memory(None)  # unknown
    pipe.prepare(size=(1024, 1024))


def test_the_minimal_memory_is_that_of_four_arrays_of_tokens():
    model = model_description("wan2.1-t2v-1.3b")
    large = model.settings.updated({"frames": 99_997, "dtype": "bfloat16"})
    tokens = 25_000 * (480 // 16) * (832 // 16)
    assert min_step_bytes(model.model, large) == 4 * tokens * 1536 * 2
    assert min_step_bytes(model_description("wan2.1-t2v-1.3b-causal").model, large) == 0
