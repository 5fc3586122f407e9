# SPDX-License-Identifier: Apache-2.0
"""Skip-layer guidance pushes away from a prediction without some blocks of the network."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wanjax
from tests.support.quick import quick
from tests.support.tiny import tiny_checkpoint, tiny_control_checkpoint
from tests.support.words import line_with_words
from wanjax.checkpoints.files import load_safetensors, save_safetensors
from wanjax.errors import WanjaxError
from wanjax.pipelines.guidance import guidance_rule

pytestmark = pytest.mark.usefixtures("cached_programs")

SMALL: dict[str, Any] = {"size": (32, 32), "frames": 5, "steps": 1}
NOISE = np.random.default_rng(0).standard_normal((1, 4, 2, 4, 4)).astype(np.float32)
SCALE = 2.5


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Return a checkpoint of two blocks, and one with only its first block."""
    root = tmp_path_factory.mktemp("models")
    checkpoint = tiny_checkpoint(root / "both")
    first = Path(shutil.copytree(checkpoint, root / "first"))
    config, weights = first / "transformer/config.json", first / "transformer/diffusion_pytorch_model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_layers": 1}))
    tensors = {name: np.array(x) for name, x in load_safetensors(weights).items() if not name.startswith("blocks.1.")}
    weights.unlink()
    save_safetensors(weights, tensors)
    return checkpoint, first


@pytest.fixture(scope="module")
def pipe(folders):
    return wanjax.load(folders[0], scheduler="euler")


def latents(pipe: Any, **options: Any) -> np.ndarray:
    conditioning = pipe.encode("a cat", negative_prompt="a dog", size=(32, 32), frames=5)
    return np.asarray(pipe.denoise(conditioning, noise=NOISE, **(SMALL | options)), np.float64)


def velocity(pipe: Any, **options: Any) -> np.ndarray:
    """Return the guided velocity of the only step: the difference between the noise and the latents."""
    return NOISE - latents(pipe, **options)


ZERO = "cfg-zero:zero_steps=0"
CASES: list[Any] = [
    (rule, skip, options)
    for rule, skip in (("none", "none:"), (ZERO, f"{ZERO},"))
    for options in ({}, {"batch_guidance": True})
]


@pytest.mark.parametrize(("rule", "skip", "options"), quick([CASES[0], CASES[3]], CASES))
def test_the_difference_to_a_prediction_without_a_block_is_added(folders, pipe, rule, skip, options):
    """The prediction without a block equals the prediction of a checkpoint without this block."""
    guided, prompt = velocity(pipe, guidance_scale=5, guidance_rule=rule), velocity(pipe, guidance_scale=1)
    without_block = velocity(wanjax.load(folders[1], scheduler="euler"), guidance_scale=1)
    expected = guided + SCALE * (prompt - without_block)
    actual = velocity(pipe, guidance_scale=5, guidance_rule=f"{skip}skip=1,skip_scale={SCALE}", **options)
    np.testing.assert_allclose(actual, expected, atol=2e-5 * np.abs(expected).max())
    assert np.abs(expected - guided).max() > 0.01 * np.abs(guided).max()


def test_only_steps_between_the_noise_levels_skip_blocks(pipe):
    options = {"guidance_scale": 5, "steps": 4, "flow_shift": 1.0, "sigmas": "comfy"}  # levels 1, .75, .5 and .25
    unguided, always = latents(pipe, **options), latents(pipe, guidance_rule="none:skip=1", **options)
    between = latents(pipe, guidance_rule="none:skip=1,skip_start=0.8,skip_end=0.4", **options)
    never = latents(pipe, guidance_rule="none:skip=1,skip_start=0.2", **options)
    np.testing.assert_array_equal(never, unguided)
    assert not np.allclose(between, unguided)
    assert not np.allclose(between, always)
    rule = guidance_rule("none:skip=0+1,skip_start=0.75,skip_end=0.5")
    assert [rule.blocks_to_skip(level) for level in (1, 0.75, 0.5, 0.25)] == [(), (0, 1), (0, 1), ()]


def test_the_text_of_a_rule_includes_its_skipped_blocks():
    assert str(guidance_rule("none")) == "none"
    assert str(guidance_rule("cfg-zero")) == "cfg-zero:zero_steps=1"
    text = "cfg-zero:skip=9+10,skip_scale=3.0,skip_start=0.9,skip_end=0.2,zero_steps=0"
    assert str(guidance_rule(text)) == text


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("none:skip=2", "blocks 0 to 1 skip=2"),
        ("none:skip=0+1", "blocks 0 to 1 skip some of them"),
        ("none:skip=a", "skip=9+10"),
        ("none:skip=1,skip_scale=0", "skip_scale above 0"),
        ("none:skip=1,skip_scale=nan", "skip_scale above 0"),
        ("none:skip=1,skip_start=0.2,skip_end=0.5", "from skip_start down to skip_end"),
    ],
)
def test_invalid_blocks_are_refused(pipe, rule, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        pipe.settings(guidance_rule=rule)


def test_caches_and_models_that_cannot_skip_blocks_refuse_it(pipe, tmp_path):
    with pytest.raises(WanjaxError, match=line_with_words("step cache easycache leave one of them out")):
        pipe.settings(guidance_rule="none:skip=1", cache="easycache", steps=20)
    with pytest.raises(WanjaxError, match=line_with_words("cannot skip blocks leave skip out")):
        wanjax.load(tiny_control_checkpoint(tmp_path)).settings(guidance_rule="none:skip=0")
