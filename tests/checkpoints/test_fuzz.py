# SPDX-License-Identifier: Apache-2.0
"""Random files: each is read without access beyond its bytes, or refused with a message.

A few hundred cases of each kind; three thousand with `pytest -m slow tests/checkpoints/test_fuzz.py`.
"""

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wanjax.checkpoints.arrays import OrbaxCheckpoint, Writer
from wanjax.checkpoints.files import DTYPES, SafetensorsFile, SafetensorsFolder, Spec, save_safetensors
from wanjax.errors import WanjaxError
from wanjax.registry import open_source

CASES = [300, pytest.param(3_000, marks=pytest.mark.slow)]
TENSORS = {"a.weight": np.ones((2, 3), np.float32), "b": np.ones(5, np.int8), "c": np.ones(3, ml_dtypes.bfloat16)}

numbers = st.one_of(st.integers(0, 30), st.sampled_from([-1, 2**31, 2**40, 2**62, 2**63, 2**64, 10**30]), st.integers())
junk = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.floats(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
keys = st.one_of(st.sampled_from(["a", "b", "a.weight", "__metadata__"]), st.text(max_size=8))
entries = st.one_of(
    st.fixed_dictionaries(
        {
            "dtype": st.one_of(st.sampled_from(list(DTYPES)), junk),
            "shape": st.one_of(st.lists(numbers, max_size=4), junk),
            "data_offsets": st.one_of(st.tuples(numbers, numbers).map(list), junk),
        }
    ),
    junk,
)


def fuzz(num_cases: int, *strategies: st.SearchStrategy, test: Callable) -> None:
    settings(max_examples=num_cases, deadline=None, suppress_health_check=list(HealthCheck))(given(*strategies)(test))()


def read_or_refuse(read: Callable[[], object]) -> None:
    try:
        read()
    except WanjaxError as error:
        message = str(error)
        assert message.isprintable(), repr(message)
        assert message


def read_all(reader, size: int) -> None:
    """Read every tensor, and check that all lie within the file."""
    assert sum(spec.nbytes for spec in reader.specs.values()) <= size
    for key, spec in reader.specs.items():
        assert len(reader.read(key).tobytes()) == spec.nbytes


@st.composite
def headers(draw) -> bytes:
    """Draw a file with any header; its length and its data are often valid."""
    text = json.dumps(draw(st.dictionaries(keys, entries, max_size=4) | junk)).encode()
    length = draw(st.one_of(st.just(len(text)), numbers)) % 2**64
    return length.to_bytes(8, "little") + text + bytes(draw(st.integers(0, 40)))


@st.composite
def nearly_valid(draw) -> bytes:
    """Draw a file whose header has at most two wrong numbers."""
    header, end = {}, 0
    for key in draw(st.lists(st.sampled_from("abcdef"), unique=True, min_size=1, max_size=4)):
        shape, name = draw(st.lists(st.integers(0, 4), max_size=3)), draw(st.sampled_from(list(DTYPES)))
        begin, end = end, end + Spec(tuple(shape), DTYPES[name]).nbytes
        header[key] = {"dtype": name, "shape": shape, "data_offsets": [begin, end]}
    for _ in range(draw(st.integers(0, 2))):
        field = draw(st.sampled_from(["shape", "data_offsets"]))
        values = header[draw(st.sampled_from(list(header)))][field]
        if values:
            values[draw(st.integers(0, len(values) - 1))] = draw(numbers)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(max(0, end + draw(st.integers(-1, 1))))


@st.composite
def damaged(draw, contents: bytes) -> bytes:
    """Draw the contents with bytes changed, removed or inserted."""
    changed = bytearray(contents)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(changed)))
        changed[start : start + draw(st.integers(0, 9))] = draw(st.binary(max_size=9))
    return bytes(changed)


