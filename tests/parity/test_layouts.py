# SPDX-License-Identifier: Apache-2.0
"""The authors' layout and single files, against the same weights in the layout of diffusers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from transformers import CLIPVisionConfig, CLIPVisionModel

from tests.support import tiny
from tests.support.commands import succeeded
from tests.support.commands import wanjax as command
from tests.support.families import registered
from tests.support.ggufs import write_gguf
from tests.support.published import transformer_keys
from tests.support.words import has_line_with_words, line_with_words
from wanjax import loading, registry
from wanjax.checkpoints import layout as checkpoint_layout
from wanjax.checkpoints.convert import ConversionToWanjax
from wanjax.checkpoints.files import SafetensorsFolder, Spec, content_digest, save_safetensors
from wanjax.checkpoints.modules import parameters
from wanjax.checkpoints.network_kinds import network
from wanjax.checkpoints.readers import open_tensors
from wanjax.cli.remake import check_files
from wanjax.converters.wan import diffusers as wan
from wanjax.converters.wan import original
from wanjax.errors import WanjaxError
from wanjax.kernels.attention import SparseLinearAttentionConfig
from wanjax.models.wan.config import I2V_A14B, T2V_1_3B, T2V_14B, CausalTransformerConfig
from wanjax.pipelines.wan import layouts as wan_layouts
from wanjax.pipelines.wan import recognise
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.registry import open_source
from wanjax.schedulers import Consistency

NAMES = {
    "transformer": original.TRANSFORMER,
    "vae": original.vae_names(tiny.VAE | {"is_residual": False}),
    "text_encoder": original.TEXT_ENCODER,
}
ORIGINAL_CONFIG = {"_class_name": "WanModel", "model_type": "t2v", "num_heads": 2, "eps": 1e-6}


@pytest.fixture(autouse=True)
def published_statistics(monkeypatch):
    """Register the tiny autoencoder's latent statistics, like those of the published ones."""
    monkeypatch.setitem(original.STATISTICS, tiny.LATENT_CHANNELS, wan.vae_config(tiny.VAE))


@pytest.fixture(scope="module")
def diffusers(tmp_path_factory):
    return tiny.tiny_checkpoint(tmp_path_factory.mktemp("diffusers"))


@pytest.fixture
def completed_from_diffusers(diffusers, monkeypatch):
    """Complete checkpoints from the one in the layout of diffusers, which replaces the hub."""
    monkeypatch.setattr(checkpoint_layout, "open_fallback", lambda *_: open_source(diffusers))


@pytest.fixture
def fake_hub(monkeypatch):
    """Return a function that replaces the hub by files, by name, and returns a list of the requests."""

    def add_files(files):
        requested = []

        def locate(name, companions, revision):
            requested.append((name, companions, revision))
            return files[name]

        monkeypatch.setattr(registry, "locate_file", locate)
        return requested

    return add_files


def authors_tensors(folder, component):
    """Return a component's tensors by the authors' names."""
    weights = SafetensorsFolder(folder / component)
    return {NAMES[component].to_authors(key): weights.read(key) for key in weights.specs}


def save_pth(path, tensors):
    torch.save({key: torch.from_numpy(np.array(value)) for key, value in tensors.items()}, path)


@pytest.fixture
def authors(diffusers, tmp_path):
    """Write the checkpoint in the authors' layout."""
    save_safetensors(tmp_path / "diffusion_pytorch_model.safetensors", authors_tensors(diffusers, "transformer"))
    (tmp_path / "config.json").write_text(json.dumps(ORIGINAL_CONFIG))
    save_pth(tmp_path / "Wan2.1_VAE.pth", authors_tensors(diffusers, "vae"))
    save_pth(tmp_path / "models_t5_umt5-xxl-enc-bf16.pth", authors_tensors(diffusers, "text_encoder"))
    shutil.copytree(diffusers / "tokenizer", tmp_path / "google/umt5-xxl")
    return tmp_path


