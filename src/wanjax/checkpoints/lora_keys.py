# SPDX-License-Identifier: Apache-2.0
"""Parse the keys of LoRA files. A key names the module and expert that a tensor changes, and the tensor's role.

A key consists of wrappers, a module's or tensor's name, and a suffix for the role. Wrappers are the names of objects
around the network. `strip_wrappers` removes wrappers only until the remaining name exists in the network, so a module
may have the name of a wrapper. Sources: PEFT (utils/save_and_load.py), diffusers (loaders/lora_conversion_utils.py),
ComfyUI (comfy/lora.py and comfy/weight_adapter), LyCORIS (modules/*.py), musubi-tuner (convert_lora.py), ai-toolkit
(toolkit/network_mixins.py, wan22_14b_model.py), LightX2V (utils/lora_loader.py), DiffSynth-Studio.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from wanjax.errors import WanjaxError

HIGH, LOW = "high", "low"  # a model's two experts
MAX_STRENGTH = 10  # the largest absolute strength of a LoRA; 1 is usual
PEFT_PREFIX = "base_model.model."  # PEFT's files have this prefix in every key, so it identifies a renamed file too
EXPERTS = {  # wrappers that name one of two experts
    **{"transformer_1.": HIGH, "transformer_2.": LOW, "lora_transformer_1_": HIGH, "lora_transformer_2_": LOW},
    **{"high_noise_model.": HIGH, "low_noise_model.": LOW, "high_noise.": HIGH, "low_noise.": LOW, "dit2.": LOW},
}
WRAPPERS = (
    *EXPERTS,
    *("base_model.", "model.", "diffusion_model.", "transformer.", "unet.", "dit.", "pipe.", "module.", "_orig_mod."),
    *("generator.", "net.", "lycoris.", "lycoris_"),
    *("lora_unet__", "lora_unet_", "lora_transformer_", "lora_dit_"),  # VideoX-Fun writes two underscores
)
ADAPTER_NAME = r"(?:\.(?!(?:weight|bias)$)[^.]+)?"  # PEFT's optional name of the adapter
MAX_WRAPPERS = 8  # no trainer writes more wrappers; memory grows with the square of their number
ROW_MAGNITUDE = "magnitude of rows"  # DoRA's norms from PEFT or ai-toolkit; LyCORIS also writes norms of columns
# (pattern of the suffix, role, suffix of the changed tensor); `{}` in a role stands for the matched group
KEY_SUFFIXES = [
    (re.compile(f"(?:{pattern})$"), role, suffix)
    for pattern, role, suffix in (
        (rf"\.lora_A{ADAPTER_NAME}(?:\.weight)?", "down", ".weight"),
        (rf"\.lora_B{ADAPTER_NAME}(?:\.weight)?", "up", ".weight"),
        (r"(?:\.lora_|[._]lora\.|\.lora_linear_layer\.)(down|up|mid)\.weight", "{}", ".weight"),
        (rf"\.lora_E{ADAPTER_NAME}(?:\.weight)?", "diagonal", ".weight"),
        (rf"\.(hada_w[12]_[ab]|hada_t[12]|lokr_w[12](?:_[ab])?|lokr_t2){ADAPTER_NAME}(?:\.weight)?", "{}", ".weight"),
        (rf"\.(?:lora_magnitude_vector|magnitude){ADAPTER_NAME}(?:\.weight)?", ROW_MAGNITUDE, ".weight"),
        (r"\.dora_scale", "magnitude", ".weight"),
        (r"\.alpha", "alpha", ".weight"),
        (r"\.(?:diff|w_norm)", "diff", ".weight"),
        (r"\.(?:diff_b|b_norm)", "diff", ".bias"),
        (r"\.diff_m", "diff", ".modulation"),
        (rf"\.lora_B{ADAPTER_NAME}\.bias", "scaled diff", ".bias"),
        (rf"\.(?:base_layer|modules_to_save{ADAPTER_NAME})\.bias", "value", ".bias"),
        (rf"\.modules_to_save{ADAPTER_NAME}\.weight", "value", ".weight"),
        (r"\.lora_velora_embed", "unused", ".weight"),  # a tensor of VeLoRA that only training uses
    )
]
SUPPORTED_KINDS = "supported are LoRA, DoRA, LoHa, LoKr, AdaLoRA and differences"
UNSUPPORTED_KINDS = {  # a part of a key, and its kind of change; `UNSUPPORTED_KEY` matches other kinds by name
    "lora_diag": "KaSA, which also changes the base weights' singular values",
    "lora_monteclora_sampler": "MonteCLoRA",
    "ia3_l": "IA3",
    "on_input": "IA3",
    "reshape_weight": "a weight of another shape",
    "lambda_layer": "T-LoRA",
}
UNSUPPORTED_KEY = re.compile(
    rf"(?:^|\.)(?P<part>{'|'.join(UNSUPPORTED_KINDS)}|(?P<kind>hira|p?vera|delora|gralora|miss|bone|randlora|tinylora|unilora|lily|"
    r"glora|psoft|vblora|fourierft|b?oft|shira|waveft|c3a|road|trainable_tokens)_\w+)(?:\.|$)"
)


class ParsedKey(NamedTuple):
    """A parsed key.

    Args:
        key: The key.
        module: The module that the key's tensor changes.
        role: The tensor's role in the change.
        suffix: The suffix of the changed tensor's name.
        expert: The expert that the key's wrappers name, or None.
        peft: PEFT's name of the module.
    """

    key: str
    module: str
    role: str
    suffix: str
    expert: str | None
    peft: str


def key_expert(key: str) -> str | None:
    """Return the expert that a key's wrappers name, or None."""
    return next((EXPERTS[wrapper] for wrapper, _ in _wrappers(key) if wrapper in EXPERTS), None)


