# SPDX-License-Identifier: Apache-2.0
"""`follow` decides whether a video follows the models' authors or diffusers; the metadata says which."""

from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

import wanjax as library
from tests.support.commands import refused, succeeded, wanjax
from tests.support.tiny import (
    tiny_checkpoint,
    tiny_cogvideox_checkpoint,
    tiny_experts_checkpoint,
    tiny_hunyuan_checkpoint,
    tiny_image_checkpoint,
)
from tests.support.words import has_line_with_words, line_with_words
from wanjax.errors import WanjaxError
from wanjax.media.metadata import load_settings
from wanjax.media.video import read_metadata
from wanjax.pipelines.settings import REFERENCE_IMPLEMENTATIONS
from wanjax.pipelines.tracing import trace_programs
from wanjax.schedulers import DDIM, DPM

pytestmark = pytest.mark.usefixtures("cached_programs")

SMALL = ("--size", "32x32", "--frames", "1", "--steps", "3", "--guidance-scale", "1", "--dtype", "float32")
LENGTHS = {"official": 224, "diffusers": 226}


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("wan")))


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    return str(tiny_image_checkpoint(tmp_path_factory.mktemp("image")))


@pytest.fixture(scope="module")
def cogvideox_1_5(tmp_path_factory):
    """A model like CogVideoX-1.5, whose patches hold two latent frames."""
    config = {"patch_size_t": 2, "max_text_seq_length": 226, "use_rotary_positional_embeddings": True}
    return str(tiny_cogvideox_checkpoint(tmp_path_factory.mktemp("newer"), **config))


@pytest.fixture(scope="module")
def hunyuan(tmp_path_factory):
    return str(tiny_hunyuan_checkpoint(tmp_path_factory.mktemp("hunyuan")))


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return str(tiny_experts_checkpoint(tmp_path_factory.mktemp("experts")))


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("solver", [DDIM, DPM])
@pytest.mark.parametrize("spacing", ["trailing", "linspace", "leading"])
def test_the_last_step_leaves_no_noise(solver, spacing):
    """If the network predicts the clean sample 0, all that remains is noise, of the level of the next step."""
    scheduler = solver(spacing=spacing)
    for steps in range(1, 101):
        schedule = scheduler.schedule(steps)
        assert (schedule.alphas[-1], schedule.sigmas[-1]) == (1, 0)
        noise = schedule.sigmas[0]
        for index in range(steps):
            noise_factor, *_, drawn = (
                schedule.coefficients[index] if solver is DPM else (*schedule.coefficients[index], 0.0)
            )
            noise = np.hypot(noise_factor * noise, drawn)
            assert abs(noise - schedule.sigmas[index + 1]) <= 1e-3, (steps, index)


def test_noise_levels_agree_if_steps_divide_a_thousand():
    for solver in (DDIM(), DPM(), DDIM(snr_shift=3.0)):
        for steps in range(1, 101):
            official, diffusers = (solver.schedule(steps, follow=name) for name in REFERENCE_IMPLEMENTATIONS)
            are_equal = all(np.array_equal(*pair) for pair in zip(official, diffusers, strict=True))
            assert are_equal == (1000 % steps == 0), steps


def test_follow_decides_the_length_of_texts_and_the_last_step(cogvideox_1_5):
    pipe = library.load(cogvideox_1_5, dtype="float32")
    levels = []
    for follow, length in LENGTHS.items():
        settings = pipe.settings(prompt="a", steps=24, follow=follow)
        assert pipe.encode("a", follow=follow).prompt_embeds.shape[1] == length
        encoder = trace_programs(pipe, settings).programs[0]
        assert (2, length) in [x.shape for x in jax.tree.leaves(encoder.traced_program.shapes)]
        levels.append(pipe.model.spec.schedule(settings).sigmas[-1])
    assert levels[0] == 0 < levels[1]
    assert pipe.settings().follow == "official"


def test_follow_decides_which_part_of_a_picture_is_encoded(image):
    """The authors encode a whole picture that is not square; diffusers encodes only its middle."""
    pipe = library.load(image, dtype="float32")
    wide = np.full((32, 96, 3), 40, np.uint8)
    wide[:, :24] = 250
    features = {
        follow: np.asarray(pipe.encode("a", image=wide, frames=1, size=(32, 32), follow=follow).image_embeds)
        for follow in REFERENCE_IMPLEMENTATIONS
    }
    middle = np.asarray(
        pipe.encode("a", image=wide[:, 32:64], frames=1, size=(32, 32), follow="diffusers").image_embeds
    )
    np.testing.assert_allclose(features["diffusers"], middle, atol=1e-4)
    assert np.abs(features["official"] - middle).max() > 1e-2


