# SPDX-License-Identifier: Apache-2.0
"""Videos from pictures on the command line: results, files between stages, and refused inputs."""

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
from tests.support.words import has_line_with_words, line_with_words
from wanjax.checkpoints.files import load_safetensors, save_safetensors
from wanjax.cli import main
from wanjax.errors import WanjaxError, WanjaxWarning
from wanjax.media import stage_files
from wanjax.media import video as video_files
from wanjax.media.metadata import load_settings
from wanjax.registry import describe

pytestmark = pytest.mark.usefixtures("cached_programs")

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
    (tmp_path / "working").mkdir()
    monkeypatch.chdir(tmp_path / "working")
    random = np.random.default_rng(0)
    for name, size in (("wide", (16, 64)), ("other", (16, 64)), ("square", (40, 40))):
        Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(f"../{name}.png")
    video_files.write_video("../clip.gif", random.integers(0, 256, (7, 32, 32, 3), dtype=np.uint8), 8)
    video_files.write_video("../short.gif", random.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8), 8)
    Path("../text.png").write_text("a red circle")


def embeddings(folder: str = "stage_outputs") -> dict[str, np.ndarray]:
    return load_safetensors(Path(folder) / stage_files.EMBEDDINGS_FILE)


def test_three_stage_commands_give_the_files_of_one_generate(models):
    """The size has the picture's proportions, 1 to 4, and the model's default area, 32 × 32 pixels."""
    options = ("a", "--model", models["image"], "--image", "../wide.png", "--frames", "5")
    result = succeeded(run(*options, "--dir", "one", "--out", "one/frames"))
    assert "64x16, 5 frames" in result.stderr
    succeeded(run("encode", *options, "--dir", "three"))
    assert {name: x.shape for name, x in embeddings("three").items()} == {
        "prompt_embeds": (1, 24, 16),
        "negative_prompt_embeds": (1, 24, 16),
        "condition": (1, 8, 2, 2, 8),
        "image_embeds": (1, 5, 16),
    }
    succeeded(run("denoise", "--dir", "three"))
    succeeded(run("decode", "--dir", "three", "--out", "three/frames"))
    for name in (
        stage_files.EMBEDDINGS_FILE,
        stage_files.LATENTS_FILE,
        *(f"frames/{frame}" for frame in files("one/frames")),
    ):
        assert (Path("one") / name).read_bytes() == (Path("three") / name).read_bytes()
    settings = load_settings(Path("one"))
    image = str(Path("../wide.png").absolute())
    assert (settings["image"], settings["width"], settings["height"]) == (image, 64, 16)
    assert load_settings(Path("three")) == settings


def test_a_requested_size_overrides_the_picture_s(models):
    conditions = []
    for resize in ("crop", "pad", "stretch"):
        succeeded(
            run("encode", "a", "--model", models["image"], "--image", "../wide.png", "--size", "32x16",
                "--frames", "5", "--resize", resize, "--force")
        )  # fmt: skip
        conditions.append(embeddings()["condition"].copy())
        assert load_settings(Path("stage_outputs"))["resize"] == resize
    assert {condition.shape for condition in conditions} == {(1, 8, 2, 2, 4)}
    assert not any(np.array_equal(conditions[i], conditions[i - 1]) for i in range(3))


def test_a_size_that_crops_much_of_a_picture_gives_a_warning():
    """Sizes of nano are multiples of 16 pixels, so that a 2:1 picture becomes 80x32."""
    pipe = wanjax.load("nano")
    picture = np.zeros((32, 64, 3), np.uint8)
    with pytest.warns(WanjaxWarning, match=line_with_words("80x32 20% of the 64x32 picture is cut off")):
        assert pipe.prepare(image=picture)[1].size == (32, 80)
    for keywords in ({"size": "64x32"}, {"resize": "pad"}, {"size": "80x32"}):  # a requested size is a choice
        pipe.prepare(image=picture, **keywords)


def test_resize_without_a_picture_gives_a_warning():
    with pytest.warns(WanjaxWarning, match="resize pad has no effect without a picture"):
        wanjax.load("nano").prepare(prompt="a red circle", resize="pad")


def test_a_clip_with_windows_is_noted():
    """Later windows continue the video, and do not follow the clip."""
    with pytest.warns(WanjaxWarning, match=line_with_words("only first 3 windows clip continue")):
        wanjax.load("nano").prepare(prompt="a", video="../clip.gif", windows=3)


def test_a_named_size_has_the_picture_s_proportions(models):
    pipe = wanjax.load(models["image"])
    assert pipe.sizes == {"32p": (32, 32), "square": (32, 32)}
    sizes_by_name = {size: pipe.prepare(image="../wide.png", size=size)[1].size for size in pipe.sizes}
    assert sizes_by_name == {"32p": (16, 64), "square": (32, 32)}
    assert pipe.settings(size="square").size == (32, 32)
    for size in ("720p", "portrait", "Square"):
        with pytest.raises(WanjaxError, match=line_with_words(f"'{size}' 32p, square")):
            pipe.settings(size=size)


