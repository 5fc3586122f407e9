# SPDX-License-Identifier: Apache-2.0
"""Videos from pictures on the command line: outputs, files between stages, and refused inputs."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import wanjax
from tests.support.commands import files, refused, succeeded
from tests.support.commands import wanjax as run
from tests.support.tiny import (
    tiny_checkpoint,
    tiny_control_checkpoint,
    tiny_image_checkpoint,
)
from wanjax.checkpoints.files import load_safetensors, save_safetensors
from wanjax.cli import main
from wanjax.errors import WanjaxError
from wanjax.media import stage_files, videos

pytestmark = pytest.mark.usefixtures("kept_programs")

MODELS = {
    "text": tiny_checkpoint,
    "image": tiny_image_checkpoint,
    "last": lambda folder: tiny_image_checkpoint(folder, last=True),
    "control": tiny_control_checkpoint,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    return {name: str(make(tmp_path_factory.mktemp(name))) for name, make in MODELS.items()}


@pytest.fixture(autouse=True)
def _in_a_folder_with_pictures(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    random = np.random.default_rng(0)
    for name, size in (("wide", (16, 64)), ("other", (16, 64)), ("square", (40, 40))):
        Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(f"../{name}.png")
    videos.write_video("../clip.gif", random.integers(0, 256, (7, 32, 32, 3), dtype=np.uint8), 8)
    videos.write_video("../short.gif", random.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8), 8)
    Path("../text.png").write_text("a red circle")


def embeddings(folder: str = "stage_outputs") -> dict[str, np.ndarray]:
    return load_safetensors(Path(folder) / stage_files.EMBEDDINGS)


def test_three_stages_are_one_run(models):
    """The size has the picture's proportions, 1 to 4, and the model's default area, 32 × 32 pixels."""
    given = ("a", "--model", models["image"], "--image", "../wide.png", "--frames", "5")
    one = succeeded(run(*given, "--dir", "one", "--out", "one/frames"))
    assert "64x16, 5 frames" in one.stderr
    succeeded(run("encode", *given, "--dir", "three"))
    assert {name: x.shape for name, x in embeddings("three").items()} == {
        "prompt_embeds": (1, 24, 16),
        "negative_prompt_embeds": (1, 24, 16),
        "condition": (1, 8, 2, 2, 8),
        "image_embeds": (1, 5, 16),
    }
    succeeded(run("denoise", "--dir", "three"))
    succeeded(run("decode", "--dir", "three", "--out", "three/frames"))
    for name in (stage_files.EMBEDDINGS, stage_files.LATENTS, *(f"frames/{frame}" for frame in files("one/frames"))):
        assert (Path("one") / name).read_bytes() == (Path("three") / name).read_bytes()
    settings = stage_files.load_settings(Path("one"))
    image = str(Path("../wide.png").absolute())
    assert (settings["image"], settings["width"], settings["height"]) == (image, 64, 16)
    assert stage_files.load_settings(Path("three")) == settings


def test_a_given_size_overrides_the_picture_s(models):
    conditions = []
    for resize in ("crop", "pad", "stretch"):
        succeeded(
            run("encode", "a", "--model", models["image"], "--image", "../wide.png", "--size", "32x16",
                "--frames", "5", "--resize", resize)
        )  # fmt: skip
        conditions.append(embeddings()["condition"].copy())
        assert stage_files.load_settings(Path("stage_outputs"))["resize"] == resize
    assert {condition.shape for condition in conditions} == {(1, 8, 2, 2, 4)}
    assert not any(np.array_equal(conditions[i], conditions[i - 1]) for i in range(3))


def test_first_and_last(models):
    given = ("encode", "a", "--model", models["last"], "--image", "../square.png", "--frames", "5")
    succeeded(run(*given, "--last-image", "../wide.png"))
    condition = embeddings()["condition"]
    np.testing.assert_array_equal(condition[0, :4, :, 0, 0], [[1, 0]] * 3 + [[1, 1]])
    assert embeddings()["image_embeds"].shape == (1, 10, 16)


def test_control(models):
    """A clip of 7 frames, fewer than the model's 9, gives 5 frames; a reference precedes them."""
    given = ("--model", models["control"], "--video", "../clip.gif", "--mask", "../square.png")
    references = ("--reference", "../wide.png", "--reference", "../square.png")
    said = succeeded(run("a", *given, *references, "--dir", "stage_outputs", "--out", "a.mp4")).stderr
    assert "32x32, 5 frames" in said
    assert embeddings()["condition"].shape == (1, 72, 2 + 2, 4, 4)
    latents = load_safetensors(Path("stage_outputs") / stage_files.LATENTS)["latents"]
    assert latents.shape == (1, 4, 2, 4, 4)
    noise = np.zeros((1, 4, 2 + 2, 4, 4), np.float32)
    save_safetensors("noise.safetensors", {"noise": noise})
    succeeded(run("denoise", "--noise", "noise.safetensors"))
    save_safetensors("noise.safetensors", {"noise": noise[:, :, 2:]})
    assert "where this video needs [1, 4, 4, 4, 4]" in refused("denoise", "--noise", "noise.safetensors")


