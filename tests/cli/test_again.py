# SPDX-License-Identifier: Apache-2.0
"""`info` prints the settings of a video, and `generate --from` reproduces the video from them."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import wanjax as library
from tests.support.commands import refused, succeeded, wanjax
from tests.support.quick import quick
from tests.support.tiny import tiny_checkpoint, tiny_image_checkpoint
from tests.support.words import has_line_with_words
from wanjax.checkpoints.files import save_safetensors
from wanjax.cli import catalogue
from wanjax.media import stage_files
from wanjax.media.metadata import load_settings
from wanjax.media.pictures import read_clip
from wanjax.media.video import read_metadata, write_video

pytestmark = pytest.mark.usefixtures("cached_programs")

SMALL = ("--size", "32x16", "--frames", "5", "--steps", "2", "--dtype", "float32")
ONE_FRAME = ("--size", "32x16", "--frames", "1", "--steps", "2", "--dtype", "float32")
FRAMES = np.zeros((1, 16, 32, 3), np.uint8)
RUN_COMMANDS = """if True:  # runs commands, which `::` divides, and writes a null after the output of each
    import os, sys
    from itertools import groupby
    from wanjax.cli import main

    for between, arguments in groupby(sys.argv[1:], "::".__eq__):
        if not between:
            try:
                main(list(arguments), "wanjax")
            except SystemExit as end:
                sys.stdout.flush()
                sys.stderr.flush()
                os.write(1, b"\\0")
                os.write(2, b"\\0%d\\0" % end.code)"""


@pytest.fixture(scope="module")
def text_model(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def image_model(tmp_path_factory) -> str:
    return str(tiny_image_checkpoint(tmp_path_factory.mktemp("image")))


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def frames(path: str | Path) -> np.ndarray:
    return read_clip(path, 99, 16)


def lines(output: str) -> dict[str, str]:
    """Return the lines of `info`: names and values."""
    return {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in output.splitlines()}


@pytest.mark.parametrize("name", quick(["a.mp4", "a"], ["a.mp4", "a.mov", "a.webm", "a.gif", "a.webp", "a"]))
def test_info_prints_the_settings_of_each_format(text_model, name):
    options = ("--negative-prompt", "grey", "--guidance-scale", "2.5", "--seed", "7", "--fps", "8")
    succeeded(wanjax("a red circle", "--model", text_model, *SMALL, *options, "--dir", "d", "--out", name))
    entries = lines(succeeded(wanjax("info", name)).stdout)
    assert list(entries)[:8] == ["model", "prompt", "negative prompt", "size", "frames", "steps", "guidance", "seed"]
    assert (
        entries.items()
        >= {
            "model": text_model,
            "prompt": "a red circle",
            "negative prompt": "grey",
            "size": "32x16",
            "frames": "5 at 8 a second",
            "steps": "2",
            "guidance": "2.5",
            "seed": "7",
            "dtype": "float32",
            "scheduler": "unipc",
        }.items()
    )
    assert not {"strength", "resize"} & entries.keys()  # without effect, because there is no video and no picture
    metadata = json.loads(succeeded(wanjax("info", name, "--json")).stdout)
    assert metadata == read_metadata(name) == load_settings(Path("d"))
    if name == "a":
        for path in ("a/frame_00002.png", "d", "d/generation_config.json", "d/stage2_latents.safetensors"):
            entries = json.loads(succeeded(wanjax("info", path, "--json")).stdout)
            assert entries.items() <= metadata.items()
            assert {**entries, "fps": 8} == metadata
        encoded = json.loads(succeeded(wanjax("info", "d/stage1_embeddings.safetensors", "--json")).stdout)
        assert encoded == {"prompt": "a red circle", "negative_prompt": "grey"}


def test_info_prints_all_settings(image_model):
    Image.fromarray(np.full((16, 32, 3), 200, np.uint8)).save("red.png")
    more = ("--image", "red.png", "--tile", "--scheduler", "unipc:order=1")
    succeeded(wanjax("a", "--model", image_model, *ONE_FRAME, *more, "--seed", "-1", "--dir", "d", "--out", "a.mp4"))
    metadata = read_metadata("a.mp4") | {"mesh": "dp=2,sp=2,tp=2", "rules": "tp", "lora": ["a:0.5", "b:1"]}
    stage_files.save_settings(Path("d"), metadata)
    entries = lines(succeeded(wanjax("info", "d")).stdout)
    assert (entries["image"], entries["resize"]) == (str(Path("red.png").absolute()), "crop")
    assert (entries["mesh"], entries["rules"], entries["tiling"]) == ("dp=2,sp=2,tp=2", "tp", "size 256, stride 192")
    assert (entries["lora"], entries["scheduler"]) == ("a:0.5, b:1", "unipc:order=1")
    assert int(entries["seed"]) == metadata["seed"] >= 0


def test_control_characters_are_escaped():
    assert catalogue._as_text("a\x1b[2J\n\udce9é红") == r"a\x1b[2J\n\udce9é红"


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("absent.mp4", None, "no file absent.mp4"),
        ("absent.safetensors", None, "no file absent.safetensors"),
        ("text.mp4", b"not a video", "text.mp4 settings"),
        ("text.txt", b"not a video", "text.txt settings"),
        ("empty.png", b"", "empty.png settings"),
        ("broken.png", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00", "broken.png settings"),
        ("other.json", b'{"bos_token_id": 1}', "other.json settings"),
        ("list.json", b'["prompt"]', "list.json settings ComfyUI"),
        ("empty.json", b"", "empty.json settings empty complete copy"),
        ("cut.json", b'{"nodes": [\n{"id":', "cut.json not valid JSON line 2"),
        ("deep.json", b"[" * 100_000, "deep.json nested too deep"),
        ("weights.safetensors", b"\x02\x00\x00\x00\x00\x00\x00\x00{}", "weights.safetensors settings"),
        ("film.mp4", {"prompt": {"3": {"class_type": "KSampler"}}, "workflow": {}}, "film.mp4 no node saves a video"),
        (".", None, "folder . no video stage"),
    ],
)
def test_files_without_metadata_are_refused(name, contents, message):
    """A dict is the metadata of another program's video."""
    if isinstance(contents, dict):
        write_video(name, FRAMES, 8, contents)
    elif contents is not None:
        Path(name).write_bytes(contents)
    for command in (["info", name], ["info", "--json", name], ["generate", "--from", name]):
        assert has_line_with_words(refused(*command), message)
    assert [path.name for path in Path().iterdir()] == ([name] if contents is not None else [])


