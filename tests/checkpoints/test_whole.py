# SPDX-License-Identifier: Apache-2.0
"""Incomplete checkpoints: every command names what is missing before it computes anything."""

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
from tests.support.harm import WEIGHTS, delete_a_shard, truncate
from tests.support.hub import ID
from tests.support.tiny import tiny_checkpoint
from tests.support.words import has_line_with_words, line_with_words
from wanjax.checkpoints.hub import locate_file
from wanjax.cli import main
from wanjax.converters.wan import diffusers as wan
from wanjax.converters.wan import original
from wanjax.errors import WanjaxError
from wanjax.pipelines.wan import layouts as wan_layouts
from wanjax.registry import open_source, presets

TEXT_ENCODER = "models_t5_umt5.safetensors"  # in the layout of Wan's authors
COMMANDS = {
    "generate": ["generate", "a cat", "--model", "{}", "--dir", "out"],
    "encode": ["encode", "a cat", "--model", "{}", "--dir", "out"],
    "convert": ["convert", "{}", "out"],
    "train": ["train", "{}", "clips", "--out", "out"],
    "serve": ["serve", "--model", "{}", "--dir", "out", "--port", "0"],
}


def dangling_link(path: Path) -> str:
    """Replace a file by a link to a missing file, like a broken entry of the hub's cache."""
    path.unlink()
    path.symlink_to("../../../../blobs/0a1b2c.incomplete")
    return path.name


def dangling_weights(folder: Path) -> str:
    return dangling_link(folder / "vae" / WEIGHTS)


def dangling_shard(folder: Path) -> str:
    split(folder / "transformer")
    return dangling_link(folder / "transformer" / "diffusion_pytorch_model-00002-of-00002.safetensors")


def dangling_index(folder: Path) -> str:
    split(folder / "transformer")
    return dangling_link(folder / "transformer" / f"{WEIGHTS}.index.json")


def dangling_tokenizer(folder: Path) -> str:
    return dangling_link(folder / "tokenizer" / "tokenizer.json")


def lost_shard(folder: Path) -> str:
    delete_a_shard(folder)
    return "diffusion_pytorch_model-00002-of-00002.safetensors"


def unknown_tensor_in_index(folder: Path) -> str:
    split(folder / "transformer")
    index = folder / "transformer" / f"{WEIGHTS}.index.json"
    text = json.loads(index.read_text())
    text["weight_map"]["blocks.9.extra"] = sorted(text["weight_map"].values())[0]
    index.write_text(json.dumps(text))
    return "blocks.9.extra"


def truncated_weights(folder: Path) -> str:
    truncate(folder)
    return f"vae/{WEIGHTS}"


def empty_weights(folder: Path) -> str:
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


HARMS = [
    dangling_weights,
    dangling_shard,
    dangling_index,
    dangling_tokenizer,
    lost_shard,
    unknown_tensor_in_index,
    truncated_weights,
    empty_weights,
]
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
    assert has_line_with_words(str(raised.value), name)
    assert "\n" not in str(raised.value)
    for words in COMMANDS.values():
        result = CliRunner().invoke(main, [word.format(folder) for word in words])
        assert (result.exit_code, has_line_with_words(result.output, name)) == (2, True), (
            words,
            result.output,
            result.exception,
        )
        assert not list(tmp_path.glob("out/*.safetensors"))


@pytest.fixture
def hub_with_checkpoint(server, checkpoint):
    """A hub with the complete checkpoint."""
    server.files.clear()
    for path in checkpoint.rglob("*"):
        if path.is_file():
            server.files[path.relative_to(checkpoint).as_posix()] = path.read_bytes()
    return server


