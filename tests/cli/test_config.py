# SPDX-License-Identifier: Apache-2.0
"""`--config`: options from a TOML file, in every command that has options for it."""

import json
from pathlib import Path

import pytest

from tests.support.commands import Arguments, refused, succeeded, wanjax
from tests.support.tiny import compile_cache, tiny_checkpoint
from tests.support.words import has_line_with_words
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
def parsed(monkeypatch, tmp_path, record_arguments) -> Arguments:
    """The arguments that the command line passes to commands, which do not run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "")  # so that it is restored if a test sets it
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS")
    Path("my.toml").write_text(CONFIG)
    for name in ("a.safetensors", "b.safetensors", "c.safetensors", "lines.txt", "b.mp4"):
        Path(name).touch()
    Path("stage_outputs").mkdir()
    Path("stage_outputs", CONFIG_FILE).write_text("{}")
    for name in (EMBEDDINGS_FILE, LATENTS_FILE):
        Path("stage_outputs", name).touch()
    return record_arguments(
        {
            stages: ["generate", "encode", "denoise", "decode"],
            many: ["generate"],
            planning: ["plan", "warmup"],
            conversion: ["convert"],
        }
    )


def test_a_config_has_shared_options_and_options_for_a_command(parsed):
    succeeded(wanjax("a cat", "--config", "my.toml"))
    assert (
        parsed.items()
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
    assert parsed.items() >= options.items()
    assert parsed["steps"] is None
    succeeded(wanjax("encode", "a", "--config", "my.toml"))
    assert (parsed["tile"], parsed["height"], "steps" in parsed) == (True, 480, False)
    succeeded(wanjax("decode", "--config", "my.toml"))
    assert (parsed["model"], parsed["tile"], parsed["fps"]) == ("wan2.1-t2v-14b", True, None)
    succeeded(wanjax("warmup", "--config", "my.toml"))
    assert (parsed["steps"], parsed["seed"]) == (None, 7)


def test_typed_options_override_the_config_file(parsed):
    typed = ("--size", "640x320", "--seed", "8", "--lora", "c.safetensors", "--model", "nano")
    succeeded(wanjax(*typed, "a cat", "--config", "my.toml"))
    assert (parsed["height"], parsed["width"]) == (320, 640)
    assert (parsed["seed"], parsed["lora"], parsed["model"], parsed["steps"]) == (8, ("c.safetensors",), "nano", 30)
    succeeded(wanjax("a cat", "--width", "1280", "--config", "my.toml"))
    assert (parsed["height"], parsed["width"]) == (704, 1280)
    succeeded(wanjax("plan", "wan2.1-t2v-1.3b", "--config", "my.toml"))
    assert parsed["model"] == "wan2.1-t2v-1.3b"


def test_typed_options_replace_conflicting_ones(parsed):
    Path("my.toml").write_text('seeds = "0..3"\nprompts = "lines.txt"\nstrength = 0.5\n')
    Path("lines.txt").write_text("a red circle\n")
    succeeded(wanjax("generate", "--config", "my.toml"))
    assert (parsed["prompts"], parsed["prompt"], parsed["seeds"]) == ("lines.txt", None, "0..3")
    assert parsed["strength"] == 0.5  # for the lines with a video
    succeeded(wanjax("a cat", "--count", "2", "--config", "my.toml"))
    assert (parsed["prompts"], parsed["prompt"], parsed["seeds"], parsed["count"]) == (None, "a cat", None, 2)
    succeeded(wanjax("a cat", "--seed", "2", "--config", "my.toml"))
    assert (parsed["seed"], parsed["seeds"], parsed["strength"]) == (2, None, None)
    succeeded(wanjax("a cat", "--seed", "2", "--video", "b.mp4", "--config", "my.toml"))
    assert parsed["strength"] == 0.5


def test_metadata_overrides_the_config_file(parsed):
    Path("metadata.json").write_text(
        '{"model": "nano", "prompt": "b", "seed": 1, "height": 32, "width": 64, "steps": 3}'
    )
    for order in (
        ("--config", "my.toml", "--from", "metadata.json"),
        ("--from", "metadata.json", "--config", "my.toml"),
    ):
        succeeded(wanjax(*order))
        assert [parsed[name] for name in ("model", "prompt", "seed", "height", "width", "steps")] == [
            "nano", "b", 1, 32, 64, 3,
        ]  # fmt: skip
        assert (parsed["guidance_scale"], parsed["tile"], parsed["lora"], parsed["mesh"]) == (None, False, (), None)
        assert parsed["attention"] is None
        assert parsed["out"] == "a.mp4"
    Path("my.toml").write_text("[generate]\nfrom = 'metadata.json'\n")
    assert has_line_with_words(refused("a", "--config", "my.toml"), "'from'")


@pytest.mark.parametrize("table", ["", "[generate]\n"])
def test_a_config_file_cannot_set_the_prompt(parsed, table):
    Path("my.toml").write_text(f'{table}prompt = "a cat"')
    assert has_line_with_words(refused("a", "--config", "my.toml"), "my.toml argument 'prompt' command line")


def test_a_config_file_can_set_quiet_and_json(parsed):
    Path("my.toml").write_text("quiet = true\njson = true\n")
    succeeded(wanjax("a cat", "--config", "my.toml"))
    assert (parsed["report"].quiet, parsed["report"].in_json) == (True, True)
    succeeded(wanjax("convert", "nano", "there", "--config", "my.toml"))
    assert (parsed["report"].quiet, parsed["report"].in_json) == (True, False)


def test_every_command_takes_a_config():
    Path("my.toml").write_text("json = true\n")
    Path("metadata.json").write_text('{"model": "nano", "prompt": "b"}')
    for command in main.commands.values():
        options = {name for parameter in command.params for name in parameter.opts}
        assert ("--config" in options) == (command.name != "help")
    for command in (["models"], ["info", "metadata.json"]):
        assert json.loads(succeeded(wanjax(*command, "--config", "my.toml")).stdout)


def test_empty_files_and_tables_change_nothing(parsed):
    succeeded(wanjax("a"))
    defaults = {**parsed, "report": None}
    for text in ("", "[generate]\n[plan]\n"):
        Path("my.toml").write_text(text)
        succeeded(wanjax("a", "--config", "my.toml"))
        assert {**parsed, "report": None} == defaults


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
def test_mistakes_in_a_config_file_are_refused(text, message):
    if text is None:
        Path("my.toml").unlink()
    else:
        Path("my.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert has_line_with_words(refused("a", "--config", "my.toml"), message)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_config_with_a_byte_order_mark_is_read(parsed, encoding):
    Path("my.toml").write_bytes(CONFIG.replace("\n", "\r\n").encode(encoding))
    succeeded(wanjax("a cat", "--config", "my.toml"))
    assert (parsed["steps"], parsed["out"]) == (30, "a.mp4")


def test_a_config_file_makes_a_video(tmp_path_factory, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path_factory.mktemp("video"))
    model = tiny_checkpoint(Path("tiny").absolute())
    shape = f'model = "{model}"\nsize = "32x16"\nframes = 5\ndtype = "float32"\n'
    Path("my.toml").write_text(f'{shape}[generate]\nsteps = 2\nout = "a.mp4"\n')
    with compile_cache(tmp_path_factory.getbasetemp() / "xla"):
        succeeded(wanjax("a red circle", "--config", "my.toml"))
    assert read_metadata("a.mp4").items() >= {"width": 32, "height": 16, "frames": 5, "steps": 2}.items()