def test_a_first_and_a_last_picture_are_encoded(models):
    options = ("encode", "a", "--model", models["last"], "--image", "../square.png", "--frames", "5")
    succeeded(run(*options, "--last-image", "../wide.png"))
    condition = embeddings()["condition"]
    np.testing.assert_array_equal(condition[0, :4, :, 0, 0], [[1, 0]] * 3 + [[1, 1]])
    assert embeddings()["image_embeds"].shape == (1, 10, 16)


def test_a_control_clip_and_references_are_encoded(models):
    """A clip of 7 frames, fewer than the model's 9, gives 5 frames. Reference pictures precede these frames."""
    options = ("--model", models["control"], "--video", "../clip.gif", "--mask", "../square.png", "--steps", "1")
    references = ("--reference", "../wide.png", "--reference", "../square.png")
    output = succeeded(run("a", *options, *references, "--dir", "stage_outputs", "--out", "a.mp4")).stderr
    assert "32x32, 5 frames" in output
    assert embeddings()["condition"].shape == (1, 72, 2 + 2, 4, 4)
    latents = load_safetensors(Path("stage_outputs") / stage_files.LATENTS_FILE)["latents"]
    assert latents.shape == (1, 4, 2, 4, 4)
    noise = np.zeros((1, 4, 2 + 2, 4, 4), np.float32)
    save_safetensors("noise.safetensors", {"noise": noise})
    succeeded(run("denoise", "--noise", "noise.safetensors", "--force"))
    save_safetensors("noise.safetensors", {"noise": noise[:, :, 2:]})
    assert has_line_with_words(refused("denoise", "--noise", "noise.safetensors", "--force"), "video [1, 4, 4, 4, 4]")


def test_the_library_takes_the_size_from_the_conditioning(models):
    pipe = wanjax.load(models["image"])
    embeddings = pipe.encode("a", image="../wide.png", frames=5)
    latents = pipe.denoise(embeddings, frames=5)
    assert latents.shape == (1, 4, 2, 2, 8)
    video = pipe("a", image=np.asarray(Image.open("../wide.png")), frames=5)
    np.testing.assert_array_equal(video.frames, np.asarray(pipe.decode(latents)))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("text", "--image ../wide.png", "text video image"),
        ("image", "", "image video prompt"),
        ("image", "--image ../wide.png --last-image ../wide.png", "last image"),
        ("last", "--image ../wide.png", "last frame video image"),
        ("last", "--image ../wide.png --last-image ../wide.png --frames 1", "video 1 frame last image"),
        ("image", "--image ../clip.gif", "clip.gif animated"),
        ("image", "--image ../text.png", "text.png picture"),
        ("image", "--image absent.png", "absent.png"),
        ("image", "--image ../wide.png --size 40x32", "width 40 16 32 48"),
        ("image", "--image ../wide.png --resize twist", "--resize 'twist' crop pad stretch"),
        ("control", "--last-image ../wide.png", "last image without a first"),
        ("control", "--video ../clip.gif --mask ../short.gif", "mask 2 frames video 7"),
        ("control", "--mask ../clip.gif", "mask video"),
        ("control", "--video ../clip.gif --frames 9", "video 7 frames 9"),
        ("control", "--video ../text.png", "text.png picture"),
        (
            "control",
            "--video ../clip.gif --strength 0.5",
            "strength 0.5 noise video control signal",
        ),
        ("control", "--video ../clip.gif --strength 0.8", "strength 0.8"),  # the default
        ("control", "--strength 0.5", "strength 0.5 video"),
    ],
)
def test_unusable_pictures_are_refused(models, model, options, message):
    assert has_line_with_words(refused("a", "--model", models[model], *options.split()), message)
    assert files(".") == []


ENCODE_OPTIONS = {  # of each model
    "image": ("--image", "../square.png", "--frames", "5"),
    "text": ("--size", "32x32", "--frames", "5"),
    "control": ("--frames", "5"),
}


@pytest.mark.parametrize(
    ("encoding", "options", "denoising", "words"),
    [
        ("image", ("--height", "16"), None, "32x32 5 frames 32x16"),
        ("image", ("--frames", "9"), None, "5 frames 9 encode"),
        ("image", (), "text", "condition text video"),
        ("image", (), "last", "image_embeds [1, 5, 16] [1, 10, 16]"),  # of one picture, not of two
        ("text", (), "image", "condition image video"),
        ("control", ("--frames", "9"), None, "5 frames 9 encode"),
        ("control", (), "text", "condition text video"),
    ],
)
def test_settings_that_do_not_fit_the_conditioning_are_refused(models, encoding, options, denoising, words):
    succeeded(run("encode", "a", "--model", models[encoding], *ENCODE_OPTIONS[encoding]))
    model = ("--model", models[denoising]) if denoising else ()
    assert has_line_with_words(refused("denoise", *options, *model), words)