def test_noise_levels_follow_unless_they_are_requested(wan):
    pipe = library.load(wan)
    assert pipe.settings(follow="diffusers").sigmas == "diffusers"
    assert pipe.settings(follow="diffusers", sigmas="official").sigmas == "official"
    assert (pipe.settings(sigmas="diffusers").follow, pipe.settings().sigmas) == ("official", "official")


def test_comfy_sigmas_are_offered_only_for_models_of_velocities(hunyuan, cogvideox_1_5):
    pipe = library.load(hunyuan)
    assert (pipe.settings().sigmas, pipe.settings(sigmas="comfy").sigmas) == ("official", "comfy")
    with pytest.raises(WanjaxError, match=line_with_words("diffusers sigmas official comfy")):
        pipe.settings(sigmas="diffusers")
    with pytest.raises(WanjaxError, match="sigmas"):
        library.load(cogvideox_1_5).settings(sigmas="comfy")


def metadata_of(*arguments: str) -> dict:
    succeeded(wanjax(*arguments, "--out", "made.mp4", "--force"))
    return read_metadata("made.mp4")


def test_a_video_is_reproduced_with_its_follow_unless_another_is_typed(wan):
    metadata = metadata_of("a", "--model", wan, *SMALL, "--follow", "diffusers")
    assert (metadata["follow"], metadata["sigmas"]) == ("diffusers", "diffusers")
    assert metadata_of("--from", "made.mp4") == metadata
    changed = metadata_of("--from", "made.mp4", "--follow", "official")
    assert (changed["follow"], changed["sigmas"]) == ("official", "official")


def test_settings_of_comfy_reach_the_steps(experts):
    pipe = library.load(experts, dtype="float32", scheduler="euler")
    conditioning, options = (
        pipe.encode("a"),
        {"size": (32, 32), "frames": 1, "steps": 4, "seed": 1, "guidance_scale": 1.0},
    )
    latents = {
        name: np.asarray(pipe.denoise(conditioning, flow_shift=5.0, **options, **settings))
        for name, settings in {
            "official": {},
            "comfy": {"sigmas": "comfy"},
            "one step": {"sigmas": "comfy", "boundary_step": 1},
            "boundary step 2": {"sigmas": "comfy", "boundary_step": 2},
        }.items()
    }
    np.testing.assert_allclose(latents["comfy"], latents["official"], atol=1e-5)  # four steps divide a thousand
    np.testing.assert_array_equal(latents["boundary step 2"], latents["comfy"])  # levels 1, 0.9375, 0.833, 0.625
    assert np.abs(latents["one step"] - latents["comfy"]).max() > 1e-2


@pytest.mark.slow  # `test_a_video_is_reproduced_with_its_follow_unless_another_is_typed` is a quick test
def test_settings_of_comfy_are_stored_and_reproduced(experts):
    options = ("a", "--model", experts, *SMALL, "--sigmas", "comfy", "--boundary-step", "2")
    metadata = metadata_of(*options)
    assert (metadata["sigmas"], metadata["boundary_step"]) == ("comfy", 2)
    assert metadata_of("--from", "made.mp4") == metadata
    assert metadata_of("--from", "made.mp4", "--boundary", "0.9")["boundary_step"] == 0


def test_later_stages_follow_as_the_encoding_does(cogvideox_1_5):
    """Each stage uses the choice of the previous stage. Another choice for existing conditioning is refused."""
    succeeded(wanjax("encode", "a", "--model", cogvideox_1_5, *SMALL[:4], "--follow", "diffusers", "--dir", "d"))
    for stage in ("denoise", "decode"):
        succeeded(wanjax(stage, "--dir", "d", *(SMALL[4:] if stage == "denoise" else ())))
    assert read_metadata("d/output_video.mp4")["follow"] == "diffusers"
    assert has_line_with_words(refused("denoise", "--dir", "d", "--force", "--follow", "official"), "226 224")


@pytest.mark.slow  # the test above is the quick one, of a text instead of a picture
def test_later_stages_follow_as_the_encoding_of_a_picture_does(image):
    Image.fromarray(np.full((16, 48, 3), 90, np.uint8)).save("wide.png")
    succeeded(wanjax("encode", "a", "--model", image, "--image", "wide.png", *SMALL[:4], "--dir", "e"))
    assert has_line_with_words(refused("denoise", "--dir", "e", "--follow", "diffusers"), "official --follow diffusers")
    succeeded(wanjax("denoise", "--dir", "e", "--sigmas", "diffusers", *SMALL[4:]))
    settings = load_settings(Path("e"))
    assert (settings["follow"], settings["sigmas"]) == ("official", "diffusers")
