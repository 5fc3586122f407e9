# SPDX-License-Identifier: Apache-2.0
"""LoRA in every format that diffusers or PEFT reads: the merged weights are the same."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file

from tests.parity.references import StateDict, randomise
from tests.support.words import line_with_words
from wanjax.checkpoints import lora, lora_scales, modules
from wanjax.checkpoints.lora_source import Lora
from wanjax.converters.wan import diffusers as wan
from wanjax.converters.wan import original
from wanjax.errors import WanjaxError
from wanjax.layers.placement import as_shapes
from wanjax.models.wan.transformer import WanTransformer

SIZES = {
    **{"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "in_channels": 4},
    **{"out_channels": 4, "text_dim": 16, "freq_dim": 16},
}
BLOCK = {  # a block's projections: diffusers' names and the authors'
    **{f"attn1.to_{x}": f"self_attn.{x}" for x in "qkv"} | {"attn1.to_out.0": "self_attn.o"},
    **{f"attn2.to_{x}": f"cross_attn.{x}" for x in "qkv"} | {"attn2.to_out.0": "cross_attn.o"},
    **{"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"},
}
OUTSIDE_BLOCKS = {
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "proj_out": "head.head",
}
NAMES = {f"blocks.{i}.{name}": f"blocks.{i}.{authors_name}" for i in range(2) for name, authors_name in BLOCK.items()}
RANK, ALPHA = 4, 3.0


def reference():
    """Return the same small transformer at every call."""
    torch.manual_seed(0)
    module = WanTransformer3DModel(**SIZES)
    randomise(module, 1)
    return module


def factors(names, seed=2, rank=RANK):
    """Return a pair of random factors for each of diffusers' modules."""
    generator, weights = torch.Generator().manual_seed(seed), dict(reference().state_dict())
    return {
        name: (
            torch.randn(rank, weights[f"{name}.weight"].shape[1], generator=generator) * 0.1,
            torch.randn(weights[f"{name}.weight"].shape[0], rank, generator=generator) * 0.1,
        )
        for name in names
    }


def biases(names):
    generator, weights = torch.Generator().manual_seed(3), dict(reference().state_dict())
    return {name: torch.randn(weights[f"{name}.bias"].shape, generator=generator) * 0.1 for name in names}


def diffusers_file(path):
    tensors = {}
    for name, (down, up) in factors(NAMES | OUTSIDE_BLOCKS).items():
        tensors |= {f"transformer.{name}.lora_A.weight": down, f"transformer.{name}.lora_B.weight": up}
    save_file(tensors, path)


def diffusers_file_with_metadata(path):
    """Write diffusers' form: PEFT's config, with another alpha for some modules, in the file's metadata."""
    diffusers_file(path)
    config = {
        **{"transformer.r": RANK, "transformer.lora_alpha": 2.5, "transformer.use_rslora": True},
        "transformer.target_modules": list(NAMES | OUTSIDE_BLOCKS),
        "transformer.alpha_pattern": {
            "blocks.1.attn1.to_q": 7,
            r"^blocks\..*\.net\.2": 1,
            r"blocks\.[01]\..*to_v": 0.5,
        },
    }
    save_file(load_file(path), path, {lora_scales.PEFT_METADATA: json.dumps(config)})


def comfy_file(path):
    """Write a file with `diffusion_model.`, lora_down and lora_up, alpha, and changes of biases."""
    tensors, names = {}, NAMES
    for name, (down, up) in factors(names).items():
        authors_name = f"diffusion_model.{names[name]}"
        tensors |= {f"{authors_name}.lora_down.weight": down, f"{authors_name}.lora_up.weight": up}
        tensors |= {f"{authors_name}.alpha": torch.tensor(ALPHA), f"{authors_name}.diff_b": biases([name])[name]}
    save_file(tensors, path)


def comfy_file_of_all_modules(path):
    """Write a file with `diffusion_model.`, lora_A and lora_B, and modules outside the blocks."""
    tensors, names = {}, NAMES | OUTSIDE_BLOCKS
    for name, (down, up) in factors(names).items():
        authors_name = f"diffusion_model.{names[name]}"
        tensors |= {f"{authors_name}.lora_A.weight": down, f"{authors_name}.lora_B.weight": up}
        tensors |= {f"{authors_name}.diff_b": biases([name])[name]}
    save_file(tensors, path)


def kohya_file(path):
    tensors = {}
    for name, (down, up) in factors(NAMES).items():
        authors_name = f"lora_unet_{NAMES[name].replace('.', '_')}"
        tensors |= {f"{authors_name}.lora_down.weight": down, f"{authors_name}.lora_up.weight": up}
        tensors |= {f"{authors_name}.alpha": torch.tensor(ALPHA)}
    save_file(tensors, path)


