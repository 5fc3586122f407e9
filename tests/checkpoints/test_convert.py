# SPDX-License-Identifier: Apache-2.0
"""`wanjax convert`: exact to the bit in both directions, and read like any other checkpoint."""

import json
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import wanjax
from tests.support.conversion import COMPONENTS, checksums, convert_command, refused, tensors
from tests.support.harm import WEIGHTS
from tests.support.quick import quick
from tests.support.tiny import (
    tiny_control_checkpoint,
    tiny_experts_checkpoint,
    tiny_image_checkpoint,
    tiny_residual_checkpoint,
)
from tests.support.words import has_line_with_words
from wanjax import loading
from wanjax.checkpoints import convert, modules
from wanjax.checkpoints.convert import ConversionToDiffusers, ConversionToWanjax
from wanjax.checkpoints.files import load_safetensors, save_safetensors
from wanjax.checkpoints.manifest import verify
from wanjax.checkpoints.modules import parameters
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.registry import open_source

pytestmark = pytest.mark.usefixtures("cached_shapes")


def test_a_conversion_and_back_is_equal_bit_for_bit(source, converted, tmp_path):
    assert ConversionToDiffusers(open_source(converted), tmp_path / "back", NETWORKS).run()
    assert tensors(tmp_path / "back") == tensors(source)
    other_files = ["model_index.json", "tokenizer/tokenizer.json", "scheduler/scheduler_config.json", "README.md"]
    for name in [*other_files, *(f"{network}/config.json" for network in COMPONENTS)]:
        assert json_or_text(tmp_path / "back" / name) == json_or_text(source / name)
    assert not list((tmp_path / "back").rglob("*.bin"))
    again = tmp_path / "again"
    ConversionToWanjax(open_source(tmp_path / "back"), again, NETWORKS).run()
    assert checksums(again) == checksums(converted)


MODELS = {
    "first and last": partial(tiny_image_checkpoint, last=True),
    "control": tiny_control_checkpoint,
    "two experts": tiny_experts_checkpoint,
    "residual": tiny_residual_checkpoint,
}


@pytest.mark.parametrize("model", quick(["control", "two experts"], MODELS))
def test_every_model_is_converted_and_back(model, tmp_path):
    source_folder = MODELS[model](tmp_path / "original")
    assert ConversionToWanjax(open_source(source_folder), tmp_path / "converted", NETWORKS).run()
    assert ConversionToDiffusers(open_source(tmp_path / "converted"), tmp_path / "back", NETWORKS).run()
    assert tensors(tmp_path / "back") == tensors(source_folder)
    for file in source_folder.rglob("*.json"):
        assert json_or_text(tmp_path / "back" / file.relative_to(source_folder)) == json_or_text(file)


@pytest.mark.parametrize("prefix", quick([""], ["vision_model.", ""]))
def test_unused_tensors_are_converted_and_back(prefix, tmp_path):
    """CLIP's last block and norm, under either of their names, are converted but not read by `load`."""
    source_folder = tiny_image_checkpoint(tmp_path / "original")
    weights = source_folder / "image_encoder" / "model.safetensors"
    used = {key: np.array(x) for key, x in load_safetensors(weights).items()}
    last = {key.replace(".0.", ".1."): x + 1 for key, x in used.items() if ".layers.0." in key}
    other_unused = {"vision_model.post_layernorm.weight": np.ones(16, np.float32), **last}
    other_unused["vision_model.embeddings.position_ids"] = np.arange(5)[None]
    outside = {"visual_projection.weight"}  # not part of the vision tower
    extra_tensors = {
        key if key in outside else prefix + key.removeprefix("vision_model."): x
        for key, x in (used | other_unused).items()
    }
    save_safetensors(weights, extra_tensors)
    assert ConversionToWanjax(open_source(source_folder), tmp_path / "converted", NETWORKS).run()
    verify(open_source(tmp_path / "converted"))
    assert ConversionToDiffusers(open_source(tmp_path / "converted"), tmp_path / "back", NETWORKS).run()
    assert tensors(tmp_path / "back") == tensors(source_folder)
    assert set(tensors(source_folder)) >= {f"image_encoder.{key}" for key in extra_tensors}
    encoders = [parameters(loading.load(tmp_path / name).image_encoder) for name in ("original", "converted")]
    for name, x in encoders[0].items():
        np.testing.assert_array_equal(x, encoders[1][name])


def json_or_text(path: Path):
    return json.loads(path.read_text()) if path.suffix == ".json" else path.read_text()


def test_large_components_go_back_in_shards(source, converted, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "split_into_shards", lambda reader, stem: original_split(reader, stem, 20_000))
    ConversionToDiffusers(open_source(converted), tmp_path / "back", NETWORKS).run()
    assert (tmp_path / "back" / "transformer" / f"{WEIGHTS}.index.json").is_file()
    assert tensors(tmp_path / "back") == tensors(source)


original_split = convert.split_into_shards


def tokens(pipe):
    return pipe.tokenizer.tokenize(["a red circle"]).ids.tolist()


