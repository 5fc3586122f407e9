# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a store: conversions are exact, incomplete ones are refused, and their files are not trusted."""

import json
from pathlib import Path

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import wanjax
from tests.support.conversion import tensors
from tests.support.stores import clear_memory_store, failing, objects
from tests.support.words import has_line_with_words
from wanjax.checkpoints.arrays import OrbaxCheckpoint
from wanjax.checkpoints.convert import ConversionToDiffusers, ConversionToWanjax
from wanjax.checkpoints.manifest import verify
from wanjax.checkpoints.sources import Source
from wanjax.errors import WanjaxError
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.registry import open_source

pytestmark = pytest.mark.usefixtures("cached_shapes")
MODEL = "memory://models/tiny"
LOST_CONNECTION = ConnectionError("the connection was lost")


@pytest.fixture(autouse=True)
def _in_memory(tmp_path, monkeypatch):
    clear_memory_store()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    clear_memory_store()


@pytest.fixture
def stored(converted) -> str:
    for name, content in bytes_of(converted).items():
        put(name, content)
    return MODEL


def put(name: str, content: bytes) -> None:
    MemoryFileSystem().pipe_file(f"/models/tiny/{name}", content)


def error_message(call, *arguments) -> str:
    with pytest.raises(WanjaxError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cached_checkpoint(tmp_path: Path) -> Path:
    [folder] = (tmp_path / "cache/wanjax/checkpoints").iterdir()
    return folder


def test_a_conversion_and_back_is_equal_bit_for_bit(source, converted, tmp_path):
    assert ConversionToWanjax(open_source(source), MODEL, NETWORKS).run()
    assert objects() == {f"models/tiny/{name}": content for name, content in bytes_of(converted).items()}
    assert not list((tmp_path / "cache/wanjax/conversions").iterdir())
    assert not ConversionToWanjax(open_source(source), MODEL, NETWORKS).run()  # exists already
    assert ConversionToDiffusers(open_source(MODEL), tmp_path / "back", NETWORKS).run()
    assert tensors(tmp_path / "back") == tensors(source)
    assert verify(open_source(MODEL))["networks"]


def test_another_checkpoint_is_not_overwritten(source, stored):
    before = objects()
    output = error_message(
        ConversionToWanjax(open_source(source), stored, NETWORKS, dtypes={"transformer": "bfloat16"}).run
    )
    assert has_line_with_words(output, MODEL)
    assert objects() == before


def test_an_interrupted_conversion_is_not_a_checkpoint_and_can_resume(source, converted):
    count = len(bytes_of(converted))
    with failing("put_file", LOST_CONNECTION, after=count // 2):
        assert has_line_with_words(error_message(ConversionToWanjax(open_source(source), MODEL, NETWORKS).run), MODEL)
    assert 0 < len(objects()) < count
    assert has_line_with_words(error_message(open_source, MODEL), f"{MODEL} wanjax.json")
    with failing("put_file", LOST_CONNECTION, after=count + 1) as put:
        assert ConversionToWanjax(open_source(source), MODEL, NETWORKS).run()
    assert len(put) < count - count // 4
    assert put[-1][1].endswith("/wanjax.json")  # the last file makes it a checkpoint
    assert objects() == {f"models/tiny/{name}": content for name, content in bytes_of(converted).items()}


def test_a_process_downloads_only_what_it_reads(stored, tmp_path):
    source = open_source(stored)
    assert not list(cached_checkpoint(tmp_path).rglob("c"))
    assert not (cached_checkpoint(tmp_path) / "tokenizer").exists()
    arrays = source["transformer"].weights()
    assert isinstance(arrays, OrbaxCheckpoint)
    name = "proj_out.kernel"
    values = arrays[name].read()
    assert [path.parent.name for path in cached_checkpoint(tmp_path).rglob("c")] == [name]
    again = OrbaxCheckpoint(cached_checkpoint(tmp_path) / "transformer/weights", lambda files: None)
    np.testing.assert_array_equal(again[name].read(), values)


def test_a_replaced_checkpoint_is_not_mixed_with_the_cached_one(stored, tmp_path):
    first = open_source(stored)
    bias_of(first)
    manifest = json.loads(objects()["models/tiny/wanjax.json"])
    put("wanjax.json", json.dumps(manifest | {"licence": "another"}).encode())
    second = open_source(stored)
    assert not (second.root / "transformer").exists()  # no cached file of the first is used
    assert has_line_with_words(
        error_message(open_source, stored, first.revision), f"{MODEL} {first.revision} {second.revision}"
    )


def bias_of(source: Source) -> np.ndarray:
    arrays = source["transformer"].weights()
    assert isinstance(arrays, OrbaxCheckpoint)
    return arrays["proj_out.bias"].read()


def flip_a_bit(end: str) -> None:
    bias_of(open_source(MODEL))  # caches the complete checkpoint
    [name] = [name for name in objects() if end in name]
    chunk = bytearray(objects()[name])
    chunk[1] ^= 1
    put(name.removeprefix("models/tiny/"), bytes(chunk))


def remove(end: str) -> None:
    [name] = [name for name in objects() if end in name]
    MemoryFileSystem().rm_file(f"/{name}")


def write_diffusers_index() -> None:
    MemoryFileSystem().rm("/models/tiny", recursive=True)
    put("model_index.json", json.dumps({"_class_name": "WanPipeline"}).encode())


TREE_FILE = b'{"tree_metadata": {"a": {"key_metadata": [{"key": "../x"}]}}}'
DAMAGE = {  # the damage to a checkpoint, the words of the message, and the call that is refused
    "manifest": (lambda: put("wanjax.json", b"{"), "wanjax.json", wanjax.load),
    "config": (lambda: put("transformer/config.json", b'{"num_layers": 9}'), "transformer/config.json", wanjax.load),
    "index": (lambda: put("model_index.json", b'{"_class_name": "Other"}'), "model_index.json", wanjax.load),
    "tree": (lambda: put("transformer/weights/_METADATA", TREE_FILE), "../x", wanjax.load),
    "a flipped bit": (
        *(lambda: flip_a_bit("transformer/weights/proj_out.bias/c"), "proj_out.bias"),
        lambda model: verify(open_source(model)),
    ),
    "a chunk is missing": (lambda: remove("transformer/weights/proj_out.bias/c"), "proj_out.bias", wanjax.load),
    "no index": (lambda: remove("model_index.json"), f"{MODEL} model_index.json", wanjax.load),
    "a checkpoint of diffusers": (write_diffusers_index, f"{MODEL} wanjax.json", wanjax.load),
}


@pytest.mark.parametrize(("damage", "words", "call"), DAMAGE.values(), ids=DAMAGE)
def test_an_incomplete_checkpoint_in_a_store_is_refused(stored, damage, words, call):
    damage()
    assert has_line_with_words(error_message(call, stored), words)
