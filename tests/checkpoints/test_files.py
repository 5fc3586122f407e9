# SPDX-License-Identifier: Apache-2.0
"""Safetensors files, read and written like the format's library, with a message for every fault."""

import json
import mmap
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.support.disks import limit_file_size
from tests.support.words import has_line_with_words
from wanjax.checkpoints.files import (
    DTYPES,
    SafetensorsFile,
    SafetensorsFolder,
    Spec,
    load_safetensors,
    save_safetensors,
)
from wanjax.checkpoints.readers import open_tensors
from wanjax.errors import WanjaxError
from wanjax.stores.temporary import HOST_NAME
from wanjax.stores.writing import atomic_write, check_folder

TENSORS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a.bias": np.arange(3).astype(ml_dtypes.bfloat16),
    "b": np.arange(5, dtype=np.int8),
    "scalar": np.array(7.0, np.float16),
    "empty": np.zeros((0, 4), np.float32),
}


def assert_same(tensors, expected):
    assert tensors.keys() == expected.keys()
    for key, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (expected[key].dtype, expected[key].shape)
        assert tensor.tobytes() == expected[key].tobytes()


def error_message(read, *args):
    """Return the message with which `read` fails."""
    with pytest.raises(WanjaxError) as caught:
        read(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.from_regex(r"[a-z.0-9]{1,9}", fullmatch=True),
        st.tuples(
            arrays.array_shapes(min_dims=0, min_side=0, max_side=4), st.sampled_from(list(DTYPES.values())), st.binary()
        ),
        max_size=5,
    )
)
def test_saved_tensors_are_loaded_bit_for_bit(tmp_path, drawn):
    tensors = {
        key: np.resize(np.frombuffer(seed + b"\0", np.uint8), np.prod(shape, dtype=int) * dtype.itemsize)
        .view(dtype)
        .reshape(shape)
        for key, (shape, dtype, seed) in drawn.items()
        if dtype != np.bool_
    }
    with np.errstate(invalid="ignore"):  # a signalling NaN
        wide = [x.astype(np.float64) for x in tensors.values() if x.dtype.kind in "fV"]
    if not all(np.isfinite(x).all() for x in wide):
        assert "is not finite" in error_message(save_safetensors, tmp_path / "x.safetensors", tensors)
        return
    save_safetensors(tmp_path / "x.safetensors", tensors)
    assert_same(load_safetensors(tmp_path / "x.safetensors"), tensors)


def test_the_safetensors_library_reads_saved_files(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {key: tensor for key, tensor in TENSORS.items() if tensor.dtype != ml_dtypes.bfloat16}
    save_safetensors(path, tensors | {"view": TENSORS["a.weight"].T}, {"format": "pt", "note": "é"})
    assert_same(safetensors.numpy.load_file(path), tensors | {"view": TENSORS["a.weight"].T.copy()})
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "pt", "note": "é"}


