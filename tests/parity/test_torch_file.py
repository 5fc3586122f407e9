# SPDX-License-Identifier: Apache-2.0
"""Files by `torch.save`, read without torch: the values are equal, and a file cannot run code or misuse memory."""

import io
import os
import pickle
import random
import zipfile
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.words import has_line_with_words
from wanjax.checkpoints import torch_file
from wanjax.checkpoints.torch_file import TorchFile, describe
from wanjax.errors import WanjaxError

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32),
)


def bits(tensor):
    """Return a tensor's bytes in order, whatever its dtype."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same_tensors(path, tensors):
    file = TorchFile(path)
    assert list(file.specs) == list(tensors)
    for key, tensor in tensors.items():
        array = file.read(key)
        assert file.specs[key] == (array.shape, array.dtype) == (tuple(tensor.shape), array.dtype)
        assert str(array.dtype) == str(tensor.dtype).removeprefix("torch.")
        assert array.tobytes() == bits(tensor)
        assert not array.flags.writeable or not array.size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_bit_for_bit(dtype, tmp_path):
    tensors = {"x": torch.randint(0, 2, (3, 5)).to(dtype), "scalar": torch.ones((), dtype=dtype)}
    torch.save(tensors, tmp_path / "x.pth")
    assert_same_tensors(tmp_path / "x.pth", tensors)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_state_dicts_views_parameters_and_empty_tensors_are_read(protocol, tmp_path):
    full = torch.randn(6, 8)
    tensors = dict(torch.nn.Linear(3, 2).state_dict()) | {
        "parameter": torch.nn.Parameter(torch.randn(4)),
        "part": full[2:4, 1:5],
        "transposed": full.T,
        "shared": full,
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "empty": torch.ones(0, 3),
    }
    torch.save(tensors, tmp_path / "x.pt", pickle_protocol=protocol)
    assert_same_tensors(tmp_path / "x.pt", tensors)


def test_the_state_dict_of_a_module_is_read(tmp_path):
    module = torch.nn.Sequential(torch.nn.Conv3d(2, 3, 3), torch.nn.LayerNorm(4)).to(torch.bfloat16)
    torch.save(module.state_dict(), tmp_path / "module.pth")
    assert_same_tensors(tmp_path / "module.pth", module.state_dict())


def test_the_state_dict_of_a_training_run_is_read(tmp_path):
    tensors = torch.nn.Linear(3, 2).state_dict()
    torch.save({"epoch": 3, "name": "run", "state_dict": tensors, "loss": [1.5]}, tmp_path / "run.pt")
    assert_same_tensors(tmp_path / "run.pt", tensors)


@pytest.mark.parametrize("name", ["generator", "generator_ema"])
def test_the_generator_of_a_distillation_is_read(name, tmp_path):
    tensors, other_tensors = (torch.nn.Linear(3, 2).state_dict() for _ in range(2))
    tables = {"generator": other_tensors, "critic": other_tensors} | {name: tensors}
    torch.save(tables, tmp_path / "model.pt")
    assert_same_tensors(tmp_path / "model.pt", {f"{name}.{key}": x for key, x in tensors.items()})


def refusal(path):
    """Return the error message for the file."""
    with pytest.raises(WanjaxError) as caught:
        TorchFile(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


class FolderMaker:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("position", ["value", "whole", "storage", "hooks", "state"])
def test_a_pickle_never_runs_code(position, tmp_path):
    folder_maker = FolderMaker(tmp_path / "ran")
    tensor, state = torch.ones(2), torch.nn.Linear(2, 2).state_dict()
    state._metadata = folder_maker
    table = {"value": {"x": folder_maker}, "whole": folder_maker, "hooks": {"x": tensor}, "state": state}.get(
        position, {"x": tensor}
    )
    torch.save(table, tmp_path / "evil.pth")
    if position in ("storage", "hooks"):
        rewrite_pickle(tmp_path / "evil.pth", _with_call(tmp_path, position))
    if position in ("state", "hooks"):  # these do not affect the tensors, so they are skipped
        assert [*TorchFile(tmp_path / "evil.pth").specs] == (["weight", "bias"] if position == "state" else ["x"])
    else:
        assert "tensor" in refusal(tmp_path / "evil.pth") or position == "storage"
    assert not (tmp_path / "ran").exists()
    with suppress(Exception):
        torch.load(tmp_path / "evil.pth", weights_only=False)
    assert (tmp_path / "ran").exists()  # torch runs the code of this pickle


def _with_call(folder, position):
    """Return a table of one tensor with a function call as its storage, or as its hooks."""

    class TensorWithCall:
        def __reduce__(self):
            folder_maker = FolderMaker(folder / "ran")
            storage = folder_maker if position == "storage" else _Persistent()
            return torch._utils._rebuild_tensor_v2, (storage, 0, (2,), (1,), False, folder_maker)

    return {"x": TensorWithCall()}


class _Persistent:
    """A placeholder for a storage."""


def rewrite_pickle(path, table):
    """Replace the pickle in a file by torch with that of another table."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return ("storage", torch.FloatStorage, "0", "cpu", 2) if isinstance(obj, _Persistent) else None

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(table)
    replace_record(path, "data.pkl", buffer.getvalue())


def replace_record(path, name, data):
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    root = next(record for record in records if record.endswith("data.pkl")).removesuffix("data.pkl")
    records[root + name] = data
    with zipfile.ZipFile(path, "w") as archive:
        for record, content in records.items():
            if content is not None:
                archive.writestr(record, content)


