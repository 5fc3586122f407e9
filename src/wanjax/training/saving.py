# SPDX-License-Identifier: Apache-2.0
"""Write the result of training: a LoRA file in a common format, or a full checkpoint."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from wanjax.checkpoints.convert import ConversionToWanjax
from wanjax.checkpoints.files import save_safetensors
from wanjax.checkpoints.lora import WANJAX_METADATA
from wanjax.checkpoints.lora_scales import PEFT_METADATA
from wanjax.checkpoints.modules import ExportedTensors, parameters
from wanjax.checkpoints.network_kinds import Network
from wanjax.checkpoints.readers import TensorReaderView
from wanjax.checkpoints.sources import Component, Source
from wanjax.errors import WanjaxError
from wanjax.pipelines.video_metadata import VERSION
from wanjax.training.adapters import LoraConfig

LoraFormat = Literal["diffusers", "comfy"]
DIFFUSERS_PREFIX, COMFY_PREFIX = "transformer", "diffusion_model"  # prefixes of keys
FACTOR_SUFFIXES = (".lora_A.weight", ".lora_B.weight")
# the last two suffixes are for a projection that is trained at full rank
SUFFIXES = (*FACTOR_SUFFIXES, ".diff", ".diff_b")


def save_lora(
    path: Path,
    factors: Mapping[str, np.ndarray],
    config: LoraConfig,
    network: Network,
    *,
    lora_format: LoraFormat = "diffusers",
    training_info: Mapping[str, Any] | None = None,
) -> None:
    """Write a LoRA file.

    Args:
        path: The file.
        factors: The factors by diffusers' names, as `adapters.export_factors` returns them.
        config: The LoRA.
        network: The network that the LoRA adapts.
        lora_format: `diffusers` or `comfy`. With `diffusers`, keys begin with `transformer`, also for a second expert,
            and the metadata has PEFT's config. With `comfy`, modules have the model authors' names, and each module has
            an alpha.
        training_info: JSON for the metadata.

    Raises:
        WanjaxError: The file cannot be written, or the authors' names are unknown.
    """
    metadata = {
        "format": "pt",
        WANJAX_METADATA: json.dumps({"version": VERSION, **(training_info or {})}, default=str),
    }
    if lora_format == "comfy":
        save_safetensors(path, dict(_comfy_tensors(factors, config, network)), metadata)
        return
    modules = sorted({key.removesuffix(FACTOR_SUFFIXES[0]) for key in factors if key.endswith(FACTOR_SUFFIXES[0])})
    peft_config = {
        "r": config.rank,
        "lora_alpha": config.scale * config.rank,
        "target_modules": modules,
        "lora_dropout": 0.0,
    }
    peft_config |= {
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "peft_type": "LORA",
        "init_lora_weights": True,
    }
    metadata[PEFT_METADATA] = json.dumps({f"{DIFFUSERS_PREFIX}.{name}": value for name, value in peft_config.items()})
    save_safetensors(path, {f"{DIFFUSERS_PREFIX}.{key}": value for key, value in factors.items()}, metadata)


def _comfy_tensors(
    factors: Mapping[str, np.ndarray], config: LoraConfig, network: Network
) -> Iterable[tuple[str, np.ndarray]]:
    """Yield the factors with the model authors' names, and an alpha for each module."""
    names = network.kind.lora_names
    if names is None:
        raise WanjaxError(
            "the LoRA format comfy needs the authors' names of the weights, which are unknown for this model: give "
            "the format diffusers"
        )
    for key, value in factors.items():
        suffix = next(suffix for suffix in SUFFIXES if key.endswith(suffix))
        module = key.removesuffix(suffix)
        weight = f"{module}.weight"
        author_name = (names.to_authors(weight) or weight).removesuffix(".weight")
        if suffix == FACTOR_SUFFIXES[1] and names.swaps_halves(weight):
            value = np.concatenate(np.split(value, 2)[::-1])
        yield f"{COMFY_PREFIX}.{author_name}{suffix}", value
        if suffix == FACTOR_SUFFIXES[0]:
            yield f"{COMFY_PREFIX}.{author_name}.alpha", np.asarray(config.scale * config.rank, np.float32)


def save_checkpoint(
    source: Source, trained_networks: Mapping[str, tuple[Any, Network]], target: Path, kinds: Any
) -> None:
    """Write a copy of a checkpoint, with trained networks in place of the original ones. Raises the errors of
    `convert`.

    Args:
        source: The checkpoint that was trained.
        trained_networks: Trained networks by component, each with its description.
        target: The folder to write.
        kinds: The kinds of networks.
    """

    def component(name: str, network: Any, info: Network) -> Component:
        values = {path: np.asarray(x) for path, x in parameters(network).items()}
        return replace(source[name], weights=lambda: TensorReaderView(ExportedTensors(values, info.rules)), changes=())

    components = {name: component(name, *entry) for name, entry in trained_networks.items()}
    replaced_fields = {"published_name": f"{source.published_name}, trained", "loras": (), "base": None}
    ConversionToWanjax(source.with_components(components, **replaced_fields), target, kinds).run()
