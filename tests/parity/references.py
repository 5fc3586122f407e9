# SPDX-License-Identifier: Apache-2.0
"""Small random reference models, networks of wanjax with their weights, and errors between two outputs."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from flax import nnx
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

from tests.support.toy_tokenizer import save_tokenizer
from wanjax.checkpoints import modules
from wanjax.checkpoints.files import SafetensorsFolder, Tensors
from wanjax.checkpoints.network_kinds import read_network
from wanjax.converters.t5 import t5_config, t5_weight_rules
from wanjax.layers.placement import as_shapes
from wanjax.models.t5 import T5Encoder
from wanjax.models.wan.transformer import WanTransformer
from wanjax.models.wan.vae import WanVAE
from wanjax.pipelines.wan.networks import NETWORKS

PROMPT, NEGATIVE_PROMPT = "a red circle moving right &amp;  up", "色调艳丽, a blue cat"
MAX_LATENT_ERROR = 2e-5  # the largest allowed relative L2 error of latents
T5_SIZES = {
    "vocab_size": 99,
    "d_model": 64,
    "d_kv": 24,  # heads × head size differs from the width
    "d_ff": 160,
    "num_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 40,
    "feed_forward_proj": "gated-gelu",
}
T5_FAMILIES = {
    "umt5": (UMT5Config, UMT5EncoderModel),
    "t5": (T5Config, T5EncoderModel),
}


class StateDict(Tensors):
    """A checkpoint reader for the weights of a torch module."""

    def __init__(self, module: torch.nn.Module):
        super().__init__({key: value.detach().float().numpy() for key, value in module.state_dict().items()})


def relative_l2(result: Any, reference: Any) -> float:
    a, b = (np.asarray(x, np.float64) for x in (result, reference))
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def randomise(module: torch.nn.Module, seed: int) -> None:
    """Randomise also the weights that start as zeros or ones, so that each weight affects the result."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim < 2 or parameter.squeeze().ndim < 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter == 1).float())


def small_components(folder: Path) -> dict[str, Any]:
    """Return the components of Wan's pipelines except the transformer, and write the tokenizer to the folder.

    Text features have 48 channels, and latents 4.
    """
    parts = {
        "text_encoder": UMT5EncoderModel(
            UMT5Config(
                vocab_size=512, d_model=48, d_kv=16, d_ff=96, num_layers=1, num_heads=2,
                relative_attention_num_buckets=16, relative_attention_max_distance=40, feed_forward_proj="gated-gelu",
            )
        ),
        "vae": AutoencoderKLWan(
            base_dim=8, z_dim=4, num_res_blocks=1, latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 0.7, 2.0, 1.0]
        ),
    }  # fmt: skip
    for seed, network in enumerate(parts.values(), 10):
        randomise(network.eval(), seed)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(save_tokenizer(folder))
    return {**parts, "scheduler": scheduler, "tokenizer": tokenizer}


def channels_last(x: torch.Tensor) -> np.ndarray:
    """Convert [B C T H W] to [B T H W C]."""
    return np.ascontiguousarray(x.detach().float().numpy().transpose(0, 2, 3, 4, 1))


@nnx.jit
def run(module: Any, *operands: Any) -> Any:
    """Call a module in one program."""
    return module(*operands)


def submodule(module: Any, path: str) -> Any:
    """Return the part of a module at a path of names and indices with dots between them."""
    for name in path.split("."):
        module = module[int(name)] if name.isdigit() else getattr(module, name)
    return module


def wan_transformer(reference, dtype=jnp.float32, param_dtype=jnp.float32) -> WanTransformer:
    network = read_network(type(reference).__name__, reference.config, NETWORKS)
    return modules.load(network.abstract(dtype=dtype, param_dtype=param_dtype), network.rules, StateDict(reference))


def wan_vae(reference, dtype=jnp.float32, param_dtype=jnp.float32) -> WanVAE:
    network = read_network("AutoencoderKLWan", reference.config, NETWORKS)
    return modules.load(network.abstract(dtype=dtype, param_dtype=param_dtype), network.rules, StateDict(reference))


