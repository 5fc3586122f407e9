# SPDX-License-Identifier: Apache-2.0
"""The metadata of a video contains everything that shaped the video."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

import wanjax
from tests.support.tiny import tiny_checkpoint, tiny_control_checkpoint
from wanjax.checkpoints.files import content_digest, save_safetensors
from wanjax.checkpoints.lora_source import Lora
from wanjax.layers.tiling import Tiling
from wanjax.media.video import read_metadata
from wanjax.pipelines.video_metadata import source_to_json
from wanjax.schedulers import UniPC

pytestmark = pytest.mark.usefixtures("cached_programs")

SMALL = {"size": (32, 32), "frames": 5, "steps": 1, "guidance_scale": 1.0}
DEFAULT_EXTRAS = {"scheduler": "unipc", "devices": f"1 x {jax.devices()[0].device_kind}", "version": version("wanjax")}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def extras(video) -> dict:
    """Return the metadata of a video without its settings and without the digests of files."""
    settings_entries = {"digests", *wanjax.load("nano").defaults.to_json()}
    return {k: v for k, v in video.settings.items() if k not in settings_entries}


def test_metadata_contains_the_settings_and_digests(model, tmp_path):
    video = wanjax.load(model)("a", seed=3, **SMALL)
    assert extras(video) == DEFAULT_EXTRAS
    assert (video.settings["seed"], video.settings["height"], video.settings["model"]) == (3, 32, str(model))
    assert video.settings["digests"] == {str(model): content_digest(model)}
    assert read_metadata(video.save(tmp_path / "video.mp4")) == video.settings


def test_metadata_contains_the_options_of_loading_and_of_the_call(model, tmp_path):
    """Record the mesh, rules, attention, dtype of weights, scheduler, noise, tiling and batched guidance."""
    mesh = wanjax.make_mesh(dp=2, devices=jax.devices()[:2])
    pipe = wanjax.load(model, mesh=mesh, rules="tp", attention="reference", param_dtype="bfloat16")
    pipe.scheduler = UniPC(order=1)
    noise = np.random.default_rng(0).normal(size=(1, 4, 2, 4, 4)).astype(np.float32)
    video = pipe("a", noise=noise, tiling=Tiling(64, 48), batch_guidance=True, **SMALL | {"guidance_scale": 3.0})
    digest = source_to_json(noise)
    assert digest.startswith("float32 [1, 4, 2, 4, 4], sha256 ")
    assert extras(video) == DEFAULT_EXTRAS | {
        "mesh": "dp=2,sp=1,tp=1",
        "rules": "tp",
        "attention": "reference",
        "param_dtype": "bfloat16",
        "scheduler": "unipc:order=1",
        "noise": digest,
        "tiling": {"size": 64, "stride": 48},
        "batch_guidance": True,
        "devices": DEFAULT_EXTRAS["devices"].replace("1 x", "2 x"),
    }
    assert read_metadata(video.save(tmp_path / "video.gif")) == json.loads(json.dumps(video.settings))


def test_metadata_identifies_pictures_and_clips(tmp_path, monkeypatch):
    """The metadata has the full path of a file, and a digest of a picture in memory."""
    pipe = wanjax.load(tiny_control_checkpoint(tmp_path / "control"))
    picture = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "red.png")
    monkeypatch.chdir(tmp_path)
    clip = np.stack([picture] * 5)
    video = pipe("a", video=clip, mask="red.png", references=["red.png"], **SMALL)
    first_extras = extras(video)
    assert first_extras["video"] == source_to_json(clip) != source_to_json(clip + 1)
    assert first_extras["mask"] == str(tmp_path / "red.png")
    assert first_extras["references"] == [str(tmp_path / "red.png")]
    digest = hashlib.sha256((tmp_path / "red.png").read_bytes()).hexdigest()
    assert video.settings["digests"][str(tmp_path / "red.png")] == digest
    video = pipe("a", video=[Image.fromarray(frame) for frame in clip], references=iter([picture]), **SMALL)
    assert extras(video)["video"] == first_extras["video"]
    assert extras(video)["references"] == [source_to_json(picture)]


def test_metadata_contains_the_full_paths_of_loras(model, tmp_path, monkeypatch):
    q_weights = {"lora_down": np.ones((2, 24), np.float32), "lora_up": np.ones((24, 2), np.float32)}
    path = tmp_path / "style.safetensors"
    save_safetensors(path, {f"diffusion_model.blocks.1.self_attn.q.{role}.weight": x for role, x in q_weights.items()})
    monkeypatch.chdir(tmp_path)
    options = [Path("style.safetensors"), Lora("style.safetensors", 0.5)]
    video = wanjax.load(model, lora=options)("a", **SMALL)
    assert extras(video) == DEFAULT_EXTRAS | {"lora": [str(path), f"{path}:0.5"]}