def test_the_message_for_a_folder_of_videos_names_a_video_in_it(tmp_path):
    folder = tmp_path / "wanjax_videos"
    folder.mkdir()
    for count, name in enumerate(("two.mp4", "one.webp"), 1):
        (folder / name).write_bytes(b"film")
        for command in (["info", folder], ["generate", "--from", folder]):
            assert has_line_with_words(refused(*map(str, command)), f"{folder} folder {count} {folder / name}")


def test_info_of_a_server_s_folder_names_a_video(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("served/video_1").mkdir(parents=True)
    Path("served/video_1/video.mp4").touch()
    assert has_line_with_words(refused("info", "served"), "served folders of videos: give served/video_1/video.mp4")


def test_the_message_for_a_checkpoint_names_the_command_that_describes_it():
    folder = Path("my model")
    folder.mkdir()
    (folder / "model_index.json").write_text("{}")
    assert has_line_with_words(refused("info", str(folder)), "my model no video wanjax models 'my model'")
    (folder / "transformer").mkdir()
    (folder / "generation_config.json").write_text('{"steps": 4}')
    for path in (folder, folder / "generation_config.json"):
        assert has_line_with_words(refused("info", str(path)), "my model is a checkpoint wanjax models 'my model'")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("manifest.jsonl", "neither a video nor a picture"),
        ("a.preview.png", "it is a preview, or another program wrote it"),
        ("lora.safetensors", "give a LoRA to --lora"),
        ("noise.mp4", "it is damaged, or neither a video nor a picture"),
    ],
)
def test_the_message_says_why_a_file_has_no_settings(name, words):
    match name:
        case "a.preview.png":
            Image.new("RGB", (8, 8)).save(name)
        case "lora.safetensors":
            save_safetensors(Path(name), {"a.lora_A.weight": np.zeros((1, 2), np.float32)})
        case "noise.mp4":
            Path(name).write_bytes(np.random.default_rng(0).bytes(3000))
        case _:
            Path(name).write_text("{}\n")
    for command in (["info", name], ["generate", "--from", name]):
        message = refused(*command)
        assert words in message
        assert "rewrote" not in message


