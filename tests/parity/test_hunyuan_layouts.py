# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo in the authors' layout and in single files, against the same weights in the layout of diffusers."""

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

from tests.parity import hunyuan_authors as authors
from tests.support.quick import quick
from tests.support.tiny import compile_cache, tiny_hunyuan_checkpoint
from tests.support.words import has_line_with_words
from wanjax import loading
from wanjax.checkpoints import layout as checkpoint_layout
from wanjax.checkpoints import sources
from wanjax.checkpoints.convert import ConversionToDiffusers, ConversionToWanjax
from wanjax.checkpoints.files import Spec, save_safetensors
from wanjax.checkpoints.modules import parameters
from wanjax.checkpoints.network_kinds import network
from wanjax.converters.t5 import t5_config
from wanjax.errors import WanjaxError
from wanjax.models.hunyuanvideo.config import FEW_STEPS_480P, SIZE_480P, SIZE_720P
from wanjax.models.t5 import GLYPH_BYT5
from wanjax.pipelines.hunyuanvideo import layouts as hunyuan_layouts
from wanjax.pipelines.hunyuanvideo import recognise
from wanjax.pipelines.hunyuanvideo.layouts import MODELS
from wanjax.pipelines.hunyuanvideo.networks import NETWORKS
from wanjax.pipelines.text.byt5 import ByT5Tokenizer as OurByT5
from wanjax.registry import open_source

QUOTED = 'a sign says "hello <color-2><cn-font-0>"'
VIDEO = {"size": (32, 48), "frames": 5, "steps": 2, "flow_shift": 9.0, "guidance_scale": 3.0}
WEIGHTS = "diffusion_pytorch_model.safetensors"
GLYPHS = "text_encoder/Glyph-SDXL-v2"


@pytest.fixture(scope="module", autouse=True)
def _compile_cache(tmp_path_factory):
    with compile_cache(tmp_path_factory.getbasetemp() / "xla"):
        yield


TASKS = ["text to video", "image to video"]


@pytest.fixture(scope="module", params=TASKS)
def pair(request, tmp_path_factory):
    return authors.write_both_layouts(tmp_path_factory.mktemp("pair"), pictured=request.param == "image to video")


@pytest.fixture(scope="module")
def text_pair(tmp_path_factory):
    return authors.write_both_layouts(tmp_path_factory.mktemp("text"))


@pytest.fixture
def folder(text_pair, tmp_path):
    """Return a copy of the authors' folder."""
    return Path(shutil.copytree(text_pair[1], tmp_path / "ckpts"))


def assert_same_weights(result, reference):
    assert result.specs == reference.specs
    for key in reference.specs:
        np.testing.assert_array_equal(result.read(key), reference.read(key))


def networks_of(source):
    names = ("text_encoder", "text_encoder_2", "image_encoder", "transformer", "vae")
    return [name for name in names if name in source.components]


def published_traits(source):
    """Return what distinguishes the published models from each other: pipeline, sampling and size."""
    starts_from_image = source.index["_class_name"] == "HunyuanVideo15ImageToVideoPipeline"
    sampling = source["scheduler"].config()["shift"], source["guider"].config()["guidance_scale"]
    return starts_from_image, *sampling, network(source, "transformer", NETWORKS).config.target_size


def traits_of(model):
    defaults, video_model = MODELS[model].defaults, MODELS[model].model
    shift = video_model.spec.schedule_options(defaults)["shift"]
    return video_model.starts_from_image, shift, defaults.guidance_scale, video_model.transformer.target_size


