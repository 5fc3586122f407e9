# SPDX-License-Identifier: Apache-2.0
"""`follow`: the choices of the models' authors or of diffusers, in all that shapes a video, and in its metadata."""

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
from tests.support.words import has_line_with, line_with_words
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
def newer(tmp_path_factory):
    """A model like CogVideoX-1.5, whose patches hold two latent frames."""
    like = {"patch_size_t": 2, "max_text_seq_length": 226, "use_rotary_positional_embeddings": True}
    return str(tiny_cogvideox_checkpoint(tmp_path_factory.mktemp("newer"), **like))


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
def test_no_noise_is_left(solver, spacing):
    """A network that knows the clean sample, which is 0: what is left is noise, and each level is the next step's."""
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
            ours, theirs = (solver.schedule(steps, follow=way) for way in REFERENCE_IMPLEMENTATIONS)
            same = all(np.array_equal(*pair) for pair in zip(ours, theirs, strict=True))
            assert same == (1000 % steps == 0), steps


def test_text_and_last_step(newer):
    pipe = library.load(newer, dtype="float32")
    levels = []
    for way, length in LENGTHS.items():
        settings = pipe.settings(prompt="a", steps=24, follow=way)
        assert pipe.encode("a", follow=way).prompt_embeds.shape[1] == length
        encoder = trace_programs(pipe, settings).programs[0]
        assert (2, length) in [x.shape for x in jax.tree.leaves(encoder.traced_program.shapes)]
        levels.append(pipe.model.spec.schedule(settings).sigmas[-1])
    assert levels[0] == 0 < levels[1]
    assert pipe.settings().follow == "official"


def test_the_view_of_a_picture(image):
    """A picture that is not square is seen whole, or in its middle; a square one is almost the same."""
    pipe = library.load(image, dtype="float32")
    wide = np.full((32, 96, 3), 40, np.uint8)
    wide[:, :24] = 250
    seen = {
        way: np.asarray(pipe.encode("a", image=wide, frames=1, size=(32, 32), follow=way).image_embeds)
        for way in REFERENCE_IMPLEMENTATIONS
    }
    middle = np.asarray(
        pipe.encode("a", image=wide[:, 32:64], frames=1, size=(32, 32), follow="diffusers").image_embeds
    )
    np.testing.assert_allclose(seen["diffusers"], middle, atol=1e-4)
    assert np.abs(seen["official"] - middle).max() > 1e-2


def test_noise_levels_follow_unless_they_are_requested(wan):
    pipe = library.load(wan)
    assert pipe.settings(follow="diffusers").sigmas == "diffusers"
    assert pipe.settings(follow="diffusers", sigmas="official").sigmas == "official"
    assert (pipe.settings(sigmas="diffusers").follow, pipe.settings().sigmas) == ("official", "official")


def test_models_without_two_references_have_the_levels_of_comfy_too(hunyuan, newer):
    pipe = library.load(hunyuan)
    assert (pipe.settings().sigmas, pipe.settings(sigmas="comfy").sigmas) == ("official", "comfy")
    with pytest.raises(WanjaxError, match=line_with_words("diffusers sigmas official comfy")):
        pipe.settings(sigmas="diffusers")
    with pytest.raises(WanjaxError, match="sigmas"):
        library.load(newer).settings(sigmas="comfy")


def metadata_of(*arguments: str) -> dict:
    succeeded(wanjax(*arguments, "--out", "made.mp4", "--force"))
    return read_metadata("made.mp4")


def test_a_video_is_reproduced_with_its_follow_unless_another_is_typed(wan):
    then = metadata_of("a", "--model", wan, *SMALL, "--follow", "diffusers")
    assert (then["follow"], then["sigmas"]) == ("diffusers", "diffusers")
    assert metadata_of("--from", "made.mp4") == then
    changed = metadata_of("--from", "made.mp4", "--follow", "official")
    assert (changed["follow"], changed["sigmas"]) == ("official", "official")


def test_settings_of_comfy_reach_the_steps(experts):
    pipe = library.load(experts, dtype="float32", scheduler="euler")
    encoded, options = pipe.encode("a"), {"size": (32, 32), "frames": 1, "steps": 4, "seed": 1, "guidance_scale": 1.0}
    latents = {
        name: np.asarray(pipe.denoise(encoded, flow_shift=5.0, **options, **settings))
        for name, settings in {
            "official": {},
            "comfy": {"sigmas": "comfy"},
            "one step": {"sigmas": "comfy", "boundary_step": 1},
            "as by the boundary": {"sigmas": "comfy", "boundary_step": 2},
        }.items()
    }
    np.testing.assert_allclose(latents["comfy"], latents["official"], atol=1e-5)  # four steps divide a thousand
    np.testing.assert_array_equal(latents["as by the boundary"], latents["comfy"])  # levels 1, 0.9375, 0.833, 0.625
    assert np.abs(latents["one step"] - latents["comfy"]).max() > 1e-2


def test_settings_of_comfy_are_stored_and_reproduced(experts):
    options = ("a", "--model", experts, *SMALL, "--sigmas", "comfy", "--boundary-step", "2")
    then = metadata_of(*options)
    assert (then["sigmas"], then["boundary_step"]) == ("comfy", 2)
    assert metadata_of("--from", "made.mp4") == then
    assert metadata_of("--from", "made.mp4", "--boundary", "0.9")["boundary_step"] == 0


def test_stages(newer, image):
    """Each stage uses the choice of the previous one; conditioning does not change to another."""
    succeeded(wanjax("encode", "a", "--model", newer, *SMALL[:4], "--follow", "diffusers", "--dir", "d"))
    for stage in ("denoise", "decode"):
        succeeded(wanjax(stage, "--dir", "d", *(SMALL[4:] if stage == "denoise" else ())))
    assert read_metadata("d/output_video.mp4")["follow"] == "diffusers"
    assert has_line_with(refused("denoise", "--dir", "d", "--force", "--follow", "official"), "226 224")

    Image.fromarray(np.full((16, 48, 3), 90, np.uint8)).save("wide.png")
    succeeded(wanjax("encode", "a", "--model", image, "--image", "wide.png", *SMALL[:4], "--dir", "e"))
    assert has_line_with(refused("denoise", "--dir", "e", "--follow", "diffusers"), "official --follow diffusers")
    succeeded(wanjax("denoise", "--dir", "e", "--sigmas", "diffusers", *SMALL[4:]))
    left = load_settings(Path("e"))
    assert (left["follow"], left["sigmas"]) == ("official", "diffusers")
