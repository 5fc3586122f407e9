# SPDX-License-Identifier: Apache-2.0
"""Stage files of wanjax or the scripts before it are read, and refused if they do not fit."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.support.harm import unchecked
from tests.support.media import SETTINGS, names_in
from tests.support.words import line_with_words
from wanjax.checkpoints.files import SafetensorsFile, save_safetensors
from wanjax.errors import WanjaxError
from wanjax.media import stage_files
from wanjax.media.metadata import load_settings


def prompt_tensors(tokens: int = 6, dtype=np.float32) -> dict[str, np.ndarray]:
    values = np.random.default_rng(0).normal(size=(2, 1, tokens, 8)).astype(dtype)
    return dict(zip(("prompt_embeds", "negative_prompt_embeds"), values, strict=True))


PICTURE_TENSORS = {"condition": np.ones((1, 8, 3, 2, 4), np.float32), "image_embeds": np.ones((1, 5, 6), np.float32)}
MASK_TENSORS = {"mask": np.array([[True, False]]), "lengths": np.array([[3, 4]], np.int32)}


@pytest.mark.parametrize("picture_tensors", [{}, {"condition": PICTURE_TENSORS["condition"]}, PICTURE_TENSORS], ids=len)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_stage_files_return_what_was_written(tmp_path, dtype, picture_tensors):
    stage_files.save_settings(tmp_path, SETTINGS)
    settings = load_settings(tmp_path)
    assert settings == SETTINGS
    written = (
        prompt_tensors(dtype=dtype) | {name: x.astype(dtype) for name, x in picture_tensors.items()} | MASK_TENSORS
    )
    stage_files.save_conditioning(tmp_path, written, settings)
    encoded = stage_files.load_conditioning(tmp_path, settings)
    assert encoded.keys() == written.keys()
    for name, x in written.items():
        assert encoded[name].dtype == x.dtype
        np.testing.assert_array_equal(encoded[name], x)
    latents = jnp.arange(48.0).reshape(1, 4, 3, 2, 2).astype(dtype)
    stage_files.save_latents(tmp_path, latents, settings)
    read = stage_files.load_latents(tmp_path, settings)
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, latents)
    assert SafetensorsFile(tmp_path / stage_files.LATENTS_FILE).specs["latents"].shape == (1, 4, 3, 2, 2)
    assert names_in(tmp_path) == [stage_files.CONFIG, stage_files.EMBEDDINGS_FILE, stage_files.LATENTS_FILE]


def test_files_of_a_stage_may_have_other_settings_that_do_not_affect_it(tmp_path):
    stage_files.save_conditioning(tmp_path, prompt_tensors(), SETTINGS)
    stage_files.save_latents(tmp_path, np.zeros((1, 4, 3, 2, 2), np.float32), SETTINGS)
    stage_files.load_conditioning(tmp_path, SETTINGS | {"seed": 8})  # affects only the latents
    stage_files.load_latents(tmp_path, SETTINGS | {"fps": 8})  # affects neither
    stage_files.load_conditioning(tmp_path, SETTINGS | {"height": 8})  # affects only encoded pictures; there are none


def test_files_of_earlier_scripts_are_read(tmp_path):
    """Tensors are bfloat16 stored as float32 (`dtype_info`); the settings have other names and are not in the files."""
    old = {"prompt": "a cat", "model_id": "Wan-AI/Wan2.1-T2V-14B-Diffusers", "num_inference_steps": 50, "frames": 81}
    (tmp_path / stage_files.CONFIG).write_text(json.dumps(old))
    settings = load_settings(tmp_path)
    assert settings == {"prompt": "a cat", "model": "Wan-AI/Wan2.1-T2V-14B-Diffusers", "steps": 50, "frames": 81}
    rounded = prompt_tensors(dtype=ml_dtypes.bfloat16)
    tensors = {name: x.astype(np.float32) for name, x in rounded.items()}
    info = {"dtype_info": json.dumps(dict.fromkeys(tensors, "bfloat16"))}
    save_safetensors(tmp_path / stage_files.EMBEDDINGS_FILE, tensors, info)
    for name, x in stage_files.load_conditioning(tmp_path, settings).items():
        assert x.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(x, rounded[name])
    latents = np.ones((1, 4, 3, 2, 2), np.float32)
    save_safetensors(
        tmp_path / stage_files.LATENTS_FILE, {"latents": latents}, {"dtype_info": '{"latents": "torch.float32"}'}
    )
    assert stage_files.load_latents(tmp_path, settings).dtype == np.float32


def test_noise_is_read_from_a_file(tmp_path):
    noise = np.random.default_rng(0).normal(size=(1, 4, 3, 2, 2)).astype(np.float32)
    save_safetensors(tmp_path / "noise.safetensors", {"noise": noise})
    np.testing.assert_array_equal(stage_files.load_noise(tmp_path / "noise.safetensors")["noise"], noise)


LATENTS = np.zeros((1, 4, 3, 2, 2), np.float32)
PICTURE_SETTINGS = SETTINGS | {"image": "a.png", "frames": 9}


def write_file(file, tensors=None, metadata=None, *, text=None):
    """Return a function that writes a stage's file of tensors or text."""

    def write(folder):
        with unchecked():
            if text is None:
                save_safetensors(folder / file, tensors or {}, metadata or {})
            else:
                (folder / file).write_text(text)

    return write


