# SPDX-License-Identifier: Apache-2.0
"""Copies of the published repositories in the hub's cache: real configs, names, shapes and dtypes, but no weights.

A safetensors file has a header and a hole as long as the published data; torch writes other files without data. Names
and shapes of Wan come from tests/support/published.py, and those of other models from the class in diffusers or
transformers that writes the file.
"""

import hashlib
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers

from tests.parity import hunyuan_authors
from tests.support import published_configs as configs
from tests.support.published import (
    TensorShapes,
    animate_keys,
    authors_image_encoder_file,
    hollow_file,
    image_encoder_file,
    pose_keys,
    text_encoder_keys,
    transformer_keys,
    vae_keys,
)
from wanjax.converters.wan import original
from wanjax.models import clip, t5
from wanjax.models.wan import config as wan
from wanjax.registry import presets

Config = configs.Config
WEIGHTS = "diffusion_pytorch_model"
WAN, COGVIDEOX, HUNYUAN = "Wan-AI", "zai-org", "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers"
_SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
TOKENIZERS = {  # the files of a tokenizer; CogVideoX's has only a SentencePiece model
    "T5TokenizerFast": (*_SETTINGS, "spiece.model", "tokenizer.json"),
    "T5Tokenizer": (*_SETTINGS, "added_tokens.json", "spiece.model"),
    "Qwen2TokenizerFast": (*_SETTINGS, "added_tokens.json", "merges.txt", "tokenizer.json", "vocab.json"),
    "ByT5Tokenizer": (*_SETTINGS, "added_tokens.json"),
}
LORA_PAIRS = re.compile(r"blocks\.\d+\.(self_attn\.[qkvo]|cross_attn\.([qkvo]|k_img|v_img)|ffn\.[02])\.weight")


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def hollow_files(folder: Path, keys: TensorShapes, dtype: str = "BF16", *, shards: int, stem: str = WEIGHTS) -> None:
    """Write a component in shards, with the index of the shards."""
    names, file_of_tensor = list(keys), {}
    for i in range(shards):
        file = f"{stem}-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        hollow_file(folder / file, {name: keys[name] for name in part}, dtype)
        file_of_tensor |= dict.fromkeys(part, file)
    write_json(folder / f"{stem}.safetensors.index.json", {"metadata": {"total_size": 1}, "weight_map": file_of_tensor})


def write_torch(path: Path, keys: TensorShapes, dtype: torch.dtype, table: str | None = None) -> None:
    """Write a torch file without data; with `table`, the tensors are in a dictionary of this name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.serialization.skip_data():
        tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in keys.items()}
        torch.save({table: tensors} if table else tensors, path)


@cache
def _tensors_of_class(kind: str, entries: str) -> TensorShapes:
    options = {key: value for key, value in json.loads(entries).items() if key[0] != "_"}
    module: Any
    with torch.device("meta"):
        if hasattr(diffusers, kind):
            module = getattr(diffusers, kind).from_config(options)
        else:
            library = getattr(transformers, kind)
            module = library(library.config_class(**options))
    return {name: tuple(x.shape) for name, x in module.state_dict().items()}


def tensors_of_class(kind: str, config: Config) -> TensorShapes:
    """Return the names and shapes of the tensors that a class of diffusers or transformers writes."""
    return dict(_tensors_of_class(kind, json.dumps(config)))


def shapes_by_original_names(keys: TensorShapes, prefix: str = "", *, flat: bool = False) -> TensorShapes:
    """Return the shapes of Wan's transformer by the authors' names; with `flat`, a linear layer makes the patches."""
    renamed = {prefix + str(original.TRANSFORMER.to_authors(name)): shape for name, shape in keys.items()}
    if flat:
        width, channels, *_ = renamed[f"{prefix}patch_embedding.weight"]
        renamed[f"{prefix}patch_embedding.weight"] = (width, 4 * channels)
    return renamed


def make_repository(hub: Path, name: str) -> Path:
    """Make an empty repository in the hub's cache, and return the folder of its files."""
    commit = hashlib.sha1(name.encode()).hexdigest()
    folder = hub / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(commit)
    files = folder / "snapshots" / commit
    files.mkdir(parents=True)
    return files


def _tokenizer(folder: Path, kind: str) -> None:
    """Write the files of a tokenizer, without its vocabulary."""
    for name in TOKENIZERS[kind]:
        write_json(folder / name, {"tokenizer_class": kind, "extra_ids": 0} if name == "tokenizer_config.json" else {})


