# SPDX-License-Identifier: Apache-2.0
"""CLIP's vision tower and the preprocessing before it, against transformers, float32, on small random weights."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import CLIPVisionConfig, CLIPVisionModel, CLIPVisionModelWithProjection
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests.parity.references import StateDict, randomise, relative_l2
from wanjax.checkpoints import modules
from wanjax.checkpoints.files import SafetensorsFolder, Tensors
from wanjax.converters import clip
from wanjax.layers.placement import as_shapes
from wanjax.models.clip import CLIPVision
from wanjax.pipelines.image_processor import ImageProcessor

SIZES = {"hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 4, "num_attention_heads": 3}


@pytest.fixture(scope="module")
def reference() -> CLIPVisionModel:
    torch.manual_seed(0)
    model = CLIPVisionModel(CLIPVisionConfig(**SIZES, image_size=28, patch_size=7, hidden_act="gelu")).eval()
    randomise(model, seed=1)
    return model


def load(json: dict, reader) -> CLIPVision:
    config = clip.clip_config(json)
    abstract = as_shapes(lambda rngs: CLIPVision(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs))
    return modules.load(abstract, clip.clip_weight_rules(config), reader, ignore=clip.clip_unused(config))


@torch.no_grad()
def features(model: CLIPVisionModel, images: torch.Tensor) -> np.ndarray:
    """Return the features that diffusers uses: the output of the second-to-last block."""
    return model(images, output_hidden_states=True).hidden_states[-2].numpy()


IMAGES = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(2))


def test_the_features_equal_those_of_transformers(reference):
    model = load(reference.config.to_dict(), StateDict(reference))
    graphdef, weights = nnx.split(model)
    run = jax.jit(lambda weights, images: nnx.merge(graphdef, weights)(images))
    result = run(weights, jnp.asarray(IMAGES.numpy().transpose(0, 2, 3, 1)))
    assert relative_l2(result, features(reference, IMAGES)) <= 1e-5


def test_quick_gelu_exceeds_the_bound(reference):
    quick_gelu = CLIPVisionModel(CLIPVisionConfig(**SIZES, image_size=28, patch_size=7, hidden_act="quick_gelu")).eval()
    quick_gelu.load_state_dict(reference.state_dict())
    assert relative_l2(features(quick_gelu, IMAGES), features(reference, IMAGES)) > 1e-4


def test_older_and_newer_files_are_read(reference, tmp_path):
    """Published files have a prefix and position ids, which current transformers omits."""
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (tmp_path / "model.safetensors").is_file()
    model = load(config, SafetensorsFolder(tmp_path))
    older = {f"vision_model.{key}": tensor for key, tensor in StateDict(reference).tensors.items()}
    reloaded = load(config, Tensors(older | {"vision_model.embeddings.position_ids": np.arange(17)[None]}))
    for tensor, reloaded_tensor in zip(
        modules.parameters(model).values(), modules.parameters(reloaded).values(), strict=True
    ):
        np.testing.assert_array_equal(tensor, reloaded_tensor)


def test_a_projection_after_the_encoder_is_ignored(reference, tmp_path):
    """Wan's published image encoders contain one, and their config.json names the class that has it."""
    projected = CLIPVisionModelWithProjection(reference.config).eval()
    randomise(projected, seed=4)
    projected.save_pretrained(tmp_path)
    reader = SafetensorsFolder(tmp_path)
    assert "visual_projection.weight" in reader.specs
    model = load(json.loads((tmp_path / "config.json").read_text()), reader)
    result = model(jnp.asarray(IMAGES.numpy().transpose(0, 2, 3, 1)))
    assert relative_l2(result, features(projected, IMAGES)) <= 1e-5


@pytest.mark.parametrize("size", [(224, 224), (100, 300), (3, 5), (720, 1280)])
def test_a_stretched_picture_equals_that_of_the_authors(size):
    """Like the authors' code: torch's bicubic without antialiasing, on pixels in [-1, 1]."""
    picture = np.random.default_rng(size[0]).integers(0, 256, (*size, 3), dtype=np.uint8)
    processor = ImageProcessor(224, (224, 224), (0.48, 0.46, 0.41), (0.27, 0.26, 0.28))
    pixels = torch.from_numpy(picture).permute(2, 0, 1)[None].float().div(255).sub(0.5).div(0.5)
    exact = torch.nn.functional.interpolate(pixels, (224, 224), mode="bicubic", align_corners=False).mul(0.5).add(0.5)
    exact = (exact[0].permute(1, 2, 0).numpy() - np.float32(processor.mean)) / np.float32(processor.std)
    (result,) = processor([picture], stretch=True)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, exact, atol=1e-4)
    assert size == (224, 224) or np.abs(result - processor([picture])[0]).max() > 0.1


@pytest.mark.parametrize("size", [(224, 224), (100, 300), (333, 251), (37, 41), (720, 1280)])
def test_preprocessed_pictures_equal_those_of_transformers(size, tmp_path):
    rng = np.random.default_rng(size[0])
    picture = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
    reference = CLIPImageProcessorPil()
    reference.save_pretrained(tmp_path)
    processor = ImageProcessor.load(tmp_path)
    exact = reference(images=picture, return_tensors="np")["pixel_values"].transpose(0, 2, 3, 1)
    result = processor([picture])
    assert result.dtype == np.float32
    assert np.abs((result - exact) * np.float32(reference.image_std)).max() <= 1 / 255  # in pixels from 0 to 1
    assert np.abs(result - exact).max() <= 1e-5
