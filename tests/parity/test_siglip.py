# SPDX-License-Identifier: Apache-2.0
"""SigLIP's vision tower and the preprocessing before it, against transformers, float32, on small random weights."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from PIL import Image
from transformers import SiglipVisionConfig, SiglipVisionModel
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.parity.encoder_references import SIGLIP_SIZES, convert_reference, siglip_reference
from tests.parity.references import StateDict, relative_l2
from tests.support.words import line_with_words
from wanjax.checkpoints import modules
from wanjax.checkpoints.files import Tensors
from wanjax.checkpoints.network_kinds import Network
from wanjax.converters.configs import read_config
from wanjax.converters.siglip import siglip_config
from wanjax.errors import WanjaxError
from wanjax.layers.patch import patchify
from wanjax.layers.stack import block_at
from wanjax.pipelines.image_processor import StretchingImageProcessor
from wanjax.pipelines.text.encoders import SIGLIP_VISION

IMAGES = torch.randn(2, 3, 45, 45, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    reference = siglip_reference()
    return reference, convert_reference(reference, SIGLIP_VISION, tmp_path_factory.mktemp("image_encoder"))


run = nnx.jit(lambda model, x: model(x))


def channels_last(images: torch.Tensor):
    return jnp.asarray(images.numpy().transpose(0, 2, 3, 1))


def relative_error(result, reference: torch.Tensor) -> float:
    """Return the relative error; `pytest -rP` shows it."""
    error = relative_l2(result, reference.detach().float().numpy())
    print(f"relative error {error:.1e}")
    return error


@torch.no_grad()
def test_the_output_of_every_block_equals_that_of_transformers(models):
    reference, model = models
    states = reference(IMAGES, output_hidden_states=True).hidden_states
    pixels = channels_last(IMAGES)[:, None, :42, :42]
    x = model.patch_embed(patchify(pixels, (1, 7, 7))) + model.positions[...][None]
    assert relative_error(x, states[0]) <= 1e-5
    for layer in range(model.config.layers):
        x = run(block_at(model.blocks, layer), x)
        assert relative_error(x, states[layer + 1]) <= 1e-5
    assert relative_error(model.norm(x), reference.post_layernorm(states[-1])) <= 1e-5


@torch.no_grad()
def test_the_features_equal_those_of_transformers(models):
    reference, model = models
    result = run(model, channels_last(IMAGES))
    assert result.shape == (2, 36, 216)
    assert relative_error(result, reference(IMAGES).last_hidden_state) <= 1e-5


@torch.no_grad()
def test_an_exact_gelu_exceeds_the_bound(models):
    reference, _ = models
    with_gelu = SiglipVisionModel(SiglipVisionConfig(**SIGLIP_SIZES, hidden_act="gelu")).eval()
    with_gelu.load_state_dict(reference.state_dict())
    assert relative_error(with_gelu(IMAGES).last_hidden_state, reference(IMAGES).last_hidden_state) > 1e-5


@torch.no_grad()
def test_bfloat16_is_as_accurate_as_in_torch(tmp_path):
    reference = siglip_reference()
    exact = reference(IMAGES).last_hidden_state
    reference_bfloat16 = reference.to(torch.bfloat16)
    reference_error = relative_l2(reference_bfloat16(IMAGES.bfloat16()).last_hidden_state.float(), exact)
    result = run(convert_reference(reference_bfloat16, SIGLIP_VISION, tmp_path, jnp.bfloat16), channels_last(IMAGES))
    assert result.dtype == jnp.bfloat16
    assert relative_l2(result.astype(jnp.float32), exact) <= 1.1 * reference_error


def test_older_and_newer_files_are_read(models):
    """Published files have a prefix and may have position ids. All have an unused head."""
    reference, model = models
    newer = StateDict(reference)
    older = {f"vision_model.{key}": tensor for key, tensor in newer.tensors.items()}
    older["vision_model.embeddings.position_ids"] = np.arange(36)[None]
    network = Network(model.config, SIGLIP_VISION)
    abstract = network.abstract(dtype=jnp.float32, param_dtype=jnp.float32)
    for reader in (newer, Tensors(older)):
        assert any("head.probe" in key for key in reader.specs)
        reloaded = modules.load(abstract, network.rules, reader, ignore=network.unused)
        for tensor, reloaded_tensor in zip(
            modules.parameters(model).values(), modules.parameters(reloaded).values(), strict=True
        ):
            np.testing.assert_array_equal(tensor, reloaded_tensor)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "siglip2_vision_model"}, "model_type 'siglip2_vision_model'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' 'gelu_pytorch_tanh'"),
        ({"patch_size": None}, "no patch_size"),
    ],
)
def test_unsupported_configs_are_refused(change, words):
    entries = SiglipVisionConfig(**SIGLIP_SIZES).to_dict() | change
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        read_config("config.json", {key: value for key, value in entries.items() if value is not None}, siglip_config)


@pytest.mark.parametrize("resample", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [(384, 384), (100, 300), (333, 251), (720, 1280), (17, 900)])
def test_preprocessed_pictures_equal_those_of_transformers(size, resample, tmp_path):
    picture = np.random.default_rng(size[0]).integers(0, 256, (*size, 3), dtype=np.uint8)
    reference = SiglipImageProcessorPil(
        size={"height": 384, "width": 384}, resample=resample, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    reference.save_pretrained(tmp_path)
    exact = reference(images=Image.fromarray(picture), return_tensors="np")["pixel_values"].transpose(0, 2, 3, 1)
    result = StretchingImageProcessor.load(tmp_path)([picture])
    assert result.dtype == np.float32
    assert result.shape == (1, 384, 384, 3)
    np.testing.assert_allclose(result, exact, atol=2e-7, rtol=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"do_normalize": False}, "do_normalize False True"),
        ({"resample": 77}, "77 Resampling"),
        ({"size": {"shortest_edge": 384}}, "no height"),
        ({"image_mean": None}, "no image_mean"),
    ],
)
def test_unsupported_preprocessing_is_refused(change, words, tmp_path):
    SiglipImageProcessorPil().save_pretrained(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    entries = json.loads(file.read_text()) | change
    file.write_text(json.dumps({key: value for key, value in entries.items() if value is not None}))
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        StretchingImageProcessor.load(tmp_path)
