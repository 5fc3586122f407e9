# SPDX-License-Identifier: Apache-2.0
"""What a file of tensors holds, told by their names: a component in the authors' layout or in that of diffusers.

Files for ComfyUI have a prefix before every name, and may hold several components at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from wanjax.checkpoint import Reader
from wanjax.converters import original
from wanjax.converters.readers import Descaled, Flattened, Names, Renamed, Unfused
from wanjax.errors import WanjaxError

TELLING = {  # tensors that only this component has: as the authors name them, as diffusers and transformers do
    "transformer": ("time_projection.1.weight", "condition_embedder.time_proj.weight"),
    "vae": ("encoder.conv1.weight", "encoder.conv_in.weight"),
    "text_encoder": ("token_embedding.weight", "shared.weight"),
    "image_encoder": ("visual.pos_embedding", "vision_model.embeddings.position_embedding.weight"),
}
PREFIXES = {
    "transformer": ("", "model.diffusion_model.", "diffusion_model.", "model.", "transformer."),
    "vae": ("", "vae.", "first_stage_model."),
    "text_encoder": ("", "text_encoders.umt5xxl.transformer."),
    "image_encoder": ("",),
}
TOKENIZERS = ("spiece_model",)  # stored beside the weights of text encoders


class Part(NamedTuple):
    """A component: its config.json, and its tensors by the names of diffusers, or of transformers."""

    json: dict[str, Any]
    weights: Reader


def prefixes(keys: Sequence[str]) -> dict[str, str]:
    """The components that a file with these keys holds, and what stands before the names of each."""
    found, present = {}, set(keys)
    for component, telling in TELLING.items():
        for prefix in PREFIXES[component]:
            if any(prefix + name in present for name in telling):
                found[component] = prefix
                break
    return found


def parts(reader: Reader) -> dict[str, Part]:
    """The components that a file holds; raises WanjaxError where one of them is incomplete, or not Wan's."""
    found = prefixes(tuple(reader.keys()))
    return {component: part(component, _without(reader, prefix, found)) for component, prefix in found.items()}


def part(component: str, reader: Reader, given: Mapping[str, Any] | None = None) -> Part:
    """A component of a reader that holds nothing else, in either layout.

    given: the authors' config.json, where there is one. Raises WanjaxError where the tensors are not the component's.
    """
    reader = Descaled(reader)
    keys = set(reader.keys())
    if not any(name in keys for name in TELLING[component]):
        raise WanjaxError(f"the {component} lacks {' or '.join(TELLING[component])}: weights of Wan are needed")
    authors = TELLING[component][0] in keys
    match component:
        case "transformer":
            names = original.TRANSFORMER
            json = original.transformer_json(_theirs(reader, names, authors), given)
        case "vae":
            json, names = _vae(reader, authors)
        case "text_encoder":
            reader, names = Renamed(reader, _but(*TOKENIZERS)), original.TEXT_ENCODER
            json = original.text_encoder_json(_theirs(reader, names, authors))
        case _:
            reader, names = _vision(reader) if authors else reader, original.IMAGE_ENCODER
            json = original.image_encoder_json(_theirs(reader, names, authors))
    return Part(json, Renamed(reader, lambda key: names.ours(key) or key) if authors else reader)


def _without(reader: Reader, prefix: str, found: Mapping[str, str]) -> Reader:
    """The tensors behind a prefix; where there is none, those that belong to no other component."""
    others = tuple(other for other in found.values() if other and other != prefix)

    def rename(key: str) -> str | None:
        mine = key.startswith(prefix) and not (prefix == "" and key.startswith(others))
        return key.removeprefix(prefix) if mine else None

    return Renamed(reader, rename)


def _theirs(reader: Reader, names: Names, authors: bool) -> dict[str, Any]:
    """The shapes of the tensors by the authors' names."""
    return {key if authors else names.theirs(key) or key: reader.spec(key) for key in reader.keys()}  # noqa: SIM118


def _vae(reader: Reader, authors: bool) -> tuple[dict[str, Any], Names]:
    """An autoencoder's config, and its names, which depend on it: of diffusers' layout as published."""
    if authors:
        json = original.vae_json(_theirs(reader, Names([]), authors=True))
        return json, original.vae_names(json)
    nested = any(".downsampler." in key for key in reader.keys())  # noqa: SIM118
    names = original.vae_names({"dim_mult": range(4), "num_res_blocks": 2, "is_residual": nested})
    return original.vae_json(_theirs(reader, names, authors=False)), names


def _vision(reader: Reader) -> Reader:
    """The half of CLIP that sees, with its tensors shaped as transformers shapes them."""
    seeing = Renamed(reader, lambda key: key if key.startswith("visual.") and key != "visual.head" else None)
    return Unfused(Flattened(seeing, ("visual.cls_embedding", "visual.pos_embedding")))


def _but(*names: str):
    return lambda key: None if key in names else key