def test_a_file_missing_in_the_hub_s_cache_is_reported_or_downloaded(hub_with_checkpoint, set_hub_url):
    set_hub_url(hub_with_checkpoint.url)
    pipe = wanjax.load(ID)
    for name in ("tokenizer", "text_encoder", "transformer", "vae"):
        pipe.components.get(name)
    link = Path(pipe.components.source.root) / "vae" / WEIGHTS
    assert link.is_symlink()
    os.rename(link.resolve(), f"{link.resolve()}.incomplete")
    set_hub_url(hub_with_checkpoint.url, offline=True)
    with pytest.raises(WanjaxError) as raised:
        wanjax.load(ID)
    assert has_line_with_words(str(raised.value), f"vae/{WEIGHTS}")
    with pytest.raises(WanjaxError) as raised:
        locate_file(f"{ID}/vae/{WEIGHTS}")
    assert has_line_with_words(str(raised.value), f"vae/{WEIGHTS}")
    set_hub_url(hub_with_checkpoint.url)
    hub_with_checkpoint.downloads.clear()
    assert wanjax.load(ID).components.get("vae") is not None
    assert [name for name, _ in hub_with_checkpoint.downloads] == [f"vae/{WEIGHTS}"]


def without(*names: str):
    """Return a function that removes files from the hub and returns the last part of the first name."""

    def harm(files: dict[str, bytes]) -> str:
        for file in list(files):
            if file.startswith(names):
                del files[file]
        return Path(names[0]).name

    return harm


def with_other_names(files: dict[str, bytes]) -> str:
    files["vae/model.fp16.safetensors"] = files.pop(f"vae/{WEIGHTS}")
    return f"{ID}/vae {WEIGHTS}"


MISSING = {
    "folder": without("vae/"),
    "weights": without(f"vae/{WEIGHTS}"),
    "variant": with_other_names,
    "shard": without("transformer/diffusion_pytorch_model-00002-of-00002.safetensors"),
    "shards": lambda files: without("transformer/diffusion_pytorch_model-")(files) and "shards",
    "tokenizer": without("tokenizer/"),
}


@pytest.mark.parametrize("missing", MISSING)
def test_files_that_the_hub_lacks_are_reported_before_weights_are_downloaded(
    missing, hub_with_checkpoint, set_hub_url, checkpoint, tmp_path
):
    split(shutil.copytree(checkpoint / "transformer", tmp_path / "transformer"))
    del hub_with_checkpoint.files[f"transformer/{WEIGHTS}"]
    for path in (tmp_path / "transformer").iterdir():
        hub_with_checkpoint.files[f"transformer/{path.name}"] = path.read_bytes()
    name = MISSING[missing](hub_with_checkpoint.files)
    set_hub_url(hub_with_checkpoint.url)
    for _ in range(2):  # with an empty cache, and with a part of the files
        with pytest.raises(WanjaxError) as raised:
            wanjax.load(ID)
        assert has_line_with_words(str(raised.value), f"{ID} {name}")
        assert "\n" not in str(raised.value)
    assert not [name for name, _ in hub_with_checkpoint.downloads if name.endswith(".safetensors")]


def test_an_unreachable_hub_is_reported_before_anything_is_computed(hub_with_checkpoint, set_hub_url, monkeypatch):
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)  # the client's pauses between attempts
    set_hub_url(hub_with_checkpoint.url)
    pipe = wanjax.load(ID)
    for name in ("tokenizer", "text_encoder", "transformer"):
        pipe.components.get(name)
    set_hub_url("http://127.0.0.1:9")
    with pytest.raises(WanjaxError) as raised:
        wanjax.load(ID)
    assert has_line_with_words(str(raised.value), f"http://127.0.0.1:9 reached {ID}")
    assert "\n" not in str(raised.value)
    set_hub_url(hub_with_checkpoint.url)
    assert wanjax.load(ID).components.get("vae") is not None
    set_hub_url("http://127.0.0.1:9")
    wanjax.load(ID)


@pytest.fixture
def fallback_to(monkeypatch):
    """Return a function that sets the repository for missing components of a checkpoint."""
    return lambda name: monkeypatch.setattr(wan_layouts, "find_fallback", lambda *_: SimpleNamespace(source=name))


@pytest.fixture
def transformer_file(checkpoint, tmp_path, fallback_to):
    """A file with only a transformer, whose other components the loopback hub has."""
    fallback_to(ID)
    return shutil.copy(checkpoint / "transformer" / WEIGHTS, tmp_path / "alone.safetensors")


