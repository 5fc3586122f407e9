# SPDX-License-Identifier: Apache-2.0
"""The keys of LoRA files: the module and expert that a tensor changes, and its role.

A key is wrappers, a module or tensor by its name in the network, and an ending that tells the role. Wrappers are names
of what holds the network, in any order and number: they are taken off until the rest is known, so a network may have a
module of a wrapper's name. Sources: PEFT (utils/save_and_load.py), diffusers (loaders/lora_conversion_utils.py),
ComfyUI (comfy/lora.py and comfy/weight_adapter), LyCORIS (modules/*.py), musubi-tuner (convert_lora.py), ai-toolkit
(toolkit/network_mixins.py, wan22_14b_model.py), LightX2V (utils/lora_loader.py), DiffSynth-Studio.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from wanjax.errors import WanjaxError

HIGH, LOW = "high", "low"  # a model's two experts
MAX_STRENGTH = 10  # of a LoRA, in either direction; 1 is usual
PEFT_PREFIX = "base_model.model."  # of the keys in PEFT's files, by which a renamed one is known
EXPERTS = {  # wrappers of one of two experts
    **{"transformer_1.": HIGH, "transformer_2.": LOW, "lora_transformer_1_": HIGH, "lora_transformer_2_": LOW},
    **{"high_noise_model.": HIGH, "low_noise_model.": LOW, "high_noise.": HIGH, "low_noise.": LOW, "dit2.": LOW},
}
WRAPPERS = (
    *EXPERTS,
    *("base_model.", "model.", "diffusion_model.", "transformer.", "unet.", "dit.", "pipe.", "module.", "_orig_mod."),
    *("generator.", "net.", "lycoris.", "lycoris_"),
    *("lora_unet__", "lora_unet_", "lora_transformer_", "lora_dit_"),  # VideoX-Fun's writes two underscores
)
SOME = r"(?:\.(?!(?:weight|bias)$)[^.]+)?"  # PEFT's name of the adapter, where it is kept
MOST_WRAPPERS = 8  # of a key; a longer chain is no key of a trainer, and would take memory by its square
OF_ROWS = "magnitude of rows"  # DoRA's by PEFT and ai-toolkit; LyCORIS has those of columns too
ENDINGS = [  # the end of a key -> the role, `{}` for the end's own word, and the end of the changed tensor's name
    (re.compile(f"(?:{pattern})$"), role, leaf)
    for pattern, role, leaf in (
        (rf"\.lora_A{SOME}(?:\.weight)?", "down", ".weight"),
        (rf"\.lora_B{SOME}(?:\.weight)?", "up", ".weight"),
        (r"(?:\.lora_|[._]lora\.|\.lora_linear_layer\.)(down|up|mid)\.weight", "{}", ".weight"),
        (rf"\.lora_E{SOME}(?:\.weight)?", "diagonal", ".weight"),
        (rf"\.(hada_w[12]_[ab]|hada_t[12]|lokr_w[12](?:_[ab])?|lokr_t2){SOME}(?:\.weight)?", "{}", ".weight"),
        (rf"\.(?:lora_magnitude_vector|magnitude){SOME}(?:\.weight)?", OF_ROWS, ".weight"),
        (r"\.dora_scale", "magnitude", ".weight"),
        (r"\.alpha", "alpha", ".weight"),
        (r"\.(?:diff|w_norm)", "diff", ".weight"),
        (r"\.(?:diff_b|b_norm)", "diff", ".bias"),
        (r"\.diff_m", "diff", ".modulation"),
        (rf"\.lora_B{SOME}\.bias", "scaled diff", ".bias"),
        (rf"\.(?:base_layer|modules_to_save{SOME})\.bias", "value", ".bias"),
        (rf"\.modules_to_save{SOME}\.weight", "value", ".weight"),
        (r"\.lora_velora_embed", "unused", ".weight"),  # VeLoRA's, of activations in training
    )
]
KINDS = "LoRA, DoRA, LoHa, LoKr, AdaLoRA and differences are merged"
OTHER_KINDS = {  # parts of keys of changes by other formulas -> their kind; others tell it themselves
    "lora_diag": "KaSA, which changes the base's singular values too",
    "lora_monteclora_sampler": "MonteCLoRA",
    "ia3_l": "IA3",
    "on_input": "IA3",
    "reshape_weight": "a weight of another shape",
    "lambda_layer": "T-LoRA",
}
OTHER = re.compile(
    rf"(?:^|\.)(?P<part>{'|'.join(OTHER_KINDS)}|(?P<kind>hira|p?vera|delora|gralora|miss|bone|randlora|tinylora|unilora|lily|"
    r"glora|psoft|vblora|fourierft|b?oft|shira|waveft|c3a|road|trainable_tokens)_\w+)(?:\.|$)"
)


class Part(NamedTuple):
    """A tensor of a file: its key, the module that it changes, its role, and the end of the changed tensor's name.

    `expert` is that of a wrapper, `peft` the name by which PEFT knows the module.
    """

    key: str
    module: str
    role: str
    leaf: str
    expert: str | None
    peft: str


def expert_of(key: str) -> str | None:
    """Return the expert in a key's wrappers, or None."""
    return next((EXPERTS[wrapper] for wrapper, _ in _unwrapped(key) if wrapper in EXPERTS), None)


def experts_of(keys: Iterable[str]) -> set[str]:
    """Return the experts that a file's keys name; empty if it has one LoRA for all.

    Keys that tell no expert are of the first in a file that has keys of the second.
    """
    experts = {expert_of(key) for key in keys}
    return {expert or HIGH for expert in experts} if LOW in experts else {expert for expert in experts if expert}


def part_of(key: str, names: Collection[str]) -> Part | None:
    """Parse a key; return None if its end has no role.

    names: the names of the network's modules and tensors.
    """
    for pattern, role, leaf in ENDINGS:
        if ending := pattern.search(key):
            module = key[: ending.start()]
            bare = unwrapped(module, names)
            peft = module.removeprefix(PEFT_PREFIX) if module.startswith(PEFT_PREFIX) else bare
            return Part(key, bare, role.format(*ending.groups()), leaf, expert_of(key), peft)
    return None


def unwrapped(name: str, known_names: Collection[str]) -> str:
    """Return a name without its wrappers, up to the first rest that is a known name."""
    names = [name, *(rest for _, rest in _unwrapped(name))]
    return next((each for each in names if each in known_names), names[-1])


def check_kind(key: str, path: object) -> None:
    """Raise WanjaxError for a key of a change by a formula that is not read."""
    if other := OTHER.search(key):
        kind = OTHER_KINDS.get(other["part"]) or f"the kind {other['kind']}"
        raise WanjaxError(f"{path} holds {key}, a change by {kind}: {KINDS}, others are not")


def _unwrapped(name: str) -> Iterator[tuple[str, str]]:
    """Yield the wrappers at the beginning of a name, each with the rest of the name."""
    for _ in range(MOST_WRAPPERS):
        wrapper = next(filter(name.startswith, WRAPPERS), "")
        if not wrapper:
            return
        name = name.removeprefix(wrapper)
        yield wrapper, name
