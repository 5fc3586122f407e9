# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of which something is missing: it is named before anything is computed, whatever the command."""

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import wanjax
from tests.support.conversion import split
from tests.support.harm import WEIGHTS, truncated, without_a_shard
from tests.support.hub import ID
from tests.support.tiny import tiny_checkpoint
from tests.support.words import says
from wanjax.checkpoints.hub import locate_file
from wanjax.cli import main
from wanjax.errors import WanjaxError

COMMANDS = {
    "generate": ["generate", "a cat", "--model", "{}", "--dir", "out"],
    "encode": ["encode", "a cat", "--model", "{}", "--dir", "out"],
    "convert": ["convert", "{}", "out"],
    "train": ["train", "{}", "clips", "--out", "out"],
    "serve": ["serve", "--model", "{}", "--dir", "out", "--port", "0"],
}


def gone(path: Path) -> str:
    """Makes a link of a file, as the hub's cache has them, and takes away what it leads to."""
    path.unlink()
    path.symlink_to("../../../../blobs/0a1b2c.incomplete")
    return path.name


def gone_weights(folder: Path) -> str:
    return gone(folder / "vae" / WEIGHTS)


def gone_shard(folder: Path) -> str:
    split(folder / "transformer")
    return gone(folder / "transformer" / "diffusion_pytorch_model-00002-of-00002.safetensors")


def gone_index(folder: Path) -> str:
    split(folder / "transformer")
    return gone(folder / "transformer" / f"{WEIGHTS}.index.json")


def gone_tokenizer(folder: Path) -> str:
    return gone(folder / "tokenizer" / "tokenizer.json")


def lost_shard(folder: Path) -> str:
    without_a_shard(folder)
    return "diffusion_pytorch_model-00002-of-00002.safetensors"


def stranger_in_index(folder: Path) -> str:
    split(folder / "transformer")
    index = folder / "transformer" / f"{WEIGHTS}.index.json"
    text = json.loads(index.read_text())
    text["weight_map"]["blocks.9.extra"] = sorted(text["weight_map"].values())[0]
    index.write_text(json.dumps(text))
    return "blocks.9.extra"


def short(folder: Path) -> str:
    truncated(folder)
    return f"vae/{WEIGHTS}"


def empty(folder: Path) -> str:
    (folder / "vae" / WEIGHTS).write_bytes(b"")
    return f"vae/{WEIGHTS}"


def empty_tokenizer(folder: Path) -> str:
    (folder / "tokenizer" / "tokenizer.json").write_bytes(b"")
    return "tokenizer.json"


def no_tokenizer(folder: Path) -> str:
    shutil.rmtree(folder / "tokenizer")
    (folder / "tokenizer").mkdir()
    return "tokenizer"


def no_folder(folder: Path) -> str:
    shutil.rmtree(folder / "vae")
    return "vae"


HARMS = [gone_weights, gone_shard, gone_index, gone_tokenizer, lost_shard, stranger_in_index, short, empty]
HARMS += [empty_tokenizer, no_tokenizer, no_folder]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_missing_is_named_by_every_command(harm, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(whole, tmp_path / "model")
    name = harm(folder)
    with pytest.raises(WanjaxError) as told:
        wanjax.load(folder)
    assert says(str(told.value), name)
    assert "\n" not in str(told.value)
    for words in COMMANDS.values():
        result = CliRunner().invoke(main, [word.format(folder) for word in words])
        assert (result.exit_code, says(result.output, name)) == (2, True), (words, result.output, result.exception)
        assert not list(tmp_path.glob("out/*.safetensors"))


@pytest.fixture
def published(server, whole):
    """The hub with the whole checkpoint."""
    server.files.clear()
    for path in whole.rglob("*"):
        if path.is_file():
            server.files[path.relative_to(whole).as_posix()] = path.read_bytes()
    return server


def test_a_file_that_left_the_hub_s_cache_is_told_or_downloaded_again(published, hub_at):
    hub_at(published.url)
    pipe = wanjax.load(ID)
    for name in ("tokenizer", "text_encoder", "transformer", "vae"):
        pipe.components.get(name)
    link = Path(pipe.components.source.root) / "vae" / WEIGHTS
    assert link.is_symlink()
    os.rename(link.resolve(), f"{link.resolve()}.incomplete")
    hub_at(published.url, offline=True)
    with pytest.raises(WanjaxError) as told:
        wanjax.load(ID)
    assert says(str(told.value), f"vae/{WEIGHTS}")
    with pytest.raises(WanjaxError) as told:
        locate_file(f"{ID}/vae/{WEIGHTS}")
    assert says(str(told.value), f"vae/{WEIGHTS}")
    hub_at(published.url)
    published.sent.clear()
    assert wanjax.load(ID).components.get("vae") is not None
    assert [name for name, _ in published.sent] == [f"vae/{WEIGHTS}"]