def test_a_video_is_reproduced_to_the_bit(text_model):
    options = (
        "--model",
        text_model,
        *SMALL,
        "--guidance-scale",
        "3.5",
        "--scheduler",
        "euler",
        "--attention",
        "chunked",
    )
    succeeded(wanjax("a red circle", *options, "--seed", "-1", "--fps", "8", "--dir", "one", "--out", "one.mp4"))
    succeeded(wanjax("generate", "--from", "one.mp4", "--dir", "two", "--out", "two.mp4"))
    assert read_metadata("two.mp4") == read_metadata("one.mp4")
    np.testing.assert_array_equal(frames("two.mp4"), frames("one.mp4"))
    latents = [(Path(folder) / stage_files.LATENTS_FILE).read_bytes() for folder in ("one", "two")]
    assert latents[0] == latents[1]
    for source in ("one", "one/stage2_latents.safetensors", "one/generation_config.json"):
        succeeded(wanjax("--from", source, "--fps", "8", "--out", "three.mp4"))
        assert read_metadata("three.mp4") == read_metadata("one.mp4")


@pytest.mark.parametrize("options", quick(["--windows 2 --match colour"], ["", "--tile", "--windows 2 --match colour"]))
def test_the_printed_command_makes_the_video_again(image_model, options):
    Image.new("RGB", (32, 16), "red").save("picture.png")
    inputs = ("--model", image_model, "--image", "picture.png")
    succeeded(wanjax("a red circle", *inputs, *SMALL, *options.split(), "--seed", "7", "--out", "one.mp4"))
    command = succeeded(wanjax("generate", "--from", "one.mp4", "--print-command", "--out", "two.mp4")).stdout
    program, *words = shlex.split(command)
    assert program == "wanjax"
    succeeded(wanjax(*words))
    assert read_metadata("two.mp4") == read_metadata("one.mp4")
    np.testing.assert_array_equal(frames("two.mp4"), frames("one.mp4"))


def test_typed_options_override_the_metadata(text_model):
    succeeded(wanjax("a red circle", "--model", text_model, *ONE_FRAME, "--seed", "7", "--out", "one.mp4"))
    metadata = read_metadata("one.mp4")
    changes = ("--seed", "8", "--steps", "1", "--negative-prompt", "blur")
    for prompt in (["a blue square"], ["--prompt", "a blue square"]):
        succeeded(wanjax("generate", *prompt, "--from", "one.mp4", *changes, "--out", "two.mp4", "--force"))
        changed = {
            "prompt": "a blue square",
            "seed": 8,
            "steps": 1,
            "negative_prompt": "blur",
        }
        assert read_metadata("two.mp4") == metadata | changed
    succeeded(wanjax("--from", "one.mp4", "--height", "32", "--out", "two.mp4", "--force"))
    assert read_metadata("two.mp4") == metadata | {"height": 32}


def test_another_model_keeps_its_own_scheduler(text_model, tmp_path):
    copy = tiny_checkpoint(tmp_path / "other")
    succeeded(wanjax("a", "--model", text_model, *SMALL, "--scheduler", "euler", "--out", "one.mp4"))
    output = succeeded(wanjax("--from", "one.mp4", "--model", copy, "--out", "two.mp4")).stderr
    assert has_line_with_words(output, f"note: settings video by {text_model} {copy}")
    metadata, two = read_metadata("one.mp4"), read_metadata("two.mp4")
    assert [*two.pop("digests").values()] == [*metadata.pop("digests").values()]  # two copies of one model
    assert two == metadata | {"model": str(copy), "scheduler": "unipc"}
    succeeded(wanjax("--from", "one.mp4", "--model", copy, "--scheduler", "euler", "--out", "two.mp4", "--force"))
    assert read_metadata("two.mp4")["scheduler"] == "euler"