def _wan(
    files: Path,
    pipeline: str,
    config: Config,
    keys: TensorShapes,
    *,
    vae: tuple[Config, wan.VAEConfig] = (configs.WAN_VAE, wan.VAE_2_1),
    pictured: bool = False,
    has_experts: bool = False,
    scheduler: Config = configs.UNIPC,
    embedded: bool = False,
    dtype: str = "F32",
    **entries: Any,
) -> None:
    """Write a repository of Wan in the layout of diffusers.

    `entries` are entries of its index besides the components. With `embedded`, the file of the text encoder has the
    tied embedding twice.
    """
    index = {"_class_name": pipeline, "_diffusers_version": "0.35.0.dev0"} | configs.WAN_CLASSES
    index |= {
        "scheduler": ["diffusers", scheduler["_class_name"]], "transformer": ["diffusers", config["_class_name"]],
    }  # fmt: skip
    if has_experts:
        index["transformer_2"] = index["transformer"]
    if pictured:
        index |= configs.WAN_IMAGE_CLASSES
        write_json(files / "image_encoder/config.json", configs.CLIP_VIT_H)
        hollow_file(files / "image_encoder/model.safetensors", image_encoder_file(clip.CLIP_VIT_H))
        write_json(files / "image_processor/preprocessor_config.json", configs.CLIP_PROCESSOR)
    write_json(files / "model_index.json", index | entries)
    write_json(files / "scheduler/scheduler_config.json", scheduler)
    write_json(files / "vae/config.json", vae[0])
    hollow_file(files / f"vae/{WEIGHTS}.safetensors", vae_keys(vae[1]), "F32")
    text = text_encoder_keys(t5.UMT5_XXL)
    duplicate = {"encoder.embed_tokens.weight": text["shared.weight"]} if embedded else {}
    write_json(files / "text_encoder/config.json", configs.UMT5_XXL)
    hollow_files(files / "text_encoder", text | duplicate, "F32", shards=5, stem="model")
    _tokenizer(files / "tokenizer", "T5TokenizerFast")
    for name in ("transformer", "transformer_2")[: 1 + has_experts]:
        write_json(files / name / "config.json", config)
        hollow_files(files / name, keys, dtype, shards=6)


def _gates(config: wan.TransformerConfig) -> TensorShapes:
    """Return the gates of video sparse attention in FastWan's files."""
    keys: TensorShapes = {}
    for name in (f"blocks.{i}.to_gate_compress" for i in range(config.layers)):
        keys |= {f"{name}.weight": (config.width, config.width), f"{name}.bias": (config.width,)}
    return keys


def _cogvideox(files: Path, pipeline: str, config: Config, vae: Config, scheduler: Config) -> None:
    index = {"_class_name": pipeline, "_diffusers_version": "0.31.0.dev0"} | configs.COGVIDEOX_CLASSES
    write_json(files / "model_index.json", index)
    write_json(files / "scheduler/scheduler_config.json", scheduler)
    write_json(files / "transformer/config.json", config)
    hollow_files(files / "transformer", tensors_of_class("CogVideoXTransformer3DModel", config), shards=2)
    write_json(files / "vae/config.json", vae)
    hollow_file(files / f"vae/{WEIGHTS}.safetensors", tensors_of_class("AutoencoderKLCogVideoX", vae))
    text = tensors_of_class("T5EncoderModel", configs.T5_XXL)
    del text["encoder.embed_tokens.weight"]
    write_json(files / "text_encoder/config.json", configs.T5_XXL)
    hollow_files(files / "text_encoder", text, shards=2, stem="model")
    _tokenizer(files / "tokenizer", "T5Tokenizer")


HUNYUAN_SHIFTS = {
    "480p_t2v": 5.0, "480p_i2v": 5.0, "720p_t2v": 9.0, "720p_i2v": 7.0, "480p_t2v_distilled": 5.0,
    "480p_i2v_distilled": 5.0, "720p_i2v_distilled": 7.0, "480p_i2v_step_distilled": 7.0,
}  # fmt: skip


def hunyuan_config(name: str) -> Config:
    """Return the transformer's config.json of a model of HunyuanVideo, in the layout of diffusers."""
    size = configs.HUNYUAN_480P if "480p" in name else configs.HUNYUAN_720P
    return size | {"task_type": "i2v" if "i2v" in name else "t2v", "use_meanflow": "step" in name}