def refusal(path, call=open_source):
    with pytest.raises(WanjaxError) as caught:
        call(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_authors_folder_is_read_as_the_folder_of_diffusers(pair):
    source, reference = (open_source(folder) for folder in reversed(pair))
    assert source.index == reference.index
    assert source.missing_components == []
    for component in networks_of(reference):
        config, reference_config = (
            network(checkpoint, component, NETWORKS).config for checkpoint in (source, reference)
        )
        assert config == reference_config, component
    for component in ("transformer", "vae"):
        assert_same_weights(source[component].weights(), reference[component].weights())
    assert source["scheduler"].config() == {
        "_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 5.0,
    }  # fmt: skip
    assert source["guider"].config() == {"_class_name": "ClassifierFreeGuidance", "guidance_scale": 6.0}
    assert source.published_name == source.name  # no published model's
    assert source.root == pair[1]


@pytest.mark.slow  # a quick test above compares all weights and settings of both layouts
@pytest.mark.parametrize("pair", TASKS, indirect=True)
def test_both_layouts_have_the_same_parameters_and_latents(pair):
    """All is equal except the names of colours and fonts, which the small checkpoint of diffusers lacks."""
    image = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    results = []
    for folder in pair:
        pipe = loading.load(folder)
        image_options = {"image": image} if pipe.model.starts_from_image else {}
        encoded = pipe.encode('a cat that says "hello"', "a dog", **image_options, **VIDEO)
        latents = pipe.denoise(encoded, **VIDEO)
        weights = [parameters(getattr(pipe, name)) for name in networks_of(open_source(folder))]
        results.append((weights, encoded, latents))
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert np.isfinite(results[0][2]).all()


def test_the_glyph_tokenizer_equals_that_of_the_authors_script(folder):
    """The script adds colours first, then fonts, and transformers gives them their ids."""
    reference = ByT5Tokenizer()
    fonts = [f"<{font[:2]}-font-{i}>" for font, i in authors.FONTS.items()]
    reference.add_tokens([*(f"<color-{i}>" for i in range(3)), *fonts], special_tokens=True)
    texts = [QUOTED, "<kr-font-1><color-0> 你好 <color-3>", "</s> <pad>x <extra_id_7>"]

    def check(options: OurByT5):
        batch = options.tokenize(texts, 80)
        for text, ids, mask in zip(texts, batch.ids, batch.mask, strict=True):
            assert ids[mask].tolist() == reference(text)["input_ids"]

    pipe = loading.load(folder)
    check(pipe.tokenizer_2)
    assert pipe.tokenizer_2.vocab_size == len(reference) == 384 + 3 + 5
    ConversionToWanjax(open_source(folder), folder.parent / "wanjax", NETWORKS).run()
    check(loading.load(folder.parent / "wanjax").tokenizer_2)
    reference.save_pretrained(folder / "text_encoder/byt5-small")  # a tokenizer that has these tokens already
    [path] = open_source(folder)["tokenizer_2"].files()
    assert not path.exists()  # the source and its file are deleted
    check(loading.load(folder).tokenizer_2)


@pytest.mark.parametrize("layout", quick(["file"], ["folder", "file"]))
def test_a_converted_model_is_unchanged_when_converted_back(layout, text_pair, tmp_path, monkeypatch):
    reference, folder = text_pair
    monkeypatch.setattr(checkpoint_layout, "open_fallback", lambda *_: open_source(reference))
    name = folder
    if layout == "file":
        reference = tiny_hunyuan_checkpoint(tmp_path / "128", **WIDE_HEADS)
        name = tmp_path / "480p_t2v.safetensors"
        save_safetensors(name, authors.authors_transformer(authors.tensors_of(reference / "transformer")))
    converted, converted_back = tmp_path / "converted", tmp_path / "back"
    assert ConversionToWanjax(open_source(name), converted, NETWORKS).run()
    assert ConversionToDiffusers(open_source(converted), converted_back, NETWORKS).run()
    assert json.loads((converted_back / "guider/guider_config.json").read_text())["guidance_scale"] == 6.0
    for converted_folder in (converted, converted_back):
        result, expected = loading.load(converted_folder), loading.load(reference)
        for part in ("text_encoder", "text_encoder_2", "transformer", "vae"):
            jax.tree.map(
                np.testing.assert_array_equal, *(parameters(getattr(pipe, part)) for pipe in (result, expected))
            )
        np.testing.assert_array_equal(*(pipe.tokenizer.tokenize(["a cat"]).ids for pipe in (result, expected)))
    if layout == "folder":
        shared = T5EncoderModel.from_pretrained(converted_back / "text_encoder_2").state_dict()["shared.weight"]
        np.testing.assert_array_equal(shared, authors.tensors_of(reference / "text_encoder_2")["shared.weight"])


def test_one_of_several_transformers_is_chosen_by_its_folder(folder, text_pair):
    tensors = authors.tensors_of(text_pair[0] / "transformer")
    doubled = {key: 2 * x for key, x in tensors.items()}
    authors.add_transformer(folder, "720p_i2v_distilled", doubled)
    authors.add_transformer(folder, "480p_i2v_distilled_sparse", tensors, ideal_resolution="480p", ideal_task="i2v")
    authors.add_transformer(folder, "1080p_sr_distilled", tensors, ideal_task=None)
    messages = refusal(folder)
    assert has_line_with_words(messages, f"480p_t2v 720p_i2v_distilled {folder}/transformer/480p_t2v")
    assert "sparse" not in messages
    source = open_source(folder / "transformer/720p_i2v_distilled")
    assert source.root == folder
    assert source.index["_class_name"] == "HunyuanVideo15ImageToVideoPipeline"
    assert (source["scheduler"].config()["shift"], source["guider"].config()["guidance_scale"]) == (7.0, 1.0)
    assert network(source, "transformer", NETWORKS).config.target_size == 960
    assert source.missing_components == ["feature_extractor", "image_encoder"]
    np.testing.assert_array_equal(source["transformer"].weights().read("proj_out.bias"), doubled["proj_out.bias"])
    shutil.rmtree(folder / "transformer/480p_t2v")
    assert open_source(folder)["guider"].config()["guidance_scale"] == 1.0
    for name in ("480p_i2v_distilled_sparse", "1080p_sr_distilled"):
        assert has_line_with_words(refusal(folder / "transformer" / name), f"{name} 480p_t2v 480p_i2v")


def test_the_config_in_a_renamed_folder_determines_the_model(folder, monkeypatch):
    renamed = (folder / "transformer/480p_t2v").rename(folder / "transformer/mine")
    assert published_traits(open_source(folder)) == traits_of("480p_t2v")
    assert open_source(renamed).missing_components == []
    monkeypatch.chdir(renamed)
    assert open_source(".").root == folder
    authors.write_json(renamed / "config.json", authors.config(ideal_task="i2v", use_meanflow=True))
    assert published_traits(open_source(renamed)) == traits_of("480p_i2v_step_distilled")
    authors.write_json(renamed / "config.json", authors.config(ideal_task=None, ideal_resolution=None))
    assert has_line_with_words(refusal(renamed), "mine 480p_t2v")
    transformer_only = shutil.move(renamed, folder.parent / "alone")
    authors.write_json(transformer_only / "config.json", authors.config())
    assert set(open_source(transformer_only).missing_components) == {
        *MODELS["480p_t2v"].model.spec.networks,
        "tokenizer",
        "tokenizer_2",
    } - {"transformer"}


@pytest.mark.parametrize("part", ["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"])
def test_a_folder_of_only_a_transformer_lacks_the_other_components(folder, part):
    shutil.rmtree(folder / GLYPHS)
    shutil.rmtree(folder / "text_encoder/llm")
    assert part in open_source(folder).missing_components
    assert len(open_source(folder).missing_components) == 4
    assert has_line_with_words(refusal(folder, component(part)), f"{part} transformer")


def component(name):
    return lambda path: getattr(loading.load(path), name)


TRANSFORMER = "transformer/480p_t2v"


def configured(**entries):
    return lambda folder: authors.write_json(folder / TRANSFORMER / "config.json", authors.config(**entries))


def change_weights_by(change):
    def change_weights(folder):
        save_safetensors(folder / TRANSFORMER / WEIGHTS, change(authors.tensors_of(folder / TRANSFORMER)))

    return change_weights


def narrow_patches(weights):
    return weights | {"img_in.proj.weight": weights["img_in.proj.weight"][:, :7]}


def remove_glyphs(weights):
    return {key: x for key, x in weights.items() if "byt5_in" not in key}


def write_llama_config(folder):
    authors.write_json(folder / "text_encoder/llm/config.json", {"model_type": "llama", "hidden_size": 24})


BROKEN_FOLDERS = {  # by words of the message: what breaks the authors' folder, and the call that is refused
    "480p_t2v config.json 720p t2v": (configured(ideal_resolution="720p"), open_source),
    "rope_axes_dim [16, 56, 56] attention_head_dim 16": (configured(rope_dim_list=[16, 56, 56]), loading.load),
    "config.json rope_axes_dim": (configured(rope_dim_list=None), loading.load),
    "config.json rope_theta x": (configured(rope_theta="x"), loading.load),
    "VAE 4 channels transformer 9": (change_weights_by(narrow_patches), loading.load),
    "transformer byt5_in.fc1.weight": (change_weights_by(remove_glyphs), loading.load),
    "480p_t2v no weights": (lambda folder: (folder / TRANSFORMER / WEIGHTS).unlink(), loading.load),
    "no file byt5_model.pt": (
        lambda folder: (folder / GLYPHS / "checkpoints/byt5_model.pt").unlink(),
        component("text_encoder_2"),
    ),
    "model_type 'llama' 'qwen2_5_vl_text'": (write_llama_config, component("text_encoder")),
}


@pytest.mark.parametrize("words", BROKEN_FOLDERS)
def test_contradictory_or_missing_files_are_reported(folder, words):
    break_folder, call = BROKEN_FOLDERS[words]
    break_folder(folder)
    assert has_line_with_words(refusal(folder, call), words)


class Shapes:
    """Tensors with only names and shapes."""

    paths = ()

    def __init__(self, shapes):
        self.specs = {key: Spec(tuple(shape), np.dtype(np.float32)) for key, shape in shapes.items()}

    def read(self, key):
        raise AssertionError(f"{key} is read, where its shape is enough")


def test_older_and_newer_names_of_the_language_model_are_read():
    flat = {"model_type": "qwen2_5_vl", "hidden_size": 24, "rope_scaling": {"type": "mrope"}, "vision_config": {}}
    old_names = [
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ]
    new_names = [key.replace("model.", "model.language_model.") for key in old_names]
    for keys, of_vision in (
        (old_names, "visual.patch_embed.proj.weight"),
        (new_names, "model.visual.patch_embed.proj.weight"),
    ):
        result = recognise.language_model(Shapes(dict.fromkeys([*keys, of_vision], (2, 2))), flat)
        assert list(result.weights.specs) == ["layers.0.mlp.up_proj.weight", "norm.weight", "embed_tokens.weight"]
        assert result.json == {
            "model_type": "qwen2_5_vl_text", "hidden_size": 24, "rope_scaling": {"type": "mrope"},
            "architectures": ["Qwen2_5_VLTextModel"],
        }  # fmt: skip


@pytest.mark.parametrize("prefix", ["module.text_tower.encoder.", ""])
def test_the_published_glyph_encoder_is_recognised(prefix):
    config = T5Config(
        vocab_size=1510, d_model=1472, d_kv=64, d_ff=3584, num_layers=12, num_heads=6, feed_forward_proj="gated-gelu"
    )
    with torch.device("meta"):
        encoder = T5EncoderModel(config).encoder.state_dict()
    result = recognise.glyph_encoder(Shapes({prefix + key: x.shape for key, x in encoder.items()}))
    assert t5_config(result.json) == GLYPH_BYT5
    assert "shared.weight" in result.weights.specs


WIDE_HEADS = {"num_attention_heads": 1, "attention_head_dim": 128, "rope_axes_dim": [16, 56, 56], "target_size": 640}


@pytest.fixture(scope="module")
def wide_transformer(tmp_path_factory):
    """Return a transformer with the published size of a head, which a single file does not contain."""
    folder = tiny_hunyuan_checkpoint(tmp_path_factory.mktemp("wide"), **WIDE_HEADS)
    return open_source(folder)["transformer"].weights(), authors.tensors_of(folder / "transformer")


@pytest.mark.parametrize("names_of", ["authors", "ComfyUI", "diffusers"])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
def test_a_transformer_in_a_single_file_is_read_by_any_names(prefix, names_of, wide_transformer, tmp_path):
    reference, tensors = wide_transformer
    file_tensors = (
        tensors if names_of == "diffusers" else authors.authors_transformer(tensors, fused=names_of == "ComfyUI")
    )
    path = tmp_path / "hunyuanvideo1.5_720p_t2v_fp16.safetensors"
    save_safetensors(path, {prefix + key: x for key, x in file_tensors.items()})
    source = open_source(path)
    assert_same_weights(source["transformer"].weights(), reference)
    assert network(source, "transformer", NETWORKS).config.target_size == 960
    assert published_traits(source) == traits_of("720p_t2v")
    assert source.missing_components == ["text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae"]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("480p_i2v_distilled/diffusion_pytorch_model.safetensors", "480p_i2v_distilled"),
        ("hunyuanvideo1.5_480p_t2v_cfg_distilled_fp8_scaled.safetensors", "480p_t2v_distilled"),
        ("HunyuanVideo-1.5-720P-I2V.safetensors", "720p_i2v"),
        ("HunyuanVideo-1.5_T2V_480p.safetensors", "480p_t2v"),
        ("hy1.5_i2v_720p_fp8_lightx2v_4step.safetensors", "720p_i2v"),
        ("hunyuan_video_1.5_480_bf16.safetensors", "480p_t2v"),
        ("hunyuan_video_1.5_i2v_480_step_distilled_bf16.safetensors", "480p_i2v_step_distilled"),
        ("few steps.safetensors", "480p_i2v_step_distilled"),
    ],
)
def test_the_name_of_a_file_determines_its_model(name, model, wide_transformer, tmp_path):
    _, tensors = wide_transformer
    file_tensors = authors.authors_transformer(tensors)
    if model.endswith("step_distilled"):
        file_tensors |= {
            key.replace("time_in", "time_r_in"): x for key, x in file_tensors.items() if key.startswith("time_in.")
        }
    (tmp_path / name).parent.mkdir(exist_ok=True)
    save_safetensors(tmp_path / name, file_tensors)
    assert published_traits(open_source(tmp_path / name)) == traits_of(model)