@pytest.mark.slow  # tests/cli/test_extending.py has a quick test with `--count`
def test_the_metadata_of_one_video_makes_many_videos(text_model):
    succeeded(wanjax("a", "--model", text_model, *SMALL, "--seed", "3", "--out", "one.mp4"))
    result = succeeded(wanjax("generate", "--from", "one.mp4", "--count", "2", "--out", "many")).stdout.splitlines()
    assert [read_metadata(path)["seed"] for path in result] == [3, 4]
    np.testing.assert_array_equal(frames(result[0]), frames("one.mp4"))
    Path("prompts.txt").write_text("b\n")
    [path] = succeeded(wanjax("--from", "one.mp4", "--prompts", "prompts.txt", "--out", "many")).stdout.splitlines()
    assert read_metadata(path)["prompt"] == "b"


@pytest.mark.slow  # tests with a video of the command and with a record of tiles are quick
def test_videos_of_the_library_are_reproduced(text_model):
    """Loading in another dtype, and tiles of another size, have no options."""
    pipe = library.load(text_model, dtype="float32", param_dtype="bfloat16")
    tiling = library.Tiling(16, 8)
    pipe("a", size=(16, 32), frames=1, steps=1, seed=1, tiling=tiling, batch_guidance=True).save("one.webp")
    succeeded(wanjax("--from", "one.webp", "--out", "two.webp"))
    assert read_metadata("two.webp") == read_metadata("one.webp")
    assert read_metadata("two.webp")["tiling"] == {"size": 16, "stride": 8}
    np.testing.assert_array_equal(frames("two.webp"), frames("one.webp"))


def test_missing_pictures_and_noise_are_reported(image_model, text_model):
    Image.fromarray(np.full((16, 32, 3), 200, np.uint8)).save("red.png")
    succeeded(wanjax("a", "--model", image_model, "--image", "red.png", *ONE_FRAME, "--out", "one.mp4"))
    succeeded(wanjax("--from", "one.mp4", "--out", "two.mp4"))
    np.testing.assert_array_equal(frames("two.mp4"), frames("one.mp4"))
    os.rename("red.png", "blue.png")
    gone = Path("red.png").absolute()
    assert has_line_with_words(refused("--from", "one.mp4", "--out", "three.mp4"), f"--image {gone} FILE")
    succeeded(wanjax("--from", "one.mp4", "--image", "blue.png", "--out", "three.mp4"))
    np.testing.assert_array_equal(frames("three.mp4"), frames("one.mp4"))
    noise = np.random.default_rng(0).normal(size=(1, 4, 2, 2, 4)).astype(np.float32)
    save_safetensors("noise.safetensors", {"noise": noise})
    succeeded(wanjax("a", "--model", text_model, *SMALL, "--noise", "noise.safetensors", "--out", "four.mp4"))
    os.unlink("noise.safetensors")
    assert has_line_with_words(refused("--from", "four.mp4"), "--noise")
    pipe = library.load(text_model, dtype="float32")
    pipe("a", size=(16, 32), frames=5, steps=1, noise=noise).save("five.webp")
    assert has_line_with_words(refused("--from", "five.webp"), "float32 [1, 4, 2, 2, 4] sha256")


FILE_PARAMETERS = (
    "out",
    "folder",
    "dir",
    "profile",
    "config",
    "preview_decoder",
    "prompts",
    "original_metadata",
    "file",
    "source",
)
"""Parameters and options that name files, which untrusted metadata could contain."""


def test_untrusted_metadata_chooses_no_file(text_model):
    Path("kept.mp4").write_bytes(b"the user's")
    trap = {name: "trap/kept.mp4" for name in FILE_PARAMETERS} | {
        "force": True,
        "processes": "10.0.0.1:1,2,0",
        "offload": "x",
    }
    trap |= {"out": "kept.mp4", "seeds": "0..9", "count": 3, "quiet": True, "json": True, "preview": True}
    metadata = {"model": "nano", "prompt": "a", "steps": 1, "width": 32, "height": 32, "frames": 1, "seed": 3}
    Path("one.json").write_text(json.dumps(metadata | trap))
    result = succeeded(wanjax("--from", "one.json")).stdout.splitlines()
    assert [Path(path).parent for path in result] == [Path("wanjax_videos").absolute()]
    assert sorted(path.name for path in Path().iterdir()) == ["kept.mp4", "one.json", "wanjax_videos"]
    assert Path("kept.mp4").read_bytes() == b"the user's"