def _hunyuan(files: Path, name: str) -> None:
    pictured, guidance = "i2v" in name, 1.0 if "distilled" in name else 6.0
    pipeline = "HunyuanVideo15ImageToVideoPipeline" if pictured else "HunyuanVideo15Pipeline"
    index = {"_class_name": pipeline, "_diffusers_version": "0.36.0.dev0"} | configs.HUNYUAN_CLASSES
    write_json(files / "model_index.json", index | (configs.HUNYUAN_IMAGE_CLASSES if pictured else {}))
    write_json(files / "scheduler/scheduler_config.json", configs.HUNYUAN_EULER | {"shift": HUNYUAN_SHIFTS[name]})
    write_json(files / "guider/guider_config.json", configs.HUNYUAN_GUIDER | {"guidance_scale": guidance})
    write_json(files / "transformer/config.json", hunyuan_config(name))
    transformer = tensors_of_class("HunyuanVideo15Transformer3DModel", hunyuan_config(name))
    hollow_files(files / "transformer", transformer, shards=4)
    write_json(files / "vae/config.json", configs.HUNYUAN_VAE)
    vae = tensors_of_class("AutoencoderKLHunyuanVideo15", configs.HUNYUAN_VAE)
    hollow_file(files / f"vae/{WEIGHTS}.safetensors", vae, "F32")
    write_json(files / "text_encoder/config.json", configs.QWEN2_5_VL_TEXT)
    text = tensors_of_class("Qwen2_5_VLTextModel", configs.QWEN2_5_VL_TEXT)
    hollow_files(files / "text_encoder", text, shards=4, stem="model")
    glyphs = tensors_of_class("T5EncoderModel", configs.GLYPH_BYT5)
    del glyphs["encoder.embed_tokens.weight"]
    write_json(files / "text_encoder_2/config.json", configs.GLYPH_BYT5)
    hollow_file(files / "text_encoder_2/model.safetensors", glyphs, "F32")
    _tokenizer(files / "tokenizer", "Qwen2TokenizerFast")
    _tokenizer(files / "tokenizer_2", "ByT5Tokenizer")
    if pictured:
        write_json(files / "image_encoder/config.json", configs.SIGLIP_SO400M)
        hollow_file(files / "image_encoder/model.safetensors", siglip_file())
        write_json(files / "feature_extractor/preprocessor_config.json", configs.SIGLIP_PROCESSOR)


def siglip_file() -> TensorShapes:
    """Return the names in SigLIP's published file; newer releases of transformers write no prefix."""
    tensors = tensors_of_class("SiglipVisionModel", configs.SIGLIP_SO400M)
    return {f"vision_model.{name.removeprefix('vision_model.')}": shape for name, shape in tensors.items()}


def hunyuan_authors_transformer(name: str) -> TensorShapes:
    """Return the shapes of a transformer of HunyuanVideo by the names in its authors' files."""
    shapes = tensors_of_class("HunyuanVideo15Transformer3DModel", hunyuan_config(name))
    tensors = {key: np.broadcast_to(np.int8(0), shape) for key, shape in shapes.items()}
    return {key: x.shape for key, x in hunyuan_authors.authors_transformer(tensors).items()}


def _lora(config: wan.TransformerConfig, *, complete: bool, rank: int = 64) -> tuple[TensorShapes, dict[str, str]]:
    """Return the tensors of LightX2V's LoRA, and their dtypes.

    A `complete` LoRA changes every tensor; vectors have differences instead of factors. Other LoRAs have alphas.
    """
    keys, dtypes = TensorShapes(), dict[str, str]()
    for name, shape in shapes_by_original_names(transformer_keys(config)).items():
        module, _, leaf = name.rpartition(".")
        module = f"diffusion_model.{module}"
        if LORA_PAIRS.fullmatch(name) or (complete and leaf == "weight" and len(shape) == 2):
            keys |= {f"{module}.lora_down.weight": (rank, shape[1]), f"{module}.lora_up.weight": (shape[0], rank)}
            if not complete:
                keys[f"{module}.alpha"] = ()
                dtypes[f"{module}.alpha"] = "I64"
        elif complete:
            keys[module + {"bias": ".diff_b", "modulation": ".diff_m"}.get(leaf, ".diff")] = shape
    return keys, dtypes