def comfy_file_with_whole_alphas(path):
    """Write alphas as whole numbers, of every dtype and shape that trainers give them."""
    comfy_file(path)
    kinds = [torch.int64, torch.int32, torch.uint8, torch.bfloat16]
    tensors = load_file(path)
    for i, key in enumerate(key for key in tensors if key.endswith(".alpha")):
        tensors[key] = torch.tensor(ALPHA, dtype=kinds[i % 4]).reshape([(), (1,), (1, 1)][i % 3])
    save_file(tensors, path)


FORMATS = [
    comfy_file_with_whole_alphas,
    diffusers_file,
    diffusers_file_with_metadata,
    comfy_file,
    comfy_file_of_all_modules,
    kohya_file,
]


def merge(*files):
    """Return the reference's weights with pairs (path, strength) merged by wanjax, and the matches."""
    base = StateDict(reference())
    specs = base.specs
    opened = [(lora.LoraFile(Path(path), specs, original.TRANSFORMER), strength) for path, strength in files]
    return lora.MergedLoraReader(base, opened), [file.matches for file, _ in opened]


def fuse_with_diffusers(*files):
    """Return the reference's weights with pairs (path, strength) merged by diffusers."""
    module = reference()
    for i, (path, strength) in enumerate(files):
        state, metadata = WanPipeline.lora_state_dict(str(path), return_lora_metadata=True)
        WanPipeline.load_lora_into_transformer(state, module, adapter_name=f"l{i}", metadata=metadata)
        module.fuse_lora(lora_scale=strength, adapter_names=[f"l{i}"])
        module.unload_lora()
    return StateDict(module)


def assert_equal(result, expected):
    base, changed = StateDict(reference()), 0
    assert list(result.specs) == list(expected.specs)
    for key, weights in expected.tensors.items():
        assert np.abs(result.read(key) - weights).max() <= 1e-6 * np.abs(weights).max(), key
        changed += not np.array_equal(weights, base.read(key))
        assert result.specs[key] == (result.read(key).shape, result.read(key).dtype)
    assert changed >= len(NAMES)


@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)
def test_every_format_is_merged_as_in_diffusers(write, tmp_path):
    write(tmp_path / "lora.safetensors")
    result, (matches,) = merge((tmp_path / "lora.safetensors", -0.35))
    assert not matches.unmatched
    assert_equal(result, fuse_with_diffusers((tmp_path / "lora.safetensors", -0.35)))


def test_several_loras_are_merged_at_their_strengths(tmp_path):
    """Loading the network also stacks blocks, and reorders q and k for RoPE."""
    files = [(tmp_path / "comfy.safetensors", 0.5), (tmp_path / "diffusers.safetensors", 1.5)]
    comfy_file(files[0][0])
    diffusers_file_with_metadata(files[1][0])
    result, expected = merge(*files)[0], fuse_with_diffusers(*files)
    assert_equal(result, expected)
    result, expected, base = (load(reader) for reader in (result, expected, StateDict(reference())))
    for path, weights in expected.items():
        assert np.abs(result[path] - weights).max() <= 1e-6 * np.abs(weights).max(), path
    assert not np.array_equal(expected["blocks.self_attn.q.kernel"], base["blocks.self_attn.q.kernel"])


def load(reader):
    """Return the network's weights from a checkpoint."""
    config = wan.transformer_config(reference().config)
    abstract = as_shapes(lambda rngs: WanTransformer(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs))
    return modules.parameters(modules.load(abstract, wan.transformer_weight_rules(config), reader))


@pytest.mark.filterwarnings("ignore:.*have invalid shape")  # PEFT mistakes biases for factors
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "alpha_pattern": {"attn1.to_q": 5}},
        {"lora_bias": True},
        {"alpha_pattern": {r"blocks\.0\..*to_q": 5, "to_q": 2}},
        {"alpha_pattern": {"to_q": 2, r"blocks\.0\..*to_v": 5, "^proj_out": 0.5}},
        {"rank_pattern": {r"blocks\.1\.attn1\.to_(k|v)": 2, "ffn.*": 6}},
        {"rank_pattern": {"^proj_out": 1}, "alpha_pattern": {r"blocks\.(?!0)\d\..*": 7}, "use_rslora": True},
    ],
)
def test_files_of_peft_are_merged_as_in_peft(options, tmp_path):
    targets = [name.removeprefix("blocks.0.") for name in NAMES if name.startswith("blocks.0.")] + ["proj_out"]
    config = peft.LoraConfig(r=RANK, lora_alpha=9, target_modules=targets, init_lora_weights=False, **options)
    module = peft.get_peft_model(reference(), config)
    for i, parameter in enumerate(module.parameters()):
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(i))
    module.save_pretrained(tmp_path)
    result, (matches,) = merge((Lora(str(tmp_path)).resolve_folder().file, 1.0))
    assert not matches.is_partial
    assert_equal(result, StateDict(module.merge_and_unload()))