def file_experts(keys: Iterable[str]) -> set[str]:
    """Return the experts that a file's keys name; empty if the file has one LoRA for all networks.

    If a file has keys of the low-noise expert, keys without an expert belong to the high-noise expert.
    """
    experts = {key_expert(key) for key in keys}
    return {expert or HIGH for expert in experts} if LOW in experts else {expert for expert in experts if expert}


def parse_key(key: str, names: Collection[str]) -> ParsedKey | None:
    """Parse a key, given the names of the network's modules and tensors; return None for an unknown suffix."""
    for pattern, role, suffix in KEY_SUFFIXES:
        if match := pattern.search(key):
            module = key[: match.start()]
            module_name = strip_wrappers(module, names)
            peft = module.removeprefix(PEFT_PREFIX) if module.startswith(PEFT_PREFIX) else module_name
            return ParsedKey(key, module_name, role.format(*match.groups()), suffix, key_expert(key), peft)
    return None


def strip_wrappers(name: str, known_names: Collection[str]) -> str:
    """Remove wrappers from a name until the remaining name is known.

    If no remaining name is known, remove all wrappers.
    """
    names = [name, *(rest for _, rest in _wrappers(name))]
    return next((candidate for candidate in names if candidate in known_names), names[-1])


def check_supported(key: str, path: object) -> None:
    """Raise WanjaxError for a key of an unsupported kind of change."""
    if match := UNSUPPORTED_KEY.search(key):
        kind = UNSUPPORTED_KINDS.get(match["part"]) or f"the kind {match['kind']}"
        raise WanjaxError(f"{path} contains {key}, a change of an unsupported kind, {kind}: {SUPPORTED_KINDS}")


def _wrappers(name: str) -> Iterator[tuple[str, str]]:
    """Yield (wrapper, remaining name) for each wrapper with which a name can begin."""
    for _ in range(MAX_WRAPPERS):
        wrapper = next(filter(name.startswith, WRAPPERS), "")
        if not wrapper:
            return
        name = name.removeprefix(wrapper)
        yield wrapper, name
