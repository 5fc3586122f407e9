# SPDX-License-Identifier: Apache-2.0
"""A small HunyuanVideo checkpoint in its authors' layout, made from a checkpoint in the layout of diffusers.

The names come from published scripts, not from the library's tables. This module reverses the renames of diffusers'
scripts/convert_hunyuan_video1_5_to_diffusers.py. The fused names of ComfyUI's files are those of musubi-tuner's
hunyuan_video_1_5_models.py. transformers writes Qwen2.5-VL.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from tests.support.tiny import HUNYUAN_CHAT_ENCODER, HUNYUAN_TRANSFORMER, tiny_hunyuan_checkpoint
from wanjax.checkpoints.files import SafetensorsFolder, save_safetensors

Tensors = dict[str, np.ndarray]
COLOURS = {"white": 0, "black": 1, "red": 2}
FONTS = {"en-Lato-Regular": 0, "en-Arimo-Bold": 1, "cn-HeiTi": 0, "kr-Gaegu": 0, "kr-Jua": 1}
TRANSFORMER_RENAMES = (  # diffusers' text and the authors' text, in the order of application
    ("context_embedder.token_refiner.refiner_blocks.", "txt_in.individual_token_refiner.blocks."),
    ("context_embedder.time_text_embed.timestep_embedder.linear_1.", "txt_in.t_embedder.mlp.0."),
    ("context_embedder.time_text_embed.timestep_embedder.linear_2.", "txt_in.t_embedder.mlp.2."),
    ("context_embedder.time_text_embed.text_embedder.", "txt_in.c_embedder."),
    ("context_embedder.proj_in.", "txt_in.input_embedder."),
    ("context_embedder_2.norm.", "byt5_in.layernorm."),
    ("context_embedder_2.linear_", "byt5_in.fc"),
    ("time_embed.timestep_embedder.linear_1.", "time_in.mlp.0."),
    ("time_embed.timestep_embedder.linear_2.", "time_in.mlp.2."),
    ("time_embed.timestep_embedder_r.linear_1.", "time_r_in.mlp.0."),
    ("time_embed.timestep_embedder_r.linear_2.", "time_r_in.mlp.2."),
    ("image_embedder.norm_in.", "vision_in.proj.0."),
    ("image_embedder.linear_1.", "vision_in.proj.1."),
    ("image_embedder.linear_2.", "vision_in.proj.3."),
    ("image_embedder.norm_out.", "vision_in.proj.4."),
    ("cond_type_embed.", "cond_type_embedding."),
    ("x_embedder.", "img_in."),
    ("transformer_blocks.", "double_blocks."),
    ("proj_out.", "final_layer.linear."),
)
REFINER_RENAMES = (
    (".attn.to_out.0.", ".self_attn_proj."),
    (".ff.net.0.proj.", ".mlp.fc1."),
    (".ff.net.2.", ".mlp.fc2."),
    (".norm_out.linear.", ".adaLN_modulation.1."),
)
BLOCK_RENAMES = (
    (".norm1.linear.", ".img_mod.linear."),
    (".norm1_context.linear.", ".txt_mod.linear."),
    (".attn.to_out.0.", ".img_attn_proj."),
    (".attn.to_add_out.", ".txt_attn_proj."),
    *((f".attn.to_{x}.", f".img_attn_{x}.") for x in "qkv"),
    *((f".attn.add_{x}_proj.", f".txt_attn_{x}.") for x in "qkv"),
    *((f".attn.norm_{x}.", f".img_attn_{x}_norm.") for x in "qk"),
    *((f".attn.norm_added_{x}.", f".txt_attn_{x}_norm.") for x in "qk"),
    (".ff.net.0.proj.", ".img_mlp.fc1."),
    (".ff.net.2.", ".img_mlp.fc2."),
    (".ff_context.net.0.proj.", ".txt_mlp.fc1."),
    (".ff_context.net.2.", ".txt_mlp.fc2."),
)
VAE_RENAMES = (
    ("down_blocks.", "down."),
    ("up_blocks.", "up."),
    ("mid_block.resnets.0.", "mid.block_1."),
    ("mid_block.resnets.1.", "mid.block_2."),
    ("mid_block.attentions.0.to_", "mid.attn_1."),
    ("mid_block.attentions.0.", "mid.attn_1."),
    (".resnets.", ".block."),
    ("downsamplers.0.", "downsample."),
    ("upsamplers.0.", "upsample."),
)


def rename_key(key: str, renames: tuple[tuple[str, str], ...]) -> str:
    for diffusers_text, authors_text in renames:
        key = key.replace(diffusers_text, authors_text)
    return key


def transformer_name(key: str) -> str:
    """Return the authors' name of a tensor or module of diffusers' transformer, if only the name differs."""
    if key.startswith("norm_out.linear."):
        return key.replace("norm_out.linear.", "final_layer.adaLN_modulation.1.")
    if key.startswith("transformer_blocks."):
        key = rename_key(key, BLOCK_RENAMES)
    elif "refiner_blocks" in key:
        key = rename_key(key, REFINER_RENAMES)
    return rename_key(key, TRANSFORMER_RENAMES)


def authors_transformer(tensors_of_diffusers: Mapping[str, np.ndarray], *, fused: bool = False) -> Tensors:
    """Return a transformer's tensors in the authors' layout; `fused` joins q, k and v as in ComfyUI's files."""
    tensors: Tensors = {}
    for key, x in tensors_of_diffusers.items():
        if key.startswith("norm_out.linear."):
            scale, shift = np.split(x, 2)
            x = np.concatenate([shift, scale])
        if "refiner_blocks" in key and ".attn.to_q." in key:
            parts = [tensors_of_diffusers[key.replace(".to_q.", f".to_{part}.")] for part in "qkv"]
            tensors[transformer_name(key).replace(".attn.to_q.", ".self_attn_qkv.")] = np.concatenate(parts)
        elif not ("refiner_blocks" in key and (".attn.to_k." in key or ".attn.to_v." in key)):
            tensors[transformer_name(key)] = x
    if fused:
        for key in [key for key in tensors if "_attn_q." in key]:
            parts = [tensors.pop(key.replace("_attn_q.", f"_attn_{part}.")) for part in "qkv"]
            tensors[key.replace("_attn_q.", "_attn_qkv.")] = np.concatenate(parts)
    return tensors


