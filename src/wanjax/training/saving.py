# SPDX-License-Identifier: Apache-2.0
"""The outcome of a training: a LoRA file in a format that others load, or a whole checkpoint."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from wanjax.checkpoints.convert import ToWanjax
from wanjax.checkpoints.files import save_safetensors
from wanjax.checkpoints.lora import OWN
from wanjax.checkpoints.lora_scales import PEFT_METADATA
from wanjax.checkpoints.modules import Exported, parameters
from wanjax.checkpoints.network_kinds import Network
from wanjax.checkpoints.readers import View
from wanjax.checkpoints.sources import Component, Source
from wanjax.errors import WanjaxError
from wanjax.pipelines.video_metadata import VERSION
from wanjax.training.adapters import LoraConfig

LoraFormat = Literal["diffusers", "comfy"]
DIFFUSERS, COMFY = "transformer", "diffusion_model"  # prefixes of keys
FACTOR = (".lora_A.weight", ".lora_B.weight")
ENDINGS = (*FACTOR, ".diff", ".diff_b")  # the latter two of a projection that is learned whole


def save_lora(
    path: Path,
    factors: Mapping[str, np.ndarray],
    config: LoraConfig,
    network: Network,
    *,
    lora_format: LoraFormat = "diffusers",
    training_info: Mapping[str, Any] | None = None,
) -> None:
    """Write factors by the names of diffusers to a LoRA file; `training_info` is JSON for the metadata.

    In the format of diffusers keys begin with `transformer`, for a second expert too, and the metadata hold PEFT's
    config. In ComfyUI's the modules have the authors' names, and an alpha each. Raises WanjaxError where
    it cannot be written.
    """
    metadata = {"format": "pt", OWN: json.dumps({"version": VERSION, **(training_info or {})}, default=str)}
    if lora_format == "comfy":
        save_safetensors(path, dict(_comfy(factors, config, network)), metadata)
        return
    modules = sorted({key.removesuffix(FACTOR[0]) for key in factors if key.endswith(FACTOR[0])})
    peft = {"r": config.rank, "lora_alpha": config.scale * config.rank, "target_modules": modules, "lora_dropout": 0.0}
    peft |= {"use_rslora": False, "use_dora": False, "bias": "none", "peft_type": "LORA", "init_lora_weights": True}
    metadata[PEFT_METADATA] = json.dumps({f"{DIFFUSERS}.{name}": value for name, value in peft.items()})
    save_safetensors(path, {f"{DIFFUSERS}.{key}": value for key, value in factors.items()}, metadata)


def _comfy(factors: Mapping[str, np.ndarray], config: LoraConfig, network: Network) -> Iterable[tuple[str, np.ndarray]]:
    """Yield the factors by the authors' names, and an alpha for each module."""
    names = network.kind.lora_names
    if names is None:
        raise WanjaxError("the LoRA format comfy has the authors' names, which this model lacks: give diffusers")
    for key, value in factors.items():
        ending = next(ending for ending in ENDINGS if key.endswith(ending))
        module = key.removesuffix(ending)
        weight = f"{module}.weight"
        author_name = (names.theirs(weight) or weight).removesuffix(".weight")
        if ending == FACTOR[1] and names.exchanges(weight):
            value = np.concatenate(np.split(value, 2)[::-1])
        yield f"{COMFY}.{author_name}{ending}", value
        if ending == FACTOR[0]:
            yield f"{COMFY}.{author_name}.alpha", np.asarray(config.scale * config.rank, np.float32)


def save_checkpoint(source: Source, trained: Mapping[str, tuple[Any, Network]], target: Path, kinds: Any) -> None:
    """Write a checkpoint with trained networks in place of the source's; raise WanjaxError as `convert` does.

    Args:
        source: The checkpoint that was trained.
        trained: Networks by component, each with what describes it.
        target: The folder to write.
        kinds: The kinds of networks.
    """

    def component(name: str, network: Any, info: Network) -> Component:
        values = {path: np.asarray(x) for path, x in parameters(network).items()}
        return replace(source[name], weights=lambda: View(Exported(values, info.rules)), changes=())

    components = {name: component(name, *each) for name, each in trained.items()}
    training_info = {"origin": f"{source.origin}, trained", "loras": (), "base": None}
    ToWanjax(source.changed(components, **training_info), target, kinds).run()