def _lightning(file: Path, config: wan.TransformerConfig) -> None:
    keys, dtypes = _lora(config, complete=False)
    for noise in ("high", "low"):
        hollow_file(file / f"{noise}_noise_model.safetensors", keys, dtypes=dtypes)


def _turbo(files: Path, config: wan.TransformerConfig) -> None:
    """Write a repository of TurboWan: one file, or a file for each of two experts."""
    keys = transformer_keys(config)
    for block in range(config.layers):  # trained with sparse-linear attention
        keys |= {f"blocks.{block}.attn1.proj_l.weight": (128, 128), f"blocks.{block}.attn1.proj_l.bias": (128,)}
    name = files.parents[1].name.removeprefix("models--TurboDiffusion--")
    for expert in ("high-", "low-") if "A14B" in name else ("",):
        write_torch(
            files / f"{name.replace('720P', expert + '720P')}.pth",
            shapes_by_original_names(keys, flat=True),
            torch.bfloat16,
        )


def _rcm(files: Path) -> None:
    for size, config in (("1.3B_480p", wan.T2V_1_3B), ("14B_480p", wan.T2V_14B), ("14B_720p", wan.T2V_14B)):
        keys = shapes_by_original_names(transformer_keys(config), "net.", flat=True)
        write_torch(files / f"rCM_Wan2.1_T2V_{size}.pt", keys, torch.bfloat16)
    keys = shapes_by_original_names(transformer_keys(wan.I2V_A14B), "net.", flat=True)
    for expert in ("high-rCM4.0", "low-rCM1.0"):
        write_torch(files / f"Wan2.2-I2V-A14B-{expert}-merged.pt", keys, torch.bfloat16)


def _causvid(files: Path) -> None:
    keys = shapes_by_original_names(transformer_keys(wan.T2V_1_3B), "model.")
    write_torch(files / "bidirectional_checkpoint2/model.pt", keys, torch.float32, table="generator")


HUNYUAN_ONLY_AUTHORS = ("720p_t2v_distilled", "720p_t2v_distilled_sparse", "720p_i2v_distilled_sparse")
"""The transformers of HunyuanVideo that are published only in the authors' layout."""


def _tencent(files: Path) -> None:
    for name in HUNYUAN_ONLY_AUTHORS:
        hunyuan_transformer(files, name)


def hunyuan_transformer(root: Path, name: str) -> Path:
    """Write a transformer of HunyuanVideo in its authors' layout, and return its folder."""
    resolution, task = name.split("_")[:2]
    config = configs.AUTHORS_HUNYUAN | {"ideal_resolution": resolution, "ideal_task": task}
    if "sparse" in name:
        config |= {"attn_mode": "flex-block-attn", "attn_param": {"win_size": [[3, 3, 3]], "attn_sparse_type": "ssta"}}
    keys = hunyuan_authors_transformer(name)
    if "_sr_" in name:
        keys["img_in.proj.weight"] = (2048, 98, 1, 1, 1)
    write_json(root / "transformer" / name / "config.json", config | {"use_meanflow": "step" in name})
    hollow_file(root / f"transformer/{name}/{WEIGHTS}.safetensors", keys, "F32")
    return root / "transformer" / name


def hunyuan_authors_folder(root: Path, name: str) -> Path:
    """Write the folder of HunyuanVideo's authors, with one transformer, as in their checkpoints-download.md."""
    hunyuan_transformer(root, name)
    write_json(root / "config.json", {"_class_name": "HunyuanVideo_1_5_Pipeline", "vision_states_dim": 1152})
    vae = tensors_of_class("AutoencoderKLHunyuanVideo15", configs.HUNYUAN_VAE)
    vae_tensors = {hunyuan_authors.rename_key(key, hunyuan_authors.VAE_RENAMES): shape for key, shape in vae.items()}
    write_json(root / "vae/config.json", configs.AUTHORS_HUNYUAN_VAE)
    hollow_file(root / f"vae/{WEIGHTS}.safetensors", vae_tensors, "F32")
    encoders, vision = root / "text_encoder", root / "vision_encoder/siglip"
    write_json(encoders / "llm/config.json", configs.QWEN2_5_VL)
    hollow_files(encoders / "llm", qwen_file(), shards=5, stem="model")
    _tokenizer(encoders / "llm", "Qwen2TokenizerFast")
    glyphs = tensors_of_class("T5EncoderModel", configs.GLYPH_BYT5)
    del glyphs["shared.weight"]
    encoder_tensors = {f"module.text_tower.{key}": shape for key, shape in glyphs.items()} | {"module.logit_scale": ()}
    write_torch(
        encoders / "Glyph-SDXL-v2/checkpoints/byt5_model.pt", encoder_tensors, torch.float32, table="state_dict"
    )
    write_json(encoders / "Glyph-SDXL-v2/assets/color_idx.json", {"white": 0, "black": 1})
    write_json(encoders / "Glyph-SDXL-v2/assets/multilingual_10-lang_idx.json", {"en-A": 0, "cn-B": 0})
    _tokenizer(encoders / "byt5-small", "ByT5Tokenizer")
    write_json(vision / "image_encoder/config.json", configs.SIGLIP_SO400M)
    hollow_file(vision / "image_encoder/model.safetensors", siglip_file())
    write_json(vision / "feature_extractor/preprocessor_config.json", configs.SIGLIP_PROCESSOR)
    return root


