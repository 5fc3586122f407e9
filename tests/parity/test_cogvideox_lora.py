# SPDX-License-Identifier: Apache-2.0
"""LoRAs for CogVideoX, in every format of its trainers, give the merged weights of diffusers."""

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel
from flax import nnx
from safetensors.torch import load_file, save_file

import wanjax
from tests.parity.references import StateDict, randomise, relative_l2
from tests.support.tiny import COGVIDEOX_TRANSFORMER, tiny_cogvideox_checkpoint
from wanjax.checkpoints import lora, modules
from wanjax.converters.cogvideox.diffusers import transformer_config, transformer_weight_rules
from wanjax.converters.name_map import NameMap
from wanjax.layers.placement import as_shapes
from wanjax.models.cogvideox.transformer import CogVideoXTransformer

# patches by a convolution
VERSION_1_0 = {"patch_size_t": None, "patch_bias": True, "use_rotary_positional_embeddings": False}
ATTENTION = [f"attn1.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")]  # the modules of diffusers' trainer
OTHER_MODULES = [
    *("patch_embed.proj", "patch_embed.text_proj", "time_embedding.linear_1", "time_embedding.linear_2"),
    *("norm_out.linear", "proj_out"),
]
MODULES = [*ATTENTION, "norm1.linear", "norm2.linear", "ff.net.0.proj", "ff.net.2"]
RANK, ALPHA, STRENGTH = 4, 3.0, -0.7


def reference(config=COGVIDEOX_TRANSFORMER):
    """Return the same small transformer at every call."""
    torch.manual_seed(0)
    module = CogVideoXTransformer3DModel.from_config(config).eval()
    randomise(module, 1)
    return module


def add_adapters(config, modules, **options):
    """Return a transformer with random adapters, as after training."""
    module = reference(config)
    module.add_adapter(peft.LoraConfig(r=RANK, target_modules=modules, init_lora_weights=False, **options))
    for seed, (name, weight) in enumerate(module.named_parameters()):
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.2, generator=torch.Generator().manual_seed(seed))
    return module


def trainer_file(folder, config):
    """Write the file of diffusers' trainer, which has no alpha: a user sets the strength to alpha / rank."""
    layers = peft.get_peft_model_state_dict(add_adapters(config, ATTENTION, lora_alpha=ALPHA))
    CogVideoXPipeline.save_lora_weights(folder, transformer_lora_layers=layers)
    return folder / "pytorch_lora_weights.safetensors"


def file_of_all_modules(folder, config):
    """Write diffusers' file for every kind of module, with PEFT's config in its metadata."""
    module = add_adapters(config, [*MODULES, *OTHER_MODULES], lora_alpha=ALPHA, alpha_pattern={"attn1.to_q": 7})
    metadata = module.peft_config["default"].to_dict()
    CogVideoXPipeline.save_lora_weights(
        folder,
        transformer_lora_layers=peft.get_peft_model_state_dict(module),
        transformer_lora_adapter_metadata={**metadata, "target_modules": [*MODULES, *OTHER_MODULES]},
    )
    return folder / "pytorch_lora_weights.safetensors"


def exported_file(folder, config):
    """Write the file of the authors' export_sat_lora_weight.py, without a prefix."""
    path = trainer_file(folder, config)
    save_file({key.removeprefix("transformer."): x for key, x in load_file(path).items()}, path)
    return path


def videox_fun_file(folder, config):
    """Write the file of VideoX-Fun's trainer, with underscores for dots, and alphas."""
    tensors = {}
    for key, x in load_file(trainer_file(folder, config)).items():
        module, _, factor = key.removeprefix("transformer.").removesuffix(".weight").rpartition(".")
        layer_name = f"lora_unet__{module.replace('.', '_')}"
        tensors |= {f"{layer_name}.{'lora_down' if factor == 'lora_A' else 'lora_up'}.weight": x}
        tensors |= {f"{layer_name}.alpha": torch.tensor(ALPHA)}
    save_file(tensors, folder / "videox_fun.safetensors")
    return folder / "videox_fun.safetensors"


FORMATS = [trainer_file, file_of_all_modules, exported_file, videox_fun_file]