def write_conditioning(tensors, settings):
    return lambda folder: stage_files.save_conditioning(folder, tensors, settings)


def load_conditioning(**settings):
    return lambda folder: stage_files.load_conditioning(folder, settings)


def load_latents(**settings):
    return lambda folder: stage_files.load_latents(folder, settings)


def load_noise(folder):
    return stage_files.load_noise(folder / "noise.safetensors")


def leave_empty(folder):
    """Leave the folder empty."""


EMBEDDINGS = stage_files.EMBEDDINGS_FILE
UNSUITABLE = [  # what writes the folder, what reads it, and words of the message
    (leave_empty, load_settings, "generation_config.json encode"),
    (write_file(stage_files.CONFIG, text="{"), load_settings, "read Expecting"),
    (write_file(stage_files.CONFIG, text="[1]"), load_settings, "JSON"),
    (leave_empty, load_conditioning(), "encode PROMPT --dir"),
    (leave_empty, load_latents(), "denoise --dir"),
    (write_file(EMBEDDINGS, {"x": np.zeros((2, 3))}), load_conditioning(), "'x' float64 [2, 3] floats"),
    (write_file(EMBEDDINGS, {"x": np.zeros(())}), load_conditioning(), "'x' float64 [] floats"),
    (write_file(EMBEDDINGS, {"x": np.zeros((1, 3))}, {"settings": "{"}), load_conditioning(), "'settings' metadata"),
    (
        write_file(EMBEDDINGS, {"x": np.zeros((1, 3))}, {"dtype_info": "3"}),
        load_conditioning(),
        "'dtype_info' metadata",
    ),
    *(
        (write_file(stage_files.LATENTS_FILE, {"latents": latents}), load_latents(), words)
        for latents, words in (
            (LATENTS.astype(np.int32), "'latents' int32 floats 5 axes"),
            (LATENTS[..., 0], "float32 [1, 4, 3, 2] floats 5 axes"),
            (LATENTS * np.nan, "latents finite"),
        )
    ),
    (write_file("noise.safetensors", {"latents": LATENTS}), load_noise, "tensor 'noise' latents save_file"),
    (
        write_file("noise.safetensors", text="hello"),
        load_noise,
        "noise.safetensors safetensors 'noise' floats save_file",
    ),
    (write_file("noise.safetensors", {"noise": LATENTS.astype(np.int32)}), load_noise, "'noise' int32 floats"),
    (write_file("noise.safetensors", {"noise": LATENTS * np.nan}), load_noise, "'noise' noise.safetensors finite"),
    (
        write_file("noise.safetensors", {f"block.{i}": np.zeros(1) for i in range(100)}),
        load_noise,
        "block.0 and 92 more save_file",
    ),
    # stages of different videos
    (
        write_conditioning(prompt_tensors(), SETTINGS),
        load_conditioning(**SETTINGS | {"prompt": "a blue square" * 20}),
        "prompt 'a blue squarea",
    ),
    (
        lambda folder: stage_files.save_latents(folder, LATENTS, SETTINGS),
        load_latents(**SETTINGS | {"seed": 8}),
        "seed 7 8",
    ),
    (  # no file names
        write_conditioning(prompt_tensors() | PICTURE_TENSORS, SETTINGS),
        load_conditioning(**SETTINGS | {"height": 8}),
        "height 32 8",
    ),
    (
        write_conditioning(prompt_tensors() | PICTURE_TENSORS, PICTURE_SETTINGS),
        load_conditioning(**PICTURE_SETTINGS | {"image": "b.png"}),
        "image 'b.png'",
    ),
    (
        write_conditioning(prompt_tensors() | PICTURE_TENSORS, PICTURE_SETTINGS),
        load_conditioning(**PICTURE_SETTINGS | {"frames": 5}),
        "frames 5",
    ),
]


@pytest.mark.parametrize(("write", "read", "words"), UNSUITABLE, ids=[words for *_, words in UNSUITABLE])
def test_files_that_do_not_fit_are_refused(tmp_path, write, read, words):
    write(tmp_path)
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        read(tmp_path)


def test_a_folder_that_is_no_video_is_not_to_be_overwritten(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(WanjaxError) as caught:
            load_settings(folder)
        assert "or give the folder of another video" in str(caught.value)
        assert "--force" not in str(caught.value)