def assert_same_weights(result, reference):
    assert result.specs == reference.specs
    for key in reference.specs:
        np.testing.assert_array_equal(result.read(key), reference.read(key))


def test_the_authors_folder_is_read_as_the_folder_of_diffusers(authors, diffusers):
    source, reference = open_source(authors), open_source(diffusers)
    assert source.index == {key: value for key, value in reference.index.items() if key != "_diffusers_version"}
    for component in NAMES:
        assert_same_weights(source[component].weights(), reference[component].weights())
        config, expected = network(source, component, NETWORKS).config, network(reference, component, NETWORKS).config
        if component == "text_encoder":
            # the published value, which the shapes of tensors do not determine
            expected = replace(expected, max_distance=128)
        assert config == expected
    assert source["tokenizer"].files()[0].parent == authors / "google/umt5-xxl"
    assert source["vae"].weights().paths == [authors / "Wan2.1_VAE.pth"]
    assert source["scheduler"].config()["flow_shift"] == 5.0


def test_missing_files_of_an_authors_folder_are_missing_components(authors):
    """The text encoder is one of them once its file is deleted."""
    before = open_source(authors).missing_components
    next(authors.glob("models_t5_*")).unlink()
    assert set(open_source(authors).missing_components) == {*before, "text_encoder"}
    assert "text_encoder" not in before


def test_both_layouts_make_the_same_video(authors, diffusers):
    settings = {"size": (32, 32), "frames": 5, "steps": 2, "flow_shift": 3.0}
    results = []
    for folder in (authors, diffusers):
        pipe = loading.load(folder)
        latents = pipe.denoise(pipe.encode("a cat", ""), **settings)
        results.append((np.asarray(latents), pipe.decode(latents)))
    for result, reference in zip(*results, strict=True):
        np.testing.assert_array_equal(result, reference)


def test_components_are_read_when_they_are_needed(authors, diffusers):
    """A folder without a text encoder and tokenizer denoises and decodes."""
    encoded = loading.load(diffusers).encode("a cat", "")
    (authors / "models_t5_umt5-xxl-enc-bf16.pth").unlink()
    shutil.rmtree(authors / "google")
    pipe = loading.load(authors)
    latents = pipe.denoise(encoded, size=(32, 32), frames=5, steps=1)
    assert pipe.decode(latents).shape == (5, 32, 32, 3)
    with pytest.raises(WanjaxError, match="contains no text_encoder"):
        _ = pipe.text_encoder


@pytest.mark.parametrize("layout", ["folder", "file"])
@pytest.mark.usefixtures("completed_from_diffusers")
def test_a_folder_and_a_file_of_the_authors_are_converted(layout, authors, diffusers, tmp_path):
    """The weights equal those from the layout of diffusers."""
    name = authors if layout == "folder" else authors / "diffusion_pytorch_model.safetensors"
    target = tmp_path / "converted"
    assert ConversionToWanjax(open_source(name), target, NETWORKS).run()
    for component in NAMES:
        assert (target / component / "config.json").is_file()
    pipes = [loading.load(folder) for folder in (target, diffusers)]
    if layout == "file":  # no config gives its number of heads
        return
    for part in ("text_encoder", "transformer", "vae"):
        weights, reference = (parameters(getattr(pipe, part)) for pipe in pipes)
        jax.tree.map(np.testing.assert_array_equal, weights, reference)
    np.testing.assert_array_equal(*(pipe.model.tokenize(pipe.runtime, ["a cat"], "official")[0].ids for pipe in pipes))