def test_the_library_takes_the_size_from_what_was_encoded(models):
    pipe = wanjax.load(models["image"])
    embeddings = pipe.encode("a", image="../wide.png", frames=5)
    latents = pipe.denoise(embeddings, frames=5)
    assert latents.shape == (1, 4, 2, 2, 8)
    video = pipe("a", image=np.asarray(Image.open("../wide.png")), frames=5)
    np.testing.assert_array_equal(video.frames, np.asarray(pipe.decode(latents)))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("text", "--image ../wide.png", "is made for text to video and cannot use an image: it takes a video"),
        ("image", "", "is made for image to video: an image is needed beside the prompt"),
        ("image", "--image ../wide.png --last-image ../wide.png", "cannot use a last image: it takes an image"),
        ("last", "--image ../wide.png", "is made for first and last frame to video: a last image is needed"),
        ("last", "--image ../wide.png --last-image ../wide.png --frames 1", "a video of 1 frame has no last image"),
        ("image", "--image ../clip.gif", "clip.gif is animated, it has 7 frames"),
        ("image", "--image ../text.png", "text.png cannot be read as a picture"),
        ("image", "--image absent.png", "there is no file absent.png"),
        ("image", "--image ../wide.png --size 40x32", "the width 40 is not a multiple of 16: 32 or 48 would do"),
        ("image", "--image ../wide.png --resize twist", "'twist' is not one of 'crop', 'pad', 'stretch'"),
        ("control", "--image ../wide.png", "cannot use an image: it takes a video and a mask and reference images"),
        ("control", "--video ../clip.gif --mask ../short.gif", "the mask has 2 frames and the video 7"),
        ("control", "--mask ../clip.gif", "a mask is given without a video"),
        ("control", "--video ../clip.gif --frames 9", "the video has 7 frames where 9 are asked for"),
        ("control", "--video ../text.png", "text.png cannot be read as a picture"),
        (
            "control",
            "--video ../clip.gif --strength 0.5",
            "is only guided by a video, it begins from noise: leave it out",
        ),
        ("control", "--video ../clip.gif --strength 0.8", "a strength of 0.8 is given and"),  # the default
        ("control", "--strength 0.5", "a strength of 0.5 is given without a video to begin from"),
    ],
)
def test_refused_pictures(models, model, options, message):
    assert message in refused("a", "--model", models[model], *options.split())
    assert files(".") == []


def test_stages_that_do_not_fit(models):
    succeeded(run("encode", "a", "--model", models["image"], "--image", "../square.png", "--frames", "5"))
    assert "the condition has the shape [1, 8, 2, 4, 4] where this video needs [1, 8, 2, 2, 4]" in refused(
        "denoise", "--height", "16"
    )
    assert "needs [1, 8, 3, 4, 4]: encode again, with the size and the frames" in refused("denoise", "--frames", "9")
    assert "condition is given, which text to video has no use for" in refused("denoise", "--model", models["text"])
    assert "there is no" not in refused("denoise", "--model", models["last"])  # the features are of one image, not two
    succeeded(run("encode", "a", "--model", models["text"], "--size", "32x32", "--frames", "5"))
    assert "there is no condition, which image to video needs" in refused("denoise", "--model", models["image"])
    succeeded(run("encode", "a", "--model", models["control"], "--frames", "5"))
    assert "is 1 latent frames shorter than the video" in refused("denoise", "--frames", "9")


def change(file: Path, **entries) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.mark.parametrize(
    ("model", "file", "entries", "message"),
    [
        (
            "image",
            "model_index.json",
            {"_class_name": "WanPipeline"},
            "a WanPipeline whose VAE has 4 channels cannot have",
        ),
        ("text", "model_index.json", {"_class_name": "WanImageToVideoPipeline"}, "configs contradict each other"),
        ("text", "transformer/config.json", {"in_channels": 12}, "cannot have a TransformerConfig with 12"),
        ("image", "transformer/config.json", {"added_kv_proj_dim": 8}, "added_kv_proj_dim 8 where 24 is"),
        ("image", "transformer/config.json", {"image_dim": None}, "added_kv_proj_dim 24 where None is"),
        (
            "image",
            "transformer/config.json",
            {"image_dim": 20},
            "its image encoder makes 16 features where its transformer takes 20",
        ),
        ("image", "image_encoder/config.json", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' where 'gelu' is"),
        ("image", "image_processor/preprocessor_config.json", {"resample": 2}, "resample 2 is not offered: 3 is"),
        (
            "control",
            "transformer/config.json",
            {"vace_layers": [1]},
            "vace_layers [1] where evenly spaced layers from 0",
        ),
        ("control", "transformer/config.json", {"vace_in_channels": None}, "no vace_in_channels, which VACE needs"),
    ],
)
def test_checkpoints_that_contradict_themselves(models, tmp_path, model, file, entries, message):
    damaged = shutil.copytree(models[model], tmp_path / "damaged")
    change(damaged / file, **entries)
    picture = ["--image", "../square.png"] if model == "image" else []
    result = CliRunner().invoke(main, ["a", "--model", str(damaged), *picture], prog_name="wanjax")
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_file_that_lacks_an_entry(models, tmp_path):
    damaged = shutil.copytree(models["image"], tmp_path / "damaged")
    for file, entry in (
        ("image_encoder/config.json", "patch_size"),
        ("image_processor/preprocessor_config.json", "size"),
    ):
        kept = (damaged / file).read_text()
        (damaged / file).write_text(json.dumps({k: v for k, v in json.loads(kept).items() if k != entry}))
        with pytest.raises(WanjaxError, match=f"has no {entry}"):
            wanjax.load(damaged).encode("a", image="../square.png", frames=5)
        (damaged / file).write_text(kept)