def qwen_file() -> TensorShapes:
    """Return the names in Qwen2.5-VL's published file; newer releases of transformers write other names."""
    text = {key: shape for key, shape in tensors_of_class("Qwen2_5_VLTextModel", configs.QWEN2_5_VL_TEXT).items()}
    tensors = {f"model.{key}": shape for key, shape in text.items()} | {"lm_head.weight": (152064, 3584)}
    vision = configs.QWEN2_5_VL["vision_config"]
    tensors_of_model = tensors_of_class(
        "Qwen2_5_VLForConditionalGeneration", {"vision_config": vision, "text_config": {"num_hidden_layers": 1}}
    )
    visual = {
        key.removeprefix("model."): shape for key, shape in tensors_of_model.items() if key.startswith("model.visual.")
    }
    return tensors | visual


_I2V, _T2V = "WanImageToVideoPipeline", "WanPipeline"
_WIDE: Any = (configs.WAN_2_2_VAE, wan.VAE_2_2)
_NONE = [None, None]


def _lightx2v(files: Path) -> None:
    for name, config in (("t2v_14b", wan.T2V_14B), ("i2v", wan.I2V_14B)):
        hollow_file(files / f"wan2.1_{name}_lora_rank64_lightx2v_4step.safetensors", _lora(config, complete=True)[0])


def _lightx2v_experts(files: Path) -> None:
    for noise in ("high", "low"):
        name = f"wan2.2_t2v_A14b_{noise}_noise_lora_rank64_lightx2v_4step_1217"
        hollow_file(files / f"{name}.safetensors", _lora(wan.T2V_14B, complete=True)[0])


def _lightx2v_models(files: Path) -> None:
    for noise in ("high", "low"):
        name = f"wan2.2_i2v_A14b_{noise}_noise_lightx2v_4step_720p_260412"
        hollow_file(files / f"{name}.safetensors", shapes_by_original_names(transformer_keys(wan.I2V_A14B)))


def _kijai(files: Path) -> None:
    file = files / "Wan21_CausVid_14B_T2V_lora_rank32.safetensors"
    hollow_file(file, _lora(wan.T2V_14B, complete=True, rank=32)[0])


PLUGS = {  # repository: the file, its network, prefix, rank and dtype
    "Wan2.1-T2V-14B-few-step": ("generator_lora_lightx2v", wan.T2V_14B, "", 128, "BF16"),
    "Wan2.1-T2V-14B-cfg": ("adapter_model", wan.T2V_14B, "base_model.model.", 128, "F32"),
    "Wan2.2-TI2V-5B-few-step": ("adapter_model", wan.TI2V_5B, "base_model.model.", 128, "F32"),
    "Wan2.2-TI2V-5B-cfg": ("adapter_model", wan.TI2V_5B, "base_model.model.", 64, "F32"),
}


def _plug(files: Path, name: str) -> None:
    """Write a LoRA of LongLive-Plug: the authors' names, with or without PEFT's prefix; alpha equals the rank."""
    stem, config, prefix, rank, dtype = PLUGS[name]
    keys = TensorShapes()
    for key, shape in shapes_by_original_names(transformer_keys(config)).items():
        if LORA_PAIRS.fullmatch(key):
            module = prefix + key.removesuffix(".weight")
            keys |= {f"{module}.lora_A.weight": (rank, shape[1]), f"{module}.lora_B.weight": (shape[0], rank)}
    hollow_file(files / f"{stem}.safetensors", keys, dtype)
    if stem == "adapter_model":
        write_json(files / "adapter_config.json", {"peft_type": "LORA", "r": rank, "lora_alpha": rank})