def with_next_timestep(transformer, _):
    return transformer | {k.replace("time_in.", "time_r_in."): x for k, x in transformer.items() if "time_in." in k}


FILES = {  # by name: tensors, from those of a transformer and of an autoencoder; words of the message
    "mine": (lambda transformer, _: transformer, "mine.safetensors model"),
    "720p_sr_distilled": (with_next_timestep, "720p_sr_distilled"),
    "vae": (lambda _, autoencoder: autoencoder, "vae.safetensors transformer HunyuanVideo"),
    "480p_t2v": (  # of HunyuanVideo of 2024
        lambda *_: {"double_blocks.0.img_attn_qkv.weight": np.ones((6, 2), np.float32)},
        "480p_t2v.safetensors no transformer known",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_no_supported_model_is_refused(wide_transformer, text_pair, tmp_path, name):
    tensors, words = FILES[name]
    autoencoder = authors.tensors_of(text_pair[1] / "vae")
    save_safetensors(
        tmp_path / f"{name}.safetensors", tensors(authors.authors_transformer(wide_transformer[1]), autoencoder)
    )
    assert has_line_with_words(refusal(tmp_path / f"{name}.safetensors"), words)


def test_a_file_may_contain_the_autoencoder_too(wide_transformer, text_pair, tmp_path):
    transformer = authors.authors_transformer(wide_transformer[1], fused=True)
    tensors = {f"model.diffusion_model.{key}": x for key, x in transformer.items()}
    tensors |= {f"vae.{key}": x for key, x in authors.tensors_of(text_pair[1] / "vae").items()}
    save_safetensors(tmp_path / "480p_t2v.safetensors", tensors)
    source = open_source(tmp_path / "480p_t2v.safetensors")
    assert_same_weights(source["transformer"].weights(), wide_transformer[0])
    assert_same_weights(source["vae"].weights(), open_source(text_pair[0])["vae"].weights())
    assert "vae" not in source.missing_components


def test_scaled_fp8_weights_are_multiplied_by_their_scales(wide_transformer, tmp_path):
    tensors, scaled = authors.authors_transformer(wide_transformer[1], fused=True), "double_blocks.1.img_attn_qkv"
    fp8_weight = (tensors[f"{scaled}.weight"] * 100).astype(ml_dtypes.float8_e4m3fn)
    tensors |= {
        f"{scaled}.weight": fp8_weight,
        f"{scaled}.scale_weight": np.array(0.01, np.float32),
        "scaled_fp8": np.zeros(2, ml_dtypes.float8_e4m3fn),
    }
    save_safetensors(tmp_path / "480p_t2v.safetensors", tensors)
    weights, key = (
        open_source(tmp_path / "480p_t2v.safetensors")["transformer"].weights(),
        "transformer_blocks.1.attn.to_k",
    )
    expected = np.split(fp8_weight.astype(np.float32) * np.float32(0.01), 3)[1]
    np.testing.assert_array_equal(weights.read(f"{key}.weight"), expected)
    assert weights.specs.keys() == wide_transformer[0].specs.keys()


@pytest.mark.parametrize(
    ("model", "config"),
    [("480p_t2v", SIZE_480P), ("720p_i2v", SIZE_720P), ("480p_i2v_step_distilled", FEW_STEPS_480P)],
)
def test_missing_components_come_from_the_published_model(model, config, monkeypatch, text_pair):
    with torch.device("meta"):
        tensors = HunyuanVideo15Transformer3DModel(use_meanflow=config.uses_meanflow).state_dict()
    query_weights = {
        key: torch.Size((3 * x.shape[0], *x.shape[1:])) for key, x in tensors.items() if ".attn.to_q." in key
    }
    shapes = {
        key: x.shape for key, x in tensors.items() if "refiner" not in key or ".attn.to_" not in key or "out" in key
    }
    file_shapes = {authors.transformer_name(key): shape for key, shape in shapes.items()}
    refiner_shapes = {
        key.replace(".attn.to_q.", ".self_attn_qkv."): x for key, x in query_weights.items() if "refiner" in key
    }
    file_shapes |= {authors.transformer_name(key): shape for key, shape in refiner_shapes.items()}
    monkeypatch.setattr(hunyuan_layouts, "open_tensors", lambda path: Shapes(file_shapes))
    requested = []
    monkeypatch.setattr(checkpoint_layout, "folder_of", lambda name: requested.append(name) or (text_pair[0], None))
    source = hunyuan_layouts.open_file(Path(f"{model}.safetensors"))
    assert source is not None
    assert network(source, "transformer", NETWORKS).config == config
    assert set(source["transformer"].weights().specs) == set(tensors)
    assert source.published_name == f"hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-{model}"
    assert source["vae"].config()["latent_channels"] == 4
    assert source["tokenizer"].files()[0].parent == text_pair[0] / "tokenizer"
    assert requested == [source.published_name]


def test_only_the_needed_folders_are_downloaded(folder, text_pair, tmp_path, monkeypatch):
    """Small files determine the layout; the folders of components are downloaded when they are needed."""
    snapshot, requested = tmp_path / "snapshots/0123", []
    reference = open_source(text_pair[0])

    def copy(patterns):
        for path in [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]:
            (snapshot / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, snapshot / path.relative_to(folder))
        return snapshot

    def download(name, patterns, revision):
        requested.extend(patterns)
        return copy(patterns)

    monkeypatch.setattr(sources, "locate", lambda name, revision, markers: copy(markers))
    monkeypatch.setattr(sources, "download", download)
    source = open_source("owner/name")
    assert source.revision == "0123"
    assert_same_weights(source["transformer"].weights(), reference["transformer"].weights())
    assert requested == ["transformer/480p_t2v/*"]
    assert_same_weights(source["vae"].weights(), reference["vae"].weights())
    assert requested[1:] == ["vae/*"]
    assert source.missing_components == []
    authors.add_transformer(folder, "480p_i2v", authors.tensors_of(text_pair[0] / "transformer"))
    assert refusal("owner/name").endswith(f"such as owner/name/transformer/480p_i2v/{WEIGHTS}")
