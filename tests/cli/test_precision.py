# SPDX-License-Identifier: Apache-2.0
"""`--precision`: from the command line to the metadata, through stages, batches, plans and conversions."""

import json

import numpy as np
import pytest

from tests.support.commands import refused, succeeded, wanjax
from tests.support.families import registered
from tests.support.tiny import tiny_checkpoint
from tests.support.toy import TOY
from tests.support.toy.checkpoint import write_checkpoint
from tests.support.words import has_line_with_words
from wanjax.checkpoints.files import load_safetensors
from wanjax.media import stage_files
from wanjax.media.video import read_metadata

pytestmark = pytest.mark.usefixtures("cached_programs")

SMALL = ("--size", "32x16", "--frames", "5", "--dtype", "float32")
STEPS = ("--steps", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def latents(folder):
    return np.array(load_safetensors(f"{folder}/{stage_files.LATENTS_FILE}")["latents"])


def test_a_video_has_its_precision_in_its_metadata_and_is_reproduced_with_it(model):
    succeeded(wanjax("a red circle", "--model", model, *SMALL, *STEPS, "--precision", "int8", "--out", "a.mp4"))
    assert read_metadata("a.mp4")["precision"] == "int8"
    assert has_line_with_words(succeeded(wanjax("info", "a.mp4")).output, "precision int8")
    succeeded(wanjax("--from", "a.mp4", "--out", "b.mp4"))
    assert read_metadata("b.mp4") == read_metadata("a.mp4")
    succeeded(wanjax("--from", "a.mp4", "--precision", "none", "--out", "c.mp4"))
    assert read_metadata("c.mp4")["precision"] == "none"


def test_stages_keep_the_precision_and_never_mix_two(model):
    encode = ("encode", "a red circle", "--model", model, *SMALL)
    succeeded(wanjax(*encode, "--precision", "int8", "--dir", "one"))
    succeeded(wanjax("denoise", "--dir", "one", *STEPS))
    rounded = latents("one")
    succeeded(wanjax(*encode, "--dir", "two"))
    succeeded(wanjax("denoise", "--dir", "two", *STEPS))
    floats = latents("two")
    assert 0 < np.linalg.norm(rounded - floats) < 0.1 * np.linalg.norm(floats)
    succeeded(wanjax("denoise", "--dir", "two", *STEPS, "--precision", "int8", "--force"))
    np.testing.assert_array_equal(latents("two"), rounded)
    succeeded(wanjax("decode", "--dir", "two", "--out", "a.mp4"))
    assert read_metadata("a.mp4")["precision"] == "int8"


def test_the_same_video_in_another_precision_is_another_video(model):
    video = ("a red circle", "--model", model, *SMALL, *STEPS, "--out", "a.mp4")
    succeeded(wanjax(*video))
    assert has_line_with_words(refused(*video, "--precision", "int8"), "a.mp4 --force")


def test_a_batch_has_one_precision(model):
    rows = [{"prompt": "a red circle"}, {"prompt": "a blue square", "precision": "int8"}]
    with open("rows.jsonl", "w") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)
    batch = ("batch", "rows.jsonl", "--model", model, *SMALL, *STEPS, "--out", "videos")
    assert has_line_with_words(refused(*batch), "precision int8")
    with open("rows.jsonl", "w") as file:
        file.write(f"{json.dumps(rows[0])}\n")
    succeeded(wanjax(*batch, "--precision", "fp8-weights"))


def test_plan_says_what_is_not_rounded():
    output = succeeded(wanjax("plan", "nano", "--chip", "cpu", "--precision", "int8")).output
    assert has_line_with_words(output, "int8 first projection")
    rounded_plan = json.loads(
        succeeded(wanjax("plan", "nano", "--chip", "cpu", "--precision", "int8", "--json")).stdout
    )
    float_plan = json.loads(succeeded(wanjax("plan", "nano", "--chip", "cpu", "--json")).stdout)
    assert (rounded_plan["precision"], float_plan["precision"], float_plan["full_precision"]) == ("int8", "none", [])
    assert "the first projection" in rounded_plan["full_precision"]
    weights = [plan["stages"]["denoise"]["weights_bytes_per_chip"] for plan in (rounded_plan, float_plan)]
    assert weights[0] < 0.7 * weights[1]
    assert rounded_plan["disk_bytes"] < 0.7 * float_plan["disk_bytes"] + 7e6  # the autoencoder keeps its 7 MB


def test_models_says_what_a_precision_rounds():
    output = succeeded(wanjax("models", "wan2.1-t2v-14b")).output
    assert has_line_with_words(output, "precisions int8-weights fp8")
    assert has_line_with_words(output, "full precision first projection")
    description = json.loads(succeeded(wanjax("models", "wan2.1-i2v-14b-480p", "--json")).stdout)
    assert "the projection of the image" in description["full_precision"]


def test_a_converted_checkpoint_keeps_its_precision(model):
    succeeded(wanjax("convert", model, "converted", "--precision", "int8-weights"))
    assert has_line_with_words(
        succeeded(wanjax("convert", model, "converted", "--precision", "int8-weights")).stderr, "already"
    )
    video = ("a red circle", *SMALL, *STEPS)
    succeeded(wanjax(*video, "--model", "converted", "--out", "a.mp4"))
    succeeded(wanjax(*video, "--model", model, "--precision", "int8-weights", "--out", "b.mp4"))
    assert read_metadata("a.mp4")["precision"] == read_metadata("b.mp4")["precision"] == "int8-weights"
    assert has_line_with_words(refused(*video, "--model", "converted", "--precision", "int8"), "int8 int8-weights")
    succeeded(wanjax("--from", "b.mp4", "--model", "converted", "--out", "c.mp4"))
    assert has_line_with_words(refused("convert", "converted", "back", "--to", "diffusers"), "int8-weights diffusers")
    for wrong in ("fp8", "none"):
        assert has_line_with_words(refused("convert", model, "other", "--precision", wrong), f"{wrong} int8")
    assert has_line_with_words(
        refused("convert", "converted", "--verify", "--precision", "int8"), "--verify --precision"
    )
    assert has_line_with_words(
        refused("convert", "converted", "x", "--to", "diffusers", "--precision", "int8"), "--precision --to"
    )


def test_models_without_a_precision_refuse_one(tmp_path):
    with registered(TOY):
        toy = str(write_checkpoint(tmp_path / "toy", TOY))
        assert has_line_with_words(refused("a", "--model", toy, "--precision", "int8"), "precision int8 toy")
        assert has_line_with_words(refused("convert", toy, "converted", "--precision", "int8"), "precision int8 toy")
    assert has_line_with_words(refused("a", "--model", "nano", "--precision", "int4"), "--precision int4 int8-weights")


def test_training_refuses_a_precision_that_rounds_inputs(model, tmp_path):
    (tmp_path / "data").mkdir()
    assert has_line_with_words(
        refused("train", model, "data", "--out", "out", "--precision", "int8"), "gradient int8-weights"
    )
    assert has_line_with_words(
        refused("plan", "nano", "--chip", "cpu", "--train", "--precision", "int8"), "gradient int8-weights"
    )
