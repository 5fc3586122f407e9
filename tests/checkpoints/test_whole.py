# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of which something is missing: it is named before anything is computed, whatever the command."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from huggingface_hub.utils import _http

import wanjax
from tests.support import tiny
from tests.support.clips import write_clips
from tests.support.conversion import split
from tests.support.harm import WEIGHTS, truncated, without_a_shard
from tests.support.hub import ID
from tests.support.tiny import tiny_checkpoint
from tests.support.words import has_line_with, line_with_words
from wanjax.checkpoints.hub import locate_file
from wanjax.cli import main
from wanjax.converters.wan import diffusers as wan
from wanjax.converters.wan import original
from wanjax.errors import WanjaxError
from wanjax.pipelines.wan import layouts as wan_layouts
from wanjax.registry import open_source, presets

TEXT_ENCODER = "models_t5_umt5.safetensors"  # of Wan's authors
COMMANDS = {
    "generate": ["generate", "a cat", "--model", "{}", "--dir", "out"],
    "encode": ["encode", "a cat", "--model", "{}", "--dir", "out"],
    "convert": ["convert", "{}", "out"],
    "train": ["train", "{}", "clips", "--out", "out"],
    "serve": ["serve", "--model", "{}", "--dir", "out", "--port", "0"],
}


def gone(path: Path) -> str:
    """Make a link of a file, as the hub's cache has them, and take away what it leads to."""
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
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("harm", HARMS)
def test_every_command_names_missing_files(harm, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    write_clips(tmp_path / "clips", 1)
    name = harm(folder)
    with pytest.raises(WanjaxError) as raised:
        wanjax.load(folder)
    assert has_line_with(str(raised.value), name)
    assert "\n" not in str(raised.value)
    for words in COMMANDS.values():
        result = CliRunner().invoke(main, [word.format(folder) for word in words])
        assert (result.exit_code, has_line_with(result.output, name)) == (2, True), (
            words,
            result.output,
            result.exception,
        )
        assert not list(tmp_path.glob("out/*.safetensors"))


@pytest.fixture
def published(server, checkpoint):
    """The hub with the whole checkpoint."""
    server.files.clear()
    for path in checkpoint.rglob("*"):
        if path.is_file():
            server.files[path.relative_to(checkpoint).as_posix()] = path.read_bytes()
    return server


def test_a_file_missing_in_the_hub_s_cache_is_reported_or_downloaded(published, set_hub_url):
    set_hub_url(published.url)
    pipe = wanjax.load(ID)
    for name in ("tokenizer", "text_encoder", "transformer", "vae"):
        pipe.components.get(name)
    link = Path(pipe.components.source.root) / "vae" / WEIGHTS
    assert link.is_symlink()
    os.rename(link.resolve(), f"{link.resolve()}.incomplete")
    set_hub_url(published.url, offline=True)
    with pytest.raises(WanjaxError) as raised:
        wanjax.load(ID)
    assert has_line_with(str(raised.value), f"vae/{WEIGHTS}")
    with pytest.raises(WanjaxError) as raised:
        locate_file(f"{ID}/vae/{WEIGHTS}")
    assert has_line_with(str(raised.value), f"vae/{WEIGHTS}")
    set_hub_url(published.url)
    published.downloads.clear()
    assert wanjax.load(ID).components.get("vae") is not None
    assert [name for name, _ in published.downloads] == [f"vae/{WEIGHTS}"]


def without(*names: str):
    """Return what removes files and folders from the hub, and the last part of the first name."""

    def harm(files: dict[str, bytes]) -> str:
        for file in list(files):
            if file.startswith(names):
                del files[file]
        return Path(names[0]).name

    return harm


def in_other_names(files: dict[str, bytes]) -> str:
    files["vae/model.fp16.safetensors"] = files.pop(f"vae/{WEIGHTS}")
    return f"{ID}/vae {WEIGHTS}"


LOST = {
    "folder": without("vae/"),
    "weights": without(f"vae/{WEIGHTS}"),
    "variant": in_other_names,
    "shard": without("transformer/diffusion_pytorch_model-00002-of-00002.safetensors"),
    "shards": lambda files: without("transformer/diffusion_pytorch_model-")(files) and "shards",
    "tokenizer": without("tokenizer/"),
}


@pytest.mark.parametrize("lost", LOST)
def test_files_that_the_hub_lacks_are_reported_before_weights_are_downloaded(
    lost, published, set_hub_url, checkpoint, tmp_path
):
    split(shutil.copytree(checkpoint / "transformer", tmp_path / "transformer"))
    del published.files[f"transformer/{WEIGHTS}"]
    for path in (tmp_path / "transformer").iterdir():
        published.files[f"transformer/{path.name}"] = path.read_bytes()
    name = LOST[lost](published.files)
    set_hub_url(published.url)
    for _ in range(2):  # with nothing in the cache, and with some
        with pytest.raises(WanjaxError) as raised:
            wanjax.load(ID)
        assert has_line_with(str(raised.value), f"{ID} {name}")
        assert "\n" not in str(raised.value)
    assert not [name for name, _ in published.downloads if name.endswith(".safetensors")]


def test_an_unreachable_hub_is_reported_before_anything_is_computed(published, set_hub_url, monkeypatch):
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)  # of the client, between attempts
    set_hub_url(published.url)
    pipe = wanjax.load(ID)
    for name in ("tokenizer", "text_encoder", "transformer"):
        pipe.components.get(name)
    set_hub_url("http://127.0.0.1:9")
    with pytest.raises(WanjaxError) as raised:
        wanjax.load(ID)
    assert has_line_with(str(raised.value), f"http://127.0.0.1:9 reached {ID}")
    assert "\n" not in str(raised.value)
    set_hub_url(published.url)
    assert wanjax.load(ID).components.get("vae") is not None
    set_hub_url("http://127.0.0.1:9")
    wanjax.load(ID)


