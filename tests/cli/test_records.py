# SPDX-License-Identifier: Apache-2.0
"""The metadata of a video made by commands: everything that shaped it, with absolute paths."""

import os
import shutil
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from tests.support.commands import files, succeeded, wanjax
from tests.support.tiny import tiny_checkpoint, tiny_image_checkpoint
from wanjax.checkpoints.files import save_safetensors
from wanjax.media import stage_files
from wanjax.media.metadata import load_settings
from wanjax.media.video import read_metadata

pytestmark = pytest.mark.usefixtures("cached_programs")

SMALL = ("--size", "32x32", "--frames", "1", "--steps", "1")
DEVICE_KIND = jax.devices()[0].device_kind
DEFAULT_ENTRIES = {"scheduler": "unipc", "devices": f"1 x {DEVICE_KIND}", "version": version("wanjax")}


@pytest.fixture(scope="module")
def text_model(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def image_model(tmp_path_factory) -> Path:
    return tiny_image_checkpoint(tmp_path_factory.mktemp("image"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The folder of the command, with a picture, noise and a LoRA."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save("red.png")
    save_safetensors("noise.safetensors", {"noise": random.normal(size=(1, 4, 1, 4, 4)).astype(np.float32)})
    q = {"lora_down": np.ones((2, 24), np.float32), "lora_up": np.ones((24, 2), np.float32)}
    save_safetensors(
        "style.safetensors", {f"diffusion_model.blocks.1.self_attn.q.{role}.weight": x for role, x in q.items()}
    )
    return tmp_path


def extras(metadata: dict, model: Path) -> dict:
    """Return the entries of metadata without the settings and the digests of files that it names."""
    import wanjax

    expected = {"digests", *wanjax.load(model).defaults.to_json()}
    return {name: value for name, value in metadata.items() if name not in expected}


def test_default_settings_are_recorded(text_model):
    succeeded(wanjax("a", "--model", text_model, *SMALL, "--dir", "d", "--out", "a.mp4"))
    metadata = read_metadata("a.mp4")
    assert extras(metadata, text_model) == DEFAULT_ENTRIES
    assert metadata == load_settings(Path("d"))


def test_all_settings_are_recorded(text_model, folder):
    chosen = "--mesh dp=2,sp=2,tp=2 --rules tp --attention reference --scheduler unipc:order=1 --tile --batch-guidance"
    more = ("--lora", "style.safetensors:0.5", "--noise", "noise.safetensors", "--compiler", "fast")
    succeeded(wanjax("a", "--model", text_model, *SMALL, *chosen.split(), *more, "--dir", "d", "--out", "a.mp4"))
    metadata = read_metadata("a.mp4")
    assert extras(metadata, text_model) == DEFAULT_ENTRIES | {
        "mesh": "dp=2,sp=2,tp=2",
        "rules": "tp",
        "devices": f"8 x {DEVICE_KIND}",
        "attention": "reference",
        "scheduler": "unipc:order=1",
        "compiler": "fast",
        "tiling": {"size": 256, "stride": 192},
        "batch_guidance": True,
        "lora": [f"{folder}/style.safetensors:0.5"],
        "noise": f"{folder}/noise.safetensors",
    }
    assert sorted(metadata["digests"]) == sorted(
        [f"{folder}/style.safetensors", f"{folder}/noise.safetensors", str(text_model)]
    )


def test_stages_continue_from_another_folder(image_model, folder, monkeypatch):
    shutil.copytree(image_model, "i2v")
    options = ("a", "--model", "./i2v", "--image", "red.png", "--size", "32x32", "--frames", "1")
    denoising = ("--steps", "1", "--lora", "style.safetensors")
    succeeded(wanjax(*options, *denoising, "--dir", "one", "--out", "one.mp4"))
    succeeded(wanjax("encode", *options, "--dir", "three"))
    (folder / "elsewhere").mkdir()
    os.rename("style.safetensors", "elsewhere/style.safetensors")
    monkeypatch.chdir("elsewhere")
    succeeded(wanjax("denoise", *denoising, "--dir", "../three"))
    succeeded(wanjax("decode", "--dir", "../three", "--out", "three.mp4"))
    metadata, first_record = read_metadata("three.mp4"), read_metadata("../one.mp4")
    assert metadata.pop("lora") == [f"{folder}/elsewhere/style.safetensors"]
    assert first_record.pop("lora") == [f"{folder}/style.safetensors"]
    digests, first_digests = metadata.pop("digests"), first_record.pop("digests")
    assert {*digests} == {f"{folder}/{name}" for name in ("red.png", "elsewhere/style.safetensors", "i2v")}
    assert {*digests.values()} == {*first_digests.values()}
    assert metadata == first_record
    assert (metadata["model"], metadata["image"]) == (f"{folder}/i2v", f"{folder}/red.png")


@pytest.mark.slow  # `test_all_settings_are_recorded` has a quick test with eight devices
def test_stages_may_run_on_other_devices(text_model):
    """The metadata of a video names the devices that denoised it."""
    succeeded(wanjax("encode", "a", "--model", text_model, "--dir", "d"))
    succeeded(wanjax("denoise", *SMALL, "--mesh", "dp=2,sp=2,tp=2", "--scheduler", "unipc:order=1", "--dir", "d"))
    succeeded(wanjax("decode", "--fps", "3", "--dir", "d"))
    metadata = read_metadata("d/output_video.mp4")
    assert (metadata["devices"], metadata["mesh"]) == (f"8 x {DEVICE_KIND}", "dp=2,sp=2,tp=2")
    assert (metadata["scheduler"], metadata["fps"]) == ("unipc:order=1", 3)
    succeeded(wanjax("encode", "a", "--model", text_model, "--size", "32x32", "--frames", "1", "--dir", "d", "--force"))
    settings = load_settings(Path("d"))
    stage_files.save_settings(Path("d"), settings | {"steps": 1, "scheduler": "unipc:order=1"})
    succeeded(wanjax("decode", "--dir", "d", "--out", "b.mp4"))  # the latents are of the same settings
    assert files("d") == [stage_files.CONFIG, "output_video.mp4", stage_files.EMBEDDINGS_FILE, stage_files.LATENTS_FILE]


def test_another_model_has_its_own_scheduler(text_model, folder):
    shutil.copytree(text_model, "other")
    succeeded(wanjax("encode", "a", "--model", text_model, "--dir", "d"))
    settings = load_settings(Path("d"))
    stage_files.save_settings(Path("d"), settings | {"scheduler": "unipc:order=1"})
    succeeded(wanjax("denoise", *SMALL, "--dir", "d", "--model", "other"))
    metadata = load_settings(Path("d"))
    assert (metadata["model"], metadata["scheduler"]) == (f"{folder}/other", "unipc")
