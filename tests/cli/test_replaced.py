# SPDX-License-Identifier: Apache-2.0
"""A file with changed contents counts as another file, although its name is the same."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.commands import refused, succeeded, wanjax
from tests.support.tiny import tiny_checkpoint, tiny_image_checkpoint
from tests.support.words import has_line_with_words
from wanjax.checkpoints.files import content_digest, save_safetensors
from wanjax.media.video import read_metadata
from wanjax.pipelines.caching.cache_tables import measured_file
from wanjax.registry import tables_key

pytestmark = pytest.mark.usefixtures("cached_programs")

ONE_FRAME = ("--size", "32x16", "--frames", "1", "--steps", "3", "--dtype", "float32")
MODULE = "transformer.blocks.0.attn1.to_q"


@pytest.fixture(scope="module")
def text_model(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def image_model(tmp_path_factory) -> str:
    return str(tiny_image_checkpoint(tmp_path_factory.mktemp("image")))


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    Path("prompts.txt").write_text("a\n")


def picture(name: str, value: int) -> None:
    """Write a picture. Its size and modification time do not depend on its value."""
    Image.fromarray(np.full((16, 32, 3), value, np.uint8)).save(name)
    os.utime(name, ns=(10**18, 10**18))


def adapter(folder: str, alpha: int) -> None:
    """Write a LoRA as PEFT does: its scale is in another file."""
    Path(folder).mkdir(exist_ok=True)
    ones = {f"{MODULE}.lora_A.weight": np.ones((2, 24), np.float32), f"{MODULE}.lora_B.weight": np.ones((24, 2), "f")}
    save_safetensors(f"{folder}/adapter_model.safetensors", ones)
    Path(f"{folder}/adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": alpha}))


def table(model: str, ratio: float) -> None:
    """Write a table of MagCache as `wanjax calibrate` does."""
    file = measured_file(tables_key(model))
    file.parent.mkdir(parents=True, exist_ok=True)
    ratios = [1.0, ratio]
    file.write_text(json.dumps({"magcache": {"prompt": ratios, "negative": ratios, "delta": 9, "most": 1, "whole": 0}}))


def make_videos(*arguments: str) -> list[str]:
    return succeeded(wanjax("--prompts", "prompts.txt", *arguments, *ONE_FRAME, "--out", "many")).stdout.splitlines()


def test_a_changed_picture_makes_another_video(image_model):
    picture("in.png", 200)
    options = ("--model", image_model, "--image", "in.png")
    [result] = make_videos(*options)
    assert make_videos(*options) == []
    picture("in.png", 100)
    assert result not in make_videos(*options)
    assert has_line_with_words(refused("--from", result), "--image in.png")
    picture("in.png", 200)
    assert make_videos(*options) == []


def test_a_changed_lora_or_model_makes_another_video(text_model):
    shutil.copytree(text_model, "model")
    adapter("style", 2)
    options = ("--model", "model", "--lora", "style")
    [result] = make_videos(*options)
    adapter("style", 4)
    [again] = make_videos(*options)
    assert has_line_with_words(refused("--from", result), "--lora style")
    succeeded(wanjax("--from", again, "--out", "same.mp4"))
    weights = next(Path("model/vae").glob("*.safetensors"))
    body = bytearray(weights.read_bytes())
    body[-4:] = b"\0\0\0\0"
    weights.write_bytes(body)
    assert len(make_videos(*options)) == 1
    assert has_line_with_words(refused("--from", again), "--model model")


def test_a_changed_cache_table_makes_another_video(text_model):
    table(text_model, 1.0)
    options = ("--model", text_model, "--cache", "magcache")
    [result] = make_videos(*options)
    table(text_model, 0.5)
    assert result not in make_videos(*options)
    assert has_line_with_words(refused("--from", result), "table cache --cache")
    table(text_model, 1.0)
    succeeded(wanjax("--from", result, "--out", "same.mp4"))
    assert read_metadata("same.mp4")["digests"] == read_metadata(result)["digests"]


def test_stages_of_two_pictures_do_not_belong_together(image_model):
    picture("in.png", 200)
    options = ("encode", "a", "--model", image_model, "--image", "in.png", "--dir", "d", "--force", *ONE_FRAME[:4])
    succeeded(wanjax(*options))
    shutil.copy("d/stage1_embeddings.safetensors", "first.safetensors")
    picture("in.png", 100)
    succeeded(wanjax(*options))
    shutil.copy("first.safetensors", "d/stage1_embeddings.safetensors")
    assert has_line_with_words(refused("denoise", "--dir", "d"), "stage1_embeddings.safetensors in.png")


def test_large_files_are_identified_by_their_header_and_blocks():
    """Sparse files of more than 64 MiB: a header, the last byte and the size each make another file."""
    digests = set()
    for position, byte, size in ((0, b"a", 2**27), (0, b"b", 2**27), (2**27 - 1, b"a", 2**27), (0, b"a", 2**27 + 1)):
        with open("large", "wb") as file:
            file.truncate(size)
            file.seek(position)
            file.write(byte)
        digests.add(content_digest(Path("large").absolute()))
    assert len(digests) == 4


def test_a_prompt_that_is_listed_twice_is_made_once(text_model):
    Path("prompts.txt").write_text("a\nb\n  a \na\n")
    result = wanjax("--prompts", "prompts.txt", "--model", text_model, *ONE_FRAME, "--out", "many")
    assert len(succeeded(result).stdout.splitlines()) == 2
    assert has_line_with_words(result.stderr, "2 4 videos requested more than once")