REPOSITORIES: dict[str, Callable[[Path], None]] = {
    f"{WAN}/Wan2.1-T2V-1.3B-Diffusers": lambda files: _wan(
        files, _T2V, configs.WAN_1_3B, transformer_keys(wan.T2V_1_3B), embedded=True
    ),
    f"{WAN}/Wan2.1-T2V-14B-Diffusers": lambda files: _wan(
        files, _T2V, configs.WAN_14B, transformer_keys(wan.T2V_14B), scheduler=configs.UNIPC | {"flow_shift": 5.0}
    ),
    f"{WAN}/Wan2.1-I2V-14B-480P-Diffusers": lambda files: _wan(
        files, _I2V, configs.WAN_I2V_14B, transformer_keys(wan.I2V_14B), pictured=True
    ),
    f"{WAN}/Wan2.1-I2V-14B-720P-Diffusers": lambda files: _wan(
        *(files, _I2V, configs.WAN_I2V_14B, transformer_keys(wan.I2V_14B)),
        **{"pictured": True, "scheduler": configs.UNIPC | {"flow_shift": 5.0}},
    ),
    f"{WAN}/Wan2.1-FLF2V-14B-720P-diffusers": lambda files: _wan(
        *(files, _I2V, configs.WAN_FLF2V_14B, transformer_keys(wan.FLF2V_14B)),
        **{"pictured": True, "scheduler": configs.UNIPC | {"flow_shift": 16.0}},
    ),
    f"{WAN}/Wan2.2-Animate-2-14B-Diffusers": lambda files: _wan(
        *(files, "WanAnimate2Pipeline", configs.WAN_ANIMATE_2, animate_keys(wan.I2V_14B)),
        **{"pictured": True, "scheduler": configs.FLOW_DPM, "dtype": "BF16"},
    ),
    f"{WAN}/Wan2.2-Animate-2-14B-Distilled-Diffusers": lambda files: _wan(
        *(files, "WanAnimate2Pipeline", configs.WAN_ANIMATE_2, animate_keys(wan.I2V_14B)),
        **{"pictured": True, "scheduler": configs.FLOW_EULER, "dtype": "BF16"},
    ),
    f"{WAN}/Wan2.2-Animate-14B-Diffusers": lambda files: _wan(
        *(files, "WanAnimatePipeline", configs.WAN_ANIMATE, pose_keys(wan.POSE_14B)),
        **{"pictured": True, "scheduler": configs.UNIPC | {"flow_shift": 5.0}, "dtype": "BF16"},
    ),
    f"{WAN}/Wan2.1-VACE-1.3B-diffusers": lambda files: _wan(
        files, "WanVACEPipeline", configs.WAN_VACE_1_3B, transformer_keys(wan.VACE_1_3B)
    ),
    f"{WAN}/Wan2.1-VACE-14B-diffusers": lambda files: _wan(
        files, "WanVACEPipeline", configs.WAN_VACE_14B, transformer_keys(wan.VACE_14B), dtype="BF16"
    ),
    f"{WAN}/Wan2.2-T2V-A14B-Diffusers": lambda files: _wan(
        files, _T2V, configs.WAN_2_2_T2V, transformer_keys(wan.T2V_14B), has_experts=True, boundary_ratio=0.875
    ),
    f"{WAN}/Wan2.2-I2V-A14B-Diffusers": lambda files: _wan(
        *(files, _I2V, configs.WAN_2_2_I2V, transformer_keys(wan.I2V_A14B)),
        **{"has_experts": True, "boundary_ratio": 0.9, "image_encoder": _NONE, "image_processor": _NONE},
    ),
    f"{WAN}/Wan2.2-TI2V-5B-Diffusers": lambda files: _wan(
        *(files, _T2V, configs.WAN_2_2_5B, transformer_keys(wan.TI2V_5B)),
        **{"vae": _WIDE, "boundary_ratio": None, "expand_timesteps": True, "transformer_2": _NONE},
    ),
    "FastVideo/FastWan2.1-T2V-1.3B-Diffusers": lambda files: _wan(
        files, "WanDMDPipeline", configs.WAN_1_3B, transformer_keys(wan.T2V_1_3B) | _gates(wan.T2V_1_3B)
    ),
    "FastVideo/FastWan2.2-TI2V-5B-FullAttn-Diffusers": lambda files: _wan(
        *(files, "WanDMDPipeline", configs.WAN_2_2_5B, transformer_keys(wan.TI2V_5B)),
        **{"vae": _WIDE, "expand_timesteps": True},
    ),
    "wlsaidhi/SFWan2.1-T2V-1.3B-Diffusers": lambda files: _wan(
        *(files, "WanCausalDMDPipeline", configs.WAN_CAUSAL_1_3B, transformer_keys(wan.T2V_1_3B)),
        scheduler=configs.SELF_FORCING,
    ),
    "lightx2v/Wan2.1-Distill-Loras": _lightx2v,
    "lightx2v/Wan2.2-Distill-Loras": _lightx2v_experts,
    "lightx2v/Wan2.2-Distill-Models": _lightx2v_models,
    "Kijai/WanVideo_comfy": _kijai,
    **{f"Efficient-Large-Model/LongLive-Plug-{name}": lambda files, name=name: _plug(files, name) for name in PLUGS},
    "lightx2v/Wan2.2-Lightning": lambda files: (
        _lightning(files / "Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V1.1", wan.T2V_14B),
        _lightning(files / "Wan2.2-I2V-A14B-4steps-lora-rank64-Seko-V1", wan.I2V_A14B),
    )[0],
    "worstcoder/rcm-Wan": _rcm,
    "tianweiy/CausVid": _causvid,
    "TurboDiffusion/TurboWan2.1-T2V-1.3B-480P": lambda files: _turbo(files, wan.T2V_1_3B),
    "TurboDiffusion/TurboWan2.1-T2V-14B-480P": lambda files: _turbo(files, wan.T2V_14B),
    "TurboDiffusion/TurboWan2.1-T2V-14B-720P": lambda files: _turbo(files, wan.T2V_14B),
    "TurboDiffusion/TurboWan2.2-I2V-A14B-720P": lambda files: _turbo(files, wan.I2V_A14B),
    f"{COGVIDEOX}/CogVideoX-2b": lambda files: _cogvideox(
        *(files, "CogVideoXPipeline", configs.COGVIDEOX_2B),
        *(configs.COGVIDEOX_2B_VAE, configs.COGVIDEOX_2B_DDIM),
    ),
    f"{COGVIDEOX}/CogVideoX-5b": lambda files: _cogvideox(
        *(files, "CogVideoXPipeline", configs.COGVIDEOX_5B, configs.COGVIDEOX_VAE, configs.COGVIDEOX_DDIM)
    ),
    f"{COGVIDEOX}/CogVideoX-5b-I2V": lambda files: _cogvideox(
        *(files, "CogVideoXImageToVideoPipeline", configs.COGVIDEOX_5B_I2V),
        *(configs.COGVIDEOX_VAE, configs.COGVIDEOX_DDIM),
    ),
    f"{COGVIDEOX}/CogVideoX1.5-5B": lambda files: _cogvideox(
        *(files, "CogVideoXPipeline", configs.COGVIDEOX_1_5_5B),
        *(configs.COGVIDEOX_1_5_VAE, configs.COGVIDEOX_DDIM),
    ),
    f"{COGVIDEOX}/CogVideoX1.5-5B-I2V": lambda files: _cogvideox(
        *(files, "CogVideoXImageToVideoPipeline", configs.COGVIDEOX_1_5_5B_I2V),
        *(configs.COGVIDEOX_1_5_VAE, configs.COGVIDEOX_DDIM),
    ),
    **{f"{HUNYUAN}-{name}": lambda files, name=name: _hunyuan(files, name) for name in HUNYUAN_SHIFTS},
    "tencent/HunyuanVideo-1.5": _tencent,
    **{
        f"alibaba-pai/{name}": lambda files, name=name: _authors_files(files, name, *FUN_FOLDERS[name])
        for name in ("Wan2.1-Fun-1.3B-InP", "Wan2.1-Fun-14B-InP", "Wan2.2-Fun-A14B-InP", "Wan2.2-Fun-5B-InP")
    },
}