TARGETS = [name.removeprefix("blocks.0.") for name in NAMES if name.startswith("blocks.0.")]


def save_adapter(config, path):
    """Save a PEFT adapter of random weights in a folder; return the reference with it."""
    module = peft.get_peft_model(reference(), config)
    for i, parameter in enumerate(module.parameters()):
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(i))
    module.save_pretrained(path)
    return module


def peft_options(options: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return options | changes


SUPPORTED_ADAPTERS = {
    "DoRA": lambda **options: peft.LoraConfig(**options, lora_alpha=9, use_dora=True),
    "DoRA of a kernel": lambda **options: peft.LoraConfig(
        **peft_options(options, target_modules=["patch_embedding"]), use_dora=True
    ),
    "biases of the modules": lambda **options: peft.LoraConfig(**options, bias="lora_only"),
    "all biases": lambda **options: peft.LoraConfig(**options, bias="all"),
    "a module": lambda **options: peft.LoraConfig(**options, modules_to_save=["proj_out"]),
    "LoHa": lambda **options: peft.LoHaConfig(**options, alpha=6, alpha_pattern={"to_q": 3}, rank_pattern={"to_v": 2}),
    "LoKr": lambda **options: peft.LoKrConfig(**peft_options(options, r=2), alpha=6, alpha_pattern={"to_q": 3}),
    "LoKr of four factors": lambda **options: peft.LoKrConfig(
        **peft_options(options, r=1), alpha=6, decompose_both=True
    ),
    "whole LoKr": lambda **options: peft.LoKrConfig(**peft_options(options, r=16), alpha=6),
    "AdaLoRA": lambda **options: peft.AdaLoraConfig(
        target_modules=options["target_modules"], init_r=RANK, target_r=2, lora_alpha=9, total_step=100
    ),
    "VeLoRA": lambda **options: peft.LoraConfig(**options, velora_config=peft.VeloraConfig()),
}


@pytest.mark.parametrize("kind", SUPPORTED_ADAPTERS)
def test_adapters_of_other_kinds_are_merged_as_in_peft(kind, tmp_path):
    module = save_adapter(SUPPORTED_ADAPTERS[kind](r=RANK, target_modules=TARGETS), tmp_path)
    result, (matches,) = merge((Lora(str(tmp_path)).resolve_folder().file, 1.0))
    assert not matches.is_partial
    base, changed = StateDict(reference()), 0
    for key, weights in StateDict(module.merge_and_unload()).tensors.items():
        assert np.abs(result.read(key) - weights).max() <= 1e-6 * np.abs(weights).max(), key
        changed += not np.array_equal(weights, base.read(key))
    assert changed >= (1 if kind == "DoRA of a kernel" else len(NAMES))


REFUSED_ADAPTERS = {
    "BD-LoRA": (
        lambda: peft.LoraConfig(use_bdlora=BLOCK_DIAGONAL_LORA, target_modules=["to_q", "net.2"], r=RANK),
        "use_bdlora",
    ),
    "KaSA": (lambda: peft.LoraConfig(kasa_config=peft.KasaConfig(), target_modules=["to_q"], r=RANK), "kasa_config"),
    "HiRA": (lambda: peft.HiraConfig(target_modules=["to_q"], r=RANK), "HIRA"),
    "VeRA": (lambda: peft.VeraConfig(target_modules=["attn1.to_q"], r=RANK), "VERA"),
    "IA3": (lambda: peft.IA3Config(target_modules=["to_q"], feedforward_modules=[]), "IA3"),
}
BLOCK_DIAGONAL_LORA = peft.BdLoraConfig(target_modules_bd_a=["net.2"], target_modules_bd_b=["to_q"], nblocks=2)


@pytest.mark.parametrize("kind", REFUSED_ADAPTERS)
def test_adapters_of_unsupported_kinds_are_refused_by_name(kind, tmp_path):
    config, name = REFUSED_ADAPTERS[kind]
    save_adapter(config(), tmp_path)
    with pytest.raises(WanjaxError, match=line_with_words(f"adapter_config.json {name}")):
        merge((Lora(str(tmp_path)).resolve_folder().file, 1.0))