@pytest.fixture
def saved_path(tmp_path):
    torch.save({"a": torch.randn(3, 4), "b": torch.ones(2, dtype=torch.int64)}, tmp_path / "x.pth")
    return tmp_path / "x.pth"


def replace_record_by(name, data):
    """Return a function that replaces a record of a file by torch."""
    return lambda path: replace_record(path, name, data)


def write_archive(record, data, compression=zipfile.ZIP_STORED):
    """Return a function that writes an archive of one record."""

    def write(path):
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr(record, data)

    return write


def write_tensor_claim(offset, shape, strides):
    """Return a function that writes a tensor with another position in its storage, which has two numbers."""

    class Tensor:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, (_Persistent(), offset, shape, strides, False, {})

    def write(path):
        torch.save({"x": torch.ones(2)}, path)
        rewrite_pickle(path, {"x": Tensor()})

    return write


def write_quantiser_object(path):
    """Save an object of a quantisation library, whose class is only a name here."""
    torch.save({"a.weight": torch.nn.Identity()}, path)
    with zipfile.ZipFile(path) as archive:
        [pickled] = [archive.read(name) for name in archive.namelist() if name.endswith("data.pkl")]
    module, name = b"ctorch.nn.modules.linear\nIdentity\n", b"ctorchao.dtypes\nQuantised\n"
    assert module in pickled
    replace_record(path, "data.pkl", pickled.replace(module, name))


def write_table(table, **options):
    return lambda path: torch.save(table, path, **options)


BROKEN_FILES = {  # a function that writes a broken file, and words of the message
    "a short record": (replace_record_by("data/0", b"\0" * 47), "'a' [3, 4] 47"),
    "no record": (replace_record_by("data/0", None), "record 'data/0'"),
    "another byte order": (replace_record_by("byteorder", b"big"), "byte order b'big'"),
    "compression": (write_archive("x/data.pkl", b"\0" * 100_000_000, zipfile.ZIP_DEFLATED), "compressed"),
    "no pickle": (write_archive("x/other", b""), "data.pkl"),
    "an older torch": (write_table({"x": torch.ones(2)}, _use_new_zipfile_serialization=False), "torch 1.6"),
    "a text": (lambda path: path.write_text("hello"), "torch 1.6"),
    "a list": (write_table([torch.ones(2)]), "table tensors name"),
    "a number": (write_table({"epoch": 3}), "'epoch' tensor"),
    "nothing": (lambda path: path.unlink(), "no file"),
    "an object of a quantiser": (write_quantiser_object, "torchao tensors safetensors"),
    **{
        f"a tensor of {claim}": (write_tensor_claim(*claim), "'x'")
        for claim in [
            (0, (2**40, 2**40), (0, 0)), (0, (4,), (2**50,)), (2**59, (1,), (1,)), (-1, (1,), (1,)), (0, (2,), (1, 1)),
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_a_broken_file_is_refused_with_the_reason(name, saved_path):
    break_file, words = BROKEN_FILES[name]
    break_file(saved_path)
    assert has_line_with_words(refusal(saved_path), words)


NESTED_PAIRS = b"\x80\x02}(K\x01q\x00" + b"".join(b"h%c\x86q%c" % (i, i + 1) if i else b"h\0\x86q\1" for i in range(60))
PICKLES = {
    "2^60 hashes of sixty nested pairs": (NESTED_PAIRS + b"K\x01u.", "malformed"),
    "a memo of 64 GB": (b"\x80\x02Nr\xff\xff\xff\xff.", "malformed at byte 3"),
    # each takes microseconds, so a file of megabytes would take minutes
    "operations on nothing": (b"\x80\x04" + b"N" * 2_000_000 + b".", "operations"),
    "operations on numbers": (b"\x80\x04" + b"K\x01" * 1_000_000 + b".", "operations"),
    "operations on the memo": (b"\x80\x04" + b"N\x94" * 1_000_000 + b".", "operations"),
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_that_would_take_too_long_is_refused_immediately(name):
    data, words = PICKLES[name]
    with pytest.raises(ValueError, match=words):
        describe(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_described_or_refused(data):
    with suppress(ValueError):
        describe(b"\x80\x02" + data)


def test_a_damaged_file_is_read_or_refused(saved_path, tmp_path):
    """Any damage gives tensors of the right shapes or an error message, never another error."""
    valid, rng = saved_path.read_bytes(), random.Random(0)
    broken = tmp_path / "broken.pth"
    for _ in range(300):
        data = bytearray(valid)
        for _ in range(rng.choice([1, 1, 2, 8])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        broken.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
        try:
            file = TorchFile(broken)
            for key, spec in file.specs.items():
                assert file.read(key).shape == spec.shape
        except WanjaxError as error:
            assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize(("limit", "words"), [("HEADER_LIMIT", "table of contents"), ("MAX_PICKLE_BYTES", "pickle 50")])
def test_a_large_table_of_contents_is_refused(saved_path, monkeypatch, limit, words):
    monkeypatch.setattr(torch_file, limit, 50)
    assert has_line_with_words(refusal(saved_path), words)


def test_values_are_views_of_the_file(saved_path):
    array = TorchFile(saved_path).read("a")
    assert isinstance(array.base, np.ndarray)


def test_a_file_that_shrinks_after_it_was_opened_is_refused(saved_path):
    file = TorchFile(saved_path)
    saved_path.write_bytes(saved_path.read_bytes()[:100])
    with pytest.raises(WanjaxError, match="cannot be read"):
        file.read("b")