@pytest.mark.parametrize("missing", ["nothing", "text_encoder", "tokenizer", "the hub"])
def test_missing_components_of_a_transformer_file_are_reported_before_anything_is_computed(
    missing, transformer_file, hub_with_checkpoint, set_hub_url
):
    without(f"{missing}/")(hub_with_checkpoint.files)
    set_hub_url("http://127.0.0.1:9" if missing == "the hub" else hub_with_checkpoint.url)
    for _ in range(2):
        if missing == "nothing":
            wanjax.load(transformer_file)
            continue
        with pytest.raises(WanjaxError) as raised:
            wanjax.load(transformer_file)
        assert has_line_with_words(
            str(raised.value), f"{ID} http://127.0.0.1:9 reached" if missing == "the hub" else f"{ID} {missing}"
        )
    assert not [name for name, _ in hub_with_checkpoint.downloads if name.endswith(".safetensors")]


@pytest.fixture
def hub_with_authors_layout(hub_with_checkpoint, checkpoint, fallback_to, monkeypatch):
    """A hub with the checkpoint in its authors' layout; the repository for missing components does not exist."""
    monkeypatch.setitem(original.STATISTICS, tiny.LATENT_CHANNELS, wan.vae_config(tiny.VAE))
    fallback_to("owner/typo")
    files = {"transformer": WEIGHTS, "vae": "Wan2.1_VAE.safetensors", "text_encoder": TEXT_ENCODER}
    hub_with_checkpoint.files = {"config.json": b'{"_class_name": "WanModel", "num_heads": 2}'}
    for component, name in files.items():
        [weights] = (checkpoint / component).glob("*.safetensors")
        hub_with_checkpoint.files[name] = weights.read_bytes()
    for path in (checkpoint / "tokenizer").iterdir():
        hub_with_checkpoint.files[f"google/umt5-xxl/{path.name}"] = path.read_bytes()
    return hub_with_checkpoint


FULL_DISK = "room on the disk"
TYPO = "owner/typo {url}/owner/typo"


@pytest.mark.parametrize(
    ("missing", "words"),
    [("nothing", None), ("models_t5_umt5", TYPO), ("google", TYPO), (FULL_DISK, f"{ID} 10 MB free room")],
)
def test_missing_files_of_an_authors_repository_are_reported(
    missing, words, hub_with_authors_layout, set_hub_url, machine
):
    """No weights are downloaded before they are needed."""
    without(missing)(hub_with_authors_layout.files)
    set_hub_url(hub_with_authors_layout.url)
    if missing == FULL_DISK:
        hub_with_authors_layout.files[TEXT_ENCODER] += bytes(10**7)
        machine.has_disk(10**7)
    if words is None:
        wanjax.load(ID)
    else:
        with pytest.raises(WanjaxError) as raised:
            wanjax.load(ID)
        assert has_line_with_words(str(raised.value), words.format(url=hub_with_authors_layout.url))
    assert TEXT_ENCODER not in [name for name, _ in hub_with_authors_layout.downloads]


@pytest.mark.parametrize("command", ["model", "lora", "folder"])
def test_a_dangling_link_is_reported(command, checkpoint, tmp_path, monkeypatch):
    """It is not looked up on the hub, even if its path is a valid name there."""
    monkeypatch.chdir(tmp_path)
    link = Path("some/models/wan.safetensors" if command != "folder" else "some/models")
    link.parent.mkdir(parents=True)
    link.symlink_to("0a1b2c.incomplete")
    with pytest.raises(WanjaxError) as raised:
        wanjax.load(checkpoint, lora=str(link)) if command == "lora" else wanjax.load(link)
    assert has_line_with_words(str(raised.value), f"{link} 0a1b2c.incomplete link exist")


def test_an_expert_requires_the_other_one(checkpoint, tmp_path, monkeypatch):
    """A dangling link to the other expert is reported, and so is a missing one, by the name of the file."""
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