def test_files_of_the_safetensors_library_are_read(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(TENSORS, path, {"format": "pt"})
    file = SafetensorsFile(path)
    assert file.metadata == {"format": "pt"}
    assert file.specs["a.bias"] == Spec((3,), np.dtype(ml_dtypes.bfloat16))
    assert file.specs["a.weight"].nbytes == 24
    assert_same(load_safetensors(path), TENSORS)


def test_a_tensor_is_a_view_of_the_file_not_a_copy(tmp_path):
    path = tmp_path / "x.safetensors"
    save_safetensors(path, {"big": np.zeros(1 << 22, np.float32)})
    tensor = SafetensorsFile(path).read("big")
    assert not tensor.flags.writeable
    owner = tensor
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    assert isinstance(owner, mmap.mmap)


def raw(header, data=b"", length=None):
    """Return the bytes of a safetensors file with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BROKEN = {
    "nothing": (b"", "header too small"),
    "a text": (b"<html>not found</html>", "header too large"),
    "terabytes of header": (raw(b"{}", length=1 << 42), "header too large"),
    "no json": (raw(b"{'a': 1}"), "invalid JSON"),
    "no utf-8": (raw(b'{"\xff": 1}'), "invalid UTF-8"),
    "nested": (raw(b"[" * 100_000), "invalid JSON"),
    "an endless number": (raw(b'{"a": ' + b"9" * 10_000 + b"}"), "number out of range"),
    "no object": (raw([1]), "invalid type"),
    "a key twice": (raw(b'{"a": 1, "a": 2}'), "invalid type"),
    "metadata of numbers": (raw({"__metadata__": {"a": 1}}), "expected a string"),
    "an entry too little": (raw({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)), "missing field `data_offsets`"),
    "an unprintable key": (raw({"\x1b[2J": entry()}, bytes(4)), r"'\x1b[2J' is malformed"),
    "a dtype that no file has": (raw({"a": entry("F5")}, bytes(4)), "unknown variant"),
    "a dtype that NumPy lacks": (raw({"a": entry("F4", (8,))}, bytes(4)), "'F4', which is not one of BOOL"),
    "an unprintable key of a gap": (raw({"\n\x1b[2J": entry(offsets=(4, 8))}, bytes(8)), r"for tensor `\n\x1b[2J`"),
    "a dtype that is a list": (raw({"a": entry(["F32"])}, bytes(4)), "invalid type"),
    "a negative size": (raw({"a": entry(shape=(-1, -1))}, bytes(4)), "invalid value"),
    "a true size": (raw({"a": entry(shape=(True,))}, bytes(4)), "invalid type"),
    "too many axes": (raw({"a": entry(shape=(1,) * 99)}, bytes(4)), "'a' is malformed"),
    "three offsets": (raw({"a": entry(offsets=(0, 4, 4))}, bytes(4)), "invalid length 3"),
    "shape against offsets": (raw({"a": entry(shape=(2,))}, bytes(4)), "invalid shape, data type, or offset"),
    "offsets backwards": (raw({"a": entry(offsets=(4, 0))}, bytes(4)), "invalid offset for tensor `a`"),
    "terabytes of data": (raw({"a": entry(shape=(1 << 40,), offsets=(0, 1 << 42))}, bytes(4)), "not fully covered"),
    "an empty tensor of an absurd shape": (raw({"a": entry(shape=(0, 1 << 62), offsets=(0, 0))}), "'a' is malformed"),
    "an overlap": (raw({"a": entry(), "b": entry(offsets=(2, 6))}, bytes(6)), "invalid offset for tensor `b`"),
    "a gap": (raw({"a": entry(), "b": entry(offsets=(6, 10))}, bytes(10)), "invalid offset for tensor `b`"),
    "truncated": (raw({"a": entry()}, bytes(3)), "not fully covered"),
    "bytes after the end": (raw({"a": entry()}, bytes(5)), "not fully covered"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_message_for_a_broken_file_names_its_error(tmp_path, name):
    contents, words = BROKEN[name]
    path = tmp_path / "x.safetensors"
    path.write_bytes(contents)
    message = error_message(SafetensorsFile, path)
    assert str(path) in message
    assert words in message


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(st.integers(0, 10**6), st.integers(1, 255), st.booleans())
def test_a_damaged_header_is_read_as_tensors_or_refused(tmp_path, position, flip, cut):
    path = tmp_path / "x.safetensors"
    save_safetensors(tmp_path / "intact.safetensors", TENSORS, {"note": "x"})
    contents = bytearray((tmp_path / "intact.safetensors").read_bytes())
    position %= len(contents)
    contents[position] ^= flip
    path.write_bytes(contents[:position] if cut else contents)
    with suppress(WanjaxError):
        for tensor in load_safetensors(path).values():
            tensor.tobytes()


def test_a_file_that_shrinks_after_it_was_opened_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    save_safetensors(path, {"a": np.zeros(5000, np.float32)})
    file = SafetensorsFile(path)
    os.truncate(path, 100)
    assert str(path) in error_message(file.read, "a")


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_numbers_that_are_not_finite_leave_the_old_file(tmp_path, dtype):
    path, values = tmp_path / "x.safetensors", np.zeros((3, 200_000), dtype)
    save_safetensors(path, {"a": values, "b": np.full(2, -1, np.int32)})
    values[2, -1] = np.nan
    assert has_line_with_words(error_message(save_safetensors, path, {"a": values}), f"{path} 'a' finite")
    assert not load_safetensors(path)["a"].any()
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_a_full_disk_leaves_only_the_old_file(tmp_path):
    path = tmp_path / "x.safetensors"
    save_safetensors(path, {"a": np.ones(1, np.float32)})
    with limit_file_size(1000):
        message = error_message(save_safetensors, path, {"a": np.zeros(5000, np.float32)})
    assert has_line_with_words(message, f"{path} File too large")
    assert os.listdir(tmp_path) == ["x.safetensors"]
    assert_same(load_safetensors(path), {"a": np.ones(1, np.float32)})


def test_an_interrupt_leaves_no_partial_file(tmp_path):
    def interrupted():
        with atomic_write(tmp_path / "x.mp4") as temporary_file:
            temporary_file.write_bytes(b"half")
            assert temporary_file.suffix == ".mp4"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not os.listdir(tmp_path)


def write_shards(folder, shards, weight_map=None, stem="diffusion_pytorch_model"):
    """Write shards with these tensors, and an index that lists them all unless `weight_map` says otherwise."""
    names = [f"{stem}-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, tensors in zip(names, shards, strict=True):
        save_safetensors(folder / name, tensors)
    weight_map_of_shards = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map_of_shards | (weight_map or {})}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    return names


SPLIT = [{"a.weight": TENSORS["a.weight"], "b": TENSORS["b"]}, {"a.bias": TENSORS["a.bias"]}]
ALL_TENSORS = SPLIT[0] | SPLIT[1]


def read_all(folder):
    return {key: folder.read(key) for key in folder.specs}


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_is_read_in_each_layout(tmp_path, stem, sharded):
    if sharded:
        write_shards(tmp_path, SPLIT, stem=stem)
    else:
        save_safetensors(tmp_path / f"{stem}.safetensors", ALL_TENSORS)
    folder = SafetensorsFolder(tmp_path)
    assert_same(read_all(folder), ALL_TENSORS)
    assert folder.specs["a.bias"] == Spec((3,), np.dtype(ml_dtypes.bfloat16))


def test_the_default_variant_is_not_mixed_with_another(tmp_path):
    save_safetensors(tmp_path / "model.fp16.safetensors", SPLIT[0])
    save_safetensors(tmp_path / "model.safetensors", SPLIT[1])
    assert_same(read_all(SafetensorsFolder(tmp_path)), SPLIT[1])


def delete_shards(folder):
    for name in write_shards(folder, SPLIT):
        (folder / name).unlink()


def truncate_a_shard(folder):
    _, second = write_shards(folder, SPLIT)
    os.truncate(folder / second, os.path.getsize(folder / second) - 1)


def write_a_key_twice(folder):
    write_shards(folder, [SPLIT[0], SPLIT[1] | {"b": TENSORS["b"]}])


def index_writer(weight_map, more_keys=()):
    """Return a function that writes shards with a wrong index, and another file with these tensors."""

    def write(folder):
        write_shards(folder, SPLIT, weight_map)
        save_safetensors(folder / "other.safetensors", {key: TENSORS["b"] for key in more_keys})

    return write


def text_writer(name, text=""):
    """Return a function that writes a text file into a folder."""
    return lambda folder: (folder / name).write_text(text, encoding="latin-1")


INDEXED = "safetensors.index.json"
INDEX, FIRST_SHARD, SECOND_SHARD = (
    f"diffusion_pytorch_model{end}"
    for end in (f".{INDEXED}", "-00001-of-00002.safetensors", "-00002-of-00002.safetensors")
)
FOLDERS = {  # the damage to a folder, and the words of the message
    "nothing": (lambda folder: None, "no weights"),
    "a config alone": (text_writer("config.json", "{}"), "no weights"),
    "weights of torch": (text_writer("pytorch_model.bin"), "pytorch_model.bin"),
    "another variant": (text_writer("model.fp16.safetensors"), "model.safetensors"),
    "no shards": (delete_shards, f"{FIRST_SHARD} {SECOND_SHARD} {INDEX}"),
    "a truncated shard": (truncate_a_shard, SECOND_SHARD),
    "a key in two shards": (write_a_key_twice, f"'b' shards {FIRST_SHARD} {SECOND_SHARD}"),
    "a key elsewhere": (index_writer({"b": "other.safetensors"}), f"'b' other.safetensors {FIRST_SHARD}"),
    "a key nowhere": (index_writer({"lost": "other.safetensors"}), "'lost' other.safetensors"),
    "a key too many": (index_writer({"x": "other.safetensors"}, "xy"), "'y' other.safetensors"),
    **{
        f"a shard named {name!r}": (index_writer({"b": name}), repr(name))
        for name in (
            *("../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "a\\x.safetensors", "C:x.safetensors"),
            *("x.bin", "", "\0.safetensors", "\ud800.safetensors", 7, None, ["x.safetensors"]),
        )
    },
    **{
        f"an index of {text!r:.20}": (
            text_writer("model.safetensors.index.json", text),
            "model.safetensors.index.json",
        )
        for text in ("", "[]", "{}", '{"weight_map": []}', "\xff", "[" * 100_000)
    },
}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_message_for_a_wrong_folder_names_its_error(tmp_path, name):
    harm, words = FOLDERS[name]
    harm(tmp_path)
    assert has_line_with_words(error_message(SafetensorsFolder, tmp_path), words)


@pytest.mark.parametrize(
    ("call", "name", "words"),
    [
        (SafetensorsFile, "x.safetensors", "no file x.safetensors"),
        (SafetensorsFolder, "no", "no folder no"),
        (open_tensors, "x" * 300 + ".safetensors", "x" * 300 + ".safetensors"),
        (open_tensors, "x" * 300 + ".pth", "x" * 300 + ".pth"),
        (lambda path: save_safetensors(path, TENSORS), "file/x.safetensors", "file/x.safetensors Not a directory"),
        (check_folder, "file/stages", "file not a folder another"),
        (check_folder, "/proc/stages", "written another"),
    ],
)
def test_an_unreadable_or_unwritable_path_is_reported(tmp_path, monkeypatch, call, name, words):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    assert has_line_with_words(error_message(call, Path(name)), words)


def test_files_of_a_dead_process_are_removed(tmp_path):
    """Files of running processes, of other machines and with other names stay."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    dead_prefix, live_prefix = f".{dead.pid}@{HOST_NAME}", f".{os.getpid()}@{HOST_NAME}"
    removed = [f"{dead_prefix}.partial.a.mp4", f"{dead_prefix}.old.b"]
    expected = [
        f"{live_prefix}.partial.c.mp4",
        f".{dead.pid}@elsewhere.partial.d.mp4",
        ".hidden",
        f"{dead_prefix}.other.e",
        "a.mp4",
        "b",
    ]
    for name in (*removed, *expected):
        (tmp_path / name).write_text("x")
    (tmp_path / f"{dead_prefix}.partial.frames").mkdir()
    (tmp_path / f"{dead_prefix}.old.lost").mkdir()  # its process was killed before it renamed the new folder
    with atomic_write(tmp_path / "f.json") as temporary_file:
        temporary_file.write_text("{}")
    assert sorted(os.listdir(tmp_path)) == sorted([*expected, "f.json", "lost"])