def test_files_that_metadata_names_are_read_only_if_unchanged(image_model, tmp_path):
    """A file that metadata names is read only if its digest agrees, because metadata may be untrusted."""
    shutil.copytree(image_model, "model")
    Image.fromarray(np.full((16, 32, 3), 200, np.uint8)).save("red.png")
    succeeded(wanjax("a", "--model", "model", "--image", "red.png", *ONE_FRAME, "--dir", "d", "--out", "one.mp4"))
    metadata = read_metadata("one.mp4")
    assert sorted(metadata["digests"]) == [str(Path(name).absolute()) for name in ("model", "red.png")]
    for name, option in (("image", "--image"), ("last_image", "--last-image"), ("video", "--video")):
        for value in ("/etc/passwd", "/dev/zero", "a" * 5000):
            changed = {k: v for k, v in metadata.items() if k != "digests"} | {name: value}
            Path("other.json").write_text(json.dumps(changed))
            output = (
                refused("--from", "other.json", "--model", "model", "--image", "red.png") if name != "image" else None
            )
            assert has_line_with_words(
                output or refused("--from", "other.json", "--model", "model"), f"{option} {value}"
            )
    for changed in ({"digests": {}}, {"digests": [3]}, {"digests": None}, {"digests": {metadata["image"]: "0" * 64}}):
        Path("other.json").write_text(json.dumps(metadata | changed))
        assert has_line_with_words(refused("--from", "other.json", "--model", "model"), f"--image {metadata['image']}")
    Image.fromarray(np.full((16, 32, 3), 100, np.uint8)).save("red.png")
    assert has_line_with_words(refused("--from", "one.mp4"), f"--image {metadata['image']}")
    Path("model/transformer/config.json").write_text("{ }")
    for options in (
        ["--from", "one.mp4", "--image", "red.png"],
        ["decode", "--dir", "d", "--force"],
        ["denoise", "--dir", "d", "--force"],
    ):
        assert has_line_with_words(refused(*options), f"--model {metadata['model']}")


def test_other_devices_and_versions_are_reported(text_model):
    succeeded(wanjax("a", "--model", text_model, *SMALL, "--dir", "d", "--out", "one.mp4"))
    output = succeeded(wanjax("--from", "one.mp4", "--out", "two.mp4")).stderr
    assert "last digits" not in output
    metadata = read_metadata("one.mp4") | {"version": "0.0.1", "devices": "8 x TPU v6 lite"}
    stage_files.save_settings(Path("d"), metadata)
    output = succeeded(wanjax("--from", "d", "--out", "two.mp4", "--force")).stderr
    assert has_line_with_words(output, "0.0.1 8 v6 last digits")


def test_tiles_of_unequal_height_and_width_are_reproduced():
    """A pair is a list in JSON."""
    tiling = {"size": [16, 32], "stride": [8, 16]}
    metadata = {"model": "nano", "prompt": "a", "frames": 1, "steps": 1, "tiling": tiling}
    Path("one.json").write_text(json.dumps(metadata))
    succeeded(wanjax("--from", "one.json", "--size", "32x32", "--out", "two.webp"))
    assert read_metadata("two.webp")["tiling"] == tiling


URL = "s3://videos/served/video_1/image.png"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": "many"}, "one.json steps 'many' whole number"),
        ({"guidance_scale": True}, "--guidance-scale true number"),
        ({"dtype": "float8"}, "--dtype 'float8' bfloat16 float32"),
        ({"model": None}, 'one.json model "model" "nano"'),
        ({"tiling": {"rows": 3}}, "tiling {'rows': 3} size"),
        ({"tiling": {"size": "big", "stride": 8}}, "tiling {'size': 'big', 'stride': 8}"),
        ({"tiling": {"size": [8, 0], "stride": 8}}, "tiling {'size': [8, 0], 'stride': 8}"),
        ({"mesh": "tp=3"}, "mesh dp=1,sp=1,tp=3 3 devices 8"),
        (
            {"image": URL, "digests": {URL: "0" * 64}},
            f"{URL} --image",
        ),  # the command reads pictures from this machine only
        *(
            ({"lora": [lora]}, "--lora a.safetensors digest")
            for lora in ("a.safetensors", "high=a.safetensors:0.5", "FOLDER/a.safetensors")
        ),
    ],
)
def test_invalid_metadata_is_refused(change, message):
    Path("a.safetensors").write_bytes(b"another")
    metadata = json.dumps({"model": "nano", "prompt": "a", "steps": 1, **change})
    Path("one.json").write_text(metadata.replace("FOLDER", str(Path().absolute())))
    assert has_line_with_words(refused("--from", "one.json"), message)