def tensors_of(folder: Path) -> Tensors:
    weights = SafetensorsFolder(folder)
    return {key: np.array(weights.read(key)) for key in weights.specs}


def config(**changes: Any) -> dict[str, Any]:
    """Return the authors' config.json of the small transformer."""
    width = HUNYUAN_TRANSFORMER["num_attention_heads"] * HUNYUAN_TRANSFORMER["attention_head_dim"]
    return {
        "_class_name": "HunyuanVideo_1_5_DiffusionTransformer", "glyph_byT5_v2": True, "guidance_embed": False,
        "heads_num": HUNYUAN_TRANSFORMER["num_attention_heads"], "hidden_size": width, "ideal_resolution": "480p",
        "ideal_task": "t2v", "in_channels": 4, "out_channels": 4, "patch_size": [1, 1, 1], "qk_norm_type": "rms",
        "rope_dim_list": HUNYUAN_TRANSFORMER["rope_axes_dim"], "rope_theta": 256, "use_meanflow": False,
    } | changes  # fmt: skip


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_both_layouts(folder: Path, *, pictured: bool = False) -> tuple[Path, Path]:
    """Write the same small checkpoint in the layouts of diffusers and of the authors; return both folders."""
    diffusers_folder = tiny_hunyuan_checkpoint(folder / "diffusers", pictured=pictured, target_size=640)
    encoder = diffusers_folder / "text_encoder_2/config.json"
    write_json(encoder, json.loads(encoder.read_text()) | {"relative_attention_max_distance": 128})
    authors_folder, model = folder / "ckpts", "480p_i2v" if pictured else "480p_t2v"
    add_transformer(authors_folder, model, tensors_of(diffusers_folder / "transformer"))
    vae = {rename_key(key, VAE_RENAMES): x for key, x in tensors_of(diffusers_folder / "vae").items()}
    write_json(authors_folder / "vae/config.json", {"_class_name": "AutoencoderKLConv3D", "scaling_factor": 1.3})
    save_safetensors(authors_folder / "vae/diffusion_pytorch_model.safetensors", vae)
    save_language_model(authors_folder / "text_encoder/llm", tensors_of(diffusers_folder / "text_encoder"))
    for path in (diffusers_folder / "tokenizer").iterdir():
        shutil.copy(path, authors_folder / "text_encoder/llm")
    save_glyphs(authors_folder / "text_encoder/Glyph-SDXL-v2", tensors_of(diffusers_folder / "text_encoder_2"))
    if pictured:
        for name in ("image_encoder", "feature_extractor"):
            shutil.copytree(diffusers_folder / name, authors_folder / "vision_encoder/siglip" / name)
    return diffusers_folder, authors_folder


def add_transformer(root: Path, model: str, tensors_of_diffusers: Mapping[str, np.ndarray], **changes: Any) -> Path:
    """Write a transformer into the authors' folder; the keywords override entries of its config.json."""
    folder, (resolution, task) = root / "transformer" / model, model.split("_")[:2]
    write_json(folder / "config.json", config(**{"ideal_resolution": resolution, "ideal_task": task} | changes))
    save_safetensors(folder / "diffusion_pytorch_model.safetensors", authors_transformer(tensors_of_diffusers))
    return folder


def save_language_model(folder: Path, language_model: Mapping[str, np.ndarray]) -> None:
    """Write a complete Qwen2.5-VL, with these tensors in its language model."""
    text = HUNYUAN_CHAT_ENCODER | {"rope_parameters": {"rope_theta": 1e6, "mrope_section": [2, 2, 2]}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 24}
    tokens = {f"{name}_token_id": 3 for name in ("bos", "eos")}
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text | tokens, vision_config=vision))
    state = {key.removeprefix("model."): torch.from_numpy(x) for key, x in language_model.items()}
    missing, unexpected = model.model.language_model.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(name.startswith(("layers.1.", "layers.2.", "norm.")) for name in missing)  # these are not used
    model.save_pretrained(folder)


def save_glyphs(folder: Path, encoder: Mapping[str, np.ndarray]) -> None:
    """Write Glyph-SDXL-v2's training checkpoint, and its tables of colours and fonts."""
    encoder_state = {key.removeprefix("encoder.").replace("shared.", "embed_tokens."): x for key, x in encoder.items()}
    state = {f"module.text_tower.encoder.{key}": torch.from_numpy(x) for key, x in encoder_state.items()}
    write_json(folder / "assets/color_idx.json", COLOURS)
    write_json(folder / "assets/multilingual_10-lang_idx.json", FONTS)
    (folder / "checkpoints").mkdir()
    other_entries = {"module.logit_scale": torch.ones(())}
    torch.save({"epoch": 7, "state_dict": state | other_entries}, folder / "checkpoints/byt5_model.pt")