def fuse_with_diffusers(config, path, write):
    """Return diffusers' transformer with the merged file, or with its trainer's file if it cannot read the format."""
    scale = STRENGTH
    if write in (exported_file, videox_fun_file):
        path = trainer_file(path.parent / "trainer", config)
        scale *= ALPHA / RANK if write is videox_fun_file else 1
    module = reference(config)
    state, metadata = CogVideoXPipeline.lora_state_dict(str(path), return_lora_metadata=True)
    CogVideoXPipeline.load_lora_into_transformer(state, module, adapter_name="a", metadata=metadata)
    module.fuse_lora(lora_scale=scale)
    module.unload_lora()
    return module


@pytest.mark.parametrize("config", [{}, VERSION_1_0], ids=["second generation", "first generation"])
@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)
def test_every_format_is_merged_as_in_diffusers(write, config, tmp_path):
    config = COGVIDEOX_TRANSFORMER | config
    path = write(tmp_path, config)
    base = StateDict(reference(config))
    file = lora.LoraFile(path, base.specs, NameMap([]))
    assert not file.matches.unmatched
    merged, expected_weights = (
        lora.MergedLoraReader(base, [(file, STRENGTH)]),
        StateDict(fuse_with_diffusers(config, path, write)),
    )
    changed_keys = [
        key for key, weights in expected_weights.tensors.items() if not np.array_equal(weights, base.read(key))
    ]
    assert (
        len(changed_keys) == file.matches.num_matched == 2 * len(ATTENTION) + (8 + 6) * (write is file_of_all_modules)
    )
    for key, weights in expected_weights.tensors.items():
        assert np.abs(merged.read(key) - weights).max() <= 1e-6 * np.abs(weights).max(), key


@torch.no_grad()
@pytest.mark.parametrize("write", [trainer_file, file_of_all_modules], ids=lambda write: write.__name__)
def test_a_model_with_a_lora_predicts_as_in_diffusers(write, tmp_path):
    """Loading also stacks the blocks, and orders q and k for RoPE."""
    folder = tiny_cogvideox_checkpoint(tmp_path / "checkpoint")
    reference().save_pretrained(folder / "transformer")
    path = write(tmp_path, COGVIDEOX_TRANSFORMER)
    loaded = wanjax.load(folder, lora=f"{path}:{STRENGTH}").transformer
    fused = fuse_with_diffusers(COGVIDEOX_TRANSFORMER, path, write)
    loaded_weights, fused_weights = modules.parameters(loaded), modules.parameters(convert_transformer(fused))
    for name, weights in fused_weights.items():
        assert np.abs(loaded_weights[name] - weights).max() <= 1e-6 * np.abs(weights).max(), name

    options = [
        torch.randn(shape, generator=torch.Generator().manual_seed(5)) for shape in ((1, 2, 4, 6, 8), (1, 7, 16))
    ]
    errors = [relative_l2(predict(loaded, *options), expected(module, *options)) for module in (fused, reference())]
    print(f"{errors[0]:.1e}")
    assert errors[0] <= 1e-5 < 1e-2 < errors[1]


def convert_transformer(module):
    config = transformer_config(module.config)
    abstract = as_shapes(
        lambda rngs: CogVideoXTransformer(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs)
    )
    return modules.load(abstract, transformer_weight_rules(config), StateDict(module))


def predict(model, latents, text):
    graphdef, weights = nnx.split(model)

    @jax.jit
    def run(weights, latents, text):
        model = nnx.merge(graphdef, weights)
        context = model.context(text)
        return model(latents, jnp.array([500.0]), context, model.positions(model.grid(latents), context.text.shape[1]))

    return run(weights, jnp.moveaxis(jnp.asarray(latents.numpy()), 2, -1), jnp.asarray(text.numpy()))


def expected(module, latents, text):
    frames, _, height, width = latents.shape[1:]
    pipeline = type("Pipeline", (), {"transformer": module, "vae_scale_factor_spatial": 8})()
    make = CogVideoXPipeline._prepare_rotary_positional_embeddings
    rope = make(pipeline, 8 * height, 8 * width, frames, torch.device("cpu"))
    out = module(latents, text, torch.tensor([500]), image_rotary_emb=rope).sample
    return np.moveaxis(out.numpy(), 2, -1)
