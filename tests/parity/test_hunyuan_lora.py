# SPDX-License-Identifier: Apache-2.0
"""LoRA for HunyuanVideo, in every format: the merged weights equal those of diffusers."""

import json

import numpy as np
import peft
import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from safetensors.torch import load_file, save_file

import wanjax
from tests.parity import hunyuan_authors as authors
from tests.parity.references import StateDict, randomise
from tests.support.quick import quick
from tests.support.tiny import HUNYUAN_TRANSFORMER
from tests.support.words import has_line_with_words
from wanjax.checkpoints import lora, lora_scales
from wanjax.checkpoints.modules import ExportedTensors, parameters
from wanjax.converters.hunyuanvideo.diffusers import transformer_config, transformer_weight_rules
from wanjax.converters.hunyuanvideo.original import LORA
from wanjax.errors import WanjaxError

CONFIG = HUNYUAN_TRANSFORMER | {"use_meanflow": True, "target_size": 640}
RANK, ALPHA, STRENGTH = 4, 3.0, -0.7


def reference():
    """Return the same small transformer at every call."""
    torch.manual_seed(0)
    module = HunyuanVideo15Transformer3DModel.from_config(CONFIG).eval()
    randomise(module, 1)
    return module


def modules():
    """Return the names of all linear layers, as the authors' trainer adapts them."""
    return [name for name, module in reference().named_modules() if isinstance(module, torch.nn.Linear)]


def blocks():
    return [name for name in modules() if name.startswith("transformer_blocks.")]


def query_name(name):
    """Return the name of the query's layer for a key's or a value's; these share their first factor."""
    for x in "kv":
        name = name.replace(f"to_{x}", "to_q").replace(f"add_{x}_proj", "add_q_proj")
    return name


def factors(names):
    """Return a pair of random factors for each module; q, k and v share the first."""
    weights, pairs = dict(reference().named_parameters()), {}
    for name in names:
        rows, columns = weights[f"{name}.weight"].shape
        first, second = (torch.Generator().manual_seed(seed_of(text)) for text in (query_name(name), f"{name} up"))
        pairs[name] = (
            torch.randn(RANK, columns, generator=first) * 0.2,
            torch.randn(rows, RANK, generator=second) * 0.2,
        )
    return pairs


def seed_of(text):
    return int.from_bytes(text.encode(), "big") % (1 << 31)


def diffusers_file(path, names=None):
    """Write diffusers' form, without an alpha."""
    tensors = {}
    for name, (down, up) in factors(names or modules()).items():
        tensors |= {f"transformer.{name}.lora_A.weight": down, f"transformer.{name}.lora_B.weight": up}
    save_file(tensors, path)


def authors_factors(names):
    """Return the factors by the authors' names: q, k and v fused in the refiner, shifts before scales."""
    result = {}
    for name, (down, up) in factors(names).items():
        if name == "norm_out.linear":
            up = torch.cat(up.chunk(2)[::-1])
        authors_name = authors.transformer_name(f"{name}.").removesuffix(".")
        if "refiner_blocks" in name and name.endswith((".to_k", ".to_v")):
            continue
        if "refiner_blocks" in name and name.endswith(".to_q"):
            qkv_factors = factors([name.replace(".to_q", f".to_{x}") for x in "qkv"])
            authors_name, up = (
                authors_name.replace(".attn.to_q", ".self_attn_qkv"),
                torch.cat([up for _, up in qkv_factors.values()]),
            )
        result[authors_name] = (down, up)
    return result


def fuse_qkv(pairs):
    """Return the authors' factors with q, k and v of the blocks fused too."""
    result = dict(pairs)
    for name in [name for name in pairs if name.endswith("_attn_q")]:
        parts = [result.pop(f"{name.removesuffix('q')}{x}") for x in "qkv"]
        result[f"{name}kv"] = (parts[0][0], torch.cat([up for _, up in parts]))
    return result


def authors_file(path):
    """Write the file of the authors' trainer, with PEFT's config in its metadata."""
    tensors = {}
    for name, (down, up) in authors_factors(modules()).items():
        tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    save_file(tensors, path, {lora_scales.PEFT_METADATA: json.dumps({"r": RANK, "lora_alpha": ALPHA})})


def comfyui_file(path):
    """Write the names of ComfyUI's code, with an alpha."""
    tensors = {}
    for name, (down, up) in fuse_qkv(authors_factors(modules())).items():
        comfyui = "diffusion_model." + comfyui_name(name)
        tensors |= {f"{comfyui}.lora_down.weight": down, f"{comfyui}.lora_up.weight": up}
        tensors |= {f"{comfyui}.alpha": torch.tensor(ALPHA)}
    save_file(tensors, path)