def change_json(file: Path, **entries) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.mark.parametrize(
    ("model", "file", "entries", "message"),
    [
        (
            "image",
            "model_index.json",
            {"_class_name": "WanPipeline"},
            "WanPipeline VAE 4 channels",
        ),
        ("text", "model_index.json", {"_class_name": "WanImageToVideoPipeline"}, "configs contradict each other"),
        ("text", "transformer/config.json", {"in_channels": 12}, "TransformerConfig 12"),
        ("image", "transformer/config.json", {"added_kv_proj_dim": 8}, "added_kv_proj_dim 8 not supported: use 24"),
        ("image", "transformer/config.json", {"image_dim": None}, "added_kv_proj_dim 24 not supported: use None"),
        (
            "image",
            "transformer/config.json",
            {"image_dim": 20},
            "image 16 transformer 20",
        ),
        (
            "image",
            "image_encoder/config.json",
            {"hidden_act": "quick_gelu"},
            "hidden_act 'quick_gelu' not supported: use 'gelu'",
        ),
        ("image", "image_processor/preprocessor_config.json", {"resample": 2}, "resample 2 3"),
        (
            "control",
            "transformer/config.json",
            {"vace_layers": [1]},
            "vace_layers [1] layers 0",
        ),
        ("control", "transformer/config.json", {"vace_in_channels": None}, "vace_in_channels VACE"),
    ],
)
def test_contradictory_configs_are_refused(models, tmp_path, model, file, entries, message):
    damaged = shutil.copytree(models[model], tmp_path / "damaged")
    change_json(damaged / file, **entries)
    picture = ["--image", "../square.png"] if model == "image" else []
    result = CliRunner().invoke(main, ["a", "--model", str(damaged), *picture], prog_name="wanjax")
    assert result.exit_code == 2
    assert has_line_with_words(result.stderr, message)


@pytest.mark.parametrize(
    ("file", "entry"),
    [("image_encoder/config.json", "patch_size"), ("image_processor/preprocessor_config.json", "size")],
)
def test_a_config_without_a_needed_entry_is_refused(models, tmp_path, file, entry):
    damaged = Path(shutil.copytree(models["image"], tmp_path / "damaged"))
    entries = json.loads((damaged / file).read_text())
    (damaged / file).write_text(json.dumps({name: value for name, value in entries.items() if name != entry}))
    with pytest.raises(WanjaxError, match=line_with_words(f"no {entry}")):
        wanjax.load(damaged).encode("a", image="../square.png", frames=5)


def test_the_inputs_of_every_model_are_listed():
    """The listed inputs are those that the checks accept."""
    named = ("wan2.2-i2v-a14b", "wan2.1-flf2v-14b", "wan2.1-t2v-1.3b-causal", "wan2.1-vace-14b", "wan2.1-t2v-14b")
    entries = {name: describe(name)["tasks"] for name in named}
    assert entries["wan2.2-i2v-a14b"] == ["a first picture", "a first and a last picture", "long videos, in windows"]
    assert entries["wan2.1-flf2v-14b"] == ["a first and a last picture"]
    assert entries["wan2.1-t2v-1.3b-causal"] == ["text", "a stream, chunk by chunk"]
    assert entries["wan2.1-vace-14b"][1:] == [
        *("a first picture", "a first and a last picture", "a control clip", "a mask", "reference pictures"),
        "long videos, in windows",
    ]
    assert entries["wan2.1-t2v-14b"] == ["text", "a clip"]
    output = succeeded(run("models", "wan2.2-i2v-a14b")).output
    assert "a first and a last picture" in output
    assert "a first picture · a first and a last picture · long videos, in windows" in " ".join(
        succeeded(run("models")).output.split()
    )


def test_a_step_cache_must_fit_the_steps_after_those_that_a_clip_skips():
    """A strength of 0.3 leaves 2 of 8 steps."""
    pipe, clip = wanjax.load("nano"), np.zeros((5, 32, 32, 3), np.uint8)
    assert pipe.prepare(prompt="a", steps=8, cache="magcache")[1].cache.name == "magcache"
    with pytest.raises(WanjaxError, match=line_with_words("reuses all steps after 1 of 2 least 15 cache none")):
        pipe.prepare(prompt="a", video=clip, strength=0.3, steps=8, cache="magcache")
    with pytest.warns(WanjaxWarning, match="cache auto has nothing to reuse"):
        assert pipe.prepare(prompt="a", video=clip, strength=0.3, steps=8, cache="auto")[1].cache.name == "none"
