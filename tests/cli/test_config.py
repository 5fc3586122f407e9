# SPDX-License-Identifier: Apache-2.0
"""`--config`: options from a TOML file, in every command that has options for it."""

import json
from pathlib import Path

import pytest

from tests.support.commands import Arguments, refused, succeeded, wanjax
from tests.support.tiny import compile_cache, tiny_checkpoint
from tests.support.words import has_line_with
from wanjax.cli import conversion, main, many, planning, stages
from wanjax.kernels.attention import AttentionConfig
from wanjax.kernels.attention.flash_tiles import Tiles
from wanjax.media.metadata import CONFIG as CONFIG_FILE
from wanjax.media.metadata import EMBEDDINGS_FILE, LATENTS_FILE
from wanjax.media.video import read_metadata

CONFIG = """
model = "wan2.1-t2v-14b"
guidance-scale = 4          # a whole number is a number too
size = "832x480"
seed = 7
tile = true
lora = ["a.safetensors:0.5", "b.safetensors"]
mesh = "dp=2,tp=4"
num_frames = 33             # as scripts spell it

[generate]
steps = 30
height = 704
out = "a.mp4"
block-q = 512

[plan]
chip = "h200"
json = true

[warmup]
"""


@pytest.fixture(autouse=True)
def given(monkeypatch, tmp_path, standing_for) -> Arguments:
    """The arguments that the command line passes to commands, which do not run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "")  # is restored, because a test may set it
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS")
    Path("my.toml").write_text(CONFIG)
    for name in ("a.safetensors", "b.safetensors", "c.safetensors", "lines.txt", "b.mp4"):
        Path(name).touch()
    Path("stage_outputs").mkdir()
    Path("stage_outputs", CONFIG_FILE).write_text("{}")
    for name in (EMBEDDINGS_FILE, LATENTS_FILE):
        Path("stage_outputs", name).touch()
    return standing_for(
        {
            stages: ["generate", "encode", "denoise", "decode"],
            many: ["generate"],
            planning: ["plan", "warmup"],
            conversion: ["convert"],
        }
    )


def test_options_for_all_commands_and_for_one(given):
    succeeded(wanjax("a cat", "--config", "my.toml"))
    assert (
        given.items()
        >= {
            "prompt": "a cat",
            "model": "wan2.1-t2v-14b",
            "guidance_scale": 4.0,
            "height": 704,
            "width": 832,
            "seed": 7,
            "tile": True,
            "lora": ("a.safetensors:0.5", "b.safetensors"),
            "mesh": (2, 1, 4),
            "frames": 33,
            "steps": 30,
            "out": "a.mp4",
            "attention": AttentionConfig("flash_tpu", Tiles(block_q=512)),
        }.items()
    )
    succeeded(wanjax("plan", "--config", "my.toml"))
    options = {"model": "wan2.1-t2v-14b", "as_json": True, "height": 480, "frames": 33}
    assert given.items() >= options.items()
    assert given["steps"] is None
    succeeded(wanjax("encode", "a", "--config", "my.toml"))
    assert (given["tile"], given["height"], "steps" in given) == (True, 480, False)
    succeeded(wanjax("decode", "--config", "my.toml"))
    assert (given["model"], given["tile"], given["fps"]) == ("wan2.1-t2v-14b", True, None)
    succeeded(wanjax("warmup", "--config", "my.toml"))
    assert (given["steps"], given["seed"]) == (None, 7)


def test_what_is_typed_wins(given):
    typed = ("--size", "640x320", "--seed", "8", "--lora", "c.safetensors", "--model", "nano")
    succeeded(wanjax(*typed, "a cat", "--config", "my.toml"))
    assert (given["height"], given["width"]) == (320, 640)
    assert (given["seed"], given["lora"], given["model"], given["steps"]) == (8, ("c.safetensors",), "nano", 30)
    succeeded(wanjax("a cat", "--width", "1280", "--config", "my.toml"))
    assert (given["height"], given["width"]) == (704, 1280)
    succeeded(wanjax("plan", "wan2.1-t2v-1.3b", "--config", "my.toml"))
    assert given["model"] == "wan2.1-t2v-1.3b"


def test_typed_options_take_the_place_of_their_rivals(given):
    Path("my.toml").write_text('seeds = "0..3"\nprompts = "lines.txt"\nstrength = 0.5\n')
    Path("lines.txt").write_text("a red circle\n")
    succeeded(wanjax("generate", "--config", "my.toml"))
    assert (given["prompts"], given["prompt"], given["seeds"]) == ("lines.txt", None, "0..3")
    assert given["strength"] == 0.5  # for those lines that name a video
    succeeded(wanjax("a cat", "--count", "2", "--config", "my.toml"))
    assert (given["prompts"], given["prompt"], given["seeds"], given["count"]) == (None, "a cat", None, 2)
    succeeded(wanjax("a cat", "--seed", "2", "--config", "my.toml"))
    assert (given["seed"], given["seeds"], given["strength"]) == (2, None, None)
    succeeded(wanjax("a cat", "--seed", "2", "--video", "b.mp4", "--config", "my.toml"))
    assert given["strength"] == 0.5


def test_a_record_comes_before_the_file(given):
    Path("made.json").write_text('{"model": "nano", "prompt": "b", "seed": 1, "height": 32, "width": 64, "steps": 3}')
    for order in (("--config", "my.toml", "--from", "made.json"), ("--from", "made.json", "--config", "my.toml")):
        succeeded(wanjax(*order))
        assert [given[name] for name in ("model", "prompt", "seed", "height", "width", "steps")] == [
            "nano", "b", 1, 32, 64, 3,
        ]  # fmt: skip
        assert (given["guidance_scale"], given["tile"], given["lora"], given["mesh"]) == (None, False, (), None)
        assert given["attention"] is None
        assert given["out"] == "a.mp4"
    Path("my.toml").write_text("[generate]\nfrom = 'made.json'\n")
    assert has_line_with(refused("a", "--config", "my.toml"), "'from'")


def test_flags_of_reports(given):
    Path("my.toml").write_text("quiet = true\njson = true\n")
    succeeded(wanjax("a cat", "--config", "my.toml"))
    assert (given["report"].quiet, given["report"].in_json) == (True, True)
    succeeded(wanjax("convert", "nano", "there", "--config", "my.toml"))
    assert (given["report"].quiet, given["report"].in_json) == (True, False)


def test_every_command_takes_it():
    Path("my.toml").write_text("json = true\n")
    Path("made.json").write_text('{"model": "nano", "prompt": "b"}')
    for command in main.commands.values():
        own = {name for parameter in command.params for name in parameter.opts}
        assert ("--config" in own) == (command.name != "help")
    for command in (["models"], ["info", "made.json"]):
        assert json.loads(succeeded(wanjax(*command, "--config", "my.toml")).stdout)


def test_empty_files_and_tables_change_nothing(given):
    succeeded(wanjax("a"))
    plain = {**given, "report": None}
    for text in ("", "[generate]\n[plan]\n"):
        Path("my.toml").write_text(text)
        succeeded(wanjax("a", "--config", "my.toml"))
        assert {**given, "report": None} == plain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[plan]\nprofile = 'a'", "my.toml [plan] 'profile'"),
        ("[paint]\nseed = 3", "my.toml 'paint'"),
        ("config = 'b.toml'", "my.toml 'config'"),
        ("prompt = 'a'", "my.toml 'prompt'"),
        ("steps = '30'", "my.toml steps '30' whole number"),
        ("steps = 30.0", "my.toml steps 30.0 whole number"),
        ("tile = 'yes'", "my.toml tile 'yes' true false"),
        ("lora = [1]", "my.toml lora [1] text"),
        ("[seed]\nx = 1", "my.toml seed {'x': 1} whole number"),
        ("generate = 3", "my.toml generate 3 table [generate]"),
        ("dtype = 'float8'", "--dtype 'float8' bfloat16 float32"),
        ("count = 0", "--count 0 1"),
        ("[plan]\nsteps = '3'", "my.toml [plan] steps '3' whole number"),
        ("steps = ", "my.toml Invalid value"),
        ("steps = 1\nsteps = 2", "my.toml Cannot overwrite"),
        (b"\xff", "my.toml byte 1 UTF-8"),
        ("[generat]\nsteps = 2", "my.toml 'generat' [generate]"),
        (None, "my.toml TOML file"),
    ],
)
def test_mistakes(text, message):
    if text is None:
        Path("my.toml").unlink()
    else:
        Path("my.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert has_line_with(refused("a", "--config", "my.toml"), message)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_file_with_a_mark(given, encoding):
    Path("my.toml").write_bytes(CONFIG.replace("\n", "\r\n").encode(encoding))
    succeeded(wanjax("a cat", "--config", "my.toml"))
    assert (given["steps"], given["out"]) == (30, "a.mp4")


def test_a_video(tmp_path_factory, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path_factory.mktemp("video"))
    model = tiny_checkpoint(Path("tiny").absolute())
    shape = f'model = "{model}"\nsize = "32x16"\nframes = 5\ndtype = "float32"\n'
    Path("my.toml").write_text(f'{shape}[generate]\nsteps = 2\nout = "a.mp4"\n')
    with compile_cache(tmp_path_factory.getbasetemp() / "xla"):
        succeeded(wanjax("a red circle", "--config", "my.toml"))
    assert read_metadata("a.mp4").items() >= {"width": 32, "height": 16, "frames": 5, "steps": 2}.items()