@pytest.mark.parametrize("num_cases", CASES)
@pytest.mark.parametrize("kind", ["headers", "nearly_valid", "damaged"])
def test_a_file_is_read_or_refused(tmp_path, kind, num_cases):
    path = tmp_path / "x.safetensors"
    save_safetensors(path, TENSORS, {"note": "x"})
    strategy = {"headers": headers(), "nearly_valid": nearly_valid(), "damaged": damaged(path.read_bytes())}[kind]

    def test(contents: bytes) -> None:
        path.write_bytes(contents)
        read_or_refuse(lambda: read_all(SafetensorsFile(path), len(contents)))

    fuzz(num_cases, strategy, test=test)


names = st.one_of(
    st.sampled_from(["model-1.safetensors", "model-2.safetensors"]),
    st.sampled_from(["../outside.safetensors", "/etc/passwd", "..", "sub/x.safetensors", "~/x.safetensors"]),
    st.text(max_size=9).map(lambda text: f"{text}.safetensors"),
    junk,
)


@pytest.mark.parametrize("num_cases", CASES)
def test_an_index_is_followed_within_its_folder_or_refused(tmp_path, num_cases):
    folder = tmp_path / "inside"
    folder.mkdir()
    save_safetensors(folder / "model-1.safetensors", {"a": TENSORS["b"]})
    save_safetensors(folder / "model-2.safetensors", {"b": TENSORS["b"], "c": TENSORS["c"]})
    save_safetensors(tmp_path / "outside.safetensors", {"secret": TENSORS["b"]})
    index = folder / "model.safetensors.index.json"
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    content = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    maps = st.dictionaries(keys, names, max_size=4).map(lambda more: {"weight_map": weight_map | more}) | st.builds(
        lambda weight_map: {"weight_map": weight_map}, junk
    )
    texts = st.one_of(maps.map(json.dumps).map(str.encode), junk.map(json.dumps).map(str.encode), damaged(content))

    def test(text: bytes) -> None:
        index.write_bytes(text)

        def read() -> None:
            reader = SafetensorsFolder(folder)
            assert set(reader.specs) <= set("abc")
            assert all(path.parent == folder for path in reader.paths)
            read_all(reader, 1000)

        read_or_refuse(read)

    fuzz(num_cases, texts, test=test)


def write_arrays(folder: Path) -> None:
    specs = {key: Spec(x.shape, x.dtype) for key, x in TENSORS.items()}
    arrays = OrbaxCheckpoint.create(folder, specs, {key: x.shape for key, x in TENSORS.items()})
    with Writer() as writer:
        for key, x in TENSORS.items():
            writer.write(arrays[key], tuple(slice(0, n) for n in x.shape), x)


@pytest.mark.parametrize("num_cases", CASES)
@pytest.mark.parametrize("file", ["_METADATA", "a.weight/zarr.json", "a.weight/c/0/0"])
def test_stored_arrays_are_read_or_refused(tmp_path, file, num_cases):
    write_arrays(tmp_path)
    content = (tmp_path / file).read_bytes()

    def test(text: bytes) -> None:
        (tmp_path / file).write_bytes(text)

        def read() -> None:
            arrays = OrbaxCheckpoint(tmp_path)
            for key, spec in arrays.specs.items():
                if spec.nbytes < 1000:  # a model's arrays have known shapes
                    arrays.read(key)
                    arrays[key].digest()

        read_or_refuse(read)

    fuzz(num_cases, damaged(content), test=test)


@pytest.mark.parametrize("num_cases", CASES)
def test_a_manifest_is_read_or_refused(tmp_path, num_cases):
    (tmp_path / "model_index.json").write_text("{}")
    content = json.dumps({"format": 1, "request": {"source": "x"}, "networks": {"a": {}}, "files": {}}).encode()
    tables = st.fixed_dictionaries({"format": st.just(1), "request": junk, "networks": junk, "files": junk})

    def test(text: bytes) -> None:
        (tmp_path / "wanjax.json").write_bytes(text)
        read_or_refuse(lambda: open_source(tmp_path).published_name)

    fuzz(num_cases, damaged(content) | tables.map(json.dumps).map(str.encode), test=test)