def comfyui_name(name):
    """Return ComfyUI's name of the authors' module, as its comfy/supported_models.py renames it."""
    for old, new in (
        ("txt_in.t_embedder.mlp.0.", "txt_in.t_embedder.in_layer."),
        ("txt_in.t_embedder.mlp.2.", "txt_in.t_embedder.out_layer."),
        ("txt_in.c_embedder.linear_1.", "txt_in.c_embedder.in_layer."),
        ("txt_in.c_embedder.linear_2.", "txt_in.c_embedder.out_layer."),
        ("_mod.linear.", "_mod.lin."),
        ("_attn_qkv.", "_attn.qkv."),
        ("mlp.fc1.", "mlp.0."),
        ("mlp.fc2.", "mlp.2."),
        ("_attn_proj.", "_attn.proj."),
        ("time_in.mlp.2.", "time_in.out_layer."),
        ("time_in.mlp.0.", "time_in.in_layer."),
    ):
        name = f"{name}.".replace(old, new).removesuffix(".")
    return name


def old_comfyui_file(path):
    """Write a prefix before the authors' names, with q, k and v of a block fused."""
    tensors = {}
    for name, (down, up) in fuse_qkv(authors_factors(modules())).items():
        tensors |= {f"diffusion_model.{name}.lora_A.weight": down, f"diffusion_model.{name}.lora_B.weight": up}
    save_file(tensors, path)


def kohya_file(path):
    """Write the file of musubi-tuner, which adapts the blocks."""
    tensors = {}
    for name, (down, up) in authors_factors(blocks()).items():
        kohya_name = f"lora_unet_{name.replace('.', '_')}"
        tensors |= {f"{kohya_name}.lora_down.weight": down, f"{kohya_name}.lora_up.weight": up}
        tensors |= {f"{kohya_name}.alpha": torch.tensor(ALPHA)}
    save_file(tensors, path)


def kohya_file_for_comfyui(path):
    """Write that file as musubi-tuner's convert_hunyuan_video_1_5_lora_to_comfy.py converts it.

    The factors of q, k and v become one pair of three times the rank, the second of blocks on a diagonal.
    """
    tensors, pairs = {}, authors_factors(blocks())
    renames = [("mlp_fc1", "mlp_0"), ("mlp_fc2", "mlp_2"), ("mod_linear", "mod_lin")]
    for name, (down, up) in pairs.items():
        alpha = ALPHA
        if name.endswith(("_attn_k", "_attn_v")):
            continue
        if name.endswith("_attn_q"):
            parts = [pairs[f"{name.removesuffix('q')}{x}"] for x in "qkv"]
            name, alpha = f"{name}kv", 3 * ALPHA
            down, up = torch.cat([x for x, _ in parts]), torch.block_diag(*(x for _, x in parts))
        kohya_name = f"lora_unet_{name.replace('.', '_')}"
        for old, new in renames:
            kohya_name = kohya_name.replace(old, new)
        tensors |= {f"{kohya_name}.lora_down.weight": down, f"{kohya_name}.lora_up.weight": up}
        tensors |= {f"{kohya_name}.alpha": torch.tensor(alpha)}
    save_file(tensors, path)


WITHOUT_ALPHA = [diffusers_file, old_comfyui_file]
FORMATS = [*WITHOUT_ALPHA, authors_file, comfyui_file, kohya_file, kohya_file_for_comfyui]


def fuse_with_diffusers(path, strength):
    """Return the reference with diffusers' file merged by diffusers."""
    module = reference()
    module.load_lora_adapter(load_file(path), prefix="transformer")
    module.fuse_lora(lora_scale=strength)
    module.unload_lora()
    return StateDict(module)


def open_lora(path):
    base = StateDict(reference())
    return base, lora.LoraFile(path, base.specs, LORA)


@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)
def test_every_format_is_merged_as_in_diffusers(write, tmp_path):
    names = blocks() if "kohya" in write.__name__ else modules()
    write(tmp_path / "lora.safetensors")
    diffusers_file(tmp_path / "diffusers.safetensors", names)
    reference_weights = fuse_with_diffusers(
        tmp_path / "diffusers.safetensors", STRENGTH * (1 if write in WITHOUT_ALPHA else ALPHA / RANK)
    )
    base, file = open_lora(tmp_path / "lora.safetensors")
    assert not file.matches.unmatched
    assert file.matches.num_matched == sum(".alpha" not in key for key in load_file(tmp_path / "lora.safetensors")) / 2
    merged = lora.MergedLoraReader(base, [(file, STRENGTH)])
    changed = [key for key, x in reference_weights.tensors.items() if not np.array_equal(x, base.read(key))]
    assert len(changed) == len(names)
    largest = max(np.abs(merged.read(key) - x).max() / np.abs(x).max() for key, x in reference_weights.tensors.items())
    print(f"{largest:.1e}")
    assert largest <= 1e-6