@torch.no_grad()
def emphasise_mlps(network: WanTransformer3DModel) -> None:
    """Enlarge the inputs and outputs of the MLPs, so that they leave the linear range of their GELU."""
    for block in network.blocks:
        block.ffn.net[0].proj.weight.mul_(3)
        block.scale_shift_table[:, 5].add_(1)  # the MLP's gate
    network.proj_out.weight.mul_(3)


def largest_error(latents: list[np.ndarray], exact: list[np.ndarray]) -> float:
    """Return the largest relative error of the latents of any step, and print it for `pytest -rP`."""
    error = max(relative_l2(*pair) for pair in zip(latents, exact, strict=True))
    print(f"latents {error:.1e}")
    return error


def psnr(frames: np.ndarray, exact: np.ndarray) -> float:
    """Return the PSNR in decibels of frames in [0, 1], and print it for `pytest -rP`."""
    decibels = -10 * np.log10(np.mean((frames - exact) ** 2))
    print(f"frames {decibels:.0f} dB")
    return decibels


def t5_reference(family: str, **sizes: int) -> torch.nn.Module:
    config, model = T5_FAMILIES[family]
    torch.manual_seed(0)
    reference = model(config(**T5_SIZES | sizes)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # norms differ from one, position biases are as large as logits, the softmax is peaked
        for name, weight in reference.named_parameters():
            if "layer_norm" in name:
                weight.copy_(1 + 0.3 * torch.randn(weight.shape, generator=generator))
            elif "relative_attention_bias" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator))
            elif name.endswith("SelfAttention.q.weight"):
                weight.mul_(3)
    return reference


def convert_t5(reference: torch.nn.Module, folder: Path, dtype=jnp.float32) -> T5Encoder:
    """Convert a model through the files that transformers writes."""
    reference.save_pretrained(folder)
    config = t5_config(json.loads((folder / "config.json").read_text()))
    abstract = as_shapes(lambda rngs: T5Encoder(config, dtype=dtype, param_dtype=dtype, rngs=rngs))
    return modules.load(abstract, t5_weight_rules(config), SafetensorsFolder(folder))


NAG_NUMBERS = (11.0, 2.5, 0.25)
"""Scale, tau and alpha of NAG in tests of networks."""


def nag(y: torch.Tensor, negative: torch.Tensor, scale: float, tau: float, alpha: float) -> torch.Tensor:
    """Compute NAG: limit the ratio of norms of each token to tau, and mix the result with the original token."""
    guided = y + (scale - 1) * (y - negative)
    ratio = guided.norm(p=1, dim=-1, keepdim=True) / y.norm(p=1, dim=-1, keepdim=True)
    return alpha * guided * torch.where(ratio > tau, tau / ratio, 1.0) + (1 - alpha) * y


class NAGHook:
    """A hook that applies NAG to a reference's attention, before the last projection, in a batch of both prompts."""

    def __init__(self, numbers: tuple[float, float, float], first: int = 0):
        self.numbers, self.first = numbers, first

    def __call__(self, module: torch.nn.Module, options: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        y, negative = options[0][:, self.first :].chunk(2)
        guided = nag(y, negative, *self.numbers)
        return (torch.cat([options[0][:, : self.first], torch.cat([guided, guided])], dim=1), *options[1:])


def add_hook(reference: torch.nn.Module, ends: str, hook: NAGHook) -> torch.nn.Module:
    """Add a hook to the projections whose names end with `ends`, and return the reference."""
    projections = [
        module for name, module in reference.named_modules() if name.endswith(ends) and "refiner" not in name
    ]
    assert len(projections) == 3, projections
    for module in projections:
        module.register_forward_pre_hook(hook)
    return reference


def compare_with_nag(result: Any, expected: np.ndarray, unguided: np.ndarray) -> None:
    """Compare a result with the first half of a reference's batch under NAG, which differs from one without NAG."""
    first, second = np.split(expected, 2)
    assert relative_l2(second, first) <= 1e-6
    assert relative_l2(result, first) <= 1e-5  # the bound of the networks themselves
    assert relative_l2(unguided, first) > 1e-2
