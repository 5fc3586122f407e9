# SPDX-License-Identifier: Apache-2.0
"""The library accepts or refuses settings: dtypes, settings of loading, texts and a strength."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import wanjax
from tests.support.quick import quick
from tests.support.tiny import tiny_checkpoint, tiny_cogvideox_checkpoint, tiny_hunyuan_checkpoint
from tests.support.words import line_with_words
from wanjax import registry
from wanjax.errors import WanjaxError
from wanjax.media.video import read_metadata
from wanjax.pipelines.family import named_sizes
from wanjax.pipelines.validation import dtype_name

pytestmark = pytest.mark.usefixtures("cached_programs")

SMALL = {"size": (16, 32), "frames": 5, "steps": 2}
BFLOAT16 = ["bfloat16", jnp.bfloat16, ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)]
FLOAT32 = ["float32", jnp.float32, np.float32, np.dtype("float32"), "f4"]
UNSUPPORTED_DTYPES = [
    "float16",
    jnp.float16,
    np.float16,
    jnp.float8_e4m3fn,
    "float8_e4m3fn",
    np.int8,
    "fp8",
    "half",
    np.float64,
    float,
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def pipe(model):
    return wanjax.load(model)


def test_a_dtype_has_one_name():
    assert {dtype_name(dtype) for dtype in BFLOAT16} == {"bfloat16"}
    assert {dtype_name(dtype) for dtype in FLOAT32} == {"float32"}
    assert dtype_name(None) is None


@pytest.mark.parametrize("dtype", quick([jnp.bfloat16], [jnp.bfloat16, np.float32]), ids=str)
def test_metadata_stores_the_name_of_a_dtype(model, tmp_path, dtype):
    pipe = wanjax.load(model, dtype=dtype, param_dtype=dtype)
    assert pipe.transformer.blocks.self_attn.q.kernel[...].dtype == dtype
    video = pipe("a", dtype=dtype, **SMALL)
    assert read_metadata(video.save(tmp_path / "a.mp4"))["dtype"] == np.dtype(dtype).name


@pytest.mark.parametrize("dtype", UNSUPPORTED_DTYPES, ids=str)
def test_other_dtypes_are_refused(model, pipe, dtype):
    for option in ("dtype", "vae_dtype", "param_dtype"):
        with pytest.raises(WanjaxError, match=line_with_words(f"{option} bfloat16 float32")):
            wanjax.load(model, **{option: dtype})
    with pytest.raises(WanjaxError, match=r"^the dtype \S+ is not supported"):
        pipe("a", dtype=dtype, **SMALL)


@pytest.mark.parametrize("name", ["__call__", "encode", "prepare", "settings", "denoise"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "bfloat16"}, "float32 wanjax.load('{model}', dtype='bfloat16')"),
        ({"dtype": jnp.bfloat16}, "float32 wanjax.load('{model}', dtype='bfloat16')"),
        ({"model": "nano"}, "{model} wanjax.load('nano')"),
    ],
    ids=["a dtype", "a dtype of JAX", "a model"],
)
def test_a_call_cannot_change_loaded_settings(model, pipe, name, change, words):
    options = {"conditioning": pipe.encode("a")} if name == "denoise" else {"prompt": "a"}
    with pytest.raises(WanjaxError, match=line_with_words(words.format(model=model))):
        getattr(pipe, name)(**options, **change)


@pytest.mark.parametrize(
    "make_checkpoint", quick([tiny_checkpoint], [tiny_checkpoint, tiny_cogvideox_checkpoint, tiny_hunyuan_checkpoint])
)
def test_an_autoencoder_in_bfloat16_gives_nearly_the_same_frames(make_checkpoint, tmp_path):
    """The weights stay in float32, and frames differ only by rounding."""
    folder = str(make_checkpoint(tmp_path))
    full_precision, rounded = (wanjax.load(folder, dtype="float32", vae_dtype=dtype) for dtype in (None, "bfloat16"))
    assert (full_precision.defaults.vae_dtype, rounded.defaults.vae_dtype) == ("float32", "bfloat16")
    assert {x.dtype for x in jax.tree.leaves(nnx.state(rounded.vae))} == {jnp.dtype("float32")}
    latents = full_precision.noise(full_precision.settings(seed=3, **SMALL | {"frames": 1}))
    full_frames, rounded_frames = (np.asarray(pipe.decode(latents, "float32")) for pipe in (full_precision, rounded))
    assert 1e-5 < np.abs(full_frames - rounded_frames).max() < 0.05
    # the frames are not rounded to 8 bits too early
    assert len(np.unique(rounded_frames)) > 0.9 * len(np.unique(full_frames))
    with pytest.raises(WanjaxError, match=line_with_words("bfloat16 float32 vae_dtype")):
        rounded.settings(vae_dtype="float32")


def test_autoencoders_of_published_models_have_their_authors_dtype():
    dtypes = {name: preset.defaults.vae_dtype for name, preset in registry.presets().items()}
    assert {name for name, dtype in dtypes.items() if dtype == "bfloat16"} == {
        name for name in dtypes if "turbowan" in name
    }


def test_a_call_may_repeat_loaded_settings(model, pipe):
    assert pipe.settings(model=model, dtype=jnp.float32) == pipe.settings()


def test_a_strength_applies_to_an_input_video(pipe):
    clip = np.zeros((5, 16, 32, 3), np.uint8)
    assert pipe.prepare(prompt="a", video=clip, strength=0.5, **SMALL)[1].strength == 0.5


def test_a_strength_that_leaves_no_step_is_refused_with_values_that_leave_one():
    settings = registry.model_description("nano").settings
    for strength, steps, advice in ((0.8, 1, "2 steps 1 more"), (1 / 49, 49, "50 steps 0.021 more")):
        with pytest.raises(WanjaxError, match=line_with_words(advice)):
            _ = settings.updated({"strength": strength, "steps": steps}).steps_with_strength
    for advised in ({"strength": 0.8, "steps": 2}, {"strength": 1 / 49, "steps": 50}, {"strength": 0.021, "steps": 49}):
        assert settings.updated(advised).steps_with_strength == 1


def test_every_model_supports_its_named_sizes():
    for name, preset in registry.presets().items():
        description = registry.model_description(name)
        model, defaults = description.model, description.settings
        assert description.sizes == preset.sizes
        sizes = named_sizes(model, defaults, description.sizes)
        assert next(iter(sizes.values())) == defaults.size
        for height, width in sizes.values():
            model.spec.check_settings(defaults.updated({"height": height, "width": width}))
        assert [height == width for name, (height, width) in sizes.items() if name == "square"] in ([], [True])
        assert [height > width for name, (height, width) in sizes.items() if name == "portrait"] in ([], [True])