def test_an_alpha_saved_by_diffusers_is_applied(tmp_path):
    """PEFT's config is in the metadata; diffusers reads it from there too."""
    module = reference()
    options = {"lora_alpha": ALPHA, "alpha_pattern": {"attn.to_q": 7.0}, "init_lora_weights": False}
    module.add_adapter(peft.LoraConfig(r=RANK, target_modules=modules(), **options))
    module.save_lora_adapter(tmp_path)
    path = tmp_path / "pytorch_lora_weights.safetensors"
    reloaded = reference()
    reloaded.load_lora_adapter(tmp_path, weight_name=path.name, prefix=None)
    reloaded.fuse_lora(lora_scale=STRENGTH)
    reloaded.unload_lora()
    base, file = open_lora(path)
    assert (file.matches.num_matched, file.matches.unmatched) == (len(modules()), ())
    merged = lora.MergedLoraReader(base, [(file, STRENGTH)])
    for key, x in StateDict(reloaded).tensors.items():
        assert np.abs(merged.read(key) - x).max() <= 1e-6 * np.abs(x).max(), key


def test_weight_differences_of_fused_and_swapped_tensors_are_added(tmp_path):
    """Test whole differences of weights and biases, as ComfyUI's extraction writes them."""
    module = reference()
    generator = torch.Generator().manual_seed(3)
    changes = {key: torch.randn(x.shape, generator=generator) for key, x in module.state_dict().items()}
    keys = [f"transformer_blocks.1.attn.add_{x}_proj.{leaf}" for x in "qkv" for leaf in ("weight", "bias")]
    keys += ["norm_out.linear.weight", "norm_out.linear.bias", "proj_out.bias"]
    tensors = {}
    for leaf, role in (("weight", "diff"), ("bias", "diff_b")):
        parts = [changes[f"transformer_blocks.1.attn.add_{x}_proj.{leaf}"] for x in "qkv"]
        tensors[f"double_blocks.1.txt_attn_qkv.{role}"] = torch.cat(parts)
        halves = changes[f"norm_out.linear.{leaf}"].chunk(2)
        tensors[f"diffusion_model.final_layer.adaLN_modulation.1.{role}"] = torch.cat(halves[::-1])
    tensors["final_layer.linear.diff_b"] = changes["proj_out.bias"]
    save_file(tensors, tmp_path / "diff.safetensors")
    base, file = open_lora(tmp_path / "diff.safetensors")
    merged = lora.MergedLoraReader(base, [(file, 2.0)])
    for key, x in base.tensors.items():
        np.testing.assert_allclose(merged.read(key), x + 2 * changes[key].numpy() if key in keys else x, rtol=1e-6)


@pytest.mark.parametrize("layout", quick(["authors"], ["diffusers", "authors"]))
def test_a_loaded_model_has_the_merged_weights(layout, tmp_path):
    """Loading a checkpoint in either layout stacks blocks, and reorders q and k for RoPE."""
    diffusers_folder, authors_folder = authors.write_both_layouts(tmp_path)
    module = reference()
    module.save_pretrained(diffusers_folder / "transformer")
    tensors = {key: x.numpy() for key, x in module.state_dict().items()}
    authors.add_transformer(authors_folder, "480p_t2v", tensors, use_meanflow=True)
    comfyui_file(tmp_path / "lora.safetensors")
    diffusers_file(tmp_path / "diffusers.safetensors")
    messages = []
    folder = diffusers_folder if layout == "diffusers" else authors_folder
    pipe = wanjax.load(folder, lora=f"{tmp_path / 'lora.safetensors'}:{STRENGTH}", note=messages.append)
    assert "the rest" not in messages[0]
    config = transformer_config(module.config)
    merged = fuse_with_diffusers(tmp_path / "diffusers.safetensors", STRENGTH * ALPHA / RANK)
    weights = {path: np.asarray(x) for path, x in parameters(pipe.transformer).items()}
    result = ExportedTensors(weights, transformer_weight_rules(config))
    for key, x in merged.tensors.items():
        assert np.abs(result.read(key) - x).max() <= 1e-6 * np.abs(x).max(), key


def test_a_lora_for_another_model_is_refused(tmp_path):
    """HunyuanVideo of 2024 has the same names, other sizes, and blocks of one stream."""
    tensors = {}
    for name, rows in (("double_blocks.0.img_attn_qkv", 3 * 48), ("single_blocks.0.linear1", 90)):
        tensors |= {f"{name}.lora_A.weight": torch.ones(2, 48), f"{name}.lora_B.weight": torch.ones(rows, 2)}
    save_file(tensors, tmp_path / "old.safetensors")
    with pytest.raises(WanjaxError) as caught:
        open_lora(tmp_path / "old.safetensors")
    assert has_line_with_words(str(caught.value), "double_blocks.0.img_attn_qkv.weight [144, 48] [96, 32]")
    assert has_line_with_words(str(caught.value), "LoRA model")