@pytest.fixture
def completed_by(monkeypatch):
    """Name the repository from which what a checkpoint lacks comes, in place of a published one."""
    return lambda name: monkeypatch.setattr(wan_layouts, "find_fallback", lambda *_: SimpleNamespace(source=name))


@pytest.fixture
def transformer_file(checkpoint, tmp_path, completed_by):
    """A file with only a transformer, whose other components the loopback hub has."""
    completed_by(ID)
    return shutil.copy(checkpoint / "transformer" / WEIGHTS, tmp_path / "alone.safetensors")


@pytest.mark.parametrize("lost", ["nothing", "text_encoder", "tokenizer", "the hub"])
def test_missing_components_of_a_transformer_file_are_reported_before_anything_is_computed(
    lost, transformer_file, published, set_hub_url
):
    without(f"{lost}/")(published.files)
    set_hub_url("http://127.0.0.1:9" if lost == "the hub" else published.url)
    for _ in range(2):
        if lost == "nothing":
            wanjax.load(transformer_file)
            continue
        with pytest.raises(WanjaxError) as raised:
            wanjax.load(transformer_file)
        assert has_line_with(
            str(raised.value), f"{ID} http://127.0.0.1:9 reached" if lost == "the hub" else f"{ID} {lost}"
        )
    assert not [name for name, _ in published.downloads if name.endswith(".safetensors")]


@pytest.fixture
def of_authors(published, checkpoint, completed_by, monkeypatch):
    """Return a hub with the checkpoint in its authors' layout; what that lacks would come from where there is none."""
    monkeypatch.setitem(original.STATISTICS, tiny.LATENT_CHANNELS, wan.vae_config(tiny.VAE))
    completed_by("owner/typo")
    files = {"transformer": WEIGHTS, "vae": "Wan2.1_VAE.safetensors", "text_encoder": TEXT_ENCODER}
    published.files = {"config.json": b'{"_class_name": "WanModel", "num_heads": 2}'}
    for component, name in files.items():
        [weights] = (checkpoint / component).glob("*.safetensors")
        published.files[name] = weights.read_bytes()
    for path in (checkpoint / "tokenizer").iterdir():
        published.files[f"google/umt5-xxl/{path.name}"] = path.read_bytes()
    return published


NO_ROOM = "room on the disk"
TYPO = "owner/typo {url}/owner/typo"


@pytest.mark.parametrize(
    ("lost", "words"),
    [("nothing", None), ("models_t5_umt5", TYPO), ("google", TYPO), (NO_ROOM, f"{ID} 10 MB free room")],
)
def test_the_authors_repository_is_looked_through(lost, words, of_authors, set_hub_url, machine):
    """Nothing of it is downloaded before it is needed."""
    without(lost)(of_authors.files)
    set_hub_url(of_authors.url)
    if lost == NO_ROOM:
        of_authors.files[TEXT_ENCODER] += bytes(10**7)
        machine.has_disk(10**7)
    if words is None:
        wanjax.load(ID)
    else:
        with pytest.raises(WanjaxError) as raised:
            wanjax.load(ID)
        assert has_line_with(str(raised.value), words.format(url=of_authors.url))
    assert TEXT_ENCODER not in [name for name, _ in of_authors.downloads]


@pytest.mark.parametrize("command", ["model", "lora", "folder"])
def test_a_dangling_link_is_reported(command, checkpoint, tmp_path, monkeypatch):
    """And not looked for on the hub, even where its path would be a name there."""
    monkeypatch.chdir(tmp_path)
    link = Path("some/models/wan.safetensors" if command != "folder" else "some/models")
    link.parent.mkdir(parents=True)
    link.symlink_to("0a1b2c.incomplete")
    with pytest.raises(WanjaxError) as raised:
        wanjax.load(checkpoint, lora=str(link)) if command == "lora" else wanjax.load(link)
    assert has_line_with(str(raised.value), f"{link} 0a1b2c.incomplete gone")


def test_an_expert_requires_the_other_one(checkpoint, tmp_path, monkeypatch):
    """A dangling link is reported, and so is the name of one of two experts, though another model has only one."""
    path = tmp_path / "wan2.2_t2v_high_noise.safetensors"
    low_noise = tmp_path / "wan2.2_t2v_low_noise.safetensors"
    shutil.copy(checkpoint / "transformer" / WEIGHTS, path)
    low_noise.symlink_to("0a1b2c.incomplete")
    with pytest.raises(WanjaxError, match=line_with_words(f"{low_noise.name} 0a1b2c.incomplete")):
        open_source(path)
    low_noise.unlink()
    monkeypatch.setattr(wan_layouts, "_published_preset", lambda *shape, **more: presets()["wan2.1-t2v-14b"])
    with pytest.raises(WanjaxError, match=line_with_words(f"{path.name} {low_noise.name}")):
        open_source(path)
    high_noise = path.rename(tmp_path / "wan2.2_t2v_high.safetensors")
    assert "transformer_2" not in open_source(high_noise).index
