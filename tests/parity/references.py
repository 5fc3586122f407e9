# SPDX-License-Identifier: Apache-2.0
"""Small random reference models, their weights moved into ours, and how far two answers are apart."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from wanjax.checkpoint import Spec
from wanjax.converters import engine
from wanjax.models.wan.transformer import WanTransformer
from wanjax.models.wan.vae import WanVAE
from wanjax.networks import NETWORKS


class StateDict:
    """A torch module's weights, read as the engine reads a checkpoint."""

    def __init__(self, module: torch.nn.Module):
        self.tensors = {key: value.detach().float().numpy() for key, value in module.state_dict().items()}

    def keys(self):
        return self.tensors.keys()

    def spec(self, key: str):
        return Spec(self.tensors[key].shape, self.tensors[key].dtype)

    def read(self, key: str):
        return self.tensors[key]


def relative_l2(answer: Any, reference: Any) -> float:
    a, b = (np.asarray(x, np.float64) for x in (answer, reference))
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def randomise(module: torch.nn.Module, seed: int) -> None:
    """Random values for every weight, those that start as zeros or ones included, so that each one matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim < 2 or parameter.squeeze().ndim < 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter == 1).float())


def channels_last(x: torch.Tensor) -> np.ndarray:
    """[B, C, T, H, W] to ours."""
    return np.ascontiguousarray(x.detach().float().numpy().transpose(0, 2, 3, 4, 1))


def wan_transformer(reference, dtype=jnp.float32, param_dtype=jnp.float32) -> WanTransformer:
    network = NETWORKS[type(reference).__name__](reference.config)
    return engine.load(network.abstract(dtype=dtype, param_dtype=param_dtype), network.rules, StateDict(reference))


def wan_vae(reference, dtype=jnp.float32, param_dtype=jnp.float32) -> WanVAE:
    network = NETWORKS["AutoencoderKLWan"](reference.config)
    return engine.load(network.abstract(dtype=dtype, param_dtype=param_dtype), network.rules, StateDict(reference))