def add_to_cache(hub: Path, name: str) -> None:
    """Put a repository into the hub's cache, once."""
    if not (hub / f"models--{name.replace('/', '--')}").exists():
        REPOSITORIES[name](make_repository(hub, name))


def repositories_of(model: str) -> list[str]:
    """Return the repositories that a published model and its LoRAs come from."""
    preset = presets()[model]
    files = [preset.source, *(lora.rpartition("=")[2] for lora in preset.loras)]
    return list(dict.fromkeys("/".join(file.split("/")[:2]) for file in files))


AUTHORS_FOLDERS: dict[str, tuple[Config, wan.TransformerConfig, int]] = {  # config.json, transformer and its shards
    name: (configs.AUTHORS_WAN | entries, config, shards)
    for name, entries, config, shards in (
        ("Wan2.1-T2V-1.3B", {}, wan.T2V_1_3B, 1),
        ("Wan2.1-T2V-14B", {}, wan.T2V_14B, 6),
        ("Wan2.1-I2V-14B-480P", {"model_type": "i2v", "in_dim": 36}, wan.I2V_14B, 7),
        ("Wan2.1-I2V-14B-720P", {"model_type": "i2v", "in_dim": 36}, wan.I2V_14B, 7),
        ("Wan2.1-FLF2V-14B-720P", {"model_type": "flf2v", "in_dim": 36}, wan.FLF2V_14B, 7),
        (
            "Wan2.1-VACE-1.3B",
            {"_class_name": "VaceWanModel", "model_type": "vace", "vace_in_dim": 96, "vace_layers": [*range(0, 30, 2)]},
            *(wan.VACE_1_3B, 1),
        ),
        (
            "Wan2.1-VACE-14B",
            {"_class_name": "VaceWanModel", "model_type": "vace", "vace_in_dim": 96, "vace_layers": [*range(0, 40, 5)]},
            *(wan.VACE_14B, 7),
        ),
        ("Wan2.2-TI2V-5B", {"model_type": "ti2v", "in_dim": 48, "out_dim": 48}, wan.TI2V_5B, 3),
        ("Wan2.2-T2V-A14B", {}, wan.T2V_14B, 6),
        ("Wan2.2-I2V-A14B", {"model_type": "i2v", "in_dim": 36}, wan.I2V_A14B, 6),
    )
}