def test_folders_of_two_experts_are_read_as_two_transformers(authors, diffusers):
    for folder in ("high_noise_model", "low_noise_model"):
        (authors / folder).mkdir()
        for name in ("config.json", "diffusion_pytorch_model.safetensors"):
            shutil.copy(authors / name, authors / folder / name)
    source = open_source(authors)
    assert source.index["transformer_2"] == ["diffusers", "WanTransformer3DModel"]
    assert source.index["boundary_ratio"] == 0.875
    assert source["scheduler"].config()["flow_shift"] == 12.0
    paths = [source[name].weights().paths for name in ("transformer", "transformer_2")]
    assert [path.parent.name for (path,) in paths] == ["high_noise_model", "low_noise_model"]
    assert_same_weights(source["transformer_2"].weights(), open_source(diffusers)["transformer"].weights())


@pytest.mark.parametrize("wrapper", ["", "_fsdp_wrapped_module."])
@pytest.mark.usefixtures("completed_from_diffusers")
def test_a_distilled_causal_transformer_is_read(wrapper, diffusers, tmp_path):
    """The averaged weights are read; only the name of their table shows that the model is causal."""
    tensors = {f"model.{wrapper}{key}": torch.tensor(x) for key, x in authors_tensors(diffusers, "transformer").items()}
    zeros = {key: torch.zeros_like(x) for key, x in tensors.items()}
    torch.save({"generator": zeros, "critic": zeros, "generator_ema": tensors}, tmp_path / "distilled.pt")
    source = open_source(tmp_path / "distilled.pt")
    assert_same_weights(source["transformer"].weights(), SafetensorsFolder(diffusers / "transformer"))
    config = network(source, "transformer", NETWORKS).config
    assert isinstance(config, CausalTransformerConfig)
    assert (config.chunk_frames, config.window, config.sink) == (3, 21, 0)
    assert ConversionToWanjax(source, tmp_path / "converted", NETWORKS).run()
    pipe = loading.load(tmp_path / "converted")
    assert pipe.scheduler == Consistency()
    assert pipe.defaults.steps == 4


PREFIXES = ["", "model.diffusion_model.", "diffusion_model."]