def test_metadata_of_older_scripts_is_read():
    config = {"model_id": "nano", "prompt": "a red circle", "num_frames": 1, "num_inference_steps": 1, "seed": 2}
    Path("generation_config.json").write_text(json.dumps(config))
    assert lines(succeeded(wanjax("info", ".")).stdout)["steps"] == "1"
    succeeded(wanjax("--from", "generation_config.json", "--size", "32x32", "--out", "a.gif"))
    assert read_metadata("a.gif").items() >= {"frames": 1, "steps": 1, "seed": 2, "prompt": "a red circle"}.items()


@pytest.mark.skipif(sys.platform != "linux", reason="file systems elsewhere refuse such names")
def test_file_names_that_are_not_utf_8_are_accepted(text_model):
    """Run the commands in a new process, because the streams of a test runner encode bytes differently."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUTF8": "1"}
    picture = b"caf\xe9.png"
    Image.fromarray(np.full((16, 32, 3), 200, np.uint8)).save("red.png")
    os.rename(b"red.png", picture)
    small = [b"--size", b"32x32", b"--frames", b"1", b"--steps", b"1", b"--dir", b"d\xe9"]
    first = [b"moving right", b"--image", picture, *small, b"--out", b"na\xefve.mp4"]
    message = [[b"info", b"na\xefve.mp4"], [b"info", b"--json", b"na\xefve.mp4"], [b"info", b"--json", b"d\xe9"]]
    again = [b"--from", b"na\xefve.mp4", b"--out", b"two\xe9.gif", b"--json"]
    wrong = [[b"info", b"\xe9.mp4"], [b"a", b"--image", b"\xe9.png"], [b"a", b"--out", b"\xe9.avi"]]
    words = [word for command in (first, *message, again, *wrong) for word in (*command, b"::")]
    run = subprocess.run([sys.executable, "-c", RUN_COMMANDS, *words], env=environment, capture_output=True)
    path, info_text, file_json, folder_json, video_json, *empty = run.stdout.split(b"\0")
    assert run.stderr.split(b"\0")[1::2] == 5 * [b"0"] + 3 * [b"2"], run.stderr
    assert path == os.fsencode(Path.cwd()) + b"/na\xefve.mp4\n"
    assert rb"caf\udce9.png" in info_text
    metadata = json.loads(file_json)
    assert os.fsencode(metadata["image"]) == os.fsencode(Path.cwd()) + b"/" + picture
    assert json.loads(folder_json) == metadata
    assert os.fsencode(json.loads(video_json)["file"]).endswith(b"/two\xe9.gif")
    assert empty == 4 * [b""]
    assert b"Traceback" not in run.stderr


@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "a.gif", "a.webp", "b.png"])
def test_a_truncated_video_is_reported(name):
    """Its settings are printed if they are still in the file; if not, the message names the truncation."""
    write_video(name, FRAMES[: 1 if name.endswith(".png") else None], 8, {"prompt": "a", "model": "nano"})
    content = Path(name).read_bytes()
    assert "truncated" not in succeeded(wanjax("info", name)).output
    for length in (len(content) * 9 // 10, len(content) // 3, 60):
        Path(name).write_bytes(content[:length])
        result = wanjax("info", name)
        assert has_line_with_words(result.stderr, f"{name} truncated"), (length, result.output)
        assert result.exit_code == 2 or "nano" in result.stdout


def test_the_frames_of_all_windows_are_counted():
    Path("generation_config.json").write_text('{"prompt": "a", "frames": 17, "windows": 2, "overlap": 1, "fps": 8}')
    assert lines(succeeded(wanjax("info", ".")).stdout)["frames"] == "33 at 8 a second"