FUN_FOLDERS: dict[str, tuple[Config, wan.TransformerConfig, int]] = {  # the models of Alibaba PAI, in the same layout
    name: (configs.AUTHORS_WAN | {"model_type": "i2v", "in_dim": config.channels_in}, config, 1)
    for name, config in (
        ("Wan2.1-Fun-1.3B-InP", wan.INP_1_3B),
        ("Wan2.1-Fun-14B-InP", wan.I2V_14B),
        ("Wan2.2-Fun-A14B-InP", wan.I2V_A14B),
        ("Wan2.2-Fun-5B-InP", wan.INP_5B),
    )
}


def authors_folder(folder: Path) -> Path:
    """Write the folder of Wan's authors with this name."""
    _authors_files(folder, folder.name, *AUTHORS_FOLDERS[folder.name])
    return folder


def _authors_files(folder: Path, model: str, entries: Config, config: wan.TransformerConfig, shards: int) -> None:
    sizes = {"dim": config.width, "ffn_dim": config.mlp_dim, "num_heads": config.heads, "num_layers": config.layers}
    for name in ("high_noise_model", "low_noise_model") if "A14B" in model else (".",):
        write_json(folder / name / "config.json", entries | sizes)
        if shards == 1:
            hollow_file(
                folder / name / f"{WEIGHTS}.safetensors", shapes_by_original_names(transformer_keys(config)), "F32"
            )
        else:
            hollow_files(folder / name, shapes_by_original_names(transformer_keys(config)), "F32", shards=shards)
    residual = "5B" in model
    names = original.vae_names({"dim_mult": range(4), "num_res_blocks": 2, "is_residual": residual})
    vae = {
        str(names.to_authors(name)): shape for name, shape in vae_keys(wan.VAE_2_2 if residual else wan.VAE_2_1).items()
    }
    write_torch(folder / f"Wan2.{2 if residual else 1}_VAE.pth", vae, torch.float32)
    text = {original.TEXT_ENCODER.to_authors(name): shape for name, shape in text_encoder_keys(t5.UMT5_XXL).items()}
    write_torch(folder / "models_t5_umt5-xxl-enc-bf16.pth", {str(name): x for name, x in text.items()}, torch.bfloat16)
    if isinstance(config, wan.ImageTransformerConfig):
        file = folder / "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
        write_torch(file, authors_image_encoder_file(), torch.float16)
    _tokenizer(folder / "google/umt5-xxl", "T5TokenizerFast")