@pytest.mark.parametrize("names_of", ["authors", "diffusers"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_transformer_in_a_single_file_is_read_by_any_names(prefix, names_of, diffusers, tmp_path):
    reference = SafetensorsFolder(diffusers / "transformer")
    tensors = {key: reference.read(key) for key in reference.specs}
    tensors = tensors if names_of == "diffusers" else authors_tensors(diffusers, "transformer")
    save_safetensors(tmp_path / "wan.safetensors", {prefix + key: value for key, value in tensors.items()})
    source = open_source(tmp_path / "wan.safetensors")
    assert_same_weights(source["transformer"].weights(), reference)


@pytest.mark.parametrize("distillation", ["rcm", "causvid"])
def test_the_files_of_distillations_are_read(distillation, diffusers, tmp_path):
    """rCM's trainer prefixes `net.` and projects flat patches; CausVid's file has the generator and its critic."""
    reference = SafetensorsFolder(diffusers / "transformer")
    tensors = {
        key: torch.from_numpy(np.array(value)) for key, value in authors_tensors(diffusers, "transformer").items()
    }
    if distillation == "rcm":
        tensors["patch_embedding.weight"] = tensors["patch_embedding.weight"].flatten(1)
        torch.save({f"net.{key}": value for key, value in tensors.items()}, tmp_path / "model.pt")
    else:
        generator = {f"model.{key}": value for key, value in tensors.items()}
        critic = {key: value + 1 for key, value in generator.items()}
        torch.save({"generator": generator, "critic": critic}, tmp_path / "model.pt")
    source = open_source(tmp_path / "model.pt")
    assert_same_weights(source["transformer"].weights(), reference)


def test_a_folder_distilled_with_sparse_attention_is_read(diffusers, tmp_path):
    """Its class determines the sampler, and the gates of sparse attention are left out."""
    shutil.copytree(diffusers, tmp_path / "few")
    index = json.loads((tmp_path / "few/model_index.json").read_text())
    (tmp_path / "few/model_index.json").write_text(json.dumps(index | {"_class_name": "WanDMDPipeline"}))
    [file] = (tmp_path / "few/transformer").glob("*.safetensors")
    tensors = {key: np.array(open_tensors(file).read(key)) for key in open_tensors(file).specs}
    gates = {
        f"blocks.{i}.to_gate_compress.{leaf}": np.ones(3, np.float32) for i in (0, 1) for leaf in ("weight", "bias")
    }
    save_safetensors(file, tensors | gates)
    distilled, expected = loading.load(tmp_path / "few"), loading.load(diffusers)
    jax.tree.map(np.testing.assert_array_equal, *(parameters(pipe.transformer) for pipe in (distilled, expected)))
    assert distilled.scheduler == Consistency(timesteps=(1000.0, 757.0, 522.0))
    assert (distilled.defaults.steps, distilled.defaults.guidance_scale, distilled.defaults.flow_shift) == (3, 1.0, 8.0)
    assert type(distilled.model) is type(expected.model)
    save_safetensors(file, tensors | {"blocks.0.other": gates["blocks.0.to_gate_compress.bias"]})
    with pytest.raises(WanjaxError, match=r"blocks\.0\.other"):
        _ = loading.load(tmp_path / "few").transformer


def test_a_single_file_of_the_hub_is_downloaded(diffusers, tmp_path, fake_hub):
    path = tmp_path / "wan.safetensors"
    save_safetensors(path, authors_tensors(diffusers, "transformer"))
    requested = fake_hub({"owner/name/split/wan.safetensors": path})
    source = open_source("owner/name/split/wan.safetensors", "v1")
    assert [revision for _, _, revision in requested] == ["v1"]
    assert source.root == path
    assert source.missing_components == ["text_encoder", "tokenizer", "vae"]


@pytest.mark.usefixtures("completed_from_diffusers")
def test_a_converted_file_has_the_settings_of_its_preset(diffusers, tmp_path, fake_hub):
    """Its other components are those of the base model, which has other settings."""
    save_safetensors(tmp_path / "model.safetensors", authors_tensors(diffusers, "transformer"))
    fake_hub({"owner/name/part/model.safetensors": tmp_path / "model.safetensors"})
    preset = registry.presets()["wan2.1-t2v-1.3b-causvid"]
    file_preset = replace(preset, name="few", source="owner/name/part/model.safetensors", model=None)
    with registered(presets=(file_preset,)):
        succeeded(command("convert", "few", tmp_path / "converted"))
        pipe = loading.load(tmp_path / "converted")
    assert (pipe.scheduler, pipe.defaults.steps) == (preset.scheduler, 3)


EXPERTS = [
    ("TurboWan2.2-I2V-A14B-high-720P.pth", "TurboWan2.2-I2V-A14B-low-720P.pth"),
    ("wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors", "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors"),
    ("Wan2_2-T2V-A14B-HIGH_fp8.safetensors", "Wan2_2-T2V-A14B-LOW_fp8.safetensors"),
    ("Wan2.2-T2V-HighNoise.safetensors", "Wan2.2-T2V-LowNoise.safetensors"),
]


def save(path, tensors):
    (save_pth if path.suffix == ".pth" else save_safetensors)(path, tensors)


@pytest.mark.parametrize("passed", [0, 1])
@pytest.mark.parametrize("names", EXPERTS)
def test_files_of_two_experts_are_read_as_two_transformers(names, passed, diffusers, tmp_path):
    """Either file can be passed; the first transformer is the expert for high noise."""
    tensors = authors_tensors(diffusers, "transformer")
    for name, change in zip(names, (0, 1), strict=True):
        save(tmp_path / name, {key: x + np.float32(change) for key, x in tensors.items()})
    source = open_source(tmp_path / names[passed])
    assert source.index["transformer_2"] == source.index["transformer"]
    assert (source.index["boundary_ratio"], source["scheduler"].config()["flow_shift"]) == (0.875, 12.0)
    high, low = (source[name].weights() for name in ("transformer", "transformer_2"))
    assert_same_weights(high, SafetensorsFolder(diffusers / "transformer"))
    np.testing.assert_array_equal(low.read("proj_out.bias"), high.read("proj_out.bias") + 1)
    assert [reader.paths[0].name for reader in (high, low)] == [*names]


@pytest.mark.usefixtures("completed_from_diffusers")
def test_metadata_has_digests_of_both_files(diffusers, tmp_path):
    """A video is not reproduced if either file differs."""
    names, tensors = EXPERTS[0], authors_tensors(diffusers, "transformer")
    for name in names:
        save(tmp_path / name, tensors)
    pipe = loading.load(tmp_path / names[0])
    assert pipe.model.spec.denoisers == ("transformer", "transformer_2")
    record = pipe.metadata(pipe.settings(prompt="a cat", size=(32, 32), frames=5), {})
    assert record["digests"] == {str(tmp_path / name): content_digest(tmp_path / name) for name in names}
    check_files(record, ["model"])
    save(tmp_path / names[1], {key: x + np.float32(1) for key, x in tensors.items()})
    with pytest.raises(WanjaxError, match=line_with_words(f"model {names[1]} --model")):
        check_files(record, ["model"])


@pytest.mark.usefixtures("completed_from_diffusers")
def test_files_of_two_experts_are_converted(diffusers, tmp_path):
    tensors = authors_tensors(diffusers, "transformer")
    for name, change in zip(EXPERTS[0], (0, 1), strict=True):
        save(tmp_path / name, {key: x + np.float32(change) for key, x in tensors.items()})
    assert ConversionToWanjax(open_source(tmp_path / EXPERTS[0][1]), tmp_path / "converted", NETWORKS).run()
    pipe = loading.load(tmp_path / "converted")
    assert pipe.model.spec.denoisers == ("transformer", "transformer_2")
    high, low = (np.asarray(pipe.components.get(name).proj_out.bias[...]) for name in pipe.model.spec.denoisers)
    np.testing.assert_array_equal(low, high + 1)


def test_a_single_file_is_not_mistaken_for_an_expert_by_its_name(diffusers, tmp_path):
    for name in ("wan-low-vram.safetensors", "highland.safetensors"):
        save_safetensors(tmp_path / name, authors_tensors(diffusers, "transformer"))
        assert "transformer_2" not in open_source(tmp_path / name).index
    save_safetensors(tmp_path / "wan-high-vram.safetensors", authors_tensors(diffusers, "vae"))
    assert "transformer_2" not in open_source(tmp_path / "wan-low-vram.safetensors").index


def test_the_file_of_the_other_expert_is_downloaded_too(diffusers, tmp_path, fake_hub):
    requested = fake_hub({f"owner/name/{EXPERTS[0][0]}": tmp_path / EXPERTS[0][0]})
    for name in EXPERTS[0]:
        save(tmp_path / name, authors_tensors(diffusers, "transformer"))
    assert "transformer_2" in open_source(f"owner/name/{EXPERTS[0][0]}").index
    assert [files for _, files, _ in requested] == [[EXPERTS[0][1]]]


def test_a_file_may_contain_every_network(diffusers, tmp_path):
    prefixes = {
        "transformer": "model.diffusion_model.",
        "vae": "vae.",
        "text_encoder": "text_encoders.umt5xxl.transformer.",
    }
    tensors = {p + key: x for name, p in prefixes.items() for key, x in authors_tensors(diffusers, name).items()}
    text = SafetensorsFolder(diffusers / "text_encoder")  # ComfyUI uses the names of transformers here
    tensors = {key: value for key, value in tensors.items() if not key.startswith(prefixes["text_encoder"])}
    tensors |= {prefixes["text_encoder"] + key: text.read(key) for key in text.specs}
    tensors[prefixes["text_encoder"] + "spiece_model"] = np.arange(5, dtype=np.uint8)
    save_safetensors(tmp_path / "all.safetensors", tensors)
    source = open_source(tmp_path / "all.safetensors")
    for component in NAMES:
        assert_same_weights(source[component].weights(), SafetensorsFolder(diffusers / component))


def test_scaled_fp8_weights_are_multiplied_by_their_scales(diffusers, tmp_path):
    tensors, scaled = authors_tensors(diffusers, "transformer"), "blocks.0.self_attn.q"
    fp8_weight = (tensors[f"{scaled}.weight"] * 100).astype(ml_dtypes.float8_e4m3fn)
    tensors |= {
        f"{scaled}.weight": fp8_weight,
        f"{scaled}.scale_weight": np.array(0.01, np.float32),
        f"{scaled}.scale_input": np.array(1, np.float32),
        "scaled_fp8": np.zeros(2, ml_dtypes.float8_e4m3fn),
    }
    save_safetensors(tmp_path / "fp8.safetensors", tensors)
    weights = open_source(tmp_path / "fp8.safetensors")["transformer"].weights()
    reference = SafetensorsFolder(diffusers / "transformer")
    assert weights.specs.keys() == reference.specs.keys()
    key = "blocks.0.attn1.to_q.weight"
    assert weights.specs[key] == Spec(fp8_weight.shape, np.dtype(np.float32))
    np.testing.assert_array_equal(weights.read(key), fp8_weight.astype(np.float32) * np.float32(0.01))
    np.testing.assert_allclose(weights.read(key), reference.read(key), atol=0.02)


class Shapes:
    """A reader with only the published shapes of a transformer, by the authors' names."""

    def __init__(self, config):
        shapes = transformer_keys(config).items()
        self.specs = {original.TRANSFORMER.to_authors(key): Spec(shape, np.dtype(np.float32)) for key, shape in shapes}

    def read(self, key):
        raise AssertionError(f"{key} is read, where its shape is enough")


SMALL, LARGE = (f"Wan-AI/Wan2.1-T2V-{size}-Diffusers" for size in ("1.3B", "14B"))
SPARSE = SparseLinearAttentionConfig()
TURBO = "TurboDiffusion/TurboWan2.1-T2V-{0}/TurboWan2.1-T2V-{0}.pth"


@pytest.mark.parametrize(
    ("config", "file", "published_name", "repository"),
    [
        (T2V_1_3B, "wan.safetensors", SMALL, SMALL),
        (T2V_14B, "wan.safetensors", LARGE, LARGE),
        (replace(T2V_1_3B, sparse_linear=SPARSE), "model.pth", TURBO.format("1.3B-480P"), SMALL),
        (replace(T2V_14B, sparse_linear=SPARSE), "model.pth", TURBO.format("14B-480P"), LARGE),
        (
            replace(T2V_14B, sparse_linear=SPARSE),
            "TurboWan2.1-T2V-14B-720P-quant.pth",
            TURBO.format("14B-720P"),
            LARGE,
        ),
    ],
)
def test_missing_components_come_from_the_published_model(
    config, file, published_name, repository, monkeypatch, diffusers
):
    monkeypatch.setattr(wan_layouts, "open_tensors", lambda path: Shapes(config))
    requested = []
    monkeypatch.setattr(checkpoint_layout, "folder_of", lambda name: requested.append(name) or (diffusers, None))
    source = wan_layouts.open_file(Path(file))
    assert source is not None
    assert (source.published_name, source.fallback_repo) == (published_name, repository)
    assert source["vae"].config() == tiny.VAE
    assert source["tokenizer"].files()[0].parent == diffusers / "tokenizer"
    assert requested == [repository]
    assert source["transformer"].config()["num_layers"] == config.layers


def test_a_file_of_one_of_two_experts_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(wan_layouts, "open_tensors", lambda path: Shapes(replace(I2V_A14B, sparse_linear=SPARSE)))
    path = tmp_path / EXPERTS[0][0]
    with pytest.raises(WanjaxError, match=line_with_words(f"{path.name} {EXPERTS[0][1]}")):
        wan_layouts.open_file(path)
    (tmp_path / EXPERTS[0][1]).touch()
    source = wan_layouts.open_file(path)
    assert source is not None
    repository = "TurboDiffusion/TurboWan2.2-I2V-A14B-720P"
    assert source.published_name == f"{repository}/{path.name}"
    assert source.fallback_repo == "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
    assert source.index["boundary_ratio"] == 0.9


def refusal(path):
    with pytest.raises(WanjaxError) as caught:
        open_source(path)["vae"].weights()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"), [("flux", "flux.safetensors transformer"), ("tiny", "tiny.safetensors vae transformer")]
)
def test_a_file_of_another_model_is_refused(tmp_path, diffusers, name, words):
    tensors = (
        authors_tensors(diffusers, "transformer")
        if name == "tiny"
        else {"double_blocks.0.weight": np.ones(2, np.float32)}
    )
    save_safetensors(tmp_path / f"{name}.safetensors", tensors)
    assert has_line_with_words(refusal(tmp_path / f"{name}.safetensors"), words)


def test_an_image_encoder_of_the_authors_equals_that_of_transformers(tmp_path):
    sizes = {"hidden_size": 160, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = CLIPVisionConfig(**sizes, image_size=28, patch_size=14, hidden_act="gelu", layer_norm_eps=1e-5)
    torch.manual_seed(0)
    reference = {key: value.detach().numpy() for key, value in CLIPVisionModel(config).state_dict().items()}
    reference = {
        "vision_model." + key.removeprefix("vision_model."): x for key, x in reference.items() if "ids" not in key
    }
    tensors = {original.IMAGE_ENCODER.to_authors(key): value for key, value in reference.items()}
    for i in range(3):
        for leaf in ("weight", "bias"):
            parts = [tensors.pop(f"visual.transformer.{i}.attn.to_{x}.{leaf}") for x in "qkv"]
            tensors[f"visual.transformer.{i}.attn.to_qkv.{leaf}"] = np.concatenate(parts)
    tensors["visual.cls_embedding"] = tensors["visual.cls_embedding"][None, None]
    tensors["visual.pos_embedding"] = tensors["visual.pos_embedding"][None]
    other_tensors = {"visual.head": np.ones((160, 8)), "textual.norm.weight": np.ones(4), "log_scale": np.ones(())}
    save_pth(tmp_path / "clip.pth", tensors | other_tensors)
    result = recognise.component("image_encoder", open_tensors(tmp_path / "clip.pth"))
    assert {key: getattr(config, key) for key in result.json if key != "architectures"} == {
        key: value for key, value in result.json.items() if key != "architectures"
    }
    assert set(result.weights.specs) == set(reference)
    for key, value in reference.items():
        assert result.weights.specs[key] == Spec(value.shape, value.dtype)
        np.testing.assert_array_equal(result.weights.read(key), value)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_gguf_file_is_read_as_the_same_transformer(prefix, diffusers, completed_from_diffusers, tmp_path):
    """Write it as ComfyUI-GGUF does: the authors' names, large kernels in Q8_0 and the rest in F32."""
    tensors, expected = {}, {}
    for key, x in authors_tensors(diffusers, "transformer").items():
        x = np.asarray(x, np.float32)
        quantised = x.ndim == 2 and x.shape[1] % 32 == 0 and "blocks." in key
        raw = quants.quantize(x, Kind.Q8_0) if quantised else x
        tensors[prefix + key] = (raw, Kind.Q8_0) if quantised else x
        expected[NAMES["transformer"].to_diffusers(key)] = quants.dequantize(raw, Kind.Q8_0) if quantised else x
    assert any(isinstance(x, tuple) for x in tensors.values())
    source = open_source(write_gguf(tmp_path / "wan-Q8_0.gguf", tensors))
    weights = source["transformer"].weights()
    assert weights.specs.keys() == expected.keys()
    for key, x in expected.items():
        np.testing.assert_array_equal(weights.read(key), x.reshape(weights.specs[key].shape))