def test_a_converted_checkpoint_names_its_source(source, converted):
    manifest = json.loads((converted / "wanjax.json").read_text())
    assert manifest["licence"] == "apache-2.0"
    assert manifest["request"]["source"] == str(source)
    assert manifest["request"]["revision"] is None
    assert manifest["networks"].keys() == set(COMPONENTS)
    assert "text_encoder/config.json" in manifest["files"]


def test_a_converted_checkpoint_is_loaded_like_any_other(source, converted):
    messages = []
    original_pipe = wanjax.load(source, param_dtype="bfloat16")
    converted_pipe = wanjax.load(
        converted, param_dtype="bfloat16", progress=lambda *progress: messages.append(progress)
    )
    assert converted_pipe.defaults.updated({"model": ""}) == original_pipe.defaults.updated({"model": ""})
    for name in COMPONENTS:
        weights, expected = (modules.parameters(getattr(pipe, name)) for pipe in (converted_pipe, original_pipe))
        assert weights.keys() == expected.keys()
        for path, x in weights.items():
            assert (x.dtype, np.asarray(x).tobytes()) == (expected[path].dtype, np.asarray(expected[path]).tobytes())
    for name in COMPONENTS:
        done, total = [progress[1:] for progress in messages if progress[0] == name][-1]
        assert done == total > 0
    assert tokens(converted_pipe) == tokens(original_pipe)


def test_a_folder_may_be_named_through_its_parent(source, converted, tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    convert_command(source, Path("../new"))
    assert checksums(Path("../new")) == checksums(converted)
    verify(open_source("../new"))
    assert wanjax.load("../new", note=lambda text: None).transformer


def test_the_command_prints_what_it_reads_and_writes(source, tmp_path):
    target = tmp_path / "new" / "checkpoint"
    status, out, err = convert_command(source, target, "--dtype", "bfloat16")
    assert (status, out) == (0, "")
    for words in (
        r"transformer +19,832 ",
        r"total +318 kB +281 kB",
        r"converting.*281 kB of 281 kB",
        r"is complete and verified",
    ):
        assert re.search(words, err), err
    dtypes = {name: {words.split()[0] for words in arrays.values()} for name, arrays in checksums(target).items()}
    assert dtypes["vae"] == {"float32"}
    assert dtypes["transformer"] == {"bfloat16", "float32"}  # norms keep their dtype
    assert dtypes["text_encoder"] == {"bfloat16"}
    assert "already exists" in convert_command(source, target, "--dtype", "bfloat16")[2]
    status, _, err = convert_command("--verify", target)
    assert (status, "checksums of" in err) == (0, True)


KERNELS = {"text_encoder": "blocks.attn.q.kernel", "transformer": "proj_out.kernel", "vae": "quant.kernel"}


def test_each_component_can_have_a_different_dtype(source, tmp_path):
    convert_command(
        source, tmp_path / "x", "--dtype", "bfloat16", "--dtype", "text_encoder=float32", "--dtype", "vae=bfloat16"
    )
    arrays = checksums(tmp_path / "x")
    assert {words.split()[0] for words in arrays["text_encoder"].values()} >= {"float32"}
    assert arrays["transformer"]["proj_out.kernel"].startswith("bfloat16")
    pipe = loading.load(tmp_path / "x")  # each network keeps its stored dtype, except the autoencoder
    kinds = [parameters(getattr(pipe, name))[key].dtype.name for name, key in KERNELS.items()]
    assert kinds == ["float32", "bfloat16", "float32"]
    assert arrays["vae"]["quant.kernel"].startswith("bfloat16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{source}",), "missing convert FOLDER"),
        (
            ("nanoo", "{new}"),
            "model 'nanoo' nano",
        ),
        (
            ("qqqqqqqq", "{new}"),
            "models hub",
        ),
        (("{source}/model_index.json", "{new}"), "model_index.json weights"),
        (("{source}", "{new}", "--revision", "abc"), "hub revision abc"),
        (("{source}", "{source}"), "already new folder"),
        (("{source}", "{converted}", "--dtype", "bfloat16"), "already other contents another --dtype: new folder"),
        (("{converted}", "{new}"), "--to diffusers"),
        (("{source}", "{new}", "--to", "diffusers"), "--to diffusers already leave out"),
        (("{source}", "--verify"), "no wanjax checkpoint checksums"),
        (("{converted}", "{new}", "--verify"), "--verify one folder"),
        (
            ("{source}", "{new}", "--dtype", "float8"),
            "--dtype float8 dtype weights",
        ),
        (
            ("{source}", "{new}", "--dtype", "unet=float32"),
            "unet scheduler",
        ),
        (
            ("{source}", "/proc/nowhere/x"),
            "/proc/nowhere/x No such file or directory",
        ),
        (("{source}", "{source}/README.md/x"), "README.md/x Not a directory"),
    ],
)
def test_mistakes_are_reported(source, converted, tmp_path, arguments, message):
    paths = {"source": source, "converted": converted, "new": tmp_path / "new"}
    assert has_line_with_words(refused(*(argument.format(**paths) for argument in arguments)), message)
    assert not os.listdir(tmp_path)
