# SPDX-License-Identifier: Apache-2.0
"""Every published model, from a repository with the published classes, configs, names and shapes, and no weights."""

from pathlib import Path

import jax.numpy as jnp
import pytest
from huggingface_hub import constants

from tests.parity import published_repositories as published
from tests.support.quick import quick
from tests.support.words import line_with_words
from wanjax.checkpoints import modules
from wanjax.checkpoints.lora import LoraFile
from wanjax.checkpoints.lora_source import Lora
from wanjax.checkpoints.network_kinds import network
from wanjax.checkpoints.sources import Source
from wanjax.converters.name_map import NameMap
from wanjax.converters.weight_rules import assign
from wanjax.errors import WanjaxError
from wanjax.pipelines.family import Family
from wanjax.registry import (
    apply_options,
    find_checkpoint,
    inspect_checkpoint,
    model_description,
    open_for_loading,
    open_source,
    presets,
)

MODELS = [name for name, preset in presets().items() if not preset.bundled]
CLIP, AUTHORS_CLIP, SIGLIP = (520, 501), (519, 501), (448, 437)  # tensors, and those that are used
LORA_CHANGES = {"Wan2.2-Lightning": 400}  # weights that a LoRA of a repository changes; another one changes all
LORA_CHANGES |= {f"LongLive-Plug-{name}": 300 if "5B" in name else 400 for name in published.PLUGS}
QUICK = ["wan2.1-i2v-14b-480p", "wan2.2-t2v-a14b-4step", "wan2.1-t2v-1.3b-causvid", "cogvideox-2b"]
QUICK += ["hunyuanvideo1.5-480p-i2v", "wan2.1-t2v-14b-longlive-plug", "wan2.2-i2v-a14b-lightx2v"]


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    """Return the folder of the client's cache, which the tests of a process share."""
    return tmp_path_factory.mktemp("published")


@pytest.fixture
def hub(cache, monkeypatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def match_networks(source: Source, family: Family) -> dict[str, tuple[int, int]]:
    """Match each network's tensors to its parameters; return the numbers of all and of used tensors, by component.

    Raises WanjaxError where a tensor fits no parameter, or a parameter no tensor.
    """
    classes = {name for kind in family.networks for name in kind.classes}
    networks = [name for name, component in source.components.items() if component.kind in classes]
    return {component: match_network(source, family, component) for component in networks}


def match_network(source: Source, family: Family, component: str) -> tuple[int, int]:
    result, specs = network(source, component, family.networks), source[component].weights().specs
    abstract = result.abstract(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    assignments = assign(result.rules, specs, modules.parameters(abstract), ignore=result.unused)
    return len(specs), len({name for assignment in assignments for name in assignment.sources})


def test_every_published_model_has_a_test_repository():
    assert {name for model in MODELS for name in published.repositories_of(model)} == published.REPOSITORIES.keys()


@pytest.mark.parametrize("model", quick(QUICK, MODELS))
def test_a_model_is_opened_from_its_repository(hub, model):
    """Open it as for a user who names the model, after all files are downloaded."""
    for name in published.repositories_of(model):
        published.add_to_cache(hub, name)
    preset, (opened, result) = presets()[model], find_checkpoint(model)
    if opened.missing_components:
        published.add_to_cache(hub, opened.fallback_repo)
    assert result is preset
    notes: list[str] = []
    checkpoint = apply_options(open_for_loading(model, None, notes.append), (), notes.append)
    assert checkpoint.preset is preset
    description = model_description(model)
    assert checkpoint.settings == description.settings
    assert inspect_checkpoint(model, reads_encoder_configs=True).model == description.model
    counts = match_networks(checkpoint.source, checkpoint.family)
    assert counts.keys() == description.model.spec.networks.keys() | set(description.model.spec.denoisers)
    assert counts.get("image_encoder") in (None, CLIP, AUTHORS_CLIP, SIGLIP)
    for name in checkpoint.source.components.keys() & {"image_processor", "feature_extractor", "tokenizer_2"}:
        checkpoint.family.loaders[name](checkpoint.source[name].files()[0].parent)
    for lora in map(Lora.parse, preset.loras):
        changed_network = network(opened, "transformer", checkpoint.family.networks)
        matches = LoraFile(lora.path, changed_network.specs, changed_network.kind.lora_names or NameMap([])).matches
        num_changed = LORA_CHANGES.get(lora.file.split("/")[1], 1303 if "i2v" in model else 1095)
        assert (matches.unmatched, matches.num_matched) == ((), num_changed)


@pytest.mark.parametrize("name", quick(["Wan2.1-FLF2V-14B-720P"], published.AUTHORS_FOLDERS))
def test_a_model_is_opened_from_its_authors_folder(tmp_path, name):
    """It contains all but the config of CLIP's preprocessor, which is in the same model's repository."""
    checkpoint = inspect_checkpoint(published.authors_folder(tmp_path / name), reads_encoder_configs=True)
    assert checkpoint.source.missing_components == [
        x for x in ("image_processor",) if x in checkpoint.source.components
    ]
    assert checkpoint.source.fallback_repo.casefold() == f"Wan-AI/{name}-Diffusers".casefold()
    counts = match_networks(checkpoint.source, checkpoint.family)
    assert counts["text_encoder"] == (242, 242)
    assert counts["vae"] in [(194, 194), (196, 196)]
    assert counts.get("image_encoder", AUTHORS_CLIP) == AUTHORS_CLIP
    assert checkpoint.preset is not None
    assert checkpoint.model == model_description(checkpoint.preset.name).model


def test_hunyuanvideo_is_opened_from_its_authors_folder(tmp_path):
    """The folder also contains all of Qwen2.5-VL, the checkpoint of Glyph-SDXL-v2, and SigLIP."""
    checkpoint = inspect_checkpoint(published.hunyuan_authors_folder(tmp_path, "480p_i2v"), reads_encoder_configs=True)
    assert checkpoint.source.missing_components == []
    assert match_networks(checkpoint.source, checkpoint.family) == {
        "text_encoder": (338, 313),
        "text_encoder_2": (111, 111),
        "image_encoder": SIGLIP,
        "transformer": (1801, 1801),
        "vae": (218, 218),
    }
    assert checkpoint.preset is not None
    assert checkpoint.model == model_description("hunyuanvideo1.5-480p-i2v").model


SUPER_RESOLUTION = ("720p_sr_distilled", "1080p_sr_distilled")


@pytest.mark.parametrize(
    "name",
    quick(
        ["720p_i2v", "720p_sr_distilled"],
        [*published.HUNYUAN_SHIFTS, *published.HUNYUAN_ONLY_AUTHORS, *SUPER_RESOLUTION],
    ),
)
def test_a_transformer_folder_of_hunyuanvideo_is_its_model(hub, tmp_path, name):
    folder = published.hunyuan_transformer(tmp_path, name)
    if name in SUPER_RESOLUTION:
        with pytest.raises(WanjaxError, match=line_with_words(f"{name} 480p_t2v")):
            inspect_checkpoint(folder)
        return
    published.add_to_cache(hub, open_source(folder).fallback_repo)
    checkpoint = inspect_checkpoint(folder)
    assert checkpoint.preset is not None
    assert checkpoint.preset.name == f"hunyuanvideo1.5-{name.replace('_', '-')}"
    assert match_network(checkpoint.source, checkpoint.family, "transformer")[0] == 1801 + 4 * ("step" in name)
